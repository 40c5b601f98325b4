"""Maxima of windows: the gradient goes to the element that was the maximum.

Among equal elements it goes to the first one in the order of rows, as in PyTorch. A rule has two
parts. The first finds the position of each maximum, counted through the whole tensor. The fastest
way depends on the windows: STRATEGIES lists the measured choices. The second part puts the gradient
at these positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.building import (
    WITHOUT_SCATTER,
    Integers,
    Ints,
    Strategy,
    arange,
    axis_size,
    choose_strategy,
    int_vector,
    reshape_like,
    spatial_shape,
    static_size,
    zeros,
)
from onnxfit.gradients.notes import MAX_POOL_DX, MAX_POOL_DY, noted
from onnxfit.gradients.rules.convolution import ConvSpec, crop, padding, transposed_conv
from onnxfit.gradients.rules.convolution.spec import Crop
from onnxfit.gradients.rules.pooling import require_defined_windows
from onnxfit.gradients.table import Gradients, rule
from onnxfit.graph.values import GraphBuilder, Value

# From this number of windows, comparisons are faster than the Indices of MaxPool: they take 4 to 9
# ns for each window and 15 us for their operators, where the Indices take 10 to 20 ns a window.
MIN_COMPARED_WINDOWS = 2**11
# The batch size that is assumed if it is unknown when the graph is built.
EXPECTED_IMAGES = 32


@dataclass(frozen=True)
class PoolProblem:
    """The gradient of a MaxPool: its values, and its attributes with ONNX's defaults filled in."""

    x: Value
    y: Value
    indices: Value  # the second output of the node
    attributes: dict[str, Any]
    spec: ConvSpec

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(self.attributes["kernel_shape"])

    @property
    def is_padded(self) -> bool:
        return any(self.attributes["pads"] or ()) or self.attributes["auto_pad"].startswith("SAME")

    @property
    def is_disjoint(self) -> bool:
        """Whether no element is in two windows, and each window has an element."""
        extents = self.spec.extents(self.kernel)
        if self.is_padded or any(e > s for e, s in zip(extents, self.spec.strides)):
            return False
        # The last window that ceil_mode adds may begin after the last element.
        return not self.attributes["ceil_mode"] or tuple(extents) == self.spec.strides

    @property
    def is_partition(self) -> bool:
        """Whether every element is in exactly one window."""
        size = spatial_shape(self.x)
        if not size or self.is_padded or self.spec.strides != self.kernel:
            return False
        return set(self.spec.dilations) == {1} and not any(n % k for n, k in zip(size, self.kernel))

    @property
    def is_halving(self) -> bool:
        """Whether the windows are pairs, or squares of four, of float32 elements, side by side."""
        return (
            self.kernel in ((2,), (2, 2))
            and self.spec.strides == self.kernel
            and set(self.spec.dilations) == {1}
            and self.x.dtype == np.float32
            and not self.is_padded
            and not self.attributes["ceil_mode"]
        )

    @property
    def has_indices(self) -> bool:
        """Whether the model itself uses the indices."""
        return bool(self.indices.ir.uses()) or self.indices.ir.is_graph_output()

    @property
    def windows(self) -> int:
        """The number of windows, or an estimate if the batch size alone is unknown, else 0."""
        if self.x.shape is None or self.y.shape is None:
            return 0
        images = self.y.shape[0]
        sizes = [d for d in self.y.shape[1:] if isinstance(d, int)]
        is_known = len(sizes) == self.y.rank - 1 and isinstance(self.x.shape[1], int)
        if not is_known or spatial_shape(self.x) is None:
            return 0
        return math.prod(sizes) * (images if isinstance(images, int) else EXPECTED_IMAGES)


@rule("MaxPool", all_outputs=True)
def max_pool(
    op: GraphBuilder, x: Value, y: Value, indices: Value, dy: Value, dindices: Value | None, *,
    auto_pad: str, ceil_mode: int, dilations: Ints | None, kernel_shape: Ints, pads: Ints | None,
    storage_order: int, strides: Ints | None,
) -> Gradients:  # fmt: skip
    attributes = {
        "auto_pad": auto_pad, "ceil_mode": ceil_mode, "dilations": dilations,
        "kernel_shape": kernel_shape, "pads": pads, "storage_order": storage_order,
        "strides": strides,
    }  # fmt: skip
    spec = ConvSpec.of(len(kernel_shape), strides, dilations)
    require_defined_windows(spec, auto_pad, ceil_mode, pads, x, y, kernel_shape)
    problem = PoolProblem(x, y, indices, attributes, spec)
    if op.device in WITHOUT_SCATTER:
        part = _part(op, problem)
        if part is None:
            return _by_taps(op, problem, dy)
        return part.gradient(_by_taps(op, replace(problem, x=part.part()), dy))
    strategy = choose_strategy(STRATEGIES, problem)
    positions = strategy.build(op, problem)
    note = _note(problem)
    if note is None:
        return _put(op, dy, positions, problem)
    return noted(
        lambda: _put(op, dy, positions, problem),
        {MAX_POOL_DY: dy},
        MAX_POOL_DX,
        [x.name, note],
    )


def _note(problem: PoolProblem) -> dict[str, Ints] | None:
    """Return the attributes of a pool for its note; None if its pads depend on the image."""
    rank, spec, attributes = len(problem.kernel), problem.spec, problem.attributes
    if attributes["auto_pad"] not in ("NOTSET", "VALID"):
        return None
    has_pads = attributes["auto_pad"] == "NOTSET" and attributes["pads"]
    return {
        "kernel_shape": problem.kernel,
        "strides": spec.strides,
        "dilations": spec.dilations,
        "pads": attributes["pads"][:rank] if has_pads else [0] * rank,
    }


# Positions
# ------------------------------------------------------------------------------------------------


def by_indices(op: GraphBuilder, problem: PoolProblem) -> Value:
    """Let MaxPool return the positions."""
    indices = problem.indices
    if problem.attributes["storage_order"]:  # the indices of the node count columns first
        by_rows = {**problem.attributes, "storage_order": 0}
        indices = op.MaxPool(problem.x, _outputs=2, **by_rows)[1]
    # onnxruntime 1.19 returns negative numbers for a window of NaN, and no MaxUnpool accepts them.
    return op.Max(indices, 0) if problem.is_disjoint else indices


def by_comparison(op: GraphBuilder, problem: PoolProblem) -> Value:
    """Compare the maximum of each window with the maxima of its first row and of its first column.

    The comparisons are exact for every number. Infinities are equal to each other, because all of
    the compared values have gone through a MaxPool.
    """
    x, y = _cropped(op, problem), problem.y
    ones = [1] * len(problem.kernel)
    first = op.MaxPool(x, kernel_shape=ones, strides=problem.kernel) == y
    if len(problem.kernel) == 1:
        return _positions(op, problem, first, None)
    lower = op.MaxPool(x, kernel_shape=[1, 2], strides=[2, 2]) < y
    # If the left column has the maximum, the left element is the first maximum of the lower row.
    column = op.MaxPool(x, kernel_shape=[2, 1], strides=[2, 2]) == y
    return _positions(op, problem, first | (lower & column), lower)


def _cropped(op: GraphBuilder, problem: PoolProblem) -> Value:
    """Remove the last row and column if no window covers them."""
    size = spatial_shape(problem.x) or ()
    axes = [axis for axis, n in zip(problem.spec.axes, size) if n % 2]
    if not axes:
        return problem.x
    return op.Slice(problem.x, [0] * len(axes), [-1] * len(axes), axes)


def _positions(op: GraphBuilder, problem: PoolProblem, left: Value, lower: Value | None) -> Value:
    """Return the position of the left or right element, in the upper or lower row of a window."""
    channels, *size = _image_shape(problem.x)
    halves = [np.arange(0, n // 2 * 2, 2) for n in size]
    rows = np.zeros(1, np.int64) if lower is None else halves[0] * size[-1]
    starts = (np.arange(channels)[:, None] * math.prod(size) + rows).reshape(-1, 1)
    # onnxruntime adds the two constants when it compiles the graph.
    corners = _constant(op, starts) + _constant(op, halves[-1] + 1)
    within = op.Reshape(corners, [1, -1]) - _number(op, left)
    if lower is not None:
        within = within + _number(op, lower) * size[-1]
    images = arange(op, axis_size(op, problem.x, 0)) * math.prod([channels, *size])
    positions = op.cast(within, np.int64) + op.Reshape(images, [-1, 1])
    return reshape_like(op, positions, problem.y)


def _image_shape(value: Value) -> list[int]:
    """Return the sizes behind the batch axis, which the caller knows to be static."""
    sizes = [d for d in (value.shape or ())[1:] if isinstance(d, int)]
    assert len(sizes) == value.rank - 1
    return sizes


def _constant(op: GraphBuilder, numbers: Integers) -> Value:
    """Return an int32 constant: an image has fewer than 2^31 elements."""
    return op.constant(numbers.astype(np.int32))


def _number(op: GraphBuilder, condition: Value) -> Value:
    """Return a row for each image: 1 where a condition holds, else 0.

    A cast through bytes takes half of the time of a cast of booleans. The Reshape between the two
    casts keeps onnxruntime from fusing them.
    """
    count = math.prod(_image_shape(condition))
    return op.cast(op.Reshape(op.cast(condition, np.uint8), [-1, count]), np.int32)


STRATEGIES: tuple[Strategy[PoolProblem], ...] = (
    Strategy(
        by_comparison,
        lambda p: p.is_halving and p.windows >= MIN_COMPARED_WINDOWS and not p.has_indices,
        "They take 0.33 to 0.8 of the time of Indices, for which MaxPool visits every element.",
    ),
    Strategy(
        by_indices,
        lambda p: True,
        "For few windows it takes 0.75 of the time. Windows of 3x3 would need eight poolings.",
    ),
)


# Placing the gradient
# ------------------------------------------------------------------------------------------------


def _put(op: GraphBuilder, dy: Value, positions: Value, problem: PoolProblem) -> Value:
    """Return dx: `dy` at the given positions, and 0 elsewhere."""
    x = problem.x
    # onnxruntime's MaxUnpool supports only float32, and does not exist on CUDA.
    is_unpoolable = op.device != "cuda" and dy.dtype == np.float32 and problem.is_disjoint
    if is_unpoolable and problem.is_partition:
        return op.MaxUnpool(
            dy, positions, kernel_shape=problem.kernel, strides=problem.spec.strides
        )
    elements = static_size(x)
    count = int_vector(op, elements) if elements is not None else op.ReduceProd(op.shape(x))
    if is_unpoolable:
        # One row of windows: MaxUnpool takes a third of the time of a ScatterElements.
        row = int_vector(op, 1, 1, -1)
        size = op.Concat([1, 1], count, axis=0)
        flat = op.MaxUnpool(
            op.Reshape(dy, row), op.Reshape(positions, row), size, kernel_shape=[1], strides=[1]
        )
    else:
        flat = op.ScatterElements(
            zeros(op, dy, count),
            op.Reshape(positions, [-1]),
            op.Reshape(dy, [-1]),
            axis=0,
            reduction="add",
        )
    return op.Reshape(flat, op.shape(x))


# Without positions
# ------------------------------------------------------------------------------------------------


def _part(op: GraphBuilder, problem: PoolProblem) -> Crop | None:
    """Return the part of x that the windows read; None if they leave out no elements."""
    auto_pad = problem.attributes["auto_pad"]

    def first_element(numbers: Value, axis: int) -> Value:
        taps, stride = problem.kernel[axis], problem.spec.strides[axis]
        largest = op.MaxPool(numbers, auto_pad=auto_pad, kernel_shape=[taps], strides=[stride])
        return op.Slice(largest, [0], [1], [2]) - (taps - 1)

    return crop(op, problem.spec, auto_pad, problem.x, problem.y, problem.kernel, first_element)


def _by_taps(op: GraphBuilder, problem: PoolProblem, dy: Value) -> Value:
    """Return dx by comparisons alone, of the elements that each tap of the windows covers.

    The gradient of a window goes to the first tap whose element is the maximum.
    """
    parts = []
    nothing = op.constant(0, dy.dtype)
    for elements in _elements_of_taps(op, problem):
        is_largest = elements == problem.y
        parts.append(op.Where(is_largest, dy, nothing))
        dy = op.Where(is_largest, nothing, dy)
    if problem.is_partition:
        return _woven(op, parts, problem)
    # A convolution whose weights put each tap at its place in the window; images are channels.
    places = np.eye(len(parts)).reshape(len(parts), 1, *problem.kernel)
    sizes = op.Concat([-1, 1], op.shape(problem.y, 2), axis=0)
    stacked = op.Concat(*(op.Reshape(part, sizes) for part in parts), axis=1)
    start = _pads(op, problem)
    whole = transposed_conv(
        op, stacked, op.constant(places, dy.dtype), problem.spec, problem.x,
        op.Slice(start, [0], [len(problem.kernel)]),
    )  # fmt: skip
    return op.Reshape(whole, op.shape(problem.x))


def _elements_of_taps(op: GraphBuilder, problem: PoolProblem) -> Iterator[Value]:
    """Yield the elements of x that each tap covers, in the shape of y."""
    spec, axes = problem.spec, problem.spec.axes
    extents = np.array(spec.extents(problem.kernel))
    # From the first tap of the first window to that of the last one.
    reach = (op.shape(problem.y, 2) - 1) * np.array(spec.strides)
    x = problem.x
    if not problem.is_partition:
        before = op.Slice(_pads(op, problem), [0], [len(axes)])
        # Windows of ceil_mode may reach beyond the padding.
        after = op.Max(reach + extents - op.shape(x, 2) - before, 0)
        pads = op.Concat(before, after, axis=0)
        x = op.Pad(x, pads, op.constant(-np.inf, x.dtype), axes)
    for tap in np.ndindex(*problem.kernel):
        start = np.array(tap) * spec.dilations
        yield op.Slice(x, op.constant(start), reach + (start + 1), axes, list(spec.strides))


def _pads(op: GraphBuilder, problem: PoolProblem) -> Value:
    """Return the pads before every axis, then after every axis, as a vector."""
    given = problem.attributes
    pads = padding(
        op, problem.spec, given["auto_pad"], given["pads"], problem.x, problem.y, problem.kernel
    )
    return pads if isinstance(pads, Value) else op.constant(np.array(pads, np.int64))


def _woven(op: GraphBuilder, parts: Sequence[Value], problem: PoolProblem) -> Value:
    """Return the elements of disjoint windows that cover x, from a tensor for each tap."""
    kernel, rank = problem.kernel, len(problem.kernel)
    stacked = op.Concat(*(op.Unsqueeze(part, [-1]) for part in parts), axis=-1)
    sizes = op.Concat(op.shape(problem.y), list(kernel), axis=0)
    order = [axis for i in range(rank) for axis in (2 + i, 2 + rank + i)]
    woven = op.Transpose(op.Reshape(stacked, sizes), perm=[0, 1, *order])
    return op.Reshape(woven, op.shape(problem.x))


@rule("GlobalMaxPool")
def global_max_pool(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Value:
    flat = op.Reshape(x, [0, 0, -1])
    largest = op.ArgMax(flat, axis=2)
    if op.device in WITHOUT_SCATTER:
        numbers = op.cast(arange(op, axis_size(op, flat, 2)), np.int32)
        is_largest = numbers == op.cast(largest, np.int32)
        chosen = op.Where(is_largest, op.Reshape(dy, [0, 0, 1]), op.constant(0, dy.dtype))
        return op.Reshape(chosen, op.shape(x))
    zero = zeros_like(op, flat)
    dx = op.ScatterElements(zero, largest, op.Reshape(dy, [0, 0, 1]), axis=2)
    return op.Reshape(dx, op.shape(x))


@rule("MaxUnpool")
def max_unpool(
    op: GraphBuilder, x: Value, indices: Value, output_shape: Value | None, y: Value, dy: Value, *,
    kernel_shape: Ints, pads: Ints | None, strides: Ints | None,
) -> Gradients:  # fmt: skip
    return op.Gather(op.Reshape(dy, [-1]), indices), None, None
