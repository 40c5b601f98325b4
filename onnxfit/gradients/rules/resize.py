"""Resize: the transposed interpolation.

Resize is linear in x and works axis by axis, y = (M_1 x ... x M_d) x, so dx = (M_1^T x ... x M_d^T)
dy. The matrix of an axis depends on mode, coordinates, rounding, antialiasing and the version of
onnxruntime. This module does not repeat it, but reads it from the operator: M^T is the Resize of
the identity matrix. It depends only on sizes; if they are known, onnxruntime computes it once, as a
constant.

Two properties of the kernels matter: if no size changes, they copy, for any scales; and
keep_aspect_ratio_policy gives all axes one scale, which need not be output / input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.gradients.building import (
    axis_size,
    concat_sizes,
    constant_elements,
    elements_at,
    identity_matrix,
    int_vector,
    normalize_axes,
)
from onnxfit.gradients.table import InputGradient, NoGradientError, rule
from onnxfit.graph.values import GraphBuilder, Value

CROP = "tf_crop_and_resize"


@rule("Resize")
def resize(
    op: GraphBuilder, x: Value, roi: Value | None, scales: Value | None, sizes: Value | None,
    y: Value, dy: Value, *,
    mode: str, coordinate_transformation_mode: str, nearest_mode: str,
    keep_aspect_ratio_policy: str, axes: Sequence[int] | None, antialias: int,
    exclude_outside: int, cubic_coeff_a: float,
) -> tuple[InputGradient, ...]:  # fmt: skip
    if x.shape is None:
        raise NoGradientError(
            "the rank of its input is unknown", "use a model whose shapes can be inferred"
        )
    is_crop = coordinate_transformation_mode == CROP
    if antialias and is_crop:
        raise NoGradientError(
            "the kernels disagree on antialias with tf_crop_and_resize",
            "use another coordinate_transformation_mode",
        )
    if scales is not None and scales.shape == (0,):
        scales = None  # ONNX treats an empty vector as absent
    all_axes = normalize_axes(axes or None, x.rank)
    policy = keep_aspect_ratio_policy
    if scales is not None or len(all_axes) == 1:
        policy = "stretch"
    attributes = {
        "mode": mode,
        "coordinate_transformation_mode": coordinate_transformation_mode,
        "nearest_mode": nearest_mode,
        "antialias": antialias,
        "exclude_outside": exclude_outside,
        "cubic_coeff_a": cubic_coeff_a,
    }
    crop = roi if is_crop else None
    spec = ResizeSpec(x, y, crop, scales, sizes, all_axes, policy, attributes)

    def refused() -> Value:
        raise NoGradientError(
            "its roi and scales have no gradient",
            "freeze the weights from which roi and scales are computed",
        )

    interpolates = mode != "nearest"
    droi = refused if interpolates and crop is not None else None
    dscales = refused if interpolates else None
    return lambda: _input_gradient(op, spec, dy), droi, dscales, None


@dataclass(frozen=True)
class ResizeSpec:
    """Inputs, output and attributes of a Resize."""

    x: Value
    y: Value
    roi: Value | None  # of a crop
    scales: Value | None  # None if `sizes` decide
    sizes: Value | None  # a policy other than "stretch" may give y other sizes
    axes: list[int]  # the axes with entries in scales, sizes and roi
    policy: str
    attributes: dict[str, Any]

    @property
    def known_scales(self) -> npt.NDArray[Any] | None:
        """The scales if they are constants."""
        return constant_elements(self.scales)

    def lengths(self, axis: int) -> tuple[int | str | None, int | str | None]:
        """Return the sizes of an axis of x and y."""
        before = self.x.shape[axis] if self.x.shape else None
        after = self.y.shape[axis] if self.y.shape else None
        return before, after

    def keeps_size(self, axis: int) -> bool:
        """Whether an axis is known to keep its size."""
        before, after = self.lengths(axis)
        return before is not None and before == after

    def changed(self) -> list[int]:
        """Return the axes whose elements may change."""
        if all(self.keeps_size(axis) for axis in self.axes):
            return []
        if self.policy != "stretch":
            return self.axes
        if self.scales is None:
            return [axis for axis in self.axes if not self.keeps_size(axis)]
        scales = self.known_scales
        return [axis for i, axis in enumerate(self.axes) if scales is None or scales[i] != 1]

    def factor(self, axis: int) -> float | None:
        """Return the scale of an axis if it is known."""
        if self.known_scales is not None:
            return float(self.known_scales[self.axes.index(axis)])
        before, after = self.lengths(axis)
        if self.scales is not None or self.policy != "stretch":
            return None
        if isinstance(before, int) and isinstance(after, int) and before:
            return after / before
        return None

    def integer_factors(self) -> dict[int, int] | None:
        """Return the factors of changed axes; None unless all are known integers from 1."""
        factors: dict[int, int] = {}
        for axis in self.changed():
            factor = self.factor(axis)
            if factor is None or factor < 1 or factor != int(factor):
                return None
            factors[axis] = int(factor)
        return factors


def _input_gradient(op: GraphBuilder, spec: ResizeSpec, dy: Value) -> Value:
    factors = spec.integer_factors()
    if factors and _repeats_elements(spec, factors):
        return _sum_of_blocks(op, spec.x, dy, factors)
    dx = dy
    for axis in reversed(spec.changed()):
        dx = _multiply_along(op, _transposed_matrix(op, spec, axis), dx, axis)
    return dx


def _repeats_elements(spec: ResizeSpec, factors: dict[int, int]) -> bool:
    """Whether enlarging by integers writes every element that many times, side by side."""
    coordinates = spec.attributes["coordinate_transformation_mode"]
    rounding = spec.attributes["nearest_mode"]
    if spec.attributes["mode"] != "nearest":
        return False
    if coordinates in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel"):
        return bool(rounding.startswith("round"))
    doubles = rounding == "round_prefer_floor" and set(factors.values()) == {2}
    return coordinates == "asymmetric" and (rounding == "floor" or doubles)


def _sum_of_blocks(op: GraphBuilder, x: Value, dy: Value, factors: dict[int, int]) -> Value:
    """Return the gradient of repeated elements: the sum of their copies."""
    shape: list[Value] = []
    block_axes: list[int] = []
    for axis in range(x.rank):
        shape.append(axis_size(op, x, axis))
        if axis in factors:
            block_axes.append(len(shape))
            shape.append(int_vector(op, factors[axis]))
    return op.ReduceSum(op.Reshape(dy, concat_sizes(op, *shape)), block_axes, keepdims=0)


# The matrix of an axis
# ------------------------------------------------------------------------------------------------


def _transposed_matrix(op: GraphBuilder, spec: ResizeSpec, axis: int) -> Value:
    """Return (input, output): how the elements of x along an axis contribute to those of y.

    It is a batch of resized unit vectors, as images (n, 1, 1, n). If other axes matter, the images
    have these axes as well, and only the first line of each image is read.
    """
    n = axis_size(op, spec.x, axis)
    units = identity_matrix(op, n, spec.x.dtype)
    beside = [a for a in spec.axes if a != axis] if spec.policy != "stretch" else []
    between = list(range(2, 2 + max(len(beside), 1)))
    last = 2 + len(between)
    units = op.Unsqueeze(units, [1, *between])
    if beside:
        others = [axis_size(op, spec.x, a) for a in beside]
        units = op.Expand(units, concat_sizes(op, n, 1, *others, n))
    resized_axes: list[int] = []  # of the images, in addition to the last one
    scales = sizes = None
    if beside and spec.sizes is not None:
        resized_axes = between
        sizes = elements_at(op, spec.sizes, [spec.axes.index(a) for a in (*beside, axis)])
    elif spec.scales is None:
        sizes = axis_size(op, spec.y, axis)
    else:
        scales = elements_at(op, spec.scales, [spec.axes.index(axis)])
        if _may_keep_size(spec, axis):
            resized_axes = between
            scales = op.Concat(_scale_unless_copied(op, spec), scales, axis=0)
    resized = op.Resize(
        units,
        _roi_of_units(op, spec, axis, len(resized_axes)),
        scales,
        sizes,
        axes=[*resized_axes, last],
        keep_aspect_ratio_policy=spec.policy,
        **spec.attributes,
    )  # extrapolated values are constants: their derivative, 0, is the default
    if resized_axes:
        count = len(resized_axes)
        resized = op.Slice(resized, [0] * count, [1] * count, resized_axes)
    return op.Squeeze(resized, [1, *between])


def _roi_of_units(op: GraphBuilder, spec: ResizeSpec, axis: int, other_axes: int) -> Value | None:
    """Return the crop of an axis, behind `other_axes` axes that are not cropped."""
    if spec.roi is None:
        return None
    i = spec.axes.index(axis)
    start = elements_at(op, spec.roi, [i])
    end = elements_at(op, spec.roi, [i + len(spec.axes)])
    if not other_axes:
        return op.Concat(start, end, axis=0)
    zeros = op.constant(np.full(other_axes, 0, spec.roi.dtype))
    ones = op.constant(np.full(other_axes, 1, spec.roi.dtype))
    return op.Concat(zeros, start, ones, end, axis=0)


def _may_keep_size(spec: ResizeSpec, axis: int) -> bool:
    """Whether a scale might keep the size of an axis, so that Resize would copy that axis alone."""
    before, after = spec.lengths(axis)
    if isinstance(before, int) and isinstance(after, int):
        return before == after
    scales = spec.known_scales
    return scales is None or 0.5 < scales[spec.axes.index(axis)] < 2


def _scale_unless_copied(op: GraphBuilder, spec: ResizeSpec) -> Value:
    """Return a scale for an axis of one element: 1 if x was copied as a whole, else 2.

    With it, the unit vectors are copied if x was copied, and resized if x was resized.
    """
    same_sizes = op.shape(spec.x) == op.shape(spec.y)
    copied = op.ReduceMin(op.Cast(same_sizes, to=int(ir.DataType.FLOAT)), keepdims=1)
    return 2 - copied


def _multiply_along(op: GraphBuilder, matrix: Value, dy: Value, axis: int) -> Value:
    """Return matrix @ dy along an axis."""
    axes_behind = dy.rank - 1 - axis
    if axes_behind == 1 or (axis == 0 and not axes_behind):
        return matrix @ dy
    if not axes_behind:
        return dy @ op.Transpose(matrix, perm=[1, 0])
    flat = op.Reshape(dy, concat_sizes(op, op.shape(dy, 0, axis + 1), -1))
    shape = [op.shape(dy, 0, axis)] if axis else []
    shape += [axis_size(op, matrix, 0), op.shape(dy, axis + 1)]
    return op.Reshape(matrix @ flat, concat_sizes(op, *shape))
