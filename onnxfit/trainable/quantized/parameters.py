"""The map between floats and integers, as QuantizeLinear and DequantizeLinear compute it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

Array = npt.NDArray[Any]

DEFAULT_AXIS = 1  # of both operators
FLOATS = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)


def integer_limits(element_type: int) -> tuple[int, int]:
    """Return the least and the greatest number of an integer type."""
    kind = ir.DataType(element_type)
    count = 1 << int(8 * kind.itemsize)
    low = 0 if kind.name.startswith("U") else -count // 2
    return low, low + count - 1


# element type of weights, activations and biases -> its least and greatest number
LIMITS: dict[int, tuple[int, int]] = {
    element_type: integer_limits(element_type)
    for element_type in (
        onnx.TensorProto.INT4,
        onnx.TensorProto.UINT4,
        onnx.TensorProto.INT8,
        onnx.TensorProto.UINT8,
        onnx.TensorProto.INT16,
        onnx.TensorProto.UINT16,
        onnx.TensorProto.INT32,
    )
}


@dataclass(frozen=True, eq=False)
class QuantizationParameters:
    r"""Map between floats and integers: $q = \mathrm{clip}(\mathrm{round}(x / s) + z)$ for a float
    $x$, and $x = s\,(q - z)$ for an integer $q$.

    - `scale`, `zero_point`: s, and z in 64 bits: one number; one for each index of the dimension
      `axis`; or one for each block of `block_size` indices of that dimension. A z of floats
      (MatMulNBits) is added before rounding: $q = \mathrm{clip}(\mathrm{round}(x / s + z))$.
    - `element_type`: the type of the integers as ONNX counts them. It may be floats of 8 bits.

    onnxruntime's kernels compute both in float32, for any type of the scale. A scale of float64,
    which the kernels do not support, makes it float64. Equal parameters have the same numbers.
    """

    scale: Array
    zero_point: Array
    element_type: int
    axis: int = DEFAULT_AXIS
    block_size: int = 0

    @classmethod
    def of(
        cls,
        scale: Array,
        zero_point: Array | None,
        element_type: int,
        attributes: Mapping[str, int],
    ) -> QuantizationParameters:
        """Return the parameters of a node.

        - `zero_point`: integers of any type; None for 0.
        - `attributes`: the node's whole numbers.
        """
        zeros = np.zeros(scale.shape) if zero_point is None else zero_point
        axis = attributes.get("axis", DEFAULT_AXIS)
        block_size = max(attributes.get("block_size", 0), 0)
        return cls(scale, zeros.astype(np.int64), element_type, axis, block_size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuantizationParameters) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        where = (self.scale.shape, self.axis, self.block_size) if self.scale.size != 1 else ()
        numbers = self.scale.dtype, self.scale.tobytes(), self.zero_point.tobytes()
        return (self.element_type, *numbers, *where)

    @property
    def type_name(self) -> str:
        """The name of the type of the integers, such as "int8"."""
        return ir.DataType(self.element_type).name.lower()

    def quantized(self, floats: Array) -> Array:
        """Return the nearest integers to floats, in 64 bits. A half is rounded to even.

        The integer for NaN, or for a scale of 0, is undefined. Floats of 8 bits keep their type.

        >>> halves = QuantizationParameters.of(np.float32(0.5), None, onnx.TensorProto.INT8, {})
        >>> halves.quantized(np.float32([0.25, 0.75, -99]))
        array([   0,    2, -128])
        """
        kind = ir.DataType(self.element_type)
        scale = self._spread(self.scale.astype(self._computing_type), floats.shape)
        with np.errstate(all="ignore"):
            steps = floats.astype(self._computing_type) / scale
            if kind.is_floating_point():
                return np.asarray(steps.astype(kind.numpy()))
            zeros = self._spread(self.zero_point, floats.shape)
            if zeros.dtype.kind == "f":
                shifted = np.rint(steps + zeros)
            else:  # a sum in float32 would round large integers
                shifted = np.rint(steps).astype(np.float64) + zeros
            return np.clip(shifted, *integer_limits(self.element_type)).astype(np.int64)

    def dequantized(self, integers: Array) -> Array:
        """Return the floats that integers represent, in the type of the scale.

        >>> scale = np.float32([0.5, 2])
        >>> rows = QuantizationParameters.of(scale, None, onnx.TensorProto.INT8, {"axis": 0})
        >>> rows.dequantized(np.int8([[4], [4]]))
        array([[2.],
               [8.]], dtype=float32)
        """
        difference = integers.astype(np.float64) - self._spread(self.zero_point, integers.shape)
        scale = self._spread(self.scale.astype(self._computing_type), integers.shape)
        floats = difference.astype(self._computing_type) * scale
        return np.asarray(floats.astype(self.scale.dtype))

    def clipped(self, floats: Array) -> int:
        """Return how many floats are more than half a step beyond the least or greatest integer.

        Rounding changes a float by up to half a step in any case. A scale is negative if the
        largest value of a block of 4 bits becomes -8.
        """
        low, high = integer_limits(self.element_type)
        scale = self._spread(self.scale, floats.shape).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):  # a scale of zero
            steps = floats / scale + self._spread(self.zero_point, floats.shape)
        return int(np.count_nonzero((steps < low - 0.5) | (steps > high + 0.5)))

    def may_round(self, floats: Array, integers: Array, precision: float) -> bool:
        """Return whether the integers may come from rounding the floats of the same shape.

        A float is less than one step from the float of its integer, because some quantizers round
        up or down to lower the loss of the layer. In blocks, quantizers such as GPTQ also move
        errors from one weight to others, so the mean distance is less than one step. A float beyond
        the least or the greatest of the integers was clipped, which counts as no distance.

        - `precision`: the relative error of a float in the type of `floats`.
        """
        scale = self._spread(self.scale, floats.shape).astype(np.float64)
        zeros = self._spread(self.zero_point, floats.shape)
        with np.errstate(all="ignore"):  # a block of zeros has the scale 0
            places = np.where(scale == 0, integers, floats.astype(np.float64) / scale + zeros)
        limits = (integers.min(), integers.max()) if integers.size else (0, 0)
        distances = np.abs(np.clip(places, *limits) - integers)
        distances -= precision * np.abs(integers - zeros)
        if self.block_size or zeros.dtype.kind == "f":
            return not integers.size or bool(distances.mean() < 1)
        return bool((distances < 1).all())

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array has a scale and a zero point for each element."""
        if self.zero_point.size != 1 and self.zero_point.shape != self.scale.shape:
            return False
        if self.scale.size == 1:
            return True
        if not -len(shape) <= self.axis < len(shape):
            return False
        axis = self.axis % len(shape)
        if not self.block_size:
            return self.scale.shape == (shape[axis],)
        blocks = -(-shape[axis] // self.block_size)
        return self.scale.shape == (*shape[:axis], blocks, *shape[axis + 1 :])

    @property
    def _computing_type(self) -> type[np.floating[Any]]:
        return np.float64 if self.scale.dtype == np.float64 else np.float32

    def _spread(self, parameter: Array, shape: tuple[int, ...]) -> Array:
        """Return scales or zero points in a shape that broadcasts with arrays of `shape`."""
        if parameter.size == 1:
            return parameter.reshape(())
        axis = self.axis % len(shape)
        if self.block_size:
            return np.take(parameter, np.arange(shape[axis]) // self.block_size, axis)
        return parameter.reshape([-1 if i == axis else 1 for i in range(len(shape))])
