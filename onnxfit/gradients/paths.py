"""Where derivatives flow in a graph: from which leaves to the loss, through which inputs and outputs of which nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
INTEGERS = {
    ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8, ir.DataType.UINT16,
    ir.DataType.UINT32, ir.DataType.UINT64, ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.BOOL, ir.DataType.STRING,
}  # fmt: skip

# Float results that do not change with the input, or whose derivative is zero wherever it exists: what comes out counts as a constant.
# (Comparisons, ArgMax, Shape, casts to integers … need no entry: nothing flows through integers.)
FLAT = {"Bernoulli", "Ceil", "EyeLike", "Floor", "Hardmax", "RandomNormalLike", "RandomUniformLike", "Round", "Sign"}
# (operator, input) of float inputs of which only the type, or the value rounded to an integer, is looked at.
FLAT_INPUTS = {("CastLike", 1), ("OneHot", 0), ("OneHot", 1)}
# Quantising is flat too, but whoever trains through it expects something else: never a silent zero, so it stays on the path.
QUANTIZERS = {"QuantizeLinear", "DynamicQuantizeLinear"}


@dataclass(frozen=True)
class Site:
    """A node between leaves and loss, with the positions of the inputs and outputs that derivatives flow through."""

    node: ir.Node
    inputs: frozenset[int]
    outputs: frozenset[int]


def sites(graph: ir.Graph, loss: str, leaves: Iterable[str]) -> list[Site]:
    """Every node on a differentiable path from the leaves (inputs or initializers) to the loss, in the graph's order."""
    values = _between(graph, loss, leaves)
    found = []
    for node in graph:
        outputs = frozenset(i for i, v in enumerate(node.outputs) if v in values)
        if outputs:
            found.append(Site(node, frozenset(i for i, v in _flowing(node) if v in values), outputs))
    return found


def reachable(model: ir.Model, loss: str, candidates: Iterable[str]) -> list[str]:
    """The candidates (inputs or initializers of the main graph) from which a differentiable path leads to the loss, in their order.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[2] a, float[2] b) => (float[2] y) { c = Floor(b) y = Add(a, c) }'
    >>> reachable(ir.from_onnx_text(text), "y", ["a", "b"])
    ['a']
    """
    candidates = list(candidates)
    found = {value.name for value in _between(model.graph, loss, candidates)}
    return [name for name in candidates if name in found]


def _between(graph: ir.Graph, loss: str, leaves: Iterable[str]) -> set[ir.Value]:
    """The values that change smoothly with the leaves, and the loss with them."""
    wanted = set(leaves)
    varying = {v for v in (*graph.inputs, *graph.initializers.values()) if v.name in wanted}
    for node in graph:
        flowing = [v for _, v in _flowing(node) if v in varying]
        if flowing:
            # downstream of a quantizer the integers stand for floats
            integers = node.op_type in QUANTIZERS or any(not _smooth(v) for v in flowing)
            varying.update(v for v in node.outputs if integers or _smooth(v))
    waiting = [v for v in varying if v.name == loss]
    between: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        if value in varying and value not in between:
            between.add(value)
            producer = value.producer()
            waiting += [v for _, v in _flowing(producer)] if producer is not None else []
    return between


def _smooth(value: ir.Value) -> bool:
    """Whether a value can carry a derivative; one of unknown type may."""
    return value.dtype is None or value.dtype not in INTEGERS


def _flowing(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """The inputs that derivatives flow through, by position, and what subgraphs capture, numbered on from there."""
    if node.domain == "" and node.op_type in FLAT:
        return
    for i, value in enumerate(node.inputs):
        if value is not None and (node.op_type, i) not in FLAT_INPUTS:
            yield i, value
    count = len(node.inputs)
    for attribute in node.attributes.values():
        for graph in _graphs(attribute):
            inside = [v for inner in ir.traversal.RecursiveGraphIterator(graph) for v in inner.inputs if v is not None]
            for value in (*inside, *graph.outputs):  # a branch may hand on a captured value as it is
                if value.graph is node.graph:
                    yield count, value
                    count += 1


def _graphs(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    return list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []
