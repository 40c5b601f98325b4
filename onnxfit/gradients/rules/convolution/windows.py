"""Windows of images as matrices: the pixels that a window covers, and layouts of images."""

from __future__ import annotations

import itertools
import math

import numpy as np

from onnxfit.gradients.building import Integers, Ints, static_shape
from onnxfit.gradients.rules.convolution.spec import ConvSpec
from onnxfit.graph.values import GraphBuilder, Value

# Up to this kernel size, a copy of the images for each tap and a MatMul are faster than a
# convolution; with more taps the copies cost more than the MatMul saves.
MAX_COPIED_TAPS = 27
# From this number of channels on both sides, products of matrices are large enough to be efficient.
MIN_CHANNELS_FOR_PRODUCTS = 16


def window_pixels(spec: ConvSpec, pixels: Ints, positions: Ints, kernel: Ints) -> Integers:
    """Return the pixel that each tap reads at each window position, as `(taps, positions)`.

    Pixels of all spatial axes are counted row by row; `prod(pixels)`, one more than the last,
    stands for padding.
    """
    pixel = np.zeros((1, 1), np.int64)
    inside = np.ones((1, 1), bool)
    axes = zip(pixels, positions, kernel, spec.strides, spec.dilations, spec.pads_before)
    for size, count, taps, stride, dilation, before in axes:
        along = np.arange(taps)[:, None] * dilation + np.arange(count) * stride - before
        shape = (len(pixel) * taps, pixel.shape[1] * count)
        pixel = (pixel[:, None, :, None] * size + along[:, None]).reshape(shape)
        within_axis = ((along >= 0) & (along < size))[:, None]
        inside = (inside[:, None, :, None] & within_axis).reshape(shape)
    return np.where(inside, pixel, math.prod(pixels))


def append_padding(op: GraphBuilder, value: Value, pixels: Ints, read: Integers) -> Value:
    """Append a zero to the second axis, that of all pixels, if `read` contains padding."""
    return op.Pad(value, [0, 0, 0, 0, 1, 0]) if read.max() == math.prod(pixels) else value


def slice_per_tap(
    op: GraphBuilder, padded: Value, spec: ConvSpec, positions: Ints, kernel: Ints, axis: int
) -> list[Value]:
    """Return the pixels that each tap reads, for a tensor whose spatial axes begin at `axis`."""
    slices = []
    for tap in itertools.product(*map(range, kernel)):
        start = [t * d for t, d in zip(tap, spec.dilations)]
        end = [first + (n - 1) * s + 1 for first, n, s in zip(start, positions, spec.strides)]
        slices.append(slice_pixels(op, padded, start, end, spec.strides, axis))
    return slices


def slice_pixels(
    op: GraphBuilder, value: Value, start: list[int], end: list[int], strides: Ints, axis: int
) -> Value:
    """Slice the axes from `axis` on, unless all of their elements are wanted."""
    last = axis + len(end)
    sizes = [] if value.shape is None else [*value.shape[axis:last]]
    # `end` may equal the sizes although a stride skips elements, so strides are checked, too.
    if not any(start) and end == sizes and all(s == 1 or n == 1 for s, n in zip(strides, end)):
        return value
    return op.Slice(value, start, end, list(range(axis, last)), strides)


def pad_pixels(op: GraphBuilder, large: Value, spec: ConvSpec, axis: int) -> Value:
    """Add the pads of `spec` as zeros to the spatial axes, which begin at `axis`."""
    if not any(spec.pads):
        return large
    ahead = [0] * axis
    behind = [0] * (2 - axis)
    return op.Pad(large, [*ahead, *spec.pads_before, *behind, *ahead, *spec.pads_after, *behind])


# Layouts
# ------------------------------------------------------------------------------------------------


def swap_first_axes(op: GraphBuilder, value: Value, spec: ConvSpec) -> Value:
    """Swap images and channels, or filters and channels."""
    return op.Transpose(value, perm=[1, 0, *spec.axes])


def require_shape(value: Value) -> tuple[int, ...]:
    """Return the shape of a value whose sizes the caller knows to be static."""
    shape = static_shape(value)
    assert shape is not None
    return shape


def pixels_before_channels(op: GraphBuilder, value: Value) -> Value:
    """Return a tensor of known sizes as `(images, pixels, channels)`."""
    images, channels, *_ = require_shape(value)
    # onnxruntime transposes a tensor of fewer axes faster
    flat = op.Reshape(value, [images, channels, -1])
    return op.Transpose(flat, perm=[0, 2, 1])


def channels_last(op: GraphBuilder, value: Value) -> Value:
    """Return a tensor of known sizes with its channels behind the spatial axes."""
    images, channels, *pixels = require_shape(value)
    return op.Reshape(pixels_before_channels(op, value), [images, *pixels, channels])


def images_last(op: GraphBuilder, value: Value) -> Value:
    """Return a tensor of known sizes as `(channels * pixels, images)`."""
    return op.Transpose(op.Reshape(value, [require_shape(value)[0], -1]), perm=[1, 0])


def channels_second(op: GraphBuilder, w: Value) -> Value:
    """Bring weights `(filters, *kernel, channels)` into the order of Conv."""
    return op.Transpose(w, perm=[0, w.rank - 1, *range(1, w.rank - 1)])
