"""Quantized numbers, trained by the straight-through estimator: as if they were not rounded (Bengio
et al. 2013, arXiv:1308.3432).

An integer from QuantizeLinear represents the real number x / scale + zero_point, which was rounded
to it. It has that number's gradient, a float, which passes from DequantizeLinear back to
QuantizeLinear: directly, or through operators that move integers (Reshape, Transpose, Gather,
Concat ...) or multiply them (MatMulInteger, ConvInteger). For q = clamp(round(x / s) + z) and
y = s (q - z), the gradients are:

- of x: dy where the rounded x / s was in range, as in torch's fake_quantize, and 0 where it was
  clamped;
- of s, if it is trained: dy times q - z - x / s in range, or times q - z where clamped, summed over
  the elements that s scales: learned step sizes (Esser et al. 2020, arXiv:1902.08153), without
  their factor 1 / sqrt(N Q), by which `onnxfit.trainable.quantized.learning` multiplies;
- of z, if it is trained: 0 in range, and -s dy where clamped, summed in the same way (LSQ+, Bhalgat
  et al. 2020, arXiv:2004.09576). As z is an integer, a QuantizeLinear of scale 1 computes it from a
  float. The two nodes share the gradient: QuantizeLinear adds s dy in range, and DequantizeLinear
  subtracts s dy everywhere;
- of the scale of a DequantizeLinear of frozen integers: dy (q - z), summed;
- of the input of DynamicQuantizeLinear: dy / s, as if its scale and zero point were constants.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.gradients.blocker import TYPED
from onnxfit.gradients.building import (
    MICROSOFT,
    Ints,
    arange,
    axis_size,
    constant_elements,
    equality_mask,
)
from onnxfit.gradients.rules.convolution import conv
from onnxfit.gradients.rules.linear import matmul
from onnxfit.gradients.table import Gradients, NoGradientError, decompose, rule
from onnxfit.graph.values import GraphBuilder, Value

Array = npt.NDArray[Any]
# With smaller scales, the distance of two floats may be indistinguishable from 0.
SMALLEST_SCALE = 1e-25


@rule("QuantizeLinear")
def quantize(
    op: GraphBuilder,
    x: Value,
    scale: Value,
    zero_point: Value | None,
    y: Value,
    dy: Value,
    *,
    axis: int,
    block_size: int,
) -> Gradients:
    s = _expand_scale(op, scale, x, axis, block_size)
    v = op.cast(x, scale.dtype) / s
    in_range = _constant_range(op, x, scale, zero_point, y.dtype, axis, block_size)
    if in_range is None:
        rounded = op.Round(v)
        if zero_point is not None:
            zero = _as_float(op, zero_point, scale.dtype)
            rounded = rounded + _expand_scale(op, zero, x, axis, block_size)
        in_range = op.cast(op.Clip(rounded, *_limits(y.dtype)) == rounded, scale.dtype)
    dv = op.cast(dy, scale.dtype) * in_range
    dx = dv / s
    return (
        dx,
        lambda: _sum_to_scale(op, -dx * v, scale, axis, block_size),
        lambda: _sum_to_zero_point(op, dv, scale, zero_point, axis, block_size),
    )


@rule("DequantizeLinear")
def dequantize(
    op: GraphBuilder,
    x: Value,
    scale: Value,
    zero_point: Value | None,
    y: Value,
    dy: Value,
    *,
    axis: int,
    block_size: int,
) -> Gradients:
    def of_scale() -> Value:
        ones = op.Expand(op.constant(1, scale.dtype), op.shape(scale))
        # q - z; a DequantizeLinear with scale 1, because Cast has no int4
        level = op.DequantizeLinear(x, ones, zero_point, axis=axis, block_size=block_size or None)
        return _sum_to_scale(op, op.cast(dy, scale.dtype) * level, scale, axis, block_size)

    def of_x() -> Value:
        # y may have another type than the scale, `output_dtype`.
        return dy * op.cast(_expand_scale(op, scale, y, axis, block_size), dy.dtype)

    def of_zero_point() -> Value:
        return -_sum_to_zero_point(op, of_x(), scale, zero_point, axis, block_size)

    return of_x, of_scale, of_zero_point


def _infer_integers(node: ir.Node) -> None:
    """The type of the zero point, uint8 without one, and the shape of the input."""
    x, _, *others = node.inputs
    zero_point = others[0] if others else None
    known_type = ir.TensorType(ir.DataType.UINT8) if zero_point is None else zero_point.type
    out = node.outputs[0]
    out.type = out.type or known_type
    out.shape = x.shape if x is not None and out.shape is None else out.shape


def _infer_real_numbers(node: ir.Node) -> None:
    """The type of the scale, and the shape of the input."""
    x, scale = node.inputs[:2]
    out = node.outputs[0]
    out.type = scale.type if scale is not None and out.type is None else out.type
    out.shape = x.shape if x is not None and out.shape is None else out.shape


@decompose("QuantizeLinear", MICROSOFT, infer=_infer_integers)
def quantize_of_microsoft(
    op: GraphBuilder,
    x: Value,
    scale: Value,
    zero_point: Value | None,
    *,
    axis: int = 1,
    block_size: int = 0,
) -> Value:
    return op.QuantizeLinear(x, scale, zero_point, axis=axis, block_size=block_size or None)


@decompose("DequantizeLinear", MICROSOFT, infer=_infer_real_numbers)
def dequantize_of_microsoft(
    op: GraphBuilder,
    x: Value,
    scale: Value,
    zero_point: Value | None,
    *,
    axis: int = 1,
    block_size: int = 0,
) -> Value:
    return op.DequantizeLinear(x, scale, zero_point, axis=axis, block_size=block_size or None)


@rule("DynamicQuantizeLinear", all_outputs=True)
def quantize_dynamically(
    op: GraphBuilder,
    x: Value,
    y: Value,
    scale: Value,
    zero_point: Value,
    dy: Value | None,
    dscale: Value | None,
    dzero_point: Value | None,
) -> Gradients:
    return None if dy is None else dy / scale


def _limits(dtype: np.dtype[np.generic]) -> tuple[float, float]:
    """The least and the greatest number of an element type."""
    is_integer = "int" in dtype.name
    # ml_dtypes has no annotations
    limits: Any = ml_dtypes.iinfo(dtype) if is_integer else ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(limits.min), float(limits.max)


def _constant_range(
    op: GraphBuilder,
    x: Value,
    scale: Value,
    zero_point: Value | None,
    dtype: np.dtype[np.generic],
    axis: int,
    block_size: int,
) -> Value | None:
    """1 where a float32 is rounded to an integer in range, 0 where it is clamped.

    None unless scale and zero point are constants: then each clamped number lies beyond a constant.
    This takes a fifth of the time of rounding once more to compare the integers (64 images of 32
    channels, 8x8, one thread).
    """
    s, zero = (
        constant_elements(scale),
        np.zeros((), dtype) if zero_point is None else constant_elements(zero_point),
    )
    if s is None or zero is None or x.dtype != np.float32 or s.dtype != np.float32:
        return None
    if "int" not in dtype.name:
        return None
    limits = [limit - zero.astype(np.float64) for limit in _limits(dtype)]
    ends = [_last_rounded_to(limit, abs(s), sign) for limit, sign in zip(limits, (-1, 1))]
    if not all(np.isfinite(end).all() for end in ends) or not (abs(s) > SMALLEST_SCALE).all():
        return None
    # The scale of a block is negative if its largest number becomes the least integer.
    ends = [np.where(s < 0, -other, end) for end, other in zip(ends, ends[::-1])]
    low, high = (_expand_scale(op, op.constant(end), x, axis, block_size) for end in ends)
    inside = op.Min(op.Max(x, low), high) if low.rank else op.Clip(x, low, high)
    return equality_mask(op, inside, x)


def _last_rounded_to(limit: Array, scale: Array, sign: int) -> Array:
    """Return the largest float32 (`sign` 1) or least one (-1) that is not rounded beyond a limit.

    - `limit`: the last integer, without the zero point.
    - `scale`: float32; the rounded number is a float32 divided by it.
    """
    end = ((limit + sign * 0.5) * scale).astype(np.float32)
    outwards = np.float32(sign * np.inf)

    def within(x: Array) -> Array:
        return sign * np.rint(x / scale) <= sign * limit

    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(4):  # the product is rounded, and so is the quotient
            end = np.where(within(end), end, np.nextafter(end, -outwards))
        for _ in range(4):
            beyond = np.nextafter(end, outwards)
            end = np.where(within(beyond), beyond, end)
    return np.asarray(end, np.float32)


def _as_float(op: GraphBuilder, q: Value, dtype: np.dtype[np.generic]) -> Value:
    """Zero points as floats."""
    array = constant_elements(q)
    if array is not None:
        return op.constant(array, dtype)
    # The zero determines the type of q: onnxruntime moves a DequantizeLinear without it elsewhere,
    # and assumes uint8 there.
    return op.DequantizeLinear(q, op.constant(1, dtype), op.constant(np.zeros((), q.dtype)))


def _expand_scale(op: GraphBuilder, scale: Value, x: Value, axis: int, block_size: int) -> Value:
    """A scale in a shape that broadcasts to x: one for all elements, one per index of the axis, or
    one for each `block_size` elements along it.
    """
    if x.shape is None or scale.shape is None:
        raise NoGradientError(f"the rank of {x.name!r} or of its scale is unknown", TYPED)
    axis %= max(x.rank, 1)
    if block_size:
        size = x.shape[axis]
        if isinstance(size, int):
            block: Value = op.constant(np.arange(size) // block_size)
        else:
            block = arange(op, axis_size(op, x, axis)) / block_size
        return op.Gather(scale, block, axis=axis)
    if scale.rank == 1 and axis < x.rank - 1:
        return op.Unsqueeze(scale, list(range(1, x.rank - axis)))
    return scale


def _sum_to_scale(op: GraphBuilder, dy: Value, scale: Value, axis: int, block_size: int) -> Value:
    """Sum over the elements that each scale was expanded to."""
    assert scale.shape is not None  # _expand_scale has checked it
    axis %= max(dy.rank, 1)
    if block_size:
        return sum_blocks(op, dy, axis, axis_size(op, scale, axis), block_size)
    if scale.rank == 0:
        return op.ReduceSum(dy, keepdims=0)
    if scale.shape == (1,):
        return op.Reshape(op.ReduceSum(dy, keepdims=0), [1])
    others = [i for i in range(dy.rank) if i != axis]
    sums = op.ReduceSum(dy, others, keepdims=0) if others else dy
    if isinstance(scale.shape[0], int):
        return sums
    # the scale has one element or one per index, known only at run time
    one = op.Reshape(op.NonZero(op.shape(scale) == op.constant(np.int64(1))), [-1])
    return op.ReduceSum(sums, one, keepdims=1, noop_with_empty_axes=1)


def sum_blocks(op: GraphBuilder, x: Value, axis: int, count: Value, block_size: int) -> Value:
    """Sum each of `count` blocks along an axis; the last block may be incomplete."""
    missing = count * block_size - axis_size(op, x, axis)
    padded = op.Pad(x, op.Concat([0], missing, axis=0), None, [axis])
    blocks = op.Concat(op.shape(x, 0, axis), count, [block_size], op.shape(x, axis + 1), axis=0)
    return op.ReduceSum(op.Reshape(padded, blocks), [axis + 1], keepdims=0)


def _sum_to_zero_point(
    op: GraphBuilder,
    dy: Value,
    scale: Value,
    zero_point: Value | None,
    axis: int,
    block_size: int,
) -> Value:
    """Sum over the elements that each zero point was expanded to; it has the scale's shape, or one
    element.
    """
    like = scale if zero_point is None or zero_point.shape is None else zero_point
    return _sum_to_scale(op, dy, like, axis, block_size)


# Products of integers
# --------------------------------------------------------------------------------------------------


@rule("MatMulInteger", broadcasts=True)
def matmul_of_integers(
    op: GraphBuilder,
    a: Value,
    b: Value,
    a_zero_point: Value | None,
    b_zero_point: Value | None,
    y: Value,
    dy: Value,
) -> Gradients:
    """The gradients of a MatMul of the numbers that the integers represent.

    There may be a zero point for each row of a, and for each column of b.
    """
    if a_zero_point is not None and a_zero_point.rank == 1:
        a_zero_point = op.Unsqueeze(a_zero_point, [-1])
    left = _subtract_zero_point(op, a, a_zero_point, dy.dtype)
    right = _subtract_zero_point(op, b, b_zero_point, dy.dtype)
    entries = matmul(op, left, right, y, dy)
    assert isinstance(entries, tuple)
    return (*entries, None, None)


@rule("ConvInteger")
def convolution_of_integers(
    op: GraphBuilder,
    x: Value,
    w: Value,
    x_zero_point: Value | None,
    w_zero_point: Value | None,
    y: Value,
    dy: Value,
    *,
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    pads: Ints | None,
    strides: Ints | None,
) -> Gradients:
    """The gradients of a Conv of the numbers that the integers represent.

    There may be a zero point of w for each output channel.
    """
    if w_zero_point is not None and w_zero_point.rank == 1:
        w_zero_point = op.Unsqueeze(w_zero_point, list(range(1, w.rank)))
    entries = conv(
        op,
        _subtract_zero_point(op, x, x_zero_point, dy.dtype),
        _subtract_zero_point(op, w, w_zero_point, dy.dtype),
        None,
        y,
        dy,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        pads=pads,
        strides=strides,
    )
    assert isinstance(entries, tuple)
    return (*entries[:2], None, None)


def _subtract_zero_point(
    op: GraphBuilder, q: Value, zero_point: Value | None, dtype: np.dtype[np.generic]
) -> Value:
    level = op.cast(q, dtype)
    return level if zero_point is None else level - op.cast(zero_point, dtype)
