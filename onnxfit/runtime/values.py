"""Conversions between NumPy arrays, OrtValues and DLPack."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnxruntime.capi import _pybind_state as C

from onnxfit.errors import DataError
from onnxfit.runtime.device import CUDA_CALLS, Device
from onnxfit.runtime.version import onnxruntime_version

Array = npt.NDArray[Any]

HAS_DLPACK = hasattr(C.OrtValue, "from_dlpack")
# Before version 1.32, onnxruntime takes booleans as DLPack's bytes, and an argument says so.
DLPACK_HAS_BOOLEANS = onnxruntime_version() >= (1, 32)


def from_dlpack(capsule: object, boolean: bool) -> Any:
    """Return an OrtValue that shares the memory of a DLPack capsule and keeps it alive.

    - `boolean`: whether to read the bytes of the capsule as booleans, unless DLPACK_HAS_BOOLEANS.
    """
    if DLPACK_HAS_BOOLEANS:
        return C.OrtValue.from_dlpack(capsule)
    return C.OrtValue.from_dlpack(capsule, boolean)


def ort_value(array: Array, device: Device) -> Any:
    """Return an array as an OrtValue.

    On the CPU the OrtValue borrows the memory of `array`, which the caller keeps alive.
    """
    with device.calls:
        return C.OrtValue.ortvalue_from_numpy(array, device.handle)


def is_ort_value(value: Any) -> bool:
    """Return whether a value is an OrtValue, public or internal."""
    return isinstance(value, (onnxruntime.OrtValue, C.OrtValue))


def unwrap_ort_value(value: Any) -> Any:
    """Return the internal OrtValue of a public one. DataError: the value is not an OrtValue."""
    value = getattr(value, "_ortvalue", value)
    if not isinstance(value, C.OrtValue):
        raise DataError(
            f"Expected a numpy array or an onnxruntime.OrtValue, got {type(value).__name__}."
        )
    return value


def wrap_ort_value(value: Any) -> onnxruntime.OrtValue:
    """Return an internal OrtValue as onnxruntime's public class."""
    return onnxruntime.OrtValue(value)


def numpy_dtype(element_type: int) -> np.dtype[Any]:
    """Return the NumPy dtype of an ONNX element type (a number of `onnx.TensorProto`)."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element_type))


def dtype_and_shape(value: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return element type and shape of an array or internal OrtValue."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape
    return numpy_dtype(value.element_type()), tuple(value.shape())


def array_of(value: Any) -> Array:
    """Return an internal OrtValue as an array: a view on the CPU, a copy from other devices."""
    if value.device_name().lower() != "cpu" or value.data_type() == "tensor(string)":
        return read_value(value)
    return array_view(value, *dtype_and_shape(value))


def copied_arrays(values: Mapping[str, Any]) -> dict[str, Array]:
    """Return copies of internal OrtValues as arrays, by name."""
    return {name: np.array(read_value(value)) for name, value in values.items()}


def read_value(value: Any) -> Array:
    """Return an internal OrtValue as an array, as onnxruntime makes it."""
    with CUDA_CALLS if value.device_name().lower() != "cpu" else nullcontext():
        return np.asarray(value.numpy())


def array_view(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return a NumPy view of an OrtValue's memory on the CPU, which keeps the memory alive."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size == 0:
        return np.zeros(shape, dtype)
    memory = (ctypes.c_uint8 * size).from_address(value.data_ptr())
    # The array refers to `memory`, so a view that outlives its buffer keeps the OrtValue alive.
    memory.owner = value  # type: ignore[attr-defined]  # ctypes arrays take any attribute
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


def join_batches(arrays: Sequence[Array], axis: int | None = 0) -> Array | list[Array]:
    """Join the outputs of all batches along their rows; scalars become a vector.

    Outputs whose other sizes differ are returned as a list, one array for each batch.

    - `axis`: the axis of the rows; None for outputs without rows. They are returned as a list,
      too, if there are several batches.
    """
    if all(not array.ndim for array in arrays):
        return np.stack(arrays)
    if axis is None:
        return list(arrays) if len(arrays) > 1 else np.array(arrays[0])
    if len({_other_sizes(array.shape, axis) for array in arrays}) > 1:
        return list(arrays)
    return np.concatenate(arrays, axis)


def _other_sizes(shape: tuple[int, ...], axis: int) -> tuple[int, ...] | None:
    """Return the sizes of a shape without the size of an axis; None for a scalar."""
    return (*shape[:axis], *shape[axis + 1 :]) if shape else None
