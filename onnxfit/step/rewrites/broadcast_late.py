"""Expand as late as possible, or not at all.

The gradient of a mean is one number, repeated for each element of the mean. The rule writes it with
Expand: a tensor as large as the batch, which the next operator reads again. Elementwise operators
broadcast themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import onnx_ir as ir

from onnxfit.step.rewrites.replacement import new_node, nodes_of_type, producer_of, replace_node

__all__ = ["broadcast_late"]

ELEMENTWISE = {
    "Add", "Sub", "Mul", "Div", "Neg", "Sqrt", "Exp", "Log", "Reciprocal", "Abs", "Sign", "Cast",
    "Max", "Min", "Pow",
}  # fmt: skip
Dim = Union[int, ir.SymbolicDim]


def broadcast_late(graph: ir.Graph) -> None:
    """Let elementwise operators read the input of an Expand, in place.

    Their result is expanded if no other input makes it as large.
    """
    if not nodes_of_type(graph, "Expand"):
        return
    for node in nodes_of_type(graph, "Sum", *ELEMENTWISE):
        if node.op_type == "Sum":
            _add_smaller_last(graph, node)
        else:
            _read_unexpanded(graph, node)


def _read_unexpanded(graph: ir.Graph, node: ir.Node) -> None:
    """Let an elementwise operator read the values before their Expand."""
    (out,) = node.outputs
    inputs = [_before_expand(v) for v in node.inputs]
    changed = [v for new, v in zip(inputs, node.inputs) if new is not v and v is not None]
    if not changed:
        return
    expanded = changed[0]
    shape = _broadcast([v.shape for v in inputs if v is not None])
    if shape is None or out.shape is None or expanded.shape is None:
        return
    if _same(shape, out.shape.dims):  # another input is as large
        for i, value in enumerate(inputs):
            node.replace_input_with(i, value)
    elif _same(expanded.shape.dims, out.shape.dims) and not out.is_graph_output():
        expand = expanded.producer()
        assert expand is not None
        name, sizes = f"{out.name}/small", ir.Shape(shape)
        small = new_node(node.op_type, inputs, name, out, sizes, node.attributes)
        inside = [small.outputs[0], expand.inputs[1]]
        replace_node(graph, node, [small, new_node("Expand", inside, f"{out.name}/expanded", out)])


def _add_smaller_last(graph: ir.Graph, node: ir.Node) -> None:
    """Turn Sum(a, b, Expand(c)) into Sum(a, b) + c, because Sum broadcasts slowly."""
    (out,) = node.outputs
    inputs = [_before_expand(v) for v in node.inputs]
    small = [new for new, v in zip(inputs, node.inputs) if new is not v]
    full = [v for new, v in zip(inputs, node.inputs) if new is v]
    if len(small) != 1 or len(full) < 2 or out.shape is None or out.is_graph_output():
        return
    shapes = [v.shape for v in full if v is not None and v.shape is not None]
    if len(shapes) < len(full) or not all(_same(s.dims, out.shape.dims) for s in shapes):
        return
    op_type = "Add" if len(full) == 2 else "Sum"
    total = new_node(op_type, full, f"{out.name}/full", out)
    terms = [total.outputs[0], small[0]]
    replace_node(graph, node, [total, new_node("Add", terms, f"{out.name}/all", out)])


def _before_expand(value: ir.Value | None) -> ir.Value | None:
    """Return the input of the Expand that computes a value, or else the value itself."""
    node = producer_of(value, "Expand")
    if value is None or node is None:
        return value
    source = node.inputs[0]
    if source is None or source.shape is None or value.shape is None:
        return value
    return value if _same(source.shape.dims, value.shape.dims) else source


def _broadcast(shapes: Sequence[ir.Shape | None]) -> list[Dim] | None:
    """Return the shape that values of these shapes broadcast to, or None if it is unknown."""
    result: list[Dim] = []
    for shape in shapes:
        if shape is None:
            return None
        rank = max(len(shape.dims), len(result))
        pairs = zip(_padded(result, rank), _padded(shape.dims, rank))
        result = []
        for x, y in pairs:
            if x != y and x != 1 and y != 1:
                return None
            result.append(y if x == 1 else x)
    return result


def _padded(dims: Sequence[Dim], rank: int) -> list[Dim]:
    return [*[1] * (rank - len(dims)), *dims]


def _same(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(
        x == y and (isinstance(x, int) or x.value is not None) for x, y in zip(a, b)
    )
