"""Find nodes, and replace a node by others: helpers of every rewrite."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir


def nodes_of_type(graph: ir.Graph, *op_types: str) -> list[ir.Node]:
    """Return the nodes of a graph with one of these ONNX operators, in their order."""
    wanted = set(op_types)
    return [node for node in graph if node.op_type in wanted and node.domain == ""]


def producer_of(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node of this type that computes a value."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and node.domain == "" else None


def only_producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node of this type that computes a value, if the value is used once."""
    is_read_once = value is not None and len(value.uses()) == 1 and not value.is_graph_output()
    return producer_of(value, op_type) if is_read_once else None


def replace_node(graph: ir.Graph, old: ir.Node, new: Sequence[ir.Node]) -> None:
    """Replace the node `old` by the nodes `new`; the output of the last replaces that of `old`.

    The output keeps its name.
    """
    (before,), (after,) = old.outputs, new[-1].outputs
    graph.insert_before(old, new)
    ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
    after.name = before.name
    before.name = None
    graph.remove(old, safe=True)
