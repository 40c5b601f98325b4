"""Tensors in files: safetensors, and the external data of an ONNX model.

Tensors are written one at a time, so memory never holds a copy of all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Container, Iterable, Mapping
from typing import IO, BinaryIO, Protocol, Union

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import safetensors

from onnxfit.errors import ModelError
from onnxfit.graph.index import tensors_of
from onnxfit.graph.shared_tensors import (
    ComputedArray,
    Storable,
    TensorContents,
    array_of,
    contents_of,
    is_sharable,
    refer_to,
)

Array = npt.NDArray[np.generic]
Message = Union[onnx.ModelProto, onnx.GraphProto, onnx.TensorProto]
# limit for the bytes of all tensors of a model: a protobuf message, nodes included, has at most 2
# GiB
MAX_MODEL_BYTES = 2**31 - 2**26
MAX_INLINE_BYTES = 1024  # bytes of a tensor that stays in the model, such as constants of the graph
# Up to this number of bytes in all frozen tensors, every compiled graph has its own copies, packed
# for its kernels. Above it, all graphs share the unpacked tensors.
MAX_COPIED_BYTES = 2**29
# Up to this number of bytes in all packed weights of a few bits, every compiled graph for inference
# is kept, with its own copy of them.
MAX_PACKED_BYTES = 2**26
ALIGNMENT_BYTES = 64
# The fields of a TensorProto that have its numbers, or say where they are.
FIELDS_OF_NUMBERS = frozenset(
    {field.name for field in onnx.TensorProto.DESCRIPTOR.fields if field.name.endswith("_data")}
    | {"data_location"}
)
CHUNK_BYTES = 2**24  # bytes that are written at a time
TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "BOOL": np.bool_,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
}


class Writable(Protocol):
    """An open file, or anything else that takes bytes as a file does."""

    def write(self, data: memoryview | bytes, /) -> object:
        """Take bytes."""


def is_large(model: onnx.ModelProto) -> bool:
    """Return whether the model is too large for one message, the limit of files and sessions."""
    return sum(map(nbytes, model.graph.initializer)) > MAX_MODEL_BYTES


def write_safetensors(
    file: BinaryIO, arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays as `safetensors.numpy.save` does, without a copy of all of them in memory."""
    file.write(_header(arrays, metadata))
    for array in arrays.values():
        write_elements(file, array)


def safetensors_size(arrays: Mapping[str, Array]) -> int:
    """Return the number of bytes that `write_safetensors` writes."""
    return len(_header(arrays)) + sum(array.nbytes for array in arrays.values())


def read_safetensors(data: bytes) -> dict[str, Array]:
    """Return the arrays in the bytes of a safetensors file; they are read-only.

    SafetensorError, KeyError or ValueError: the file is invalid.
    """
    return {
        name: np.frombuffer(entry["data"], TYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    }


def read_metadata(data: bytes) -> dict[str, str]:
    """Return the metadata in the bytes of a safetensors file that `read_safetensors` has read."""
    size = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] | None = json.loads(data[8 : 8 + size]).get("__metadata__")
    return metadata or {}  # it may be null


def detached(
    model: onnx.ModelProto, arrays: Mapping[str, Array], location: str
) -> tuple[onnx.ModelProto, list[Storable]]:
    """Return a copy of the model with external tensors, and the tensors for `write_tensors`.

    The external tensors are those of `arrays`, and large ones among the others.

    - `model`: the model, which stays unchanged.
    - `arrays`: arrays to replace initializers, by name.
    - `location`: the name of the file with the tensors, which the copy records.

    ModelError: the model has no initializer of a name in `arrays`.
    """
    bare = without_initializers(model)
    tensors: list[Storable] = []
    offset = 0
    require_initializers(model, arrays)
    for tensor in model.graph.initializer:
        size = nbytes(tensor)
        shared = contents_of(tensor)
        if not is_detachable(tensor) and tensor.name not in arrays:
            bare.graph.initializer.append(tensor)
            continue
        stub = bare.graph.initializer.add(
            name=tensor.name, data_type=tensor.data_type, dims=tensor.dims
        )
        refer(stub, location, offset, size)
        tensors.append(arrays.get(tensor.name, tensor if shared is None else shared))
        offset += _aligned_size(size)
    return bare, tensors


def is_detachable(tensor: onnx.TensorProto) -> bool:
    """Return whether `detached` makes a tensor external even if no array replaces it."""
    if contents_of(tensor) is not None:
        return True
    return nbytes(tensor) > MAX_INLINE_BYTES and tensor.HasField("raw_data")


def without_numbers(model: onnx.ModelProto, names: Container[str]) -> onnx.ModelProto:
    """Return a copy of the model whose named initializers have a type and a shape, but no numbers.

    Reading such a tensor raises ValueError. Write an array into it first.
    """
    bare = without_initializers(model)
    for tensor in model.graph.initializer:
        if tensor.name in names:
            copy_fields(tensor, bare.graph.initializer.add(), FIELDS_OF_NUMBERS)
        else:
            bare.graph.initializer.append(tensor)
    return bare


def require_initializers(model: onnx.ModelProto, names: Iterable[str]) -> None:
    """Raise ModelError if the model has no initializer of one of the names."""
    missing = set(names) - {tensor.name for tensor in model.graph.initializer}
    if missing:
        raise ModelError(
            f"The model no longer contains {', '.join(sorted(missing))}: a trained weight was"
            " deleted from it."
        )


def tensors_size(tensors: Iterable[Storable]) -> int:
    """Return the number of bytes that `write_tensors` writes."""
    sizes = [
        nbytes(tensor) if isinstance(tensor, onnx.TensorProto) else tensor.nbytes
        for tensor in tensors
    ]
    return sum(map(_aligned_size, sizes))


def _aligned_size(size: int) -> int:
    """Return the smallest multiple of ALIGNMENT_BYTES that is not below `size`."""
    return size + -size % ALIGNMENT_BYTES


def write_tensors(file: BinaryIO, tensors: Iterable[Storable]) -> None:
    """Write tensors one after another, each at an aligned offset."""
    for tensor in tensors:
        size = write_elements(file, tensor)
        file.write(bytes(_aligned_size(size) - size))


def attach(model: onnx.ModelProto, file: IO[bytes]) -> list[TensorContents]:
    """Read the external tensors of a model of `detached` from a file into the model.

    Returns the arrays that the larger tensors of a large model then refer to. ModelError: the file
    does not contain exactly these tensors.
    """
    arrays: list[TensorContents] = []
    shares = sum(map(nbytes, model.graph.initializer)) > MAX_COPIED_BYTES
    offset = 0
    for tensor in model.graph.initializer:
        if is_external(tensor):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            size = nbytes(tensor)
            if int(entries["offset"]) != offset or int(entries["length"]) != size:
                raise ModelError(f"the tensor {tensor.name!r} is not at its recorded offset")
            data = file.read(_aligned_size(size))
            if len(data) != _aligned_size(size):
                raise ModelError(f"the tensor {tensor.name!r} is truncated")
            offset += len(data)
            if shares and is_sharable(tensor.data_type, size):
                arrays.append(np.frombuffer(data, np.uint8, size))
                refer_to(tensor, arrays[-1])
                continue
            tensor.raw_data = data[:size] if len(data) > size else data
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    if file.read(1):
        raise ModelError("it contains further bytes after its tensors")
    return arrays


def refer(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Record in a tensor that its bytes are in the file `location`."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def is_external(tensor: onnx.TensorProto) -> bool:
    """Return whether the bytes of a tensor are in a separate file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def initializer_arrays(model: onnx.ModelProto, names: Collection[str]) -> dict[str, Array]:
    """Return writable copies of the named initializers."""
    tensors = tensors_of(model.graph)
    return {name: np.array(array_of(tensors[name])) for name in names}


def nbytes(tensor: onnx.TensorProto) -> int:
    """Return the bytes of a tensor's elements; 0 for strings, which have no fixed size."""
    element_type = ir.DataType(tensor.data_type)
    if element_type == ir.DataType.STRING:
        return 0
    bits: int = math.prod(tensor.dims) * element_type.bitwidth
    return (bits + 7) // 8


def _header(arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file."""
    type_names = {np.dtype(dtype): name for name, dtype in TYPES.items()}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": type_names[array.dtype],
            "shape": array.shape,
            "data_offsets": (offset, offset + array.nbytes),
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def without_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model without its initializers, which are never copied."""
    bare = onnx.ModelProto()
    copy_fields(model, bare, {"graph"})
    copy_fields(model.graph, bare.graph, {"initializer"})
    return bare


def copy_fields(source: Message, target: Message, excluded: Container[str]) -> None:
    """Copy all fields of a message except the fields named in `excluded`."""
    for field, value in source.ListFields():
        if field.name in excluded:
            continue
        if isinstance(value, (int, float, str, bytes)):
            setattr(target, field.name, value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            getattr(target, field.name).extend(value)


def write_elements(file: Writable, tensor: Storable) -> int:
    """Write the elements of a tensor and return the number of their bytes.

    The tensor is written in chunks, after each of which other threads can run.
    """
    if isinstance(tensor, onnx.TensorProto):
        data = memoryview(tensor.raw_data)
    elif isinstance(tensor, ComputedArray):
        data = memoryview(tensor.bytes().data)
    else:
        data = memoryview(tensor.reshape(-1).view(np.uint8).data)
    for start in range(0, len(data), CHUNK_BYTES):
        file.write(data[start : start + CHUNK_BYTES])
    return len(data)
