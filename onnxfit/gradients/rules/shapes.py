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
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.gradients.building import (
    arange,
    axis_size,
    concat_sizes,
    element_numbers,
    int_vector,
    known,
    normalize_axes,
    pad_axis,
    reshape_like,
    transposed_gather,
    zeros,
)
from onnxfit.gradients.table import Gradients, Values, decompose, gradient
from onnxfit.graph.values import GraphBuilder, Value


@gradient("Flatten")
def flatten(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return reshape_like(op, dy, x)


@gradient("Reshape")
@gradient("Squeeze")
@gradient("Unsqueeze")
def reshape(op: GraphBuilder, x: Value, how: Value | None, y: Value, dy: Value) -> Gradients:
    return reshape_like(op, dy, x), None


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
        parts.append(axis_size(op, x, axis))
    return (
        op.ReduceSum(op.Reshape(dy, concat_sizes(op, *parts), allowzero=1), axes, keepdims=0)
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
                    dy,
                    concat_sizes(op, *(axis_size(op, x, axis) for x in xs)),
                    _outputs=len(xs),
                    axis=axis,
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
# --------------------------------------------------------------------------------------------------


def returned_by(op: GraphBuilder, take: Callable[[Value], Value], x: Value, dy: Value) -> Value:
    """The transpose of anything that takes elements of x, found by taking their numbers: the slow
    way, for what only run time tells.
    """
    count = op.Size(x)
    places = take(element_numbers(op, x, count))
    flat = int_vector(op, -1)
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
    constant_axes = known(axes)
    if axes is not None and constant_axes is None:
        return (
            returned_by(op, lambda places: op.Slice(places, starts, ends, axes, steps), x, dy),
            None,
            None,
            None,
            None,
        )
    fixed = normalize_axes(constant_axes, x.rank)
    for i, axis in enumerate(fixed[: _count(starts, len(fixed))]):
        dy = _unsliced(op, x, dy, axis, [_element(op, v, i) for v in (starts, ends, steps)])
    return dy, None, None, None, None


def _count(vector: Value, most: int) -> int:
    """How many elements a vector has."""
    return vector.shape[0] if vector.shape and isinstance(vector.shape[0], int) else most


def _element(op: GraphBuilder, vector: Value | None, i: int) -> Value:
    """Element i of a vector of integers, as a vector; 1 without a vector."""
    if vector is None:
        return int_vector(op, 1)
    values = known(vector)
    if values is not None:
        return int_vector(op, values[i])
    return op.cast(op.Slice(vector, [i], [i + 1]), np.int64)


def _unsliced(op: GraphBuilder, x: Value, dy: Value, axis: int, bounds: list[Value]) -> Value:
    """dy with one axis as long as that of x, zero where the slice took nothing."""
    length = axis_size(op, x, axis)
    numbers = [known(v) for v in (length, *bounds)]
    fixed = [int(n[0]) for n in numbers if n is not None]
    if len(fixed) == len(numbers):
        n, start, end, step = fixed
        places = np.arange(n)[start:end:step]  # Python's rules for what lies outside are ONNX's
        found = transposed_gather(op, dy, places, n, axis)
        assert found is not None  # no place is taken twice
        return found
    count = axis_size(op, dy, axis)
    start_, end_, step_ = bounds
    taken = op.Slice(arange(op, length), start_, end_, int_vector(op, 0), step_)
    row = op.ScatterElements(op.Expand(count, length), taken, arange(op, count), axis=0)
    return op.Gather(pad_axis(op, dy, axis, 0, 1), row, axis=axis)


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
        return reshape_like(op, op.ReduceSum(dy * inside, keepdims=0), value)

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
    widths = known(pads)
    constant_axes = known(axes)
    dx = None
    if widths is not None and (axes is None or constant_axes is not None):
        dx = _folded(op, x, widths, normalize_axes(constant_axes, x.rank), dy, mode)
    if dx is not None:
        return dx
    return returned_by(op, lambda places: op.Pad(places, pads, None, axes, mode=mode), x, dy)


def _folded(
    op: GraphBuilder,
    x: Value,
    widths: npt.NDArray[Any],
    axes: list[int],
    dy: Value,
    mode: str,
) -> Value | None:
    """The same where sizes and widths are known, and no border reaches further than once around."""
    if (widths < 0).any():
        return None
    for axis, before, after in zip(axes, widths[: len(axes)], widths[len(axes) :]):
        length = known(axis_size(op, x, axis))
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
        once = transposed_gather(op, dy, places, n, axis)
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
    cropped = normalize_axes(axes, x.rank)
    have = (
        op.shape(x) if axes is None else concat_sizes(op, *(axis_size(op, x, a) for a in cropped))
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
# --------------------------------------------------------------------------------------------------


@gradient("DepthToSpace")
def depth_to_space(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *, blocksize: int, mode: str
) -> Gradients:
    """SpaceToDepth is the inverse of mode DCR; mode CRD has each channel before its block, where
    DCR has each place of the block first.
    """
    b, channels = blocksize, known(axis_size(op, x, 1))
    if mode == "DCR":
        return op.SpaceToDepth(dy, blocksize=b)
    if channels is not None:  # 0.2 to 0.4 of the time of what follows
        order = np.arange(channels[0]).reshape(b * b, -1).T.reshape(-1)
        return op.Gather(op.SpaceToDepth(dy, blocksize=b), op.constant(order), axis=1)
    blocks = op.Reshape(
        dy,
        concat_sizes(
            op,
            axis_size(op, y, 0),
            axis_size(op, y, 1),
            axis_size(op, x, 2),
            b,
            axis_size(op, x, 3),
            b,
        ),
        allowzero=1,
    )
    return reshape_like(op, op.Transpose(blocks, perm=[0, 1, 3, 5, 2, 4]), x)


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
