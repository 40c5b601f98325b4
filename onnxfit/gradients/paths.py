"""Where derivatives flow in a graph: from which leaves to the loss, through which inputs and
outputs of which nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from onnxfit.gradients.table import NOT_DIFFERENTIABLE, key_of

FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
INTEGERS = {
    ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8, ir.DataType.UINT16,
    ir.DataType.UINT32, ir.DataType.UINT64, ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.BOOL, ir.DataType.STRING,
}  # fmt: skip

# (operator, input) of float inputs of which only the type, or the value rounded to an integer, is
# looked at.
NOT_DIFFERENTIABLE_INPUTS = {("CastLike", 1), ("OneHot", 0), ("OneHot", 1)}
# Quantising is flat too, but whoever trains through it expects something else: never a silent zero,
# so it stays on the path.
QUANTIZERS = {"QuantizeLinear", "DynamicQuantizeLinear"}


@dataclass(frozen=True)
class PathNode:
    """A node between leaves and loss, with the positions of the inputs and outputs that derivatives
    flow through.
    """

    node: ir.Node
    inputs: frozenset[int]
    outputs: frozenset[int]


def differentiable_path(
    graph: ir.Graph, targets: Iterable[ir.Value], leaves: Iterable[ir.Value]
) -> list[PathNode]:
    """Every node of the graph on a differentiable path from the leaves to the targets, in the
    graph's order.

    Leaves are inputs or initializers of the graph; of a subgraph, also values that it captures from
    outside.
    """
    values = _between(graph, targets, leaves)
    found = []
    for node in graph:
        outputs = frozenset(i for i, v in enumerate(node.outputs) if v in values)
        if outputs:
            found.append(
                PathNode(
                    node,
                    frozenset(i for i, v in differentiable_inputs(node) if v in values),
                    outputs,
                )
            )
    return found


def reachable(model: ir.Model, loss: str, candidates: Iterable[str]) -> list[str]:
    """The candidates (inputs or initializers of the main graph) from which a differentiable path
    leads to the loss, in their order.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[2] a, float[2] b) => (float[2] y) { c = Floor(b) y = Add(a, c) }'
    >>> reachable(ir.from_onnx_text(text), "y", ["a", "b"])
    ['a']
    """
    return reachable_values(model, [loss], candidates)


def reachable_values(
    model: ir.Model, outputs: Iterable[str], candidates: Iterable[str]
) -> list[str]:
    """The candidates from which a differentiable path leads to one of the outputs."""
    candidates = list(candidates)
    found = {
        v.name
        for v in _between(
            model.graph, outputs_of(model.graph, *outputs), leaves_of(model.graph, candidates)
        )
    }
    return [name for name in candidates if name in found]


def leaves_of(graph: ir.Graph, names: Iterable[str]) -> list[ir.Value]:
    """The inputs and initializers with these names."""
    wanted = set(names)
    return [v for v in (*graph.inputs, *graph.initializers.values()) if v.name in wanted]


def outputs_of(graph: ir.Graph, *names: str) -> list[ir.Value]:
    """The outputs with these names."""
    return [v for v in graph.outputs if v.name in names]


def captured(graph: ir.Graph) -> list[ir.Value]:
    """The values of outer graphs that a subgraph uses, each once, in the order of use."""
    inner = {
        graph,
        *(
            g
            for node in ir.traversal.RecursiveGraphIterator(graph)
            for a in node.attributes.values()
            for g in _graphs(a)
        ),
    }
    used = [
        v
        for node in ir.traversal.RecursiveGraphIterator(graph)
        for v in node.inputs
        if v is not None
    ]
    for one in inner:
        used.extend(one.outputs)  # a branch may hand on a captured value as it is
    return list(dict.fromkeys(v for v in used if v.graph is not None and v.graph not in inner))


def _between(
    graph: ir.Graph, targets: Iterable[ir.Value], leaves: Iterable[ir.Value]
) -> set[ir.Value]:
    """The values that change smoothly with the leaves, and the targets with them."""
    varying = set(leaves)
    for node in graph:
        moving = [v for _, v in differentiable_inputs(node) if v in varying]
        if moving:
            # downstream of a quantizer the integers stand for floats
            integers = node.op_type in QUANTIZERS or any(not carries_gradient(v) for v in moving)
            varying.update(v for v in node.outputs if integers or carries_gradient(v))
    waiting = [v for v in targets if v in varying]
    between: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        if value in varying and value not in between:
            between.add(value)
            producer = value.producer()
            if producer is not None and producer.graph is graph:
                waiting += [v for _, v in differentiable_inputs(producer)]
    return between


def carries_gradient(value: ir.Value) -> bool:
    """Whether a value can carry a derivative; one of unknown type may."""
    return value.dtype is None or value.dtype not in INTEGERS


def is_float(value: ir.Value) -> bool:
    """Whether a value is a tensor of floats, as what gradients are taken of or arrive at must be; a
    sequence of such tensors is not.
    """
    return isinstance(value.type, ir.TensorType) and value.dtype in FLOATS


def differentiable_inputs(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """The inputs that derivatives flow through, by position, and what subgraphs capture, numbered
    on from there.
    """
    if key_of(node) in NOT_DIFFERENTIABLE:
        return
    for i, value in enumerate(node.inputs):
        if value is not None and (node.op_type, i) not in NOT_DIFFERENTIABLE_INPUTS:
            yield i, value
    inside = dict.fromkeys(
        v for a in node.attributes.values() for graph in _graphs(a) for v in captured(graph)
    )
    yield from enumerate(inside, start=len(node.inputs))


def _graphs(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    return list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []
