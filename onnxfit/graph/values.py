"""Values with arithmetic, so that a formula written in Python is the ONNX graph it describes.

`onnx_ir.Value` has arithmetic too, but through one handler for the whole process, without
comparisons or powers, and with Python numbers typed by themselves; here every value knows the graph
it belongs to, and a number takes the type of the tensor it meets. Storage, naming and traversal
stay onnx-ir's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Union, overload

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.errors import UnknownNameError
from onnxfit.graph.inference import (
    InputsError,
    UnknownRankError,
    describe,
    find_schema,
    infer_outputs,
)

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
        schema = find_schema(domain, op_type, version)
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
        return f"<Value {self.name}: {describe(self.ir)}>"

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
