"""Quantize the weights of layers, and leave activations in float."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.graph import protos
from onnxfit.graph.index import tensors_of
from onnxfit.graph.replacement import replace_nodes
from onnxfit.graph.subgraphs import read_by
from onnxfit.runtime.quantizer import quantize_array
from onnxfit.runtime.values import Array
from onnxfit.tools.quantization.weight_axes import channel_axes
from onnxfit.trainable.quantized.operators import DEQUANTIZE, SUFFIX


def quantize_weights_only(
    optimized: onnx.ModelProto, weights: str, per_channel: bool, excluded: set[str]
) -> onnx.ModelProto:
    """Return the model with each weight replaced by integers and a DequantizeLinear.

    - `optimized`: a model with unique node names. It is changed.
    - `weights`: the type of the integers.
    - `per_channel`: whether each output channel of a weight has its own scale.
    - `excluded`: names of nodes whose weights stay in float.
    """
    tensors = tensors_of(optimized.graph)
    nodes = []
    dequantized: dict[str, str] = {}
    for name, axis in channel_axes(optimized, excluded).items():
        array = onnx.numpy_helper.to_array(tensors[name])
        made = quantize_array(array, weights, axis if per_channel else None)
        inputs = [f"{name}{SUFFIX}", f"{name}_scale", f"{name}_zero_point"]
        optimized.graph.initializer.extend(map(_tensor, made, inputs))
        output = f"{name}_DequantizeLinear_Output"
        dequantized[name] = output
        nodes.append(
            onnx.helper.make_node(DEQUANTIZE, inputs, [output], f"{name}_DequantizeLinear")
        )
        if per_channel:
            nodes[-1].attribute.append(onnx.helper.make_attribute("axis", axis))
    for node in optimized.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = dequantized.get(name, name)
    read = {value.name for value in optimized.graph.output}.union(
        *(read_by(node) for node in optimized.graph.node)
    )
    for name in dequantized.keys() - read:
        protos.remove_initializer(optimized, name)
    replace_nodes(optimized.graph, [*nodes, *optimized.graph.node])
    return optimized


def _tensor(array: Array, name: str) -> onnx.TensorProto:
    return ir.to_proto(ir.tensor(np.asarray(array, order="C"), name=name))
