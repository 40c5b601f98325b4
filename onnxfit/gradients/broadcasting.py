"""Zeros like a value, and the gradient of broadcasting."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxfit.graph.values import GraphBuilder, Value

# Up to this number of rows, a sum over rows is computed as a product with a row of ones. The row is
# a constant with that many elements.
MAX_SUMMED_ROWS = 1 << 20


def zeros_like(op: GraphBuilder, x: Value) -> Value:
    """Return zeros in the shape and type of a value."""
    return op.Expand(op.constant(0, x.dtype), op.shape(x))


def reduce_to(op: GraphBuilder, dx: Value, x: Value) -> Value:
    """Return `dx`, of the shape that x was broadcast to, summed to the shape of x."""
    known = dx.ir.shape
    if known is not None and known == x.ir.shape and None not in known.dims:
        return dx
    shape = dx.shape
    target = x.shape
    if shape is not None and target is not None and _broadcast_is_known(target, shape):
        extra = len(shape) - len(target)
        axes = [
            *range(extra),
            *(i + extra for i, d in enumerate(target) if d == 1 and shape[i + extra] != 1),
        ]
        rows = [d for d in shape[: len(axes)] if isinstance(d, int)]
        if not axes:
            return dx
        if all(shape[axis] == 1 for axis in axes):  # leading axes of size 1 that x lacks
            return op.Reshape(dx, op.shape(x))
        if (
            axes == list(range(len(axes)))
            and len(axes) == len(rows) < len(shape)
            and math.prod(rows) <= MAX_SUMMED_ROWS
        ):
            matrix = dx if len(shape) == 2 else op.Reshape(dx, [math.prod(rows), -1])
            total = sum_of_rows(op, matrix)
            return total if len(target) == 1 else op.Reshape(total, op.shape(x))
        dx = op.ReduceSum(dx, op.constant(np.array(axes, np.int64)), keepdims=int(extra == 0))
        return dx if extra in (0, len(axes)) else op.Reshape(dx, op.shape(x))
    # Sum over the axes of size 1 in x. For an axis that was not broadcast, this changes nothing.
    missing = op.Shape(op.Shape(dx)) - op.Shape(op.Shape(x))
    padded = op.Concat(op.ConstantOfShape(missing, value=ir.tensor([1])), op.shape(x), axis=0)
    axes_ = op.Reshape(op.NonZero(padded == op.constant(np.int64(1))), [-1])
    return op.Reshape(op.ReduceSum(dx, axes_, keepdims=1, noop_with_empty_axes=1), op.shape(x))


def _broadcast_is_known(x: Sequence[int | str | None], y: Sequence[int | str | None]) -> bool:
    """Return whether the axes along which x was broadcast to y are known from the shapes."""
    return all(
        isinstance(d, int) or (d == e and d is not None) for d, e in zip(x, y[len(y) - len(x) :])
    )


def sum_of_rows(op: GraphBuilder, matrix: Value) -> Value:
    """Return the sum of the rows, as a product with a row of ones.

    The product takes 0.1 to 0.7 of the time of ReduceSum.
    """
    rows = None if matrix.shape is None else matrix.shape[0]
    if not isinstance(rows, int) or rows > MAX_SUMMED_ROWS:
        return op.ReduceSum(matrix, [0], keepdims=0)
    return op.MatMul(op.constant(np.ones(rows, matrix.dtype)), matrix)
