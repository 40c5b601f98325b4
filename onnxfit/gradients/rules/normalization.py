"""Normalizations: x minus its mean, divided by its deviation, times a scale, plus a bias. They
differ in the axes and in the origin of the statistics.

With n = (x - mean) / deviation over N elements, the gradient is (Ba, Kiros and Hinton 2016; Ioffe
and Szegedy 2015)

    dx = (dn - mean(dn) - n mean(dn n)) / deviation      dn = dy scale
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxfit.gradients.broadcasting import reduce_to, zeros_like
from onnxfit.gradients.building import MICROSOFT, per_channel, trailing_size
from onnxfit.gradients.table import Gradients, decompose, rule
from onnxfit.graph.inference import same_type_and_shape
from onnxfit.graph.values import GraphBuilder, Value


@rule("LayerNormalization", all_outputs=True)
def layer_normalization(
    op: GraphBuilder,
    x: Value,
    scale: Value,
    bias: Value | None,
    y: Value,
    mean: Value,
    inverse: Value,
    dy: Value | None,
    dmean: Value | None,
    dinverse: Value | None,
    *,
    axis: int,
    epsilon: float,
) -> Gradients:
    """The formula with x - mean instead of n; `inverse` is 1 / deviation.

    This saves one multiplication of all elements: the factor 1 / deviation is multiplied to the
    means, of which there is one per row.
    """
    axes = list(range(axis % x.rank, x.rank))
    if x.dtype != np.float32:  # the node's own statistics are in single precision
        mean = op.ReduceMean(x, axes)
        inverse = 1 / op.Sqrt(op.ReduceMean(op.Mul(x - mean, x - mean), axes) + epsilon)
    centered = x - mean
    product = None if dy is None else dy * centered

    def of_x() -> Value:
        count = trailing_size(op, x, axes[0])
        terms = []
        if dy is not None:
            dn = dy * scale
            if product is not None and _is_row(scale, x, axes) and scale.ir.const_value is None:
                # The mean of v * scale over rows is a product of matrix and vector. It is faster
                # than a mean, unless the vector is constant: then onnxruntime packs it as a matrix.
                column = op.Unsqueeze(scale / count, [1])
                mean_dn = dy @ column
                mean_product = product @ column
            else:
                mean_dn = op.ReduceMean(dn, axes)
                mean_product = op.ReduceMean(dn * centered, axes)
            square = inverse * inverse
            terms.append((dn - mean_dn - centered * (mean_product * square)) * inverse)
        if dmean is not None:
            terms.append(op.Expand(op.cast(dmean, x.dtype) / count, op.shape(x)))
        if dinverse is not None:  # inverse = (mean((x - mean)^2) + epsilon)^(-1/2)
            slope = -op.cast(dinverse, x.dtype) * inverse * inverse * inverse / count
            terms.append(centered * slope)
        return op.Sum(*terms) if len(terms) > 1 else terms[0]

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
    """Whether only the last axis is normalized, with one scale for each of its elements."""
    if len(axes) != 1 or scale.shape is None or x.shape is None:
        return False
    return scale.shape == x.shape[-1:] != (1,) and None not in scale.shape


@rule("InstanceNormalization")
def instance_normalization(
    op: GraphBuilder, x: Value, scale: Value, bias: Value, y: Value, dy: Value, *, epsilon: float
) -> Gradients:
    axes = list(range(2, x.rank))
    centered = x - op.ReduceMean(x, axes)
    inverse = 1 / op.Sqrt(op.ReduceMean(centered * centered, axes) + epsilon)
    # of each image and channel: (batch, channels, 1, ...)
    mean_dy = op.ReduceMean(dy, axes)
    mean_product = op.ReduceMean(dy * centered, axes)

    def of_x() -> Value:
        correction = centered * (mean_product * inverse * inverse)
        return (dy - mean_dy - correction) * (inverse * per_channel(op, scale, x))

    def channel_sum(mean: Value) -> Value:
        return op.Reshape(op.ReduceSum(mean, [0]), [-1]) * trailing_size(op, x, axes[0])

    return of_x, lambda: channel_sum(mean_product * inverse), lambda: channel_sum(mean_dy)


@decompose("GroupNormalization")
def group_normalization(
    op: GraphBuilder, x: Value, scale: Value, bias: Value, *, epsilon: float, num_groups: int
) -> Value:
    """An InstanceNormalization whose channels are groups of channels (Wu and He 2018)."""
    groups = op.Reshape(x, [0, num_groups, -1])
    ones = np.ones(num_groups, x.dtype)
    zeros = np.zeros(num_groups, x.dtype)
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
    """Normalize by the running statistics, or in training mode by the batch, which updates them."""
    if not training_mode:
        factor = scale / op.Sqrt(variance + epsilon)
        return x * per_channel(op, factor, x) + per_channel(op, bias - mean * factor, x)
    axes = [axis for axis in range(x.rank) if axis != 1]
    batch_mean = op.ReduceMean(x, axes)
    centered = x - batch_mean
    batch_variance = op.ReduceMean(centered * centered, axes)
    y = centered / op.Sqrt(batch_variance + epsilon) * per_channel(op, scale, x)
    y = y + per_channel(op, bias, x)
    updated = [
        momentum * running + (1 - momentum) * op.cast(op.Reshape(batch, [-1]), running.dtype)
        for running, batch in ((mean, batch_mean), (variance, batch_variance))
    ]
    return y, *updated


@decompose("MeanVarianceNormalization")
def mean_variance_normalization(op: GraphBuilder, x: Value, *, axes: Sequence[int]) -> Value:
    """(x - mean) / (deviation + 1e-9)"""
    centered = x - op.ReduceMean(x, axes)
    return centered / (op.Sqrt(op.ReduceMean(centered * centered, axes)) + 1e-9)


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
