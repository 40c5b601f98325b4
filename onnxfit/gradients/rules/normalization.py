"""Normalisations: x minus its mean, over its deviation, times a scale, plus a bias; they differ in
the axes and in where the statistics come from.

With n = (x - mean) / deviation over N elements, the gradient is (Ba, Kiros and Hinton 2016; Ioffe
and Szegedy 2015)

    dx = (dn - mean(dn) - n mean(dn n)) / deviation      dn = dy scale
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxfit.gradients.broadcasting import reduce_to, zeros_like
from onnxfit.gradients.building import MICROSOFT, per_channel, trailing_size
from onnxfit.gradients.table import Gradients, decompose, gradient
from onnxfit.graph.inference import same_type_and_shape
from onnxfit.graph.values import GraphBuilder, Value


@gradient("LayerNormalization", all_outputs=True)
def layer_normalization(
    op: GraphBuilder, x: Value, scale: Value, bias: Value | None, y: Value, mean: Value, inverse: Value,
    dy: Value | None, dmean: Value | None, dinverse: Value | None, *, axis: int, epsilon: float,
) -> Gradients:  # fmt: skip
    """With c = x - mean instead of n, which saves a pass over x: the factor 1 / deviation joins
    what has one number per row.
    """
    axes = list(range(axis % x.rank, x.rank))
    if x.dtype != np.float32:  # the node's own statistics are single
        mean = op.ReduceMean(x, axes)
        inverse = 1 / op.Sqrt(op.ReduceMean(op.Mul(x - mean, x - mean), axes) + epsilon)
    centred = x - mean
    product = None if dy is None else dy * centred

    def of_x() -> Value:
        count = trailing_size(op, x, axes[0])
        parts = []
        if dy is not None and product is not None:
            # the mean of v * scale over rows is a product of matrix and vector
            if _is_row(scale, x, axes):
                column = op.Unsqueeze(scale / count, [1])
                one, two = dy @ column, product @ column
            else:
                one, two = op.ReduceMean(dy * scale, axes), op.ReduceMean(product * scale, axes)
            parts.append((dy * scale - one - centred * (two * (inverse * inverse))) * inverse)
        if dmean is not None:
            parts.append(op.Expand(op.cast(dmean, x.dtype) / count, op.shape(x)))
        if dinverse is not None:  # inverse = (mean((x - mean)^2) + epsilon)^(-1/2)
            parts.append(
                centred * (-op.cast(dinverse, x.dtype) * inverse * inverse * inverse / count)
            )
        return op.Sum(*parts) if len(parts) > 1 else parts[0]

    def of_scale() -> Value:
        if product is None:
            return zeros_like(op, scale)
        if _is_row(scale, x, axes):  # the sum over rows of product * inverse
            return op.Reshape(inverse, [-1]) @ op.Flatten(product, axis=-1)
        return reduce_to(op, product * inverse, scale)

    def of_bias() -> Value:
        assert bias is not None
        return zeros_like(op, bias) if dy is None else reduce_to(op, dy, bias)

    return of_x, of_scale, of_bias


def _is_row(scale: Value, x: Value, axes: list[int]) -> bool:
    """Whether the last axis alone is normalised, and there is one scale for each of its elements."""
    if len(axes) != 1 or scale.shape is None or x.shape is None:
        return False
    return scale.shape == x.shape[-1:] != (1,) and None not in scale.shape


@gradient("InstanceNormalization")
def instance_normalization(
    op: GraphBuilder, x: Value, scale: Value, bias: Value, y: Value, dy: Value, *, epsilon: float
) -> Gradients:
    axes = list(range(2, x.rank))
    centred = x - op.ReduceMean(x, axes)
    inverse = 1 / op.Sqrt(op.ReduceMean(centred * centred, axes) + epsilon)
    # (batch, channels, 1, ...)
    one, two = op.ReduceMean(dy, axes), op.ReduceMean(dy * centred, axes)

    def over_all(mean: Value) -> Value:
        return op.Reshape(op.ReduceSum(mean, [0]), [-1]) * trailing_size(op, x, axes[0])

    return (
        lambda: (
            (dy - one - centred * (two * inverse * inverse)) * (inverse * per_channel(op, scale, x))
        ),
        lambda: over_all(two * inverse),
        lambda: over_all(one),
    )


@decompose("GroupNormalization")
def group_normalization(
    op: GraphBuilder, x: Value, scale: Value, bias: Value, *, epsilon: float, num_groups: int
) -> Value:
    """Groups of channels as the channels of an InstanceNormalization (Wu and He 2018)."""
    groups = op.Reshape(x, [0, num_groups, -1])
    ones, zeros = np.ones(num_groups, x.dtype), np.zeros(num_groups, x.dtype)
    n = op.Reshape(op.InstanceNormalization(groups, ones, zeros, epsilon=epsilon), op.shape(x))
    return n * per_channel(op, scale, x) + per_channel(op, bias, x)


@decompose("BatchNormalization")
def batch_normalization(
    op: GraphBuilder,
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
    """By the running statistics, or in training mode by those of the batch, which the running ones
    then follow.
    """
    if not training_mode:
        factor = scale / op.Sqrt(variance + epsilon)
        return x * per_channel(op, factor, x) + per_channel(op, bias - mean * factor, x)
    axes = [axis for axis in range(x.rank) if axis != 1]
    batch_mean = op.ReduceMean(x, axes)
    centred = x - batch_mean
    batch_variance = op.ReduceMean(centred * centred, axes)
    y = centred / op.Sqrt(batch_variance + epsilon) * per_channel(op, scale, x) + per_channel(
        op, bias, x
    )
    updated = [
        momentum * running + (1 - momentum) * op.cast(op.Reshape(batch, [-1]), running.dtype)
        for running, batch in ((mean, batch_mean), (variance, batch_variance))
    ]
    return y, *updated


@decompose("MeanVarianceNormalization")
def mean_variance_normalization(op: GraphBuilder, x: Value, *, axes: Sequence[int]) -> Value:
    """(x - mean) / (deviation + 1e-9)"""
    centred = x - op.ReduceMean(x, axes)
    return centred / (op.Sqrt(op.ReduceMean(centred * centred, axes)) + 1e-9)


@decompose("SimplifiedLayerNormalization", infer=same_type_and_shape)
@decompose("SimplifiedLayerNormalization", MICROSOFT, infer=same_type_and_shape)
def simplified_layer_normalization(
    op: GraphBuilder,
    x: Value,
    scale: Value,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Value, Value]:
    """x / sqrt(mean(x^2) + epsilon), scaled (Zhang and Sennrich 2019)."""
    axes = list(range(axis % x.rank, x.rank))
    inverse = 1 / op.Sqrt(op.ReduceMean(x * x, axes) + epsilon)
    return x * inverse * scale, inverse


@decompose("SkipLayerNormalization", MICROSOFT, infer=same_type_and_shape)
def skip_layer_normalization(
    op: GraphBuilder,
    x: Value,
    skip: Value,
    gamma: Value,
    beta: Value | None,
    bias: Value | None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Value | None, ...]:
    total = x + skip if bias is None else x + skip + bias
    y, mean, inverse = op.LayerNormalization(
        total, gamma, beta, _outputs=3, axis=-1, epsilon=epsilon
    )
    return y, mean, inverse, total


@decompose("SkipSimplifiedLayerNormalization", MICROSOFT, infer=same_type_and_shape)
def skip_simplified_layer_normalization(
    op: GraphBuilder,
    x: Value,
    skip: Value,
    gamma: Value,
    bias: Value | None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Value | None, ...]:
    total = x + skip if bias is None else x + skip + bias
    y, inverse = simplified_layer_normalization(op, total, gamma, epsilon=epsilon)
    return y, None, inverse, total
