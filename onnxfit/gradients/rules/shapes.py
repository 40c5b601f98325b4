"""Operators that change the layout of a tensor: its shape, the order of its elements, slices,
concatenation, padding.

Each is linear in its data, and its gradient is the transposed map: the gradient of an element is
added where the element was read (Griewank and Walther, Evaluating Derivatives, 2008, ch. 3). Often
the positions are known when the graph is built; then the transpose is a Pad or a Gather, which
copy, rather than a scatter. If they are known only at run time, the operator itself is applied to
the numbers of the elements, and tells where each was read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.gradients.building import (
    arange,
    axis_size,
    concat_sizes,
    constant_elements,
    element_numbers,
    int_vector,
    known_int,
    normalize_axes,
    pad_axis,
    reshape_like,
    transposed_gather,
    zeros,
)
from onnxfit.gradients.table import Gradients, Values, decompose, rule
from onnxfit.graph.values import GraphBuilder, Value


@rule("Flatten")
def flatten(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    return reshape_like(op, dy, x)


@rule("Reshape")
@rule("Squeeze")
@rule("Unsqueeze")
def reshape(op: GraphBuilder, x: Value, how: Value | None, y: Value, dy: Value) -> Gradients:
    return reshape_like(op, dy, x), None


@rule("Transpose")
def transpose(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *, perm: tuple[int, ...] | None
) -> Gradients:
    return op.Transpose(dy, perm=None if perm is None else [int(axis) for axis in np.argsort(perm)])


@rule("Expand", broadcasts=True)
def expand(op: GraphBuilder, x: Value, shape: Value, y: Value, dy: Value) -> Gradients:
    return dy, None


@rule("Tile")
def tile(op: GraphBuilder, x: Value, repeats: Value, y: Value, dy: Value) -> Gradients:
    """The sum over the copies: an axis of size d repeated r times is reshaped to axes (r, d)."""
    constant_repeats = constant_elements(repeats)
    if constant_repeats is None:
        pairs = op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.shape(x), [1]), axis=1)
        copies = op.Reshape(dy, op.Reshape(pairs, [-1]), allowzero=1)
        return op.ReduceSum(copies, list(range(0, 2 * x.rank, 2)), keepdims=0), None
    sizes: list[Value | int] = []
    repeated_axes = []
    for axis, r in enumerate(constant_repeats):
        if r != 1:
            repeated_axes.append(len(sizes))
            sizes.append(int(r))
        sizes.append(axis_size(op, x, axis))
    if not repeated_axes:
        return dy, None
    copies = op.Reshape(dy, concat_sizes(op, *sizes), allowzero=1)
    return op.ReduceSum(copies, repeated_axes, keepdims=0), None


@rule("Concat")
def concat(op: GraphBuilder, xs: Values, y: Value, dy: Value, *, axis: int) -> Gradients:
    if len(xs) == 1:
        return dy

    @cache  # one Split gives the gradients of all inputs
    def pieces() -> tuple[Value, ...]:
        sizes = concat_sizes(op, *(axis_size(op, x, axis) for x in xs))
        return op.Split(dy, sizes, _outputs=len(xs), axis=axis)

    return tuple(partial(lambda i: pieces()[i], i) for i in range(len(xs)))


@rule("Split", all_outputs=True)
def split(
    op: GraphBuilder, x: Value, sizes: Value | None, ys: Values, dys: Values, *, axis: int
) -> Gradients:
    pieces = [zeros(op, x, op.shape(y)) if dy is None else dy for y, dy in zip(ys, dys)]
    return op.Concat(*pieces, axis=axis), None


# Slices and padding
# --------------------------------------------------------------------------------------------------


def _scatter_back(op: GraphBuilder, read: Callable[[Value], Value], x: Value, dy: Value) -> Value:
    """The transpose of `read`, which reads elements of x at positions known only at run time.

    Applied to the numbers of the elements of x, `read` tells which were read. This is slower than
    a Pad or a Gather.
    """
    count = op.Size(x)
    positions = read(element_numbers(op, x, count))
    flat = int_vector(op, -1)
    total = op.ScatterElements(
        zeros(op, dy, op.Reshape(count, flat)),
        op.Reshape(positions, flat),
        op.Reshape(dy, flat),
        axis=0,
        reduction="add",
    )
    return op.Reshape(total, op.shape(x), allowzero=1)


@rule("Slice")
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
    constant_axes = constant_elements(axes)
    if axes is not None and constant_axes is None:
        dx = _scatter_back(op, lambda x: op.Slice(x, starts, ends, axes, steps), x, dy)
        return dx, None, None, None, None
    sliced_axes = normalize_axes(constant_axes, x.rank)
    if starts.shape and isinstance(starts.shape[0], int):
        sliced_axes = sliced_axes[: starts.shape[0]]
    for i, axis in enumerate(sliced_axes):
        dy = _unslice(op, x, dy, axis, [_element(op, v, i) for v in (starts, ends, steps)])
    return dy, None, None, None, None


def _element(op: GraphBuilder, vector: Value | None, i: int) -> Value:
    """Element i of a vector of integers, as a vector; 1 if the vector is absent."""
    if vector is None:
        return int_vector(op, 1)
    values = constant_elements(vector)
    if values is not None:
        return int_vector(op, values[i])
    return op.cast(op.Slice(vector, [i], [i + 1]), np.int64)


def _unslice(op: GraphBuilder, x: Value, dy: Value, axis: int, bounds: list[Value]) -> Value:
    """The transpose of a slice of one axis: zeros for the elements that it left out.

    `bounds` are start, end and step.
    """
    size = axis_size(op, x, axis)
    numbers = [known_int(v) for v in (size, *bounds)]
    if None not in numbers:
        n, first, last, stride = (int(number) for number in numbers if number is not None)
        positions = np.arange(n)[first:last:stride]  # Python clamps bounds as ONNX does
        dx = transposed_gather(op, dy, positions, n, axis)
        assert dx is not None  # a slice reads no element twice
        return dx
    count = axis_size(op, dy, axis)
    start, end, step = bounds
    positions_read = op.Slice(arange(op, size), start, end, int_vector(op, 0), step)
    # where in dy each element of x is; `count` is a zero that is appended to dy
    row = op.ScatterElements(op.Expand(count, size), positions_read, arange(op, count), axis=0)
    return op.Gather(pad_axis(op, dy, axis, 0, 1), row, axis=axis)


@rule("Pad")
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
        return _unpad(op, x, pads, axes, dy, mode), None, None, None
    widths = constant_elements(pads)
    back = op.Neg(pads) if widths is None else op.constant(-widths)

    def of_value() -> Value:
        padding = op.Pad(zeros(op, dy, op.shape(x)), pads, op.constant(1, dy.dtype), axes)
        assert value is not None
        return reshape_like(op, op.ReduceSum(dy * padding, keepdims=0), value)

    return (
        lambda: op.Pad(dy, back, None, axes) if axes is not None else op.Pad(dy, back),
        None,
        of_value,
        None,
    )


def _unpad(
    op: GraphBuilder, x: Value, pads: Value, axes: Value | None, dy: Value, mode: str
) -> Value:
    """The gradient of a padding by copies: each copy's gradient is added to the copied element."""
    widths = constant_elements(pads)
    constant_axes = constant_elements(axes)
    dx = None
    if widths is not None and (axes is None or constant_axes is not None):
        dx = _unpad_static(op, x, widths, normalize_axes(constant_axes, x.rank), dy, mode)
    if dx is not None:
        return dx
    return _scatter_back(op, lambda x: op.Pad(x, pads, None, axes, mode=mode), x, dy)


def _unpad_static(
    op: GraphBuilder,
    x: Value,
    widths: npt.NDArray[Any],
    axes: list[int],
    dy: Value,
    mode: str,
) -> Value | None:
    """The same for constant widths; None for unknown sizes, and for widths that are negative or
    copy an element more than once on one side.
    """
    if (widths < 0).any():
        return None
    for axis, before, after in zip(axes, widths[: len(axes)], widths[len(axes) :]):
        size = known_int(axis_size(op, x, axis))
        if size is None:
            return None
        if before == after == 0:
            continue
        if mode == "edge":
            dy = _unpad_edges(op, dy, axis, size, int(before), int(after))
            continue
        if max(before, after) > (size - 1 if mode == "reflect" else size):
            return None
        # ONNX's modes have numpy's names
        positions = np.pad(np.arange(size), (int(before), int(after)), mode)  # type: ignore[call-overload]
        dx = transposed_gather(op, dy, positions, size, axis)
        if dx is None:
            return None
        dy = dx
    return dy


def _unpad_edges(
    op: GraphBuilder, dy: Value, axis: int, size: int, before: int, after: int
) -> Value:
    """Add the gradients of the copies to those of the first and the last element."""
    if size == 1:
        return op.ReduceSum(dy, [axis], keepdims=1)
    first, middle, last = op.Split(dy, [before + 1, size - 2, after + 1], _outputs=3, axis=axis)
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
    pad_inputs: tuple[Value | None, ...] = ()
    if axes is None:
        sizes = op.shape(x)
    else:
        positive_axes = normalize_axes(axes, x.rank)
        sizes = concat_sizes(op, *(axis_size(op, x, axis) for axis in positive_axes))
        pad_inputs = (None, op.constant(np.array(axes, np.int64)))
    static_sizes = constant_elements(sizes)
    new_sizes = constant_elements(target)
    if static_sizes is not None and new_sizes is not None:
        growth = new_sizes - static_sizes
        before = np.trunc(growth / 2).astype(np.int64)
        return op.Pad(x, op.constant(np.concatenate([before, growth - before])), *pad_inputs)
    difference = op.cast(target, np.int64) - sizes
    half = op.Sign(difference) * (op.Abs(difference) / 2)
    return op.Pad(x, op.Concat(half, difference - half, axis=0), *pad_inputs)


# Permutations of elements
# --------------------------------------------------------------------------------------------------


@rule("DepthToSpace")
def depth_to_space(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *, blocksize: int, mode: str
) -> Gradients:
    """SpaceToDepth, the inverse in mode DCR. In mode CRD, the channels are in another order: the
    index in the block changes fastest, where in DCR the channel does.
    """
    if mode == "DCR":
        return op.SpaceToDepth(dy, blocksize=blocksize)
    channels = known_int(axis_size(op, x, 1))
    if channels is not None:  # 0.2 to 0.4 of the time of the Transpose below
        order = np.arange(channels).reshape(blocksize**2, -1).T.reshape(-1)
        return op.Gather(op.SpaceToDepth(dy, blocksize=blocksize), op.constant(order), axis=1)
    outer = [axis_size(op, y, 0), axis_size(op, y, 1)]
    height = axis_size(op, x, 2)
    width = axis_size(op, x, 3)
    sizes = concat_sizes(op, *outer, height, blocksize, width, blocksize)
    blocks = op.Reshape(dy, sizes, allowzero=1)
    return reshape_like(op, op.Transpose(blocks, perm=[0, 1, 3, 5, 2, 4]), x)


@rule("SpaceToDepth")
def space_to_depth(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *, blocksize: int, mode: str = "DCR"
) -> Gradients:
    return op.DepthToSpace(dy, blocksize=blocksize, mode=mode)


@rule("ReverseSequence")
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


@rule("Trilu")
def trilu(
    op: GraphBuilder, x: Value, k: Value | None, y: Value, dy: Value, *, upper: int
) -> Gradients:
    return op.Trilu(dy, *(() if k is None else (k,)), upper=upper), None
