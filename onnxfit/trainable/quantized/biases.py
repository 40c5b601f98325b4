"""The scales of biases of 32 bits, which follow the scales of their layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from onnxfit.errors import ModelError
from onnxfit.graph.index import NodeIndex
from onnxfit.graph.shared_tensors import array_of
from onnxfit.trainable.quantized.integer_weight import IntegerWeight
from onnxfit.trainable.quantized.integer_weights import integer_names, integer_weights
from onnxfit.trainable.quantized.operators import is_dequantize
from onnxfit.trainable.quantized.parameters import Array

LAYERS = ("Conv", "ConvTranspose", "Gemm")
# The file's own scale is kept if it equals the product within rounding.
TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class LayerBias:
    """A bias of 32 bits. Its scale is the product of the scales of the layer's input and weight.

    - `weight`: the bias.
    - `scales`: the initializers of the two scales, with the values that they have in the file.
    """

    weight: IntegerWeight
    scales: Sequence[tuple[str, Array]]

    def with_scales(self, changed: Mapping[str, Array]) -> IntegerWeight:
        """Return the bias with the scale that belongs to changed scales.

        onnxruntime adds the bias to sums of products of integers, which determines its scale.
        """
        old = self.weight.parameters.scale
        x_scale, w_scale = (changed.get(name, array).reshape(-1) for name, array in self.scales)
        new = (x_scale * w_scale).astype(old.dtype).reshape(old.shape)
        if np.allclose(new, old, rtol=TOLERANCE, atol=0):
            return self.weight
        return replace(self.weight, parameters=replace(self.weight.parameters, scale=new))


def layer_biases(file: onnx.ModelProto, changing: set[str]) -> dict[str, LayerBias]:
    """Return a mapping from name to bias, for layers with a scale that changes.

    - `file`: the file of integers.
    - `changing`: the scales that training changes.

    ModelError: a bias belongs to two layers with different scales.
    """
    scales = {
        t.name: array_of(t)
        for t in file.graph.initializer
        if t.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
    }
    pairs: dict[str, tuple[str, str]] = {}
    for layer, (x, w, b) in _dequantized_layers(file.graph):
        pair = x.input[1], w.input[1]
        if changing.isdisjoint(pair) or not scales.keys() >= {*pair, b.input[1]}:
            continue
        sizes = [scales[name].size for name in (*pair, b.input[1])]
        if sizes[0] != 1 or sizes[1] != sizes[2]:
            continue  # not the product: onnxruntime computes this layer in floats
        if pairs.setdefault(b.input[0], pair) != pair:
            raise ModelError(
                f"The bias {b.input[0]!r} of {layer.op_type} {layer.name!r} belongs to two layers"
                " with different scales, which training changes. Give each layer its own bias."
            )
    biases = integer_weights(file, pairs.keys() & {*integer_names(file)})
    return {
        bias.name: LayerBias(bias, [(name, scales[name]) for name in pairs[bias.name]])
        for bias in biases
        if bias.is_bias
    }


def _dequantized_layers(
    graph: onnx.GraphProto,
) -> Iterator[tuple[onnx.NodeProto, list[onnx.NodeProto]]]:
    """Yield each layer whose input, weight and bias are dequantized, with these three nodes."""
    makers = NodeIndex([node for node in graph.node if is_dequantize(node)]).producers
    for node in graph.node:
        if node.op_type in LAYERS and len(node.input) == 3 and makers.keys() >= {*node.input}:
            yield node, [makers[name] for name in node.input]
