"""Pools over regions of images: RoiAlign and MaxRoiPool.

RoiAlign's average is bilinear and its sample points form a lattice, so y_r = A_r x_b(r) B_r' with
one matrix per region and axis, made of tents max(0, 1 - |point - pixel|). dx_n, the sum of A_r'
dy_r B_r over the regions of image n, is one MatMul over all regions. Its maximum, in onnxruntime as
in ONNX's reference, is the largest of all weighted corner pixels, not of the interpolated points:
that pixel gets the gradient, times its weight. Sources: He et al. 2017 (Mask R-CNN), Girshick 2015
(Fast R-CNN).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.building import arange, axis_size, concat_sizes
from onnxfit.gradients.table import InputGradient, NoGradientError, rule
from onnxfit.graph.values import GraphBuilder, Value

INT64 = int(ir.DataType.INT64)


@rule("RoiAlign")
def roi_align(
    op: GraphBuilder, x: Value, rois: Value, batch: Value, y: Value, dy: Value, *,
    mode: str, coordinate_transformation_mode: str, output_height: int, output_width: int,
    sampling_ratio: int, spatial_scale: float,
) -> tuple[InputGradient, ...]:  # fmt: skip
    half_pixel = coordinate_transformation_mode == "half_pixel"
    bins = (output_height, output_width)

    def dx() -> Value:
        rows, columns = (
            _sample_points(op, x, rois, axis, bins[axis], sampling_ratio, spatial_scale, half_pixel)
            for axis in (0, 1)
        )
        if mode == "avg":
            return _average_gradient(op, x, batch, dy, rows, columns)
        return _max_gradient(op, x, batch, dy, _corners(op, rows), _corners(op, columns))

    def drois() -> Value:
        raise NoGradientError(
            "the positions of its regions have no gradient, as in other implementations of"
            " RoiAlign",
            "freeze the weights from which the regions are computed, or make the regions an input",
        )

    return dx, drois, None


@rule("MaxRoiPool")
def max_roi_pool(
    op: GraphBuilder,
    x: Value,
    rois: Value,
    y: Value,
    dy: Value,
    *,
    pooled_shape: Sequence[int],
    spatial_scale: float,
) -> tuple[InputGradient, ...]:
    """The borders of the bins are rounded, so the regions have no gradient."""

    def dx() -> Value:
        batch = op.Cast(op.Gather(rois, op.constant(np.int64(0)), axis=1), to=INT64)
        rows, columns = (
            _pixels_of_bins(op, x, rois, axis, pooled_shape[axis], spatial_scale) for axis in (0, 1)
        )
        return _max_gradient(op, x, batch, dy, rows, columns)

    return dx, None


@dataclass(frozen=True)
class SamplePoints:
    """The sample points of every region along one axis: (regions, bins, points)."""

    pixel: Value  # the position in pixels, clipped to the image
    share: Value  # of a point in its bin's average; 0 if it does not exist or lies outside
    inside: Value  # 0 where a point lies too far outside of the image, 1 elsewhere
    exists: Value  # bool: bins have different numbers of points
    size: Value  # of the axis
    pixels: Value  # 0, 1, 2, ...


@dataclass(frozen=True)
class Candidates:
    """The pixels a maximum is taken over, along one axis: (regions, bins, candidates)."""

    index: Value
    weight: Value
    exists: Value


def _sample_points(
    op: GraphBuilder,
    x: Value,
    rois: Value,
    axis: int,
    bins: int,
    sampling_ratio: int,
    scale: float,
    half_pixel: bool,
) -> SamplePoints:
    """Return the points that RoiAlign samples along one spatial axis.

    Without a `sampling_ratio`, a bin has as many points as it has pixels, rounded up.
    """
    pixels = op.cast(arange(op, axis_size(op, x, 2 + axis)), x.dtype)
    size = op.cast(axis_size(op, x, 2 + axis), x.dtype)
    start, end = (op.Unsqueeze(_column(op, rois, i) * scale, [2]) for i in (1 - axis, 3 - axis))
    if half_pixel:
        start = start - 0.5
        end = end - 0.5
    length = end - start if half_pixel else op.Max(end - start, 1)
    step = length / bins
    if sampling_ratio > 0:
        max_points = op.constant(np.int64(sampling_ratio))
        points = op.constant(np.full((1, 1, 1), sampling_ratio), x.dtype)
    else:
        points = op.Ceil(step)
        max_points = op.Cast(op.Max(op.ReduceMax(points, keepdims=0), 1), to=INT64)
    count = op.Max(points, 1)
    index = op.cast(arange(op, max_points), x.dtype)
    bin_start = start + op.constant(np.arange(bins)[:, None], x.dtype) * step
    pixel = bin_start + (index + 0.5) * step / count
    exists = op.Expand(index < points, op.shape(pixel))
    inside = op.cast((pixel >= -1) & (pixel <= size), x.dtype)
    share = op.cast(exists, x.dtype) * inside / count
    clipped = op.Max(op.Min(pixel, size - 1), 0)
    return SamplePoints(clipped, share, inside, exists, size, pixels)


def _average_gradient(
    op: GraphBuilder, x: Value, batch: Value, dy: Value, rows: SamplePoints, columns: SamplePoints
) -> Value:
    """Return the sum of A_r' dy_r B_r over the regions of each image."""
    images, channels, height, width = (axis_size(op, x, axis) for axis in range(4))
    left, right = (_bilinear_matrix(op, points) for points in (rows, columns))
    # (images, regions)
    belongs = op.Unsqueeze(arange(op, images), [1]) == op.cast(op.Unsqueeze(batch, [0]), np.int64)
    left = op.Unsqueeze(op.cast(belongs, x.dtype), [2, 3]) * op.Unsqueeze(left, [0])
    left = op.Reshape(op.Transpose(left, perm=[0, 3, 1, 2]), concat_sizes(op, images, height, -1))
    # (regions, bins, channels, width)
    wide = op.Transpose(dy @ op.Unsqueeze(right, [1]), perm=[0, 2, 1, 3])
    wide = op.Reshape(wide, concat_sizes(op, op.shape(left, 2, 3), -1))
    dx = op.Reshape(left @ wide, concat_sizes(op, images, height, channels, width))
    return op.Transpose(dx, perm=[0, 2, 1, 3])


def _bilinear_matrix(op: GraphBuilder, points: SamplePoints) -> Value:
    """Return (regions, bins, pixels): the weight of each pixel in a bin's average."""
    distance = op.Abs(op.Unsqueeze(points.pixel, [3]) - points.pixels)
    weights = op.Relu(1 - distance) * op.Unsqueeze(points.share, [3])
    return op.ReduceSum(weights, [2], keepdims=0)


def _corners(op: GraphBuilder, points: SamplePoints) -> Candidates:
    """Return the two pixels that each point lies between."""
    low = op.Floor(points.pixel)
    t = points.pixel - low
    index = op.Concat(low, op.Min(low + 1, points.size - 1), axis=2)
    weight = op.Concat((1 - t) * points.inside, t * points.inside, axis=2)
    integers = op.Cast(index, to=INT64)
    return Candidates(integers, weight, op.Concat(points.exists, points.exists, axis=2))


def _pixels_of_bins(
    op: GraphBuilder, x: Value, rois: Value, axis: int, bins: int, scale: float
) -> Candidates:
    """Return the pixels between the rounded borders of every bin."""
    size = op.cast(axis_size(op, x, 2 + axis), x.dtype)
    start, end = (_round(op, _column(op, rois, i) * scale) for i in (2 - axis, 4 - axis))
    step = op.Max(end - start + 1, 1) / bins
    lower = op.Floor(step * op.constant(np.arange(bins), x.dtype))
    upper = op.Ceil(step * op.constant(np.arange(1, bins + 1), x.dtype))
    first, last = (
        op.Unsqueeze(op.Max(op.Min(border + start, size), 0), [2]) for border in (lower, upper)
    )
    max_pixels = op.Max(op.ReduceMax(last - first, keepdims=0), 1)
    index = first + op.cast(arange(op, op.Cast(max_pixels, to=INT64)), x.dtype)
    exists = index < last
    clipped = op.Cast(op.Max(op.Min(index, size - 1), 0), to=INT64)
    return Candidates(clipped, op.cast(exists, x.dtype), exists)


def _max_gradient(
    op: GraphBuilder, x: Value, batch: Value, dy: Value, rows: Candidates, columns: Candidates
) -> Value:
    """Add each dy, times the weight of its bin's largest weighted pixel, to that pixel."""
    images, channels, height, width = (axis_size(op, x, axis) for axis in range(4))
    weight = _lattice(op, rows.weight, columns.weight, "Mul")
    exists = _lattice(op, rows.exists, columns.exists, "And")
    first = op.Unsqueeze(op.cast(batch, np.int64), [1, 2]) * (height * width)
    index = _lattice(op, rows.index * width, columns.index, "Add") + first
    flat = op.Reshape(op.Transpose(x, perm=[0, 2, 3, 1]), concat_sizes(op, -1, channels))
    # (regions, bins, candidates, channels)
    values = op.Gather(flat, index, axis=0) * op.Unsqueeze(weight, [3])
    values = op.Where(op.Unsqueeze(exists, [3]), values, float(np.finfo(np.float32).min))
    largest = op.ArgMax(values, axis=2, keepdims=0)  # (regions, bins, channels)
    by_bin = op.Reshape(dy, concat_sizes(op, op.shape(dy, 0, 2), -1))
    by_bin = op.Transpose(by_bin, perm=[0, 2, 1])
    rows_shape = concat_sizes(op, -1, channels)
    updates = op.Reshape(by_bin * op.GatherElements(weight, largest, axis=2), rows_shape)
    indices = op.Reshape(op.GatherElements(index, largest, axis=2), rows_shape)
    dx = op.ScatterElements(zeros_like(op, flat), indices, updates, axis=0, reduction="add")
    dx = op.Reshape(dx, concat_sizes(op, images, height, width, channels))
    return op.Transpose(dx, perm=[0, 3, 1, 2])


def _lattice(op: GraphBuilder, row: Value, column: Value, op_type: str) -> Value:
    """Combine the candidates of both axes by a binary operator, as (regions, bins, candidates).

    The operands are (regions, row bins, 1, row candidates, 1) and (regions, 1, column bins, 1,
    column candidates).
    """
    both = getattr(op, op_type)(op.Unsqueeze(row, [2, 4]), op.Unsqueeze(column, [1, 3]))
    candidates = axis_size(op, row, 2) * axis_size(op, column, 2)
    regions = axis_size(op, row, 0)
    bins = axis_size(op, row, 1) * axis_size(op, column, 1)
    return op.Reshape(both, concat_sizes(op, regions, bins, candidates))


def _column(op: GraphBuilder, rois: Value, index: int) -> Value:
    return op.Gather(rois, op.constant(np.array([index])), axis=1)


def _round(op: GraphBuilder, x: Value) -> Value:
    """Round to the nearest integer, halves away from zero."""
    return op.Sign(x) * op.Floor(op.Abs(x) + 0.5)
