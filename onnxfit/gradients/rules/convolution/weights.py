"""The gradient of a convolution's weights: the pixels that each tap read times what they met.

Written as `dw[m, c, tap] = sum over images n and positions o of large[n, c, pixel(tap, o)]
small[n, m, o]`, it is a product of matrices once the pixels of every tap are copied into a matrix
("im2col", Chellapilla, Puri and Simard 2006). How to copy and multiply fastest depends on the
sizes: STRATEGIES lists the measured choices, and the first that applies is used.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from onnxfit.gradients.building import (
    Integers,
    Ints,
    Strategy,
    choose_strategy,
    spatial_shape,
    static_shape,
    zeros,
)
from onnxfit.gradients.notes import CONV_LARGE, CONV_SMALL, CONV_WEIGHTS, noted
from onnxfit.gradients.rules.convolution.spec import ConvSpec, apply_conv, crop_like
from onnxfit.gradients.rules.convolution.windows import (
    MAX_COPIED_TAPS,
    MIN_CHANNELS_FOR_PRODUCTS,
    append_padding,
    channels_last,
    channels_second,
    images_last,
    pad_pixels,
    slice_per_tap,
    slice_pixels,
    swap_first_axes,
    window_pixels,
)
from onnxfit.graph.values import GraphBuilder, Value

# From this batch size, one Gather copies the pixels of all taps faster than a Slice for each tap,
# because several threads share a Gather. With one thread and fewer than 16 images, it takes up to
# 1.4 times as long as the Slices.
MIN_IMAGES_FOR_GATHER = 8
# The indices of the Gather are a constant of the graph, which must stay small.
MAX_GATHER_INDICES = 2**16
# More copies at once (16 MB of float32) do not fit into the processor's cache. Then several
# products are computed, each with as many taps as fit. They take 0.9 to 1.0 of the time of a single
# product.
MAX_GATHERED_ELEMENTS = 2**22
# From this number of filters on, Gemm with the copies as its second factor is faster than Gemm with
# the copies first and a Transpose of the product.
MIN_FILTERS_FIRST = 192
# From this length of rows on, with at most so many channels, and with at most so many padded pixels
# for each position of a window, shifted copies are faster. With many channels, the products take
# most of the time.
MIN_COLUMNS_TO_SHIFT = 24
MAX_CHANNELS_TO_SHIFT = 64
MAX_PADDING_TO_SHIFT = 1.4
# All copies are in memory at once: at most 32 MB of float32.
MAX_SHIFTED_ELEMENTS = 2**23
# From this number of channels per element of a row, copies with the channels last are faster.
MIN_CHANNELS_PER_COLUMN = 4
# Each channel of a depthwise convolution has few weights. Up to these sizes, matrix products are
# faster than elementwise products, although they also multiply pixels that belong to no common
# window.
MAX_PIXEL_PAIRS = 2**12
MAX_COLUMNS = 64


@dataclass(frozen=True)
class WeightProblem:
    """A weight gradient whose sizes are known: its operands, and the sizes that decide its cost."""

    large: Value
    small: Value
    spec: ConvSpec
    w: Value
    images: int | None  # None if the batch size or the channels of an operand are unknown
    filters: int
    channels: int  # of one group
    kernel: tuple[int, ...]
    pixels: tuple[int, ...]  # the spatial shape of `large`
    positions: tuple[int, ...]  # the spatial shape of `small`

    @property
    def group(self) -> int:
        return self.spec.group

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def position_count(self) -> int:
        return math.prod(self.positions)

    @property
    def is_depthwise(self) -> bool:
        """Whether each filter reads a single channel of several."""
        return self.channels == 1 and self.group > 1

    @property
    def is_tiny(self) -> bool:
        return math.prod(self.pixels) * self.position_count <= MAX_PIXEL_PAIRS

    @property
    def has_few_columns(self) -> bool:
        """Whether a row of all filters of a channel is short."""
        columns = max(self.pixels[-1], self.positions[-1])
        return columns * self.filters // self.group <= MAX_COLUMNS

    @property
    def is_wide(self) -> bool:
        """Whether the product of one tap alone is large enough to be efficient."""
        return self.group == 1 and min(self.filters, self.channels) >= MIN_CHANNELS_FOR_PRODUCTS

    @property
    def is_shift_cheap(self) -> bool:
        """Whether shifted copies of `small` are possible and the fastest copies."""
        spec = self.spec
        padded = [n + sum(p) for n, *p in zip(self.pixels, spec.pads_before, spec.pads_after)]
        covered = [n + extent - 1 for n, extent in zip(self.positions, spec.extents(self.kernel))]
        return (
            self.images is not None
            # A ConvTranspose may have pixels that no window covers.
            and padded == covered
            # With one row of taps, the last copy would begin too late: see `by_shifts`.
            and math.prod(self.kernel[:-1]) > 1
            and set(spec.strides) == {1}
            and self.positions[-1] >= MIN_COLUMNS_TO_SHIFT
            and min(self.filters, self.channels) <= MAX_CHANNELS_TO_SHIFT
            and math.prod(padded) <= MAX_PADDING_TO_SHIFT * self.position_count
            and self.kernel[-1] * self.images * self.filters * math.prod(padded)
            <= MAX_SHIFTED_ELEMENTS
        )

    @property
    def is_gather_cheap(self) -> bool:
        """Whether one Gather may copy the pixels of all taps.

        Sorting `small` by image costs by its filters, and what that saves grows with the copies.
        """
        return (
            self.group == 1
            and self.images is not None
            and self.images >= MIN_IMAGES_FOR_GATHER
            and 2 * self.filters <= self.channels * self.taps
            and self.taps * self.position_count <= MAX_GATHER_INDICES
        )

    @property
    def has_narrow_rows(self) -> bool:
        """Whether rows of `small` are so short that copies with the channels last are faster."""
        width = self.positions[-1]
        return self.images is not None and self.channels >= MIN_CHANNELS_PER_COLUMN * width


def weight_gradient(
    op: GraphBuilder, large: Value, small: Value, spec: ConvSpec, w: Value
) -> Value:
    """Return the gradient of `w`, by the first strategy that applies to its sizes."""
    shape = static_shape(w)
    pixels = spatial_shape(large)
    positions = spatial_shape(small)
    if not shape or not pixels or not positions:
        return by_convolution(op, large, small, spec, w)
    filters, channels, *kernel = shape
    sizes = static_shape(large)
    images = None if sizes is None or static_shape(small) is None else sizes[0]
    problem = WeightProblem(
        large, small, spec, w, images, filters, channels, tuple(kernel), pixels, positions
    )
    strategy = choose_strategy(STRATEGIES, problem)
    if spec.group > 1 and not (problem.is_depthwise and filters == spec.group):
        return strategy.build(op, problem)
    return noted(
        lambda: strategy.build(op, problem),
        {CONV_LARGE: large, CONV_SMALL: small},
        CONV_WEIGHTS,
        spec.note_content,
    )


# Strategies
# ------------------------------------------------------------------------------------------------


def by_convolution(op: GraphBuilder, large: Value, small: Value, spec: ConvSpec, w: Value) -> Value:
    """Convolve again: images take the place of channels, and window positions that of taps."""
    if spec.group > 1:
        sizes = op.shape(large, 2)
        large = op.Reshape(large, op.Concat([0, spec.group, -1], sizes, axis=0))
        large = op.Transpose(large, perm=[2, 1, 0, *(axis + 1 for axis in spec.axes)])
        large = op.Reshape(large, op.Concat([0, -1], sizes, axis=0))
    else:
        large = swap_first_axes(op, large, spec)
    across = replace(spec, strides=spec.dilations, dilations=spec.strides)
    dw = apply_conv(op.Conv, large, swap_first_axes(op, small, spec), across)
    return crop_like(op, swap_first_axes(op, dw, spec), w, spec)


def by_gather(op: GraphBuilder, problem: WeightProblem) -> Value:
    """Copy the pixels of many taps with one Gather, for one product.

    The images come last: then the pixel that a tap reads is one piece of memory for each channel.
    """
    images = problem.images
    filters = problem.filters
    channels = problem.channels
    assert images is not None  # `is_gather_cheap` has asked
    read = window_pixels(problem.spec, problem.pixels, problem.positions, problem.kernel)
    small = op.Reshape(images_last(op, problem.small), [filters, -1])
    large = op.Reshape(images_last(op, problem.large), [channels, -1, images])
    large = append_padding(op, large, problem.pixels, read)
    elements_per_tap = channels * images * problem.position_count
    # at least one row of taps
    taps_at_once = max(MAX_GATHERED_ELEMENTS // elements_per_tap, problem.kernel[-1])

    def copies(taps: Integers) -> Value:
        return op.Reshape(op.Gather(large, taps.ravel(), axis=1), [channels * len(taps), -1])

    if taps_at_once >= len(read) and filters >= MIN_FILTERS_FIRST:
        dw = op.Gemm(small, copies(read), transB=1)
        return op.Reshape(dw, [filters, channels, *problem.kernel])
    products = []
    for first in range(0, len(read), taps_at_once):
        # With the copies as the first factor, Gemm reads them in the order they lie in memory.
        product = op.Gemm(copies(read[first : first + taps_at_once]), small, transB=1)
        products.append(op.Reshape(product, [channels, -1, filters]))
    dw = op.Concat(*products, axis=1) if len(products) > 1 else products[0]
    dw = op.Transpose(op.Reshape(dw, [-1, filters]), perm=[1, 0])
    return op.Reshape(dw, [filters, channels, *problem.kernel])


def by_product_per_tap_channels_last(op: GraphBuilder, problem: WeightProblem) -> Value:
    """Multiply the pixels of each tap, the channels last."""
    large = channels_last(op, problem.large)
    small = op.Reshape(channels_last(op, problem.small), [-1, problem.filters])
    padded = pad_pixels(op, large, problem.spec, 1)
    slices = slice_per_tap(op, padded, problem.spec, problem.positions, problem.kernel, 1)
    products = [op.Gemm(small, op.Reshape(s, [-1, problem.channels]), transA=1) for s in slices]
    return _weights_of_taps(op, products, problem)


def by_product_per_tap(op: GraphBuilder, problem: WeightProblem) -> Value:
    """Multiply the pixels of each tap, the channels first; a copy is freed after its product."""
    large = swap_first_axes(op, problem.large, problem.spec)
    small = swap_first_axes(op, problem.small, problem.spec)
    small = op.Reshape(small, [problem.filters, -1])
    padded = pad_pixels(op, large, problem.spec, 2)
    slices = slice_per_tap(op, padded, problem.spec, problem.positions, problem.kernel, 2)
    products = [op.Gemm(small, op.Reshape(s, [problem.channels, -1]), transB=1) for s in slices]
    return _weights_of_taps(op, products, problem)


def by_shifts(op: GraphBuilder, problem: WeightProblem) -> Value:
    """Compute each row of taps as one matrix product, with a shifted copy of `small` for each tap.

    `small` is padded to the sizes of the padded `large`. Then all images of a channel can be read
    as one vector, in which each tap reads the pixel at a fixed distance from the element that it
    meets.
    """
    assert problem.images is not None  # `is_shift_cheap` has asked
    spec = problem.spec
    *reach, reach_last = (extent - 1 for extent in spec.extents(problem.kernel))
    large = pad_pixels(op, swap_first_axes(op, problem.large, spec), spec, 2)
    large = op.Reshape(large, [problem.channels, -1])
    small = swap_first_axes(op, problem.small, spec)
    # The zeros are in front of the columns, so that no copy begins before the first element.
    ahead = [*[0] * (2 + len(reach)), reach_last]
    small = op.Reshape(op.Pad(small, [*ahead, 0, 0, *reach, 0]), [problem.filters, -1])
    sizes = [n + r for n, r in zip(problem.positions, [*reach, reach_last])]
    row_sizes = [math.prod(sizes[axis + 1 :]) for axis in range(len(reach))]
    # Behind the last element that the last tap meets, all products are zero.
    length = problem.images * math.prod(sizes) - sum(r * n for r, n in zip(reach, row_sizes))
    shifts = [reach_last - tap * spec.dilations[-1] for tap in range(problem.kernel[-1])]
    copies = [op.Slice(small, [shift], [shift + length], [1]) for shift in shifts]
    met = op.Concat(*copies, axis=0) if len(copies) > 1 else copies[0]
    products = []
    for tap in itertools.product(*map(range, problem.kernel[:-1])):
        first = sum(t * d * n for t, d, n in zip(tap, spec.dilations, row_sizes))
        read = op.Slice(large, [first], [first + length], [1])
        products.append(op.Gemm(met, read, transB=1))
    return _weights_of_taps(op, products, problem)


def _weights_of_taps(op: GraphBuilder, products: list[Value], problem: WeightProblem) -> Value:
    """Join the products, which have one matrix `(filters, channels)` per tap, into weights."""
    dw = op.Concat(*products, axis=0) if len(products) > 1 else products[0]
    dw = op.Reshape(dw, [problem.taps, problem.filters * problem.channels])
    # onnxruntime transposes a matrix fastest
    dw = op.Transpose(dw, perm=[1, 0])
    return op.Reshape(dw, [problem.filters, problem.channels, *problem.kernel])


def by_pairs_of_pixels(op: GraphBuilder, problem: WeightProblem) -> Value:
    """Multiply every pixel of a channel by every element of `small`; sum the pairs of each tap."""
    pixels = math.prod(problem.pixels)
    positions = problem.position_count
    read = window_pixels(problem.spec, problem.pixels, problem.positions, problem.kernel)
    tap, position = np.nonzero(read < pixels)
    is_read = np.zeros((pixels, positions, problem.taps), problem.large.dtype)
    is_read[read[tap, position], position, tap] = 1
    large = op.Reshape(problem.large, [-1, problem.group, pixels])
    small = op.Reshape(problem.small, [-1, problem.filters, positions])
    large = op.Reshape(op.Transpose(large, perm=[1, 2, 0]), [problem.group, 1, pixels, -1])
    small = op.Transpose(small, perm=[1, 0, 2])
    small = op.Reshape(small, [problem.group, problem.filters // problem.group, -1, positions])
    pairs = op.Reshape(large @ small, [problem.filters, -1])
    return op.Reshape(pairs @ is_read.reshape(-1, problem.taps), [-1, 1, *problem.kernel])


def by_pairs_of_columns(op: GraphBuilder, problem: WeightProblem) -> Value:
    """For each row of taps, multiply the columns that it reads by the columns of `small`.

    Column v of the pixels meets column o of `small` in at most one tap of the row. A product with
    zeros and ones sums the pairs of each tap.
    """
    spec = problem.spec
    large = swap_first_axes(op, problem.large, spec)
    small = swap_first_axes(op, problem.small, spec)
    *outer_kernel, taps = problem.kernel
    width = problem.pixels[-1]
    columns = problem.positions[-1]
    multiplier = problem.filters // problem.group
    rows = []
    for tap in itertools.product(*map(range, outer_kernel)):
        ranges = [_positions_inside(problem, axis, t) for axis, t in enumerate(tap)]
        if any(first >= end for first, end in ranges):  # this row of taps reads padding only
            shape = np.array([problem.filters, 1, columns * width])
            rows.append(zeros(op, large, op.constant(shape)))
            continue
        starts = [
            first * stride + t * dilation - pad
            for (first, _), t, stride, dilation, pad in zip(
                ranges, tap, spec.strides, spec.dilations, spec.pads_before
            )
        ]
        ends = [
            start + (end - first - 1) * stride + 1
            for start, (first, end), stride in zip(starts, ranges, spec.strides)
        ]
        firsts = [first for first, _ in ranges]
        read = slice_pixels(op, large, starts, ends, spec.strides[:-1], 2)
        met = slice_pixels(op, small, firsts, [end for _, end in ranges], [1] * len(tap), 2)
        read = op.Reshape(read, [problem.group, 1, -1, width])
        met = op.Reshape(met, [problem.group, multiplier, -1, columns])
        pairs = op.Transpose(met, perm=[0, 1, 3, 2]) @ read
        rows.append(op.Reshape(pairs, [problem.filters, 1, -1]))
    all_rows = op.Concat(*rows, axis=1) if len(rows) > 1 else rows[0]
    last = ConvSpec(
        spec.strides[-1:], spec.dilations[-1:], (spec.pads_before[-1], spec.pads_after[-1])
    )
    column = window_pixels(last, [width], [columns], [taps])
    is_read = column.T[:, None] == np.arange(width)[:, None]
    is_read = is_read.reshape(-1, taps).astype(large.dtype)
    dw = op.Reshape(all_rows, [-1, columns * width]) @ is_read
    return op.Reshape(dw, [problem.filters, 1, *problem.kernel])


def _positions_inside(problem: WeightProblem, axis: int, tap: int) -> tuple[int, int]:
    """Return the first position at which a tap reads a pixel, and the one after the last."""
    spec = problem.spec
    offset = tap * spec.dilations[axis] - spec.pads_before[axis]
    stride = spec.strides[axis]
    first = max(0, -(offset // stride))
    end = min(problem.positions[axis], (problem.pixels[axis] - 1 - offset) // stride + 1)
    return first, end


def by_depthwise_sums(op: GraphBuilder, problem: WeightProblem) -> Value:
    """Sum elementwise products over images and positions."""
    spec = problem.spec
    padded = pad_pixels(op, problem.large, spec, 2)
    slices = slice_per_tap(op, padded, spec, problem.positions, problem.kernel, 2)
    sums = [op.ReduceSum(s * problem.small, [0, *spec.axes], keepdims=1) for s in slices]
    return op.Reshape(op.Concat(*sums, axis=2), [problem.group, 1, *problem.kernel])


def by_product_per_image(op: GraphBuilder, problem: WeightProblem) -> Value:
    """Multiply the copies of each image by themselves, and sum the products."""
    large = pad_pixels(op, problem.large, problem.spec, 2)
    groups = [problem.group] if problem.group > 1 else []
    if groups:
        sizes = spatial_shape(large) or ()
        large = op.Reshape(large, [0, *groups, problem.channels, *sizes])
    dw = _product_of_copies(op, large, problem.small, problem, [0, *groups])
    return _weights_with_channels_last(op, op.ReduceSum(dw, [0], keepdims=0), problem)


def by_product_of_all_images(op: GraphBuilder, problem: WeightProblem) -> Value:
    """Sort images and `small` by channel, and multiply the copies of all images at once."""
    large = pad_pixels(op, problem.large, problem.spec, 2)
    large = swap_first_axes(op, large, problem.spec)
    small = swap_first_axes(op, problem.small, problem.spec)
    groups = [problem.group] if problem.group > 1 else []
    if groups:
        sizes = spatial_shape(large) or ()
        large = op.Reshape(large, [*groups, problem.channels, -1, *sizes])
    dw = _product_of_copies(op, large, small, problem, groups)
    return _weights_with_channels_last(op, dw, problem)


def _product_of_copies(
    op: GraphBuilder, large: Value, small: Value, problem: WeightProblem, batch: Ints
) -> Value:
    """Multiply `small` by the copies of all taps, for each entry of the leading axes `batch`."""
    axis = large.rank - len(problem.kernel)
    slices = slice_per_tap(op, large, problem.spec, problem.positions, problem.kernel, axis)
    copies = op.Concat(*slices, axis=len(batch))
    columns = op.Reshape(copies, [*batch, problem.taps * problem.channels, -1])
    left = op.Reshape(small, [*batch, problem.filters // problem.group, -1])
    swapped = [*range(len(batch)), len(batch) + 1, len(batch)]
    return left @ op.Transpose(columns, perm=swapped)


def _weights_with_channels_last(op: GraphBuilder, dw: Value, problem: WeightProblem) -> Value:
    dw = op.Reshape(dw, [problem.filters, *problem.kernel, problem.channels])
    return channels_second(op, dw)


STRATEGIES: tuple[Strategy[WeightProblem], ...] = (
    Strategy(
        by_pairs_of_pixels,
        lambda p: p.is_depthwise and p.is_tiny,
        "Tiny images: one product takes 0.1 to 0.4 of the time of a Slice and a sum for each tap.",
    ),
    Strategy(
        by_pairs_of_columns,
        lambda p: p.is_depthwise and p.has_few_columns,
        "Products for each row of taps take 0.1 to 0.9 of the time of a sum for each tap.",
    ),
    Strategy(
        lambda op, p: by_convolution(op, p.large, p.small, p.spec, p.w),
        lambda p: p.taps > MAX_COPIED_TAPS,
        "With so many taps, copies of the images cost more than a product of matrices saves.",
    ),
    Strategy(
        by_shifts,
        lambda p: p.is_wide and p.is_shift_cheap,
        "Shifted copies take 0.65 to 1.1 of the time of a Slice for each tap, if rows are long.",
    ),
    Strategy(
        by_gather,
        lambda p: p.is_gather_cheap,
        "One Gather takes 0.4 to 1.1 of the time of a Slice for each tap on two threads.",
    ),
    Strategy(
        by_product_per_tap_channels_last,
        lambda p: p.is_wide and p.has_narrow_rows,
        "Copies of narrow images take 0.87 to 1.0 of the time with the channels last.",
    ),
    Strategy(
        by_product_per_tap,
        lambda p: p.is_wide,
        "A product for each tap takes 0.5 to 0.9 of the time of one product of all copies.",
    ),
    Strategy(
        by_depthwise_sums,
        lambda p: p.is_depthwise and p.filters == p.group,
        "Rows are long, and a product of columns grows with their square.",
    ),
    Strategy(
        by_product_per_image,
        lambda p: p.filters // p.group <= p.position_count,
        "The product of one image has no more elements than its factor `small`.",
    ),
    Strategy(
        by_product_of_all_images,
        lambda p: True,
        "Products of single images would be larger than their factors; sorting costs less.",
    ),
)
