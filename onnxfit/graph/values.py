"""Values with arithmetic, so that a formula written in Python is the ONNX graph it describes.

`onnx_ir.Value` has arithmetic too, but through one handler for the whole process, without
comparisons or powers, and with Python numbers typed by themselves; here every value knows the graph
it belongs to, and a number takes the type of the tensor it meets. Storage, naming and traversal
stay onnx-ir's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, Union, overload

import numpy as np
import numpy.typing as npt
import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir

from onnxfit.errors import UnknownNameError

Number = Union[bool, int, float, np.generic]
Operand = Union["Value", Number, npt.NDArray[Any], Sequence[int], Sequence[float], None]


class OperatorCall(Protocol):
    """The call `op.Name(*inputs, **attributes)`: the operator's first output, or the first
    `_outputs` as a tuple.
    """

    @overload
    def __call__(
        self, *inputs: Operand, _domain: str = "", _outputs: None = None, **attributes: Any
    ) -> Value: ...

    @overload
    def __call__(
        self, *inputs: Operand, _domain: str = "", _outputs: int, **attributes: Any
    ) -> tuple[Value, ...]: ...


class GraphBuilder:
    """Appends operators to a graph:

    `op.Abs(x)`, `op.ReduceSum(x, [0], keepdims=0)`, `op.Split(x, _outputs=2, num_outputs=2)`.

    Inputs are values, numbers, arrays, or None for an absent optional input; attributes are
    keywords. A number or array takes the element type its operand shares with the other inputs (`x
    * 2` is a float if x is), int64 where the operator wants int64. The call returns the operator's
    first output, or with `_outputs=n` a tuple of its first n; `_domain` chooses another operator
    set.

    >>> graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    >>> op = GraphBuilder(graph)
    >>> x = op.input("x", np.float32, ("batch", 3))
    >>> y = 2 * op.ReduceSum(x * x, [1], keepdims=0) - 1
    >>> y.shape, y.dtype, [node.op_type for node in graph]
    (('batch',), dtype('float32'), ['Mul', 'ReduceSum', 'Mul', 'Sub'])
    """

    def __init__(self, graph: ir.Graph, around: GraphBuilder | None = None) -> None:
        """`around` builds the graph that a subgraph belongs to: no name is used in both, and scopes
        go on.
        """
        self.graph = graph
        self.inside = around is not None
        if around is not None:  # a body that was read has no versions of its own
            graph.opset_imports.update(around.graph.opset_imports)
        self._scope: str = "" if around is None else around._scope
        self._anchor: ir.Node | None = None
        self._taken: set[str] = set() if around is None else around._taken
        self._taken.update(graph.initializers)
        self._taken.update(v.name for v in graph.inputs if v.name)
        for node in ir.traversal.RecursiveGraphIterator(graph):
            self._taken.update(v.name for v in node.outputs if v.name)
            self._taken.add(node.name or "")
        self._generated: set[str] = set()  # names of values that nobody outside has seen
        self._counts: dict[str, int] = {} if around is None else around._counts
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}

    def __getattr__(self, op_type: str) -> OperatorCall:
        if op_type.startswith("_"):
            raise AttributeError(op_type)

        def call(
            *inputs: Operand, _domain: str = "", _outputs: int | None = None, **attributes: Any
        ) -> Any:
            values = self._call(op_type, inputs, _domain, _outputs or 1, attributes)
            return values[0] if _outputs is None else values[:_outputs]

        return call

    @contextmanager
    def scope(self, name: str) -> Iterator[GraphBuilder]:
        """Names made inside begin with `name/`: readable graphs, and errors that say who made the
        node.
        """
        before, self._scope = self._scope, f"{self._scope}{name}/"
        try:
            yield self
        finally:
            self._scope = before

    @contextmanager
    def replacing(self, node: ir.Node) -> Iterator[Callable[..., None]]:
        """What is added inside goes before `node`; calling the result with values puts them in
        place of the node's outputs.

        >>> model = ir.from_onnx_text('<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Abs(x) }')
        >>> op = GraphBuilder(model.graph)
        >>> with op.replacing(model.graph.node(0)) as replace:
        ...     x = op.wrap(model.graph.inputs[0])
        ...     replace(op.Max(x, -x))
        >>> [node.op_type for node in model.graph], model.graph.outputs[0].name
        (['Neg', 'Max'], 'y')
        """
        before = (self._anchor, self._scope)
        self._anchor, self._scope = node, f"{node.name or node.op_type}/"

        def replace(value: Value, *others: Value | None) -> None:
            for old, other in zip(node.outputs[1:], others):
                if other is not None and (old.uses() or old.is_graph_output()):
                    copy = self.Identity(other).ir
                    old.replace_all_uses_with(copy, replace_graph_outputs=True)
                    old.name, copy.name = copy.name, old.name
            old, new = node.outputs[0], value.ir
            if old.is_graph_output() and (new.is_graph_output() or new.producer() is None):
                # one value is one output, and an input cannot be renamed
                new = self.Identity(value).ir
            self._take_over(old, new)
            self._anchor = None
            self.graph.remove(node, safe=True)

        try:
            yield replace
        finally:
            self._anchor, self._scope = before

    def move_uses(self, old: Value, new: Value) -> None:
        """Let everything that uses `old`, a node's output, use `new`, which may come later in the
        graph: the nodes are sorted anew.

        The node stays where it is, for whoever looks at it; `RemoveUnusedNodesPass` takes it away.
        """
        self._take_over(old.ir, new.ir)
        self.graph.sort()

    def _take_over(self, old: ir.Value, new: ir.Value) -> None:
        """Let everything that uses `old` use `new`, which takes its name where that is an output's."""
        name = old.name if old.is_graph_output() else None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        if name is not None:
            old.name, new.name = self.unique_name("replaced"), name

    def input(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int | str | None]) -> Value:
        """A new graph input."""
        self._take(name)
        value = ir.val(name, ir.DataType.from_numpy(np.dtype(dtype)), shape)
        self.graph.inputs.append(value)
        return Value(self, value)

    def output(self, name: str, value: Value) -> Value:
        """Make `value` a graph output called `name`.

        A value that has another name or use for the user gets there through an Identity.
        """
        self._take(name)
        if value.name not in self._generated or value.ir.is_graph_output():
            value = self.Identity(value)
        self._generated.discard(value.name)
        value.ir.name = name
        self.graph.outputs.append(value.ir)
        return value

    def subgraph(self, name: str) -> GraphBuilder:
        """A builder for the body of an operator that has one: its inputs are made by `input`, its
        outputs by `output`.
        """
        return GraphBuilder(
            ir.Graph(
                [],
                [],
                nodes=[],
                opset_imports=self.graph.opset_imports,
                name=self.unique_name(name),
            ),
            around=self,
        )

    def wrap(self, value: ir.Value) -> Value:
        """A value the graph already has, with arithmetic."""
        return Value(self, value)

    def constant(
        self, value: Number | npt.NDArray[Any] | Sequence[Any], dtype: npt.DTypeLike | None = None
    ) -> Value:
        """A constant of the graph; equal constants are one initializer."""
        array = np.asarray(value)
        if (
            dtype is None
            and not isinstance(value, (np.ndarray, np.generic))
            and array.dtype == np.float64
        ):
            # a Python float without a partner is single precision, as everywhere in ONNX
            dtype = np.float32
        array = np.ascontiguousarray(array, dtype).reshape(array.shape)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.Tensor(array, name=self.unique_name("constant"))
            initializer = ir.Value(
                name=tensor.name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            self.graph.initializers[tensor.name or ""] = initializer
            self._constants[key] = Value(self, initializer)
        return self._constants[key]

    def cast(self, value: Operand, dtype: npt.DTypeLike) -> Value:
        """`value` as another element type; nothing is added where it has that type already."""
        if not isinstance(value, Value):
            # None is no operand of a cast
            return self.constant(value, dtype)  # type: ignore[arg-type]
        wanted = np.dtype(dtype)
        if value.dtype == wanted:
            return value
        return self.Cast(value, to=int(ir.DataType.from_numpy(wanted)))

    def shape(self, value: Value, start: int = 0, end: int | None = None) -> Value:
        """The sizes of a value (from axis `start` to before `end`) as an int64 vector: a constant
        where they are known, else computed.

        >>> op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
        >>> x = op.input("x", np.float32, ("batch", 3))
        >>> op.shape(x, 1).ir.const_value.numpy(), op.shape(x).ir.producer().op_type
        (array([3]), 'Shape')
        """
        sizes = None if value.shape is None else value.shape[start:end]
        if sizes is not None and all(isinstance(d, int) for d in sizes):
            return self.constant(np.array(sizes, np.int64))
        return self.Shape(value, start=start or None, end=end)

    def _take(self, name: str) -> str:
        if name in self._taken:
            raise ValueError(f"The graph already has a value or node called {name!r}.")
        self._taken.add(name)
        return name

    def has_name(self, name: str) -> bool:
        """Whether the graph has a value or node of this name."""
        return name in self._taken

    def unique_name(self, stem: str) -> str:
        """A name that nothing in the graph has."""
        stem = self._scope + stem
        while True:
            count = self._counts[stem] = self._counts.get(stem, -1) + 1
            name = f"{stem}_{count}" if count else stem
            if name not in self._taken:
                return self._take(name)

    def _call(
        self,
        op_type: str,
        inputs: Sequence[Operand],
        domain: str,
        outputs: int,
        attributes: dict[str, Any],
    ) -> tuple[Value, ...]:
        version = self.graph.opset_imports.get(domain)
        if version is None:
            version = self.graph.opset_imports[domain] = 1
        schema = _schema(domain, op_type, version)
        if domain == "" and schema is None:
            raise UnknownNameError(
                "operator of ONNX",
                op_type,
                {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""},
            )
        values = self._operands(schema, inputs)
        # onnxruntime 1.19 crashes on some that end with an empty name
        while values and values[-1] is None:
            values.pop()
        count = max(outputs, schema.min_output if schema else 1)
        name = self.unique_name(op_type)
        node = ir.Node(
            domain,
            op_type,
            [v.ir if v is not None else None for v in values],
            ir.convenience.convert_attributes(
                {k: v for k, v in attributes.items() if v is not None}
            ),
            num_outputs=count,
            name=name,
        )
        for i, out in enumerate(node.outputs):
            out.name = (
                self._take(f"{name}:{i}") if i or count > 1 else self.unique_name(f"{op_type}.out")
            )
            self._generated.add(out.name)
        if self._anchor is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self._anchor, node)
        try:
            infer_outputs(self.graph, node)
        except ValueError:
            self.graph.remove(node, safe=True)
            raise
        return tuple(Value(self, out) for out in node.outputs)

    def _operands(
        self, schema: onnx.defs.OpSchema | None, inputs: Sequence[Operand]
    ) -> list[Value | None]:
        """Every input as a value; a number or array takes the element type of the inputs it shares
        a type variable with.
        """
        formals = schema.inputs if schema else ()

        def formal(i: int) -> Any:
            return formals[min(i, len(formals) - 1)] if formals else None

        bound = {
            formal(i).type_str if formals else "T": v.dtype
            for i, v in enumerate(inputs)
            if isinstance(v, Value)
        }
        values: list[Value | None] = []
        for i, given in enumerate(inputs):
            if given is None or isinstance(given, Value):
                values.append(given)
                continue
            slot = formal(i)
            variable = slot.type_str if slot else "T"
            wanted = bound.get(variable)
            if (
                wanted is None
                and slot is not None
                and set(slot.types) <= {"tensor(int64)", "tensor(int32)"}
            ):
                wanted = np.dtype(np.int64)
            values.append(self.constant(given, wanted))
        return values


def values_of(graph: ir.Graph) -> dict[str, ir.Value]:
    """Every value of a graph by its name: inputs, initializers, outputs of nodes."""
    values = (
        *graph.inputs,
        *graph.initializers.values(),
        *(v for node in graph for v in node.outputs),
    )
    return {v.name: v for v in values if v.name}


def infer_outputs(graph: ir.Graph, node: ir.Node) -> None:
    """Give a node's outputs their type and shape, by ONNX's own inference for this one operator;

    InputsError where inputs cannot meet.
    """
    schema = schema_of(node, graph)
    if schema is None:
        _like_its_input(node)
        return
    if node.domain == "" and node.op_type in _BODIES:
        _take_over(node)
        return
    if any(v is not None and v.type is None for v in node.inputs):
        return  # made by an operator that ONNX does not know
    key = _inference_key(graph, node)
    inferred = _INFERRED.get(key) if key is not None else None
    if inferred is None:
        inferred = _inferred(graph, node, schema)
        if key is not None:
            _INFERRED[key] = inferred
            if len(_INFERRED) > MAX_INFERRED:
                del _INFERRED[next(iter(_INFERRED))]
    for out, found in zip(node.outputs, inferred):
        if found is not None:
            type_, dims = found
            out.type = ir.TensorType(type_.dtype) if isinstance(type_, ir.TensorType) else type_
            if dims is not None and (out.shape is None or not out.shape.is_static()):
                out.shape = ir.Shape(dims)
    if node.op_type in _BY_LENGTH and node.domain == "" and node.outputs[0].shape is None:
        _rank_by_length(node)
    if node.domain == "ai.onnx.ml" and node.op_type in _TABLES:
        _table(node)
    elif node.op_type == "Split" and node.domain == "":
        _rank_of_parts(node)


# Operators that only onnxruntime knows: those whose outputs have the type and shape of the first
# input, the type and rank, and the type alone.
_SAME_SHAPE = {
    "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "BiasAdd", "BiasSoftmax", "Trilu", "Inverse", "RotaryEmbedding", "SimplifiedLayerNormalization",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
}  # fmt: skip
_OTHER_WIDTH = {"Attention", "MultiHeadAttention", "GroupQueryAttention", "BiasSplitGelu"}
_SAME_TYPE = {"FusedMatMul", "TransposeMatMul", "FusedGemm", "FusedConv"}


def _like_its_input(node: ir.Node) -> None:
    first = node.inputs[0] if node.inputs else None
    if first is not None and (node.op_type, node.domain) == (
        "EmbedLayerNormalization",
        "com.microsoft",
    ):
        _embed(node)
        return
    if (
        first is None
        or node.op_type not in _SAME_SHAPE | _OTHER_WIDTH | _SAME_TYPE
        or node.domain not in ("", "com.microsoft")
    ):
        return
    for out in node.outputs:
        out.type = out.type or first.type
    if node.op_type in _SAME_SHAPE:
        for out in (node.outputs[0], *node.outputs[3:]):  # between them are statistics
            out.shape = first.shape if out.shape is None else out.shape
    elif (
        node.op_type in _OTHER_WIDTH
        and node.outputs[0].shape is None
        and first.shape is not None
        and len(first.shape) < 5
    ):
        # five axes are heads that are packed
        node.outputs[0].shape = ir.Shape([*first.shape[:-1], None])


def _embed(node: ir.Node) -> None:
    """(batch, length, hidden), a number for each row, and again (batch, length, hidden)."""
    ids, words = node.inputs[0], node.inputs[2]
    assert ids is not None
    assert words is not None
    for i, out in enumerate(node.outputs):
        out.type = out.type or (ir.TensorType(ir.DataType.INT32) if i == 1 else words.type)
        if out.shape is None and ids.shape is not None and words.shape is not None:
            out.shape = ir.Shape(ids.shape[:1] if i == 1 else [*ids.shape, words.shape[-1]])


# Of the operators of classical models that ONNX infers nothing of: the output that is a table of
# numbers, and the attribute with its width, None where it has the columns of the first input.
_TABLES: dict[str, tuple[int, str | None]] = {
    "Imputer": (0, None), "Scaler": (0, None), "Normalizer": (0, None), "FeatureVectorizer": (0, ""), "LinearRegressor": (0, "targets"),
    "TreeEnsembleRegressor": (0, "n_targets"), "SVMRegressor": (0, ""), "TreeEnsembleClassifier": (1, ""), "SVMClassifier": (1, ""),
}  # fmt: skip


def _table(node: ir.Node) -> None:
    """(batch, columns) of float32, but of the first input's type behind an Imputer."""
    index, width = _TABLES[node.op_type]
    first, out = node.inputs[0], node.outputs[index] if index < len(node.outputs) else None
    if first is None or out is None:
        return
    out.type = out.type or (
        first.type if node.op_type == "Imputer" else ir.TensorType(ir.DataType.FLOAT)
    )
    if out.shape is None:
        columns = (
            node.attributes[width].as_int()
            if width is not None and width in node.attributes
            else None
        )
        out.shape = first.shape if width is None else ir.Shape([None, columns])


_BY_LENGTH = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}


def _rank_by_length(node: ir.Node) -> None:
    """What is brought into a computed shape has as many axes as the shape has entries, which ONNX's
    inference overlooks.
    """
    target = node.inputs[_BY_LENGTH[node.op_type]]
    length = (
        target.shape[0]
        if target is not None and target.shape is not None and len(target.shape) == 1
        else None
    )
    if not isinstance(length, int):
        return
    if node.op_type == "Expand":
        given = node.inputs[0].shape if node.inputs[0] is not None else None
        if given is None:
            return
        length = max(length, len(given))
    node.outputs[0].shape = ir.Shape([None] * length)


def _rank_of_parts(node: ir.Node) -> None:
    """The parts of a Split whose sizes are computed differ from the whole in one axis alone, which
    ONNX's inference overlooks, too.
    """
    whole = node.inputs[0].shape if node.inputs[0] is not None else None
    if whole is None:
        return
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    for part in node.outputs:
        if part.shape is None:
            part.shape = ir.Shape(
                [None if i == axis % len(whole) else d for i, d in enumerate(whole)]
            )


# type and sizes of each output, None where unknown
Inferred = tuple[Union[tuple[Any, Union[tuple[Any, ...], None]], None], ...]
# A graph of training repeats itself (an optimizer's nodes for every weight), and asking ONNX costs
# more than all else in building it.
_INFERRED: dict[Any, Inferred] = {}
MAX_INFERRED = 20_000


def schema_of(node: ir.Node, graph: ir.Graph) -> onnx.defs.OpSchema | None:
    """ONNX's definition of a node's operator, None where it has none."""
    return _schema(node.domain, node.op_type, graph.opset_imports.get(node.domain, 0))


@cache
def _schema(domain: str, op_type: str, version: int) -> onnx.defs.OpSchema | None:
    return (
        onnx.defs.get_schema(op_type, version, domain)
        if onnx.defs.has(op_type, version, domain)
        else None
    )


def _inference_key(graph: ir.Graph, node: ir.Node) -> Any:
    """All that the types and sizes of a node's outputs depend on;

    None where that is not hashable.
    """
    attributes = []
    for name, attribute in node.attributes.items():
        if attribute.type not in _SIMPLE:
            return None
        attributes.append(
            (
                name,
                (
                    tuple(attribute.value)
                    if isinstance(attribute.value, (list, tuple))
                    else attribute.value
                ),
            )
        )
    inputs: list[Any] = []
    for value in node.inputs:
        if value is None:
            inputs.append(None)
            continue
        if not isinstance(value.type, ir.TensorType):
            return None
        dims = (
            None
            if value.shape is None
            else tuple([d if isinstance(d, int) else d.value for d in value.shape])
        )
        tensor = _small_constant(value)
        inputs.append((value.type.dtype, dims, None if tensor is None else tensor.tobytes()))
    version = graph.opset_imports.get(node.domain, 0)
    return node.domain, node.op_type, version, tuple(attributes), tuple(inputs), len(node.outputs)


_SIMPLE = {
    ir.AttributeType.FLOAT, ir.AttributeType.INT, ir.AttributeType.STRING, ir.AttributeType.FLOATS, ir.AttributeType.INTS, ir.AttributeType.STRINGS,
}  # fmt: skip


def _small_constant(value: ir.Value) -> ir.TensorProtocol | None:
    """The numbers of a value that is a constant and may be a shape, axes or a scalar."""
    tensor = (
        value.const_value if value.producer() is None else ir.convenience.get_const_tensor(value)
    )
    return (
        tensor
        if tensor is not None and tensor.size <= 1024 and tensor.dtype != ir.DataType.STRING
        else None
    )


def _inferred(graph: ir.Graph, node: ir.Node, schema: onnx.defs.OpSchema) -> Inferred:
    types, data = {}, {}
    for value in node.inputs:
        if value is None or value.name is None:
            continue
        types[value.name] = ir.serde.serialize_value(value).type
        tensor = _small_constant(value)
        if tensor is not None:
            data[value.name] = ir.serde.serialize_tensor(tensor)
    imports = [onnx.helper.make_opsetid(d, v) for d, v in graph.opset_imports.items()]
    try:
        found = onnx.shape_inference.infer_node_outputs(
            schema, ir.serde.serialize_node(node), types, data, opset_imports=imports
        )
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        raise InputsError(
            f"{node.op_type} does not accept {[_describe(v) for v in node.inputs]}: {error}"
        ) from None
    results: list[Any] = []
    for out in node.outputs:
        if out.name not in found:
            results.append(None)
            continue
        shape = ir.serde.deserialize_type_proto_for_shape(found[out.name])
        dims = (
            None if shape is None else tuple([d if isinstance(d, int) else d.value for d in shape])
        )
        results.append((ir.serde.deserialize_type_proto_for_type(found[out.name]), dims))
    return tuple(results)


_BODIES = {"If": "then_branch", "Loop": "body", "Scan": "body"}


def _take_over(node: ir.Node) -> None:
    """The outputs of If, Loop and Scan have the types of their body's;

    ONNX's inference for one operator does not see what a body captures.
    """
    body = node.attributes[_BODIES[node.op_type]].as_graph()
    inner = list(body.outputs)
    if node.op_type == "If":
        states = len(inner)
        others = [v.shape for v in node.attributes["else_branch"].as_graph().outputs]
    elif node.op_type == "Loop":
        inner = inner[1:]  # the condition
        states, others = len(node.inputs) - 2, []
    else:
        states, others = len(node.inputs) - node.attributes["num_scan_inputs"].as_int(), []
    for i, (out, value) in enumerate(zip(node.outputs, inner)):
        out.type = value.type
        other = others[i] if i < len(others) else value.shape
        if value.shape is None or other is None or len(other) != len(value.shape):
            out.shape = None
        elif others:
            out.shape = ir.Shape([a if a == b else None for a, b in zip(value.shape, other)])
        elif i < states:
            out.shape = value.shape
        else:
            axis = _scan_axis(node, "scan_output_axes", i - states)
            dims = list(value.shape)
            dims.insert(axis if axis >= 0 else axis + len(dims) + 1, _scan_length(node, states))
            out.shape = ir.Shape(dims)


def _scan_axis(node: ir.Node, attribute: str, index: int) -> int:
    axes = node.attributes.get(attribute)
    return axes.as_ints()[index] if axes is not None else 0


def _scan_length(node: ir.Node, states: int) -> int | ir.SymbolicDim:
    """How many steps a Scan makes, which its inputs tell; a Loop's are not known."""
    scanned = node.inputs[states] if node.op_type == "Scan" else None
    if scanned is None or scanned.shape is None:
        return ir.SymbolicDim(None)
    axis, rank = _scan_axis(node, "scan_input_axes", 0), scanned.shape.rank()
    if not -rank <= axis < rank:
        raise InputsError(f"{node.name}: Scan cannot go along axis {axis} of {_describe(scanned)}.")
    return scanned.shape[axis]


def _describe(value: ir.Value | None) -> str:
    return (
        "nothing"
        if value is None
        else f"{value.dtype}{value.shape if value.shape is not None else ''}"
    )


class InputsError(ValueError):
    """An operator cannot take what it is given, or the graph does not tell enough of it."""


class UnknownRankError(InputsError):
    """A formula needs the number of dimensions of a value, and the graph does not tell it."""


class Value:
    """A tensor of a graph being built.

    `+ - * / ** @`, comparisons and `~ & |` append the operator of that name.
    """

    __slots__ = ("ir", "op")
    # numpy scalars and arrays on the left hand leave the operation to this class
    __array_ufunc__ = None
    __hash__ = object.__hash__

    def __init__(self, op: GraphBuilder, value: ir.Value) -> None:
        self.op = op
        self.ir = value

    @property
    def name(self) -> str:
        return self.ir.name or ""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type; InputsError where the graph does not tell."""
        if self.ir.dtype is None or self.ir.dtype == ir.DataType.UNDEFINED:
            raise InputsError(f"The element type of {self.name!r} is unknown.")
        return self.ir.dtype.numpy()

    @property
    def shape(self) -> tuple[int | str | None, ...] | None:
        """One entry per dimension: a number, a name, or None where unknown;

        None where even the rank is.
        """
        if self.ir.shape is None:
            return None
        return tuple(d if isinstance(d, int) else d.value for d in self.ir.shape)

    @property
    def rank(self) -> int:
        """The number of dimensions; UnknownRankError where the graph does not tell."""
        if self.ir.shape is None:
            raise UnknownRankError(f"The rank of {self.name!r} is unknown.")
        return len(self.ir.shape)

    def __repr__(self) -> str:
        return f"<Value {self.name}: {_describe(self.ir)}>"

    def __add__(self, other: Operand) -> Value:
        return self.op.Add(self, other)

    def __radd__(self, other: Operand) -> Value:
        return self.op.Add(other, self)

    def __sub__(self, other: Operand) -> Value:
        return self.op.Sub(self, other)

    def __rsub__(self, other: Operand) -> Value:
        return self.op.Sub(other, self)

    def __mul__(self, other: Operand) -> Value:
        return self.op.Mul(self, other)

    def __rmul__(self, other: Operand) -> Value:
        return self.op.Mul(other, self)

    def __truediv__(self, other: Operand) -> Value:
        return self.op.Div(self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return self.op.Div(other, self)

    def __pow__(self, other: Operand) -> Value:
        return self.op.Pow(
            self, self.op.cast(other, self.dtype) if not isinstance(other, Value) else other
        )

    def __rpow__(self, other: Operand) -> Value:
        return self.op.Pow(self.op.cast(other, self.dtype), self)

    def __matmul__(self, other: Operand) -> Value:
        return self.op.MatMul(self, other)

    def __neg__(self) -> Value:
        return self.op.Neg(self)

    def __abs__(self) -> Value:
        return self.op.Abs(self)

    def __gt__(self, other: Operand) -> Value:
        return self.op.Greater(self, other)

    def __lt__(self, other: Operand) -> Value:
        return self.op.Less(self, other)

    def __ge__(self, other: Operand) -> Value:
        return self.op.GreaterOrEqual(self, other)

    def __le__(self, other: Operand) -> Value:
        return self.op.LessOrEqual(self, other)

    # a formula's ==, not a question about two objects
    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]
        return self.op.Equal(self, other)

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]
        return self.op.Not(self.op.Equal(self, other))

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} has no truth value: it is part of a graph, and its numbers come later."
            " Instead of `if`, `and`, `or`, `max` and `min` write op.Where(condition, a, b), `&`,"
            " `|`, op.Max and op.Min."
        )

    def __and__(self, other: Operand) -> Value:
        return self.op.And(self, other)

    def __rand__(self, other: Operand) -> Value:
        return self.op.And(other, self)

    def __or__(self, other: Operand) -> Value:
        return self.op.Or(self, other)

    def __ror__(self, other: Operand) -> Value:
        return self.op.Or(other, self)

    def __invert__(self) -> Value:
        return self.op.Not(self)
