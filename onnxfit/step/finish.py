"""The last touches to a graph: nothing unused, nodes in order, rewrites that make it faster."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from onnxfit.graph import names
from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.graph.values import GraphBuilder
from onnxfit.step.rewrites import REWRITES


def prune(op: GraphBuilder) -> ir.Model:
    """Remove what no output needs, put the nodes in order, and return the graph as a model."""
    model = ir.Model(op.graph, ir_version=10)
    if not _is_sorted(op.graph):
        TopologicalSortPass()(model)
    _remove_unused(model)
    unused = {names.SEED, names.STEP, names.LEARNING_RATE}
    op.graph.inputs[:] = [v for v in op.graph.inputs if v.name not in unused or v.uses()]
    return model


def _is_sorted(graph: ir.Graph) -> bool:
    """Return whether every node comes after the nodes that it reads. Subgraphs need a sort."""
    seen: set[ir.Node] = set()
    for node in graph:
        producers = (value.producer() for value in node.inputs if value is not None)
        if any(producer is not None and producer not in seen for producer in producers):
            return False
        if subgraphs_of(node):
            return False
        seen.add(node)
    return True


def _remove_unused(model: ir.Model) -> None:
    """Remove the nodes that no output needs.

    onnx-ir removes a node, but still counts the values that its subgraphs capture as used. So the
    subgraphs of removed nodes are emptied, and onnx-ir searches again.
    """
    emptied: list[ir.Graph] | None = None
    while emptied is None or emptied:
        before = list(model.graph)
        RemoveUnusedNodesPass()(model)
        kept = set(model.graph)
        emptied = [body for node in before if node not in kept for body in subgraphs_of(node)]
        for body in emptied:
            for node in ir.traversal.RecursiveGraphIterator(body):
                for i in range(len(node.inputs)):
                    node.replace_input_with(i, None)
            body.outputs.clear()


def finish(op: GraphBuilder) -> onnx.ModelProto:
    """Return the graph as a model, after all rewrites."""
    prune(op)
    for rewrite in REWRITES:
        rewrite(op.graph)
    model = ir.to_proto(prune(op))
    model.producer_name = "onnxfit"
    return model
