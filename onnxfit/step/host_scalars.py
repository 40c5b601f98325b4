"""Numbers of a step that depend only on learning rate, step and seed, as a separate graph.

These numbers, such as Adam's bias corrections and the keys of Dropout, are computed in 64 bits.
WebGPU lacks these types, and CUDA starts a kernel for each number. So an accelerator's host
computes them on the CPU before each step, and passes the few results to the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxfit.graph import names
from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.graph.values import GraphBuilder, values_of
from onnxfit.step.finish import prune

SOURCES = (names.LEARNING_RATE, names.STEP, names.SEED)
# of a tensor that a host computes; a key of Dropout has 8
MAX_HOST_ELEMENTS = 16


def cut_host_scalars(step: onnx.ModelProto) -> tuple[onnx.ModelProto, onnx.ModelProto | None]:
    """Return the step without the nodes that the host computes, and a graph of these nodes.

    The outputs of the second graph are inputs of the first, under the same names. Together, the
    graphs compute exactly what `step` computes. The second graph is None without such nodes.

    - `step`: the graph of a training step, which stays unchanged.
    """
    rest, host = ir.from_proto(step), ir.from_proto(step)
    border = _border(rest.graph)
    if not border:
        return step, None
    _read_as_inputs(rest.graph, border)
    values = values_of(host.graph)
    host.graph.outputs[:] = [values[name] for name in border]
    host.graph.inputs[:] = [value for value in host.graph.inputs if value.name in SOURCES]
    return _finished(rest.graph), _finished(host.graph)


def _border(graph: ir.Graph) -> list[str]:
    """Return the values that the host computes and that other nodes or a caller read."""
    constant = set(graph.initializers.values())
    known = {value for value in graph.inputs if value.name in SOURCES}
    on_host: set[ir.Node] = set()
    for node in graph:
        reads = {value for value in node.inputs if value is not None}
        if subgraphs_of(node) or not reads <= constant | known:
            continue
        if reads <= constant:
            constant.update(node.outputs)
        elif all(_is_small(value) for value in node.outputs):
            known.update(node.outputs)
            on_host.add(node)
    return [
        value.name or ""
        for node in graph
        if node in on_host
        for value in node.outputs
        if value.is_graph_output() or any(use.node not in on_host for use in value.uses())
    ]


def _is_small(value: ir.Value) -> bool:
    shape = value.shape
    if shape is None or not shape.is_static():
        return False
    return math.prod(shape.numpy()) <= MAX_HOST_ELEMENTS


def _read_as_inputs(graph: ir.Graph, border: Sequence[str]) -> None:
    """Turn values that nodes of a graph compute into inputs, in place."""
    values = values_of(graph)
    for name in border:
        computed = values[name]
        computed.name = names.unused(name, values.__contains__)
        given = ir.Value(name=name, type=computed.type, shape=computed.shape)
        graph.inputs.append(given)
        computed.replace_all_uses_with(given, replace_graph_outputs=True)


def _finished(graph: ir.Graph) -> onnx.ModelProto:
    model = ir.to_proto(prune(GraphBuilder(graph)))
    model.producer_name = "onnxfit"
    return model
