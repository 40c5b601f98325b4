"""The transposed convolution, which is the gradient of a convolution's images."""

from __future__ import annotations

import math
from dataclasses import replace

from onnxfit.gradients.building import INT64_MIN, Ints, spatial_shape, static_shape
from onnxfit.gradients.notes import CONV_DX, CONV_DY, CONV_FILTERS, noted
from onnxfit.gradients.rules.convolution.spec import ConvSpec, apply_conv, crop_like
from onnxfit.gradients.rules.convolution.windows import (
    MAX_COPIED_TAPS,
    MIN_CHANNELS_FOR_PRODUCTS,
    append_padding,
    pixels_before_channels,
    swap_first_axes,
    window_pixels,
)
from onnxfit.graph.values import GraphBuilder, Value


def transposed_conv(
    op: GraphBuilder,
    small: Value,
    w: Value,
    spec: ConvSpec,
    like: Value,
    start: Value | None = None,
) -> Value:
    """Add every element of `small`, times the weights, to the window it was computed from.

    The result has the spatial sizes of `like`. `start`, where pads are computed, gives the pads
    before every axis; `spec` has none then.
    """
    # Elements behind the last window, which no window covers, are fewer than a stride.
    output_padding = [stride - 1 for stride in spec.strides]
    if start is not None:
        whole = apply_conv(op.ConvTranspose, small, w, spec, output_padding=output_padding)
        return op.Slice(whole, start, start + op.shape(like, 2), spec.axes)
    flipped = _flipped_spec(spec, w)
    if flipped is not None:
        is_product_faster = _is_product_faster(small, w, spec)
        build = _product_of_windows if is_product_faster else _conv_with_flipped_weights
        if spec.group > 1:
            return build(op, small, w, flipped)
        operands = {CONV_DY: small, CONV_FILTERS: w}
        return noted(lambda: build(op, small, w, flipped), operands, CONV_DX, spec.note_content)
    pixels = spatial_shape(like)
    positions = spatial_shape(small)
    kernel = spatial_shape(w)
    if pixels and positions and kernel:
        covered = [
            (o - 1) * s + extent - before - after
            for o, s, extent, before, after in zip(
                positions, spec.strides, spec.extents(kernel), spec.pads_before, spec.pads_after
            )
        ]
        output_padding = [n - c for n, c in zip(pixels, covered)]
    dx = apply_conv(op.ConvTranspose, small, w, spec, output_padding=output_padding)
    return crop_like(op, dx, like, spec)


def _flipped_spec(spec: ConvSpec, w: Value) -> ConvSpec | None:
    """Return the pads with which a convolution by flipped weights is the transposed convolution.

    None with strides, and where ConvTranspose is faster: its cost grows with the channels that it
    makes, that of the convolution with the filters, which are the channels of its input. For
    windows of one pixel, where both are the same product, and for signals of one axis, the
    convolution takes 0.35 to 0.9 of the time.
    """
    shape = static_shape(w)
    if shape is None or set(spec.strides) != {1}:
        return None
    filters, channels, *kernel = shape
    pads = [extent - 1 - pad for extent, pad in zip(spec.extents(kernel) * 2, spec.pads)]
    has_many_filters = (
        filters > 2 * channels * spec.group and len(kernel) > 1 and math.prod(kernel) > 1
    )
    if min(pads) < 0 or has_many_filters:
        return None
    return replace(spec, pads=tuple(pads))


def _is_product_faster(small: Value, w: Value, spec: ConvSpec) -> bool:
    """Whether flipping the weights costs more than copying `small` for every tap."""
    sizes = static_shape(small)
    shape = static_shape(w)
    if not sizes or shape is None or spec.group != 1:
        return False
    filters, channels, *kernel = shape
    return (
        math.prod(shape) >= 2 * math.prod(sizes)
        and min(filters, channels) >= MIN_CHANNELS_FOR_PRODUCTS
        and math.prod(kernel) <= MAX_COPIED_TAPS
    )


def _conv_with_flipped_weights(op: GraphBuilder, small: Value, w: Value, spec: ConvSpec) -> Value:
    """Swap filters and channels of each group, reverse the taps, and convolve."""
    shape = static_shape(w)
    assert shape is not None  # `_flipped_spec` has asked
    filters, channels, *kernel = shape
    group = spec.group
    if group == 1:
        w = swap_first_axes(op, w, spec)
    elif channels > 1 or filters > group:
        grouped = op.Reshape(w, [group, filters // group, channels, -1])
        w = op.Transpose(grouped, perm=[0, 2, 1, 3])
        w = op.Reshape(w, [group * channels, filters // group, *kernel])
    if math.prod(kernel) > 1:
        back = [-1] * len(kernel)
        w = op.Slice(w, back, [INT64_MIN] * len(kernel), spec.axes, back)
    return apply_conv(op.Conv, small, w, spec)


def _product_of_windows(op: GraphBuilder, small: Value, w: Value, spec: ConvSpec) -> Value:
    """The same convolution as a product of matrices: each row holds the pixels of one window.

    It takes 0.5 to 0.9 of the convolution's time on two threads.
    """
    shape = static_shape(w)
    sizes = static_shape(small)
    assert shape is not None  # `_is_product_faster` has asked for both
    assert sizes is not None
    filters, channels, *kernel = shape
    images, _, *pixels = sizes
    positions = _output_positions(spec, pixels, kernel)
    # The windows list their last tap first. This replaces flipping the weights.
    read = window_pixels(spec, pixels, positions, kernel)[::-1].T
    small = append_padding(op, pixels_before_channels(op, small), pixels, read)
    rows = op.Reshape(op.Gather(small, read.ravel(), axis=1), [-1, read.shape[1] * filters])
    columns = op.Transpose(op.Reshape(w, [filters * channels, -1]), perm=[1, 0])
    x = rows @ op.Reshape(columns, [-1, channels])
    x = op.Transpose(op.Reshape(x, [images, -1, channels]), perm=[0, 2, 1])
    return op.Reshape(x, [images, channels, *positions])


def _output_positions(spec: ConvSpec, pixels: Ints, kernel: Ints) -> list[int]:
    """Return the spatial shape of a convolution with stride 1."""
    sizes = zip(pixels, spec.pads_before, spec.pads_after, spec.extents(kernel))
    return [n + before + after - extent + 1 for n, before, after, extent in sizes]
