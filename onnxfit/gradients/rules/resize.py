"""Resize: the transposed interpolation.

Resize is linear in x and works axis by axis, y = (M_1 x ... x M_d) x, so dx = (M_1^T x ... x M_d^T)
dy. What the matrix of an axis is depends on mode, coordinates, rounding, antialiasing and the
version of the runtime. It is not written down here a second time, but read off the operator: M^T is
what Resize makes of the identity matrix. That depends on sizes only; where they are known, the
runtime computes it once, as a constant.

Two habits of the kernels are minded: where no size changes at all they copy, whatever the scales;
and keep_aspect_ratio_policy gives all axes one scale, which need not be output / input.
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
    elements_at,
    identity_matrix,
    int_vector,
    known,
    normalize_axes,
)
from onnxfit.gradients.table import InputGradient, NoGradientError, gradient
from onnxfit.graph.values import GraphBuilder, Value

CROP = "tf_crop_and_resize"


@gradient("Resize")
def resize(
    op: GraphBuilder, x: Value, roi: Value | None, scales: Value | None, sizes: Value | None, y: Value, dy: Value, *,
    mode: str, coordinate_transformation_mode: str, nearest_mode: str, keep_aspect_ratio_policy: str, axes: Sequence[int] | None,
    antialias: int, exclude_outside: int, cubic_coeff_a: float,
) -> tuple[InputGradient, ...]:  # fmt: skip
    if x.shape is None:
        raise NoGradientError(
            "the rank of its input is unknown", "a model whose shapes can be inferred"
        )
    if antialias and coordinate_transformation_mode == CROP:
        raise NoGradientError(
            "the kernels do not agree on antialias with tf_crop_and_resize",
            "another coordinate_transformation_mode",
        )
    if scales is not None and scales.shape == (0,):
        scales = None  # as good as absent
    along = normalize_axes(axes or None, x.rank)
    stretch = scales is not None or keep_aspect_ratio_policy == "stretch" or len(along) == 1
    asked = ResizeSpec(
        x, y, roi if coordinate_transformation_mode == CROP else None, scales, sizes, along,
        "stretch" if stretch else keep_aspect_ratio_policy,
        {
            "mode": mode, "coordinate_transformation_mode": coordinate_transformation_mode, "nearest_mode": nearest_mode,
            "antialias": antialias, "exclude_outside": exclude_outside, "cubic_coeff_a": cubic_coeff_a,
        },
    )  # fmt: skip

    def dx() -> Value:
        factors = asked.factors()
        if (
            factors
            and mode == "nearest"
            and _repeats(coordinate_transformation_mode, nearest_mode, factors)
        ):
            return _sum_of_blocks(op, x, dy, factors)
        found = dy
        for axis in reversed(asked.changed()):
            found = _apply(op, _transposed_matrix(op, asked, axis), found, axis)
        return found

    def refused() -> Value:
        raise NoGradientError(
            "what a crop or a scale does to the values is not differentiated",
            "freeze what roi and scales come from",
        )

    return (
        dx,
        None if mode == "nearest" or asked.roi is None else refused,
        None if mode == "nearest" else refused,
        None,
    )


@dataclass(frozen=True)
class ResizeSpec:
    """What a Resize was asked for."""

    x: Value
    y: Value
    roi: Value | None  # of a crop
    scales: Value | None  # else sizes decide
    sizes: Value | None  # y may have others, where a policy says so
    axes: list[int]  # what scales, sizes and roi are about
    policy: str
    attributes: dict[str, Any]

    @property
    def numbers(self) -> npt.NDArray[Any] | None:
        """The scales, where they are constants."""
        return known(self.scales)

    def lengths(self, axis: int) -> tuple[int | str | None, int | str | None]:
        """Before and after."""
        before, after = self.x.shape, self.y.shape
        return before[axis] if before else None, after[axis] if after else None

    def changed(self) -> list[int]:
        """The axes that may not stay what they are."""
        if all(_equal(*self.lengths(a)) for a in self.axes):
            return []
        if self.policy != "stretch":
            return self.axes
        if self.scales is None:
            return [a for a in self.axes if not _equal(*self.lengths(a))]
        return [a for i, a in enumerate(self.axes) if self.numbers is None or self.numbers[i] != 1]

    def factors(self) -> dict[int, int] | None:
        """The whole numbers by which axes grow, None where they do not or nobody knows."""
        found: dict[int, float] = {}
        for a in self.changed():
            before, after = self.lengths(a)
            if self.numbers is not None:
                found[a] = float(self.numbers[self.axes.index(a)])
            elif (
                self.scales is None
                and self.policy == "stretch"
                and isinstance(before, int)
                and isinstance(after, int)
                and before
            ):
                found[a] = after / before
            else:
                return None
        return (
            {a: int(f) for a, f in found.items()}
            if all(f >= 1 and f == int(f) for f in found.values())
            else None
        )


def _equal(before: int | str | None, after: int | str | None) -> bool:
    return before is not None and before == after


def _repeats(coordinates: str, rounding: str, factors: dict[int, int]) -> bool:
    """Whether growing by whole numbers writes every element that many times, side by side."""
    if coordinates in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel"):
        return rounding.startswith("round")
    twice = rounding == "round_prefer_floor" and set(factors.values()) == {2}
    return coordinates == "asymmetric" and (rounding == "floor" or twice)


def _sum_of_blocks(op: GraphBuilder, x: Value, dy: Value, factors: dict[int, int]) -> Value:
    """The gradient of repeated elements."""
    shape: list[Value] = []
    blocks: list[int] = []
    for axis in range(x.rank):
        shape.append(axis_size(op, x, axis))
        if axis in factors:
            blocks.append(len(shape))
            shape.append(int_vector(op, factors[axis]))
    return op.ReduceSum(op.Reshape(dy, concat_sizes(op, *shape)), blocks, keepdims=0)


def _transposed_matrix(op: GraphBuilder, asked: ResizeSpec, axis: int) -> Value:
    """How the elements of x along an axis contribute to those of y: (input, output), a batch of
    resized unit vectors.
    """
    x, y = asked.x, asked.y
    n = axis_size(op, x, axis)
    units = identity_matrix(op, n, x.dtype)
    # as images (n, 1, 1, n), or with the other axes where they have a say; their first line has all
    # that is asked for
    beside = [a for a in asked.axes if a != axis] if asked.policy != "stretch" else []
    between = list(range(2, 2 + max(len(beside), 1)))
    last = 2 + len(between)
    units = op.Unsqueeze(units, [1, *between])
    if beside:
        others = [axis_size(op, x, a) for a in beside]
        units = op.Expand(units, concat_sizes(op, n, 1, *others, n))
    moved: list[int] = []
    scales = sizes = None
    if beside and asked.sizes is not None:
        moved, sizes = (
            between,
            elements_at(op, asked.sizes, [asked.axes.index(a) for a in (*beside, axis)]),
        )
    elif asked.scales is None:
        sizes = axis_size(op, y, axis)
    else:
        scales = elements_at(op, asked.scales, [asked.axes.index(axis)])
        if _may_copy(asked, axis):
            moved, scales = between, op.Concat(_unless_copied(op, asked), scales, axis=0)
    roi = None
    if asked.roi is not None:
        i, count = asked.axes.index(axis), len(asked.axes)
        own = [elements_at(op, asked.roi, [i]), elements_at(op, asked.roi, [i + count])]
        whole = [op.constant(np.full(len(moved), v, asked.roi.dtype)) for v in (0, 1)]
        roi = (
            op.Concat(whole[0], own[0], whole[1], own[1], axis=0)
            if moved
            else op.Concat(*own, axis=0)
        )
    resized = op.Resize(
        units,
        roi,
        scales,
        sizes,
        axes=[*moved, last],
        keep_aspect_ratio_policy=asked.policy,
        **asked.attributes,
    )  # extrapolated values are constants: here they are 0
    if moved:
        resized = op.Slice(resized, [0] * len(moved), [1] * len(moved), moved)
    return op.Squeeze(resized, [1, *between])


def _may_copy(asked: ResizeSpec, axis: int) -> bool:
    """Whether a scale might leave the size of an axis as it is, so that the axis alone would be
    copied.
    """
    before, after = asked.lengths(axis)
    if isinstance(before, int) and isinstance(after, int):
        return before == after
    return asked.numbers is None or 0.5 < asked.numbers[asked.axes.index(axis)] < 2


def _unless_copied(op: GraphBuilder, asked: ResizeSpec) -> Value:
    """The scale for an axis of one element that has units copied where x was copied, and resized
    where it was not: 1 or 2.
    """
    copied = op.ReduceMin(
        op.Cast(op.shape(asked.x) == op.shape(asked.y), to=int(ir.DataType.FLOAT)), keepdims=1
    )
    return 2 - copied


def _apply(op: GraphBuilder, matrix: Value, dy: Value, axis: int) -> Value:
    """matrix @ dy along an axis."""
    behind = dy.rank - 1 - axis
    if (not axis and not behind) or behind == 1:
        return matrix @ dy
    if not behind:
        return dy @ op.Transpose(matrix, perm=[1, 0])
    flat = op.Reshape(dy, concat_sizes(op, op.shape(dy, 0, axis + 1), -1))
    shape = [
        *([op.shape(dy, 0, axis)] if axis else []),
        axis_size(op, matrix, 0),
        op.shape(dy, axis + 1),
    ]
    return op.Reshape(matrix @ flat, concat_sizes(op, *shape))
