"""Images sampled at given points: GridSample, AffineGrid, DeformConv; and Col2Im.

GridSample is y_p = sum over taps k of w_k(p) x_{i_k(p)}. The weights are products of one weight for
each axis: 1 (nearest), 1 - t and t (linear), or the cubic of Keys 1981 with a = -0.75. At a border,
the index of each pixel is clipped or reflected separately, as in onnxruntime's kernel. Sources:
Jaderberg et al. 2015 (spatial transformers); Dai et al. 2017, Zhu et al. 2019 (deformable
convolution).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.building import Ints, arange, axis_size, concat_sizes, elements_at
from onnxfit.gradients.rules.convolution import ConvSpec
from onnxfit.gradients.table import InputGradient, NoGradientError, decompose, rule
from onnxfit.graph.values import GraphBuilder, Value

CUBIC = -0.75  # the parameter a of Keys's cubic, as in onnxruntime

# Sampling
# ------------------------------------------------------------------------------------------------


@rule("GridSample")
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
            "the rank of its input is unknown", "use a model whose shapes can be inferred"
        )
    axes = x.rank - 2
    images = op.shape(x, 0, 2)  # batch and channels
    points = op.Reshape(grid, concat_sizes(op, axis_size(op, x, 0), -1, axes))
    taps = [
        _taps(op, points, x, axis, mode, padding_mode, bool(align_corners)) for axis in range(axes)
    ]
    flat = op.Reshape(x, concat_sizes(op, images, -1))
    pixels = _pixels(op, x, taps)
    dy_flat = op.Reshape(dy, concat_sizes(op, images, *[1] * axes, -1))

    def dx() -> Value:
        weight = _outer_product(op, [tap.weight for tap in taps])
        updates = dy_flat * op.Unsqueeze(weight, [1])
        # Not ScatterND: its kernel adds with several threads without a lock, and loses updates.
        summed = op.ScatterElements(
            zeros_like(op, flat),
            pixels,
            op.Reshape(updates, concat_sizes(op, images, -1)),
            axis=2,
            reduction="add",
        )
        return op.Reshape(summed, op.shape(x))

    def dgrid() -> Value:
        values = op.GatherElements(flat, pixels, axis=2)
        values = op.Reshape(values, concat_sizes(op, images, *[taps[0].count] * axes, -1))
        values = op.ReduceSum(values * dy_flat, [1], keepdims=0)
        columns = []
        for along in reversed(taps):  # the grid's coordinates are x, y, z: the last axis first
            factors = [tap.slope if tap is along else tap.weight for tap in taps]
            slope = values * _outer_product(op, factors)
            slope = op.ReduceSum(slope, list(range(1, 1 + axes)), keepdims=0)
            columns.append(slope * along.pixels_per_unit)
        dpoints = op.Concat(*(op.Unsqueeze(column, [2]) for column in columns), axis=2)
        return op.Reshape(dpoints, op.shape(grid))

    return dx, None if mode == "nearest" else dgrid


@dataclass(frozen=True)
class Taps:
    """The pixels around every point along one axis: tensors (batch, count, points)."""

    count: int
    index: Value
    weight: Value
    slope: Value  # of the weight, by the position in pixels
    size: Value  # of the axis
    pixels_per_unit: Value  # of the grid


def _taps(
    op: GraphBuilder,
    points: Value,
    x: Value,
    axis: int,
    mode: str,
    padding_mode: str,
    align_corners: bool,
) -> Taps:
    """Return the taps along one spatial axis."""
    size = axis_size(op, x, 2 + axis)
    length = op.cast(size, points.dtype)
    coordinate = op.Gather(points, op.constant(np.int64(x.rank - 3 - axis)), axis=2)
    coordinate = op.Unsqueeze(coordinate, [1])
    scale = (length - 1) * 0.5 if align_corners else length * 0.5
    position = (coordinate + 1) * scale - (0 if align_corners else 0.5)
    first = op.Round(position) if mode == "nearest" else op.Floor(position)
    offsets, weight, slope = _kernel(op, position - first, x, mode)
    index = op.Cast(first, to=int(ir.DataType.INT64)) + op.constant(
        np.array(offsets, np.int64)[:, None]
    )
    if padding_mode == "reflection":
        period = 2 * size - 2 * int(align_corners)
        index = op.Mod(index, op.Max(period, 1))
        index = op.Min(index, period - (0 if align_corners else 1) - index)
    elif padding_mode == "zeros":
        inside = op.cast((index >= 0) & (index < size), x.dtype)
        weight = weight * inside
        slope = slope * inside
    index = op.Max(op.Min(index, size - 1), 0)
    return Taps(len(offsets), index, weight, slope, size, scale)


def _kernel(op: GraphBuilder, t: Value, x: Value, mode: str) -> tuple[list[int], Value, Value]:
    """Return the offsets of the taps, their weights, and the slopes of the weights.

    t in [0, 1] is the distance to the pixel at offset 0.
    """
    if mode == "nearest":
        return [0], op.Expand(op.constant(1, x.dtype), op.shape(t)), t
    if mode != "cubic":
        weight = op.Concat(1 - t, t, axis=1)
        slope = op.constant(np.array([[-1], [1]]), x.dtype)
        return [0, 1], weight, op.Expand(slope, op.shape(weight))
    weight = op.Concat(
        _cubic_far(t + 1), _cubic_near(t), _cubic_near(1 - t), _cubic_far(2 - t), axis=1
    )
    slope = op.Concat(
        _cubic_far_slope(t + 1),
        _cubic_near_slope(t),
        -_cubic_near_slope(1 - t),
        -_cubic_far_slope(2 - t),
        axis=1,
    )
    return [-1, 0, 1, 2], weight, slope


def _cubic_near(t: Value) -> Value:
    """Return Keys's kernel at a distance t up to 1."""
    return ((CUBIC + 2) * t - (CUBIC + 3)) * t * t + 1


def _cubic_far(t: Value) -> Value:
    """Return Keys's kernel at a distance t from 1 to 2."""
    return CUBIC * (((t - 5) * t + 8) * t - 4)


def _cubic_near_slope(t: Value) -> Value:
    return (3 * (CUBIC + 2) * t - 2 * (CUBIC + 3)) * t


def _cubic_far_slope(t: Value) -> Value:
    return CUBIC * ((3 * t - 10) * t + 8)


def _pixels(op: GraphBuilder, x: Value, taps: Sequence[Taps]) -> Value:
    """Return (batch, channels, taps * points): the pixels of all taps, counted row by row."""
    pixels = taps[0].index
    for tap in taps[1:]:
        pixels = op.Unsqueeze(pixels, [-2]) * tap.size + _behind(op, tap.index, pixels)
    pixels = op.Reshape(pixels, concat_sizes(op, axis_size(op, x, 0), 1, -1))
    return op.Expand(pixels, concat_sizes(op, 1, axis_size(op, x, 1), 1))


def _outer_product(op: GraphBuilder, factors: Sequence[Value]) -> Value:
    """Return (batch, taps, ..., taps, points) for one (batch, taps, points) per axis."""
    product = factors[0]
    for factor in factors[1:]:
        product = op.Unsqueeze(product, [-2]) * _behind(op, factor, product)
    return product


def _behind(op: GraphBuilder, factor: Value, product: Value) -> Value:
    """Insert axes of one element into (batch, taps, points), for the axes that `product` has."""
    return op.Unsqueeze(factor, list(range(1, product.rank - 1)))


@rule("AffineGrid")
def affine_grid(
    op: GraphBuilder, theta: Value, size: Value, y: Value, dy: Value, *, align_corners: int
) -> tuple[InputGradient, ...]:
    """y = (p, 1) theta^T for every base point p; the base points are the grid of the identity."""
    if size.shape is None or not isinstance(size.shape[0], int):
        raise NoGradientError(
            "the rank of its grid is unknown", "use a model whose shapes can be inferred"
        )
    axes = size.shape[0] - 2
    identity = op.constant(np.eye(axes, axes + 1)[None], theta.dtype)
    one_image = concat_sizes(op, 1, elements_at(op, size, range(1, 2 + axes)))
    base = op.AffineGrid(identity, one_image, align_corners=align_corners)
    base = op.Reshape(base, [-1, axes])
    base = op.Pad(base, [0, 0, 0, 1], op.constant(1, theta.dtype))  # (points, axes + 1)
    dy_flat = op.Reshape(dy, concat_sizes(op, axis_size(op, dy, 0), -1, axes, 1))
    return op.ReduceSum(dy_flat * op.Unsqueeze(base, [1]), [1], keepdims=0), None


# Patches
# ------------------------------------------------------------------------------------------------


@decompose("DeformConv")
def deform_conv(
    op: GraphBuilder, x: Value, w: Value, offset: Value, b: Value | None, mask: Value | None, *,
    strides: Ints | None, pads: Ints | None, dilations: Ints | None, group: int, offset_group: int,
    kernel_shape: Ints | None,
) -> Value:  # fmt: skip
    """Sample the image at one point for every tap of the kernel; multiply by the weights.

    One GridSample reads all points.
    """
    kernel = [k for k in kernel_shape or (w.shape or ())[2:] if isinstance(k, int)]
    if len(kernel) != 2 or x.rank != 4:
        raise NoGradientError(
            "its image is not (batch, channels, height, width), or the size of its kernel is"
            " unknown"
        )
    spec = ConvSpec.of(2, strides, dilations, group)
    spec = replace(spec, pads=tuple(pads or spec.pads))
    batch = axis_size(op, x, 0)
    taps = kernel[0] * kernel[1]
    samples = batch * offset_group if offset_group > 1 else batch
    positions = op.shape(offset, 2)
    offsets = op.Reshape(offset, concat_sizes(op, samples, *kernel, 2, positions))
    coordinates = [  # x, then y
        _deformed_coordinate(op, x, offsets, positions, axis, kernel[axis], spec) for axis in (1, 0)
    ]
    grid = op.Reshape(op.Concat(*coordinates, axis=-1), concat_sizes(op, samples, taps, -1, 2))
    images = x
    if offset_group > 1:
        images = op.Reshape(x, concat_sizes(op, samples, -1, op.shape(x, 2)))
    values = op.GridSample(images, grid)  # (samples, channels, taps, points)
    if mask is not None:
        values = values * op.Reshape(mask, concat_sizes(op, samples, 1, taps, -1))
    groups = [group] if group > 1 else []
    points = axis_size(op, values, 3)
    columns = op.Reshape(values, concat_sizes(op, batch, *groups, -1, points))
    if group > 1:
        matrix_shape = concat_sizes(op, group, -1, axis_size(op, columns, 2))
    else:
        matrix_shape = concat_sizes(op, axis_size(op, w, 0), -1)
    y = op.Reshape(op.Reshape(w, matrix_shape) @ columns, concat_sizes(op, batch, -1, positions))
    return y if b is None else y + op.Reshape(b, [-1, 1, 1])


def _deformed_coordinate(
    op: GraphBuilder,
    x: Value,
    offsets: Value,
    positions: Value,
    axis: int,
    taps: int,
    spec: ConvSpec,
) -> Value:
    """Return one coordinate of the points that the taps read, in the units of GridSample."""
    first = arange(op, elements_at(op, positions, [axis])) * spec.strides[axis] - spec.pads[axis]
    within = np.arange(taps)[:, None] * spec.dilations[axis]
    # shapes: (kernel, 1, positions, 1) for the rows, (1, kernel, 1, positions) for the columns
    regular = op.constant(within) + op.Unsqueeze(first, [0])
    regular = op.Unsqueeze(regular, [1 - axis, 3 - axis])
    offset = op.Gather(offsets, op.constant(np.int64(axis)), axis=3)
    pixel = offset + op.cast(regular, x.dtype)
    size = op.cast(axis_size(op, x, 2 + axis), x.dtype)
    return op.Unsqueeze((2 * pixel + 1) / size - 1, [-1])


@rule("Col2Im")
def col2im(
    op: GraphBuilder, x: Value, image_shape: Value, block_shape: Value, y: Value, dy: Value, *,
    strides: Ints | None, pads: Ints | None, dilations: Ints | None,
) -> tuple[InputGradient, ...]:  # fmt: skip
    """The patches of dy: dx[n, c k, l] = dy[n, c, k dilation + l stride - pad], axis by axis."""
    if image_shape.shape is None or not isinstance(image_shape.shape[0], int):
        raise NoGradientError(
            "the rank of its image is unknown", "use a model whose shapes can be inferred"
        )
    axes = image_shape.shape[0]
    spec = ConvSpec.of(axes, strides, dilations)
    spec = replace(spec, pads=tuple(pads or spec.pads))
    patches = dy
    if any(spec.pads):
        patches = op.Pad(dy, [0, 0, *spec.pads_before, 0, 0, *spec.pads_after])
    for axis in reversed(range(axes)):
        padding = spec.pads_before[axis] + spec.pads_after[axis]
        size = elements_at(op, image_shape, [axis]) + padding
        block = elements_at(op, block_shape, [axis])
        dilation = spec.dilations[axis]
        stride = spec.strides[axis]
        blocks = (size - (block - 1) * dilation - 1) / stride + 1
        within = arange(op, block) * dilation
        first = arange(op, blocks) * stride
        indices = op.Unsqueeze(within, [1]) + op.Unsqueeze(first, [0])
        patches = op.Gather(patches, indices, axis=2 + axis)
    if axes > 1:
        # from (block, blocks) of each axis to the blocks' axes, then those of the positions
        within_axes = range(2, 2 + 2 * axes, 2)
        block_axes = range(3, 3 + 2 * axes, 2)
        patches = op.Transpose(patches, perm=[0, 1, *within_axes, *block_axes])
    return op.Reshape(patches, op.shape(x)), None, None
