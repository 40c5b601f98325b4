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
from onnxfit.graph.shared_tensors import shared_bytes
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.trainable.quantized.operators import numbers_of
from onnxfit.trainable.quantized.parameters import LIMITS, Array, QuantizationParameters

PACKED = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """An integer initializer that DequantizeLinear reads, as real numbers.

    - `tensor`: the initializer.
    - `parameters`: the map between its integers and the real numbers.
    - `scale_name`, `zero_point_name`: the initializers of scale and zero point; "" for none.
    - `domain`: the domain of the DequantizeLinear.
    - `shift`: the value that is added before rounding, for zero points that are floats; else "".
    """

    tensor: onnx.TensorProto
    parameters: QuantizationParameters
    scale_name: str
    zero_point_name: str
    domain: str
    shift: str = ""

    @property
    def name(self) -> str:
        """The name of the initializer, and of the float weight that is trained for it."""
        return self.tensor.name

    @property
    def is_bias(self) -> bool:
        """Whether the numbers have 32 bits, as biases have. Training does not round them."""
        return bool(self.tensor.data_type == onnx.TensorProto.INT32)

    @property
    def integers(self) -> Array:
        """The numbers of the initializer, each in 64 bits."""
        return numbers_of(self.tensor)

    @property
    def values(self) -> Array:
        """The real numbers that the integers represent, in the element type of the scale."""
        return self.parameters.dequantized(self.integers)

    def with_parameters(self, changed: Mapping[str, Array]) -> IntegerWeight:
        """Return the same integers with another scale and zero point, if their names have one."""
        old = self.parameters
        new = replace(
            old,
            scale=changed.get(self.scale_name, old.scale),
            zero_point=changed.get(self.zero_point_name, old.zero_point),
        )
        return self if new == old else replace(self, parameters=new)

    def rounded(self, values: Array) -> Array:
        """Return the nearest integers to real numbers, half to even, within the type's range.

        A number that is the same as in `values` keeps its integer. DivergenceError: a number is
        NaN.
        """
        if np.isnan(values).any():
            raise DivergenceError(
                f"The weight {self.name!r} contains NaN, which no integer represents. Load an"
                " earlier checkpoint, or train with a smaller learning rate."
            )
        return np.where(values == self.values, self.integers, self.parameters.quantized(values))

    def add_rounded(self, op: GraphBuilder, values: Value) -> Value:
        """Write the nodes of `rounded`, for numbers of 8, 16 or 32 bits.

        - `values`: the real numbers. A NaN becomes any integer.
        """
        parameters, kind = self.parameters, ir.DataType(self.tensor.data_type).numpy()
        scale = parameters.scale
        if not self.is_bias:
            # Rounding to 16 bits or fewer brings back the integers of unchanged numbers.
            attributes: dict[str, Any] = {"axis": parameters.axis} if scale.size > 1 else {}
            if parameters.block_size:
                attributes["block_size"] = parameters.block_size
            zeros = np.broadcast_to(parameters.zero_point, scale.shape).astype(kind)
            integers: Value = op.QuantizeLinear(values, op.constant(scale), zeros, **attributes)
            return integers
        low, high = LIMITS[self.tensor.data_type]
        steps = op.Round(op.cast(values, np.float32) / scale.astype(np.float32).reshape(-1))
        # The largest float below 2**31 is 128 below it.
        nearest = op.cast(op.Clip(steps, np.float32(low), np.float32(high - 127)), kind)
        nearest = nearest + parameters.zero_point.astype(kind).reshape(-1)
        return op.Where(op.Equal(values, self.values), self.integers.astype(kind), nearest)


def with_numbers(tensor: onnx.TensorProto, numbers: Array) -> onnx.TensorProto:
    """Return a tensor of integers or floats with other numbers; the same one for equal numbers."""
    if np.array_equal(numbers_of(tensor), numbers):
        return tensor
    if tensor.data_type in LIMITS:
        return with_integers(tensor, numbers)
    return onnx.numpy_helper.from_array(numbers, tensor.name)


def with_integers(tensor: onnx.TensorProto, integers: Array) -> onnx.TensorProto:
    """Return a copy of a tensor with other integers of its type.

    They are stored as in `tensor`, or as bytes if the copy would be larger than `tensor`: protobuf
    writes a negative number of a list in 10 bytes.
    """
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    in_bytes = tensor.HasField("raw_data") or shared_bytes(tensor) is not None
    if shared_bytes(tensor) is not None:
        copy.ClearField("external_data")
        copy.ClearField("data_location")
    copy.ClearField("int32_data")
    if tensor.data_type in PACKED:
        numbers = _packed_nibbles(integers)
    else:
        numbers = integers.astype(ir.DataType(tensor.data_type).numpy())
    if not in_bytes:
        copy.int32_data.extend(numbers.reshape(-1).astype(np.int64).tolist())
        if copy.ByteSize() <= tensor.ByteSize():
            return copy
        copy.ClearField("int32_data")
    copy.raw_data = numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()
    return copy


def _packed_nibbles(integers: Array) -> npt.NDArray[np.uint8]:
    """Return integers of 4 bits, two in a byte, the first in the lower bits."""
    low_bits = (integers.reshape(-1) & 15).astype(np.uint8)
    if low_bits.size % 2:
        low_bits = np.append(low_bits, np.uint8(0))
    return np.asarray(low_bits[::2] | (low_bits[1::2] << 4), np.uint8)
