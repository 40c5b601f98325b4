"""What a drawing shows of a model: its tensors and its calls, whole or scope by scope, in the
file's order.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError
from onnxfit.graph import names
from onnxfit.graph.model import read_model
from onnxfit.graph.weights import all_weights

# The parts of a step by the scope that a node's name begins with; what has none of these scopes is
# the model's own.
PARTS = {
    "model": "model",
    "train": "training form",
    "loss": "loss",
    "penalty": "penalty",
    "gradient": "gradient",
    "optimizer": "optimizer",
}
KINDS = {
    "input": "input",
    "weight": "weight",
    "state": "other state",
    "constant": "constant",
    "output": "output",
}
ELEMENTS = 4  # a constant of so many is written out where it is used
LETTERS = 40  # of a value that is written out


@dataclass(frozen=True)
class Tensor:
    """What goes into the graph or comes out of it."""

    name: str
    kind: str  # one of KINDS
    type: str


@dataclass(frozen=True)
class Attribute:
    """A setting of a node; `default` says that the operator's definition sets it so anyway."""

    name: str
    value: str
    default: bool = False


@dataclass(frozen=True)
class Call:
    """A node, or all nodes of a scope:

    `result = operator(arguments)`. An argument is a tensor's name, or the text of a constant.
    """

    part: str  # one of PARTS
    name: str
    operator: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    attributes: tuple[Attribute, ...] = ()
    bodies: tuple[tuple[str, Scene], ...] = ()  # of If, Loop and Scan
    operators: Mapping[str, int] = field(default_factory=dict)  # of a scope: how many nodes of each


@dataclass(frozen=True)
class Argument:
    """`tensor` is "" for a constant and for an input left out;

    `captured` says that only a body reads it.
    """

    tensor: str
    literal: str = ""
    captured: bool = False


@dataclass(frozen=True)
class Scene:
    """A graph to be drawn."""

    name: str
    nodes: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    calls: tuple[Call, ...]
    types: Mapping[str, str]

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a step that are there, in the order in which they run."""
        return tuple(part for part in PARTS if any(call.part == part for call in self.calls))


def scene_of(model: onnx.ModelProto, depth: int | None) -> Scene:
    """The main graph; nodes whose scope, the part of a step included, has `depth` steps or more are
    one call per scope.
    """
    try:
        weights = set(all_weights(ir.from_proto(read_model(model))))
    except ModelError:  # what cannot be trained has none
        weights = set()
    functions = {(f.domain, f.name): len(f.node) for f in model.functions}
    opsets = {o.domain: o.version for o in model.opset_import}
    # what contradicts itself stays as the file has it
    with contextlib.suppress(onnx.shape_inference.InferenceError, ValueError):
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    scene = _scene(model.graph, weights, opsets, functions)
    return scene if depth is None else replace(scene, calls=tuple(_collapsed(scene, depth)))


def clean(text: str) -> str:
    """The text of a stranger on one line: what is not printable, such as the codes that steer a
    terminal, is written as in Python.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _scene(
    graph: onnx.GraphProto,
    weights: set[str],
    opsets: Mapping[str, int],
    functions: Mapping[tuple[str, str], int],
) -> Scene:
    types = {v.name: _type(v.type) for v in (*graph.value_info, *graph.input, *graph.output)}
    constants: dict[str, str] = {}  # the literal, or "" for what is too long
    for tensor in graph.initializer:
        types[tensor.name] = _tensor_type(tensor.data_type, tensor.dims)
        constants[tensor.name] = "" if tensor.name in weights else _literal(tensor)
    for sparse in graph.sparse_initializer:
        types[sparse.values.name] = f"sparse {_tensor_type(sparse.values.data_type, sparse.dims)}"
        constants[sparse.values.name] = ""
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            constants[node.output[0]] = _constant(node)
            types.setdefault(node.output[0], "constant")
    results = {v.name for v in graph.output}
    calls = []
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            continue
        bodies = tuple(
            (body_name, _scene(body, set(), opsets, functions))
            for attribute in node.attribute
            for body_name, body in _graphs(attribute)
        )
        captured = dict.fromkeys(
            name for a in node.attribute for _, body in _graphs(a) for name in _captured(body)
        )
        given = [
            Argument("" if constants.get(name) else name, constants.get(name, ""))
            for name in node.input
        ]
        given += [Argument(name, captured=True) for name in captured if not constants.get(name)]
        attributes = list(_attributes(node, opsets))
        if (node.domain, node.op_type) in functions:
            attributes.append(
                Attribute("function", _count(functions[node.domain, node.op_type], "node"))
            )
        operator = (
            node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"
        )
        calls.append(
            Call(
                _part(node.name),
                node.name,
                operator,
                tuple(given),
                tuple(node.output),
                tuple(attributes),
                bodies,
            )
        )
    state = _state(graph, calls)
    kinds = {name: "weight" if name in weights else "constant" for name in constants}
    read = {argument.tensor for call in calls for argument in call.arguments} | results
    made = {name for call in calls for name in call.results}
    # a stranger's file may list an initializer among the inputs, too
    inputs = [
        Tensor(v.name, state.get(v.name, "input"), types[v.name])
        for v in graph.input
        if v.name not in constants
    ]
    inputs += [
        Tensor(n, kind, types[n]) for n, kind in kinds.items() if n in read and n not in made
    ]
    outputs = [Tensor(v.name, "output", types[v.name]) for v in graph.output]
    return Scene(graph.name, len(graph.node), tuple(inputs), tuple(outputs), tuple(calls), types)


def _state(graph: onnx.GraphProto, calls: Sequence[Call]) -> dict[str, str]:
    """The inputs of a step that are training state: weights, and what goes with them."""
    inputs, outputs = {v.name for v in graph.input}, {v.name for v in graph.output}
    state = {name for name in inputs if names.updated(name) in outputs}
    learned = {name for call in calls if call.part == "optimizer" for name in call.results}
    found = {}
    for name in state:
        weight = name.rpartition("/")[0]
        if weight in inputs:
            found[name] = "state"
            # where gradients are accumulated, the weight itself stays as it is
            found.setdefault(weight, "weight")
        elif names.updated(name) in learned:
            found[name] = "weight"
        else:
            found.setdefault(name, "state")
    return found


def _part(node: str) -> str:
    scope = node.split("/", 1)[0]
    if scope in PARTS and scope != "model" and "/" in node:
        return scope
    # as onnxruntime's builder names them
    return "gradient" if "_Grad/" in node or node.endswith("_Grad") else "model"


def _collapsed(scene: Scene, depth: int) -> Iterator[Call]:
    """The calls of the scene, one for each scope of `depth` steps that has several nodes, in the
    order of their first nodes.
    """
    scopes: dict[tuple[str, ...], list[Call]] = {}
    for i, call in enumerate(scene.calls):
        path = [call.part, *(step for step in call.name.split("/")[:-1] if step)]
        if len(path) > 1 and path[1] == call.part:
            del path[1]
        scopes.setdefault(tuple(path[:depth]) if len(path) >= depth else (str(i), ""), []).append(
            call
        )
    wanted = {v.name for v in scene.outputs}
    readers: dict[str, set[tuple[str, ...]]] = {}
    for scope, calls in scopes.items():
        for call in calls:
            for argument in call.arguments:
                readers.setdefault(argument.tensor, set()).add(scope)
    for scope, calls in scopes.items():
        if len(calls) == 1:
            yield calls[0]
            continue
        made = dict.fromkeys(name for call in calls for name in call.results if name)
        reads = dict.fromkeys(
            a.tensor for call in calls for a in call.arguments if a.tensor and a.tensor not in made
        )
        left = tuple(name for name in made if name in wanted or readers.get(name, set()) - {scope})
        operators = Counter(call.operator for call in calls)
        yield Call(
            calls[0].part,
            "/".join(scope),
            "",
            tuple(map(Argument, reads)),
            left,
            operators=dict(operators.most_common()),
        )


def _captured(body: onnx.GraphProto) -> Iterator[str]:
    """What a body reads and does not make itself."""
    own = {v.name for v in body.input} | {t.name for t in body.initializer} | {""}
    own |= {t.values.name for t in body.sparse_initializer} | {
        name for node in body.node for name in node.output
    }
    for node in body.node:
        inner = (
            name
            for attribute in node.attribute
            for _, graph in _graphs(attribute)
            for name in _captured(graph)
        )
        yield from (name for name in (*node.input, *inner) if name not in own)
    yield from (v.name for v in body.output if v.name not in own)


def _graphs(attribute: onnx.AttributeProto) -> list[tuple[str, onnx.GraphProto]]:
    if attribute.type == onnx.AttributeProto.GRAPH:
        return [(attribute.name, attribute.g)]
    return [(f"{attribute.name}[{i}]", graph) for i, graph in enumerate(attribute.graphs)]


def _attributes(node: onnx.NodeProto, opsets: Mapping[str, int]) -> Iterator[Attribute]:
    defaults: Mapping[str, onnx.AttributeProto] = {}
    version = opsets.get(node.domain, opsets.get("", 0))
    if version and onnx.defs.has(node.op_type, version, node.domain):
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
        defaults = {
            name: a.default_value for name, a in schema.attributes.items() if a.default_value.name
        }
    for attribute in node.attribute:
        value = _value(attribute)
        yield Attribute(
            attribute.name,
            value,
            attribute.name in defaults and value == _value(defaults[attribute.name]),
        )


def _value(attribute: onnx.AttributeProto) -> str:
    graphs = _graphs(attribute)
    if graphs:
        return _count(sum(_nodes(graph) for _, graph in graphs), "node")
    if attribute.ref_attr_name:
        return f"@{attribute.ref_attr_name}"
    if attribute.type == onnx.AttributeProto.TENSOR:
        return _literal(attribute.t) or _tensor_type(attribute.t.data_type, attribute.t.dims)
    if attribute.type == onnx.AttributeProto.INT and attribute.name in (
        "to",
        "dtype",
        "stash_type",
    ):
        return _element_type(attribute.i)
    if attribute.type in (
        onnx.AttributeProto.FLOAT,
        onnx.AttributeProto.INT,
        onnx.AttributeProto.STRING,
        onnx.AttributeProto.FLOATS,
        onnx.AttributeProto.INTS,
        onnx.AttributeProto.STRINGS,
    ):
        return _short(onnx.helper.get_attribute_value(attribute))
    return str(onnx.AttributeProto.AttributeType.Name(attribute.type)).lower()


def _nodes(graph: onnx.GraphProto) -> int:
    return len(graph.node) + sum(
        _nodes(body) for node in graph.node for a in node.attribute for _, body in _graphs(a)
    )


def _short(value: object) -> str:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        text = clean(value)
    elif isinstance(value, Iterable):
        items = list(value)
        text = ", ".join(_short(item) for item in items[:16])
        text = f"[{text}, …]" if len(items) > 16 else f"[{text}]"
    else:
        text = str(value)
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"


def _constant(node: onnx.NodeProto) -> str:
    (attribute,) = node.attribute
    return "" if attribute.type == onnx.AttributeProto.SPARSE_TENSOR else _literal_of(attribute)


def _literal_of(attribute: onnx.AttributeProto) -> str:
    if attribute.type == onnx.AttributeProto.TENSOR:
        return _literal(attribute.t)
    value = onnx.helper.get_attribute_value(attribute)
    return (
        ""
        if isinstance(value, Sequence) and not isinstance(value, bytes) and len(value) > ELEMENTS
        else _short(value)
    )


def _literal(tensor: onnx.TensorProto) -> str:
    """A small constant's value; "" for a large one, and for one whose data are elsewhere."""
    size = int(np.prod(tensor.dims, dtype=np.int64)) if tensor.dims else 1
    if size > ELEMENTS or tensor.data_location == onnx.TensorProto.EXTERNAL or len(tensor.dims) > 1:
        return ""
    return _short(onnx.numpy_helper.to_array(tensor).tolist())


def _type(proto: onnx.TypeProto) -> str:
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        tensor = proto.tensor_type
        if not tensor.HasField("shape"):
            return f"{_element_type(tensor.elem_type)}[?]"
        dims = [
            d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim
        ]
        return _tensor_type(tensor.elem_type, dims)
    if kind == "sequence_type":
        return f"sequence of {_type(proto.sequence_type.elem_type)}"
    if kind == "optional_type":
        return f"optional {_type(proto.optional_type.elem_type)}"
    if kind == "map_type":
        return f"map of {_type(proto.map_type.value_type)}"
    return "?" if kind is None else kind.removesuffix("_type")


def _tensor_type(element: int, dims: Iterable[object]) -> str:
    return f"{_element_type(element)}[{', '.join(clean(str(d)) for d in dims)}]"


def _element_type(element: int) -> str:
    known = onnx.TensorProto.DataType
    if element not in known.values() or element == 0:
        return "?"
    name = str(known.Name(element)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
