"""Lowerings of elementwise functions, sums, choices, reductions and products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.onnxruntime.lowerings import (
    NodeToLower,
    expand_to,
    lowering,
    require_rank,
    require_size,
    same_shape,
)
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.values import GraphBuilder, Value

# Elementwise functions
# --------------------------------------------------------------------------------------------------

SELU_ALPHA = 1.67326319217681884765625
SELU_GAMMA = 1.05070102214813232421875


@lowering("Softplus")
def softplus(op: GraphBuilder, node: NodeToLower) -> Value:
    return _softplus(op, node.input(0))


def _softplus(op: GraphBuilder, x: Value) -> Value:
    # e^x alone overflows; Max, unlike Relu, has slope 1/2 at 0, as softplus has
    return op.Max(x, 0.0) + op.Log(1 + op.Exp(-abs(x)))


@lowering("Mish")
def mish(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    return x * op.Tanh(_softplus(op, x))


@lowering("Softsign")
def softsign(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    return x / (1 + abs(x))


@lowering("HardSigmoid")
def hard_sigmoid(op: GraphBuilder, node: NodeToLower) -> Value:
    alpha = node.attribute("alpha", 0.2)
    beta = node.attribute("beta", 0.5)
    return op.Clip(alpha * node.input(0) + beta, 0.0, 1.0)


@lowering("HardSwish")
def hard_swish(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    return x * op.Clip(x / 6 + 0.5, 0.0, 1.0)


@lowering("Elu")
def elu(op: GraphBuilder, node: NodeToLower) -> Value:
    alpha = node.attribute("alpha", 1.0)
    return _exponential_below_zero(op, node.input(0), alpha)


@lowering("Celu")
def celu(op: GraphBuilder, node: NodeToLower) -> Value:
    alpha = node.attribute("alpha", 1.0)
    return _exponential_below_zero(op, node.input(0), alpha, scale=alpha)


@lowering("Selu")
def selu(op: GraphBuilder, node: NodeToLower) -> Value:
    alpha = node.attribute("alpha", SELU_ALPHA)
    gamma = node.attribute("gamma", SELU_GAMMA)
    y: Value = gamma * _exponential_below_zero(op, node.input(0), alpha)
    return y


def _exponential_below_zero(
    op: GraphBuilder, x: Value, alpha: float, scale: float | None = None
) -> Value:
    """Return x where x >= 0, else alpha (e^(x / scale) - 1); `scale` is 1 by default."""
    negative = x < 0
    # the gradient of Where multiplies by 0, which e^x of a large positive x would make NaN
    below = op.Where(negative, x, 0.0)
    exponent = below if scale is None else below / scale
    return op.Where(negative, alpha * (op.Exp(exponent) - 1), x)


@lowering("ThresholdedRelu")
def thresholded_relu(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    return op.Where(x > node.attribute("alpha", 1.0), x, 0.0)


@lowering("Shrink")
def shrink(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    bias = node.attribute("bias", 0.0)
    bound = node.attribute("lambd", 0.5)
    return op.Where(x < -bound, x + bias, op.Where(x > bound, x - bias, 0.0))


@lowering("PRelu")
def prelu(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    slope = node.input(1)
    return op.Where(x < 0, expand_to(op, slope, x) * x, x)


@lowering("Tan")
def tan(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    return op.Sin(x) / op.Cos(x)


@lowering("Sinh")
def sinh(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    return (op.Exp(x) - op.Exp(-x)) * 0.5


@lowering("Cosh")
def cosh(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    return (op.Exp(x) + op.Exp(-x)) * 0.5


@lowering("Asinh")
def asinh(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    negative = x < 0
    size = op.Where(negative, -x, x)  # not Abs, whose slope at 0 is 0
    y = op.Log(size + op.Sqrt(size * size + 1))
    return op.Where(negative, -y, y)


@lowering("Acosh")
def acosh(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    return op.Log(x + op.Sqrt(x * x - 1))


@lowering("Atanh")
def atanh(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    return 0.5 * op.Log((1 + x) / (1 - x))


@lowering("CastLike")
def cast_like(op: GraphBuilder, node: NodeToLower) -> Value:
    return op.cast(node.input(0), node.input(1).dtype)


@lowering("Pow")
def power(op: GraphBuilder, node: NodeToLower) -> Value | None:
    x = node.input(0)
    exponent = node.input(1)
    if 1 in node.path_inputs:
        return _power_of_trained_exponent(op, node)
    constant = ir.convenience.get_const_tensor(exponent.ir)
    if constant is None or (constant.numpy() == 0).any():
        raise NoGradientError(
            "the exponent may be 0, at which its gradient is NaN",
            "use a constant exponent other than 0",
        )
    if exponent.dtype == x.dtype and same_shape(x, node.first_output):
        return None
    return op.Pow(expand_to(op, x, node.first_output), op.constant(constant.numpy(), x.dtype))


def _power_of_trained_exponent(op: GraphBuilder, node: NodeToLower) -> Value:
    """Return x^e as e^(e log x), for a constant and positive base."""
    x = node.input(0)
    base = None if 0 in node.path_inputs else ir.convenience.get_const_tensor(x.ir)
    if base is None or not (base.numpy() > 0).all():
        raise NoGradientError(
            "the builder drops the gradient of an exponent",
            "use Exp(exponent * Log(base)) if the base is positive",
        )
    logarithm = np.log(base.numpy().astype(np.float64))
    return op.Exp(node.input(1) * op.constant(logarithm, x.dtype))


# Sums and choices
# --------------------------------------------------------------------------------------------------


@lowering("Sum", "Mean")
def sum_or_mean(op: GraphBuilder, node: NodeToLower) -> Value:
    terms = [op.wrap(v) for v in node.ir.inputs if v is not None]
    if len(terms) == 1:
        return op.Identity(terms[0])
    y = terms[0]
    for term in terms[1:]:
        y = y + term
    return y * (1 / len(terms)) if node.op_type == "Mean" else y


@lowering("Max", "Min")
def max_or_min(op: GraphBuilder, node: NodeToLower) -> Value | None:
    return op.Identity(node.input(0)) if len(node.ir.inputs) == 1 else None


@lowering("Where")
def where(op: GraphBuilder, node: NodeToLower) -> Value | None:
    y = node.first_output
    branches = [node.input(1), node.input(2)]
    expanded = [
        expand_to(op, branch, y) if i in node.path_inputs else branch
        for i, branch in enumerate(branches, start=1)
    ]
    if all(a is b for a, b in zip(expanded, branches)):
        return None
    return op.Where(node.input(0), *expanded)


@lowering("Clip")
def clip(op: GraphBuilder, node: NodeToLower) -> Value | None:
    if node.path_inputs != {0}:
        raise NoGradientError(
            "the gradient of its bounds is unknown", "freeze the bounds, or use Min and Max"
        )
    return op.Identity(node.input(0)) if len(node.ir.inputs) == 1 else None


# Reductions
# --------------------------------------------------------------------------------------------------


def _reduced_axes(node: NodeToLower) -> list[int]:
    """Return the axes of a reduction, in order. Raises NoGradientError if it reduces no axis."""
    rank = require_rank(node.input(0))
    axes = node.constant_input(1)
    if axes is not None and axes.size:
        return sorted(int(axis) % rank for axis in axes)
    if node.attribute("noop_with_empty_axes", 0):
        raise NoGradientError("it has noop_with_empty_axes and no axes", "remove the node")
    return list(range(rank))


@lowering("ReduceSum", "ReduceMean")
def linear_reduction(op: GraphBuilder, node: NodeToLower) -> None:
    _reduced_axes(node)  # raises NoGradientError if there is no gradient


@lowering("ReduceL2", "ReduceLogSumExp", "ReduceSumSquare", "ReduceL1", "ReduceLogSum")
def reduction(op: GraphBuilder, node: NodeToLower) -> Value | None:
    x = node.input(0)
    axes = _reduced_axes(node)
    keepdims = node.attribute("keepdims", 1)
    op_type = node.op_type
    axes_input = node.constant_input(1)
    explicit = axes_input is not None and bool(axes_input.size)
    if op_type in ("ReduceL2", "ReduceLogSumExp") and keepdims and explicit:
        return None

    def reduce(op_type: str, value: Value) -> Value:
        if not axes:  # of a scalar
            return abs(value) if op_type == "ReduceL2" else value
        call: Callable[..., Value] = getattr(op, op_type)
        # The builder's rule for ReduceL2 is wrong with keepdims=0.
        y = call(value, axes, keepdims=1)
        return y if keepdims else op.Squeeze(y, axes)

    if op_type == "ReduceSumSquare":
        return reduce("ReduceSum", x * x)
    if op_type == "ReduceL1":
        return reduce("ReduceSum", abs(x))
    if op_type == "ReduceLogSum":
        return op.Log(reduce("ReduceSum", x))
    return reduce(op_type, x)


@lowering("ReduceMax", "ReduceMin")
def reduce_max_or_min(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    axes = _reduced_axes(node)
    largest = int(node.op_type == "ReduceMax")
    for axis in axes:
        x = op.TopK(x, [1], _outputs=2, axis=axis, largest=largest)[0]
    return op.Identity(x) if node.attribute("keepdims", 1) else op.Squeeze(x, axes)


# Products
# --------------------------------------------------------------------------------------------------


@lowering("MatMul")
def matmul(op: GraphBuilder, node: NodeToLower) -> Value | None:
    a = node.input(0)
    b = node.input(1)
    new_axes = []  # a vector becomes a matrix, whose new axis is removed from the product
    if require_rank(a) == 1:
        a = op.Unsqueeze(a, [0])
        new_axes.append(-2)
    if require_rank(b) == 1:
        b = op.Unsqueeze(b, [1])
        new_axes.append(-1)
    return op.Squeeze(a @ b, new_axes) if new_axes else None


@lowering("CumSum")
def cumulative_sum(op: GraphBuilder, node: NodeToLower) -> Value:
    """A product with a triangular matrix of ones."""
    x = node.input(0)
    axes = node.constant_input(1)
    assert axes is not None
    rank = require_rank(x)
    axis = int(axes.reshape(-1)[0]) % rank
    size = require_size(x, axis)
    ones = np.triu(np.ones((size, size)), k=node.attribute("exclusive", 0))
    if node.attribute("reverse", 0):
        ones = ones.T
    axis_last = [i for i in range(rank) if i != axis] + [axis]
    y = op.Transpose(x, perm=axis_last) @ op.constant(ones, x.dtype)
    return op.Transpose(y, perm=[int(i) for i in np.argsort(axis_last)])
