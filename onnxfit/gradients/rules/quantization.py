"""Quantised numbers: trained through as if nobody had rounded (the straight-through estimator,
Bengio et al. 2013, arXiv:1308.3432).

An integer that QuantizeLinear made stands for the real number x / scale + zero_point that was
rounded to it, and carries that number's gradient, a float, from DequantizeLinear back to
QuantizeLinear: directly or through operators that move it (Reshape, Transpose, Gather, Concat ...)
or multiply it (MatMulInteger, ConvInteger). What flows, for q = clamp(round(x / s) + z) and y = s
(q - z):

- to x: dy where x / s was in range after rounding, as torch's fake_quantize has it, and nothing
  where it was clamped;
- to s, where it is trained: q - z - x / s in range, q - z where clamped, times dy, summed over what
  s scales: learned step sizes (Esser et al. 2020, arXiv:1902.08153), without their normalisation,
  which belongs to the learning rate;
- to the scale of DequantizeLinear alone, over frozen integers: dy (q - z), summed;
- through DynamicQuantizeLinear dy, its scale and zero point counting as constants; to zero points
  nothing, they are integers.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from onnxfit.gradients.blocker import TYPED
from onnxfit.gradients.building import MICROSOFT, Ints, arange, axis_size, known
from onnxfit.gradients.rules.convolution import conv
from onnxfit.gradients.rules.linear import matmul
from onnxfit.gradients.table import Gradients, NoGradientError, decompose, gradient
from onnxfit.graph.values import GraphBuilder, Value


@gradient("QuantizeLinear")
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
    s = _spread(op, scale, x, axis, block_size)
    v = op.cast(x, scale.dtype) / s
    rounded = op.Round(v)
    if zero_point is not None:
        rounded = rounded + _spread(op, _level(op, zero_point, scale.dtype), x, axis, block_size)
    inside = op.cast(op.Clip(rounded, *_range(y.dtype)) == rounded, scale.dtype)
    dx = op.cast(dy, scale.dtype) * inside / s
    return dx, lambda: _gathered(op, -dx * v, scale, axis, block_size), None


@gradient("DequantizeLinear")
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
        # Cast knows no int4
        level = op.DequantizeLinear(x, ones, zero_point, axis=axis, block_size=block_size or None)
        return _gathered(op, dy * level, scale, axis, block_size)

    return lambda: dy * _spread(op, scale, y, axis, block_size), of_scale, None


@decompose("QuantizeLinear", MICROSOFT)
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


@decompose("DequantizeLinear", MICROSOFT)
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


@gradient("DynamicQuantizeLinear", all_outputs=True)
def quantize_dynamically(
    op: GraphBuilder, x: Value, y: Value, scale: Value, zero_point: Value,
    dy: Value | None, dscale: Value | None, dzero_point: Value | None,
) -> Gradients:  # fmt: skip
    return None if dy is None else dy / scale


def _range(dtype: np.dtype[np.generic]) -> tuple[float, float]:
    """The least and the greatest number of an element type."""
    integer = "int" in dtype.name
    limits: Any = ml_dtypes.iinfo(dtype) if integer else ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(limits.min), float(limits.max)


def _level(op: GraphBuilder, q: Value, dtype: np.dtype[np.generic]) -> Value:
    """Zero points as floats."""
    array = known(q)
    if array is not None:
        return op.constant(array, dtype)
    return op.DequantizeLinear(q, op.constant(1, dtype))


def _spread(op: GraphBuilder, scale: Value, x: Value, axis: int, block_size: int) -> Value:
    """A scale as it is broadcast to x: one for all, one per index of the axis, or one for
    `block_size` elements along it.
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
    return (
        op.Unsqueeze(scale, list(range(1, x.rank - axis)))
        if scale.rank == 1 and axis < x.rank - 1
        else scale
    )


def _gathered(op: GraphBuilder, dy: Value, scale: Value, axis: int, block_size: int) -> Value:
    """The sums over what each scale was spread to."""
    assert scale.shape is not None  # or it was not spread
    axis %= max(dy.rank, 1)
    if block_size:
        count = axis_size(op, scale, axis)
        # the last block need not be full
        missing = count * block_size - axis_size(op, dy, axis)
        padded = op.Pad(dy, op.Concat([0], missing, axis=0), None, [axis])
        blocks = op.Concat(
            op.shape(scale, 0, axis + 1), [block_size], op.shape(scale, axis + 1), axis=0
        )
        return op.ReduceSum(op.Reshape(padded, blocks), [axis + 1], keepdims=0)
    if scale.rank == 0:
        return op.ReduceSum(dy, keepdims=0)
    if scale.shape == (1,):
        return op.Reshape(op.ReduceSum(dy, keepdims=0), [1])
    others = [i for i in range(dy.rank) if i != axis]
    sums = op.ReduceSum(dy, others, keepdims=0) if others else dy
    if isinstance(scale.shape[0], int):
        return sums
    # one for all, or one per index
    one = op.Reshape(op.NonZero(op.shape(scale) == op.constant(np.int64(1))), [-1])
    return op.ReduceSum(sums, one, keepdims=1, noop_with_empty_axes=1)


# Products of integers
# --------------------------------------------------------------------------------------------------


@gradient("MatMulInteger", broadcasts=True)
def matmul_of_integers(
    op: GraphBuilder,
    a: Value,
    b: Value,
    a_zero_point: Value | None,
    b_zero_point: Value | None,
    y: Value,
    dy: Value,
) -> Gradients:
    """A MatMul of the numbers that the integers stand for.

    Zero points may be one per row of a, one per column of b.
    """
    if a_zero_point is not None and a_zero_point.rank == 1:
        a_zero_point = op.Unsqueeze(a_zero_point, [-1])
    left, right = _centred(op, a, a_zero_point, dy.dtype), _centred(op, b, b_zero_point, dy.dtype)
    entries = matmul(op, left, right, y, dy)
    assert isinstance(entries, tuple)
    return (*entries, None, None)


@gradient("ConvInteger")
def convolution_of_integers(
    op: GraphBuilder, x: Value, w: Value, x_zero_point: Value | None, w_zero_point: Value | None, y: Value, dy: Value, *,
    auto_pad: str, dilations: Ints | None, group: int, pads: Ints | None, strides: Ints | None,
) -> Gradients:  # fmt: skip
    """A Conv of the numbers that the integers stand for; the zero points of w may be one per output
    channel.
    """
    if w_zero_point is not None and w_zero_point.rank == 1:
        w_zero_point = op.Unsqueeze(w_zero_point, list(range(1, w.rank)))
    entries = conv(
        op, _centred(op, x, x_zero_point, dy.dtype), _centred(op, w, w_zero_point, dy.dtype), None, y, dy,
        auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides,
    )  # fmt: skip
    assert isinstance(entries, tuple)
    return (*entries[:2], None, None)


def _centred(
    op: GraphBuilder, q: Value, zero_point: Value | None, dtype: np.dtype[np.generic]
) -> Value:
    level = op.cast(q, dtype)
    return level if zero_point is None else level - op.cast(zero_point, dtype)


@decompose("MatMulNBits", MICROSOFT)
def matmul_of_bits(
    op: GraphBuilder, a: Value, b: Value, scales: Value, zero_points: Value | None, g_idx: Value | None, bias: Value | None,
    *, K: int, N: int, block_size: int, bits: int = 4,
) -> Value:  # fmt: skip
    """a @ W', W = scale (q - zero_point) per block: rows of `bits`-bit numbers, packed into bytes
    from the lowest bits on.
    """
    if g_idx is not None or bits not in (4, 8):
        raise NoGradientError(
            f"its weights are packed in {bits} bits{' with g_idx' * (g_idx is not None)}",
            "4 or 8 bits without g_idx",
        )
    blocks = -(-K // block_size)
    q = op.cast(op.Reshape(_unpacked(op, b, bits), [N, blocks, block_size]), a.dtype)
    if zero_points is None:
        q = q - 2 ** (bits - 1)
    elif zero_points.dtype == np.uint8:
        zero = op.Reshape(_unpacked(op, op.Reshape(zero_points, [N, -1]), bits), [N, -1])
        q = q - op.Unsqueeze(op.cast(op.Slice(zero, [0], [blocks], [1]), a.dtype), [2])
    else:
        q = q - op.Reshape(zero_points, [N, blocks, 1])
    weight = op.Reshape(
        q * op.Reshape(op.cast(scales, a.dtype), [N, blocks, 1]), [N, blocks * block_size]
    )
    if blocks * block_size > K:
        weight = op.Slice(weight, [0], [K], [1])
    y = a @ op.Transpose(weight, perm=[1, 0])
    return y if bias is None else y + bias


def _unpacked(op: GraphBuilder, packed: Value, bits: int) -> Value:
    """Bytes as the numbers in them, along the last axis."""
    if bits == 8:
        return packed
    low, high = op.BitwiseAnd(packed, 15), op.BitShift(packed, 4, direction="RIGHT")
    return op.Concat(op.Unsqueeze(low, [-1]), op.Unsqueeze(high, [-1]), axis=-1)
