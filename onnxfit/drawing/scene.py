"""Content of a drawing: the tensors and nodes of a model in the file's order.

Nodes can be collapsed into one box for each scope.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx

from onnxfit.drawing.labels import (
    Attribute,
    attributes_of,
    bodies_of,
    count,
    literal,
    literal_of_constant,
    tensor_type,
    type_text,
)
from onnxfit.errors import ModelError
from onnxfit.graph import names, scopes
from onnxfit.graph.model import large_tensors_as_inputs, to_ir
from onnxfit.graph.weights import all_weights
from onnxfit.load.constant_nodes import is_constant
from onnxfit.load.reading import read_model

KINDS = {
    "input": "input",
    "weight": "weight",
    "state": "other state",
    "constant": "constant",
    "output": "output",
}
Functions = Mapping[tuple[str, str], int]  # nodes of each function of the model


@dataclass(frozen=True)
class Tensor:
    """An input, an initializer or an output of a graph."""

    name: str
    kind: str  # a key of KINDS
    type: str


@dataclass(frozen=True)
class Argument:
    """An input of a node: the name of a tensor, or the text of a small constant.

    `tensor` is "" for a constant and for an absent optional input. `captured` marks a tensor that
    only a body of the node reads.
    """

    tensor: str
    literal: str = ""
    captured: bool = False


@dataclass(frozen=True)
class DrawnNode:
    """A box of the drawing: a node, or all nodes of a scope."""

    stage: str  # a key of scopes.STAGES
    name: str
    operator: str  # "" for a scope
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]
    attributes: tuple[Attribute, ...] = ()
    bodies: tuple[tuple[str, Scene], ...] = ()  # of If, Loop and Scan
    # number of nodes for each operator of a scope, the most frequent first
    operator_counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scene:
    """A graph to draw."""

    name: str
    node_count: int  # in the file, including collapsed nodes
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    nodes: tuple[DrawnNode, ...]
    types: Mapping[str, str]

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages of the step that the graph has, in the order in which they run."""
        present = {node.stage for node in self.nodes}
        return tuple(stage for stage in scopes.STAGES if stage in present)


def weights_of(model: onnx.ModelProto) -> set[str]:
    """Return the names of the weights; none for a model that cannot be trained."""
    try:
        read = read_model(model)
        return set(all_weights(to_ir(read.proto)))
    except ModelError:
        return set()


def scene_of(model: onnx.ModelProto, weights: set[str], depth: int | None) -> Scene:
    """Return the content of a drawing of the model's main graph.

    - `model`: the model, whose tensors may refer to arrays, or have no numbers.
    - `weights`: the names of the tensors that are drawn as weights.
    - `depth`: the nodes of a scope that has at least this many levels, its stage included, are one
      box. None draws every node.
    """
    functions = {(f.domain, f.name): len(f.node) for f in model.functions}
    opsets = {o.domain: o.version for o in model.opset_import}
    scene = _read_graph(_with_shapes(model).graph, weights, opsets, functions)
    return scene if depth is None else replace(scene, nodes=tuple(_collapsed(scene, depth)))


def _with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with inferred shapes.

    A model whose shapes contradict each other is drawn with the types in the file.
    """
    small = large_tensors_as_inputs(model)  # ONNX cannot infer the shapes of a model above 2 GB
    try:
        inferred = onnx.shape_inference.infer_shapes(small, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError):
        return model
    for part in ("input", "initializer"):
        inferred.graph.ClearField(part)
        getattr(inferred.graph, part).extend(getattr(model.graph, part))
    return inferred


def _read_graph(
    graph: onnx.GraphProto, weights: set[str], opsets: Mapping[str, int], functions: Functions
) -> Scene:
    types = {v.name: type_text(v.type) for v in (*graph.value_info, *graph.input, *graph.output)}
    constants = _read_constants(graph, weights, types)
    nodes = []
    for node in graph.node:
        if is_constant(node):
            continue
        bodies = tuple(
            (name, _read_graph(body, set(), opsets, functions))
            for attribute in node.attribute
            for name, body in bodies_of(attribute)
        )
        nodes.append(_read_node(node, bodies, constants, opsets, functions))
    inputs = _read_inputs(graph, nodes, constants, weights, types)
    outputs = tuple(Tensor(v.name, "output", types[v.name]) for v in graph.output)
    return Scene(graph.name, len(graph.node), inputs, outputs, tuple(nodes), types)


def _read_constants(
    graph: onnx.GraphProto, weights: set[str], types: dict[str, str]
) -> dict[str, str]:
    """Return the text of each constant, "" for a weight or a large one; add their types."""
    constants: dict[str, str] = {}
    for tensor in graph.initializer:
        types[tensor.name] = tensor_type(tensor.data_type, tensor.dims)
        constants[tensor.name] = "" if tensor.name in weights else literal(tensor)
    for sparse in graph.sparse_initializer:
        types[sparse.values.name] = f"sparse {tensor_type(sparse.values.data_type, sparse.dims)}"
        constants[sparse.values.name] = ""
    for node in graph.node:
        if is_constant(node):
            name = node.output[0]
            constants[name] = "" if name in weights else literal_of_constant(node)
            types.setdefault(name, "constant")
    return constants


def _read_node(
    node: onnx.NodeProto,
    bodies: tuple[tuple[str, Scene], ...],
    constants: Mapping[str, str],
    opsets: Mapping[str, int],
    functions: Functions,
) -> DrawnNode:
    captured = dict.fromkeys(
        name for a in node.attribute for _, body in bodies_of(a) for name in _captured(body)
    )
    arguments = [
        Argument("" if constants.get(name) else name, constants.get(name, ""))
        for name in node.input
    ]
    arguments += [Argument(name, captured=True) for name in captured if not constants.get(name)]
    attributes = list(attributes_of(node, opsets))
    nodes_of_function = functions.get((node.domain, node.op_type))
    if nodes_of_function is not None:
        attributes.append(Attribute("function", count(nodes_of_function, "node")))
    is_onnx = node.domain in ("", "ai.onnx")
    return DrawnNode(
        scopes.stage_of(node.name),
        node.name,
        node.op_type if is_onnx else f"{node.domain}::{node.op_type}",
        tuple(arguments),
        tuple(node.output),
        tuple(attributes),
        bodies,
    )


def _read_inputs(
    graph: onnx.GraphProto,
    nodes: Sequence[DrawnNode],
    constants: Mapping[str, str],
    weights: set[str],
    types: Mapping[str, str],
) -> tuple[Tensor, ...]:
    """Return the inputs of a graph, then the initializers and large constants in use."""
    state = _training_state(graph, nodes)
    used = {argument.tensor for node in nodes for argument in node.arguments}
    used |= {v.name for v in graph.output}
    computed = {name for node in nodes for name in node.outputs}
    # Files of older IR versions list initializers among the inputs, too.
    inputs = [
        Tensor(v.name, state.get(v.name, "input"), types[v.name])
        for v in graph.input
        if v.name not in constants
    ]
    for name in constants:
        if name in used and name not in computed:
            kind = "weight" if name in weights else "constant"
            inputs.append(Tensor(name, kind, types[name]))
    return tuple(inputs)


def _training_state(graph: onnx.GraphProto, nodes: Sequence[DrawnNode]) -> dict[str, str]:
    """Return the kind, "weight" or "state", of each input of a step that is training state."""
    inputs = {v.name for v in graph.input}
    outputs = {v.name for v in graph.output}
    state = {name for name in inputs if names.updated(name) in outputs}
    learned = {name for node in nodes if node.stage == scopes.OPTIMIZER for name in node.outputs}
    kinds: dict[str, str] = {}
    for name in state:
        weight = name.rpartition("/")[0]
        if weight in inputs:
            kinds[name] = "state"
            # a graph that accumulates gradients does not update the weight itself
            kinds.setdefault(weight, "weight")
        elif names.updated(name) in learned:
            kinds[name] = "weight"
        else:
            kinds.setdefault(name, "state")
    return kinds


def _collapsed(scene: Scene, depth: int) -> Iterator[DrawnNode]:
    """Yield one box for each scope of `depth` levels that has several nodes.

    The boxes are in the order of their first nodes; each other node has its own box.
    """
    nodes_of_scope: dict[tuple[str, ...], list[DrawnNode]] = {}
    for i, node in enumerate(scene.nodes):
        path = [node.stage, *(level for level in node.name.split("/")[:-1] if level)]
        if len(path) > 1 and path[1] == node.stage:
            del path[1]
        scope = tuple(path[:depth]) if len(path) >= depth else (str(i), "")
        nodes_of_scope.setdefault(scope, []).append(node)
    readers: dict[str, set[tuple[str, ...]]] = {}
    for scope, nodes in nodes_of_scope.items():
        for argument in (argument for node in nodes for argument in node.arguments):
            readers.setdefault(argument.tensor, set()).add(scope)
    graph_outputs = {v.name for v in scene.outputs}
    for scope, nodes in nodes_of_scope.items():
        if len(nodes) == 1:
            yield nodes[0]
            continue
        used = {
            name
            for node in nodes
            for name in node.outputs
            if name in graph_outputs or readers.get(name, set()) - {scope}
        }
        yield _box_of_scope("/".join(scope), nodes, used)


def _box_of_scope(name: str, nodes: Sequence[DrawnNode], used: set[str]) -> DrawnNode:
    """Return one box for several nodes; `used` are the tensors that are read outside of it."""
    computed = dict.fromkeys(name for node in nodes for name in node.outputs if name)
    read = dict.fromkeys(argument.tensor for node in nodes for argument in node.arguments)
    operators = Counter(node.operator for node in nodes)
    return DrawnNode(
        nodes[0].stage,
        name,
        "",
        tuple(Argument(name) for name in read if name and name not in computed),
        tuple(name for name in computed if name in used),
        operator_counts=dict(operators.most_common()),
    )


def _captured(body: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of tensors that a body reads from the graph around it."""
    own = {v.name for v in body.input} | {t.name for t in body.initializer} | {""}
    own |= {t.values.name for t in body.sparse_initializer}
    own |= {name for node in body.node for name in node.output}
    for node in body.node:
        inner = [graph for attribute in node.attribute for _, graph in bodies_of(attribute)]
        read = [*node.input, *(name for graph in inner for name in _captured(graph))]
        yield from (name for name in read if name not in own)
    yield from (v.name for v in body.output if v.name not in own)
