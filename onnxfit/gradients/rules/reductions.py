"""Reductions and running sums: what arrives goes back to every element, by its part in the result.

`axes` may be absent or empty (all axes, or none with `noop_with_empty_axes`), known or computed. A
tie in Max and Min is shared evenly, and a norm of zeros has the slope 0, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.building import known, static_size
from onnxfit.gradients.table import Gradients, NoGradientError, gradient
from onnxfit.graph.values import GraphBuilder, Value


@dataclass(frozen=True)
class Reduction:
    """What a node reduces and how; called with a result of its reduction, it gives that the rank of
    the input again.
    """

    op: GraphBuilder
    x: Value
    axes: Value | None
    keepdims: int
    noop_with_empty_axes: int

    def __call__(self, result: Value) -> Value:
        if self.keepdims or self._count == 0:
            return self._ranked(result)
        if self._count is not None:
            return self.op.Unsqueeze(result, self.axes)
        return self._ranked(
            self.op.Reshape(result, self.op.Shape(self.again("ReduceSum", self.x)))
        )  # computed axes may be none or all

    def again(self, op_type: str, value: Value) -> Value:
        """A reduction of something else over the same axes, which stay with size 1."""
        call = getattr(self.op, op_type)
        return self._ranked(
            call(value, self.axes, keepdims=1, noop_with_empty_axes=self.noop_with_empty_axes)
        )

    @property
    def reduces_nothing(self) -> bool:
        return bool(self.noop_with_empty_axes) and self._count == 0

    @property
    def _count(self) -> int | None:
        """How many axes are named, None where they are computed."""
        if self.axes is None:
            return 0
        axes = known(self.axes)
        return None if axes is None else axes.size

    def _ranked(self, value: Value) -> Value:
        # ONNX's inference gives up where axes are computed
        if value.shape is None and self.x.shape is not None:
            value.ir.shape = ir.Shape([None] * self.x.rank)
        return value


Formula = Callable[[GraphBuilder, Value, Value, Value, Reduction], Value]


def reduction(op_type: str, *, of_one: bool = True) -> Callable[[Formula], Formula]:
    """Enter a rule for a reduction;

    `of_one` says that an element reduced by itself stays what it is.
    """

    def enter(formula: Formula) -> Formula:
        @gradient(op_type)
        def rule(
            op: GraphBuilder,
            x: Value,
            axes: Value | None,
            y: Value,
            dy: Value,
            *,
            keepdims: int,
            noop_with_empty_axes: int,
        ) -> Gradients:
            over = Reduction(op, x, axes, keepdims, noop_with_empty_axes)
            if not over.reduces_nothing:
                return formula(op, x, y, dy, over), None
            if of_one:
                return dy, None
            # ONNX means x^2, |x| or log x; onnxruntime 1.19 computes x
            raise NoGradientError(
                "it reduces no axis, which versions of onnxruntime compute differently",
                "use the element-wise operator",
            )

        return formula

    return enter


@reduction("ReduceSum")
def reduce_sum(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    return op.Expand(over(dy), op.shape(x))


@reduction("ReduceMean")
def reduce_mean(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    many, few = static_size(x), static_size(y)
    if many is None or few is None:
        return op.Expand(
            over(dy) / op.cast(op.Size(x) / op.Max(op.Size(y), 1), x.dtype), op.shape(x)
        )
    # of nothing there is no mean, and no gradient
    return op.Expand(over(dy) * (few / max(many, 1)), op.shape(x))


@reduction("ReduceMax")
@reduction("ReduceMin")
def reduce_extreme(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    """Those that reach the extreme share dy."""
    reach = op.cast(x == over(y), dy.dtype)
    return reach * (over(dy) / over.again("ReduceSum", reach))


@reduction("ReduceProd")
def reduce_prod(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    """The product of the others: y / x_i; where x_i is the only 0, the product of all but it.

    Where one of two zeros is, that product is 0, but as a factor it has the other zero, so that the
    second derivative is right as well.
    """
    zero = x == 0
    as_number, other = op.cast(zero, x.dtype), op.Where(zero, 1, x)
    zeros, sum_of_zeros = over.again("ReduceSum", as_number), over.again("ReduceSum", x * as_number)
    one, two = op.cast(zeros == 1, x.dtype), op.cast(zeros == 2, x.dtype)
    without = over.again("ReduceProd", other) * (one + two * (sum_of_zeros - x))
    return over(dy) * op.Where(zero, without, over(y) / other)


@reduction("ReduceL1", of_one=False)
def reduce_l1(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    return over(dy) * op.Sign(x)


@reduction("ReduceL2", of_one=False)
def reduce_l2(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    y = over(y)
    return over(dy) / op.Where(y == 0, 1, y) * x


@reduction("ReduceSumSquare", of_one=False)
def reduce_sum_square(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    return x * (2 * over(dy))


@reduction("ReduceLogSum", of_one=False)
def reduce_log_sum(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    return op.Expand(over(dy) / op.Exp(over(y)), op.shape(x))


@reduction("ReduceLogSumExp")
def reduce_log_sum_exp(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    """The softmax of x; 0 where all of x is -inf, as a mask makes it."""
    return over(dy) * op.Exp(x - op.Max(over(y), np.finfo(y.dtype).min))


@gradient("CumSum")
def cum_sum(
    op: GraphBuilder, x: Value, axis: Value, y: Value, dy: Value, *, exclusive: int, reverse: int
) -> Gradients:
    return op.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse), None
