"""Values with arithmetic: a formula written in Python builds the ONNX graph that computes it.

`onnx_ir.Value` has arithmetic too, but through one handler for the whole process, without
comparisons or powers, and with Python numbers typed by themselves. Here every value knows its
graph, and a number gets the type of the tensor it is combined with. Storage, naming and traversal
remain onnx-ir's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.errors import UnknownNameError
from onnxfit.graph import names
from onnxfit.graph.arithmetic import Number, Operand, Value
from onnxfit.graph.inference import find_schema, infer_outputs
from onnxfit.graph.spec import known_sizes
from onnxfit.graph.subgraphs import subgraphs_of

__all__ = ["GraphBuilder", "Number", "Operand", "OperatorCall", "Value", "values_of"]


class OperatorCall(Protocol):
    """The call `op.Name(*inputs, **attributes)`, which appends an operator to a graph.

    - `inputs`: values, numbers, arrays, sequences of numbers, or None for an absent optional input.
    - `_domain`: the operator set that the operator belongs to; "" is ONNX's own.
    - `_outputs`: the number of outputs to return, from 1 to the operator's number of outputs. None,
      the default, returns the first output itself.
    - `attributes`: the operator's attributes by name, as ONNX spells them; None leaves one out.

    Returns the first output, or with `_outputs=n` a tuple of the first n.

    UnknownNameError: ONNX has no operator of this name. InputsError: the operator does not accept
    the types or shapes of the inputs. ValueError: `_outputs` is not a number from 1 to the
    operator's number of outputs.
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
    """Builder that appends operators to an ONNX graph; formulas call it `op`.

    `op.Abs(x)` appends an Abs, and likewise for every operator of ONNX. Inputs are values, numbers,
    arrays, or None for an absent optional input; attributes are keywords. The call returns the
    operator's first output. With `_outputs=n` it returns a tuple of the first n; `_domain` chooses
    another operator set. Arithmetic and comparisons of values also append operators.

    A number or array gets the element type that its operator requires: that of the other inputs (`x
    * 2` multiplies by a float if x is one), or int64 if the operator accepts no other type.

    >>> graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    >>> op = GraphBuilder(graph)
    >>> x = op.input("x", np.float32, ("batch", 4))
    >>> y = 2 * op.ReduceSum(x * x, [1], keepdims=0) - 1
    >>> y.shape, y.dtype, [node.op_type for node in graph]
    (('batch',), dtype('float32'), ['Mul', 'ReduceSum', 'Mul', 'Sub'])
    >>> left, right = op.Split(x, _outputs=2, axis=1, num_outputs=2)
    >>> left.shape
    ('batch', 2)
    >>> op.Split(x, _outputs=0)
    Traceback (most recent call last):
        ...
    ValueError: _outputs must be the number of outputs to return, at least 1, got 0 for Split.
    """

    def __init__(
        self, graph: ir.Graph, outer: GraphBuilder | None = None, *, device: str = "cpu"
    ) -> None:
        """Create a builder for `graph`, which may already have nodes.

        - `graph`: the graph that operators are appended to.
        - `outer`: for the body of an If, Loop or Scan, the builder of the graph that contains the
          node. The two share names, so that no name is used in both, the scope and the device.
        - `device`: "cpu", "cuda", "npu" or "webgpu", the kind of device that the graph is for.
          Every form of a formula is correct on all devices; with the attribute `device`, code can
          choose the form that the device has kernels for, or the fastest.
        """
        self.graph = graph
        self.device: str = device if outer is None else outer.device
        self.in_body = outer is not None
        if outer is not None:  # a body read from a file has no opset versions of its own
            graph.opset_imports.update(outer.graph.opset_imports)
        self._scope: str = "" if outer is None else outer._scope
        self._insert_before: ir.Node | None = None
        self._names: set[str] = set() if outer is None else outer._names
        self._names.update(graph.initializers)
        self._names.update(v.name for v in graph.inputs if v.name)
        _add_names(graph, self._names)
        self._generated: set[str] = set()  # names of values not chosen by a user
        self._counts: dict[str, int] = {} if outer is None else outer._counts
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}

    def __getattr__(self, op_type: str) -> OperatorCall:
        if op_type.startswith("_"):
            raise AttributeError(op_type)

        def call(
            *inputs: Operand, _domain: str = "", _outputs: int | None = None, **attributes: Any
        ) -> Any:
            if _outputs is None:
                return self._append(op_type, inputs, _domain, 1, attributes)[0]
            if isinstance(_outputs, bool) or not isinstance(_outputs, int) or _outputs < 1:
                raise ValueError(
                    "_outputs must be the number of outputs to return, at least 1, got"
                    f" {_outputs!r} for {op_type}."
                )
            return self._append(op_type, inputs, _domain, _outputs, attributes)[:_outputs]

        return call

    @contextmanager
    def scope(self, name: str, *, nested: bool = True) -> Iterator[GraphBuilder]:
        """Prefix the names of nodes and values added inside with `name/`.

        Scopes make graphs readable, and errors use them to tell the origin of a node.

        - `name`: the scope; it may contain "/".
        - `nested`: whether `name` is appended to the scope outside. If not, it replaces that scope.

        >>> op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
        >>> x = op.input("x", np.float32, (2,))
        >>> with op.scope("loss"), op.scope("y"):
        ...     op.Abs(x).ir.producer().name
        'loss/y/Abs'
        """
        outer = self._scope
        self._scope = f"{outer}{name}/" if nested else f"{name}/"
        try:
            yield self
        finally:
            self._scope = outer

    @contextmanager
    def replacing(self, node: ir.Node) -> Iterator[Callable[..., None]]:
        """Insert nodes added inside before `node`, and let their values replace the node.

        The block gets a function `replace(value, *others)`, which replaces the node's outputs by
        its arguments and removes the node. Pass None for an unused output. If the block does not
        call it, the node stays.

        - `node`: a node of the graph.

        >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) {'
        >>> model = ir.from_onnx_text(text + " y = Abs(x) }")
        >>> op = GraphBuilder(model.graph)
        >>> with op.replacing(model.graph.node(0)) as replace:
        ...     x = op.wrap(model.graph.inputs[0])
        ...     replace(op.Max(x, -x))
        >>> [node.op_type for node in model.graph], model.graph.outputs[0].name
        (['Neg', 'Max'], 'y')
        """
        outer = (self._insert_before, self._scope)
        self._insert_before = node
        self._scope = f"{node.name or node.op_type}/"

        def replace(value: Value, *others: Value | None) -> None:
            for old, other in zip(node.outputs[1:], others):
                if other is not None and (old.uses() or old.is_graph_output()):
                    copy = self.Identity(other).ir
                    old.replace_all_uses_with(copy, replace_graph_outputs=True)
                    old.name, copy.name = copy.name, old.name
            first = node.outputs[0]
            new = value.ir
            if first.is_graph_output() and (new.is_graph_output() or new.producer() is None):
                # one value is one output, and an input cannot be renamed
                new = self.Identity(value).ir
            self._replace_uses(first, new)
            self._insert_before = None
            self.graph.remove(node, safe=True)

        try:
            yield replace
        finally:
            self._insert_before, self._scope = outer

    def move_uses(self, old: Value, new: Value) -> None:
        """Replace all uses of `old` by `new`, and sort the graph.

        The node of `old` stays in the graph; `RemoveUnusedNodesPass` removes it.

        - `old`: an output of a node.
        - `new`: the value to use instead, which may come later in the graph.
        """
        self._replace_uses(old.ir, new.ir)
        self.graph.sort()

    def _replace_uses(self, old: ir.Value, new: ir.Value) -> None:
        """Replace all uses of `old` by `new`. If `old` is a graph output, `new` gets its name."""
        name = old.name if old.is_graph_output() else None
        if new.producer() is not None and new.shape != old.shape:
            new.shape = known_sizes(new.shape, old.shape)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        if name is not None:
            old.name = self.unique_name("replaced")
            new.name = name

    def input(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int | str | None]) -> Value:
        """Add a graph input.

        - `name`: the name of the input, unused in the graph; scopes do not change it.
        - `dtype`: the element type, as NumPy knows it.
        - `shape`: one entry for each dimension: a size, the name of a size, or None if unknown.

        ValueError: the graph has a value or node of this name.
        """
        self._reserve_name(name)
        value = ir.val(name, ir.DataType.from_numpy(np.dtype(dtype)), shape)
        self.graph.inputs.append(value)
        return Value(self, value)

    def output(self, name: str, value: Value) -> Value:
        """Make `value` a graph output and return the output.

        An Identity copies a value that has a user's name or is already an output.

        - `name`: the name of the output, unused in the graph; scopes do not change it.
        - `value`: a value of the graph.

        ValueError: the graph has a value or node of this name.
        """
        self._reserve_name(name)
        if value.name not in self._generated or value.ir.is_graph_output():
            value = self.Identity(value)
        self._generated.discard(value.name)
        value.ir.name = name
        self.graph.outputs.append(value.ir)
        return value

    def subgraph(self, name: str) -> GraphBuilder:
        """Return the builder of a new body for an If, Loop or Scan.

        `input` and `output` of that builder add the inputs and outputs of the body; its operators
        may use values of the graph around it. The attribute of the node is the builder's `graph`.

        - `name`: the name of the body; a number is appended if the graph has this name already.

        >>> op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
        >>> x, flag = op.input("x", np.float32, (2,)), op.input("flag", np.bool_, ())
        >>> then, otherwise = op.subgraph("then"), op.subgraph("else")
        >>> _ = then.output("doubled", then.Add(x, x)), otherwise.output("same", otherwise.Neg(x))
        >>> op.If(flag, then_branch=then.graph, else_branch=otherwise.graph).shape
        (2,)
        """
        graph = ir.Graph(
            [],
            [],
            nodes=[],
            opset_imports=self.graph.opset_imports,
            name=self.unique_name(name),
        )
        return GraphBuilder(graph, outer=self)

    def wrap(self, value: ir.Value) -> Value:
        """Return a value that the graph already has, with arithmetic.

        - `value`: an input, an initializer or an output of a node.
        """
        return Value(self, value)

    def constant(
        self, value: Number | npt.NDArray[Any] | Sequence[Any], dtype: npt.DTypeLike | None = None
    ) -> Value:
        """Return a constant of the graph; equal constants are one initializer.

        - `value`: a number, an array, or a sequence of numbers.
        - `dtype`: the element type. By default that of the array; Python floats are float32, as
          everywhere in ONNX, and Python integers are int64.

        >>> op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
        >>> op.constant(0.5).dtype, op.constant([1, 2]).dtype, op.constant(1, np.float16).dtype
        (dtype('float32'), dtype('int64'), dtype('float16'))
        """
        array = np.asarray(value)
        is_python = not isinstance(value, (np.ndarray, np.generic))
        if dtype is None and is_python and array.dtype == np.float64:
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
        """Return `value` with another element type.

        A value of this type is returned itself, and a number becomes a constant.

        - `value`: a value, a number, an array, or a sequence of numbers.
        - `dtype`: the element type.

        >>> op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
        >>> x = op.input("x", np.float32, ("batch", 3))
        >>> op.cast(x, np.float32) is x, op.cast(x, np.int64).dtype, op.cast(2, x.dtype).dtype
        (True, dtype('int64'), dtype('float32'))
        """
        if not isinstance(value, Value):
            # The type of operands includes None, which cannot be cast.
            return self.constant(value, dtype)  # type: ignore[arg-type]
        target = np.dtype(dtype)
        if value.dtype == target:
            return value
        return self.Cast(value, to=int(ir.DataType.from_numpy(target)))

    def stop_gradient(self, value: Value) -> Value:
        """Return `value` through an Identity whose gradient is zero, like PyTorch's `detach`.

        - `value`: a value of the graph.

        >>> op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
        >>> x = op.input("x", np.float32, ("batch", 3))
        >>> op.stop_gradient(x).ir.producer().op_type
        'Identity'
        """
        stopped = self.Identity(value)
        node = stopped.ir.producer()
        assert node is not None
        node.metadata_props[names.STOP_GRADIENT] = "1"
        return stopped

    def shape(self, value: Value, start: int = 0, end: int | None = None) -> Value:
        """Return the sizes of a value as an int64 vector.

        The vector is a constant where all sizes are known, else a Shape operator computes it.

        - `value`: a value of the graph.
        - `start`: the first axis; negative axes count from the end.
        - `end`: the axis after the last one; None includes the last axis.

        >>> op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
        >>> x = op.input("x", np.float32, ("batch", 3))
        >>> op.shape(x, 1).ir.const_value.numpy(), op.shape(x).ir.producer().op_type
        (array([3]), 'Shape')
        """
        sizes = None if value.shape is None else value.shape[start:end]
        if sizes is not None and all(isinstance(d, int) for d in sizes):
            return self.constant(np.array(sizes, np.int64))
        return self.Shape(value, start=start or None, end=end)

    def has_name(self, name: str) -> bool:
        """Return whether the graph has a value or node called `name`."""
        return name in self._names

    def unique_name(self, stem: str) -> str:
        """Reserve and return a name that the graph does not have.

        - `stem`: the name in the current scope; a number is appended if it is in use.
        """
        stem = self._scope + stem
        while True:
            count = self._counts.get(stem, -1) + 1
            self._counts[stem] = count
            name = f"{stem}_{count}" if count else stem
            if name not in self._names:
                self._names.add(name)
                return name

    def _reserve_name(self, name: str) -> str:
        if name in self._names:
            raise ValueError(f"The graph already has a value or node called {name!r}.")
        self._names.add(name)
        return name

    def _append(
        self,
        op_type: str,
        inputs: Sequence[Operand],
        domain: str,
        outputs: int,
        attributes: dict[str, Any],
    ) -> tuple[Value, ...]:
        """Append a node and return all its outputs, at least `outputs` of them."""
        version = self.graph.opset_imports.setdefault(domain, 1)
        signature = signature_of(domain, op_type, version)
        if domain == "" and signature is None:
            known = {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}
            raise UnknownNameError("operator of ONNX", op_type, known)
        if signature is not None and outputs > signature.max_outputs:
            raise ValueError(
                f"_outputs={outputs} exceeds the {signature.max_outputs} outputs of {op_type}."
            )
        values = self._operands(signature, inputs)
        # onnxruntime 1.19 crashes on some operators whose last input has an empty name
        while values and values[-1] is None:
            values.pop()
        count = max(outputs, signature.min_outputs if signature else 1)
        name = self.unique_name(op_type)
        given = {k: v for k, v in attributes.items() if v is not None}
        node = ir.Node(
            domain,
            op_type,
            [v.ir if v is not None else None for v in values],
            ir.convenience.convert_attributes(given) if given else (),
            num_outputs=count,
            name=name,
        )
        for i, out in enumerate(node.outputs):
            if count > 1:
                out.name = self._reserve_name(f"{name}:{i}")
            else:
                out.name = self.unique_name(f"{op_type}.out")
            self._generated.add(out.name)
        if self._insert_before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self._insert_before, node)
        try:
            infer_outputs(self.graph, node)
        except ValueError:
            self.graph.remove(node, safe=True)
            raise
        return tuple([Value(self, out) for out in node.outputs])

    def _operands(
        self, signature: Signature | None, inputs: Sequence[Operand]
    ) -> list[Value | None]:
        """Return every input as a value.

        A number or array gets the element type of the inputs with the same type variable in the
        signature; without a signature, all inputs have the same one.
        """
        values = [v for v in inputs if v is None or isinstance(v, Value)]
        if len(values) == len(inputs):
            return values
        parameters = signature.parameters if signature is not None else ()
        last = len(parameters) - 1  # of a variadic operator, it takes all remaining inputs
        variables = [parameters[min(i, last)][0] if parameters else "T" for i in range(len(inputs))]
        dtypes = {
            variable: operand.dtype
            for variable, operand in zip(variables, inputs)
            if isinstance(operand, Value)
        }
        values = []
        for i, operand in enumerate(inputs):
            if operand is None or isinstance(operand, Value):
                values.append(operand)
                continue
            dtype = dtypes.get(variables[i])
            if dtype is None and parameters and parameters[min(i, last)][1]:
                dtype = np.dtype(np.int64)
            values.append(self.constant(operand, dtype))
        return values


def _add_names(graph: ir.Graph, names: set[str]) -> None:
    """Add the names of all nodes and their outputs to `names`, those of subgraphs included."""
    for node in graph:
        names.add(node.name or "")
        names.update([value.name for value in node.outputs if value.name])
        for body in subgraphs_of(node):
            _add_names(body, names)


def values_of(graph: ir.Graph) -> dict[str, ir.Value]:
    """Return the inputs, initializers and outputs of nodes of a graph by name."""
    values = (
        *graph.inputs,
        *graph.initializers.values(),
        *(v for node in graph for v in node.outputs),
    )
    return {v.name: v for v in values if v.name}


# element types of inputs that are axes, sizes or positions
_INDEX_TYPES = {"tensor(int64)", "tensor(int32)"}


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of an operator, by ONNX's schema.

    `parameters` has an entry for each input: its type variable, and whether it is always a position
    or a size.
    """

    parameters: tuple[tuple[str, bool], ...]
    min_outputs: int
    max_outputs: int


@cache
def signature_of(domain: str, op_type: str, version: int) -> Signature | None:
    """Return the signature of an operator, None without a schema.

    ONNX copies the inputs of a schema whenever they are read.
    """
    schema = find_schema(domain, op_type, version)
    if schema is None:
        return None
    parameters = [(p.type_str, set(p.types) <= _INDEX_TYPES) for p in schema.inputs]
    return Signature(tuple(parameters), schema.min_output, schema.max_output)
