"""A product of matrices whose factors, result and addends are views, and the kernel for it.

All of them share nested loops: over the products of a batch, over the rows and columns of the
result, and over the steps, whose products are added. A value has a stride for each loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx

from onnxfit.kernels.search import make_node
from onnxfit.kernels.views import Axis, Loop, Part, View, axis_of, joined, loops_over

BATCH_AXES = 3  # as in kernels/src/product.h
MAX_ADDENDS = 2  # as there
# Measured on one thread (onnxruntime 1.19.2, AVX-512), for a product without anything around it:
# the kernel takes 1.0 to 1.07 of the time of the operator from 2^20 products of numbers on, 1.0 to
# 1.2 from 2^18 on, and below up to 1.4; with 8 columns and steps, 1.7 to 2.3. An operator less,
# such as a Transpose, makes up for some percent.
MIN_PRODUCTS = 2**18
MIN_PRODUCTS_ALONE = 2**23  # without another operator less
MIN_SIDE = 16  # of rows, columns and steps
MIN_USED = 0.7  # of the numbers of a tile that are there
TILE = 8, 16  # rows and columns, as with AVX-512


def is_faster(*sizes: int, is_alone: bool) -> bool:
    """Return whether the kernel is about as fast as onnxruntime, or faster.

    - `sizes`: (batch ..., rows, columns, steps).
    - `is_alone`: whether it is in the place of one operator.
    """
    *_, rows, columns, steps = sizes
    used = math.prod(size / (-(-size // n) * n) for size, n in zip((rows, columns), TILE))
    products = MIN_PRODUCTS_ALONE if is_alone else MIN_PRODUCTS
    return (
        min(rows, columns, steps) >= MIN_SIDE and used >= MIN_USED and math.prod(sizes) >= products
    )


@dataclass(frozen=True)
class Result:
    """A value that a kernel can write instead of a product: a view of it, a sum, or a Relu."""

    name: str
    view: View  # of the product
    scale: float = 1.0
    addends: tuple[View, ...] = ()  # with the axes of the product
    has_relu: bool = False

    def placed(self, name: str, strides: Sequence[int], shape: Sequence[int]) -> View | None:
        """Return a value with the axes of the product, whose shape is given.

        - `strides`: those of the value along the axes of this result.
        """
        parts: list[tuple[int, Part]] = []
        for axis, stride in zip(self.view.axes, strides):
            for part in reversed(axis):
                parts.append((part.stride, Part(part.size, stride)))
                stride *= part.size
        parts.sort(reverse=True)  # as in the memory of the product
        return View(name, (tuple(part for _, part in parts),)).reshaped(shape)


@dataclass(frozen=True)
class StridedProduct:
    """The loops of a product. Their strides are those of a, b, the result and the addends."""

    views: Sequence[View]
    batch: tuple[Loop, ...]
    rows: Loop
    columns: Loop
    steps: Loop

    @classmethod
    def of(cls, shape: Sequence[int], views: Sequence[View]) -> StridedProduct | None:
        """Return a product of matrices; None if no loops fit all of its values.

        - `shape`: (batch ..., rows, columns).
        - `views`: a (batch ..., rows, steps), b (batch ..., steps, columns), which may lack axes of
          the batch, the result, and the addends.
        """
        a, b, *values = views
        *batch, rows, columns = shape
        axes_a, axes_b = _with_batch(a, batch), _with_batch(b, batch)
        steps = math.prod(part.size for part in axes_a[-1])
        # The axes of all are (batch ..., rows, columns, steps).
        nested = [
            (*axes_a[:-1], axis_of(columns, 0), axes_a[-1]),
            (*axes_b[:-2], axis_of(rows, 0), axes_b[-1], axes_b[-2]),
            *((*value.axes, axis_of(steps, 0)) for value in values),
        ]
        loops = [loops_over(axes) for axes in zip(*nested)]
        if None in loops:
            return None
        *outer, inner_columns, inner_steps = (loop or [] for loop in loops)
        of_rows = joined(each for axis in outer for each in axis)
        of_columns, of_steps = joined(inner_columns), joined(inner_steps)
        candidates = [loop for loop in of_rows if loop.strides[1] == 0]  # b has no rows
        if not candidates or len(of_columns) != 1 or len(of_steps) != 1:
            return None
        longest = max(candidates)
        of_rows.remove(longest)
        product = cls(views, tuple(of_rows), longest, of_columns[0], of_steps[0])
        return product if of_columns[0].strides[2] == 1 else product._transposed()

    def _transposed(self) -> StridedProduct:
        """Return y' = b' a' instead of y = a b."""
        a, b, *others = self.views

        def swapped(loop: Loop) -> Loop:
            of_a, of_b, *strides = loop.strides
            return Loop(loop.size, (of_b, of_a, *strides))

        return replace(
            self,
            views=(b, a, *others),
            batch=tuple(map(swapped, self.batch)),
            rows=swapped(self.columns),
            columns=swapped(self.rows),
            steps=swapped(self.steps),
        )

    @property
    def has_kernel(self) -> bool:
        """Whether the kernel can compute the product, and copies no number by itself."""
        a, b, *others = zip(*(loop.strides for loop in (self.rows, self.columns, self.steps)))
        are_adjacent = all(strides[1] == 1 for strides in others)  # the columns
        has_rows = all(1 in strides for strides in (a, b))  # else it is read number by number
        return len(self.batch) <= BATCH_AXES and are_adjacent and has_rows

    def node(
        self, name: str, result: Result, shape: Sequence[int], precision: int = 0
    ) -> onnx.NodeProto:
        """Return the node of the kernel.

        - `shape`: that of the result in memory.
        - `precision`: a number of product::Precision in kernels/src/product.h; 0 is float32.
        """
        a, b, _, *addends = self.views
        none = Loop(1, (0,) * len(self.views))
        batch = (*[none] * (BATCH_AXES - len(self.batch)), *self.batch)
        of_matrices = [
            (self.rows, self.steps),
            (self.steps, self.columns),
            *[(self.rows, self.columns)] * (1 + len(addends)),
        ]
        strides = [
            [loop.strides[i] for loop in (*batch, *matrix)] for i, matrix in enumerate(of_matrices)
        ]
        of_result = strides.pop(2)
        inputs = (a, b, *addends)
        optional: dict[str, Any] = {"precision": precision} if precision else {}
        return make_node(
            "Product",
            [view.source for view in inputs],
            [result.name],
            name,
            sizes=[loop.size for loop in (*batch, self.rows, self.columns, self.steps)],
            views=[n for view, each in zip(inputs, strides) for n in (view.offset, *each)],
            strides=of_result,
            shape=shape,
            alpha=a.scale * b.scale * result.scale,
            has_relu=int(result.has_relu),
            **optional,
        )


def _with_batch(view: View, sizes: Sequence[int]) -> tuple[Axis, ...]:
    """Return the axes of a matrix with those of the batch, along which it may be repeated."""
    *batch, rows, columns = view.axes
    missing: list[Axis] = [()] * (len(sizes) - len(batch))
    repeated = [axis or axis_of(size, 0) for axis, size in zip([*missing, *batch], sizes)]
    return (*repeated, rows, columns)
