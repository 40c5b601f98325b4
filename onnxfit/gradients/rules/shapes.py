"""Operators that lay the elements of a tensor out anew: other sizes, another order, parts, joints,
borders.

Each is linear in its data, and its gradient is the transpose of that map: what was taken from a
place is added there again (Griewank and Walther, Evaluating Derivatives, 2008, ch. 3). Which place
is often known when the graph is built; then the transpose is a Pad or a Gather, which are copies,
and no scattering. What is only known at run time is asked of the operator itself, by letting it
move the places' numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Union

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.gradients.table import Gradients, Values, decompose, gradient
from onnxfit.graph.values import GraphBuilder, Value

Integers = npt.NDArray[np.int64]


def known(value: Value | None) -> npt.NDArray[Any] | None:
    """The elements of a constant."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value.ir)
    return None if tensor is None else tensor.numpy()


def joined(op: GraphBuilder, *parts: Union[Value, int]) -> Value:
    """int64 vectors and numbers as one vector; a constant where all of them are."""
    vectors = [p if isinstance(p, Value) else op.constant(np.array([p], np.int64)) for p in parts]
    arrays = [known(v) for v in vectors]
    found = [a for a in arrays if a is not None]
    if len(found) == len(vectors):
        return op.constant(np.concatenate(found))
    return op.Concat(*vectors, axis=0) if len(vectors) > 1 else vectors[0]


def size(op: GraphBuilder, x: Value, axis: int) -> Value:
    """The size of one axis, as a vector of one."""
    return op.shape(x, axis, axis + 1 or None)


def reshaped(op: GraphBuilder, dy: Value, x: Value) -> Value:
    """`dy` in the shape of `x`."""
    if x.shape is not None:
        if dy.shape == x.shape and all(isinstance(d, int) for d in x.shape):
            return dy
        unknown = [d for d in x.shape if not isinstance(d, int)]
        if len(unknown) <= 1 and 0 not in x.shape:
            return op.Reshape(
                dy,
                op.constant(np.array([d if isinstance(d, int) else -1 for d in x.shape], np.int64)),
            )
    return op.Reshape(dy, op.shape(x), allowzero=1)


def zeros(op: GraphBuilder, like: Value, shape: Value) -> Value:
    """Zeros of the type of `like`."""
    return op.Expand(op.constant(0, like.dtype), shape)


@gradient("Flatten")
def flatten(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return reshaped(op, dy, x)


@gradient("Reshape")
@gradient("Squeeze")
@gradient("Unsqueeze")
def reshape(op: GraphBuilder, x: Value, how: Value | None, y: Value, dy: Value) -> Gradients:
    return reshaped(op, dy, x), None


@gradient("Transpose")
def transpose(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *, perm: tuple[int, ...] | None
) -> Gradients:
    return op.Transpose(dy, perm=None if perm is None else [int(axis) for axis in np.argsort(perm)])


@gradient("Expand", broadcasts=True)
def expand(op: GraphBuilder, x: Value, shape: Value, y: Value, dy: Value) -> Gradients:
    return dy, None


@gradient("Tile")
def tile(op: GraphBuilder, x: Value, repeats: Value, y: Value, dy: Value) -> Gradients:
    """An axis of size d repeated r times is two axes (r, d), the first of which is summed over."""
    times = known(repeats)
    if times is None:
        pairs = op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.shape(x), [1]), axis=1)
        axes = list(range(0, 2 * x.rank, 2))
        return (
            op.ReduceSum(op.Reshape(dy, op.Reshape(pairs, [-1]), allowzero=1), axes, keepdims=0),
            None,
        )
    parts: list[Value | int] = []
    axes = []
    for axis, r in enumerate(times):
        if r != 1:
            axes.append(len(parts))
            parts.append(int(r))
        parts.append(size(op, x, axis))
    return (
        op.ReduceSum(op.Reshape(dy, joined(op, *parts), allowzero=1), axes, keepdims=0)
        if axes
        else dy
    ), None


@gradient("Concat")
def concat(op: GraphBuilder, xs: Values, y: Value, dy: Value, *, axis: int) -> Gradients:
    if len(xs) == 1:
        return dy
    parts: list[Value] = []

    def part(i: int) -> Value:
        if not parts:
            parts.extend(
                op.Split(
                    dy, joined(op, *(size(op, x, axis) for x in xs)), _outputs=len(xs), axis=axis
                )
            )
        return parts[i]

    return tuple(partial(part, i) for i in range(len(xs)))


@gradient("Split", all_outputs=True)
def split(
    op: GraphBuilder, x: Value, sizes: Value | None, ys: Values, dys: Values, *, axis: int
) -> Gradients:
    parts = [zeros(op, x, op.shape(y)) if dy is None else dy for y, dy in zip(ys, dys)]
    return op.Concat(*parts, axis=axis), None


# Parts and borders
# ---------------------------------------------------------------------------------------------------------


def returned(op: GraphBuilder, dy: Value, places: Integers, length: int, axis: int) -> Value | None:
    """The transpose of taking these places (0 ... length - 1) of an axis;

    None if that is no matter of a few copies.
    """
    count = len(places)
    if count and np.array_equal(places, np.arange(places[0], places[0] + count)):
        return padded(op, dy, axis, int(places[0]), length - count - int(places[0]))
    # row k says where in dy the elements came to that were taken for the k-th time: at `count` is a
    # zero
    order = np.argsort(places, kind="stable")
    first = np.searchsorted(places[order], places[order])
    times = np.arange(count) - first
    if times.max(initial=0) > 2:
        return None
    rows = np.full((times.max(initial=0) + 1, length), count, np.int64)
    rows[times, places[order]] = order
    source = padded(op, dy, axis, 0, 1) if (rows == count).any() else dy
    parts = [op.Gather(source, op.constant(row), axis=axis) for row in rows]
    return parts[0] if len(parts) == 1 else op.Sum(*parts)


def padded(op: GraphBuilder, x: Value, axis: int, before: int, after: int) -> Value:
    """Zeros before and after an axis."""
    if before == after == 0:
        return x
    pads = np.zeros((2, x.rank), np.int64)
    pads[:, axis] = before, after
    return op.Pad(x, op.constant(pads.reshape(-1)))


def returned_by(op: GraphBuilder, take: Callable[[Value], Value], x: Value, dy: Value) -> Value:
    """The transpose of anything that takes elements of x, found by taking their numbers: the slow
    way, for what only run time tells.
    """
    count = op.Size(x)
    places = take(
        op.Reshape(
            op.Range(op.constant(np.int64(0)), count, op.constant(np.int64(1))),
            op.shape(x),
            allowzero=1,
        )
    )
    flat = op.constant(np.array([-1], np.int64))
    total = op.ScatterElements(
        zeros(op, dy, op.Reshape(count, flat)),
        op.Reshape(places, flat),
        op.Reshape(dy, flat),
        axis=0,
        reduction="add",
    )
    return op.Reshape(total, op.shape(x), allowzero=1)


@gradient("Slice")
def slice_(
    op: GraphBuilder,
    x: Value,
    starts: Value,
    ends: Value,
    axes: Value | None,
    steps: Value | None,
    y: Value,
    dy: Value,
) -> Gradients:
    fixed = np.arange(y.rank) if axes is None else known(axes)
    if fixed is None:
        return (
            returned_by(op, lambda places: op.Slice(places, starts, ends, axes, steps), x, dy),
            None,
            None,
            None,
            None,
        )
    for i, axis in enumerate(int(a) % x.rank for a in fixed[: _count(starts, len(fixed))]):
        dy = _unsliced(op, x, dy, axis, [_element(op, v, i) for v in (starts, ends, steps)])
    return dy, None, None, None, None


def _count(vector: Value, most: int) -> int:
    """How many elements a vector has."""
    return vector.shape[0] if vector.shape and isinstance(vector.shape[0], int) else most


def _element(op: GraphBuilder, vector: Value | None, i: int) -> Value:
    """Element i of a vector of integers, as a vector; 1 without a vector."""
    if vector is None:
        return op.constant(np.array([1], np.int64))
    values = known(vector)
    if values is not None:
        return op.constant(np.array([values[i]], np.int64))
    return op.cast(op.Slice(vector, [i], [i + 1]), np.int64)


def _unsliced(op: GraphBuilder, x: Value, dy: Value, axis: int, bounds: list[Value]) -> Value:
    """dy with one axis as long as that of x, zero where the slice took nothing."""
    length = size(op, x, axis)
    numbers = [known(v) for v in (length, *bounds)]
    fixed = [int(n[0]) for n in numbers if n is not None]
    if len(fixed) == len(numbers):
        n, start, end, step = fixed
        places = np.arange(n)[start:end:step]  # Python's rules for what lies outside are ONNX's
        found = returned(op, dy, places, n, axis)
        assert found is not None  # no place is taken twice
        return found
    count = size(op, dy, axis)
    start_, end_, step_ = bounds
    taken = op.Slice(_range(op, length), start_, end_, op.constant(np.array([0], np.int64)), step_)
    row = op.ScatterElements(op.Expand(count, length), taken, _range(op, count), axis=0)
    return op.Gather(padded(op, dy, axis, 0, 1), row, axis=axis)


def _range(op: GraphBuilder, count: Value) -> Value:
    """0 ... count - 1."""
    return op.Range(op.constant(np.int64(0)), op.Squeeze(count, [0]), op.constant(np.int64(1)))


@gradient("Pad")
def pad(
    op: GraphBuilder,
    x: Value,
    pads: Value,
    value: Value | None,
    axes: Value | None,
    y: Value,
    dy: Value,
    *,
    mode: str,
) -> Gradients:
    if mode != "constant":
        return _unbordered(op, x, pads, axes, dy, mode), None, None, None
    widths = known(pads)
    back = op.Neg(pads) if widths is None else op.constant(-widths)

    def border() -> Value:
        inside = op.Pad(zeros(op, dy, op.shape(x)), pads, op.constant(1, dy.dtype), axes)
        assert value is not None
        return reshaped(op, op.ReduceSum(dy * inside, keepdims=0), value)

    return (
        lambda: op.Pad(dy, back, None, axes) if axes is not None else op.Pad(dy, back),
        None,
        border,
        None,
    )


def _unbordered(
    op: GraphBuilder, x: Value, pads: Value, axes: Value | None, dy: Value, mode: str
) -> Value:
    """dy with its borders folded back onto the elements they repeat."""
    found = _folded(
        op, x, known(pads), np.arange(x.rank) if axes is None else known(axes), dy, mode
    )
    return (
        returned_by(op, lambda places: op.Pad(places, pads, None, axes, mode=mode), x, dy)
        if found is None
        else found
    )


def _folded(
    op: GraphBuilder,
    x: Value,
    widths: npt.NDArray[Any] | None,
    axes: npt.NDArray[Any] | None,
    dy: Value,
    mode: str,
) -> Value | None:
    """The same where sizes and widths are known, and no border reaches further than once around."""
    if widths is None or axes is None or (widths < 0).any():
        return None
    for axis, before, after in zip(
        (int(a) % x.rank for a in axes), widths[: len(axes)], widths[len(axes) :]
    ):
        length = known(size(op, x, axis))
        if length is None:
            return None
        if before == after == 0:
            continue
        n, most = int(length[0]), int(max(before, after))
        if mode == "edge":
            dy = _gathered_edges(op, dy, axis, n, int(before), int(after))
            continue
        if most > (n - 1 if mode == "reflect" else n):
            return None
        # ONNX has numpy's names
        places = np.pad(np.arange(n), (int(before), int(after)), mode)  # type: ignore[call-overload]
        once = returned(op, dy, places, n, axis)
        if once is None:
            return None
        dy = once
    return dy


def _gathered_edges(
    op: GraphBuilder, dy: Value, axis: int, length: int, before: int, after: int
) -> Value:
    """The first and last element with the sum of their border."""
    if length == 1:
        return op.ReduceSum(dy, [axis], keepdims=1)
    first, middle, last = op.Split(dy, [before + 1, length - 2, after + 1], _outputs=3, axis=axis)
    return op.Concat(
        op.ReduceSum(first, [axis], keepdims=1),
        middle,
        op.ReduceSum(last, [axis], keepdims=1),
        axis=axis,
    )


@decompose("CenterCropPad")
def center_crop_pad(
    op: GraphBuilder, x: Value, target: Value, *, axes: tuple[int, ...] | None
) -> Value:
    """A Pad whose widths may be negative; of an odd difference, the larger half comes last."""
    have = (
        op.shape(x) if axes is None else joined(op, *(size(op, x, int(a) % x.rank) for a in axes))
    )
    chosen = () if axes is None else (None, op.constant(np.array(axes, np.int64)))
    sizes, wanted = known(have), known(target)
    if sizes is not None and wanted is not None:
        before = np.trunc((wanted - sizes) / 2).astype(np.int64)
        return op.Pad(x, op.constant(np.concatenate([before, wanted - sizes - before])), *chosen)
    more = op.cast(target, np.int64) - have
    half = op.Sign(more) * (op.Abs(more) / 2)
    return op.Pad(x, op.Concat(half, more - half, axis=0), *chosen)


# Orders
# --------------------------------------------------------------------------------------------------------------------


@gradient("DepthToSpace")
def depth_to_space(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *, blocksize: int, mode: str
) -> Gradients:
    """SpaceToDepth is the inverse of mode DCR; mode CRD has each channel before its block, where
    DCR has each place of the block first.
    """
    b, channels = blocksize, known(size(op, x, 1))
    if mode == "DCR":
        return op.SpaceToDepth(dy, blocksize=b)
    if channels is not None:  # 0.2 to 0.4 of the time of what follows
        order = np.arange(channels[0]).reshape(b * b, -1).T.reshape(-1)
        return op.Gather(op.SpaceToDepth(dy, blocksize=b), op.constant(order), axis=1)
    blocks = op.Reshape(
        dy,
        joined(op, size(op, y, 0), size(op, y, 1), size(op, x, 2), b, size(op, x, 3), b),
        allowzero=1,
    )
    return reshaped(op, op.Transpose(blocks, perm=[0, 1, 3, 5, 2, 4]), x)


@gradient("SpaceToDepth")
def space_to_depth(op: GraphBuilder, x: Value, y: Value, dy: Value, *, blocksize: int) -> Gradients:
    return op.DepthToSpace(dy, blocksize=blocksize, mode="DCR")


@gradient("ReverseSequence")
def reverse_sequence(
    op: GraphBuilder,
    x: Value,
    lengths: Value,
    y: Value,
    dy: Value,
    *,
    batch_axis: int,
    time_axis: int,
) -> Gradients:
    return op.ReverseSequence(dy, lengths, batch_axis=batch_axis, time_axis=time_axis), None


@gradient("Trilu")
def trilu(
    op: GraphBuilder, x: Value, k: Value | None, y: Value, dy: Value, *, upper: int
) -> Gradients:
    return op.Trilu(dy, *(() if k is None else (k,)), upper=upper), None
