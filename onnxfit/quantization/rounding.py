"""Integer weights as real numbers, and real numbers as integers, as onnxruntime computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.errors import DivergenceError

Array = npt.NDArray[Any]

# element type -> its least and greatest number
LIMITS: dict[int, tuple[int, int]] = {
    onnx.TensorProto.INT4: (-8, 7),
    onnx.TensorProto.UINT4: (0, 15),
    onnx.TensorProto.INT8: (-128, 127),
    onnx.TensorProto.UINT8: (0, 255),
    onnx.TensorProto.INT16: (-(2**15), 2**15 - 1),
    onnx.TensorProto.UINT16: (0, 2**16 - 1),
    # The largest float32 below 2**31: a float beyond it has no int32.
    onnx.TensorProto.INT32: (-(2**31), 2**31 - 128),
}
PACKED = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    r"""An integer initializer that DequantizeLinear reads, as real numbers $s (q - z)$.

    - `tensor`: the initializer.
    - `scale_name`, `zero_point_name`: the initializers of scale and zero point; "" for none.
    - `scale`: one number, one for each index of the axis, or one for each block along it.
    - `zero_point`: integers in the shape of the scale.
    - `axis`, `block_size`: attributes of the DequantizeLinear.
    - `domain`: the domain of the DequantizeLinear.
    """

    tensor: onnx.TensorProto
    scale_name: str
    scale: Array
    zero_point_name: str
    zero_point: Array
    axis: int
    block_size: int
    domain: str

    @property
    def name(self) -> str:
        """The name of the initializer, and of the float weight that is trained for it."""
        return self.tensor.name

    @property
    def is_bias(self) -> bool:
        """Whether the numbers have 32 bits, as biases have; training does not round those."""
        return bool(self.tensor.data_type == onnx.TensorProto.INT32)

    @property
    def integers(self) -> Array:
        """The numbers of the initializer, each in 64 bits."""
        return integers_of(self.tensor)

    @property
    def values(self) -> Array:
        """The real numbers that the integers stand for, in the element type of the scale."""
        level = (self.integers - self._expand(self.zero_point)).astype(self.scale.dtype)
        return np.asarray(level * self._expand(self.scale))

    def with_grid(self, changed: Mapping[str, Array]) -> IntegerWeight:
        """Return the same integers with another scale and zero point, if their names have one."""
        scale = changed.get(self.scale_name, self.scale)
        zero_point = changed.get(self.zero_point_name, self.zero_point)
        if np.array_equal(scale, self.scale) and np.array_equal(zero_point, self.zero_point):
            return self
        return replace(self, scale=scale, zero_point=zero_point)

    def rounded(self, values: Array) -> Array:
        """Return the nearest integers to real numbers, half to even, within the type's range.

        A number that is the same as in `values` keeps its integer. DivergenceError for a NaN.
        """
        if np.isnan(values).any():
            raise DivergenceError(
                f"The weight {self.name!r} has NaN, and no integer stands for it. Go back to"
                " weights without NaN: load an earlier checkpoint, or train with a smaller"
                " learning rate."
            )
        scale = self._expand(self.scale)
        numbers = values
        if not self.is_bias:  # QuantizeLinear divides in float32
            numbers, scale = values.astype(np.float32), scale.astype(np.float32)
        with np.errstate(over="ignore"):
            level = np.rint(numbers / scale).astype(np.float64)
        level += self._expand(self.zero_point)
        nearest = np.clip(level, *LIMITS[self.tensor.data_type]).astype(np.int64)
        return np.where(values == self.values, self.integers, nearest)

    def tensor_of(self, values: Array) -> onnx.TensorProto:
        """Return the initializer with the integers for other real numbers, stored as it is."""
        return with_numbers(self.tensor, self.rounded(values))

    def _expand(self, array: Array) -> Array:
        """Return a scale or zero point in a shape that broadcasts to the integers."""
        if array.size == 1:
            return array.reshape(())
        dims = self.tensor.dims
        axis = self.axis % len(dims)
        if self.block_size:
            repeated = np.repeat(array, self.block_size, axis)
            return np.take(repeated, np.arange(dims[axis]), axis)
        return array.reshape([-1 if i == axis else 1 for i in range(len(dims))])


def integers_of(tensor: onnx.TensorProto) -> Array:
    """Return the numbers of a tensor of integers, each in 64 bits."""
    return np.asarray(ir.serde.TensorProtoTensor(tensor).numpy()).astype(np.int64)


def with_numbers(tensor: onnx.TensorProto, numbers: Array) -> onnx.TensorProto:
    """Return a tensor of integers or floats with other numbers; the same one for equal numbers."""
    is_integer = tensor.data_type in LIMITS
    old = integers_of(tensor) if is_integer else onnx.numpy_helper.to_array(tensor)
    if np.array_equal(old, numbers):
        return tensor
    if is_integer:
        return with_integers(tensor, numbers)
    return onnx.numpy_helper.from_array(numbers, tensor.name)


def with_integers(tensor: onnx.TensorProto, integers: Array) -> onnx.TensorProto:
    """Return a copy of a tensor with other integers of its type.

    They are stored as in `tensor`; but as bytes if the copy would be larger than `tensor`, since
    protobuf writes a negative number of a list in 10 bytes.
    """
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.ClearField("int32_data")
    if tensor.data_type in PACKED:
        numbers = _packed(integers)
    else:
        numbers = integers.astype(ir.DataType(tensor.data_type).numpy())
    if not tensor.HasField("raw_data"):
        copy.int32_data.extend(numbers.reshape(-1).astype(np.int64).tolist())
        if copy.ByteSize() <= tensor.ByteSize():
            return copy
        copy.ClearField("int32_data")
    copy.raw_data = numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()
    return copy


def _packed(integers: Array) -> npt.NDArray[np.uint8]:
    """Return integers of 4 bits, two in a byte, the first in the lower bits."""
    low_bits = (integers.reshape(-1) & 15).astype(np.uint8)
    if low_bits.size % 2:
        low_bits = np.append(low_bits, np.uint8(0))
    return np.asarray(low_bits[::2] | (low_bits[1::2] << 4), np.uint8)
