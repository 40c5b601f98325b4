"""Finish a graph: remove unused nodes, sort it, and rewrite it for speed."""

from __future__ import annotations

from collections.abc import Container

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass

from onnxfit.graph import names
from onnxfit.graph.inference import find_schema
from onnxfit.graph.shared_tensors import NOT_IN_NUMPY, TYPES, to_proto
from onnxfit.graph.subgraphs import detach, subgraphs_of
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.operator_versions import lower_opset
from onnxfit.load.opset import OPSET
from onnxfit.step.device_forms import use_forms_of_device
from onnxfit.step.half_kernels import use_half_kernels
from onnxfit.step.rewrites import REWRITES


def prune(op: GraphBuilder) -> ir.Model:
    """Remove unused nodes, sort the others, and return the graph as a model."""
    graph = op.graph
    model = ir.Model(graph, ir_version=10)
    if not _is_sorted(graph):
        TopologicalSortPass()(model)
    _remove_unused_nodes(graph, graph.opset_imports.get("", OPSET))
    for name, value in list(graph.initializers.items()):
        if not (value.uses() or value.is_graph_output() or value.is_graph_input()):
            del graph.initializers[name]
    unused = {names.SEED, names.STEP, names.LEARNING_RATE}
    graph.inputs[:] = [v for v in graph.inputs if v.name not in unused or v.uses()]
    return model


def _is_sorted(graph: ir.Graph) -> bool:
    """Return whether every node comes after the nodes that it reads. Subgraphs need a sort."""
    seen: set[ir.Node | None] = {None}
    for node in graph:
        if not seen.issuperset([v.producer() for v in node.inputs if v is not None]):
            return False
        if subgraphs_of(node):
            return False
        seen.add(node)
    return True


def _remove_unused_nodes(graph: ir.Graph, opset: int) -> None:
    """Remove the nodes and optional outputs of a sorted graph that no output needs, in place.

    onnx-ir has a pass for this, but it removes the nodes one by one, and each removal searches the
    outputs of the graph, one for each weight. The pass also counts values that subgraphs of removed
    nodes capture as used.
    """
    outputs = frozenset(graph.outputs)  # a value may also be an output of another graph
    unused = []
    for node in reversed(graph):
        for value in node.outputs:
            if value.uses() or value in outputs:
                _remove_unused_values(node, outputs, opset)
                for body in subgraphs_of(node):
                    _remove_unused_nodes(body, opset)
                break
        else:
            detach(node)
            unused.append(node)
    graph.remove(unused)


def _remove_unused_values(node: ir.Node, graph_outputs: Container[ir.Value], opset: int) -> None:
    """Remove absent inputs at the end of a node, and optional outputs that nothing reads."""
    inputs = node.inputs
    if inputs and inputs[-1] is None:
        present = [i for i, value in enumerate(inputs) if value is not None]
        node.resize_inputs(present[-1] + 1 if present else 0)
    if len(node.outputs) == 1 and node.op_type != "BatchNormalization":
        return
    if node.domain != "":
        return
    schema = find_schema("", node.op_type, opset)
    if schema is None:
        return
    if node.op_type == "BatchNormalization":
        if node.attributes.get_int("training_mode", 0):
            return  # its other outputs make it normalize by the batch
        node.attributes.pop("training_mode", None)
    options = [output.option for output in schema.outputs]
    kinds = onnx.defs.OpSchema.FormalParameterOption
    if kinds.Optional not in options or kinds.Variadic in options:
        return
    for value, option in zip(node.outputs, options):
        if option == kinds.Optional and not (value.uses() or value in graph_outputs):
            value.name = ""
    named = [i for i, value in enumerate(node.outputs) if value.name]
    node.resize_outputs(named[-1] + 1 if named else 0)


def finish(op: GraphBuilder, *, exact: bool = False) -> onnx.ModelProto:
    """Return the graph as a model, after all rewrites.

    - `exact`: whether to leave out the rewrites, which may change the last bits.

    Initializers whose memory the recipe's model shares are references to its arrays. Keep the
    recipe alive while using the graph.
    """
    prune(op)
    for rewrite in () if exact else REWRITES:
        rewrite(op.graph)
    use_forms_of_device(op)
    use_half_kernels(op)
    model = to_proto(prune(op), TYPES - NOT_IN_NUMPY)
    # An operator of the model that needed a newer opset may have been decomposed or removed.
    lower_opset(model, op.graph.opset_imports.get("", OPSET), OPSET)
    model.producer_name = "onnxfit"
    return model
