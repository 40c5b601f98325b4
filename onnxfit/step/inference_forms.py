"""Forms of operators for compilers that know inference only, such as those of NPUs.

A convolution becomes a Gather of the elements that its windows read, and one product of matrices:
such a compiler may require the weights of a Conv to be constant, but a product of two computed
matrices is common, as in attention. The gradients of a Conv are Convs and ConvTransposes by
computed weights, so that the same two forms replace them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.building import Integers, Ints, per_channel, static_shape
from onnxfit.gradients.rules.convolution.spec import ConvSpec, padding
from onnxfit.gradients.rules.convolution.windows import append_padding, window_pixels
from onnxfit.gradients.rules.indexing import where_chosen
from onnxfit.graph.values import GraphBuilder, Value

# From this slope on, HardSigmoid is a comparison: `equality_mask` and gradients of Relu use 1e38.
STEP_SLOPE = 1e30


def convolution(op: GraphBuilder, node: ir.Node, inputs: Sequence[Value]) -> Value | None:
    """Gather the pixels of each window, and multiply them by the weights."""
    x, w, *bias = inputs
    y = op.wrap(node.outputs[0])
    spec = _spec(op, node, large=x, small=y, w=w)
    if spec is None:
        return None
    _, _, *pixels = static_shape(x) or ()
    filters, _, *kernel = static_shape(w) or ()
    _, _, *positions = static_shape(y) or ()
    read = window_pixels(spec, pixels, positions, kernel)
    matrices = op.Reshape(w, [1, spec.group, filters // spec.group, -1])
    return _product(op, matrices, x, pixels, read, positions, bias)


def transposed_convolution(
    op: GraphBuilder, node: ir.Node, inputs: Sequence[Value]
) -> Value | None:
    """Gather the position from which each tap reaches a pixel, and multiply by the weights."""
    x, w, *bias = inputs
    y = op.wrap(node.outputs[0])
    spec = _spec(op, node, large=y, small=x, w=w)
    if spec is None:
        return None
    _, _, *positions = static_shape(x) or ()
    filters, channels, *kernel = static_shape(w) or ()
    _, _, *pixels = static_shape(y) or ()
    reached = window_pixels(spec, pixels, positions, kernel)
    taps, count = reached.shape
    # A tap reaches a pixel from one position at most; `count` stands for none.
    read = np.full((taps, math.prod(pixels) + 1), count)
    read[np.arange(taps)[:, None], reached] = np.arange(count)
    grouped = op.Reshape(w, [1, spec.group, filters // spec.group, channels, taps])
    by_channel = op.Transpose(grouped, perm=[0, 1, 3, 2, 4])
    matrices = op.Reshape(by_channel, [1, spec.group, channels, -1])
    return _product(op, matrices, x, positions, read[:, :-1], pixels, bias)


def _spec(
    op: GraphBuilder, node: ir.Node, *, large: Value, small: Value, w: Value
) -> ConvSpec | None:
    """Return the attributes of a convolution; None if sizes are unknown, or elements left out."""
    shape = static_shape(w)
    if shape is None or static_shape(large) is None or static_shape(small) is None:
        return None
    get = node.attributes
    strides, dilations, pads, more = (
        get.get_ints(name, None) for name in ("strides", "dilations", "pads", "output_padding")
    )
    spec = ConvSpec.of(len(shape) - 2, strides, dilations, get.get_int("group", 1))
    auto_pad = get.get_string("auto_pad", "NOTSET")
    if get.get_ints("output_shape", None) is not None:
        return None
    all_pads = padding(op, spec, auto_pad, pads, large, small, shape[2:], more)
    if isinstance(all_pads, Value) or (auto_pad.startswith("SAME") and _leaves_out(spec, shape)):
        return None
    return replace(spec, pads=all_pads)


def _leaves_out(spec: ConvSpec, w: Ints) -> bool:
    """Whether windows leave out elements between them, where `auto_pad` may remove pixels."""
    return any(s > e for s, e in zip(spec.strides, spec.extents(w[2:])))


def _product(
    op: GraphBuilder, matrices: Value, x: Value, sizes: Ints, read: Integers, result: Ints,
    bias: Sequence[Value],
) -> Value:  # fmt: skip
    """Multiply matrices of weights, one for each group, by the elements of x that `read` lists.

    - `sizes`: the spatial sizes of x; `result`: those of the result.
    - `read`: the numbers of elements, `(taps, elements of the result)`.
    """
    images, channels, *_ = static_shape(x) or ()
    _, group, filters, _ = static_shape(matrices) or ()
    taps, count = read.shape
    elements = append_padding(op, op.Reshape(x, [images * channels, -1, 1]), sizes, read)
    columns = op.Gather(elements, op.constant(read.reshape(-1).astype(np.int64)), axis=1)
    product = matrices @ op.Reshape(columns, [images, group, channels // group * taps, count])
    y = op.Reshape(product, [images, group * filters, *result])
    return y + op.Reshape(bias[0], [1, -1, *[1] * len(result)]) if bias else y


def gather_elements(op: GraphBuilder, node: ir.Node, inputs: Sequence[Value]) -> Value | None:
    """Select one element of each line by a sum of that element and zeros."""
    x, indices = inputs
    axis = node.attributes.get_int("axis", 0) % x.rank
    if indices.shape is None or indices.shape[axis] != 1 or x.dtype.kind != "f":
        return None
    return op.ReduceSum(where_chosen(op, x, indices, x, axis), [axis])


def layer_normalization(
    op: GraphBuilder, node: ir.Node, inputs: Sequence[Value]
) -> tuple[Value, Value, Value]:
    """Return the normalized tensor, and the two statistics that its gradient reads."""
    x, scale, *bias = inputs
    axes = list(range(node.attributes.get_int("axis", -1) % x.rank, x.rank))
    normalized, mean, inverse = _normalized(op, node, x, axes)
    y = normalized * scale
    return y + bias[0] if bias else y, mean, inverse


def instance_normalization(op: GraphBuilder, node: ir.Node, inputs: Sequence[Value]) -> Value:
    x, scale, bias = inputs
    normalized, _, _ = _normalized(op, node, x, list(range(2, x.rank)))
    return normalized * per_channel(op, scale, x) + per_channel(op, bias, x)


def batch_normalization(op: GraphBuilder, node: ir.Node, inputs: Sequence[Value]) -> Value | None:
    """Normalize by running statistics. A step has its batch statistics as operators already."""
    if node.attributes.get_int("training_mode", 0):
        return None
    x, scale, bias, mean, variance = inputs
    slope = scale / op.Sqrt(variance + _epsilon(node))
    return (x - per_channel(op, mean, x)) * per_channel(op, slope, x) + per_channel(op, bias, x)


def _normalized(
    op: GraphBuilder, node: ir.Node, x: Value, axes: list[int]
) -> tuple[Value, Value, Value]:
    """Return (x - mean) / deviation, the mean, and 1 / deviation."""
    mean = op.ReduceMean(x, axes)
    centered = x - mean
    inverse = 1 / op.Sqrt(op.ReduceMean(centered * centered, axes) + _epsilon(node))
    return centered * inverse, mean, inverse


def _epsilon(node: ir.Node) -> float:
    return node.attributes.get_float("epsilon", 1e-5)


def sum_of_squares(op: GraphBuilder, node: ir.Node, inputs: Sequence[Value]) -> Value:
    x, *axes = inputs
    get = node.attributes.get_int
    return op.ReduceSum(
        x * x,
        *axes,
        keepdims=get("keepdims", 1),
        noop_with_empty_axes=get("noop_with_empty_axes", 0),
    )


def identity_matrix(op: GraphBuilder, node: ir.Node, inputs: Sequence[Value]) -> Value | None:
    sizes = static_shape(inputs[0])
    if sizes is None:
        return None
    rows, columns = sizes
    dtype = op.wrap(node.outputs[0]).dtype
    return op.constant(np.eye(rows, columns, node.attributes.get_int("k", 0), dtype))


def hard_sigmoid(op: GraphBuilder, node: ir.Node, inputs: Sequence[Value]) -> Value:
    """Clip the line, or compare, where the line is so steep that half precision has no slope."""
    (x,) = inputs
    alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    zero, one = op.constant(0, x.dtype), op.constant(1, x.dtype)
    if abs(alpha) < STEP_SLOPE or beta not in (0, 1):
        line = x * op.constant(alpha, x.dtype) + op.constant(beta, x.dtype)
        return op.Clip(line, zero, one)
    signed = x if alpha > 0 else -x
    return op.cast(signed > zero if beta == 0 else signed >= zero, x.dtype)


# The forms of every operator that a step may have, but that many compilers lack or restrict.
INFERENCE_FORMS = {
    "BatchNormalization": batch_normalization,
    "Conv": convolution,
    "ConvTranspose": transposed_convolution,
    "EyeLike": identity_matrix,
    "GatherElements": gather_elements,
    "HardSigmoid": hard_sigmoid,
    "InstanceNormalization": instance_normalization,
    "LayerNormalization": layer_normalization,
    "ReduceSumSquare": sum_of_squares,
}
