"""Normalisations: x minus its mean, over its deviation, times a scale, plus a bias; they differ in the axes and in where the statistics come from.

With n = (x - mean) / deviation over N elements, the gradient is (Ba, Kiros and Hinton 2016; Ioffe and Szegedy 2015)

    dx = (dn - mean(dn) - n mean(dn n)) / deviation      dn = dy scale
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxfit.gradients.broadcasting import reduce_to, zeros_like
from onnxfit.gradients.table import Gradients, gradient, rewrite
from onnxfit.graph.values import Op, Value


@gradient("LayerNormalization", complete=True)
def layer_normalization(
    op: Op, x: Value, scale: Value, bias: Value | None, y: Value, mean: Value, inverse: Value,
    dy: Value | None, dmean: Value | None, dinverse: Value | None, *, axis: int, epsilon: float,
) -> Gradients:  # fmt: skip
    axes = list(range(axis % x.rank, x.rank))
    if x.dtype != np.float32:  # the node's own statistics are single
        mean = op.ReduceMean(x, axes)
        centred = x - mean
        inverse = 1 / op.Sqrt(op.ReduceMean(centred * centred, axes) + epsilon)
        n = centred * inverse
    else:
        n = (x - mean) * inverse

    def of_x() -> Value:
        dx = _back(op, dy * scale, n, inverse, axes) if dy is not None else op.constant(0, x.dtype)
        count = op.cast(op.ReduceProd(op.shape(x, axes[0]), keepdims=0), x.dtype)
        if dmean is not None:
            dx = dx + op.cast(dmean, x.dtype) / count
        if dinverse is not None:  # inverse = (mean((x - mean)^2) + epsilon)^(-1/2)
            dx = dx - op.cast(dinverse, x.dtype) * inverse * inverse * n / count
        return dx

    def of_scale() -> Value:
        return reduce_to(op, dy * n, scale) if dy is not None else zeros_like(op, scale)

    def of_bias() -> Value:
        assert bias is not None
        return reduce_to(op, dy, bias) if dy is not None else zeros_like(op, bias)

    return of_x, of_scale, of_bias


@gradient("InstanceNormalization")
def instance_normalization(op: Op, x: Value, scale: Value, bias: Value, y: Value, dy: Value, *, epsilon: float) -> Gradients:
    axes = list(range(2, x.rank))
    centred = x - op.ReduceMean(x, axes)
    inverse = 1 / op.Sqrt(op.ReduceMean(centred * centred, axes) + epsilon)
    n = centred * inverse
    return (
        lambda: _back(op, dy * _per_channel(op, scale, x), n, inverse, axes),
        lambda: op.ReduceSum(op.ReduceSum(dy * n, axes, keepdims=0), [0], keepdims=0),
        lambda: op.ReduceSum(op.ReduceSum(dy, axes, keepdims=0), [0], keepdims=0),
    )


@rewrite("GroupNormalization")
def group_normalization(op: Op, x: Value, scale: Value, bias: Value, *, epsilon: float, num_groups: int) -> Value:
    """Groups of channels as the channels of an InstanceNormalization (Wu and He 2018)."""
    groups = op.Reshape(x, [0, num_groups, -1])
    ones, zeros = np.ones(num_groups, x.dtype), np.zeros(num_groups, x.dtype)
    n = op.Reshape(op.InstanceNormalization(groups, ones, zeros, epsilon=epsilon), op.shape(x))
    return n * _per_channel(op, scale, x) + _per_channel(op, bias, x)


@rewrite("BatchNormalization")
def batch_normalization(
    op: Op,
    x: Value,
    scale: Value,
    bias: Value,
    mean: Value,
    variance: Value,
    *,
    epsilon: float,
    momentum: float,
    training_mode: int,
) -> Value | tuple[Value, ...]:
    """By the running statistics, or in training mode by those of the batch, which the running ones then follow."""
    if not training_mode:
        factor = scale / op.Sqrt(variance + epsilon)
        return x * _per_channel(op, factor, x) + _per_channel(op, bias - mean * factor, x)
    axes = [axis for axis in range(x.rank) if axis != 1]
    batch_mean = op.ReduceMean(x, axes)
    centred = x - batch_mean
    batch_variance = op.ReduceMean(centred * centred, axes)
    y = centred / op.Sqrt(batch_variance + epsilon) * _per_channel(op, scale, x) + _per_channel(op, bias, x)
    following = [
        momentum * running + (1 - momentum) * op.cast(op.Reshape(batch, [-1]), running.dtype)
        for running, batch in ((mean, batch_mean), (variance, batch_variance))
    ]
    return y, *following


@rewrite("MeanVarianceNormalization")
def mean_variance_normalization(op: Op, x: Value, *, axes: Sequence[int]) -> Value:
    """(x - mean) / (deviation + 1e-9)"""
    centred = x - op.ReduceMean(x, axes)
    return centred / (op.Sqrt(op.ReduceMean(centred * centred, axes)) + 1e-9)


@rewrite("SimplifiedLayerNormalization")
@rewrite("SimplifiedLayerNormalization", "com.microsoft")
def simplified_layer_normalization(
    op: Op, x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Value, Value]:
    """x / sqrt(mean(x^2) + epsilon), scaled (Zhang and Sennrich 2019)."""
    axes = list(range(axis % x.rank, x.rank))
    inverse = 1 / op.Sqrt(op.ReduceMean(x * x, axes) + epsilon)
    return x * inverse * scale, inverse


@rewrite("SkipLayerNormalization", "com.microsoft")
def skip_layer_normalization(
    op: Op, x: Value, skip: Value, gamma: Value, beta: Value | None, bias: Value | None, *, epsilon: float = 1e-12
) -> tuple[Value | None, ...]:
    total = x + skip if bias is None else x + skip + bias
    y, mean, inverse = op.many(3, "LayerNormalization", total, gamma, beta, axis=-1, epsilon=epsilon)
    return y, mean, inverse, total


@rewrite("SkipSimplifiedLayerNormalization", "com.microsoft")
def skip_simplified_layer_normalization(
    op: Op, x: Value, skip: Value, gamma: Value, bias: Value | None, *, epsilon: float = 1e-12
) -> tuple[Value | None, ...]:
    total = x + skip if bias is None else x + skip + bias
    y, inverse = simplified_layer_normalization(op, total, gamma, epsilon=epsilon)
    return y, None, inverse, total


def _back(op: Op, dn: Value, n: Value, inverse: Value, axes: list[int]) -> Value:
    return inverse * (dn - op.ReduceMean(dn, axes) - n * op.ReduceMean(dn * n, axes))


def _per_channel(op: Op, v: Value, x: Value) -> Value:
    """A vector of channels against `(batch, channels, ...)`."""
    return op.Reshape(v, [-1] + [1] * (x.rank - 2)) if x.rank > 2 else v
