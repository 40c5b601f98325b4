"""`Value`: a tensor of a graph, with Python's arithmetic and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.graph.inference import InputsError, UnknownRankError, describe, sizes_of

if TYPE_CHECKING:
    from onnxfit.graph.values import GraphBuilder

Number = Union[bool, int, float, np.generic]
Operand = Union["Value", Number, npt.NDArray[Any], Sequence[int], Sequence[float], None]


class Value:
    """A tensor of a graph that is being built; its numbers are computed when the graph runs.

    `+ - * / ** @`, unary `-`, `abs`, the comparisons `== != < <= > >=` and the logical `~ & |`
    append the operator of that name and return its output. The other operand may be a number or an
    array, which gets the element type of this value. A value has no truth value: `if`, `and` and
    `or` raise TypeError.

    - `op`: the builder of the graph.
    - `value`: the value in the graph, as onnx-ir has it; it is the attribute `ir`.

    >>> from onnxfit.graph.values import GraphBuilder
    >>> op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
    >>> x = op.input("x", np.float32, ("batch", 3))
    >>> (1 - x) ** 2 @ op.constant(np.ones((3, 2), np.float32))
    <Value MatMul.out: FLOAT[batch,2]>
    >>> (x > 0).dtype, (~(x > 0) | (x == 1)).dtype
    (dtype('bool'), dtype('bool'))
    """

    __slots__ = ("ir", "op")
    # numpy scalars and arrays as left operands leave the operation to this class
    __array_ufunc__ = None
    __hash__ = object.__hash__

    def __init__(self, op: GraphBuilder, value: ir.Value) -> None:
        self.op = op
        self.ir = value

    @property
    def name(self) -> str:
        """The name of the value in the graph."""
        return self.ir.name or ""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type. InputsError: the type is unknown."""
        if self.ir.dtype is None or self.ir.dtype == ir.DataType.UNDEFINED:
            raise InputsError(f"The element type of {self.name!r} is unknown.")
        return self.ir.dtype.numpy()

    @property
    def shape(self) -> tuple[int | str | None, ...] | None:
        """The sizes, or None if their number is unknown.

        Each is a number, the name of a size, or None if unknown.
        """
        if self.ir.shape is None:
            return None
        return sizes_of(self.ir.shape)

    @property
    def rank(self) -> int:
        """The number of dimensions. UnknownRankError: the shape is unknown."""
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
        exponent = other if isinstance(other, Value) else self.op.cast(other, self.dtype)
        return self.op.Pow(self, exponent)

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

    # == and != build graph nodes, so unlike those of `object`, they do not return bool
    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]
        return self.op.Equal(self, other)

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]  # see __eq__
        return self.op.Not(self.op.Equal(self, other))

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} has no truth value: it is a tensor of a graph, computed when the graph"
            " runs. Instead of `if`, `and`, `or`, `max` and `min`, use op.Where(condition, a, b),"
            " `&`, `|`, op.Max and op.Min."
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
