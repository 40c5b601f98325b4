"""Tensors of a model in separate memory, to which its protos refer.

Python reads the bytes of a proto as a copy, and copying a model copies all of them. The weights of
a large model are therefore arrays, to which the proto refers in the form of ONNX's external data.
Copies of the proto are small, and all graphs read the same arrays.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Union
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
# Element types of `ml_dtypes`, which NumPy cannot pass to onnxruntime.
NOT_IN_NUMPY = frozenset({onnx.TensorProto.BFLOAT16})


@dataclass(frozen=True, eq=False)
class ComputedArray:
    """An array that is computed at each access and not kept, such as a merged weight.

    - `compute`: returns the array.
    - `nbytes`: the number of its bytes.
    """

    compute: Callable[[], Array]
    nbytes: int

    def bytes(self) -> Array:
        """Return the bytes of the array. ValueError: their number is not `nbytes`."""
        data = np.ascontiguousarray(self.compute()).reshape(-1).view(np.uint8)
        if data.nbytes != self.nbytes:
            raise ValueError(f"a tensor has {data.nbytes} bytes, expected {self.nbytes}")
        return data


TensorContents = Union[Array, ComputedArray]
# A value for an initializer, or for a tensor of a file.
Storable = Union[TensorContents, onnx.TensorProto]
# Unknown to any file: a proto that refers to an array was created in this process.
_LOCATION = f"onnxfit-memory-{secrets.token_hex(16)}"
_contents: WeakValueDictionary[str, TensorContents] = WeakValueDictionary()
_keys = map(str, count())


def is_sharable(data_type: int, size: int) -> bool:
    """Return whether a tensor of an element type and of `size` bytes may be an array."""
    return data_type in TYPES and size >= MIN_BYTES


def refer_to(tensor: onnx.TensorProto, data: TensorContents) -> None:
    """Let a tensor refer to an array of its bytes, or to a computed array, in place.

    The caller keeps `data` alive.
    """
    key = next(_keys)
    _contents[key] = data
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for name, value in (("location", _LOCATION), ("offset", key), ("length", str(data.nbytes))):
        tensor.external_data.add(key=name, value=value)


def contents_of(tensor: onnx.TensorProto) -> TensorContents | None:
    """Return the array that a tensor refers to; None for a tensor with its own bytes."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return _contents[entries["offset"]] if entries.get("location") == _LOCATION else None


def shared_bytes(tensor: onnx.TensorProto) -> Array | None:
    """Return the bytes that a tensor refers to; None for a tensor with its own bytes."""
    contents = contents_of(tensor)
    return contents.bytes() if isinstance(contents, ComputedArray) else contents


def array_of(tensor: onnx.TensorProto) -> Array:
    """Return the values of a tensor; those of an array that it refers to are not copied."""
    data = shared_bytes(tensor)
    if data is None:
        return onnx.numpy_helper.to_array(tensor)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return data.view(dtype).reshape(tuple(tensor.dims))


class SharedTensor(ir.Tensor[Array]):
    """A tensor for onnx-ir with the values of an array that a proto refers to.

    - `tensor`: the proto.
    """

    def __init__(self, tensor: onnx.TensorProto) -> None:
        super().__init__(array_of(tensor), ir.DataType(tensor.data_type), name=tensor.name)
        self._tensor = tensor
        self._contents = contents_of(tensor)  # keeps the array alive

    def reference(self) -> ir.TensorProtocol:
        """Return the same tensor, which onnx-ir writes as a reference to the array."""
        copy = onnx.TensorProto()
        copy.CopyFrom(self._tensor)
        return ir.serde.TensorProtoTensor(copy)


def ir_tensor(tensor: onnx.TensorProto) -> ir.TensorProtocol:
    """Return a tensor for onnx-ir, which shares its memory."""
    if contents_of(tensor) is None:
        return ir.serde.TensorProtoTensor(tensor)
    return SharedTensor(tensor)


def to_proto(model: ir.Model, types: Container[int] = TYPES) -> onnx.ModelProto:
    """Return the proto of a model for onnx-ir, in which shared tensors are references.

    - `types`: the element types of the references. Shared tensors of other types are copied.

    Keep `model` alive while using the references. The errors are those of `ir.to_proto`.
    """
    shared = [
        (value, value.const_value)
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, SharedTensor) and value.const_value.dtype.value in types
    ]
    try:
        for value, tensor in shared:
            value.const_value = tensor.reference()
        return ir.to_proto(model)
    finally:
        for value, tensor in shared:
            value.const_value = tensor


def require_memory(size: int) -> None:
    """Raise MemoryError if that many bytes cannot be allocated. protobuf would crash instead."""
    np.empty(size + size // 8, np.uint8)


def include_shared(model: onnx.ModelProto, types: Container[int] = TYPES) -> onnx.ModelProto:
    """Copy the arrays that a model refers to into the model, in place, and return it.

    - `types`: the element types of the tensors that get a copy. The others stay references.

    MemoryError: there is not enough memory for the copies.
    """
    copied = [c for t in model.graph.initializer if (c := contents_of(t)) is not None]
    require_memory(sum(contents.nbytes for contents in copied))
    for tensor in model.graph.initializer:
        data = shared_bytes(tensor) if tensor.data_type in types else None
        if data is not None:
            tensor.raw_data = data.tobytes()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return model


def whole_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model that refers to no array; the model itself if it has no reference."""
    if not shared_arrays(model):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return include_shared(copy)


def shared_arrays(model: onnx.ModelProto) -> list[TensorContents]:
    """Return the arrays that a model's tensors refer to. Keep the list alive while using them."""
    contents = (contents_of(tensor) for tensor in model.graph.initializer)
    return [array for array in contents if array is not None]


def values_of_tensor(tensor: Storable) -> Array:
    """Return the values of a tensor, as an array of its element type."""
    if isinstance(tensor, onnx.TensorProto):
        return array_of(tensor)
    array = tensor.compute() if isinstance(tensor, ComputedArray) else tensor
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def tensor_of(
    old: onnx.TensorProto, value: Storable, *, refers: bool
) -> tuple[onnx.TensorProto, TensorContents | None]:
    """Return an initializer with another value than `old`, and the array that it refers to.

    - `value`: a tensor, an array, or a computed array of the element type and shape of `old`.
    - `refers`: whether the initializer refers to a larger array, instead of having a copy of it.
    """
    if isinstance(value, onnx.TensorProto):
        return value, contents_of(value)
    shape: Sequence[int] = old.dims
    data_type = old.data_type
    if not isinstance(value, ComputedArray):
        shape = value.shape
        data_type = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    if not refers or not is_sharable(data_type, value.nbytes):
        array = values_of_tensor(value).reshape(tuple(shape))
        return onnx.numpy_helper.from_array(array, old.name), None
    if not isinstance(value, ComputedArray):
        value = values_of_tensor(value).reshape(-1).view(np.uint8)
    tensor = onnx.TensorProto(name=old.name, data_type=data_type, dims=shape)
    refer_to(tensor, value)
    return tensor, value
