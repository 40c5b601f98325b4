"""The arithmetic of QuantizeLinear and DequantizeLinear, on arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class QuantizationParameters:
    """How integers stand for floats: x = scale * (q - zero_point).

    - `scale`: one number; a vector with an entry for each index of `axis`; or, with a `block_size`,
      an array with an entry for each block of that many indices.
    - `zero_point`: an array of the scale's shape and of the type of the integers; None for 0.
    """

    scale: Array
    zero_point: Array | None
    axis: int = 1
    block_size: int = 0

    def dequantized(self, integers: Array) -> Array:
        """Return the floats that integers stand for, in the type of the scale.

        >>> rows = QuantizationParameters(np.float32([0.5, 2]), None, axis=0)
        >>> rows.dequantized(np.int8([[4], [4]]))
        array([[2.],
               [8.]], dtype=float32)
        """
        difference = integers
        if not _is_float8(integers.dtype):
            difference = integers.astype(np.int64)
            if self.zero_point is not None:
                difference = difference - self._along(self.zero_point.astype(np.int64), integers)
        scale = self._along(self.scale.astype(np.float32), integers)
        floats: Array = difference.astype(np.float32) * scale
        typed: Array = floats.astype(self.scale.dtype)
        return typed

    def quantized(self, floats: Array, dtype: np.dtype[Any]) -> Array:
        """Return the integers of a type that are nearest to floats, ties to even.

        >>> halves = QuantizationParameters(np.array(0.5, np.float32), None)
        >>> halves.quantized(np.float32([0.25, 0.75, -99]), np.dtype("int8"))
        array([   0,    2, -128], dtype=int8)
        """
        scale = self._along(self.scale.astype(np.float32), floats)
        steps = floats.astype(np.float32) / scale
        if _is_float8(dtype):
            return steps.astype(dtype)
        if self.zero_point is None:
            zero_point: Any = 0
        else:
            zero_point = self._along(self.zero_point.astype(np.int64), floats)
        low, high = limits(dtype)
        rounded = np.rint(steps).astype(np.float64) + zero_point
        integers: Array = np.clip(rounded, low, high).astype(dtype)
        return integers

    def equals(self, other: QuantizationParameters) -> bool:
        """Return whether other parameters has the same numbers along the same axis."""
        if (self.zero_point is None) != (other.zero_point is None):
            return False
        pairs = [(self.scale, other.scale)]
        if self.zero_point is not None and other.zero_point is not None:
            pairs.append((self.zero_point, other.zero_point))
        axes = (self.axis, self.block_size) == (other.axis, other.block_size)
        equal = all(np.array_equal(one, another) for one, another in pairs)
        return equal and (axes or self.scale.size == 1)

    def _along(self, parameter: Array, values: Array) -> Array:
        """Return the scale or the zero point in a shape that broadcasts with the values."""
        if parameter.size == 1 and parameter.ndim <= 1:
            return parameter.reshape(())
        if self.block_size:
            blocks = np.arange(values.shape[self.axis]) // self.block_size
            return np.take(parameter, blocks, self.axis)
        shape = [1] * values.ndim
        shape[self.axis] = -1
        return parameter.reshape(shape)


def limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the least and the greatest number of an integer type, those of 4 bits included."""
    count = 1 << int(8 * ir.DataType.from_numpy(dtype).itemsize)
    low = 0 if dtype.name.startswith("u") else -count // 2
    return low, low + count - 1


def _is_float8(dtype: np.dtype[Any]) -> bool:
    return ir.DataType.from_numpy(dtype).is_floating_point()


def parameters_of(node: ir.Node) -> QuantizationParameters | None:
    """Return the parameters of a QuantizeLinear or DequantizeLinear; None if it is no constant."""
    parameters = [constant_of(value) for value in node.inputs[1:3]]
    has_zero_point = len(node.inputs) > 2 and node.inputs[2] is not None
    if parameters[0] is None or (has_zero_point and parameters[1] is None):
        return None
    return QuantizationParameters(
        parameters[0],
        parameters[1] if has_zero_point else None,
        node.attributes.get_int("axis", 1),
        node.attributes.get_int("block_size", 0),
    )


def constant_of(value: ir.Value | None) -> Array | None:
    """Return the array of an initializer or a Constant; None for any other value."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()
