"""Tensors in files, written one after another, never copied all at once: safetensors, and the
external data of an ONNX model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, BinaryIO, Union

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import safetensors

from onnxfit.errors import ModelError
from onnxfit.files import write_atomically

Array = npt.NDArray[np.generic]
# bytes of tensors: an ONNX message has at most 2 GiB, nodes included
MAX_MODEL_BYTES = 2**31 - 2**26
MAX_INLINE_BYTES = 1024  # bytes: constants of the graph, which stay in the model
ALIGNMENT_BYTES = 64  # bytes
CHUNK_BYTES = 2**24  # bytes that are written at a time
TYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "BOOL": np.bool_, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip


def write_model(
    path: str | os.PathLike[str], model: onnx.ModelProto, weights: Collection[str] = ()
) -> Path:
    """Write a .onnx, atomically; with more than 2 GB of tensors those are in a file `<path>.data`
    beside it, all of `weights` among them.

    The data is written first. Of one model trained further and exported again, the graph is the
    same, so that at no moment the graph of one and the data of the other do not fit.
    """
    if not is_large(model):
        return write_atomically(
            path, lambda file: file.write(model.SerializeToString(deterministic=True))
        )
    path = Path(path)
    data = path.with_name(f"{path.name}.data")
    inside = {tensor.name for tensor in model.graph.initializer}.intersection(weights)
    bare, tensors = detached(model, initializer_arrays(model, inside), data.name)
    write_atomically(data, lambda file: write_tensors(file, tensors))
    return write_atomically(
        path, lambda file: file.write(bare.SerializeToString(deterministic=True))
    )


def is_large(model: onnx.ModelProto) -> bool:
    """Whether the model with its tensors inside is more than a file or an onnxruntime session takes
    in one piece.
    """
    return sum(map(nbytes, model.graph.initializer)) > MAX_MODEL_BYTES


def write_safetensors(file: BinaryIO, arrays: Mapping[str, Array]) -> None:
    """What `safetensors.numpy.save` gives, without a copy of it in memory."""
    file.write(_header(arrays))
    for array in arrays.values():
        _write(file, array)


def safetensors_size(arrays: Mapping[str, Array]) -> int:
    return len(_header(arrays)) + sum(array.nbytes for array in arrays.values())


def read_safetensors(data: bytes) -> dict[str, Array]:
    """Read-only arrays.

    SafetensorError, KeyError or ValueError for anything but whole safetensors.
    """
    return {
        name: np.frombuffer(entry["data"], TYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    }


def detached(
    model: onnx.ModelProto, arrays: Mapping[str, Array], location: str
) -> tuple[onnx.ModelProto, list[Array | onnx.TensorProto]]:
    """A copy of the model whose tensors are in a file `location`, and what `write_tensors` is to
    write there.

    These are all of `arrays`, in place of the initializers of their names, and the larger ones of
    the others. ModelError where the model has no such initializer.
    """
    bare, tensors, place = _without_tensors(model), [], 0
    lost = arrays.keys() - {tensor.name for tensor in model.graph.initializer}
    if lost:
        raise ModelError(
            f"The model has no {', '.join(sorted(lost))} any more: a trained weight was deleted"
            " from it."
        )
    for tensor in model.graph.initializer:
        size = nbytes(tensor)
        if tensor.name not in arrays and (
            size <= MAX_INLINE_BYTES or not tensor.HasField("raw_data")
        ):
            bare.graph.initializer.append(tensor)
            continue
        stub = bare.graph.initializer.add(
            name=tensor.name, data_type=tensor.data_type, dims=tensor.dims
        )
        refer(stub, location, place, size)
        tensors.append(arrays.get(tensor.name, tensor))
        place += size + -size % ALIGNMENT_BYTES
    return bare, tensors


def tensors_size(tensors: Iterable[Array | onnx.TensorProto]) -> int:
    sizes = [
        nbytes(tensor) if isinstance(tensor, onnx.TensorProto) else tensor.nbytes
        for tensor in tensors
    ]
    return sum(size + -size % ALIGNMENT_BYTES for size in sizes)


def write_tensors(file: BinaryIO, tensors: Iterable[Array | onnx.TensorProto]) -> None:
    for tensor in tensors:
        size = _write(file, tensor)
        file.write(bytes(-size % ALIGNMENT_BYTES))


def attach(model: onnx.ModelProto, file: IO[bytes]) -> None:
    """Take what `detached` took out of the model back from the file, to its end.

    ModelError where it is not there.
    """
    place = 0
    for tensor in model.graph.initializer:
        if is_external(tensor):
            where = {entry.key: entry.value for entry in tensor.external_data}
            size = nbytes(tensor)
            if int(where["offset"]) != place or int(where["length"]) != size:
                raise ModelError(f"the tensor {tensor.name!r} is not where it should be")
            data = file.read(size + -size % ALIGNMENT_BYTES)
            if len(data) != size + -size % ALIGNMENT_BYTES:
                raise ModelError(f"the tensor {tensor.name!r} is cut off")
            place += len(data)
            tensor.raw_data = data[:size] if len(data) > size else data
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    if file.read(1):
        raise ModelError("there is more than its tensors")


def refer(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Say that a tensor's bytes are in a file."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def is_external(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def initializer_arrays(model: onnx.ModelProto, names: Collection[str]) -> dict[str, Array]:
    """Writable copies of the named initializers."""
    tensors = {t.name: t for t in model.graph.initializer}
    return {name: np.array(onnx.numpy_helper.to_array(tensors[name])) for name in names}


def nbytes(tensor: onnx.TensorProto) -> int:
    """The bytes of a tensor's elements; 0 for strings, which have no size of their own."""
    kind = ir.DataType(tensor.data_type)
    return 0 if kind == ir.DataType.STRING else (math.prod(tensor.dims) * kind.bitwidth + 7) // 8


def _header(arrays: Mapping[str, Array]) -> bytes:
    kinds = {np.dtype(kind): name for name, kind in TYPES.items()}
    header, place = {}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": kinds[array.dtype],
            "shape": array.shape,
            "data_offsets": (place, place + array.nbytes),
        }
        place += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _without_tensors(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of all but the initializers."""
    bare = onnx.ModelProto()
    _copy_fields(model, bare, but="graph")
    _copy_fields(model.graph, bare.graph, but="initializer")
    return bare


def _copy_fields(
    source: Union[onnx.ModelProto, onnx.GraphProto],
    target: Union[onnx.ModelProto, onnx.GraphProto],
    but: str,
) -> None:
    for field, value in source.ListFields():
        if field.name == but:
            continue
        if isinstance(value, (int, float, str, bytes)):
            setattr(target, field.name, value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            getattr(target, field.name).extend(value)


def _write(file: BinaryIO, tensor: Array | onnx.TensorProto) -> int:
    """In pieces, between which other threads have their turn: writing a piece leaves Python to
    them.
    """
    data = (
        memoryview(tensor.raw_data)
        if isinstance(tensor, onnx.TensorProto)
        else memoryview(tensor.reshape(-1).view(np.uint8).data)
    )
    for start in range(0, len(data), CHUNK_BYTES):
        file.write(data[start : start + CHUNK_BYTES])
    return len(data)
