"""Functions of elements, sums, choices, reductions and products in the form that onnxruntime's
builder differentiates correctly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.onnxruntime.forms import (
    attribute,
    expanded,
    form,
    known,
    needed,
    rank,
    result,
    same_shape,
    size,
)
from onnxfit.gradients.paths import PathNode
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.values import GraphBuilder, Value

# Functions of each element
# -----------------------------------------------------------------------------------------------------


@form("Softplus")
def softplus(op: GraphBuilder, path_node: PathNode) -> Value:
    return _softplus(op, needed(op, path_node))


def _softplus(op: GraphBuilder, x: Value) -> Value:
    # e^x alone overflows; Max, unlike Relu, has slope 1/2 at 0, as softplus has
    return op.Max(x, 0.0) + op.Log(1 + op.Exp(-abs(x)))


@form("Mish")
def mish(op: GraphBuilder, path_node: PathNode) -> Value:
    x = needed(op, path_node)
    return x * op.Tanh(_softplus(op, x))


@form("Softsign")
def softsign(op: GraphBuilder, path_node: PathNode) -> Value:
    x = needed(op, path_node)
    return x / (1 + abs(x))


@form("HardSigmoid")
def hard_sigmoid(op: GraphBuilder, path_node: PathNode) -> Value:
    return op.Clip(
        attribute(path_node, "alpha", 0.2) * needed(op, path_node)
        + attribute(path_node, "beta", 0.5),
        0.0,
        1.0,
    )


@form("HardSwish")
def hard_swish(op: GraphBuilder, path_node: PathNode) -> Value:
    x = needed(op, path_node)
    return x * op.Clip(x / 6 + 0.5, 0.0, 1.0)


@form("Elu", "Celu", "Selu")
def elu(op: GraphBuilder, path_node: PathNode) -> Value:
    x, kind = needed(op, path_node), path_node.node.op_type
    alpha = attribute(path_node, "alpha", 1.67326319217681884765625 if kind == "Selu" else 1.0)
    negative = x < 0
    # e^x of a large x that is not chosen would still spoil the gradient
    below = op.Where(negative, x, 0.0)
    y = op.Where(negative, alpha * (op.Exp(below / alpha if kind == "Celu" else below) - 1), x)
    return attribute(path_node, "gamma", 1.05070102214813232421875) * y if kind == "Selu" else y


@form("ThresholdedRelu")
def thresholded_relu(op: GraphBuilder, path_node: PathNode) -> Value:
    x = needed(op, path_node)
    return op.Where(x > attribute(path_node, "alpha", 1.0), x, 0.0)


@form("Shrink")
def shrink(op: GraphBuilder, path_node: PathNode) -> Value:
    x, bias, bound = (
        needed(op, path_node),
        attribute(path_node, "bias", 0.0),
        attribute(path_node, "lambd", 0.5),
    )
    return op.Where(x < -bound, x + bias, op.Where(x > bound, x - bias, 0.0))


@form("PRelu")
def prelu(op: GraphBuilder, path_node: PathNode) -> Value:
    x, slope = needed(op, path_node), needed(op, path_node, 1)
    return op.Where(x < 0, expanded(op, slope, x) * x, x)


@form("Tan")
def tan(op: GraphBuilder, path_node: PathNode) -> Value:
    x = needed(op, path_node)
    return op.Sin(x) / op.Cos(x)


@form("Sinh", "Cosh")
def sinh(op: GraphBuilder, path_node: PathNode) -> Value:
    x = needed(op, path_node)
    up, down = op.Exp(x), op.Exp(-x)
    return (up - down if path_node.node.op_type == "Sinh" else up + down) * 0.5


@form("Asinh")
def asinh(op: GraphBuilder, path_node: PathNode) -> Value:
    x = needed(op, path_node)
    negative = x < 0
    size = op.Where(negative, -x, x)  # not Abs, whose slope at 0 is 0
    y = op.Log(size + op.Sqrt(size * size + 1))
    return op.Where(negative, -y, y)


@form("Acosh")
def acosh(op: GraphBuilder, path_node: PathNode) -> Value:
    x = needed(op, path_node)
    return op.Log(x + op.Sqrt(x * x - 1))


@form("Atanh")
def atanh(op: GraphBuilder, path_node: PathNode) -> Value:
    x = needed(op, path_node)
    return 0.5 * op.Log((1 + x) / (1 - x))


@form("CastLike")
def cast_like(op: GraphBuilder, path_node: PathNode) -> Value:
    return op.cast(needed(op, path_node), needed(op, path_node, 1).dtype)


@form("Pow")
def power(op: GraphBuilder, path_node: PathNode) -> Value | None:
    x, exponent = needed(op, path_node), needed(op, path_node, 1)
    if 1 in path_node.inputs:
        base = None if 0 in path_node.inputs else ir.convenience.get_const_tensor(x.ir)
        if base is None or not (base.numpy() > 0).all():
            raise NoGradientError(
                "the builder drops the gradient of an exponent",
                "Exp(exponent * Log(base)), where the base is positive",
            )
        return op.Exp(exponent * op.constant(np.log(base.numpy().astype(np.float64)), x.dtype))
    constant = ir.convenience.get_const_tensor(exponent.ir)
    if constant is None or (constant.numpy() == 0).any():
        raise NoGradientError(
            "the exponent may be 0, where its gradient is not a number",
            "a constant exponent other than 0",
        )
    if exponent.dtype == x.dtype and same_shape(x, result(op, path_node)):
        return None
    return op.Pow(expanded(op, x, result(op, path_node)), op.constant(constant.numpy(), x.dtype))


# Sums and choices
# ------------------------------------------------------------------------------------------------------------


@form("Sum", "Mean")
def total(op: GraphBuilder, path_node: PathNode) -> Value:
    terms = [op.wrap(v) for v in path_node.node.inputs if v is not None]
    y = terms[0]
    for term in terms[1:]:
        y = y + term
    if path_node.node.op_type == "Mean" and len(terms) > 1:
        return y * (1 / len(terms))
    return y if len(terms) > 1 else op.Identity(y)


@form("Max", "Min")
def extreme(op: GraphBuilder, path_node: PathNode) -> Value | None:
    return op.Identity(needed(op, path_node)) if len(path_node.node.inputs) == 1 else None


@form("Where")
def where(op: GraphBuilder, path_node: PathNode) -> Value | None:
    y, condition = result(op, path_node), needed(op, path_node)
    branches = [needed(op, path_node, i) for i in (1, 2)]
    wide = [
        expanded(op, b, y) if i in path_node.inputs else b for i, b in enumerate(branches, start=1)
    ]
    return None if all(a is b for a, b in zip(wide, branches)) else op.Where(condition, *wide)


@form("Clip")
def clip(op: GraphBuilder, path_node: PathNode) -> Value | None:
    if path_node.inputs != {0}:
        raise NoGradientError(
            "the gradient of its bounds is not known", "freeze the bounds, or use Min and Max"
        )
    return op.Identity(needed(op, path_node)) if len(path_node.node.inputs) == 1 else None


# Reductions
# ------------------------------------------------------------------------------------------------------------------


def _axes(op: GraphBuilder, path_node: PathNode) -> list[int] | None:
    """The axes a reduction takes, in order; None where it takes none (`noop_with_empty_axes`)."""
    x, axes = needed(op, path_node), known(op, path_node, 1)
    if axes is None or axes.size == 0:
        return None if attribute(path_node, "noop_with_empty_axes", 0) else list(range(rank(x)))
    return sorted(int(a) % rank(x) for a in axes)


@form(
    "ReduceSum",
    "ReduceMean",
    "ReduceL2",
    "ReduceLogSumExp",
    "ReduceSumSquare",
    "ReduceL1",
    "ReduceLogSum",
)
def reduction(op: GraphBuilder, path_node: PathNode) -> Value | None:
    kind, x, axes, keep = (
        path_node.node.op_type,
        needed(op, path_node),
        _axes(op, path_node),
        attribute(path_node, "keepdims", 1),
    )
    if axes is None:
        raise NoGradientError("noop_with_empty_axes without axes", "remove the node")
    named = known(op, path_node, 1)
    if kind in ("ReduceSum", "ReduceMean") or (
        kind in ("ReduceL2", "ReduceLogSumExp") and keep and named is not None and named.size
    ):
        return None

    def reduce(op_type: str, value: Value) -> Value:
        if not axes:  # of a scalar
            return abs(value) if op_type == "ReduceL2" else value
        call: Callable[..., Value] = getattr(op, op_type)
        y = call(value, axes, keepdims=1)
        # the builder's rule for ReduceL2 is wrong where nothing is left
        return y if keep else op.Squeeze(y, axes)

    if kind == "ReduceSumSquare":
        return reduce("ReduceSum", x * x)
    if kind == "ReduceL1":
        return reduce("ReduceSum", abs(x))
    if kind == "ReduceLogSum":
        return op.Log(reduce("ReduceSum", x))
    return reduce(kind, x)


@form("ReduceMax", "ReduceMin")
def extreme_along(op: GraphBuilder, path_node: PathNode) -> Value:
    x, axes = needed(op, path_node), _axes(op, path_node)
    if axes is None:
        raise NoGradientError("noop_with_empty_axes without axes", "remove the node")
    for axis in axes:
        x = op.TopK(
            x, [1], _outputs=2, axis=axis, largest=int(path_node.node.op_type == "ReduceMax")
        )[0]
    return op.Identity(x) if attribute(path_node, "keepdims", 1) else op.Squeeze(x, axes)


# Products
# --------------------------------------------------------------------------------------------------------------------


@form("MatMul")
def matmul(op: GraphBuilder, path_node: PathNode) -> Value | None:
    a, b = needed(op, path_node), needed(op, path_node, 1)
    left, right = rank(a) == 1, rank(b) == 1
    if not (left or right):
        return None
    y = (op.Unsqueeze(a, [0]) if left else a) @ (op.Unsqueeze(b, [1]) if right else b)
    return op.Squeeze(y, [-2] * left + [-1] * right)


@form("CumSum")
def cumulated(op: GraphBuilder, path_node: PathNode) -> Value:
    x, axes = needed(op, path_node), known(op, path_node, 1)
    assert axes is not None
    axis = int(axes.reshape(-1)[0]) % rank(x)
    ones = np.triu(np.ones((size(x, axis), size(x, axis))), k=attribute(path_node, "exclusive", 0))
    perm = [i for i in range(rank(x)) if i != axis] + [axis]
    y = op.Transpose(x, perm=perm) @ op.constant(
        ones.T if attribute(path_node, "reverse", 0) else ones, x.dtype
    )
    return op.Transpose(y, perm=[int(i) for i in np.argsort(perm)])
