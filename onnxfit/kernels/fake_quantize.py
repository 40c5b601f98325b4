"""Rounded values as floats, without the integers in between.

QuantizeLinear and DequantizeLinear together compute s (clip(round(x / s) + z) - z). In a training
step, nothing else reads the integers, so the operators of that formula compute the same floats, and
become one program with the operators around them. The bounds of the integers are those of round(x /
s), less z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from onnxfit.graph.index import GraphIndex, attributes_of
from onnxfit.kernels.search import ResultType, make_node, trains
from onnxfit.kernels.spread import add_spread, spread_along

ROUNDING, REVERSE = "QuantizeLinear", "DequantizeLinear"
DOMAINS = ("", "com.microsoft")
# Their bounds are exact in float32, and so are the differences.
INTEGERS = {
    TensorProto.INT4,
    TensorProto.UINT4,
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.INT16,
    TensorProto.UINT16,
}
DEFAULT_AXIS = 1
Array = npt.NDArray[np.float32]


def replace_roundings(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: dict[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a training step, with operators of floats for each QuantizeLinear whose
    integers only DequantizeLinear reads.

    The nodes are returned themselves if there is none. `types` gets the types of the results.
    """
    if not trains(nodes) or not any(node.op_type == ROUNDING for node in nodes):
        return nodes
    index = GraphIndex(graph, nodes)
    replaced: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        rounding = _Rounding.of(node, index, types)
        if rounding is not None:
            replaced |= rounding.nodes(types)
    if not replaced:
        return nodes
    return [new for node in nodes for new in replaced.get(node.output[0], [node])]


@dataclass(frozen=True)
class _Rounding:
    """A QuantizeLinear, and the nodes that read its integers.

    - `axis`, `block_size`: the axis of scales and zero points, and the indices that share them.
    - `zeros`: the zero points.
    """

    node: onnx.NodeProto
    readers: Sequence[onnx.NodeProto]
    result: ResultType
    axis: int
    block_size: int
    limits: tuple[float, float]
    zeros: Array

    @classmethod
    def of(
        cls, node: onnx.NodeProto, index: GraphIndex, types: Mapping[str, ResultType]
    ) -> _Rounding | None:
        """Return what to replace; None if the node is not a QuantizeLinear, or has to stay."""
        if node.op_type != ROUNDING or node.domain not in DOMAINS:
            return None
        x, integers = (types.get(name) for name in (node.input[0], node.output[0]))
        if x is None or integers is None or integers.element not in INTEGERS:
            return None
        floats = [x, *(types.get(name) for name in node.input[1:2])]
        if any(v is None or v.element != TensorProto.FLOAT for v in floats) or x.is_scalar:
            return None
        zeros = _zero_points(node, index)
        readers = index.readers[node.output[0]]
        if zeros is None or not readers or node.output[0] in index.outputs:
            return None
        given = attributes_of(node)
        axis, block_size = given.get("axis", DEFAULT_AXIS), given.get("block_size", 0)
        axis = axis % len(x.shape)
        rounding = cls(node, readers, x, axis, block_size, _limits(integers.element), zeros)
        return rounding if all(rounding._reverses(each, index, types) for each in readers) else None

    def _reverses(
        self, reader: onnx.NodeProto, index: GraphIndex, types: Mapping[str, ResultType]
    ) -> bool:
        """Return whether a node makes floats of the integers, with the same zero points."""
        if reader.op_type != REVERSE or reader.domain not in DOMAINS:
            return False
        scale, y = types.get(reader.input[1]), types.get(reader.output[0])
        own = types[self.node.input[1]]
        if scale is None or y is None or {scale.element, y.element} != {TensorProto.FLOAT}:
            return False
        given = attributes_of(reader)
        zeros = _zero_points(reader, index)
        reads_once = [*reader.input].index(self.node.output[0]) == 0
        if zeros is None or not np.array_equal(zeros, self.zeros) or not reads_once:
            return False
        if self.zeros.size > 1 and self.zeros.shape != own.shape:
            return False
        if own.is_scalar and scale.is_scalar:
            return True
        has_axis = given.get("axis", DEFAULT_AXIS) % len(self.result.shape) == self.axis
        fits = given.get("block_size", 0) == self.block_size and scale.shape == own.shape
        by = spread_along(self.result.shape, self.axis, self.block_size)
        has_size = isinstance(self.result.shape[self.axis], int)
        return has_axis and fits and has_size and by is not None

    def nodes(self, types: dict[str, ResultType]) -> dict[str, list[onnx.NodeProto]]:
        """Return the nodes that compute the floats, by the outputs that they take the place of."""
        x, scale = self.node.input[:2]
        integers = self.node.output[0]
        made: list[onnx.NodeProto] = []

        def add(op_type: str, *inputs: str) -> str:
            name = f"{integers}/{op_type}"
            types[name] = self.result
            made.append(make_node(op_type, inputs, [name], name, domain=""))
            return name

        quotient = add("Div", x, self._spread(f"{integers}/scale", scale, made, types))
        whole = add("Round", quotient)
        low, high = (
            self._constant(f"{integers}/{name}", limit - self.zeros, made, types)
            for name, limit in zip(("low", "high"), self.limits)
        )
        if self.zeros.size == 1:
            inside = add("Clip", whole, low, high)
        else:
            inside = add("Min", add("Max", whole, low), high)
        # -0 becomes 0, as integers have one zero.
        level = add(
            "Add", inside, self._constant(f"{integers}/zero", np.zeros(1, np.float32), made, types)
        )
        replaced = {integers: made}
        for reader in self.readers:
            made = replaced[reader.output[0]] = []
            scale = self._spread(f"{reader.output[0]}/scale", reader.input[1], made, types)
            made.append(make_node("Mul", [level, scale], reader.output, reader.name, domain=""))
        return replaced

    def _constant(
        self, name: str, numbers: Array, made: list[onnx.NodeProto], types: dict[str, ResultType]
    ) -> str:
        """Add a constant: one number, or one for each scale."""
        is_one = numbers.size == 1
        numbers = numbers.reshape(()) if is_one else numbers
        value = helper.make_tensor(name, TensorProto.FLOAT, numbers.shape, numbers.ravel())
        types[name] = ResultType(TensorProto.FLOAT, numbers.shape)
        made.append(make_node("Constant", [], [name], name, value=value, domain=""))
        return name if is_one else self._spread(f"{name}/spread", name, made, types)

    def _spread(
        self, name: str, scales: str, made: list[onnx.NodeProto], types: dict[str, ResultType]
    ) -> str:
        """Return scales in a shape that broadcasts, and add the nodes that give them this shape."""
        if types[scales].is_scalar:
            return scales
        shape = self.result.shape
        made += add_spread(name, scales, shape, self.axis, self.block_size, types)
        return name


def _zero_points(node: onnx.NodeProto, index: GraphIndex) -> Array | None:
    """Return the zero points of a node as floats, one if they are equal; None if unknown."""
    name = node.input[2] if len(node.input) > 2 else ""
    if not name:
        return np.zeros(1, np.float32)
    if name not in index.constants:
        return None
    numbers = ir.serde.deserialize_tensor(index.constants[name]).numpy().astype(np.float32)
    is_one = numbers.size > 0 and (numbers == numbers.flat[0]).all()
    return numbers.reshape(-1)[:1] if is_one else numbers


def _limits(element: int) -> tuple[float, float]:
    # ml_dtypes has no annotations
    limits = ml_dtypes.iinfo(ir.DataType(element).numpy())  # type: ignore[no-untyped-call]
    return float(limits.min), float(limits.max)
