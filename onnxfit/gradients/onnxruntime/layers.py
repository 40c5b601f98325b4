"""Convolutions, pools, normalisations and losses in the form that onnxruntime's builder
differentiates correctly.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.onnxruntime.forms import attribute, form, given, needed, rank, size, text
from onnxfit.gradients.paths import PathNode
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.values import GraphBuilder, Value


def _explicit_pads(op: GraphBuilder, path_node: PathNode, kernel: list[int]) -> None:
    """Write `auto_pad` out: the builder's rules for Conv and AveragePool overlook it."""
    mode, x = text(path_node, "auto_pad", "NOTSET"), needed(op, path_node)
    if mode in ("NOTSET", ""):
        return
    before, after = [], []
    for axis, window in enumerate(kernel):
        stride, dilation = (
            (attribute(path_node, name) or [1] * len(kernel))[axis]
            for name in ("strides", "dilations")
        )
        missing = 0
        if mode != "VALID":
            remainder = size(x, axis + 2) % stride if stride > 1 else 0
            missing = max((window - 1) * dilation + 1 - (remainder or stride), 0)
        less, more = missing // 2, missing - missing // 2
        before.append(less if mode != "SAME_LOWER" else more)
        after.append(more if mode != "SAME_LOWER" else less)
    path_node.node.attributes["pads"] = ir.AttrInt64s("pads", before + after)
    path_node.node.attributes["auto_pad"] = ir.AttrString("auto_pad", "NOTSET")


@form("Conv")
def convolution(op: GraphBuilder, path_node: PathNode) -> None:
    kernel = attribute(path_node, "kernel_shape")
    if kernel is None and text(path_node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        w = needed(op, path_node, 1)
        kernel = [size(w, axis) for axis in range(2, rank(w))]
    _explicit_pads(op, path_node, list(kernel or [1] * (rank(needed(op, path_node)) - 2)))


@form("MaxPool")
def max_pool(op: GraphBuilder, path_node: PathNode) -> tuple[Value, ...] | None:
    """The gradient goes where the indices say, so they are an output."""
    x, node = needed(op, path_node), path_node.node
    for axis in range(1, rank(x)):
        size(x, axis)  # the builder crashes where one is unknown
    if attribute(path_node, "storage_order", 0):
        if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
            raise NoGradientError("storage_order=1", "storage_order=0")
        # it orders nothing but the indices
        node.attributes["storage_order"] = ir.AttrInt64("storage_order", 0)
    if len(node.outputs) > 1:
        return None
    return op.MaxPool(x, _outputs=2, **{name: a.value for name, a in node.attributes.items()})


@form("AveragePool")
def average_pool(op: GraphBuilder, path_node: PathNode) -> None:
    x = needed(op, path_node)
    for axis in range(rank(x)):
        size(x, axis)  # the builder's gradient is empty where one is unknown
    if any(d != 1 for d in attribute(path_node, "dilations") or ()):
        raise NoGradientError("the builder overlooks dilations", "dilations of 1")
    _explicit_pads(op, path_node, list(attribute(path_node, "kernel_shape")))


@form("GlobalMaxPool")
def global_max_pool(op: GraphBuilder, path_node: PathNode) -> Value:
    x = needed(op, path_node)
    size(x, 1)
    return op.MaxPool(x, _outputs=2, kernel_shape=[size(x, axis) for axis in range(2, rank(x))])[0]


@form("GlobalLpPool")
def global_lp_pool(op: GraphBuilder, path_node: PathNode) -> Value:
    x, p = needed(op, path_node), attribute(path_node, "p", 2)
    axes = list(range(2, rank(x)))
    if p == 1:
        return op.ReduceSum(abs(x), axes)
    if p == 2:
        return op.ReduceL2(x, axes)
    raise NoGradientError(f"p={p}", "p=1 or p=2")


# Normalisations
# --------------------------------------------------------------------------------------------------------------


def _normalised(
    op: GraphBuilder, x: Value, axes: list[int], epsilon: float
) -> tuple[Value, Value, Value]:
    """(x - mean) / deviation over the axes, with the mean and 1 / deviation."""
    mean = op.ReduceMean(x, axes)
    centred = x - mean
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(centred * centred, axes) + epsilon))
    return centred * inverse, mean, inverse


def _per_channel(op: GraphBuilder, v: Value, x: Value) -> Value:
    return op.Reshape(v, [-1] + [1] * (rank(x) - 2)) if rank(x) > 2 else v


@form("LayerNormalization")
def layer_normalization(op: GraphBuilder, path_node: PathNode) -> tuple[Value, Value, Value]:
    x, scale, bias = needed(op, path_node), needed(op, path_node, 1), given(op, path_node, 2)
    axis = attribute(path_node, "axis", -1) % rank(x)
    y, mean, inverse = _normalised(
        op, x, list(range(axis, rank(x))), attribute(path_node, "epsilon", 1e-5)
    )
    y = y * scale
    return y if bias is None else y + bias, mean, inverse


@form("InstanceNormalization")
def instance_normalization(op: GraphBuilder, path_node: PathNode) -> Value:
    x, scale, bias = (needed(op, path_node, i) for i in range(3))
    y, _, _ = _normalised(op, x, list(range(2, rank(x))), attribute(path_node, "epsilon", 1e-5))
    return y * _per_channel(op, scale, x) + _per_channel(op, bias, x)


@form("GroupNormalization")
def group_normalization(op: GraphBuilder, path_node: PathNode) -> Value:
    x, scale, bias = (needed(op, path_node, i) for i in range(3))
    grouped = op.Reshape(x, [0, attribute(path_node, "num_groups"), -1])
    y, _, _ = _normalised(op, grouped, [2], attribute(path_node, "epsilon", 1e-5))
    y = op.Reshape(y, op.Shape(x))
    y.ir.shape = x.ir.shape
    return y * _per_channel(op, scale, x) + _per_channel(op, bias, x)


@form("MeanVarianceNormalization")
def mean_variance_normalization(op: GraphBuilder, path_node: PathNode) -> Value:
    x, axes = needed(op, path_node), list(attribute(path_node, "axes", [0, 2, 3]))
    centred = x - op.ReduceMean(x, axes)
    return centred / (op.Sqrt(op.ReduceMean(centred * centred, axes)) + 1e-9)


@form("LpNormalization")
def lp_normalization(op: GraphBuilder, path_node: PathNode) -> Value:
    x, axis, p = (
        needed(op, path_node),
        attribute(path_node, "axis", -1),
        attribute(path_node, "p", 2),
    )
    length = op.ReduceSum(abs(x), [axis]) if p == 1 else op.ReduceL2(x, [axis])
    return x / op.Where(op.Equal(length, 0.0), 1.0, length)


@form("LRN")
def local_response_normalization(op: GraphBuilder, path_node: PathNode) -> Value:
    x, window, channels = (
        needed(op, path_node),
        attribute(path_node, "size"),
        size(needed(op, path_node), 1),
    )
    before, after = (window - 1) // 2, window - 1 - (window - 1) // 2
    # of the channel that is summed from the one it is summed for
    offset = np.arange(channels)[:, None] - np.arange(channels)
    band = ((offset >= -before) & (offset <= after)).astype(np.float64)
    last = [0, *range(2, rank(x)), 1]
    sums = op.Transpose(
        op.Transpose(x * x, perm=last) @ op.constant(band, x.dtype),
        perm=[int(i) for i in np.argsort(last)],
    )
    near: Value = (
        attribute(path_node, "bias", 1.0) + attribute(path_node, "alpha", 1e-4) / window * sums
    )
    powered: Value = near ** attribute(path_node, "beta", 0.75)
    return x / powered


@form("BatchNormalization")
def batch_normalization(op: GraphBuilder, path_node: PathNode) -> Value:
    """In inference; the builder would silently switch it to the statistics of the batch."""
    if attribute(path_node, "training_mode", 0):
        raise NoGradientError("training_mode=1", "BatchNormalization in inference form")
    x, scale, bias, mean, variance = (needed(op, path_node, i) for i in range(5))
    deviation = op.Sqrt(variance + attribute(path_node, "epsilon", 1e-5))
    return (x - _per_channel(op, mean, x)) * _per_channel(op, scale / deviation, x) + _per_channel(
        op, bias, x
    )


# Losses
# ----------------------------------------------------------------------------------------------------------------------


@form("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(op: GraphBuilder, path_node: PathNode) -> tuple[Value, Value]:
    log_probability = op.LogSoftmax(needed(op, path_node), axis=1)
    return _negative_log_likelihood(op, path_node, log_probability), log_probability


@form("NegativeLogLikelihoodLoss")
def negative_log_likelihood(op: GraphBuilder, path_node: PathNode) -> Value:
    return _negative_log_likelihood(op, path_node, needed(op, path_node))


def _negative_log_likelihood(
    op: GraphBuilder, path_node: PathNode, log_probability: Value
) -> Value:
    """-w[t] log p[t] where t is not `ignore_index`; the mean divides by the sum of those w, and is
    0 where there are none.
    """
    target, weight = needed(op, path_node, 1), given(op, path_node, 2)
    ignored, reduction = attribute(path_node, "ignore_index"), text(path_node, "reduction", "mean")
    one = op.constant(1, log_probability.dtype)
    counted: Value | None = None
    if ignored is not None:
        seen = ~op.Equal(target, ignored)
        target, counted = op.Where(seen, target, 0), op.cast(seen, log_probability.dtype)
    losses = -op.Squeeze(op.GatherElements(log_probability, op.Unsqueeze(target, [1]), axis=1), [1])
    if weight is not None:
        each = op.Gather(weight, target)
        counted = each if counted is None else each * counted
    if counted is not None:
        losses = losses * counted
    if reduction == "none":
        return losses
    if reduction == "sum":
        return op.ReduceSum(losses, keepdims=0)
    if counted is None:
        return op.ReduceMean(losses, keepdims=0)
    count = op.ReduceSum(counted, keepdims=0)
    return op.ReduceSum(losses, keepdims=0) / op.Where(op.Equal(count, 0.0), one, count)
