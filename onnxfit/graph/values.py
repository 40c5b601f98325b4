"""Values with arithmetic, so that a formula written in Python is the ONNX graph it describes.

`onnx_ir.Value` has arithmetic too, but through one handler for the whole process, without comparisons or powers, and with
Python numbers typed by themselves; here every value knows the graph it belongs to, and a number takes the type of the tensor
it meets. Storage, naming and traversal stay onnx-ir's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Union

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.errors import UnknownNameError

Number = Union[bool, int, float, np.generic]
Operand = Union["Value", Number, npt.NDArray[Any], Sequence[int], Sequence[float], None]


class Op:
    """Appends operators to a graph: `op.Abs(x)`, `op.ReduceSum(x, [0], keepdims=0)`, `op.many(2, "Split", x, num_outputs=2)`.

    Inputs are values, numbers, arrays, or None for an absent optional input; attributes are keywords. A number or array takes
    the element type its operand shares with the other inputs (`x * 2` is a float if x is), int64 where the operator wants
    int64. The call gives the operator's first output, `many` the first few; `_domain` chooses another operator set.

    >>> graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    >>> op = Op(graph)
    >>> x = op.input("x", np.float32, ("batch", 3))
    >>> y = 2 * op.ReduceSum(x * x, [1], keepdims=0) - 1
    >>> y.shape, y.dtype, [node.op_type for node in graph]
    (('batch',), dtype('float32'), ['Mul', 'ReduceSum', 'Mul', 'Sub'])
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._scope = ""
        self._anchor: ir.Node | None = None
        self._taken = set(graph.initializers) | {v.name for v in graph.inputs if v.name}
        for node in graph:
            self._taken.update(v.name for v in node.outputs if v.name)
            self._taken.add(node.name or "")
        self._generated: set[str] = set()  # names of values that nobody outside has seen
        self._counts: dict[str, int] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}

    def __getattr__(self, op_type: str) -> Callable[..., Value]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)

        def call(*inputs: Operand, _domain: str = "", **attributes: Any) -> Value:
            return self._call(op_type, inputs, _domain, 1, attributes)[0]

        return call

    def many(self, outputs: int, op_type: str, *inputs: Operand, _domain: str = "", **attributes: Any) -> tuple[Value, ...]:
        """The first `outputs` outputs of an operator that has several."""
        return self._call(op_type, inputs, _domain, outputs, attributes)

    @contextmanager
    def scope(self, name: str) -> Iterator[Op]:
        """Names made inside begin with `name/`: readable graphs, and errors that say who made the node."""
        before, self._scope = self._scope, f"{self._scope}{name}/"
        try:
            yield self
        finally:
            self._scope = before

    @contextmanager
    def replacing(self, node: ir.Node) -> Iterator[Callable[[Value], None]]:
        """What is added inside goes before `node`; calling the result with a value puts it in place of the node's first output.

        >>> model = ir.from_onnx_text('<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Abs(x) }')
        >>> op = Op(model.graph)
        >>> with op.replacing(model.graph.node(0)) as replace:
        ...     x = op.wrap(model.graph.inputs[0])
        ...     replace(op.Max(x, -x))
        >>> [node.op_type for node in model.graph], model.graph.outputs[0].name
        (['Neg', 'Max'], 'y')
        """
        before = (self._anchor, self._scope)
        self._anchor, self._scope = node, f"{node.name or node.op_type}/"

        def replace(value: Value) -> None:
            old, new = node.outputs[0], value.ir
            if old.is_graph_output() and (new.is_graph_output() or new.producer() is None):
                new = self.Identity(value).ir  # one value is one output, and an input cannot be renamed
            name, was_output = old.name, old.is_graph_output()
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            if was_output:
                old.name = self._fresh("replaced")
                new.name = name
            self._anchor = None
            self.graph.remove(node, safe=True)

        try:
            yield replace
        finally:
            self._anchor, self._scope = before

    def input(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int | str | None]) -> Value:
        """A new graph input."""
        self._take(name)
        value = ir.val(name, ir.DataType.from_numpy(np.dtype(dtype)), shape)
        self.graph.inputs.append(value)
        return Value(self, value)

    def output(self, name: str, value: Value) -> Value:
        """Make `value` a graph output called `name`. A value that has another name or use for the user gets there through an Identity."""
        self._take(name)
        if value.name not in self._generated or value.ir.is_graph_output():
            value = self.Identity(value)
        self._generated.discard(value.name)
        value.ir.name = name
        self.graph.outputs.append(value.ir)
        return value

    def wrap(self, value: ir.Value) -> Value:
        """A value the graph already has, with arithmetic."""
        return Value(self, value)

    def constant(self, value: Number | npt.NDArray[Any] | Sequence[Any], dtype: npt.DTypeLike | None = None) -> Value:
        """A constant of the graph; equal constants are one initializer."""
        array = np.asarray(value)
        if dtype is None and not isinstance(value, (np.ndarray, np.generic)) and array.dtype == np.float64:
            dtype = np.float32  # a Python float without a partner is single precision, as everywhere in ONNX
        array = np.ascontiguousarray(array, dtype).reshape(array.shape)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.Tensor(array, name=self._fresh("constant"))
            initializer = ir.Value(
                name=tensor.name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            self.graph.initializers[tensor.name or ""] = initializer
            self._constants[key] = Value(self, initializer)
        return self._constants[key]

    def cast(self, value: Operand, dtype: npt.DTypeLike) -> Value:
        """`value` as another element type; nothing is added where it has that type already."""
        if not isinstance(value, Value):
            return self.constant(value, dtype)  # type: ignore[arg-type]  # None is no operand of a cast
        wanted = np.dtype(dtype)
        if value.dtype == wanted:
            return value
        return self.Cast(value, to=int(ir.DataType.from_numpy(wanted)))

    def _take(self, name: str) -> str:
        if name in self._taken:
            raise ValueError(f"The graph already has a value or node called {name!r}.")
        self._taken.add(name)
        return name

    def _fresh(self, stem: str) -> str:
        stem = self._scope + stem
        while True:
            count = self._counts[stem] = self._counts.get(stem, -1) + 1
            name = f"{stem}_{count}" if count else stem
            if name not in self._taken:
                return self._take(name)

    def _call(
        self, op_type: str, inputs: Sequence[Operand], domain: str, outputs: int, attributes: dict[str, Any]
    ) -> tuple[Value, ...]:
        version = self.graph.opset_imports.get(domain)
        if version is None:
            version = self.graph.opset_imports[domain] = 1
        if domain == "" and not onnx.defs.has(op_type, version, ""):
            raise UnknownNameError("operator of ONNX", op_type, {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""})
        schema = onnx.defs.get_schema(op_type, version, domain) if onnx.defs.has(op_type, version, domain) else None
        values = self._operands(schema, inputs)
        count = max(outputs, schema.min_output if schema else 1)
        name = self._fresh(op_type)
        node = ir.Node(
            domain,
            op_type,
            [v.ir if v is not None else None for v in values],
            ir.convenience.convert_attributes({k: v for k, v in attributes.items() if v is not None}),
            num_outputs=count,
            name=name,
        )
        for i, out in enumerate(node.outputs):
            out.name = self._take(f"{name}:{i}") if i or count > 1 else self._fresh(f"{op_type}.out")
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

    def _operands(self, schema: onnx.defs.OpSchema | None, inputs: Sequence[Operand]) -> list[Value | None]:
        """Every input as a value; a number or array takes the element type of the inputs it shares a type variable with."""
        formals = schema.inputs if schema else ()

        def formal(i: int) -> Any:
            return formals[min(i, len(formals) - 1)] if formals else None

        bound = {formal(i).type_str if formals else "T": v.dtype for i, v in enumerate(inputs) if isinstance(v, Value)}
        values: list[Value | None] = []
        for i, given in enumerate(inputs):
            if given is None or isinstance(given, Value):
                values.append(given)
                continue
            slot = formal(i)
            variable = slot.type_str if slot else "T"
            wanted = bound.get(variable)
            if wanted is None and slot is not None and set(slot.types) <= {"tensor(int64)", "tensor(int32)"}:
                wanted = np.dtype(np.int64)
            values.append(self.constant(given, wanted))
        return values


def infer_outputs(graph: ir.Graph, node: ir.Node) -> None:
    """Give a node's outputs their type and shape, by ONNX's own inference for this one operator; ValueError where inputs cannot meet."""
    version = graph.opset_imports.get(node.domain, 0)
    if not onnx.defs.has(node.op_type, version, node.domain):
        return
    if any(v is not None and v.type is None for v in node.inputs):
        return  # made by an operator that ONNX does not know
    types, data = {}, {}
    for value in node.inputs:
        if value is None or value.name is None:
            continue
        types[value.name] = ir.serde.serialize_value(value).type
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None and tensor.size <= 1024:
            data[value.name] = ir.serde.serialize_tensor(tensor)
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    imports = [onnx.helper.make_opsetid(d, v) for d, v in graph.opset_imports.items()]
    try:
        inferred = onnx.shape_inference.infer_node_outputs(
            schema, ir.serde.serialize_node(node), types, data, opset_imports=imports
        )
    except onnx.shape_inference.InferenceError as error:
        raise ValueError(f"{node.op_type} does not accept {[_describe(v) for v in node.inputs]}: {error}") from None
    for out in node.outputs:
        if out.name in inferred:
            proto = inferred[out.name]
            out.type = ir.serde.deserialize_type_proto_for_type(proto)
            shape = ir.serde.deserialize_type_proto_for_shape(proto)
            if shape is not None and (out.shape is None or not out.shape.is_static()):
                out.shape = shape


def _describe(value: ir.Value | None) -> str:
    return "nothing" if value is None else f"{value.dtype}{value.shape if value.shape is not None else ''}"


class Value:
    """A tensor of a graph being built. `+ - * / ** @`, comparisons and `~ & |` append the operator of that name."""

    __slots__ = ("ir", "op")
    __array_ufunc__ = None  # numpy scalars and arrays on the left hand leave the operation to this class
    __hash__ = object.__hash__

    def __init__(self, op: Op, value: ir.Value) -> None:
        self.op = op
        self.ir = value

    @property
    def name(self) -> str:
        return self.ir.name or ""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type; ValueError where the graph does not tell."""
        if self.ir.dtype is None:
            raise ValueError(f"The element type of {self.name!r} is unknown.")
        return self.ir.dtype.numpy()

    @property
    def shape(self) -> tuple[int | str | None, ...] | None:
        """One entry per dimension: a number, a name, or None where unknown; None where even the rank is."""
        if self.ir.shape is None:
            return None
        return tuple(d if isinstance(d, int) else d.value for d in self.ir.shape)

    @property
    def rank(self) -> int:
        """The number of dimensions; ValueError where the graph does not tell."""
        if self.ir.shape is None:
            raise ValueError(f"The rank of {self.name!r} is unknown.")
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
        return self.op.Pow(self, self.op.cast(other, self.dtype) if not isinstance(other, Value) else other)

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

    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]  # a formula's ==, not a question about two objects
        return self.op.Equal(self, other)

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]
        return self.op.Not(self.op.Equal(self, other))

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} has no truth value: it is part of a graph, and its numbers come later. Instead of `if`, `and`, `or`, `max` and `min` "
            "write op.Where(condition, a, b), `&`, `|`, op.Max and op.Min."
        )

    def __and__(self, other: Operand) -> Value:
        return self.op.And(self, other)

    def __or__(self, other: Operand) -> Value:
        return self.op.Or(self, other)

    def __invert__(self) -> Value:
        return self.op.Not(self)
