"""Operators that take elements at computed places, or put them there.

What was read at a place is added to that place: the gradient of a Gather is a scatter with "add",
that of a scatter a Gather. Ties of a maximum share the gradient evenly, as in PyTorch's
`scatter_reduce`.

onnxruntime's ScatterND adds several updates to one place from several threads without a lock
(1.19.2 and 1.31.1 alike), as soon as it adds more than 210 000 elements: of a repeated index, some
are then lost. ScatterElements adds one by one, but takes 5 ns per element, seven times as long as
ScatterND. So ScatterND gets at most `ALONE` elements at a time.
"""

from __future__ import annotations

import numpy as np

from onnxfit.gradients.building import (
    align_to_axis,
    arange,
    axis_size,
    concat_sizes,
    element_numbers,
    int_vector,
    known,
    reshape_like,
    static_shape,
    static_size,
    transposed_gather,
    zeros,
)
from onnxfit.gradients.table import Gradients, NoGradientError, decompose, gradient
from onnxfit.graph.values import GraphBuilder, Value

ALONE = 2**17  # elements that ScatterND adds in one thread
PIECES = 16  # so many times that, ScatterND is worth its while
COPIED = 2**22  # elements; every ScatterND copies what it adds to
MIN_ROW_ELEMENTS = 64  # elements of a row for which it pays to look for equal indices

# Reading
# --------------------------------------------------------------------------------------------------


@gradient("Gather")
def gather(
    op: GraphBuilder, x: Value, indices: Value, y: Value, dy: Value, *, axis: int
) -> Gradients:
    axis = axis % x.rank
    places, length = known(indices), x.shape[axis] if x.shape is not None else None
    if places is not None and isinstance(length, int):
        # a constant place: nothing needs to be scattered
        found = transposed_gather(
            op,
            _in_a_row(op, x, indices, dy, axis),
            np.where(places < 0, places + length, places).reshape(-1),
            length,
            axis,
        )
        if found is not None:
            return found, None
    rows = _in_a_row(op, x, indices, dy, axis)
    vector = op.cast(indices, np.int64)
    if indices.rank != 1:
        vector = op.Reshape(vector, int_vector(op, -1))
    if axis == 0 and static_shape(rows) is not None:
        found = _rows_added(op, x, vector, rows)
        if found is not None:
            return found, None
    column = align_to_axis(op, vector, axis, x.rank)
    everywhere = op.Expand(column, op.shape(rows))
    return (
        op.ScatterElements(
            zeros(op, dy, op.shape(x)), everywhere, rows, axis=axis, reduction="add"
        ),
        None,
    )


def _rows_added(op: GraphBuilder, x: Value, indices: Value, rows: Value) -> Value | None:
    """Zeros in the shape of x with rows added at indices, by ScatterND;

    None where ScatterElements is better.

    For a table of 1000 x 128 and 1024 indices it takes 0.08 ms and ScatterElements 0.75, for 30000
    x 256 3.7 and 5 to 7 (zeros alone: 3.4).
    """
    sizes, table = static_shape(rows) or (0,), static_shape(x)
    if _few(rows):
        return op.ScatterND(
            zeros(op, rows, op.shape(x)), op.Unsqueeze(indices, [1]), rows, reduction="add"
        )
    count, width = sizes[0], int(np.prod(sizes[1:]))
    most = max(ALONE // width, 1)
    pieces = -(-count // most)
    if pieces > PIECES or table is None:
        return None
    lengths = op.constant(np.array([*[most] * (pieces - 1), count - most * (pieces - 1)], np.int64))

    def added(total: Value, places: Value) -> Value:
        columns = op.Split(op.Unsqueeze(places, [1]), lengths, _outputs=pieces, axis=0)
        for column, part in zip(columns, op.Split(rows, lengths, _outputs=pieces, axis=0)):
            total = op.ScatterND(total, column, part, reduction="add")
        return total

    if pieces * int(np.prod(table)) <= COPIED:
        return added(zeros(op, rows, op.shape(x)), indices)
    if width < MIN_ROW_ELEMENTS:
        return None
    # the rows of each index are added up apart from the large table, and then put there once
    # -1 and the last are one index
    unique, _, inverse = op.Unique(op.Mod(indices, table[0]), _outputs=3)
    sums = added(zeros(op, rows, concat_sizes(op, op.Shape(unique), op.shape(x, 1))), inverse)
    return op.ScatterND(zeros(op, rows, op.shape(x)), op.Unsqueeze(unique, [1]), sums)


def _few(dy: Value) -> bool:
    """Whether ScatterND adds so many elements one after another."""
    elements = static_size(dy)
    return elements is not None and elements <= ALONE


def _in_a_row(op: GraphBuilder, x: Value, indices: Value, dy: Value, axis: int) -> Value:
    """The gradient of a Gather by indices of any rank as if they were one vector."""
    if indices.rank == 1:
        return dy
    if indices.rank == 0:
        return op.Unsqueeze(dy, [axis])
    one = int_vector(op, 1)
    sizes = known(op.shape(indices))
    parts = [
        (
            op.Reshape(op.Size(indices), one)
            if sizes is None
            else op.constant(sizes.prod(keepdims=True))
        )
    ]
    if axis:
        parts.insert(0, op.shape(x, 0, axis))
    if axis + 1 < x.rank:
        parts.append(op.shape(x, axis + 1))
    return op.Reshape(dy, concat_sizes(op, *parts), allowzero=1)


@gradient("GatherElements")
def gather_elements(
    op: GraphBuilder, x: Value, indices: Value, y: Value, dy: Value, *, axis: int
) -> Gradients:
    return (
        op.ScatterElements(zeros(op, dy, op.shape(x)), indices, dy, axis=axis, reduction="add"),
        None,
    )


@gradient("GatherND")
def gather_nd(
    op: GraphBuilder, x: Value, indices: Value, y: Value, dy: Value, *, batch_dims: int
) -> Gradients:
    return _added(op, x, _with_batches(op, indices, batch_dims), dy), None


def _with_batches(op: GraphBuilder, indices: Value, batch_dims: int) -> Value:
    """Indices that tell the places in the leading axes, too, which they had in common with the
    data.
    """
    parts = [indices]
    lead = op.shape(indices, 0, indices.rank - 1)
    for axis in reversed(range(batch_dims)):
        count = arange(op, axis_size(op, indices, axis))
        column = align_to_axis(op, count, axis, indices.rank)
        parts.insert(0, op.Expand(column, concat_sizes(op, lead, 1)))
    return op.Concat(*parts, axis=-1) if len(parts) > 1 else indices


def _added(op: GraphBuilder, x: Value, indices: Value, dy: Value) -> Value:
    """Zeros in the shape of x, with dy added at indices."""
    if _few(dy):
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
    """A Gather of where the condition holds; without an axis, of all elements in a row."""
    flags = known(condition)
    flat = int_vector(op, -1)
    kept = (
        op.Reshape(op.NonZero(condition), flat)
        if flags is None
        else op.constant(np.flatnonzero(flags).astype(np.int64))
    )
    return op.Gather(op.Reshape(x, flat), kept) if axis is None else op.Gather(x, kept, axis=axis)


@gradient("TopK", all_outputs=True)
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


@gradient("Unique", all_outputs=True)
def unique(
    op: GraphBuilder, x: Value, y: Value, first: Value, inverse: Value, counts: Value,
    dy: Value | None, dfirst: Value | None, dinverse: Value | None, dcounts: Value | None, *, axis: int | None,
) -> Gradients:  # fmt: skip
    """Equal elements share the gradient of the one they become."""
    if dy is None:
        return None
    times = op.cast(counts, dy.dtype)
    if axis is None:
        return reshape_like(op, op.Gather(dy / times, inverse), x)
    axis = axis % x.rank
    column = align_to_axis(op, times, axis, x.rank)
    return op.Gather(dy / column, inverse, axis=axis)


@gradient("OneHot")
def one_hot(
    op: GraphBuilder, indices: Value, depth: Value, values: Value, y: Value, dy: Value, *, axis: int
) -> Gradients:
    """y is values[1] where the index points, values[0] elsewhere."""

    def both() -> Value:
        hot = dy * op.OneHot(indices, depth, op.constant(np.array([0, 1], dy.dtype)), axis=axis)
        sums = [op.Reshape(op.ReduceSum(part, keepdims=0), [1]) for part in (dy - hot, hot)]
        return op.Concat(*sums, axis=0)

    return None, None, both


@gradient("Range")
def range_(
    op: GraphBuilder, start: Value, limit: Value, delta: Value, y: Value, dy: Value
) -> Gradients:
    """y_k = start + k delta; the limit only decides how many there are."""

    def steps() -> Value:
        return op.ReduceSum(dy * op.cast(arange(op, op.shape(dy)), dy.dtype), keepdims=0)

    return (
        lambda: reshape_like(op, op.ReduceSum(dy, keepdims=0), start),
        None,
        lambda: reshape_like(op, steps(), delta),
    )


# Writing
# --------------------------------------------------------------------------------------------------


@gradient("ScatterElements")
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
    return _scattered(_Elements(op, indices, axis), x, updates, y, dy, reduction)


@gradient("ScatterND")
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
    return _scattered(_Slices(op, indices), x, updates, y, dy, reduction)


class _Elements:
    """The places that ScatterElements writes to."""

    def __init__(self, op: GraphBuilder, indices: Value, axis: int) -> None:
        self.op, self.indices, self.axis = op, indices, axis

    def read(self, x: Value) -> Value:
        return self.op.GatherElements(x, self.indices, axis=self.axis)

    def write(self, x: Value, updates: Value, reduction: str = "none") -> Value:
        return self.op.ScatterElements(
            x, self.indices, updates, axis=self.axis, reduction=reduction
        )


class _Slices:
    """The places that ScatterND writes to."""

    def __init__(self, op: GraphBuilder, indices: Value) -> None:
        self.op, self.indices = op, indices

    def read(self, x: Value) -> Value:
        return self.op.GatherND(x, self.indices)

    def write(self, x: Value, updates: Value, reduction: str = "none") -> Value:
        if reduction == "none" or _few(updates):
            return self.op.ScatterND(x, self.indices, updates, reduction=reduction)
        flat = int_vector(self.op, -1)
        numbers = self.op.Reshape(self.op.GatherND(element_numbers(self.op, x), self.indices), flat)
        made = self.op.ScatterElements(
            self.op.Reshape(x, flat),
            numbers,
            self.op.Reshape(updates, flat),
            axis=0,
            reduction=reduction,
        )
        return self.op.Reshape(made, self.op.shape(x), allowzero=1)


def _scattered(
    places: _Elements | _Slices, x: Value, updates: Value, y: Value, dy: Value, reduction: str
) -> Gradients:
    op = places.op
    if reduction == "none":
        return (
            lambda: places.write(dy, zeros(op, dy, op.shape(updates))),
            None,
            lambda: places.read(dy),
        )
    if reduction == "add":
        return lambda: dy, None, lambda: places.read(dy)
    if reduction == "mul":
        return (
            lambda: places.write(dy, updates, "mul"),
            None,
            lambda: _factor(places, x, updates, dy),
        )
    if reduction in ("max", "min"):
        chosen, those = (op.cast(a == b, dy.dtype) for a, b in ((x, y), (updates, places.read(y))))
        share = dy / places.write(chosen, those, "add")
        return lambda: share * chosen, None, lambda: places.read(share) * those
    raise NoGradientError(f"its reduction {reduction!r} is none of none, add, mul, max, min")


def _factor(places: _Elements | _Slices, x: Value, updates: Value, dy: Value) -> Value:
    """Of a product, the product of the other factors: right where factors are zero, too."""
    op = places.op
    none = updates == 0
    others = op.cast(none, dy.dtype)
    safe = op.Where(none, op.constant(1, dy.dtype), updates)
    product = places.read(dy * places.write(x, safe, "mul")) / safe
    # of the other updates
    zero = places.read(places.write(zeros(op, dy, op.shape(x)), others, "add")) - others
    return op.Where(zero == 0, product, op.constant(0, dy.dtype))
