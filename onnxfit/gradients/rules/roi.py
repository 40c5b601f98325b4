"""Regions of images, pooled to one size: RoiAlign and MaxRoiPool.

RoiAlign's average is bilinear and its sample points form a lattice, so y_r = A_r x_b(r) B_r' with
one matrix per region and axis, made of tents max(0, 1 - |point - pixel|); dx_n, the sum of A_r'
dy_r B_r over the regions of image n, is one MatMul over all regions. Its maximum is, in onnxruntime
as in ONNX's reference, the largest of all weighted corner pixels, not of the interpolated points:
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
from onnxfit.gradients.table import InputGradient, NoGradientError, gradient
from onnxfit.graph.values import GraphBuilder, Value

INT64 = int(ir.DataType.INT64)


@gradient("RoiAlign")
def roi_align(
    op: GraphBuilder, x: Value, rois: Value, batch: Value, y: Value, dy: Value, *,
    mode: str, coordinate_transformation_mode: str, output_height: int, output_width: int, sampling_ratio: int, spatial_scale: float,
) -> tuple[InputGradient, ...]:  # fmt: skip
    half = coordinate_transformation_mode == "half_pixel"
    bins = (output_height, output_width)

    def dx() -> Value:
        rows, columns = (
            _points(op, x, rois, a, bins[a], sampling_ratio, spatial_scale, half) for a in (0, 1)
        )
        if mode == "avg":
            return _average(op, x, batch, dy, rows, columns)
        return _to_the_largest(op, x, batch, dy, _corners(op, rows), _corners(op, columns))

    def drois() -> Value:
        raise NoGradientError(
            "where a region lies is not differentiated, as in other implementations of RoiAlign",
            "freeze what the regions are computed from, or give them as an input",
        )

    return dx, drois, None


@gradient("MaxRoiPool")
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
    """The borders of its bins are whole numbers: nothing flows to the regions."""

    def dx() -> Value:
        batch = op.Cast(op.Gather(rois, op.constant(np.int64(0)), axis=1), to=INT64)
        return _to_the_largest(
            op,
            x,
            batch,
            dy,
            *(_pixels(op, x, rois, a, pooled_shape[a], spatial_scale) for a in (0, 1)),
        )

    return dx, None


@dataclass(frozen=True)
class Points:
    """The sample points of every region along one axis: (regions, bins, points)."""

    at: Value  # in pixels, clipped to the image
    # of a point in its bin's average; 0 for what does not exist or lies too far outside
    share: Value
    inside: Value  # 0 where a point lies too far outside, 1 elsewhere
    exists: Value  # bool: bins have different numbers of points
    size: Value
    pixels: Value  # 0, 1, 2, ...


@dataclass(frozen=True)
class Candidates:
    """The pixels a maximum is taken over, along one axis: (regions, bins, candidates)."""

    index: Value
    weight: Value
    exists: Value


def _points(
    op: GraphBuilder,
    x: Value,
    rois: Value,
    axis: int,
    bins: int,
    ratio: int,
    scale: float,
    half: bool,
) -> Points:
    pixels = op.cast(arange(op, axis_size(op, x, 2 + axis)), x.dtype)
    size = op.cast(axis_size(op, x, 2 + axis), x.dtype)
    start, end = (op.Unsqueeze(_column(op, rois, i) * scale, [2]) for i in (1 - axis, 3 - axis))
    if half:
        start, end = start - 0.5, end - 0.5
    length = end - start if half else op.Max(end - start, 1)
    step = length / bins
    if ratio > 0:
        most, points = op.constant(np.int64(ratio)), op.constant(np.full((1, 1, 1), ratio), x.dtype)
    else:
        points = op.Ceil(step)
        most = op.Cast(op.Max(op.ReduceMax(points, keepdims=0), 1), to=INT64)
    count = op.Max(points, 1)
    index = op.cast(arange(op, most), x.dtype)
    at = (
        start + op.constant(np.arange(bins)[:, None], x.dtype) * step + (index + 0.5) * step / count
    )
    exists = op.Expand(index < points, op.shape(at))
    inside = op.cast((at >= -1) & (at <= size), x.dtype)
    share = op.cast(exists, x.dtype) * inside / count
    return Points(op.Max(op.Min(at, size - 1), 0), share, inside, exists, size, pixels)


def _average(
    op: GraphBuilder, x: Value, batch: Value, dy: Value, rows: Points, columns: Points
) -> Value:
    images, channels, height, width = (axis_size(op, x, a) for a in range(4))
    left, right = (  # (regions, bins, pixels)
        op.ReduceSum(
            op.Relu(1 - op.Abs(op.Unsqueeze(p.at, [3]) - p.pixels)) * op.Unsqueeze(p.share, [3]),
            [2],
            keepdims=0,
        )
        for p in (rows, columns)
    )
    # (images, regions)
    own = op.Unsqueeze(arange(op, axis_size(op, x, 0)), [1]) == op.cast(
        op.Unsqueeze(batch, [0]), np.int64
    )
    left = op.Unsqueeze(op.cast(own, x.dtype), [2, 3]) * op.Unsqueeze(left, [0])
    left = op.Reshape(op.Transpose(left, perm=[0, 3, 1, 2]), concat_sizes(op, images, height, -1))
    # (regions, bins, channels, width)
    wide = op.Transpose(dy @ op.Unsqueeze(right, [1]), perm=[0, 2, 1, 3])
    wide = op.Reshape(wide, concat_sizes(op, op.shape(left, 2, 3), -1))
    return op.Transpose(
        op.Reshape(left @ wide, concat_sizes(op, images, height, channels, width)),
        perm=[0, 2, 1, 3],
    )


def _corners(op: GraphBuilder, points: Points) -> Candidates:
    """Every point as the two pixels it lies between."""
    low = op.Floor(points.at)
    t = points.at - low
    index = op.Concat(low, op.Min(low + 1, points.size - 1), axis=2)
    weight = op.Concat((1 - t) * points.inside, t * points.inside, axis=2)
    return Candidates(
        op.Cast(index, to=INT64), weight, op.Concat(points.exists, points.exists, axis=2)
    )


def _pixels(
    op: GraphBuilder, x: Value, rois: Value, axis: int, bins: int, scale: float
) -> Candidates:
    """The pixels between the rounded borders of every bin."""
    size = op.cast(axis_size(op, x, 2 + axis), x.dtype)
    start, end = (_rounded(op, _column(op, rois, i) * scale) for i in (2 - axis, 4 - axis))
    step = op.Max(end - start + 1, 1) / bins
    first, last = (
        op.Floor(step * op.constant(np.arange(bins), x.dtype)),
        op.Ceil(step * op.constant(np.arange(1, bins + 1), x.dtype)),
    )
    first, last = (
        op.Unsqueeze(op.Max(op.Min(edge + start, size), 0), [2]) for edge in (first, last)
    )
    most = op.Max(op.ReduceMax(last - first, keepdims=0), 1)
    index = first + op.cast(arange(op, op.Cast(most, to=INT64)), x.dtype)
    exists = index < last
    return Candidates(
        op.Cast(op.Max(op.Min(index, size - 1), 0), to=INT64), op.cast(exists, x.dtype), exists
    )


def _to_the_largest(
    op: GraphBuilder, x: Value, batch: Value, dy: Value, rows: Candidates, columns: Candidates
) -> Value:
    """Each dy times the weight of the largest weighted pixel of its bin, added up where that pixel
    is.
    """
    images, channels, height, width = (axis_size(op, x, a) for a in range(4))

    def lattice(row: Value, column: Value, op_type: str) -> Value:
        """(regions, bins, candidates) of (regions, row bins, 1, row candidates, 1) and (regions, 1,
        column bins, 1, column candidates).
        """
        both = getattr(op, op_type)(op.Unsqueeze(row, [2, 4]), op.Unsqueeze(column, [1, 3]))
        count = op.shape(row, 2, 3) * op.shape(column, 2, 3)
        return op.Reshape(
            both,
            concat_sizes(
                op, op.shape(row, 0, 1), op.shape(row, 1, 2) * op.shape(column, 1, 2), count
            ),
        )

    weight, exists = (
        lattice(rows.weight, columns.weight, "Mul"),
        lattice(rows.exists, columns.exists, "And"),
    )
    first = op.Unsqueeze(op.cast(batch, np.int64), [1, 2]) * (height * width)
    index = lattice(rows.index * width, columns.index, "Add") + first
    flat = op.Reshape(op.Transpose(x, perm=[0, 2, 3, 1]), concat_sizes(op, -1, channels))
    # (regions, bins, candidates, channels)
    read = op.Gather(flat, index, axis=0) * op.Unsqueeze(weight, [3])
    read = op.Where(op.Unsqueeze(exists, [3]), read, float(np.finfo(np.float32).min))
    won = op.ArgMax(read, axis=2, keepdims=0)  # (regions, bins, channels)
    arriving = op.Transpose(
        op.Reshape(dy, concat_sizes(op, op.shape(dy, 0, 2), -1)), perm=[0, 2, 1]
    )
    parts = op.Reshape(
        arriving * op.GatherElements(weight, won, axis=2), concat_sizes(op, -1, channels)
    )
    places = op.Reshape(op.GatherElements(index, won, axis=2), concat_sizes(op, -1, channels))
    summed = op.ScatterElements(zeros_like(op, flat), places, parts, axis=0, reduction="add")
    return op.Transpose(
        op.Reshape(summed, concat_sizes(op, images, height, width, channels)), perm=[0, 3, 1, 2]
    )


def _column(op: GraphBuilder, rois: Value, which: int) -> Value:
    return op.Gather(rois, op.constant(np.array([which])), axis=1)


def _rounded(op: GraphBuilder, x: Value) -> Value:
    """To the nearest whole number, halves away from zero."""
    return op.Sign(x) * op.Floor(op.Abs(x) + 0.5)
