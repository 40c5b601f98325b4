"""Images read at given points:

GridSample, AffineGrid, DeformConv; and Col2Im, which adds patches into images.

GridSample is y_p = sum over taps k of w_k(p) x_{i_k(p)}, the weights being products of one per
axis: 1 (nearest), 1 - t and t (linear), or the cubic of Keys 1981 with a = -0.75. At a border,
positions of pixels are bent, each by itself, as onnxruntime's kernel does. Sources: Jaderberg et
al. 2015 (spatial transformers); Dai et al. 2017, Zhu et al. 2019 (deformable convolution).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.building import arange, axis_size, concat_sizes, elements_at
from onnxfit.gradients.table import InputGradient, NoGradientError, decompose, gradient
from onnxfit.graph.values import GraphBuilder, Value

CUBIC = -0.75


@gradient("GridSample")
def grid_sample(
    op: GraphBuilder,
    x: Value,
    grid: Value,
    y: Value,
    dy: Value,
    *,
    mode: str,
    padding_mode: str,
    align_corners: int,
) -> tuple[InputGradient, ...]:
    if x.shape is None:
        raise NoGradientError(
            "the rank of its input is unknown", "a model whose shapes can be inferred"
        )
    count = x.rank - 2
    images = op.shape(x, 0, 2)  # batch and channels
    points = op.Reshape(grid, concat_sizes(op, axis_size(op, x, 0), -1, count))
    axes = [_taps(op, points, x, a, mode, padding_mode, bool(align_corners)) for a in range(count)]
    flat = op.Reshape(x, concat_sizes(op, images, -1))
    pixels = reduce(
        lambda at, axis: op.Unsqueeze(at, [-2]) * axis.size + _behind(op, axis.index, at),
        axes[1:],
        axes[0].index,
    )
    pixels = op.Expand(
        op.Reshape(pixels, concat_sizes(op, axis_size(op, x, 0), 1, -1)),
        concat_sizes(op, 1, axis_size(op, x, 1), 1),
    )
    arriving = op.Reshape(dy, concat_sizes(op, images, *[1] * count, -1))

    def product(factors: Sequence[Value]) -> Value:
        """(batch, taps, ..., taps, points) of one (batch, taps, points) per axis."""
        return reduce(
            lambda w, factor: op.Unsqueeze(w, [-2]) * _behind(op, factor, w),
            factors[1:],
            factors[0],
        )

    def dx() -> Value:
        parts = arriving * op.Unsqueeze(product([a.weight for a in axes]), [1])
        # not ScatterND: its kernel adds with several threads at once, and loses some
        summed = op.ScatterElements(
            zeros_like(op, flat),
            pixels,
            op.Reshape(parts, concat_sizes(op, images, -1)),
            axis=2,
            reduction="add",
        )
        return op.Reshape(summed, op.shape(x))

    def dgrid() -> Value:
        read = op.Reshape(
            op.GatherElements(flat, pixels, axis=2),
            concat_sizes(op, images, *[axes[0].count] * count, -1),
        )
        read = op.ReduceSum(read * arriving, [1], keepdims=0)
        slopes = []
        for axis in reversed(axes):  # the grid says x, y, z
            slope = read * product([a.slope if a is axis else a.weight for a in axes])
            slopes.append(
                op.ReduceSum(slope, list(range(1, 1 + count)), keepdims=0) * axis.pixels_per_unit
            )
        return op.Reshape(
            op.Concat(*(op.Unsqueeze(s, [2]) for s in slopes), axis=2), op.shape(grid)
        )

    return dx, None if mode == "nearest" else dgrid


@dataclass(frozen=True)
class Taps:
    """The pixels around every point along one axis: arrays (batch, count, points)."""

    count: int
    index: Value
    weight: Value
    slope: Value  # of the weight, by the position in pixels
    size: Value  # of the axis
    pixels_per_unit: Value  # of the grid


def _taps(
    op: GraphBuilder, points: Value, x: Value, axis: int, mode: str, padding: str, corners: bool
) -> Taps:
    size = axis_size(op, x, 2 + axis)
    length = op.cast(size, points.dtype)
    place = op.Unsqueeze(op.Gather(points, op.constant(np.int64(x.rank - 3 - axis)), axis=2), [1])
    scale = (length - 1) * 0.5 if corners else length * 0.5
    at = (place + 1) * scale - (0 if corners else 0.5)
    first = op.Round(at) if mode == "nearest" else op.Floor(at)
    t = at - first
    if mode == "nearest":
        offsets, weight, slope = [0], op.Expand(op.constant(1, x.dtype), op.shape(t)), t
    elif mode == "cubic":
        offsets = [-1, 0, 1, 2]
        far, near = _cubic_far, _cubic_near
        weight = op.Concat(far(t + 1), near(t), near(1 - t), far(2 - t), axis=1)
        slope = op.Concat(
            _cubic_far_slope(t + 1),
            _cubic_near_slope(t),
            -_cubic_near_slope(1 - t),
            -_cubic_far_slope(2 - t),
            axis=1,
        )
    else:
        offsets = [0, 1]
        weight = op.Concat(1 - t, t, axis=1)
        slope = op.Expand(op.constant(np.array([[-1], [1]]), x.dtype), op.shape(weight))
    index = op.Cast(first, to=int(ir.DataType.INT64)) + op.constant(
        np.array(offsets, np.int64)[:, None]
    )
    if padding == "reflection":
        period = 2 * size - 2 * int(corners)
        index = op.Mod(index, op.Max(period, 1))
        index = op.Min(index, period - (0 if corners else 1) - index)
    elif padding == "zeros":
        inside = op.cast((index >= 0) & (index < size), x.dtype)
        weight, slope = weight * inside, slope * inside
    return Taps(len(offsets), op.Max(op.Min(index, size - 1), 0), weight, slope, size, scale)


def _cubic_near(t: Value) -> Value:
    return ((CUBIC + 2) * t - (CUBIC + 3)) * t * t + 1


def _cubic_far(t: Value) -> Value:
    return CUBIC * (((t - 5) * t + 8) * t - 4)


def _cubic_near_slope(t: Value) -> Value:
    return (3 * (CUBIC + 2) * t - 2 * (CUBIC + 3)) * t


def _cubic_far_slope(t: Value) -> Value:
    return CUBIC * ((3 * t - 10) * t + 8)


def _behind(op: GraphBuilder, factor: Value, product: Value) -> Value:
    """(batch, taps, points) with axes of one element for the taps that `product` has already."""
    return op.Unsqueeze(factor, list(range(1, product.rank - 1)))


@gradient("AffineGrid")
def affine_grid(
    op: GraphBuilder, theta: Value, size: Value, y: Value, dy: Value, *, align_corners: int
) -> tuple[InputGradient, ...]:
    """y = (p, 1) theta^T for every base point p; the base points are the grid of the identity."""
    if size.shape is None or not isinstance(size.shape[0], int):
        raise NoGradientError(
            "the rank of its grid is unknown", "a model whose shapes can be inferred"
        )
    count = size.shape[0] - 2
    identity = op.constant(np.eye(count, count + 1)[None], theta.dtype)
    one = concat_sizes(op, 1, elements_at(op, size, range(1, 2 + count)))
    base = op.Reshape(op.AffineGrid(identity, one, align_corners=align_corners), [-1, count])
    base = op.Pad(base, [0, 0, 0, 1], op.constant(1, theta.dtype))  # (points, count + 1)
    arriving = op.Reshape(dy, concat_sizes(op, axis_size(op, dy, 0), -1, count, 1))
    return op.ReduceSum(arriving * op.Unsqueeze(base, [1]), [1], keepdims=0), None


@decompose("DeformConv")
def deform_conv(
    op: GraphBuilder, x: Value, w: Value, offset: Value, b: Value | None, mask: Value | None, *,
    strides: Sequence[int] | None, pads: Sequence[int] | None, dilations: Sequence[int] | None, group: int, offset_group: int,
    kernel_shape: Sequence[int] | None,
) -> Value:  # fmt: skip
    """Every tap of the kernel reads the image at its own point: one GridSample for all, and a
    MatMul with the weights.
    """
    kernel = [k for k in kernel_shape or (w.shape or ())[2:] if isinstance(k, int)]
    if len(kernel) != 2 or x.rank != 4:
        raise NoGradientError(
            "it can be differentiated for images (batch, channels, height, width) and a kernel"
            " whose size is known"
        )
    batch, taps = axis_size(op, x, 0), kernel[0] * kernel[1]
    samples = batch * offset_group if offset_group > 1 else batch
    out = op.shape(offset, 2)
    moved = op.Reshape(offset, concat_sizes(op, samples, *kernel, 2, out))
    places = []
    for axis in (1, 0):  # x, then y
        first = (
            arange(op, elements_at(op, out, [axis])) * (strides or (1, 1))[axis]
            - (pads or (0, 0))[axis]
        )
        steps = np.arange(kernel[axis])[:, None] * (dilations or (1, 1))[axis]
        # (kernel, 1, out, 1) or turned
        regular = op.Unsqueeze(op.constant(steps) + op.Unsqueeze(first, [0]), [1 - axis, 3 - axis])
        at = op.Gather(moved, op.constant(np.int64(axis)), axis=3) + op.cast(regular, x.dtype)
        places.append(
            op.Unsqueeze((2 * at + 1) / op.cast(axis_size(op, x, 2 + axis), x.dtype) - 1, [-1])
        )
    grid = op.Reshape(op.Concat(*places, axis=-1), concat_sizes(op, samples, taps, -1, 2))
    images = op.Reshape(x, concat_sizes(op, samples, -1, op.shape(x, 2))) if offset_group > 1 else x
    read = op.GridSample(images, grid)  # (samples, channels, taps, points)
    if mask is not None:
        read = read * op.Reshape(mask, concat_sizes(op, samples, 1, taps, -1))
    columns = op.Reshape(
        read, concat_sizes(op, batch, *([group] if group > 1 else []), -1, axis_size(op, read, 3))
    )
    weights = op.Reshape(
        w,
        (
            concat_sizes(op, group, -1, axis_size(op, columns, 2))
            if group > 1
            else concat_sizes(op, axis_size(op, w, 0), -1)
        ),
    )
    y = op.Reshape(weights @ columns, concat_sizes(op, batch, -1, out))
    return y if b is None else y + op.Reshape(b, [-1, 1, 1])


@gradient("Col2Im")
def col2im(
    op: GraphBuilder, x: Value, image_shape: Value, block_shape: Value, y: Value, dy: Value, *,
    strides: Sequence[int] | None, pads: Sequence[int] | None, dilations: Sequence[int] | None,
) -> tuple[InputGradient, ...]:  # fmt: skip
    """The patches of dy: dx[n, c k, l] = dy[n, c, k dilation + l stride - pad], axis by axis."""
    if image_shape.shape is None or not isinstance(image_shape.shape[0], int):
        raise NoGradientError(
            "the rank of its image is unknown", "a model whose shapes can be inferred"
        )
    count = image_shape.shape[0]
    strides, dilations, pads = (
        strides or [1] * count,
        dilations or [1] * count,
        pads or [0] * 2 * count,
    )
    found = op.Pad(dy, [0, 0, *pads[:count], 0, 0, *pads[count:]]) if any(pads) else dy
    for a in reversed(range(count)):
        size = elements_at(op, image_shape, [a]) + (pads[a] + pads[count + a])
        block = elements_at(op, block_shape, [a])
        blocks = (size - (block - 1) * dilations[a] - 1) / strides[a] + 1
        within = arange(op, block) * dilations[a]
        first = arange(op, blocks) * strides[a]
        found = op.Gather(found, op.Unsqueeze(within, [1]) + op.Unsqueeze(first, [0]), axis=2 + a)
    found = (
        op.Transpose(found, perm=[0, 1, *range(2, 2 + 2 * count, 2), *range(3, 3 + 2 * count, 2)])
        if count > 1
        else found
    )
    return op.Reshape(found, op.shape(x)), None, None
