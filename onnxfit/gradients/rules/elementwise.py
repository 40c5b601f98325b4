"""Arithmetic and elementary functions of each element, with the derivatives of any calculus book.

At a kink, and where the formula of the derivative gives NaN, the value is PyTorch's: |x|' = 0 at 0,
Max and Min share the gradient of a tie evenly, Clip has the slope 1 at its bounds, and x^e has the
slope 0 at x = e = 0.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from onnxfit.gradients.broadcasting import reduce_to
from onnxfit.gradients.building import constant_elements, equality_mask
from onnxfit.gradients.table import Gradients, NoGradientError, Values, rule
from onnxfit.graph.values import GraphBuilder, Value


@rule("Add", broadcasts=True)
def add(op: GraphBuilder, a: Value, b: Value, y: Value, dy: Value) -> Gradients:
    return dy, dy


@rule("Sub", broadcasts=True)
def sub(op: GraphBuilder, a: Value, b: Value, y: Value, dy: Value) -> Gradients:
    return dy, lambda: -reduce_to(op, dy, b)  # after the sum, fewer elements are negated


@rule("Mul", broadcasts=True)
def mul(op: GraphBuilder, a: Value, b: Value, y: Value, dy: Value) -> Gradients:
    if a.ir is b.ir:
        return lambda: 2 * dy * a, None
    return lambda: dy * b, lambda: dy * a


@rule("Div", broadcasts=True)
def div(op: GraphBuilder, a: Value, b: Value, y: Value, dy: Value) -> Gradients:
    da = dy / b
    return da, lambda: -reduce_to(op, da * y, b)


@rule("Mod", broadcasts=True)
def mod(op: GraphBuilder, a: Value, b: Value, y: Value, dy: Value) -> Gradients:
    """y = a - n b with an integer n."""
    return dy, lambda: -(dy * op.Round((a - y) / b))


@rule("Sum", broadcasts=True)
def sum_(op: GraphBuilder, xs: Values, y: Value, dy: Value) -> Gradients:
    return (dy,) * len(xs)


@rule("Mean", broadcasts=True)
def mean(op: GraphBuilder, xs: Values, y: Value, dy: Value) -> Gradients:
    return (dy * (1 / len(xs)),) * len(xs)


@rule("Max", broadcasts=True)
@rule("Min", broadcasts=True)
def extreme(op: GraphBuilder, xs: Values, y: Value, dy: Value) -> Gradients:
    """The inputs that are equal to the extreme share dy."""
    if len(xs) == 1:
        return dy
    masks = [op.cast(x == y, dy.dtype) for x in xs]
    count = masks[0] + masks[1] if len(xs) == 2 else op.Sum(*masks)
    share = dy / count
    return tuple(share * mask for mask in masks)


@rule("Where", broadcasts=True)
def where(op: GraphBuilder, condition: Value, a: Value, b: Value, y: Value, dy: Value) -> Gradients:
    return (
        None,
        lambda: op.Where(condition, dy, op.constant(0, dy.dtype)),
        lambda: op.Where(condition, op.constant(0, dy.dtype), dy),
    )


@rule("Clip", broadcasts=True)
def clip(
    op: GraphBuilder, x: Value, low: Value | None, high: Value | None, y: Value, dy: Value
) -> Gradients:
    """The gradient goes to x where x was not clipped, otherwise to the bound that clipped it.

    If low > high, y is `high` everywhere.
    """

    def of_x() -> Value:
        minimum, maximum = constant_elements(low), constant_elements(high)
        if minimum is not None and maximum is not None and -np.inf < minimum <= maximum < np.inf:
            return dy * equality_mask(op, x, y)
        unclipped = x == y
        if (
            low is not None
            and high is not None
            and (low.ir.const_value is None or high.ir.const_value is None)
        ):
            # where low > high and x == high, the gradient goes to `high`
            unclipped = unclipped & (low <= high)
        return dy * op.cast(unclipped, dy.dtype)

    def of_low() -> Value:
        assert low is not None
        raised = y > x
        return op.Where(raised if high is None else raised & (low <= high), dy, 0)

    def of_high() -> Value:
        assert high is not None
        lowered = y < x
        return op.Where(lowered if low is None else lowered | (low > high), dy, 0)

    if low is None and high is None:
        return dy, None, None
    return of_x, of_low, of_high


@rule("Identity")
@rule("Cast")
def identity(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    """The driver casts every gradient to the type of its input."""
    return dy


@rule("CastLike")
def cast_like(op: GraphBuilder, x: Value, like: Value, y: Value, dy: Value) -> Gradients:
    return dy, None


@rule("BitCast")
def bit_cast(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    """dy, if the type stays the same. The bits of another type are another number."""
    if x.ir.dtype != y.ir.dtype:
        raise NoGradientError("it reads the bits of a number as another type")
    return dy


@rule("Neg")
def neg(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return -dy


@rule("Abs")
def abs_(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy * op.Sign(x)


@rule("Reciprocal")
def reciprocal(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return -(dy * y * y)


@rule("Sqrt")
def sqrt(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy / (2 * y)


@rule("Exp")
def exp(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy * y


@rule("Log")
def log(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy / x


@rule("Pow", broadcasts=True)
def pow_(op: GraphBuilder, x: Value, e: Value, y: Value, dy: Value) -> Gradients:
    """e x^(e-1) and y log x, both 0 where x = 0 makes one factor infinite and the other is 0."""
    exponent = op.cast(e, x.dtype)

    def of_base() -> Value:
        constant_exponent = constant_elements(e)
        if constant_exponent is not None:
            return dy * _power_slope(op, x, constant_exponent.astype(x.dtype), y)
        lowered = op.Where((x == 0) & (exponent == 0), 0, exponent - 1)
        return dy * exponent * x**lowered

    def of_exponent() -> Value:
        return dy * y * op.Log(op.Where((x == 0) & (exponent >= 0), 1, x))

    return of_base, of_exponent


def _power_slope(op: GraphBuilder, x: Value, e: npt.NDArray[np.floating], y: Value) -> Value:
    """The derivative of y = x^e for a constant e; Pow costs as much as twenty multiplications."""
    number = float(e.flat[0]) if e.size == 1 else math.nan
    if number == 0:
        return op.constant(0, x.dtype)
    if number == 1:
        return op.constant(1, x.dtype)
    if number == 2:
        return 2 * x
    if number == 3:
        return 3 * (x * x)
    if number == 0.5:
        return 0.5 / y
    if number == -0.5:
        return -0.5 * (y / x)
    if number == -1:
        return -(y * y)
    return op.constant(e) * x ** op.constant(np.where(e == 0, 0, e - 1).astype(e.dtype))


@rule("Sin")
def sin(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy * op.Cos(x)


@rule("Cos")
def cos(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return -(dy * op.Sin(x))


@rule("Tan")
def tan(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy * (1 + y * y)


@rule("Asin")
def asin(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy / op.Sqrt((1 - x) * (1 + x))


@rule("Acos")
def acos(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return -(dy / op.Sqrt((1 - x) * (1 + x)))


@rule("Atan")
def atan(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy / (1 + x * x)


@rule("Sinh")
def sinh(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy * op.Cosh(x)


@rule("Cosh")
def cosh(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy * op.Sinh(x)


@rule("Tanh")
def tanh(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy * (1 - y * y)


@rule("Asinh")
def asinh(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy / op.Sqrt(x * x + 1)


@rule("Acosh")
def acosh(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy / op.Sqrt((x - 1) * (x + 1))


@rule("Atanh")
def atanh(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy / ((1 - x) * (1 + x))


@rule("Erf")
def erf(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy * op.Exp(math.log(2 / math.sqrt(math.pi)) - x * x)


@rule("Sigmoid")
def sigmoid(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy * y * (1 - y)
