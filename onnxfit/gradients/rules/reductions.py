"""Reductions, running sums and products: every element gets dy times its derivative.

`axes` may be absent or empty (all axes, or none with `noop_with_empty_axes`), constant or computed.
Elements that tie for a maximum share the gradient evenly, and the norm of zeros has the slope 0, as
in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.building import (
    constant_elements,
    elements_at,
    known_int,
    require_rank,
    static_size,
    zeros,
)
from onnxfit.gradients.table import Gradients, NoGradientError, rule
from onnxfit.graph.steps import Stepped, Tensors, scan_steps
from onnxfit.graph.values import GraphBuilder, Value


@dataclass(frozen=True)
class Reduction:
    """The input and settings of a reduction; a call restores the reduced axes of its result."""

    op: GraphBuilder
    x: Value
    axes: Value | None
    keepdims: int
    noop_with_empty_axes: int

    def __call__(self, result: Value) -> Value:
        """The result, or its gradient, with the reduced axes as axes of size 1."""
        if self.keepdims or self._axis_count == 0:
            return self._with_rank(result)
        if self._axis_count is not None:
            return self.op.Unsqueeze(result, self.axes)
        # computed axes may be none or all, so the shape is that of a sum with keepdims=1
        shape = self.op.Shape(self.reduce("ReduceSum", self.x))
        return self._with_rank(self.op.Reshape(result, shape))

    def reduce(self, op_type: str, value: Value) -> Value:
        """A reduction of another value over the same axes, which stay as axes of size 1."""
        call = getattr(self.op, op_type)
        return self._with_rank(
            call(value, self.axes, keepdims=1, noop_with_empty_axes=self.noop_with_empty_axes)
        )

    @property
    def reduces_nothing(self) -> bool:
        """Whether the node has no axes to reduce, and returns its input."""
        return bool(self.noop_with_empty_axes) and self._axis_count == 0

    @property
    def _axis_count(self) -> int | None:
        """The number of axes in `axes`, None if they are computed."""
        if self.axes is None:
            return 0
        axes = constant_elements(self.axes)
        return None if axes is None else axes.size

    def _with_rank(self, value: Value) -> Value:
        # ONNX infers no rank from computed axes
        if value.shape is None and self.x.shape is not None:
            value.ir.shape = ir.Shape([None] * self.x.rank)
        return value


Formula = Callable[[GraphBuilder, Value, Value, Value, Reduction], Value]


def reduction(op_type: str, *, keeps_single: bool = True) -> Callable[[Formula], Formula]:
    """Register the decorated formula as the rule of a reduction.

    `keeps_single`: the reduction of a single element is that element.
    """

    def register(formula: Formula) -> Formula:
        @rule(op_type)
        def reduction_rule(
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
            if keeps_single:
                return dy, None
            # by ONNX's definition it is x^2, |x| or log x; onnxruntime 1.19 computes x
            raise NoGradientError(
                "it reduces no axis, and versions of onnxruntime differ in the result",
                "use the element-wise operator",
            )

        return formula

    return register


@reduction("ReduceSum")
def reduce_sum(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    return op.Expand(over(dy), op.shape(x))


@reduction("ReduceMean")
def reduce_mean(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    elements = static_size(x)
    means = static_size(y)
    if elements is None or means is None:
        elements_per_mean = op.cast(op.Size(x) / op.Max(op.Size(y), 1), x.dtype)
        return op.Expand(over(dy) / elements_per_mean, op.shape(x))
    # without elements there is no mean, and no gradient
    return op.Expand(over(dy) * (means / max(elements, 1)), op.shape(x))


@reduction("ReduceMax")
@reduction("ReduceMin")
def reduce_extreme(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    """The elements that are equal to the extreme share dy."""
    extreme = op.cast(x == over(y), dy.dtype)
    return extreme * (over(dy) / over.reduce("ReduceSum", extreme))


@reduction("ReduceProd")
def reduce_prod(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    """The product of the other elements: y / x_i, or for x_i = 0 the product of all but x_i.

    If there are two zeros, that product is 0; it is written as a product with the other zero, so
    that the second derivative is correct as well.
    """
    is_zero = x == 0
    zero_mask = op.cast(is_zero, x.dtype)
    nonzero = op.Where(is_zero, 1, x)
    zeros = over.reduce("ReduceSum", zero_mask)
    sum_of_zeros = over.reduce("ReduceSum", x * zero_mask)
    one_zero = op.cast(zeros == 1, x.dtype)
    two_zeros = op.cast(zeros == 2, x.dtype)
    other_zeros = one_zero + two_zeros * (sum_of_zeros - x)
    product_at_zero = over.reduce("ReduceProd", nonzero) * other_zeros
    return over(dy) * op.Where(is_zero, product_at_zero, over(y) / nonzero)


@reduction("ReduceL1", keeps_single=False)
def reduce_l1(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    return over(dy) * op.Sign(x)


@reduction("ReduceL2", keeps_single=False)
def reduce_l2(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    y = over(y)
    return over(dy) / op.Where(y == 0, 1, y) * x


@reduction("ReduceSumSquare", keeps_single=False)
def reduce_sum_square(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    return x * (2 * over(dy))


@reduction("ReduceLogSum", keeps_single=False)
def reduce_log_sum(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    return op.Expand(over(dy) / op.Exp(over(y)), op.shape(x))


@reduction("ReduceLogSumExp")
def reduce_log_sum_exp(op: GraphBuilder, x: Value, y: Value, dy: Value, over: Reduction) -> Value:
    """The softmax of x; 0 if all elements are -inf, which a mask can cause."""
    return over(dy) * op.Exp(x - op.Max(over(y), np.finfo(y.dtype).min))


@rule("CumSum")
def cum_sum(
    op: GraphBuilder, x: Value, axis: Value, y: Value, dy: Value, *, exclusive: int, reverse: int
) -> Gradients:
    return op.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse), None


@rule("CumProd")
def cum_prod(
    op: GraphBuilder, x: Value, axis: Value, y: Value, dy: Value, *, exclusive: int, reverse: int
) -> Gradients:
    """dx_i is the product of the elements before i times r_i, the gradient through the later ones.

    With c = x_{i+1} r_{i+1}, r_i is dy_i + c, or c itself in an exclusive product. Nothing is
    divided by an element, which may be zero.
    """
    number = known_int(axis)
    if number is None:
        raise NoGradientError(
            "its axis is computed", "write the axis as a constant, or freeze the weights before it"
        )
    rank = require_rank(x)
    first = number % rank
    others = [i for i in range(rank) if i != first]
    axis_first = [first, *others]

    def step(body: GraphBuilder, states: Tensors, slices: Tensors) -> Stepped:
        (carried,), (element, dy_element) = states, slices
        if exclusive:
            return [dy_element + element * carried], [carried]
        through = dy_element + carried
        return [element * through], [through]

    none = zeros(op, x, elements_at(op, op.shape(x), others))
    slices = [op.Transpose(v, perm=axis_first) for v in (x, dy)]
    _, (later,) = scan_steps(op, step, [none], slices, reverse=not reverse)
    before = y if exclusive else op.CumProd(x, axis, exclusive=1, reverse=reverse)
    return before * op.Transpose(later, perm=np.argsort(axis_first).tolist()), None
