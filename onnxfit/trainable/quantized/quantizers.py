"""Find the scales and zero points of a training model that training may change."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.errors import DivergenceError, ModelError
from onnxfit.graph.index import GraphIndex
from onnxfit.graph.shared_tensors import array_of
from onnxfit.trainable.quantized.integer_weight import IntegerWeight
from onnxfit.trainable.quantized.operators import (
    integer_type,
    is_dequantize,
    is_quantize,
    numbers_of,
)
from onnxfit.trainable.quantized.parameters import LIMITS, Array


@dataclass(frozen=True, eq=False)
class Quantizer:
    """The scale and the zero point of the numbers to which a QuantizeLinear rounds.

    - `scale`, `zero_point`: their initializers; "" for no zero point.
    - `data_type`: the type of the integers.
    - `scales`, `zeros`: the scales and the zero points of the file.
    - `weight`: the name of the weight that is rounded, "" for an activation.
    """

    scale: str
    zero_point: str
    data_type: int
    scales: Array
    zeros: Array
    weight: str

    @property
    def lowest(self) -> int:
        """The least integer."""
        return LIMITS[self.data_type][0]

    @property
    def highest(self) -> int:
        """The greatest integer."""
        return LIMITS[self.data_type][1]

    @property
    def middle(self) -> int:
        """The zero point of symmetric numbers: 0 of int8, 128 of uint8."""
        return (self.lowest + self.highest + 1) // 2

    @property
    def is_symmetric(self) -> bool:
        """Whether the zero point is in the middle of the type."""
        return bool((self.zeros == self.middle).all())

    @property
    def learns_zero_point(self) -> bool:
        """Whether the zero point is learned: it is neither 0 nor in the middle."""
        return bool(self.zero_point and self.zeros.any() and not self.is_symmetric)

    @property
    def observes_zero_point(self) -> bool:
        """Whether the zero point follows the range of an activation."""
        return bool(self.zero_point and not self.is_symmetric)


def find_quantizers(
    model: onnx.ModelProto, weights: Mapping[str, IntegerWeight]
) -> list[Quantizer]:
    """Return the quantizers of a training model whose scales are initializers.

    - `model`: the training model, whose main graph is searched.
    - `weights`: the integer weights by name, of which the model has floats.

    Two quantizers may share a scale or a zero point.

    ModelError: integers are read through two scales.
    """
    graph = model.graph
    index = GraphIndex(graph)
    tensors = index.tensors
    _require_one_scale(index, weights.values())
    found: dict[tuple[str, str], Quantizer] = {}
    for node in quantize_nodes(graph):
        scale, zero_point = [*node.input, ""][1:3]
        if scale not in tensors or (zero_point and zero_point not in tensors):
            continue  # computed from the batch
        own_type = tensors[zero_point].data_type if zero_point else 0
        data_type = integer_type(own_type, {a.name: a.i for a in node.attribute})
        if data_type not in LIMITS:
            continue  # floats of 8 bits
        numbers = array_of(tensors[scale])
        zeros = numbers_of(tensors[zero_point]) if zero_point else np.zeros((), np.int64)
        quantizer = Quantizer(
            scale, zero_point, data_type, numbers, zeros, _weight_of(node, weights, index)
        )
        found.setdefault((scale, zero_point), quantizer)
    return list(found.values())


def _weight_of(
    node: onnx.NodeProto, weights: Mapping[str, IntegerWeight], index: GraphIndex
) -> str:
    """Return the weight that a QuantizeLinear rounds, with or without its shift; "" for none."""
    value = node.input[0]
    maker = index.producers.get(value)
    if maker is not None and maker.op_type == "Add":
        weight, shift = maker.input
        value = weight if weight in weights and weights[weight].shift == shift else value
    return value if value in weights else ""


def quantize_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Return the QuantizeLinears of a graph."""
    return filter(is_quantize, graph.node)


def rounded_values(graph: ir.Graph, scale: str) -> list[ir.Value]:
    """Return the values that the QuantizeLinears with a scale round, in the order of the graph."""
    return [
        node.inputs[0]
        for node in graph
        if is_quantize(node) and node.inputs[0] is not None
        if node.inputs[1] is not None and node.inputs[1].name == scale
    ]


def scales_to_write(
    quantizers: Sequence[Quantizer], arrays: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the trained scales and zero points for the file, by name.

    - `quantizers`: the quantizers that training changed.
    - `arrays`: the trained weights and statistics; zero points among them are floats.

    DivergenceError: a number is NaN, or a scale is invalid.
    """
    written: dict[str, Array] = {}
    for quantizer in quantizers:
        if quantizer.scale in arrays:
            scale = arrays[quantizer.scale]
            _refuse_numbers(
                quantizer.scale, scale, np.isfinite(scale) & (scale * quantizer.scales > 0)
            )
            written[quantizer.scale] = scale
        if quantizer.zero_point in arrays:
            zeros = arrays[quantizer.zero_point]
            _refuse_numbers(quantizer.zero_point, zeros, ~np.isnan(zeros))
            rounded = np.clip(np.rint(zeros), quantizer.lowest, quantizer.highest)
            written[quantizer.zero_point] = rounded.astype(np.int64)
    return written


def _refuse_numbers(name: str, array: Array, valid: npt.NDArray[np.bool_]) -> None:
    if not valid.all():
        raise DivergenceError(
            f"The trained {name!r} contains {array[~valid].flat[0]:g}. A scale must be positive"
            " and finite, and a zero point must not be NaN. Load an earlier checkpoint, or train"
            " with a smaller learning rate."
        )


def _require_one_scale(index: GraphIndex, weights: Collection[IntegerWeight]) -> None:
    """Raise ModelError for integers that DequantizeLinears read through several scales."""
    own = {weight.name: [weight.scale_name, weight.zero_point_name] for weight in weights}
    for node in index.nodes:
        if not is_dequantize(node) or node.input[0] not in index.producers:
            continue
        name = next(iter(index.producers[node.input[0]].input), "")
        if name in own and [*node.input, ""][1:3] != own[name]:
            raise ModelError(
                f"The integers {name!r} are read through two scales, {own[name][0]!r} and"
                f" {node.input[1]!r}, which training would change separately. Give each"
                " DequantizeLinear its own integers, or use one scale."
            )


def shared_zero_points(quantizers: Sequence[Quantizer]) -> dict[str, list[str]]:
    """Return a mapping from zero point to scales, for moving zero points with several scales."""
    scales: dict[str, list[str]] = {}
    for quantizer in quantizers:
        if quantizer.observes_zero_point:
            scales.setdefault(quantizer.zero_point, []).append(quantizer.scale)
    return {name: names for name, names in scales.items() if len(names) > 1}
