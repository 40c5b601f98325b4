"""Move the nodes of one graph to another."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.graph.values import GraphBuilder


def move_nodes(op: GraphBuilder, graph: ir.Graph, outer: GraphBuilder | None = None) -> None:
    """Move nodes and initializers to the graph of `op`, under names of its scope.

    - `graph`: the graph that loses them. Replace its inputs first.
    - `outer`: the builder of the graph that gets the initializers, if `op` builds a body in it.
    """
    nodes = list(graph)
    initializers = list(graph.initializers.values())
    graph.initializers.clear()
    _rename(op, nodes, initializers)
    graph.outputs.clear()
    graph.remove(nodes)
    owner = op.graph if outer is None else outer.graph
    for value in initializers:
        owner.register_initializer(value)
    op.graph.extend(nodes)
    for domain, version in graph.opset_imports.items():
        imports = owner.opset_imports
        imports[domain] = max(version, imports.get(domain, version))


def _rename(op: GraphBuilder, nodes: Sequence[ir.Node], values: Sequence[ir.Value]) -> None:
    """Give values, nodes and their subgraphs names that are unused in the graph of `op`."""
    for value in values:
        value.name = op.unique_name(value.name or "value")
    for node in nodes:
        node.name = op.unique_name(node.name or node.op_type)
        for value in node.outputs:
            if value.name:  # an absent output has no name
                value.name = op.unique_name(value.name)
        for body in subgraphs_of(node):
            initializers = list(body.initializers.values())
            body.initializers.clear()
            _rename(op, list(body), [*body.inputs, *initializers])
            for value in initializers:
                body.register_initializer(value)
