"""Expand as late as can be, or not at all.

The gradient of a mean is one number spread over what it was the mean of. Written as the rule says,
with Expand, that is a tensor as large as the batch, written and read once more for everything that
is done with it. Operators that work element by element broadcast by themselves.

Measured (two residual blocks with BatchNormalization, 32 channels on 16×16, batch 16): a step takes
0.95 of its time without this rewrite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

import onnx_ir as ir

__all__ = ["broadcast_late"]

ELEMENTWISE = {
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Neg",
    "Sqrt",
    "Exp",
    "Log",
    "Reciprocal",
    "Abs",
    "Sign",
    "Cast",
    "Max",
    "Min",
    "Pow",
}


def broadcast_late(graph: ir.Graph) -> None:
    """In place: an element-wise operator that takes a spread value takes it as it was; what comes
    out is spread if nothing else made it large.
    """
    for node in list(graph):
        if node.op_type == "Sum" and node.domain == "":
            _add_last(graph, node)
        elif node.op_type in ELEMENTWISE and node.domain == "":
            _take_unspread(graph, node)


def _take_unspread(graph: ir.Graph, node: ir.Node) -> None:
    (out,) = node.outputs
    sources = [_unspread(v) for v in node.inputs]
    spread = next((v for s, v in zip(sources, node.inputs) if s is not v and v is not None), None)
    shape = _broadcast([s.shape for s in sources if s is not None])
    if spread is None or shape is None or out.shape is None or spread.shape is None:
        return
    if _same(shape, out.shape.dims):  # the others are as large: they spread it
        for i, source in enumerate(sources):
            node.replace_input_with(i, source)
    elif _same(spread.shape.dims, out.shape.dims) and not out.is_graph_output():
        expand = spread.producer()
        assert expand is not None
        small = _node(node.op_type, sources, ir.Shape(shape), out, "small", node.attributes)
        large = _node("Expand", [small.outputs[0], expand.inputs[1]], out.shape, out, "spread")
        _put(graph, node, [small, large])


def _add_last(graph: ir.Graph, node: ir.Node) -> None:
    """Sum(a, b, Expand(c)) is Sum(a, b) + c: Sum itself is slow at broadcasting."""
    (out,) = node.outputs
    sources = [_unspread(v) for v in node.inputs]
    small = [s for s, v in zip(sources, node.inputs) if s is not v]
    full = [v for s, v in zip(sources, node.inputs) if s is v]
    if len(small) != 1 or len(full) < 2 or out.shape is None or out.is_graph_output():
        return
    if all(
        v is not None and v.shape is not None and _same(v.shape.dims, out.shape.dims) for v in full
    ):
        rest = _node("Add" if len(full) == 2 else "Sum", full, out.shape, out, "full")
        _put(graph, node, [rest, _node("Add", [rest.outputs[0], small[0]], out.shape, out, "all")])


def _node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    shape: ir.Shape,
    like: ir.Value,
    part: str,
    attributes: Mapping[str, ir.Attr] | None = None,
) -> ir.Node:
    """A node that makes a part of a value."""
    node = ir.node(op_type, inputs, attributes, name=f"{like.name}/{part}")
    value = node.outputs[0]
    value.name, value.type, value.shape = node.name, like.type, shape
    return node


def _put(graph: ir.Graph, old: ir.Node, new: Sequence[ir.Node]) -> None:
    """New nodes in the place of an old one; the last of them makes its value."""
    value, made = old.outputs[0], new[-1].outputs[0]
    graph.insert_before(old, new)
    value.replace_all_uses_with(made)
    made.name, value.name = value.name, None
    graph.remove(old, safe=True)


def _unspread(value: ir.Value | None) -> ir.Value | None:
    """Return the value before its Expand, or the value itself if there is none to take away."""
    node = value.producer() if value is not None else None
    if value is None or node is None or node.op_type != "Expand" or node.domain != "":
        return value
    source = node.inputs[0]
    if (
        source is None
        or source.shape is None
        or value.shape is None
        or _same(source.shape.dims, value.shape.dims)
    ):
        return value
    return source


Dim = Union[int, ir.SymbolicDim]


def _broadcast(shapes: Sequence[ir.Shape | None]) -> list[Dim] | None:
    """The shape of what values of these shapes make together; None where that is not known."""
    found: list[Dim] = []
    for shape in shapes:
        if shape is None:
            return None
        dims = list(shape.dims)
        rank = max(len(dims), len(found))
        a: list[Dim] = [*[1] * (rank - len(found)), *found]
        b: list[Dim] = [*[1] * (rank - len(dims)), *dims]
        found = []
        for x, y in zip(a, b):
            if x != y and x != 1 and y != 1:
                return None
            found.append(y if x == 1 else x)
    return found


def _same(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(
        x == y and (isinstance(x, int) or x.value is not None) for x, y in zip(a, b)
    )
