"""Find nodes, and replace a node by others: helpers of every rewrite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxfit.graph.match import Matcher, MatchRule

Bindings = Mapping[str, ir.Value]


class RewriteRule(MatchRule[ir.Graph, ir.Value, Sequence[ir.Node]]):
    """A rewrite of the nodes that compute a value. `rewrite` returns the nodes to remove."""


def apply_rule(rule: RewriteRule, graph: ir.Graph) -> None:
    """Rewrite the values of a graph that a rule finds and accepts, in place."""
    variable, pattern = rule.equations[0]
    unused: list[ir.Node] = []
    for node in nodes_of_type(graph, str(pattern[0])):
        for found in MATCHER.solutions(rule.equations, {variable: node.outputs[0]}):
            if not rule.check(graph, found):
                unused += rule.rewrite(graph, found)
                break
    # In one call, because each call searches the outputs of the graph: one for each weight.
    graph.remove(unused, safe=True)


def _match_value(value: ir.Value) -> tuple[str, Sequence[ir.Value]] | None:
    node = value.producer()
    if node is None or node.domain != "":
        return None
    inputs = [each for each in node.inputs if each is not None]
    return (node.op_type, inputs) if len(inputs) == len(node.inputs) else None


def _results(value: ir.Value, op_type: str) -> list[ir.Value]:
    readers = dict.fromkeys(node for node, _ in value.uses())
    return [n.outputs[0] for n in readers if n.op_type == op_type and n.domain == ""]


MATCHER: Matcher[ir.Value] = Matcher(_match_value, lambda variable, value: True, _results)


def is_read_once(value: ir.Value) -> bool:
    """Return whether one node alone reads a value."""
    return len(value.uses()) == 1 and not value.is_graph_output()


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
    return producer_of(value, op_type) if value is not None and is_read_once(value) else None


def new_node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    name: str,
    like: ir.Value,
    shape: ir.Shape | None = None,
    attributes: Mapping[str, Any] | None = None,
    domain: str = "",
) -> ir.Node:
    """Return a node whose result has the type of the value `like`, and its shape unless given.

    - `name`: the name of the node and of its result. A name that onnx-ir chooses may also be in the
      graph of the other pass, to which `TrainingAgent` joins this graph.
    """
    node = ir.node(op_type, inputs, attributes, domain=domain, name=name)
    (result,) = node.outputs
    result.name = name
    result.type, result.shape = like.type, like.shape if shape is None else shape
    return node


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
