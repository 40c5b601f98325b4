"""Element types and shapes of the outputs of an operator.

`infer_outputs` runs ONNX's own inference and completes it by the functions registered here: for
operators that ONNX does not define, and for operators whose inference is incomplete. Operators of
com.microsoft are registered with their gradient rules, by `infer=`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, Union

import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir

# Models are raised to this opset or a newer one before graphs are built. Operators of older opsets
# have attributes in place of inputs.
MIN_KNOWN_OPSET = 13

InferenceFunction = Callable[[ir.Node], None]
F = TypeVar("F", bound=InferenceFunction)

# (domain, operator type) -> a function that completes or replaces ONNX's inference.
INFERENCES: dict[tuple[str, str], InferenceFunction] = {}


class InputsError(ValueError):
    """An operator does not accept its inputs, or their type or shape is unknown."""


class UnknownRankError(InputsError):
    """A formula needs the number of dimensions of a value, which is unknown."""


def register_inference(op_type: str, domain: str = "") -> Callable[[F], F]:
    """Register the decorated function as the type and shape inference of an operator.

    The function is called with a node whose inputs have a type and, if known, a shape. It sets
    `type` and `shape` of the outputs, and leaves unknown ones None. For an operator with an ONNX
    schema, ONNX's inference runs first, and the function should keep its results.

    - `op_type`: the type of the operator, such as "Gelu".
    - `domain`: the operator's domain; "" is ONNX's own.

    A function that exists already is registered by a plain call:

    >>> _ = register_inference("Gelu", "my.domain")(same_type_and_shape)
    >>> text = '<ir_version: 10, opset_import: ["": 21, "my.domain": 1]>'
    >>> model = ir.from_onnx_text(text + "g (float[N, 2] x) => (y) { y = my.domain.Gelu(x) }")
    >>> infer_outputs(model.graph, model.graph[0])
    >>> print(model.graph.outputs[0].type, model.graph.outputs[0].shape)
    FLOAT [N,2]
    >>> del INFERENCES["my.domain", "Gelu"]
    """

    def register(function: F) -> F:
        INFERENCES[domain, op_type] = function
        return function

    return register


def infer_outputs(graph: ir.Graph, node: ir.Node) -> None:
    """Set the type and shape of a node's outputs from those of its inputs.

    `graph` is the graph of `node`, whose opset versions select the operator's schema. Outputs of an
    operator that neither ONNX nor `register_inference` knows stay unchanged. InputsError: the
    operator does not accept its inputs.
    """
    function = INFERENCES.get((node.domain, node.op_type))
    schema = schema_of(node, graph)
    if schema is not None and not (node.domain == "" and node.op_type in _SUBGRAPHS):
        for value in node.inputs:
            if value is not None and value.type is None:
                return  # an unknown operator precedes this one
        _infer_by_onnx(graph, node, schema)
    if function is not None:
        function(node)


def has_inference(graph: ir.Graph, node: ir.Node) -> bool:
    """Return whether `infer_outputs` knows the operator of a node."""
    return (node.domain, node.op_type) in INFERENCES or schema_of(node, graph) is not None


# --------------------------------------------------------------------------------------------------
# Functions to register


def same_type(node: ir.Node) -> None:
    """Give the outputs of `node` the type of its first input."""
    first = _first_input(node)
    if first is not None:
        for out in node.outputs:
            out.type = out.type or first.type


def same_type_and_shape(node: ir.Node) -> None:
    """Give the outputs of `node` type and shape of its first input.

    The second and third outputs are the statistics of a normalization; only their type is set.
    """
    same_type(node)
    first = _first_input(node)
    if first is not None:
        for out in (node.outputs[0], *node.outputs[3:]):
            out.shape = first.shape if out.shape is None else out.shape


def same_type_and_rank(node: ir.Node) -> None:
    """Give the first output of `node` the sizes of its first input, with an unknown last one.

    An input of five axes is skipped: it holds the packed heads of an attention, whose output has
    three axes.
    """
    same_type(node)
    first = _first_input(node)
    out = node.outputs[0]
    if first is None or first.shape is None or out.shape is not None or len(first.shape) >= 5:
        return
    out.shape = ir.Shape([*first.shape[:-1], None])


def like(op_type: str) -> InferenceFunction:
    """Return the inference of an operator that does more with the inputs of ONNX's `op_type`.

    Its output has the type and shape of the output of `op_type` with the common attributes.
    """

    def infer(node: ir.Node) -> None:
        same_type(node)
        graph = node.graph
        schema = find_schema("", op_type, graph.opset_imports.get("", 0)) if graph else None
        out = node.outputs[0]
        if not isinstance(graph, ir.Graph) or schema is None or out.shape is not None:
            return
        proto = ir.serde.serialize_node(node)
        proto.op_type, proto.domain = op_type, ""
        for attribute in [a for a in proto.attribute if a.name not in schema.attributes]:
            proto.attribute.remove(attribute)
        del proto.input[schema.max_input :]
        (inferred,) = _run_onnx_inference(graph, node, schema, proto)[:1]
        if inferred is not None and inferred[1] is not None:
            out.shape = inferred[1]

    return infer


def fused_product(node: ir.Node) -> None:
    """Give the output of a FusedMatMul its type, and the sizes known from its operands."""
    same_type(node)
    shapes = [None if v is None else v.shape for v in node.inputs[:2]]
    a, b = shapes if len(shapes) == 2 else (None, None)
    out = node.outputs[0]
    if a is None or b is None or len(a) < 2 or len(b) < 2 or out.shape is not None:
        return
    # with its rows before the batch, an operand is (rows, batch, ..., columns)
    rows: int | ir.SymbolicDim | None
    rows = a[-1] if node.attributes.get_int("transA", 0) else a[-2]
    columns: int | ir.SymbolicDim | None
    columns = b[-2] if node.attributes.get_int("transB", 0) else b[-1]
    batch = list(a[:-2]) if list(a[:-2]) == list(b[:-2]) else None
    if any(node.attributes.get_int(f"transBatch{name}", 0) for name in "AB"):
        rows = columns = batch = None
    rank = max(len(a), len(b))
    sizes: list[int | ir.SymbolicDim | None] = [None] * (rank - 2)
    if batch is not None:
        sizes = [*batch]
    out.shape = ir.Shape([*sizes, rows, columns])


def _first_input(node: ir.Node) -> ir.Value | None:
    return node.inputs[0] if node.inputs else None


# --------------------------------------------------------------------------------------------------
# Operators of classical models, for which ONNX has no inference


def _float_table(output: int = 0, columns: str | None = None) -> InferenceFunction:
    """Return the inference of an output that is a table of float32, (batch, columns).

    `output` is the position of the table among the outputs, `columns` the name of the attribute
    with the number of columns.
    """

    def infer(node: ir.Node) -> None:
        if _first_input(node) is None or output >= len(node.outputs):
            return
        table = node.outputs[output]
        table.type = table.type or ir.TensorType(ir.DataType.FLOAT)
        if table.shape is None:
            width = node.attributes.get(columns) if columns is not None else None
            table.shape = ir.Shape([None, None if width is None else width.as_int()])

    return infer


def _float_of_same_shape(node: ir.Node) -> None:
    """Give the output float32 and the shape of the input."""
    first = _first_input(node)
    if first is not None:
        out = node.outputs[0]
        out.type = out.type or ir.TensorType(ir.DataType.FLOAT)
        out.shape = first.shape if out.shape is None else out.shape


register_inference("Imputer", "ai.onnx.ml")(same_type_and_shape)
register_inference("Scaler", "ai.onnx.ml")(_float_of_same_shape)
register_inference("Normalizer", "ai.onnx.ml")(_float_of_same_shape)
register_inference("FeatureVectorizer", "ai.onnx.ml")(_float_table())
register_inference("LinearRegressor", "ai.onnx.ml")(_float_table(columns="targets"))
register_inference("TreeEnsembleRegressor", "ai.onnx.ml")(_float_table(columns="n_targets"))
register_inference("SVMRegressor", "ai.onnx.ml")(_float_table())
register_inference("TreeEnsembleClassifier", "ai.onnx.ml")(_float_table(output=1))
register_inference("SVMClassifier", "ai.onnx.ml")(_float_table(output=1))


# onnxruntime has it in every opset, ONNX from opset 17 on
register_inference("LayerNormalization")(same_type_and_shape)


# --------------------------------------------------------------------------------------------------
# Operators whose rank ONNX's inference misses


def _rank_from_length(node: ir.Node, shape: ir.Value | None) -> int | None:
    """Return the number of entries of `shape`, the computed shape of the node's output."""
    if node.outputs[0].shape is not None or shape is None or shape.shape is None:
        return None
    length = shape.shape[0] if len(shape.shape) == 1 else None
    return length if isinstance(length, int) else None


def _comparison(node: ir.Node) -> None:
    """Give the output truth values; onnx before 1.21 infers nothing for these operators."""
    node.outputs[0].type = node.outputs[0].type or ir.TensorType(ir.DataType.BOOL)
    like("Greater")(node)


register_inference("GreaterOrEqual")(_comparison)
register_inference("LessOrEqual")(_comparison)


@register_inference("ConstantOfShape")
def _constant_of_shape(node: ir.Node) -> None:
    rank = _rank_from_length(node, node.inputs[0])
    if rank is not None:
        node.outputs[0].shape = ir.Shape([None] * rank)


@register_inference("Reshape")
def _reshape(node: ir.Node) -> None:
    x = node.inputs[0]
    out = node.outputs[0]
    rank = _rank_from_length(node, node.inputs[1])
    if rank is not None:
        out.shape = ir.Shape([None] * rank)
    if x is None or x.shape is None or out.shape is None:
        return
    before, after = ([d for d in v.shape or () if isinstance(d, int)] for v in (x, out))
    known = len(before) == len(x.shape) and len(after) == len(out.shape)
    if known and math.prod(before) != math.prod(after):
        raise InputsError(
            f"Reshape {node.name!r} cannot turn {describe(x)} into {describe(out)}. If it fixes"
            " the model's batch size, use onnxfit.dynamic_batch(model)."
        )


@register_inference("Expand")
def _expand(node: ir.Node) -> None:
    rank = _rank_from_length(node, node.inputs[1])
    x = node.inputs[0]
    if rank is not None and x is not None and x.shape is not None:
        node.outputs[0].shape = ir.Shape([None] * max(rank, len(x.shape)))


@register_inference("Split")
def _infer_split(node: ir.Node) -> None:
    """Give outputs with computed sizes the input's sizes along every other axis."""
    x = node.inputs[0]
    if x is None or x.shape is None:
        return
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    for out in node.outputs:
        if out.shape is None:
            dims = enumerate(x.shape)
            out.shape = ir.Shape([None if i == axis % len(x.shape) else d for i, d in dims])


# --------------------------------------------------------------------------------------------------
# If, Loop and Scan: ONNX's inference for one operator does not see the values that a body captures

_SUBGRAPHS = {"If", "Loop", "Scan"}


@register_inference("If")
def _if(node: ir.Node) -> None:
    """Give the outputs the types of the branches, and the sizes that both branches have."""
    branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    for out, a, b in zip(node.outputs, branches[0].outputs, branches[1].outputs):
        out.type = a.type
        if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
            out.shape = None
        else:
            out.shape = ir.Shape([m if m == n else None for m, n in zip(a.shape, b.shape)])


@register_inference("Loop")
def _loop(node: ir.Node) -> None:
    """Give the outputs the types of the body's outputs; the number of iterations is unknown."""
    results = node.attributes["body"].as_graph().outputs[1:]  # without the condition
    states = len(node.inputs) - 2
    _outputs_of_body(node, results, states, ir.SymbolicDim(None))


@register_inference("Scan")
def _scan(node: ir.Node) -> None:
    """Give the outputs the types of the body's outputs, and the length of the scanned inputs."""
    results = node.attributes["body"].as_graph().outputs
    states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    scanned = len(results) > states
    length = _scan_length(node, states) if scanned else ir.SymbolicDim(None)
    _outputs_of_body(node, results, states, length)


def _outputs_of_body(
    node: ir.Node, results: Sequence[ir.Value], states: int, length: int | ir.SymbolicDim
) -> None:
    """Set the outputs of Loop or Scan: first `states` final states, then stacked results.

    `results` are the body's outputs without Loop's condition, `length` the number of iterations.
    """
    for i, (out, result) in enumerate(zip(node.outputs, results)):
        out.type = result.type
        if result.shape is None or i < states:
            out.shape = result.shape
            continue
        dims = list(result.shape)
        axis = _scan_axis(node, "scan_output_axes", i - states)
        dims.insert(axis if axis >= 0 else axis + len(dims) + 1, length)
        out.shape = ir.Shape(dims)


def _scan_axis(node: ir.Node, attribute: str, index: int) -> int:
    axes = node.attributes.get(attribute)
    return axes.as_ints()[index] if axes is not None else 0


def _scan_length(node: ir.Node, states: int) -> int | ir.SymbolicDim:
    """Return the number of iterations of a Scan, the size of its first scanned input."""
    scanned = node.inputs[states]
    if scanned is None or scanned.shape is None:
        return ir.SymbolicDim(None)
    axis = _scan_axis(node, "scan_input_axes", 0)
    rank = scanned.shape.rank()
    if not -rank <= axis < rank:
        raise InputsError(f"Scan {node.name!r} cannot scan {describe(scanned)} along axis {axis}.")
    return scanned.shape[axis]


# --------------------------------------------------------------------------------------------------
# ONNX's inference

# type and shape of each output, None where unknown; the shapes are frozen, and values share them
Inferred = tuple[Union[tuple[Any, Union[ir.Shape, None]], None], ...]
# A training graph repeats the same nodes (an optimizer's, for every weight), and ONNX's inference
# takes more time than all other work on the graph.
_INFERRED: dict[Any, Inferred] = {}
_LOCK = threading.Lock()
MAX_CACHED_INFERENCES = 20_000
MAX_CONSTANT_ELEMENTS = 1024  # elements of a constant that inference may read: shapes, axes, sizes

_HASHABLE = {
    ir.AttributeType.FLOAT,
    ir.AttributeType.INT,
    ir.AttributeType.STRING,
    ir.AttributeType.FLOATS,
    ir.AttributeType.INTS,
    ir.AttributeType.STRINGS,
}


def schema_of(node: ir.Node, graph: ir.Graph) -> onnx.defs.OpSchema | None:
    """Return ONNX's definition of a node's operator in the opset of `graph`, None without one."""
    return find_schema(node.domain, node.op_type, graph.opset_imports.get(node.domain, 0))


@cache
def find_schema(domain: str, op_type: str, version: int) -> onnx.defs.OpSchema | None:
    """Return ONNX's definition of an operator in opset `version` of `domain`, None without one."""
    if not onnx.defs.has(op_type, version, domain):
        return None
    return onnx.defs.get_schema(op_type, version, domain)


def describe(value: ir.Value | None) -> str:
    """Return the element type and shape of a value for messages, such as `FLOAT[batch,3]`."""
    if value is None:
        return "nothing"
    return f"{value.dtype}{value.shape if value.shape is not None else ''}"


def _infer_by_onnx(graph: ir.Graph, node: ir.Node, schema: onnx.defs.OpSchema) -> None:
    key = inference_key(graph, node)
    inferred = _INFERRED.get(key) if key is not None else None
    if inferred is None:
        inferred = _run_onnx_inference(graph, node, schema)
        if key is not None:
            with _LOCK:  # two threads could remove the same entry
                _INFERRED[key] = inferred
                if len(_INFERRED) > MAX_CACHED_INFERENCES:
                    del _INFERRED[next(iter(_INFERRED))]
    for out, result in zip(node.outputs, inferred):
        if result is None:
            continue
        type_, shape = result
        out.type = ir.TensorType(type_.dtype) if isinstance(type_, ir.TensorType) else type_
        if shape is not None and (out.shape is None or not out.shape.is_static()):
            out.shape = shape


def inference_key(graph: ir.Graph, node: ir.Node) -> Any:
    """Return everything that the types and sizes of a node's outputs depend on.

    None if it is not hashable: a tensor or a graph is among the attributes.
    """
    attributes = []
    for name, attribute in node.attributes.data.items():
        if attribute.type not in _HASHABLE:
            return None
        value = attribute.value
        attributes.append((name, tuple(value) if isinstance(value, (list, tuple)) else value))
    inputs: list[Any] = []
    for x in node.inputs:
        if x is None:
            inputs.append(None)
            continue
        type_ = x.type
        if not isinstance(type_, ir.TensorType):
            return None
        shape = x.shape
        tensor = _small_constant(x)
        constant = None if tensor is None else tensor.tobytes()
        inputs.append((type_.dtype, None if shape is None else shape.dims, constant))
    domain = node.domain
    version = graph.opset_imports.get(domain, 0)
    return domain, node.op_type, version, tuple(attributes), tuple(inputs), len(node.outputs)


def sizes_of(shape: ir.Shape) -> tuple[int | str | None, ...]:
    """Return the sizes of a shape: numbers, names, or None where unknown."""
    # A list is faster than a generator here, and this line runs for every node of a graph.
    return tuple([d if isinstance(d, int) else d.value for d in shape.dims])


def _small_constant(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the tensor of a constant that may be a shape, axes or a scalar, else None."""
    tensor = value.const_value
    if tensor is None:
        producer = value.producer()
        if producer is None or producer.op_type != "Constant":
            return None
        tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > MAX_CONSTANT_ELEMENTS or tensor.dtype == ir.DataType.STRING:
        return None
    return tensor


def _run_onnx_inference(
    graph: ir.Graph,
    node: ir.Node,
    schema: onnx.defs.OpSchema,
    proto: onnx.NodeProto | None = None,
) -> Inferred:
    """Run ONNX's inference for a node; `proto` is another node with its inputs and outputs."""
    types: dict[str, onnx.TypeProto] = {}
    constants: dict[str, onnx.TensorProto] = {}
    for value in node.inputs:
        if value is None or value.name is None:
            continue
        types[value.name] = ir.serde.serialize_value(value).type
        tensor = _small_constant(value)
        if tensor is not None:
            constants[value.name] = ir.serde.serialize_tensor(tensor)
    imports = [onnx.helper.make_opsetid(d, v) for d, v in graph.opset_imports.items()]
    is_new = refuses_bfloat16(node, schema)
    for type_ in types.values() if is_new else ():
        if type_.tensor_type.elem_type == onnx.TensorProto.BFLOAT16:
            type_.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    try:
        protos = onnx.shape_inference.infer_node_outputs(
            schema, proto or ir.serde.serialize_node(node), types, constants, opset_imports=imports
        )
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        raise InputsError(
            f"{node.op_type} does not accept {[describe(v) for v in node.inputs]}: {error}"
        ) from None
    results: list[Any] = []
    for out in node.outputs:
        proto = protos.get(out.name or "")
        if proto is None:
            results.append(None)
            continue
        shape = ir.serde.deserialize_type_proto_for_shape(proto)
        if shape is not None:
            shape = ir.Shape(sizes_of(shape), frozen=True)
        found = ir.serde.deserialize_type_proto_for_type(proto)
        if is_new and found == ir.TensorType(ir.DataType.FLOAT16):
            found = ir.TensorType(ir.DataType.BFLOAT16)
        results.append((found, shape))
    return tuple(results)


def refuses_bfloat16(node: ir.Node, schema: onnx.defs.OpSchema) -> bool:
    """Return whether an operator that takes float16 gets bfloat16, which its schema lacks.

    Conv, MaxPool and others take bfloat16 from opset 22 on. A step in mixed precision has such
    nodes until they are computed between Casts.
    """
    if not any(v is not None and v.dtype == ir.DataType.BFLOAT16 for v in node.inputs):
        return False
    types = {type_ for parameter in schema.inputs for type_ in parameter.types}
    return "tensor(float16)" in types and "tensor(bfloat16)" not in types
