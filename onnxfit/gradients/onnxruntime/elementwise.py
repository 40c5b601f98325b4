"""Functions of elements, sums, choices, reductions and products in the form that onnxruntime's builder differentiates correctly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.onnxruntime.forms import attribute, expanded, form, known, needed, rank, result, same_shape, size
from onnxfit.gradients.paths import Site
from onnxfit.gradients.table import Refused
from onnxfit.graph.values import Op, Value

# Functions of each element -----------------------------------------------------------------------------------------------------


@form("Softplus")
def softplus(op: Op, site: Site) -> Value:
    return _softplus(op, needed(op, site))


def _softplus(op: Op, x: Value) -> Value:
    # e^x alone overflows; Max, unlike Relu, has slope 1/2 at 0, as softplus has
    return op.Max(x, 0.0) + op.Log(1 + op.Exp(-abs(x)))


@form("Mish")
def mish(op: Op, site: Site) -> Value:
    x = needed(op, site)
    return x * op.Tanh(_softplus(op, x))


@form("Softsign")
def softsign(op: Op, site: Site) -> Value:
    x = needed(op, site)
    return x / (1 + abs(x))


@form("HardSigmoid")
def hard_sigmoid(op: Op, site: Site) -> Value:
    return op.Clip(attribute(site, "alpha", 0.2) * needed(op, site) + attribute(site, "beta", 0.5), 0.0, 1.0)


@form("HardSwish")
def hard_swish(op: Op, site: Site) -> Value:
    x = needed(op, site)
    return x * op.Clip(x / 6 + 0.5, 0.0, 1.0)


@form("Elu", "Celu", "Selu")
def elu(op: Op, site: Site) -> Value:
    x, kind = needed(op, site), site.node.op_type
    alpha = attribute(site, "alpha", 1.67326319217681884765625 if kind == "Selu" else 1.0)
    negative = x < 0
    below = op.Where(negative, x, 0.0)  # e^x of a large x that is not chosen would still spoil the gradient
    y = op.Where(negative, alpha * (op.Exp(below / alpha if kind == "Celu" else below) - 1), x)
    return attribute(site, "gamma", 1.05070102214813232421875) * y if kind == "Selu" else y


@form("ThresholdedRelu")
def thresholded_relu(op: Op, site: Site) -> Value:
    x = needed(op, site)
    return op.Where(x > attribute(site, "alpha", 1.0), x, 0.0)


@form("Shrink")
def shrink(op: Op, site: Site) -> Value:
    x, bias, bound = needed(op, site), attribute(site, "bias", 0.0), attribute(site, "lambd", 0.5)
    return op.Where(x < -bound, x + bias, op.Where(x > bound, x - bias, 0.0))


@form("PRelu")
def prelu(op: Op, site: Site) -> Value:
    x, slope = needed(op, site), needed(op, site, 1)
    return op.Where(x < 0, expanded(op, slope, x) * x, x)


@form("Tan")
def tan(op: Op, site: Site) -> Value:
    x = needed(op, site)
    return op.Sin(x) / op.Cos(x)


@form("Sinh", "Cosh")
def sinh(op: Op, site: Site) -> Value:
    x = needed(op, site)
    up, down = op.Exp(x), op.Exp(-x)
    return (up - down if site.node.op_type == "Sinh" else up + down) * 0.5


@form("Asinh")
def asinh(op: Op, site: Site) -> Value:
    x = needed(op, site)
    negative = x < 0
    size = op.Where(negative, -x, x)  # not Abs, whose slope at 0 is 0
    y = op.Log(size + op.Sqrt(size * size + 1))
    return op.Where(negative, -y, y)


@form("Acosh")
def acosh(op: Op, site: Site) -> Value:
    x = needed(op, site)
    return op.Log(x + op.Sqrt(x * x - 1))


@form("Atanh")
def atanh(op: Op, site: Site) -> Value:
    x = needed(op, site)
    return 0.5 * op.Log((1 + x) / (1 - x))


@form("CastLike")
def cast_like(op: Op, site: Site) -> Value:
    return op.cast(needed(op, site), needed(op, site, 1).dtype)


@form("Pow")
def power(op: Op, site: Site) -> Value | None:
    x, exponent = needed(op, site), needed(op, site, 1)
    if 1 in site.inputs:
        base = None if 0 in site.inputs else ir.convenience.get_const_tensor(x.ir)
        if base is None or not (base.numpy() > 0).all():
            raise Refused("the builder drops the gradient of an exponent", "Exp(exponent * Log(base)), where the base is positive")
        return op.Exp(exponent * op.constant(np.log(base.numpy().astype(np.float64)), x.dtype))
    constant = ir.convenience.get_const_tensor(exponent.ir)
    if constant is None or (constant.numpy() == 0).any():
        raise Refused("the exponent may be 0, where its gradient is not a number", "a constant exponent other than 0")
    if exponent.dtype == x.dtype and same_shape(x, result(op, site)):
        return None
    return op.Pow(expanded(op, x, result(op, site)), op.constant(constant.numpy(), x.dtype))


# Sums and choices ------------------------------------------------------------------------------------------------------------


@form("Sum", "Mean")
def total(op: Op, site: Site) -> Value:
    terms = [op.wrap(v) for v in site.node.inputs if v is not None]
    y = terms[0]
    for term in terms[1:]:
        y = y + term
    if site.node.op_type == "Mean" and len(terms) > 1:
        return y * (1 / len(terms))
    return y if len(terms) > 1 else op.Identity(y)


@form("Max", "Min")
def extreme(op: Op, site: Site) -> Value | None:
    return op.Identity(needed(op, site)) if len(site.node.inputs) == 1 else None


@form("Where")
def where(op: Op, site: Site) -> Value | None:
    y, condition = result(op, site), needed(op, site)
    branches = [needed(op, site, i) for i in (1, 2)]
    wide = [expanded(op, b, y) if i in site.inputs else b for i, b in enumerate(branches, start=1)]
    return None if all(a is b for a, b in zip(wide, branches)) else op.Where(condition, *wide)


@form("Clip")
def clip(op: Op, site: Site) -> Value | None:
    if site.inputs != {0}:
        raise Refused("the gradient of its bounds is not known", "freeze the bounds, or use Min and Max")
    return op.Identity(needed(op, site)) if len(site.node.inputs) == 1 else None


# Reductions ------------------------------------------------------------------------------------------------------------------


def _axes(op: Op, site: Site) -> list[int] | None:
    """The axes a reduction takes, in order; None where it takes none (`noop_with_empty_axes`)."""
    x, axes = needed(op, site), known(op, site, 1)
    if axes is None or axes.size == 0:
        return None if attribute(site, "noop_with_empty_axes", 0) else list(range(rank(x)))
    return sorted(int(a) % rank(x) for a in axes)


@form("ReduceSum", "ReduceMean", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare", "ReduceL1", "ReduceLogSum")
def reduction(op: Op, site: Site) -> Value | None:
    kind, x, axes, keep = site.node.op_type, needed(op, site), _axes(op, site), attribute(site, "keepdims", 1)
    if axes is None:
        raise Refused("noop_with_empty_axes without axes", "remove the node")
    named = known(op, site, 1)
    if kind in ("ReduceSum", "ReduceMean") or (
        kind in ("ReduceL2", "ReduceLogSumExp") and keep and named is not None and named.size
    ):
        return None

    def reduce(op_type: str, value: Value) -> Value:
        if not axes:  # of a scalar
            return abs(value) if op_type == "ReduceL2" else value
        call: Callable[..., Value] = getattr(op, op_type)
        y = call(value, axes, keepdims=1)
        return y if keep else op.Squeeze(y, axes)  # the builder's rule for ReduceL2 is wrong where nothing is left

    if kind == "ReduceSumSquare":
        return reduce("ReduceSum", x * x)
    if kind == "ReduceL1":
        return reduce("ReduceSum", abs(x))
    if kind == "ReduceLogSum":
        return op.Log(reduce("ReduceSum", x))
    return reduce(kind, x)


@form("ReduceMax", "ReduceMin")
def extreme_along(op: Op, site: Site) -> Value:
    x, axes = needed(op, site), _axes(op, site)
    if axes is None:
        raise Refused("noop_with_empty_axes without axes", "remove the node")
    for axis in axes:
        x = op.many(2, "TopK", x, [1], axis=axis, largest=int(site.node.op_type == "ReduceMax"))[0]
    return op.Identity(x) if attribute(site, "keepdims", 1) else op.Squeeze(x, axes)


# Products --------------------------------------------------------------------------------------------------------------------


@form("MatMul")
def matmul(op: Op, site: Site) -> Value | None:
    a, b = needed(op, site), needed(op, site, 1)
    left, right = rank(a) == 1, rank(b) == 1
    if not (left or right):
        return None
    y = (op.Unsqueeze(a, [0]) if left else a) @ (op.Unsqueeze(b, [1]) if right else b)
    return op.Squeeze(y, [-2] * left + [-1] * right)


@form("CumSum")
def cumulated(op: Op, site: Site) -> Value:
    x, axes = needed(op, site), known(op, site, 1)
    assert axes is not None
    axis = int(axes.reshape(-1)[0]) % rank(x)
    ones = np.triu(np.ones((size(x, axis), size(x, axis))), k=attribute(site, "exclusive", 0))
    perm = [i for i in range(rank(x)) if i != axis] + [axis]
    y = op.Transpose(x, perm=perm) @ op.constant(ones.T if attribute(site, "reverse", 0) else ones, x.dtype)
    return op.Transpose(y, perm=[int(i) for i in np.argsort(perm)])
