"""Pools: what a window says about its elements goes back to them.

An average (and every other sum over windows) is separable: along each axis it is a matrix, stops by
elements, of a few diagonals, and its gradient is the transposed one. That covers padding, dilation,
strides and the shorter windows at the end alike, and a MatMul is many times faster than the loops
it replaces. A maximum hands its gradient to the one element it came from, as in PyTorch the first
of equals.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.building import (
    Ints,
    arange,
    axis_size,
    int_vector,
    spatial_shape,
    static_size,
    trailing_size,
    zeros,
)
from onnxfit.gradients.rules.convolution import ConvSpec, padding, transposed_conv
from onnxfit.gradients.table import Gradients, decompose, gradient
from onnxfit.graph.values import GraphBuilder, Value

# Maxima
# ----------------------------------------------------------------------------------------------------------------------


@gradient("MaxPool", all_outputs=True)
def max_pool(
    op: GraphBuilder, x: Value, y: Value, indices: Value, dy: Value, dindices: Value | None, *,
    auto_pad: str, ceil_mode: int, dilations: Ints | None, kernel_shape: Ints, pads: Ints | None, storage_order: int, strides: Ints | None,
) -> Gradients:  # fmt: skip
    way = ConvSpec.of(len(kernel_shape), strides, dilations)
    if storage_order:  # these indices count down columns
        settings: dict[str, Any] = {"dilations": dilations, "pads": pads, "strides": strides}
        indices = op.MaxPool(
            x,
            _outputs=2,
            auto_pad=auto_pad,
            ceil_mode=ceil_mode,
            kernel_shape=kernel_shape,
            **settings,
        )[1]
    size = spatial_shape(x)
    tiled = way.strides == tuple(kernel_shape) and set(way.dilations) == {1} and not any(pads or ())
    # every element in one window: no sums, and faster
    if tiled and size and not any(n % k for n, k in zip(size, kernel_shape)):
        return op.MaxUnpool(dy, indices, kernel_shape=kernel_shape, strides=way.strides)
    elements = static_size(x)
    count = int_vector(op, elements) if elements is not None else op.ReduceProd(op.shape(x))
    flat = op.ScatterElements(
        zeros(op, dy, count),
        op.Reshape(indices, [-1]),
        op.Reshape(dy, [-1]),
        axis=0,
        reduction="add",
    )
    return op.Reshape(flat, op.shape(x))


@gradient("GlobalMaxPool")
def global_max_pool(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Value:
    flat = op.Reshape(x, [0, 0, -1])
    return op.Reshape(
        op.ScatterElements(
            zeros_like(op, flat), op.ArgMax(flat, axis=2), op.Reshape(dy, [0, 0, 1]), axis=2
        ),
        op.shape(x),
    )


@gradient("MaxUnpool")
def max_unpool(
    op: GraphBuilder, x: Value, indices: Value, output_shape: Value | None, y: Value, dy: Value, *,
    kernel_shape: Ints, pads: Ints | None, strides: Ints | None,
) -> Gradients:  # fmt: skip
    return op.Gather(op.Reshape(dy, [-1]), indices), None, None


# Sums over windows
# -----------------------------------------------------------------------------------------------------------


@gradient("AveragePool")
def average_pool(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *,
    auto_pad: str, ceil_mode: int, count_include_pad: int, dilations: Ints | None, kernel_shape: Ints, pads: Ints | None, strides: Ints | None,
) -> Value:  # fmt: skip
    """As the definition since opset 19: what a window of ceil_mode sees behind the padding does not
    count.
    """
    windows = _windows(op, x, y, auto_pad, kernel_shape, pads, strides, dilations)
    counts = [
        w.counts(op, bool(count_include_pad), len(windows) - 1 - i, dy.dtype)
        for i, w in enumerate(windows)
    ]
    return _spread(op, dy / functools.reduce(operator.mul, counts), x, windows)


@gradient("LpPool")
def lp_pool(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *,
    auto_pad: str, ceil_mode: int, dilations: Ints | None, kernel_shape: Ints, p: int, pads: Ints | None, strides: Ints | None,
) -> Value:  # fmt: skip
    """y = (sum of |x|^p)^(1/p)"""
    windows = _windows(op, x, y, auto_pad, kernel_shape, pads, strides, dilations)
    return _power(op, x, p - 1) * _spread(op, _per_power(op, dy, y, p - 1), x, windows)


@gradient("GlobalAveragePool")
def global_average_pool(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Value:
    return op.Expand(dy / trailing_size(op, x, 2), op.shape(x))


@decompose("GlobalLpPool")
def global_lp_pool(op: GraphBuilder, x: Value, *, p: int) -> Value:
    axes = list(range(2, x.rank))
    if p in (1, 2):
        return op.ReduceL1(x, axes) if p == 1 else op.ReduceL2(x, axes)
    total: Value = op.ReduceSum(abs(x) ** p, axes) ** (1 / p)
    return total


@decompose("LRN")
def lrn(op: GraphBuilder, x: Value, *, alpha: float, beta: float, bias: float, size: int) -> Value:
    """x / (bias + alpha / size * sum of x^2 over the channels around)^beta (Krizhevsky, Sutskever
    and Hinton 2012, section 3.3)
    """
    channels = _size(op, x, 1)
    near = Windows(channels, channels, (size - 1) // 2, size // 2, size).matrix(op, x.dtype)
    flat = op.Reshape(x, [0, 0, -1])
    powered: Value = (bias + alpha / size * (near @ (flat * flat))) ** beta
    return op.Reshape(flat / powered, op.shape(x))


def _power(op: GraphBuilder, x: Value, exponent: int) -> Value:
    """sign(x) |x|^exponent"""
    if exponent == 0:
        return op.Sign(x)
    if exponent == 1:
        return x
    magnitude = abs(x)
    return x * (magnitude if exponent == 2 else magnitude ** (exponent - 1))


def _per_power(op: GraphBuilder, dy: Value, y: Value, exponent: int) -> Value:
    """dy / y^exponent, in windows full of zeros any number: it meets nothing but zeros."""
    if exponent == 0:
        return dy
    y = op.Where(y == 0, 1, y)
    return dy / (y if exponent == 1 else y**exponent)


# Windows
# ---------------------------------------------------------------------------------------------------------------------

Size = Union[int, Value]
Array = Any  # of numpy where the sizes are known, else a Value: one formula for both

# Up to this size of an axis its matrix is multiplied; a convolution costs by the window instead of
# the axis.
MAX_POOLED_WIDTH = 512


@dataclass(frozen=True)
class Windows:
    """The windows along one axis."""

    size: Size
    stops: Size
    before: Size
    after: Size
    taps: int
    stride: int = 1
    dilation: int = 1

    @property
    def fixed(self) -> bool:
        return all(isinstance(n, int) for n in (self.size, self.stops, self.before))

    def matrix(self, op: GraphBuilder, dtype: npt.DTypeLike) -> Value:
        """(stops, size): 1 where a window sees an element."""
        elements = _upto(op, self.size, (1, -1))
        return op.cast(
            functools.reduce(operator.or_, (p == elements for p in self._positions(op, (-1, 1)))),
            dtype,
        )

    def counts(
        self, op: GraphBuilder, with_padding: bool, behind: int, dtype: npt.DTypeLike
    ) -> Array:
        """(stops, 1, ...): how many elements each window has, with as many axes behind."""
        last = self.size + self.after if with_padding else self.size
        first = -self.before if with_padding else 0
        counted = ((p >= first) & (p < last) for p in self._positions(op, (-1, *[1] * behind)))
        return sum(
            c.astype(dtype) if isinstance(c, np.ndarray) else op.cast(c, dtype) for c in counted
        )

    def _positions(self, op: GraphBuilder, shape: Ints) -> list[Array]:
        """Of every tap, at every stop."""
        start = _upto(op, self.stops, shape) * self.stride - self.before
        return [start + tap * self.dilation for tap in range(self.taps)]


def _windows(
    op: GraphBuilder,
    x: Value,
    y: Value,
    auto_pad: str,
    kernel_shape: Ints,
    pads: Ints | None,
    strides: Ints | None,
    dilations: Ints | None,
) -> list[Windows]:
    """The windows along each spatial axis."""
    axes = len(kernel_shape)
    way = ConvSpec.of(axes, strides, dilations)
    found = padding(op, way, auto_pad, pads, x, y, kernel_shape)
    reach: list[Size] = [
        op.Gather(found, i) if isinstance(found, Value) else found[i] for i in range(2 * axes)
    ]
    return [
        Windows(
            _size(op, x, 2 + i),
            _size(op, y, 2 + i),
            reach[i],
            reach[axes + i],
            kernel_shape[i],
            way.strides[i],
            way.dilations[i],
        )
        for i in range(axes)
    ]


def _spread(op: GraphBuilder, dy: Value, x: Value, windows: Sequence[Windows]) -> Value:
    """The gradient of sums over windows: every stop's added to all that its window sees."""
    if all(w.fixed and isinstance(w.size, int) and w.size <= MAX_POOLED_WIDTH for w in windows):
        return _by_matrices(op, dy, [w.matrix(op, dy.dtype) for w in windows])
    pads = [w.before for w in windows] + [w.after for w in windows]
    way = ConvSpec.of(len(windows), [w.stride for w in windows], [w.dilation for w in windows])
    known, start = [pad for pad in pads if isinstance(pad, int)], None
    if len(known) == len(pads):
        way = replace(way, pads=tuple(known))
    else:
        start = op.Concat(*(op.Reshape(pad, [1]) for pad in pads[: len(windows)]), axis=0)
    ones = op.constant(np.ones((1, 1, *(w.taps for w in windows)), dy.dtype))
    alone = op.Reshape(dy, op.Concat([-1, 1], op.shape(dy, 2), axis=0))
    return op.Reshape(transposed_conv(op, alone, ones, way, x, start), op.shape(x))


def _by_matrices(op: GraphBuilder, dy: Value, matrices: Sequence[Value]) -> Value:
    """A MatMul for each axis, the last one first."""
    axis = dy.rank - 1
    dx = dy @ matrices[-1]
    for matrix in reversed(matrices[:-1]):
        axis -= 1
        flat = op.Reshape(dx, [0] * (axis + 1) + [-1]) if axis < dy.rank - 2 else dx
        dx, behind = op.Transpose(matrix, perm=[1, 0]) @ flat, dx
        if axis < dy.rank - 2:
            dx = op.Reshape(dx, op.Concat([0] * axis + [-1], op.shape(behind, axis + 1), axis=0))
    return dx


def _size(op: GraphBuilder, value: Value, axis: int) -> Size:
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else op.Squeeze(axis_size(op, value, axis))


def _upto(op: GraphBuilder, size: Size, shape: Ints) -> Array:
    """0, 1, ..., size - 1 in a shape."""
    if isinstance(size, int):
        return np.arange(size).reshape(shape)
    return op.Reshape(arange(op, size), list(shape))
