"""Lowerings of convolutions, pools, normalizations and losses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.building import per_channel
from onnxfit.gradients.onnxruntime.lowerings import (
    NodeToLower,
    lowering,
    require_rank,
    require_size,
)
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.values import GraphBuilder, Value

# Convolutions and pools
# --------------------------------------------------------------------------------------------------


def _set_explicit_pads(node: NodeToLower, kernel: list[int]) -> None:
    """Replace `auto_pad` by `pads`: the builder's rules for Conv and AveragePool ignore it."""
    mode = node.text_attribute("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        return
    strides = node.attribute("strides") or [1] * len(kernel)
    dilations = node.attribute("dilations") or [1] * len(kernel)
    before = []
    after = []
    for axis, window in enumerate(kernel):
        total = 0
        if mode != "VALID":
            stride = strides[axis]
            size = require_size(node.input(0), axis + 2) if stride > 1 else 0
            total = (window - 1) * dilations[axis] + 1 - (size % stride or stride)
            if total < 0:
                raise NoGradientError(
                    f"{mode} leaves out elements between its windows",
                    "use gradient='onnx', or write the pads into the attribute pads",
                )
        smaller = total // 2
        larger = total - smaller
        before.append(larger if mode == "SAME_LOWER" else smaller)
        after.append(smaller if mode == "SAME_LOWER" else larger)
    node.ir.attributes["pads"] = ir.AttrInt64s("pads", before + after)
    node.ir.attributes["auto_pad"] = ir.AttrString("auto_pad", "NOTSET")


@lowering("Conv")
def convolution(op: GraphBuilder, node: NodeToLower) -> None:
    kernel = node.attribute("kernel_shape")
    if kernel is None and node.text_attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        w = node.input(1)
        kernel = [require_size(w, axis) for axis in range(2, require_rank(w))]
    _set_explicit_pads(node, list(kernel or [1] * (require_rank(node.input(0)) - 2)))


@lowering("MaxPool")
def max_pool(op: GraphBuilder, node: NodeToLower) -> tuple[Value, ...] | None:
    """Let a MaxPool also return its indices, by which the builder places the gradient."""
    x = node.input(0)
    for axis in range(1, require_rank(x)):
        require_size(x, axis)  # the builder crashes if one is unknown
    attributes = node.ir.attributes
    indices = node.ir.outputs[1] if len(node.ir.outputs) > 1 else None
    if node.attribute("storage_order", 0):
        if indices is not None and (indices.uses() or indices.is_graph_output()):
            raise NoGradientError("storage_order=1", "storage_order=0")
        # the order changes the indices only
        attributes["storage_order"] = ir.AttrInt64("storage_order", 0)
    if indices is not None:
        return None
    return op.MaxPool(x, _outputs=2, **{name: a.value for name, a in attributes.items()})


@lowering("AveragePool")
def average_pool(op: GraphBuilder, node: NodeToLower) -> None:
    x = node.input(0)
    for axis in range(require_rank(x)):
        require_size(x, axis)  # the builder's gradient is empty if one is unknown
    if any(d != 1 for d in node.attribute("dilations") or ()):
        raise NoGradientError("the builder ignores dilations", "use dilations of 1")
    _set_explicit_pads(node, list(node.attribute("kernel_shape")))


@lowering("GlobalMaxPool")
def global_max_pool(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    require_size(x, 1)
    kernel_shape = [require_size(x, axis) for axis in range(2, require_rank(x))]
    return op.MaxPool(x, _outputs=2, kernel_shape=kernel_shape)[0]


@lowering("GlobalLpPool")
def global_lp_pool(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    p = node.attribute("p", 2)
    axes = list(range(2, require_rank(x)))
    if p == 1:
        return op.ReduceSum(abs(x), axes)
    if p == 2:
        return op.ReduceL2(x, axes)
    raise NoGradientError(f"it has p={p}", "use p=1 or p=2")


# Normalizations
# --------------------------------------------------------------------------------------------------


def _normalize(
    op: GraphBuilder, x: Value, axes: list[int], epsilon: float
) -> tuple[Value, Value, Value]:
    """Return (x - mean) / deviation over the axes, the mean, and 1 / deviation."""
    mean = op.ReduceMean(x, axes)
    centered = x - mean
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(centered * centered, axes) + epsilon))
    return centered * inverse, mean, inverse


def _per_channel(op: GraphBuilder, vector: Value, x: Value) -> Value:
    """Reshape a vector of channels for x. Raises NoGradientError if the rank of x is unknown."""
    require_rank(x)
    return per_channel(op, vector, x)


@lowering("LayerNormalization")
def layer_normalization(op: GraphBuilder, node: NodeToLower) -> tuple[Value, Value, Value]:
    x = node.input(0)
    bias = node.optional_input(2)
    rank = require_rank(x)
    axes = list(range(node.attribute("axis", -1) % rank, rank))
    y, mean, inverse = _normalize(op, x, axes, node.attribute("epsilon", 1e-5))
    y = y * node.input(1)
    if bias is not None:
        y = y + bias
    return y, mean, inverse


@lowering("InstanceNormalization")
def instance_normalization(op: GraphBuilder, node: NodeToLower) -> Value:
    x, scale, bias = (node.input(i) for i in range(3))
    y, _, _ = _normalize(op, x, list(range(2, require_rank(x))), node.attribute("epsilon", 1e-5))
    return y * _per_channel(op, scale, x) + _per_channel(op, bias, x)


@lowering("GroupNormalization")
def group_normalization(op: GraphBuilder, node: NodeToLower) -> Value:
    x, scale, bias = (node.input(i) for i in range(3))
    grouped = op.Reshape(x, [0, node.attribute("num_groups"), -1])
    y, _, _ = _normalize(op, grouped, [2], node.attribute("epsilon", 1e-5))
    y = op.Reshape(y, op.Shape(x))
    y.ir.shape = x.ir.shape
    return y * _per_channel(op, scale, x) + _per_channel(op, bias, x)


@lowering("MeanVarianceNormalization")
def mean_variance_normalization(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    axes = list(node.attribute("axes", [0, 2, 3]))
    centered = x - op.ReduceMean(x, axes)
    return centered / (op.Sqrt(op.ReduceMean(centered * centered, axes)) + 1e-9)


@lowering("LpNormalization")
def lp_normalization(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    axes = [node.attribute("axis", -1)]
    norm = op.ReduceSum(abs(x), axes) if node.attribute("p", 2) == 1 else op.ReduceL2(x, axes)
    return x / op.Where(op.Equal(norm, 0.0), 1.0, norm)


@lowering("LRN")
def local_response_normalization(op: GraphBuilder, node: NodeToLower) -> Value:
    """Sum over neighboring channels by a product with a band matrix of ones."""
    x = node.input(0)
    window = node.attribute("size")
    channels = require_size(x, 1)
    before = (window - 1) // 2
    after = window - 1 - before
    distance = np.arange(channels)[:, None] - np.arange(channels)
    band = ((distance >= -before) & (distance <= after)).astype(np.float64)
    channels_last = [0, *range(2, require_rank(x)), 1]
    sums = op.Transpose(
        op.Transpose(x * x, perm=channels_last) @ op.constant(band, x.dtype),
        perm=[int(i) for i in np.argsort(channels_last)],
    )
    alpha = node.attribute("alpha", 1e-4)
    base: Value = node.attribute("bias", 1.0) + alpha / window * sums
    power: Value = base ** node.attribute("beta", 0.75)
    return x / power


@lowering("BatchNormalization")
def batch_normalization(op: GraphBuilder, node: NodeToLower) -> Value:
    """Write BatchNormalization in inference form in plain operators.

    The builder would differentiate the operator as in training, with the batch's statistics.
    """
    if node.attribute("training_mode", 0):
        raise NoGradientError("it has training_mode=1", "use BatchNormalization in inference form")
    x, scale, bias, mean, variance = (node.input(i) for i in range(5))
    deviation = op.Sqrt(variance + node.attribute("epsilon", 1e-5))
    centered = x - _per_channel(op, mean, x)
    return centered * _per_channel(op, scale / deviation, x) + _per_channel(op, bias, x)


# Losses
# --------------------------------------------------------------------------------------------------


@lowering("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(op: GraphBuilder, node: NodeToLower) -> tuple[Value, Value]:
    log_probability = op.LogSoftmax(node.input(0), axis=1)
    return _negative_log_likelihood(op, node, log_probability), log_probability


@lowering("NegativeLogLikelihoodLoss")
def negative_log_likelihood(op: GraphBuilder, node: NodeToLower) -> Value:
    return _negative_log_likelihood(op, node, node.input(0))


def _negative_log_likelihood(op: GraphBuilder, node: NodeToLower, log_probability: Value) -> Value:
    """Return -w[t] log p[t], or 0 where the label t is `ignore_index`.

    The mean divides by the sum of w[t] over the other labels, and is 0 without other labels.
    """
    target = node.input(1)
    class_weights = node.optional_input(2)
    ignore_index = node.attribute("ignore_index")
    reduction = node.text_attribute("reduction", "mean")
    one = op.constant(1, log_probability.dtype)
    weights: Value | None = None  # of each label
    if ignore_index is not None:
        counts = ~op.Equal(target, ignore_index)
        target = op.Where(counts, target, 0)
        weights = op.cast(counts, log_probability.dtype)
    losses = -op.Squeeze(op.GatherElements(log_probability, op.Unsqueeze(target, [1]), axis=1), [1])
    if class_weights is not None:
        by_class = op.Gather(class_weights, target)
        weights = by_class if weights is None else by_class * weights
    if weights is not None:
        losses = losses * weights
    if reduction == "none":
        return losses
    if reduction == "sum":
        return op.ReduceSum(losses, keepdims=0)
    if weights is None:
        return op.ReduceMean(losses, keepdims=0)
    total = op.ReduceSum(weights, keepdims=0)
    return op.ReduceSum(losses, keepdims=0) / op.Where(op.Equal(total, 0.0), one, total)
