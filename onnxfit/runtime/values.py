"""Conversions between NumPy arrays, OrtValues and DLPack."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnxruntime.capi import _pybind_state as C

from onnxfit.errors import DataError
from onnxfit.runtime.device import Device

Array = npt.NDArray[Any]


def from_dlpack(capsule: object, boolean: bool) -> Any:
    """An OrtValue that shares the memory of a DLPack capsule and keeps it alive; booleans arrive as
    bytes.
    """
    return C.OrtValue.from_dlpack(capsule, boolean)


def ort_value(array: Array, device: Device) -> Any:
    """An array as onnxruntime sees it: on the CPU it borrows the array's memory, which must live
    on.
    """
    return C.OrtValue.ortvalue_from_numpy(array, device.handle)


def is_ort_value(value: Any) -> bool:
    return isinstance(value, (onnxruntime.OrtValue, C.OrtValue))


def inner_value(value: Any) -> Any:
    """The value inside of what a caller gives as an OrtValue."""
    value = getattr(value, "_ortvalue", value)
    if not isinstance(value, C.OrtValue):
        raise DataError(
            f"Expected a numpy array or an onnxruntime.OrtValue, got {type(value).__name__}."
        )
    return value


def public_value(value: Any) -> onnxruntime.OrtValue:
    """A value as onnxruntime's users know it."""
    return onnxruntime.OrtValue(value)


def look(value: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Element type and shape of an array or OrtValue."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.element_type())), tuple(
        value.shape()
    )


def array_of(value: Any) -> Array:
    """An OrtValue as a numpy array: a view where it is in the CPU's memory, else a copy."""
    if value.device_name().lower() != "cpu" or value.data_type() == "tensor(string)":
        return np.asarray(value.numpy())
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.element_type()))
    return array_view(value, dtype, tuple(value.shape()))


def array_view(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size == 0:
        return np.zeros(shape, dtype)
    memory = (ctypes.c_uint8 * size).from_address(value.data_ptr())
    # a view that outlives the buffer keeps the memory
    memory.owner = value  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)
