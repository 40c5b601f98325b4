"""Quantize floats into the packed weight of a MatMulNBits.

The integers, scales and zero points are those of onnxruntime's MatMulNBitsQuantizer. A block of a
column has the scale s and the zero point z, and holds q = clip(round(w / s + z), 0, 2^bits - 1):

    without zero points   s = -m / 2^(bits - 1) for the number m of the largest magnitude
    with zero points      s = (max - min) / (2^bits - 1), z = round(-min / s), where max >= 0 >= min
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx

from onnxfit.errors import ModelError, SettingError
from onnxfit.trainable.quantized.packed_weights import (
    OPERATOR,
    SCALE,
    WEIGHT,
    ZERO_POINT,
    PackedLayout,
    layout_of,
)
from onnxfit.trainable.quantized.parameters import Array


def repacked(
    node: onnx.NodeProto,
    tensors: Mapping[str, onnx.TensorProto],
    change: Callable[[Array], Array],
) -> dict[str, onnx.TensorProto]:
    """Return the weight, scales and zero points of a node with a changed weight, by name.

    - `node`: a MatMulNBits.
    - `tensors`: the initializers of the model.
    - `change`: returns the new weight for the dequantized one, floats of shape (K, N).

    Bits, block size and the kind of zero points stay. SettingError: the weight cannot be quantized
    in this form.
    """
    name = node.input[WEIGHT]
    try:
        layout = layout_of(node, tensors)
    except ModelError as error:
        reason = "it needs 4 or 8 bits, scales of float32, and no index of groups (g_idx)"
        raise _not_packed(name, reason) from error
    names = list(node.input[WEIGHT : ZERO_POINT + 1])
    packed = [
        layout.of(position, tensors[one])
        for position, one in zip((WEIGHT, SCALE, ZERO_POINT), names)
        if one
    ]
    if len(packed) > ZERO_POINT - WEIGHT and not packed[-1].bits:
        raise _not_packed(name, f"its zero points {names[-1]!r} are floats")
    integers, scales, *zeros = (one.numbers for one in packed)
    offsets = _for_rows(zeros[0], layout) if zeros else 0
    weight = change(((integers - offsets) * _for_rows(scales, layout)).astype(np.float32))
    numbers = _quantized(np.asarray(weight, np.float32), layout)
    return {one.tensor.name: one.with_numbers(array) for one, array in zip(packed, numbers)}


def _for_rows(blocks: Array, layout: PackedLayout) -> Array:
    """Return the number of its block for each row of the weight, in the shape (K, N)."""
    return np.repeat(blocks, layout.block_size, axis=0)[: layout.columns]


def _quantized(weight: Array, layout: PackedLayout) -> list[Array]:
    """Return the integers, as their layout centers them, the scales and the zero points."""
    padding = layout.blocks * layout.block_size - layout.columns
    blocks = np.pad(weight, ((0, padding), (0, 0))).reshape(layout.blocks, -1, layout.rows)
    low, high = np.minimum(blocks.min(axis=1), 0), np.maximum(blocks.max(axis=1), 0)
    largest, middle = 2**layout.bits - 1, 2 ** (layout.bits - 1)
    if layout.is_symmetric:
        scales = np.where(np.abs(high) > np.abs(low), high, low) / np.float32(-middle)
        zeros = np.full(scales.shape, middle, np.float32)
    else:
        scales = (high - low) / np.float32(largest)
        zeros = np.clip(_rounded(-low / np.where(scales == 0, 1, scales)), 0, largest)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    numbers = _rounded(weight * _for_rows(inverse, layout) + _for_rows(zeros, layout))
    integers = np.clip(numbers, 0, largest).astype(np.int64)
    if layout.is_symmetric:
        return [integers - middle, scales]
    return [integers, scales, zeros.astype(np.int64)]


def _rounded(numbers: Array) -> Array:
    """Return the nearest whole numbers, halves away from zero, as C's `roundf`."""
    return np.asarray(np.trunc(numbers + np.copysign(np.float32(0.5), numbers)))


def _not_packed(name: str, reason: str) -> SettingError:
    return SettingError(
        f"adapters='requantized' cannot pack the weight {name!r} of {OPERATOR} again: {reason}."
        " Use adapters='merged', which keeps its adapter as nodes."
    )
