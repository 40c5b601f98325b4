"""Activation functions and softmax.

Mish and HardSwish have no rule: they are differentiated through the ONNX functions that define
them, because a rule would compute their intermediate values again.

At its kink, a function has the slope of its left side, as in PyTorch: Relu'(0) = 0 and
Elu'(0) = alpha.
"""

from __future__ import annotations

import math

import numpy as np

from onnxfit.gradients.building import constant_elements
from onnxfit.gradients.table import Gradients, rule
from onnxfit.graph.values import GraphBuilder, Value


@rule("Relu")
def relu(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    # a HardSigmoid compares and casts in one operator, up to twice as fast; it has no double kernel
    if dy.dtype == np.float32:
        return dy * op.HardSigmoid(y, alpha=1e38, beta=0.0)
    return dy * op.cast(y > 0, dy.dtype)


@rule("LeakyRelu")
def leaky_relu(op: GraphBuilder, x: Value, y: Value, dy: Value, *, alpha: float) -> Gradients:
    return dy * op.Where(x > 0, 1, op.constant(alpha, x.dtype))


@rule("PRelu", broadcasts=True)
def p_relu(op: GraphBuilder, x: Value, slope: Value, y: Value, dy: Value) -> Gradients:
    return lambda: dy * op.Where(x > 0, 1, slope), lambda: dy * op.Min(x, 0)


@rule("Elu")
def elu(op: GraphBuilder, x: Value, y: Value, dy: Value, *, alpha: float) -> Gradients:
    return dy * op.Where(x > 0, 1, y + alpha)


@rule("Celu")
def celu(op: GraphBuilder, x: Value, y: Value, dy: Value, *, alpha: float) -> Gradients:
    return dy * op.Where(x > 0, 1, y / alpha + 1)


@rule("Selu")
def selu(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *, alpha: float, gamma: float
) -> Gradients:
    return dy * op.Where(x > 0, gamma, y + alpha * gamma)


@rule("HardSigmoid")
def hard_sigmoid(op: GraphBuilder, x: Value, y: Value, dy: Value, *, alpha: float) -> Gradients:
    return dy * (alpha * op.cast((y > 0) & (y < 1), dy.dtype))  # alpha may be huge: see Relu


@rule("Softplus")
def softplus(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return dy * op.Sigmoid(x)


@rule("Softsign")
def softsign(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    denominator = 1 + abs(x)
    return dy / (denominator * denominator)


@rule("ThresholdedRelu")
def thresholded_relu(op: GraphBuilder, x: Value, y: Value, dy: Value, *, alpha: float) -> Gradients:
    return dy * op.cast(x > alpha, dy.dtype)


@rule("Shrink")
def shrink(op: GraphBuilder, x: Value, y: Value, dy: Value, *, lambd: float) -> Gradients:
    return dy * op.cast(abs(x) > lambd, dy.dtype)


@rule("Gelu")
def gelu(op: GraphBuilder, x: Value, y: Value, dy: Value, *, approximate: str) -> Gradients:
    """The derivative P + x P' of y = x P(x).

    P is the normal distribution function; for "tanh", it is the logistic function of a cubic in x.
    The normal distribution function is half the work of y, so y is computed from it as well: a
    training step of an encoder takes 3 % less time.
    """
    if approximate == "tanh":
        k = 2 * math.sqrt(2 / math.pi)
        square = x * x
        p = op.Sigmoid(x * (k + k * 0.044715 * square))
        return dy * (p + y * (1 - p) * (k + 3 * k * 0.044715 * square))
    z = x * math.sqrt(0.5)
    p = op.HardSigmoid(op.Erf(z), alpha=0.5, beta=0.5)  # (1 + erf z) / 2 in one operator
    if not op.in_body:
        op.move_uses(y, x * p)
    return dy * (p + z * op.Exp(math.log(1 / math.sqrt(math.pi)) - z * z))


@rule("Softmax")
def softmax(op: GraphBuilder, x: Value, y: Value, dy: Value, *, axis: int) -> Gradients:
    return y * (dy - op.ReduceSum(dy * y, [axis]))


@rule("LogSoftmax")
def log_softmax(op: GraphBuilder, x: Value, y: Value, dy: Value, *, axis: int) -> Gradients:
    return dy - op.Exp(y) * op.ReduceSum(dy, [axis])


@rule("LpNormalization")
def lp_normalization(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *, axis: int, p: int
) -> Gradients:
    """(dy - N' sum(dy y)) / N with the norm N, whose slope N' is sign(x) or y.

    For x = 0, y is 0, and so is the gradient.
    """
    norm = (op.ReduceL1 if p == 1 else op.ReduceL2)(x, [axis])
    slope = op.Sign(x) if p == 1 else y
    return (dy - slope * op.ReduceSum(dy * y, [axis])) / op.Where(norm == 0, math.inf, norm)


@rule("Dropout", all_outputs=True)
def dropout(
    op: GraphBuilder,
    x: Value,
    ratio: Value | None,
    training: Value | None,
    y: Value,
    mask: Value,
    dy: Value,
    dmask: None,
) -> Gradients:
    """The identity, or mask / (1 - ratio) in training mode."""
    flag = constant_elements(training)
    if training is None or (flag is not None and not flag):
        return dy, None, None
    kept = 1 - (op.constant(0.5, dy.dtype) if ratio is None else op.cast(ratio, dy.dtype))
    return dy * (op.cast(mask, dy.dtype) / op.Where(training, kept, 1)), None, None
