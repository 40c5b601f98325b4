"""Adapters in the file format of onnxruntime, `.onnx_adapter`.

onnxruntime (1.20 or later) and onnxruntime-genai activate these adapters for single runs of one
model. A file is a FlatBuffer with the tables below (`adapter_schema.fbs` in onnxruntime); field
numbers here follow their order. Each tensor has the name of the model input that it replaces.

    table Adapter   { format_version, adapter_version, model_version: int; parameters: [Parameter] }
    table Parameter { name: string; dims: [int64]; data_type: int; raw_data: [uint8] }
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import numpy.typing as npt
from flatbuffers.number_types import Int32Flags, Int64Flags
from flatbuffers.table import Table
from onnx import TensorProto

from onnxfit.errors import CheckpointError
from onnxfit.files import read_regular_file, require_path, write_atomically
from onnxfit.trainable.adapters.peft import Matrices, is_pair, require_finite

Array = npt.NDArray[Any]

SUFFIX = ".onnx_adapter"
IDENTIFIER = b"TORT"  # of the format, in the bytes 4 to 8 of a file
VERSION = 1  # of the format, and of an adapter and its model, which onnxruntime only stores
ALIGNMENT_BYTES = 8  # of the numbers of a tensor
MAX_BYTES = 2**31 - 2**20  # of all tensors: a FlatBuffer has at most 2 GiB
TYPES: dict[int, np.dtype[Any]] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.DOUBLE: np.dtype(np.float64),
}
NUMBERS = {dtype: number for number, dtype in TYPES.items()}
KEY = re.compile(r"(?P<weight>.+)\.lora_(?P<part>[AB])", re.DOTALL)


def is_onnx_adapter(path: str | os.PathLike[str]) -> bool:
    """Return whether a file's name ends as that of an adapter for onnxruntime."""
    return os.fspath(path).endswith(SUFFIX)


def write_onnx_adapter(path: str | os.PathLike[str], tensors: Mapping[str, Array]) -> Path:
    """Write tensors of float32 or float64 as an adapter for onnxruntime, atomically.

    - `path`: the file.
    - `tensors`: a mapping from input of the model to the tensor that replaces it.

    CheckpointError: the file cannot be written, or the tensors have more than 2 GB.
    """
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > MAX_BYTES:
        raise CheckpointError(
            f"{os.fspath(path)!r} cannot be written: the adapters have {size / 2**30:.1f} GiB, but"
            f" a {SUFFIX} file must be smaller than 2 GiB. Use a smaller rank, or export a folder"
            " for PEFT."
        )
    data = _serialized(tensors, size)
    return write_atomically(path, lambda file: file.write(data))


def _serialized(tensors: Mapping[str, Array], size: int) -> bytearray:
    builder = flatbuffers.Builder(size + 1024)
    parameters = [_add_parameter(builder, name, tensor) for name, tensor in tensors.items()]
    builder.StartVector(4, len(parameters), 4)
    for parameter in reversed(parameters):
        builder.PrependUOffsetTRelative(parameter)
    vector = builder.EndVector()
    builder.StartObject(4)
    for field in (0, 1, 2):
        builder.PrependInt32Slot(field, VERSION, 0)
    builder.PrependUOffsetTRelativeSlot(3, vector, 0)
    builder.Finish(builder.EndObject(), IDENTIFIER)
    data: bytearray = builder.Output()
    return data


def _add_parameter(builder: flatbuffers.Builder, name: str, tensor: Array) -> int:
    """Add a table Parameter to a FlatBuffer, and return its place."""
    raw = np.ascontiguousarray(tensor).tobytes()
    builder.Prep(ALIGNMENT_BYTES, len(raw))
    data = builder.CreateByteVector(raw)
    dims = builder.CreateNumpyVector(np.array(tensor.shape, np.int64))
    text = builder.CreateString(name)
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(0, text, 0)
    builder.PrependUOffsetTRelativeSlot(1, dims, 0)
    builder.PrependInt32Slot(2, NUMBERS[tensor.dtype], 0)
    builder.PrependUOffsetTRelativeSlot(3, data, 0)
    place: int = builder.EndObject()
    return place


def read_onnx_adapter(path: str | os.PathLike[str]) -> dict[str, Matrices]:
    """Return a mapping from weight to matrices, from a file that `write_onnx_adapter` wrote.

    B includes the scale of an adapter, so alpha is the rank. CheckpointError: the file is missing
    or damaged, or is not a file of adapters whose tensors are called `<weight>.lora_A` and
    `.lora_B`.
    """
    require_path(path)
    place = repr(os.fspath(path))
    try:
        data = read_regular_file(Path(path))
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error.strerror or error}.") from None
    if data[4:8] != IDENTIFIER:
        raise CheckpointError(
            f"{place} is not an adapter file of onnxruntime: its bytes 4 to 8 are {data[4:8]!r},"
            f" expected {IDENTIFIER!r}. Write adapter files with"
            f" trainer.export_adapter('name{SUFFIX}')."
        )
    tensors: dict[str, Array] = {}
    try:
        for name, tensor in _read_parameters(data):
            if name in tensors:
                raise ValueError(f"it contains two tensors called {name!r}")
            tensors[name] = tensor
    except (ValueError, TypeError, IndexError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{place} is damaged: {error}.") from None
    return _paired(place, tensors)


def _read_parameters(data: bytes) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a file. A damaged file raises errors of Python.

    Every offset in a FlatBuffer is relative and may point anywhere, so a few bytes can claim many
    large tensors. Tensors of a valid file do not overlap: together they are smaller than the file.
    """
    unclaimed = len(data)
    root = Table(data, int.from_bytes(data[:4], "little"))
    version = _int_field(root, 0)
    if version != VERSION:
        raise ValueError(f"it has format version {version}, expected {VERSION}")
    for place in _element_offsets(root, 3, 4):
        table = Table(data, place + int.from_bytes(data[place : place + 4], "little"))
        name, dims, raw = (
            _element_offsets(table, 0, 1),
            _element_offsets(table, 1, 8),
            _element_offsets(table, 3, 1),
        )
        unclaimed -= len(name) + 8 * len(dims) + len(raw)
        if unclaimed < 0:
            raise ValueError("its tensors overlap")
        text = data[name.start : name.stop].decode()
        number = _int_field(table, 2)
        if number not in TYPES:
            raise ValueError(f"{text!r} has the element type {number}, expected float32 or float64")
        dtype, shape = TYPES[number], [table.Get(Int64Flags, place) for place in dims]
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(raw):
            raise ValueError(
                f"{text!r} has {len(raw)} bytes, which do not fit {dtype} of shape {shape}"
            )
        yield text, np.frombuffer(data, dtype, math.prod(shape), raw.start).reshape(shape)


def _int_field(table: Table, field: int) -> int:
    """Return an int field of a table; 0 if the file omits it."""
    offset = table.Offset(4 + 2 * field)
    return int(table.Get(Int32Flags, table.Pos + offset)) if offset else 0


def _element_offsets(table: Table, field: int, size: int) -> range:
    """Return the offsets of a vector's elements, of `size` bytes each."""
    offset = table.Offset(4 + 2 * field)
    if not offset:
        return range(0)
    start, length = table.Vector(offset), table.VectorLen(offset)
    if start < 0 or start + size * length > len(table.Bytes):
        raise ValueError("it ends before the end of its tensors")
    return range(start, start + size * length, size)


def _paired(place: str, tensors: Mapping[str, Array]) -> dict[str, Matrices]:
    """Return a mapping from weight to matrices, in the layout of PEFT."""
    pairs: dict[str, dict[str, Array]] = {}
    for name, tensor in tensors.items():
        match = KEY.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{place} contains {name!r}, which is not a matrix of an adapter. Expected tensors"
                " called <weight>.lora_A and <weight>.lora_B, as trainer.export_adapter writes"
                " them."
            )
        require_finite(place, name, tensor)
        pairs.setdefault(match["weight"], {})[match["part"]] = _as_peft(tensor)
    if not pairs:
        raise CheckpointError(
            f"{place} contains no tensors. Write the file with trainer.export_adapter again."
        )
    for weight, pair in pairs.items():
        if not is_pair(pair):
            shapes = {part: array.shape for part, array in pair.items()}
            raise CheckpointError(
                f"{place} contains matrices for {weight!r} that do not fit each other: their"
                f" shapes are {shapes}. The first size of A and the second of B must both be the"
                " rank."
            )
    return {
        weight: Matrices(
            a=pair["A"],
            b=pair["B"],
            alpha=len(pair["A"]),
            dropout=0.0,
            scaling="alpha/r",
        )
        for weight, pair in pairs.items()
    }


def _as_peft(tensor: Array) -> Array:
    return tensor.T if tensor.ndim == 2 else tensor
