"""The gradient path: the nodes, inputs and outputs of a graph through which gradients flow from the
loss to the leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from onnxfit.checks import name_list
from onnxfit.errors import UnknownNameError
from onnxfit.gradients.table import NOT_DIFFERENTIABLE, key_of
from onnxfit.graph import names
from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.graph.weights import FLOATS

NOT_FLOATS = {
    ir.DataType.INT4,
    ir.DataType.INT8,
    ir.DataType.INT16,
    ir.DataType.INT32,
    ir.DataType.INT64,
    ir.DataType.UINT4,
    ir.DataType.UINT8,
    ir.DataType.UINT16,
    ir.DataType.UINT32,
    ir.DataType.UINT64,
    ir.DataType.BOOL,
    ir.DataType.STRING,
}

# Operator -> its float inputs that have no gradient: it uses only their type, or rounds them.
NOT_DIFFERENTIABLE_INPUTS = {"CastLike": {1}, "OneHot": {0, 1}}
# A quantizer also rounds, but stays on the path. A user who trains through it expects the
# straight-through estimator, and gets an error instead of zeros.
QUANTIZERS = {"QuantizeLinear", "DynamicQuantizeLinear"}


class PathNode(NamedTuple):
    """A node on the gradient path, with the positions of its inputs and outputs on the path."""

    node: ir.Node
    inputs: frozenset[int]
    outputs: frozenset[int]


def differentiable_path(
    graph: ir.Graph, targets: Iterable[ir.Value], leaves: Iterable[ir.Value]
) -> list[PathNode]:
    """Return the nodes on a differentiable path from the leaves to the targets, in graph order.

    Leaves are inputs or initializers of the graph. Leaves of a subgraph may also be values that it
    captures from outside.
    """
    varying = _varying(graph, leaves)
    on_path = _values_on_path(varying, targets)
    path = []
    for node, differentiable in varying.nodes.items():
        outputs = [i for i, v in enumerate(node.outputs) if v in on_path]
        if outputs:
            inputs = [i for i, v in differentiable if v in on_path]
            path.append(PathNode(node, frozenset(inputs), frozenset(outputs)))
    return path


def values_read(path: Iterable[PathNode]) -> set[ir.Value]:
    """Return the values on a path that its nodes read."""
    values = set()
    for node, positions, _ in path:
        inputs = (*node.inputs, *_captured_by(node))
        values.update([inputs[i] for i in positions])
    return {value for value in values if value is not None}


def reachable(model: ir.Model, loss: str, candidates: Iterable[str]) -> list[str]:
    """Return the candidates with a gradient path to the loss, in their order.

    `loss` is the name of an output of `model`, `candidates` are names of inputs or initializers.

    >>> model = ir.from_onnx_text('''<ir_version: 10, opset_import: ["": 21]>
    ...     g (float[2] a, float[2] b) => (float[2] y) { c = Floor(b) y = Add(a, c) }''')
    >>> reachable(model, "y", ["a", "b"])
    ['a']
    """
    return reachable_values(model, [loss], candidates)


def reachable_values(
    model: ir.Model, outputs: Iterable[str], candidates: Iterable[str]
) -> list[str]:
    """Return the candidates with a gradient path to one of the outputs, in their order."""
    candidates = list(candidates)
    targets = outputs_of(model.graph, *outputs)
    varying = _varying(model.graph, leaves_of(model.graph, candidates))
    on_path = _values_on_path(varying, targets)
    names = {v.name for v in on_path}
    return [name for name in candidates if name in names]


def stopping_nodes(
    graph: ir.Graph, targets: Iterable[ir.Value], leaves: Iterable[ir.Value]
) -> list[ir.Node]:
    """Return the nodes at which every gradient path from the targets to the leaves ends.

    The nodes depend on the leaves, and the targets on the nodes, but the nodes have no derivative.
    An empty list means that the targets do not depend on the leaves at all.
    """
    varying = set(leaves)
    stops = []
    for node in graph:
        inputs = [v for v in (*node.inputs, *_captured_by(node)) if v in varying]
        if not inputs:
            continue
        outputs = _varying_outputs(
            node, [v for _, v in differentiable_inputs(node) if v in varying]
        )
        varying.update(outputs)
        if not outputs:
            stops.append(node)
    needed: set[ir.Node] = set()
    pending = [v.producer() for v in targets]
    while pending:
        producer = pending.pop()
        if producer is not None and producer not in needed:
            needed.add(producer)
            inputs = [v for v in (*producer.inputs, *_captured_by(producer)) if v is not None]
            pending += [v.producer() for v in inputs]
    return [node for node in stops if node in needed]


def leaves_of(graph: ir.Graph, names: Iterable[str]) -> list[ir.Value]:
    """Return the inputs and initializers with these names."""
    requested = set(names)
    return [v for v in (*graph.inputs, *graph.initializers.values()) if v.name in requested]


def outputs_of(graph: ir.Graph, *names: str) -> list[ir.Value]:
    """Return the outputs with these names."""
    return [v for v in graph.outputs if v.name in names]


def captured(graph: ir.Graph) -> list[ir.Value]:
    """Return the values of outer graphs that a subgraph uses, each once, in the order of use."""
    nodes = list(ir.traversal.RecursiveGraphIterator(graph))
    graphs = dict.fromkeys([graph, *(inner for node in nodes for inner in subgraphs_of(node))])
    used = [v for node in nodes for v in node.inputs if v is not None]
    for inner in graphs:
        used.extend(inner.outputs)  # a branch may return a captured value unchanged
    return list(dict.fromkeys(v for v in used if v.graph is not None and v.graph not in graphs))


def carries_gradient(value: ir.Value) -> bool:
    """Return whether a value can have a gradient; a value of unknown type can."""
    return value.dtype not in NOT_FLOATS


def is_float(value: ir.Value) -> bool:
    """Return whether a value is a float tensor.

    Other values, such as a sequence of tensors, have no gradient.
    """
    return isinstance(value.type, ir.TensorType) and value.dtype in FLOATS


def select_float_outputs(graph: ir.Graph, requested: Sequence[str] | str | None) -> list[str]:
    """Return the names of the requested outputs, or of all float outputs for None.

    UnknownNameError: no float output has a requested name.
    """
    floats = [v.name or "" for v in graph.outputs if is_float(v)]
    if requested is None:
        return floats
    selected = name_list("outputs", requested)
    for name in selected:
        if name not in floats:
            raise UnknownNameError("float output", name, floats)
    return selected


def stops_gradient(node: ir.Node) -> bool:
    """Return whether a node is an Identity that `GraphBuilder.stop_gradient` added."""
    return node.op_type == "Identity" and names.STOP_GRADIENT in node.metadata_props


def differentiable_inputs(node: ir.Node) -> list[tuple[int, ir.Value]]:
    """Return the inputs that a node can be differentiated with respect to, with their positions.

    The values that its subgraphs capture follow the inputs.
    """
    if key_of(node) in NOT_DIFFERENTIABLE or stops_gradient(node):
        return []
    inputs = [(i, value) for i, value in enumerate(node.inputs) if value is not None]
    constant = NOT_DIFFERENTIABLE_INPUTS.get(node.op_type)
    if constant is not None:
        inputs = [(i, value) for i, value in inputs if i not in constant]
    captured_values = _captured_by(node)
    if captured_values:
        inputs.extend(enumerate(captured_values, start=len(node.inputs)))
    return inputs


@dataclass(frozen=True)
class _Varying:
    """Values and nodes that have a derivative with respect to the leaves of a graph.

    `nodes` has the nodes with such an output, in graph order, each with its differentiable inputs.
    """

    values: set[ir.Value]
    nodes: dict[ir.Node, list[tuple[int, ir.Value]]]


def _varying(graph: ir.Graph, leaves: Iterable[ir.Value]) -> _Varying:
    """Return the values and nodes of a sorted graph that vary with the leaves."""
    values = set(leaves)
    nodes = {}
    for node in graph:
        inputs = differentiable_inputs(node)
        outputs = _varying_outputs(node, [v for _, v in inputs if v in values])
        if outputs:
            values.update(outputs)
            nodes[node] = inputs
    return _Varying(values, nodes)


def _values_on_path(varying: _Varying, targets: Iterable[ir.Value]) -> set[ir.Value]:
    """Return the values on a gradient path from the targets to the leaves."""
    pending = list(targets)
    on_path: set[ir.Value] = set()
    while pending:
        value = pending.pop()
        if value in varying.values and value not in on_path:
            on_path.add(value)
            producer = value.producer()
            if producer in varying.nodes:
                pending += [v for _, v in varying.nodes[producer]]
    return on_path


def _varying_outputs(node: ir.Node, inputs: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """Return the outputs that vary if these inputs do."""
    if not inputs:
        return []
    # After a quantizer, integers represent floats.
    if node.op_type in QUANTIZERS or not all(map(carries_gradient, inputs)):
        return node.outputs
    return [v for v in node.outputs if carries_gradient(v)]


def _captured_by(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node's subgraphs capture, each once."""
    graphs = subgraphs_of(node)
    return list(dict.fromkeys(v for graph in graphs for v in captured(graph))) if graphs else []
