"""Tensors of a model in separate memory, to which its protos refer.

Python reads the bytes of a proto as a copy, and copying a model copies all of them. The weights of
a large model are therefore arrays, to which the proto refers in the form of ONNX's external data.
Copies of the proto are small, and all graphs read the same arrays.
"""

from __future__ import annotations

import secrets
from itertools import count
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

Array = npt.NDArray[np.generic]
MIN_BYTES = 2**14  # smaller tensors stay in the proto
# Element types of weights; one byte or more for each element.
TYPES = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
        onnx.TensorProto.UINT8,  # packed integers of 4 bits
    }
)
# Unknown to any file: a proto that refers to an array was created in this process.
_LOCATION = f"onnxfit-memory-{secrets.token_hex(16)}"
_arrays: WeakValueDictionary[str, Array] = WeakValueDictionary()
_keys = map(str, count())


def is_sharable(data_type: int, size: int) -> bool:
    """Return whether a tensor of an element type and of `size` bytes may be an array."""
    return data_type in TYPES and size >= MIN_BYTES


def refer_to(tensor: onnx.TensorProto, data: Array) -> None:
    """Let a tensor refer to an array of its bytes, which the caller keeps alive, in place."""
    key = next(_keys)
    _arrays[key] = data
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for name, value in (("location", _LOCATION), ("offset", key), ("length", str(data.nbytes))):
        tensor.external_data.add(key=name, value=value)


def shared_bytes(tensor: onnx.TensorProto) -> Array | None:
    """Return the array of bytes that a tensor refers to; None for a tensor with its own bytes."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return _arrays[entries["offset"]] if entries.get("location") == _LOCATION else None


def array_of(tensor: onnx.TensorProto) -> Array:
    """Return the values of a tensor; those of an array that it refers to are not copied."""
    data = shared_bytes(tensor)
    if data is None:
        return onnx.numpy_helper.to_array(tensor)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return data.view(dtype).reshape(tuple(tensor.dims))


def ir_tensor(tensor: onnx.TensorProto) -> ir.TensorProtocol:
    """Return a tensor for onnx-ir, which shares its memory."""
    if shared_bytes(tensor) is None:
        return ir.serde.TensorProtoTensor(tensor)
    return ir.Tensor(array_of(tensor), ir.DataType(tensor.data_type), name=tensor.name)


def include_shared(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy the arrays that a model refers to into the model, in place, and return it."""
    for tensor in model.graph.initializer:
        data = shared_bytes(tensor)
        if data is not None:
            tensor.raw_data = data.tobytes()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return model


def whole_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model that refers to no array; the model itself if it has no reference."""
    if all(shared_bytes(tensor) is None for tensor in model.graph.initializer):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return include_shared(copy)


def shared_arrays(model: onnx.ModelProto) -> list[Array]:
    """Return the arrays that a model's tensors refer to. Keep the list alive while using them."""
    arrays = (shared_bytes(tensor) for tensor in model.graph.initializer)
    return [array for array in arrays if array is not None]
