"""Numbers of a step that depend only on learning rate, step and seed, as a separate graph.

These numbers, such as Adam's bias corrections and the keys of Dropout, are computed in 64 bits.
WebGPU lacks these types, and CUDA starts a kernel for each number. So an accelerator's host
computes them on the CPU before each step, and passes the few results to the step.
The graph has only element-wise operators of a short list, so a host can compute it without a second
runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
import onnx_ir as ir

from onnxfit.graph import names
from onnxfit.graph.index import elements_of
from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.graph.values import GraphBuilder, values_of
from onnxfit.step.finish import prune

SOURCES = (names.LEARNING_RATE, names.STEP, names.SEED)


def _is_source(name: str | None) -> bool:
    return name is not None and (name in SOURCES or name.startswith(names.SCHEDULED))


# maximum number of elements of a tensor that a host computes; a key of Dropout has 8
MAX_HOST_ELEMENTS = 16
# the operators and element types that hosts compute; docs/training-folder.md describes them
HOST_OPERATORS = frozenset(
    {
        "Abs", "Add", "And", "Cast", "Ceil", "Div", "Equal", "Exp", "Floor", "Greater",
        "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Log", "Max", "Min", "Mul", "Neg",
        "Not", "Or", "Pow", "Sqrt", "Sub", "Where",
    }
)  # fmt: skip
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})
HOST_TYPES = FLOATS | {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL}


def cut_host_scalars(
    step: onnx.ModelProto, *, masks: bool = False
) -> tuple[onnx.ModelProto, onnx.ModelProto | None]:
    """Return the step without the nodes that the host computes, and a graph of these nodes.

    The outputs of the second graph are inputs of the first, under the same names. Together, the
    graphs compute exactly what `step` computes. The second graph is None without such nodes.

    - `step`: the graph of a training step, which stays unchanged.
    - `masks`: whether the host also computes whole tensors, such as the masks of Dropout, by
      operators beyond the short list. It then needs a runtime for the second graph.
    """
    rest, host = ir.from_proto(step), ir.from_proto(step)
    border = _border(rest.graph, _may_move if masks else _is_host_node)
    if not border:
        return step, None
    _read_as_inputs(rest.graph, border)
    values = values_of(host.graph)
    host.graph.outputs[:] = [values[name] for name in border]
    host.graph.inputs[:] = [value for value in host.graph.inputs if _is_source(value.name)]
    return _finished(rest.graph), _finished(host.graph)


def hosts_compute(scalars: onnx.ModelProto) -> bool:
    """Whether a graph that was cut off a step has only operators of the short list."""
    return all(map(_is_host_node, ir.from_proto(scalars).graph))


def _border(graph: ir.Graph, is_host_node: Callable[[ir.Node], bool]) -> list[str]:
    """Return the values that the host computes and that other nodes or a caller read."""
    constant = set(graph.initializers.values())
    known = {value for value in graph.inputs if _is_source(value.name)}
    on_host: set[ir.Node] = set()
    for node in graph:
        reads = {value for value in node.inputs if value is not None}
        if not reads <= constant | known or not is_host_node(node):
            continue
        if reads <= constant:
            constant.update(node.outputs)
        else:
            known.update(node.outputs)
            on_host.add(node)
    return [
        value.name or ""
        for node in graph
        if node in on_host
        for value in node.outputs
        if value.is_graph_output() or any(use.node not in on_host for use in value.uses())
    ]


def _is_host_node(node: ir.Node) -> bool:
    """Return whether hosts compute a node: element by element, where one element may fit all."""
    if node.domain != "" or node.op_type not in HOST_OPERATORS:
        return False
    (output,) = node.outputs
    size = elements_of(output)
    if size > MAX_HOST_ELEMENTS:
        return False
    values = [output, *(value for value in node.inputs if value is not None)]
    types = FLOATS if node.op_type == "Pow" else HOST_TYPES
    return all(value.dtype in types and elements_of(value) in (1, size) for value in values)


def _may_move(node: ir.Node) -> bool:
    return node.domain == "" and not subgraphs_of(node)


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
