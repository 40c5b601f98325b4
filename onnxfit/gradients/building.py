"""Helpers that several gradient rules share: constants, sizes, ranges, layouts, and their adjoints.

All of them prefer a constant to an operator: sizes that are known when the graph is built become
initializers, and only the others are computed when the graph runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Union

import numpy as np
import numpy.typing as npt

from onnxfit.gradients.blocker import TYPED
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.index import constant_of
from onnxfit.graph.values import GraphBuilder, Value

Ints = Sequence[int]
Integers = npt.NDArray[np.int64]

MICROSOFT = "com.microsoft"  # the domain of onnxruntime's own operators
INT64_MIN = int(np.iinfo(np.int64).min)  # as the end of a Slice with a negative step: the beginning
INT64_MAX = int(np.iinfo(np.int64).max)  # as the end of a Slice: the end of the axis

Problem = TypeVar("Problem")


@dataclass(frozen=True)
class Strategy(Generic[Problem]):
    """One way to compute a gradient, the problems it is used for, and the measured reason."""

    build: Callable[[GraphBuilder, Problem], Value]
    applies: Callable[[Problem], bool]
    reason: str


def choose_strategy(strategies: Iterable[Strategy[Problem]], problem: Problem) -> Strategy[Problem]:
    """Return the first strategy of a table that applies; the last one applies to all problems."""
    return next(strategy for strategy in strategies if strategy.applies(problem))


# Kinds of device without ScatterElements, without the Indices of MaxPool, and without MaxUnpool.
WITHOUT_SCATTER = frozenset({"npu", "webgpu"})
MAX_REPEATS = 3  # one Gather for each read of an element; with more reads, one scatter is faster

# Constants
# ------------------------------------------------------------------------------------------------


def constant_elements(value: Value | None) -> npt.NDArray[Any] | None:
    """Return the elements of a constant, or of a Cast of one; None for any other value."""
    if value is None:
        return None
    array = constant_of(value.ir)
    if array is not None:
        return array
    node = value.ir.producer()
    if node is None or node.domain or node.op_type not in ("Cast", "CastLike"):
        return None
    array = constant_of(node.inputs[0])
    is_typed = value.ir.dtype is not None
    return array.astype(value.dtype) if array is not None and is_typed else None


def known_int(value: Value) -> int | None:
    """Return the only element of a constant; None for a computed value."""
    array = constant_elements(value)
    return None if array is None else int(array.reshape(()))


def equality_mask(op: GraphBuilder, a: Value, b: Value) -> Value:
    """Return 1 where two tensors are equal, 0 elsewhere, in their type.

    In float32, a difference below 1e-38 gives a number between 0 and 1, and that of two equal
    infinities gives NaN.
    """
    if a.dtype != np.float32:  # HardSigmoid has no kernels for some types
        return op.cast(a == b, a.dtype)
    # 0 becomes 1, and anything else 0. A Cast would use one thread only.
    return op.HardSigmoid(op.Abs(a - b), alpha=-1e38, beta=1.0)


def int_vector(op: GraphBuilder, *numbers: int) -> Value:
    """Return an int64 constant of one axis."""
    return op.constant(np.array(numbers, np.int64))


def elements_at(op: GraphBuilder, vector: Value, indices: Ints) -> Value:
    """Return the elements of a vector at `indices`; a constant if the vector is one."""
    array = constant_elements(vector)
    if array is not None:
        return op.constant(array[list(indices)])
    return op.Gather(vector, op.constant(np.array(indices, np.int64)), axis=0)


# Sizes and axes
# ------------------------------------------------------------------------------------------------


def static_shape(x: Value) -> tuple[int, ...] | None:
    """Return the shape of a value if all its sizes are known, else None."""
    sizes = tuple(d for d in x.shape or () if isinstance(d, int))
    return sizes if x.shape is not None and len(sizes) == len(x.shape) else None


def spatial_shape(x: Value) -> tuple[int, ...] | None:
    """Return the sizes behind the batch and channel axes if all are known, else None."""
    sizes = tuple(d for d in (x.shape or ())[2:] if isinstance(d, int))
    return sizes if x.shape is not None and len(sizes) == x.rank - 2 else None


def static_size(x: Value) -> int | None:
    """Return the number of elements of a value if its shape is known, else None."""
    sizes = static_shape(x)
    return None if sizes is None else math.prod(sizes)


def require_rank(x: Value) -> int:
    """Return the number of axes of a value. NoGradientError: the shape is unknown."""
    if x.shape is None:
        raise NoGradientError(f"the rank of {x.name!r} is unknown", TYPED)
    return x.rank


def require_ints(minimum: int, **attributes: Any) -> None:
    """Raise NoGradientError for an attribute that is absent, no integer, or below the minimum.

    ONNX's checker does not look at the attributes of onnxruntime's operators.
    """
    for name, value in attributes.items():
        if not isinstance(value, int) or value < minimum:
            raise NoGradientError(
                f"its attribute {name} is {value!r}", f"use an integer {name} of at least {minimum}"
            )


def normalize_axes(axes: Iterable[int] | None, rank: int) -> list[int]:
    """Return axes counted from the first one; all axes for None."""
    return list(range(rank)) if axes is None else [int(axis) % rank for axis in axes]


def axis_size(op: GraphBuilder, x: Value, axis: int) -> Value:
    """Return the size of one axis as an int64 vector of one element."""
    return op.shape(x, axis, axis + 1 or None)


def trailing_size(op: GraphBuilder, x: Value, axis: int) -> Value | int:
    """Return the number of elements of the axes from `axis` on: an int, or a scalar of x's type."""
    sizes = [] if x.shape is None else [d for d in x.shape[axis:] if isinstance(d, int)]
    if x.shape is not None and len(sizes) == len(x.shape[axis:]):
        return math.prod(sizes)
    return op.cast(op.ReduceProd(op.shape(x, axis), keepdims=0), x.dtype)


def concat_sizes(op: GraphBuilder, *sizes: Union[Value, int]) -> Value:
    """Concatenate int64 vectors and numbers; the result is a constant if all of them are."""
    vectors = [s if isinstance(s, Value) else int_vector(op, s) for s in sizes]
    arrays = [constant_elements(v) for v in vectors]
    constants = [a for a in arrays if a is not None]
    if len(constants) == len(vectors):
        return op.constant(np.concatenate(constants))
    return op.Concat(*vectors, axis=0) if len(vectors) > 1 else vectors[0]


# New tensors
# ------------------------------------------------------------------------------------------------


def zeros(op: GraphBuilder, like: Value, shape: Value) -> Value:
    """Return zeros in `shape`, of the type of `like`."""
    return op.Expand(op.constant(0, like.dtype), shape)


def arange(op: GraphBuilder, count: Value) -> Value:
    """Return 0, 1, ..., count - 1; `count` is a scalar or a vector of one element."""
    stop = count if count.rank == 0 else op.Squeeze(count, [0])
    return op.Range(op.constant(np.int64(0)), stop, op.constant(np.int64(1)))


def identity_matrix(op: GraphBuilder, size: Value, dtype: npt.DTypeLike) -> Value:
    """Return the identity matrix; `size` is a vector of one element."""
    return op.EyeLike(op.Expand(op.constant(0, dtype), concat_sizes(op, size, size)))


def element_numbers(op: GraphBuilder, x: Value, count: Value | None = None) -> Value:
    """Return a tensor in the shape of x whose elements count 0, 1, ... row by row.

    `count` is the number of elements, if the caller has already computed it.
    """
    numbers = arange(op, op.Size(x) if count is None else count)
    return op.Reshape(numbers, op.shape(x), allowzero=1)


# Layouts
# ------------------------------------------------------------------------------------------------


def reshape_like(op: GraphBuilder, value: Value, x: Value) -> Value:
    """Reshape `value` to the shape of `x`; with a constant shape if at most one size is unknown."""
    if x.shape is not None:
        if value.shape == x.shape and all(isinstance(d, int) for d in x.shape):
            return value
        unknown = [d for d in x.shape if not isinstance(d, int)]
        if len(unknown) <= 1 and 0 not in x.shape:
            return op.Reshape(
                value, int_vector(op, *(d if isinstance(d, int) else -1 for d in x.shape))
            )
    return op.Reshape(value, op.shape(x), allowzero=1)


def align_to_axis(op: GraphBuilder, vector: Value, axis: int, rank: int) -> Value:
    """Reshape a vector so that it broadcasts along `axis` of a tensor with `rank` axes."""
    return op.Reshape(vector, int_vector(op, -1, *[1] * (rank - axis - 1)))


def per_channel(op: GraphBuilder, vector: Value, x: Value) -> Value:
    """Reshape a vector of channels so that it broadcasts against x `(batch, channels, ...)`."""
    return align_to_axis(op, vector, 1, x.rank) if x.rank > 2 else vector


def transpose_matrices(op: GraphBuilder, x: Value) -> Value:
    """Swap the last two axes. NoGradientError: the rank is unknown."""
    rank = require_rank(x)
    return op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def pad_axis(op: GraphBuilder, x: Value, axis: int, before: int, after: int) -> Value:
    """Add zeros before and after the elements of one axis; negative numbers remove elements."""
    if before == after == 0:
        return x
    pads = np.zeros((2, x.rank), np.int64)
    pads[:, axis] = before, after
    return op.Pad(x, op.constant(pads.reshape(-1)))


def transposed_gather(
    op: GraphBuilder, dy: Value, indices: Integers, length: int, axis: int
) -> Value | None:
    """Return the gradient of reading constant `indices` (0 ... length - 1) along an axis.

    Indices without gaps become a Pad, others a Gather for each read of an element. None if an
    element was read more than MAX_REPEATS times: then a scatter is faster.
    """
    count = len(indices)
    if count and np.array_equal(indices, np.arange(indices[0], indices[0] + count)):
        return pad_axis(op, dy, axis, int(indices[0]), length - count - int(indices[0]))
    # Row k holds the positions in dy of the k-th read of each element. Elements with fewer reads
    # point to a zero, which is appended to dy at `count`.
    order = np.argsort(indices, kind="stable")
    first = np.searchsorted(indices[order], indices[order])
    repeat = np.arange(count) - first
    if repeat.max(initial=0) >= MAX_REPEATS:
        return None
    rows = np.full((repeat.max(initial=0) + 1, length), count, np.int64)
    rows[repeat, indices[order]] = order
    padded = pad_axis(op, dy, axis, 0, 1) if (rows == count).any() else dy
    summands = [op.Gather(padded, op.constant(row), axis=axis) for row in rows]
    return summands[0] if len(summands) == 1 else op.Sum(*summands)
