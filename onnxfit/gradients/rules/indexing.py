"""Operators that read or write elements at computed indices.

The gradient of an element that was read is added at its index: the gradient of a Gather is a
scatter with "add", that of a scatter is a Gather. Elements that tie for a maximum share the
gradient evenly, as in PyTorch's `scatter_reduce`.

onnxruntime's ScatterND adds from several threads without a lock (1.19.2 and 1.31.1 alike) if it
adds more than 210 000 elements, and then loses updates of a repeated index. ScatterElements uses
one thread, but takes 5 ns per element, seven times as long as ScatterND. So each ScatterND adds at
most MAX_SCATTER_ND_ELEMENTS.
"""

from __future__ import annotations

from typing import Union

import numpy as np

from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.building import (
    WITHOUT_SCATTER,
    align_to_axis,
    arange,
    axis_size,
    concat_sizes,
    constant_elements,
    element_numbers,
    int_vector,
    require_rank,
    reshape_like,
    static_shape,
    static_size,
    transposed_gather,
    zeros,
)
from onnxfit.gradients.notes import GATHER_DX, GATHER_DY, noted
from onnxfit.gradients.table import Gradients, NoGradientError, decompose, rule
from onnxfit.graph.values import GraphBuilder, Value

MAX_SCATTER_ND_ELEMENTS = 2**17  # added by one ScatterND in one thread
MAX_SCATTER_NDS = 16  # in sequence; ScatterElements is faster than more
MAX_COPIED_ELEMENTS = 2**22  # in all: every ScatterND copies the tensor that it adds to
MIN_ROW_ELEMENTS = 64  # from which searching equal indices pays

# Reading
# --------------------------------------------------------------------------------------------------


@rule("Gather")
def gather(
    op: GraphBuilder, x: Value, indices: Value, y: Value, dy: Value, *, axis: int
) -> Gradients:
    axis = axis % x.rank
    slices = _with_one_index_axis(op, x, indices, dy, axis)
    constant_indices = constant_elements(indices)
    size = None if x.shape is None else x.shape[axis]
    if constant_indices is not None and isinstance(size, int):
        positive = np.where(constant_indices < 0, constant_indices + size, constant_indices)
        dx = transposed_gather(op, slices, positive.reshape(-1), size, axis)
        if dx is not None:
            return dx, None
    if op.device == "npu" and static_size(slices):  # no scatter
        return _sum_by_product(op, x, indices, slices, axis), None
    vector = op.cast(indices, np.int64)
    if indices.rank != 1:
        vector = op.Reshape(vector, int_vector(op, -1))
    if axis:
        return _add_along_axis(op, x, vector, slices, axis), None
    dx = noted(
        lambda: _add_rows(op, x, vector, slices),
        {GATHER_DY: slices},
        GATHER_DX,
        [indices.name],
    )
    return dx, None


def _add_along_axis(op: GraphBuilder, x: Value, indices: Value, slices: Value, axis: int) -> Value:
    """Add slices at indices along an axis to zeros in the shape of x."""
    aligned = align_to_axis(op, indices, axis, x.rank)
    of_each_element = op.Expand(aligned, op.shape(slices))
    zero = zeros(op, slices, op.shape(x))
    return op.ScatterElements(zero, of_each_element, slices, axis=axis, reduction="add")


def _sum_by_product(op: GraphBuilder, x: Value, indices: Value, slices: Value, axis: int) -> Value:
    """Add slices at indices along an axis by a product with zeros and ones."""
    size = axis_size(op, x, axis)
    numbers = op.cast(op.Unsqueeze(arange(op, size), [1]), np.int32)
    vector = _from_start(op, op.Reshape(op.cast(indices, np.int32), int_vector(op, 1, -1)), size)
    is_read = op.cast(vector == numbers, slices.dtype)
    rows = concat_sizes(op, op.shape(slices, 0, axis + 1), int_vector(op, -1))
    return op.Reshape(is_read @ op.Reshape(slices, rows), op.shape(x))


def _add_rows(op: GraphBuilder, x: Value, indices: Value, rows: Value) -> Value:
    """Add rows at indices to zeros in the shape of x."""
    if op.device == "webgpu":  # which has no ScatterElements
        return op.ScatterND(
            zeros(op, rows, op.shape(x)), op.Unsqueeze(indices, [1]), rows, reduction="add"
        )
    dx = None if static_shape(rows) is None else _add_static_rows(op, x, indices, rows)
    return _add_along_axis(op, x, indices, rows, 0) if dx is None else dx


def _add_static_rows(op: GraphBuilder, x: Value, indices: Value, rows: Value) -> Value | None:
    """Add rows of known sizes at indices to zeros in the shape of x, by ScatterND.

    None if ScatterElements is faster. For a table of 1000 x 128 and 1024 indices, ScatterND takes
    0.08 ms and ScatterElements 0.75 ms; for 30000 x 256, it takes 3.7 ms and ScatterElements 5 to
    7 ms (the zeros alone take 3.4 ms).
    """
    sizes = static_shape(rows) or (0,)
    table = static_shape(x)
    if _adds_in_one_thread(rows):
        zero = zeros(op, rows, op.shape(x))
        return op.ScatterND(zero, op.Unsqueeze(indices, [1]), rows, reduction="add")
    count = sizes[0]
    width = int(np.prod(sizes[1:]))
    rows_per_scatter = max(MAX_SCATTER_ND_ELEMENTS // width, 1)
    scatters = -(-count // rows_per_scatter)
    if scatters > MAX_SCATTER_NDS or table is None:
        return None
    last = count - rows_per_scatter * (scatters - 1)
    split = int_vector(op, *[rows_per_scatter] * (scatters - 1), last)

    def add_all(total: Value, row_indices: Value) -> Value:
        columns = op.Split(op.Unsqueeze(row_indices, [1]), split, _outputs=scatters, axis=0)
        chunks = op.Split(rows, split, _outputs=scatters, axis=0)
        for column, chunk in zip(columns, chunks):
            total = op.ScatterND(total, column, chunk, reduction="add")
        return total

    if scatters * int(np.prod(table)) <= MAX_COPIED_ELEMENTS:
        return add_all(zeros(op, rows, op.shape(x)), indices)
    if width < MIN_ROW_ELEMENTS:
        return None
    # Every ScatterND would copy the large table. So the rows of equal indices are added up in a
    # smaller tensor, which is written to the table once; Mod makes -1 and the last index equal.
    unique, _, inverse = op.Unique(op.Mod(indices, table[0]), _outputs=3)
    sums = add_all(zeros(op, rows, concat_sizes(op, op.Shape(unique), op.shape(x, 1))), inverse)
    return op.ScatterND(zeros(op, rows, op.shape(x)), op.Unsqueeze(unique, [1]), sums)


def _adds_in_one_thread(updates: Value) -> bool:
    """Whether ScatterND adds these updates in one thread, without losing any."""
    elements = static_size(updates)
    return elements is not None and elements <= MAX_SCATTER_ND_ELEMENTS


def _with_one_index_axis(op: GraphBuilder, x: Value, indices: Value, dy: Value, axis: int) -> Value:
    """Reshape the gradient of a Gather with indices of any rank as if they were a vector."""
    if indices.rank == 1:
        return dy
    if indices.rank == 0:
        return op.Unsqueeze(dy, [axis])
    index_sizes = constant_elements(op.shape(indices))
    if index_sizes is None:
        count = op.Reshape(op.Size(indices), int_vector(op, 1))
    else:
        count = op.constant(index_sizes.prod(keepdims=True))
    sizes = [count]
    if axis:
        sizes.insert(0, op.shape(x, 0, axis))
    if axis + 1 < x.rank:
        sizes.append(op.shape(x, axis + 1))
    return op.Reshape(dy, concat_sizes(op, *sizes), allowzero=1)


@rule("GatherElements")
def gather_elements(
    op: GraphBuilder, x: Value, indices: Value, y: Value, dy: Value, *, axis: int
) -> Gradients:
    if op.device in WITHOUT_SCATTER and indices.shape is not None and indices.shape[axis] == 1:
        return where_chosen(op, x, indices, dy, axis % x.rank), None
    zero = zeros(op, dy, op.shape(x))
    return op.ScatterElements(zero, indices, dy, axis=axis, reduction="add"), None


def where_chosen(op: GraphBuilder, x: Value, indices: Value, dy: Value, axis: int) -> Value:
    """Put dy at the only index of each line of x along an axis, in 32 bits."""
    from_start = _from_start(op, op.cast(indices, np.int32), axis_size(op, x, axis))
    numbers = op.cast(arange(op, axis_size(op, x, axis)), np.int32)
    is_chosen = from_start == align_to_axis(op, numbers, axis, x.rank)
    return op.Where(is_chosen, dy, op.constant(0, dy.dtype))


def _from_start(op: GraphBuilder, indices: Value, size: Value) -> Value:
    """Count int32 indices of an axis from its start: add its size to negative ones."""
    return op.Where(indices < np.int32(0), indices + op.cast(size, np.int32), indices)


@rule("GatherND")
def gather_nd(
    op: GraphBuilder, x: Value, indices: Value, y: Value, dy: Value, *, batch_dims: int
) -> Gradients:
    return _add_slices(op, x, _with_batch_indices(op, indices, batch_dims), dy), None


def _with_batch_indices(op: GraphBuilder, indices: Value, batch_dims: int) -> Value:
    """Prepend the indices of the batch axes, which GatherND omits."""
    columns = [indices]
    sizes = op.shape(indices, 0, indices.rank - 1)
    for axis in reversed(range(batch_dims)):
        numbers = arange(op, axis_size(op, indices, axis))
        column = align_to_axis(op, numbers, axis, indices.rank)
        columns.insert(0, op.Expand(column, concat_sizes(op, sizes, 1)))
    return op.Concat(*columns, axis=-1) if len(columns) > 1 else indices


def _add_slices(op: GraphBuilder, x: Value, indices: Value, dy: Value) -> Value:
    """Add dy at indices to zeros in the shape of x."""
    if _adds_in_one_thread(dy):
        return op.ScatterND(zeros(op, dy, op.shape(x)), indices, dy, reduction="add")
    flat = int_vector(op, -1)
    elements = op.Reshape(op.Size(x), flat)
    total = op.ScatterElements(
        zeros(op, dy, elements),
        op.Reshape(op.GatherND(element_numbers(op, x), indices), flat),
        op.Reshape(dy, flat),
        axis=0,
        reduction="add",
    )
    return op.Reshape(total, op.shape(x), allowzero=1)


@decompose("Compress")
def compress(op: GraphBuilder, x: Value, condition: Value, *, axis: int | None) -> Value:
    """A Gather of the indices at which the condition is true; without an axis, of the flattened
    tensor.
    """
    constant_condition = constant_elements(condition)
    flat = int_vector(op, -1)
    if constant_condition is None:
        selected = op.Reshape(op.NonZero(condition), flat)
    else:
        selected = op.constant(np.flatnonzero(constant_condition).astype(np.int64))
    if axis is None:
        return op.Gather(op.Reshape(x, flat), selected)
    return op.Gather(x, selected, axis=axis)


@rule("TopK", all_outputs=True)
def top_k(
    op: GraphBuilder,
    x: Value,
    k: Value,
    y: Value,
    indices: Value,
    dy: Value | None,
    dindices: Value | None,
    *,
    axis: int,
) -> Gradients:
    if dy is None:
        return None, None
    return op.ScatterElements(zeros(op, dy, op.shape(x)), indices, dy, axis=axis), None


@rule("Unique", all_outputs=True)
def unique(
    op: GraphBuilder,
    x: Value,
    y: Value,
    first: Value,
    inverse: Value,
    counts: Value,
    dy: Value | None,
    dfirst: Value | None,
    dinverse: Value | None,
    dcounts: Value | None,
    *,
    axis: int | None,
) -> Gradients:
    """Equal elements share the gradient of their unique value evenly."""
    if dy is None:
        return None
    divisors = op.cast(counts, dy.dtype)
    if axis is None:
        return reshape_like(op, op.Gather(dy / divisors, inverse), x)
    axis = axis % x.rank
    return op.Gather(dy / align_to_axis(op, divisors, axis, x.rank), inverse, axis=axis)


@rule("OneHot")
def one_hot(
    op: GraphBuilder, indices: Value, depth: Value, values: Value, y: Value, dy: Value, *, axis: int
) -> Gradients:
    """y is values[1] at the index, and values[0] elsewhere."""

    def of_values() -> Value:
        hot = dy * op.OneHot(indices, depth, op.constant(np.array([0, 1], dy.dtype)), axis=axis)
        sums = [op.Reshape(op.ReduceSum(v, keepdims=0), [1]) for v in (dy - hot, hot)]
        return op.Concat(*sums, axis=0)

    return None, None, of_values


@rule("Range")
def range_(
    op: GraphBuilder, start: Value, limit: Value, delta: Value, y: Value, dy: Value
) -> Gradients:
    """y_k = start + k delta; the limit only determines the number of elements."""

    def of_start() -> Value:
        return reshape_like(op, op.ReduceSum(dy, keepdims=0), start)

    def of_delta() -> Value:
        k = op.cast(arange(op, op.shape(dy)), dy.dtype)
        return reshape_like(op, op.ReduceSum(dy * k, keepdims=0), delta)

    return of_start, None, of_delta


# Writing
# --------------------------------------------------------------------------------------------------


@rule("ScatterElements")
def scatter_elements(
    op: GraphBuilder,
    x: Value,
    indices: Value,
    updates: Value,
    y: Value,
    dy: Value,
    *,
    axis: int,
    reduction: str,
) -> Gradients:
    return _scatter_gradients(_ElementIndices(op, indices, axis), x, updates, y, dy, reduction)


@rule("TensorScatter")
def tensor_scatter(
    op: GraphBuilder,
    past: Value,
    update: Value,
    write_indices: Value | None,
    y: Value,
    dy: Value,
    *,
    axis: int,
    mode: str,
) -> Gradients:
    """The update replaces elements of the past along `axis`, from an index for each row on."""

    def of_past() -> Value:
        return op.TensorScatter(dy, zeros_like(op, update), write_indices, axis=axis, mode=mode)

    def of_update() -> Value:
        rank = require_rank(past)
        along = axis % rank
        index = align_to_axis(op, arange(op, axis_size(op, update, along)), along, rank)
        if write_indices is not None:
            index = index + align_to_axis(op, write_indices, 0, rank)
        if mode == "circular":
            index = op.Mod(index, axis_size(op, past, along))
        return op.GatherElements(dy, op.Expand(index, op.shape(update)), axis=along)

    return of_past, of_update, None


@rule("ScatterND")
def scatter_nd(
    op: GraphBuilder,
    x: Value,
    indices: Value,
    updates: Value,
    y: Value,
    dy: Value,
    *,
    reduction: str,
) -> Gradients:
    return _scatter_gradients(_SliceIndices(op, indices), x, updates, y, dy, reduction)


class _ElementIndices:
    """The elements that ScatterElements writes: reads and writes at its indices."""

    def __init__(self, op: GraphBuilder, indices: Value, axis: int) -> None:
        self.op = op
        self.indices = indices
        self.axis = axis

    def read(self, x: Value) -> Value:
        return self.op.GatherElements(x, self.indices, axis=self.axis)

    def write(self, x: Value, updates: Value, reduction: str = "none") -> Value:
        return self.op.ScatterElements(
            x, self.indices, updates, axis=self.axis, reduction=reduction
        )


class _SliceIndices:
    """The slices that ScatterND writes: reads and writes at its indices."""

    def __init__(self, op: GraphBuilder, indices: Value) -> None:
        self.op = op
        self.indices = indices

    def read(self, x: Value) -> Value:
        return self.op.GatherND(x, self.indices)

    def write(self, x: Value, updates: Value, reduction: str = "none") -> Value:
        op = self.op
        if reduction == "none" or _adds_in_one_thread(updates):
            return op.ScatterND(x, self.indices, updates, reduction=reduction)
        flat = int_vector(op, -1)
        numbers = op.Reshape(op.GatherND(element_numbers(op, x), self.indices), flat)
        elements = op.Reshape(x, flat)
        new_elements = op.Reshape(updates, flat)
        written = op.ScatterElements(elements, numbers, new_elements, axis=0, reduction=reduction)
        return op.Reshape(written, op.shape(x), allowzero=1)


Indices = Union[_ElementIndices, _SliceIndices]


def _scatter_gradients(
    at: Indices, x: Value, updates: Value, y: Value, dy: Value, reduction: str
) -> Gradients:
    op = at.op
    if reduction == "none":
        return (
            lambda: at.write(dy, zeros(op, dy, op.shape(updates))),
            None,
            lambda: at.read(dy),
        )
    if reduction == "add":
        return lambda: dy, None, lambda: at.read(dy)
    if reduction == "mul":
        return (
            lambda: at.write(dy, updates, "mul"),
            None,
            lambda: _gradient_of_factors(at, x, updates, dy),
        )
    if reduction in ("max", "min"):
        x_is_extreme = op.cast(x == y, dy.dtype)
        update_is_extreme = op.cast(updates == at.read(y), dy.dtype)
        share = dy / at.write(x_is_extreme, update_is_extreme, "add")
        return lambda: share * x_is_extreme, None, lambda: at.read(share) * update_is_extreme
    raise NoGradientError(f"its reduction is {reduction!r}, expected none, add, mul, max or min")


def _gradient_of_factors(at: Indices, x: Value, updates: Value, dy: Value) -> Value:
    """dy times the product of the other factors at the same index, without dividing by zero."""
    op = at.op
    is_zero = updates == 0
    zero_mask = op.cast(is_zero, dy.dtype)
    nonzero = op.Where(is_zero, op.constant(1, dy.dtype), updates)
    product = at.read(dy * at.write(x, nonzero, "mul")) / nonzero
    zeros_at_index = at.read(at.write(zeros(op, dy, op.shape(x)), zero_mask, "add"))
    other_zeros = zeros_at_index - zero_mask
    return op.Where(other_zeros == 0, product, op.constant(0, dy.dtype))
