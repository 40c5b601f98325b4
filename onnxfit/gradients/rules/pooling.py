"""Sums over windows: their gradient goes back to all elements of the window.

An average, like every other sum over windows, is separable. Along each axis it is a matrix
(positions, elements) of a few diagonals, and its gradient is the transposed matrix. That covers
padding, dilation, strides and the shorter windows at the end alike, and a MatMul is many times
faster than the loops it replaces. Maxima are in max_pooling.py.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from onnxfit.gradients.building import (
    Ints,
    arange,
    axis_size,
    spatial_shape,
    trailing_size,
)
from onnxfit.gradients.rules.convolution import ConvSpec, crop, padding, transposed_conv
from onnxfit.gradients.table import NoGradientError, decompose, rule
from onnxfit.graph.values import GraphBuilder, Value

# Up to this size of an axis, sums over windows are a product with a matrix. The cost of the product
# grows with the axis, and the cost of a convolution with the window.
MAX_POOLED_WIDTH = 512

# Sums over windows
# ------------------------------------------------------------------------------------------------


@rule("AveragePool")
def average_pool(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *,
    auto_pad: str, ceil_mode: int, count_include_pad: int, dilations: Ints | None,
    kernel_shape: Ints, pads: Ints | None, strides: Ints | None,
) -> Value:  # fmt: skip
    """Divide by the number of elements of each window, as defined since opset 19.

    Elements that a window of ceil_mode covers behind the padding do not count. With
    `count_include_pad`, onnxruntime 1.20 and older versions count them, too. The divisor is then
    that of the version that runs the graph.
    """
    spec = ConvSpec.of(len(kernel_shape), strides, dilations)
    require_defined_windows(spec, auto_pad, ceil_mode, pads, x, y, kernel_shape)

    def first_element(numbers: Value, axis: int) -> Value:
        taps, stride = kernel_shape[axis], spec.strides[axis]
        means = op.AveragePool(numbers, auto_pad=auto_pad, kernel_shape=[taps], strides=[stride])
        return op.Slice(means, [0], [1], [2]) - (taps - 1) / 2

    part = crop(op, spec, auto_pad, x, y, kernel_shape, first_element)
    pixels = x if part is None else part.part()
    windows = _windows(op, pixels, y, auto_pad, kernel_shape, pads, strides, dilations)
    is_measured = bool(ceil_mode and count_include_pad)
    with_padding = bool(count_include_pad) and not is_measured
    counts = [
        w.counts(op, with_padding, len(windows) - 1 - i, dy.dtype) for i, w in enumerate(windows)
    ]
    divisor = functools.reduce(operator.mul, counts)
    # A dilated window may cover nothing but padding.
    dy = dy / (op.Max(divisor, 1) if isinstance(divisor, Value) else np.maximum(divisor, 1))
    if is_measured:
        ones = op.Expand(op.constant(1, dy.dtype), op.Concat([1, 1], op.shape(x, 2), axis=0))
        # the share of the elements that are not padding
        dy = dy * op.AveragePool(
            ones, auto_pad=auto_pad, ceil_mode=1, count_include_pad=1, dilations=dilations,
            kernel_shape=kernel_shape, pads=pads, strides=strides,
        )  # fmt: skip
    dx = _sum_gradient(op, dy, pixels, windows)
    return dx if part is None else part.gradient(dx)


@rule("LpPool")
def lp_pool(
    op: GraphBuilder, x: Value, y: Value, dy: Value, *,
    auto_pad: str, ceil_mode: int, dilations: Ints | None, kernel_shape: Ints, p: int,
    pads: Ints | None, strides: Ints | None,
) -> Value:  # fmt: skip
    """y = (sum of |x|^p)^(1/p), so dx = sign(x) |x|^(p-1) dy / y^(p-1)."""
    spec = ConvSpec.of(len(kernel_shape), strides, dilations)
    require_defined_windows(spec, auto_pad, ceil_mode, pads, x, y, kernel_shape)

    def first_element(numbers: Value, axis: int) -> Value:
        taps, stride = kernel_shape[axis], spec.strides[axis]
        sums = op.LpPool(numbers, auto_pad=auto_pad, kernel_shape=[taps], p=1, strides=[stride])
        return op.Slice(sums, [0], [1], [2]) / taps - (taps - 1) / 2

    part = crop(op, spec, auto_pad, x, y, kernel_shape, first_element)
    pixels = x if part is None else part.part()
    windows = _windows(op, pixels, y, auto_pad, kernel_shape, pads, strides, dilations)
    sums = _sum_gradient(op, _divided_by_power(op, dy, y, p - 1), pixels, windows)
    dx = _signed_power(op, pixels, p - 1) * sums
    return dx if part is None else part.gradient(dx)


@rule("GlobalAveragePool")
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
    """y = x / (bias + alpha / size * sum of x^2 over `size` neighbouring channels)^beta.

    Krizhevsky, Sutskever and Hinton 2012, section 3.3.
    """
    channels = _size(op, x, 1)
    neighbours = Windows(channels, channels, (size - 1) // 2, size // 2, size)
    matrix = neighbours.matrix(op, x.dtype)
    flat = op.Reshape(x, [0, 0, -1])
    divisor: Value = (bias + alpha / size * (matrix @ (flat * flat))) ** beta
    return op.Reshape(flat / divisor, op.shape(x))


def _signed_power(op: GraphBuilder, x: Value, exponent: int) -> Value:
    """Return sign(x) |x|^exponent."""
    if exponent == 0:
        return op.Sign(x)
    if exponent == 1:
        return x
    magnitude = abs(x)
    return x * (magnitude if exponent == 2 else magnitude ** (exponent - 1))


def _divided_by_power(op: GraphBuilder, dy: Value, y: Value, exponent: int) -> Value:
    """Return dy / y^exponent, and dy where y is 0: it is multiplied by zeros there."""
    if exponent == 0:
        return dy
    y = op.Where(y == 0, 1, y)
    return dy / (y if exponent == 1 else y**exponent)


# Windows
# ------------------------------------------------------------------------------------------------


def require_defined_windows(
    spec: ConvSpec, auto_pad: str, ceil_mode: int, pads: Ints | None, x: Value, y: Value,
    kernel: Ints,
) -> None:  # fmt: skip
    """Raise NoGradientError for windows that ONNX and versions of onnxruntime define differently.

    ONNX's inference then gives the output another size than the kernel does.
    """
    extents = spec.extents(kernel)
    is_cropped = any(stride > extent for stride, extent in zip(spec.strides, extents))
    if auto_pad.startswith("SAME") and (max(spec.dilations) > 1 or (ceil_mode and is_cropped)):
        form = "dilations" if max(spec.dilations) > 1 else "ceil_mode and strides above its windows"
        raise NoGradientError(
            f"versions of onnxruntime pad {auto_pad} with {form} differently",
            "write the pads that you mean into the attribute pads",
        )
    pixels, positions = spatial_shape(x), spatial_shape(y)
    if auto_pad.startswith("SAME") or pixels is None or positions is None:
        return
    before = pads if auto_pad == "NOTSET" and pads else (0,) * len(pixels)
    for axis, (size, count, stride) in enumerate(zip(pixels, positions, spec.strides)):
        if count > 1 and (count - 1) * stride - before[axis] >= size:
            raise NoGradientError(
                f"the last window of its ceil_mode along axis {2 + axis} begins behind the last"
                " element, and versions of onnxruntime leave it out or not",
                "use ceil_mode=0, or other pads",
            )


Size = Union[int, Value]
Array = Any  # of NumPy where the sizes are known, else a Value: one formula for both


@dataclass(frozen=True)
class Windows:
    """The windows along one axis: `positions` of them, over `size` elements with padding."""

    size: Size
    positions: Size
    pad_before: Size
    pad_after: Size
    taps: int
    stride: int = 1
    dilation: int = 1

    @property
    def is_static(self) -> bool:
        return all(isinstance(n, int) for n in (self.size, self.positions, self.pad_before))

    def matrix(self, op: GraphBuilder, dtype: npt.DTypeLike) -> Value:
        """Return (positions, size): 1 where a window covers an element, else 0."""
        elements = _arange(op, self.size, (1, -1))
        covers = (index == elements for index in self._indices(op, (-1, 1)))
        return op.cast(functools.reduce(operator.or_, covers), dtype)

    def counts(
        self, op: GraphBuilder, with_padding: bool, axes_behind: int, dtype: npt.DTypeLike
    ) -> Array:
        """Return (positions, 1, ...): the number of elements of each window."""
        last = self.size + self.pad_after if with_padding else self.size
        first = -self.pad_before if with_padding else 0
        shape = (-1, *[1] * axes_behind)
        counted = ((i >= first) & (i < last) for i in self._indices(op, shape))
        return sum(
            c.astype(dtype) if isinstance(c, np.ndarray) else op.cast(c, dtype) for c in counted
        )

    def _indices(self, op: GraphBuilder, shape: Ints) -> list[Array]:
        """Return the element that each tap covers at every position."""
        start = _arange(op, self.positions, shape) * self.stride - self.pad_before
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
    """Return the windows along each spatial axis."""
    axes = len(kernel_shape)
    spec = ConvSpec.of(axes, strides, dilations)
    all_pads = padding(op, spec, auto_pad, pads, x, y, kernel_shape)
    ends: list[Size] = []
    for i in range(2 * axes):
        ends.append(op.Gather(all_pads, i) if isinstance(all_pads, Value) else all_pads[i])
    return [
        Windows(
            _size(op, x, 2 + i),
            _size(op, y, 2 + i),
            ends[i],
            ends[axes + i],
            kernel_shape[i],
            spec.strides[i],
            spec.dilations[i],
        )
        for i in range(axes)
    ]


def _sum_gradient(op: GraphBuilder, dy: Value, x: Value, windows: Sequence[Windows]) -> Value:
    """Return the gradient of sums over windows: each dy, added to all elements of its window."""
    if all(w.is_static and isinstance(w.size, int) and w.size <= MAX_POOLED_WIDTH for w in windows):
        return _multiply_by_matrices(op, dy, [w.matrix(op, dy.dtype) for w in windows])
    spec = ConvSpec.of(len(windows), [w.stride for w in windows], [w.dilation for w in windows])
    all_pads = [*(w.pad_before for w in windows), *(w.pad_after for w in windows)]
    known_pads = tuple(pad for pad in all_pads if isinstance(pad, int))
    start = None
    if len(known_pads) == len(all_pads):
        spec = replace(spec, pads=known_pads)
    else:
        start = op.Concat(*(op.Reshape(w.pad_before, [1]) for w in windows), axis=0)
    ones = op.constant(np.ones((1, 1, *(w.taps for w in windows)), dy.dtype))
    single_channel = op.Reshape(dy, op.Concat([-1, 1], op.shape(dy, 2), axis=0))
    return op.Reshape(transposed_conv(op, single_channel, ones, spec, x, start), op.shape(x))


def _multiply_by_matrices(op: GraphBuilder, dy: Value, matrices: Sequence[Value]) -> Value:
    """Multiply dy by a matrix along each spatial axis, the last one first."""
    dx = dy @ matrices[-1]
    for axis, matrix in reversed(list(enumerate(matrices[:-1], dy.rank - len(matrices)))):
        if axis == dy.rank - 2:
            dx = op.Transpose(matrix, perm=[1, 0]) @ dx
            continue
        # The axes behind this one are one axis for the product.
        flat = op.Reshape(dx, [0] * (axis + 1) + [-1])
        product = op.Transpose(matrix, perm=[1, 0]) @ flat
        shape = op.Concat([0] * axis + [-1], op.shape(dx, axis + 1), axis=0)
        dx = op.Reshape(product, shape)
    return dx


def _size(op: GraphBuilder, value: Value, axis: int) -> Size:
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else op.Squeeze(axis_size(op, value, axis))


def _arange(op: GraphBuilder, size: Size, shape: Ints) -> Array:
    """Return 0, 1, ..., size - 1 in a shape."""
    if isinstance(size, int):
        return np.arange(size).reshape(shape)
    return op.Reshape(arange(op, size), list(shape))
