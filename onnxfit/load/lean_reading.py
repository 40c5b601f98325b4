"""Read a large model with its tensors in memory once, outside its proto.

protobuf reads a whole file, and then copies its tensors. This module cuts the tensors out of the
file before protobuf reads the rest.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import onnx

from onnxfit.graph.model import OnnxModel
from onnxfit.graph.shared_tensors import (
    Array,
    is_sharable,
    refer_to,
    shared_arrays,
)
from onnxfit.graph.tensors import copy_fields, is_external, nbytes, without_initializers
from onnxfit.load.external_data import external_bytes, load_external_data
from onnxfit.load.wire import (
    DATA_TYPE_OF_TENSOR,
    EXTERNAL_FIELDS,
    GRAPH_OF_MODEL,
    INITIALIZER_OF_GRAPH,
    LENGTH_DELIMITED,
    RAW_DATA_OF_TENSOR,
    Buffer,
    field_key,
    fields,
    varint,
)


def with_shared(source: str | bytes | onnx.ModelProto) -> OnnxModel:
    """Return a model whose larger tensors refer to arrays.

    The bytes of a tensor are read into memory once.

    - `source`: the path of an ONNX file, its bytes, or a model, which stays unchanged.

    The errors of reading are those of `load_external_data`. DecodeError: the message is damaged.
    """
    if isinstance(source, onnx.ModelProto):
        model, contents = _of_proto(source)
    elif isinstance(source, bytes):
        message, places = _without_raw_data(source)
        model = onnx.ModelProto.FromString(message)
        whole = np.frombuffer(source, np.uint8)
        contents = {i: whole[start : start + size].copy() for i, (start, size) in places.items()}
    else:
        model, contents = _of_file(source)
    for index, data in contents.items():
        refer_to(model.graph.initializer[index], data)
    return OnnxModel(model, shared_arrays(model))


def without_contents(path: str) -> onnx.ModelProto:
    """Return the model of a file that is not empty, without the bytes of its larger initializers.

    OSError: the file cannot be read. DecodeError: the message is damaged.
    """
    return _without_large_data(path)[0]


def _without_large_data(path: str) -> tuple[onnx.ModelProto, dict[int, tuple[int, int]]]:
    """Return the model of a file without the bytes of its larger initializers, and their places.

    The places are as for `_without_raw_data`.
    """
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        message, places = _without_raw_data(mapped)
    return onnx.ModelProto.FromString(message), places


def _of_proto(source: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[int, Array]]:
    """Return a copy of a model without the bytes of its larger initializers, and the bytes."""
    model = without_initializers(source)
    contents: dict[int, Array] = {}
    for index, tensor in enumerate(source.graph.initializer):
        if is_sharable(tensor.data_type, len(tensor.raw_data)):
            contents[index] = np.frombuffer(tensor.raw_data, np.uint8)
            copy_fields(tensor, model.graph.initializer.add(), {"raw_data"})
        else:
            model.graph.initializer.append(tensor)
    return model, contents


def _of_file(path: str) -> tuple[onnx.ModelProto, dict[int, Array]]:
    """Return the model of a file without the bytes of its larger initializers, and the bytes."""
    contents: dict[int, Array] = {}
    with open(path, "rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            message, places = _without_raw_data(mapped)
        for index, (start, size) in places.items():
            contents[index] = np.empty(size, np.uint8)
            file.seek(start)
            if file.readinto(contents[index].data) != size:
                raise OSError(f"{path} was cut off while it was read")
    model = onnx.ModelProto.FromString(message)
    folder = os.path.dirname(path)
    for index, tensor in enumerate(model.graph.initializer):
        if is_external(tensor) and is_sharable(tensor.data_type, nbytes(tensor)):
            contents[index] = external_bytes(tensor, folder)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    load_external_data(model, folder)
    return model, contents


def _without_raw_data(data: Buffer) -> tuple[bytes, dict[int, tuple[int, int]]]:
    """Return the message of a model without the bytes of its larger initializers, and their places.

    The places map each initializer to (first byte in `data`, number of bytes). A message that
    protobuf might read in another way, such as a damaged one, is returned whole.
    """
    try:
        return _stripped(data)
    except ValueError:
        return data[:], {}


def _stripped(data: Buffer) -> tuple[bytes, dict[int, tuple[int, int]]]:
    parts = list(fields(data, 0, len(data)))
    graphs = [field for field in parts if field[0] == GRAPH_OF_MODEL]
    if len(graphs) != 1 or graphs[0][1] != LENGTH_DELIMITED:
        raise ValueError("expected one graph in one field")
    _, _, start, first, end = graphs[0]
    pieces: list[bytes] = []
    places: dict[int, tuple[int, int]] = {}
    index = 0
    for number, kind, field_start, value, field_end in fields(data, first, end):
        if number != INITIALIZER_OF_GRAPH or kind != LENGTH_DELIMITED:
            pieces.append(data[field_start:field_end])
            continue
        place = _place_of_bytes(data, value, field_end)
        if place is None:
            pieces.append(data[field_start:field_end])
        else:
            tag, raw_start, raw_end = place
            tensor = data[value:tag] + data[raw_end:field_end]
            pieces += [field_key(INITIALIZER_OF_GRAPH), varint(len(tensor)), tensor]
            places[index] = raw_start, raw_end - raw_start
        index += 1
    graph = b"".join(pieces)
    return b"".join(
        [data[:start], field_key(GRAPH_OF_MODEL), varint(len(graph)), graph, data[end:]]
    ), places


def _place_of_bytes(data: Buffer, start: int, end: int) -> tuple[int, int, int] | None:
    """Return the positions of a larger tensor's only `raw_data`: tag, first byte and end."""
    parts = list(fields(data, start, end))
    raw = [field for field in parts if field[0] == RAW_DATA_OF_TENSOR]
    if len(raw) != 1 or any(field[0] in EXTERNAL_FIELDS for field in parts):
        return None
    _, kind, tag, first, last = raw[0]
    types = [data[value] for number, _, _, value, _ in parts if number == DATA_TYPE_OF_TENSOR]
    if kind != LENGTH_DELIMITED or not types or not is_sharable(types[-1], last - first):
        return None
    return tag, first, last
