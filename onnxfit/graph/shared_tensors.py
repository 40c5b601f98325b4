"""Tensors of a model in separate memory, to which its protos refer.

Python reads the bytes of a proto as a copy, and copying a model copies all of them. The weights of
a large model are therefore arrays, to which the proto refers in the form of ONNX's external data.
Copies of the proto are small, and all graphs read the same arrays.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Iterator, Mapping
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


Contents = Union[Array, ComputedArray]
# Unknown to any file: a proto that refers to an array was created in this process.
_LOCATION = f"onnxfit-memory-{secrets.token_hex(16)}"
_contents: WeakValueDictionary[str, Contents] = WeakValueDictionary()
_keys = map(str, count())


def is_sharable(data_type: int, size: int) -> bool:
    """Return whether a tensor of an element type and of `size` bytes may be an array."""
    return data_type in TYPES and size >= MIN_BYTES


def refer_to(tensor: onnx.TensorProto, data: Contents) -> None:
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


def contents_of(tensor: onnx.TensorProto) -> Contents | None:
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

    Keep `model` alive while using the references. Raises the errors of `ir.to_proto`.
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


def include_shared(model: onnx.ModelProto, types: Container[int] = TYPES) -> onnx.ModelProto:
    """Copy the arrays that a model refers to into the model, in place, and return it.

    - `types`: the element types of the tensors that get a copy. The others stay references.
    """
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


def shared_arrays(model: onnx.ModelProto) -> list[Contents]:
    """Return the arrays that a model's tensors refer to. Keep the list alive while using them."""
    contents = (contents_of(tensor) for tensor in model.graph.initializer)
    return [array for array in contents if array is not None]


class ComputedTensors(Mapping[str, onnx.TensorProto]):
    """A mapping of tensors that computes some of them at each access and does not keep them.

    The merged weights of a large model are then in memory one at a time.

    - `tensors`: name -> tensor.
    - `computed`: name -> function that returns the array of a tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, onnx.TensorProto],
        computed: Mapping[str, Callable[[], Array]],
    ) -> None:
        self.tensors = tensors
        self.computed = computed

    def __getitem__(self, name: str) -> onnx.TensorProto:
        compute = self.computed.get(name)
        if compute is None:
            return self.tensors[name]
        return onnx.numpy_helper.from_array(np.ascontiguousarray(compute()), name)

    def __contains__(self, name: object) -> bool:
        return name in self.computed or name in self.tensors  # computes nothing

    def __iter__(self) -> Iterator[str]:
        return iter({**self.tensors, **self.computed})

    def __len__(self) -> int:
        return len(set(self))


def replace_tensors(
    model: onnx.ModelProto, tensors: Mapping[str, onnx.TensorProto]
) -> list[Contents]:
    """Replace initializers by other tensors of the same names, in place.

    A computed tensor in the place of a reference is a reference, too, and is not computed yet.
    Returns the arrays that the model then refers to, and those from which it computes.
    """
    kept = shared_arrays(model)
    computed = tensors.computed if isinstance(tensors, ComputedTensors) else {}
    for tensor in model.graph.initializer:
        name = tensor.name
        if name not in tensors:
            continue
        old = contents_of(tensor)
        if old is None or name not in computed:
            tensor.CopyFrom(tensors[name])
            continue
        kept.append(ComputedArray(computed[name], old.nbytes))
        tensor.CopyFrom(onnx.TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims))
        refer_to(tensor, kept[-1])
    return kept
