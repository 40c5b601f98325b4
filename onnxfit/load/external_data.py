"""Read the tensors that a model stores in other files, as ONNX's external data.

A model may come from anywhere. A tensor is therefore read only from a regular file in the model's
folder that no link leads to, and memory is taken only for bytes that the file has. Older versions
of onnx check neither.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import chain

import numpy as np
import onnx

from onnxfit.graph.shared_tensors import Array
from onnxfit.graph.subgraphs import graph_protos, nodes_of
from onnxfit.graph.tensors import is_external


def load_external_data(model: onnx.ModelProto, folder: str) -> None:
    """Copy the external data of a model's tensors into the model, in place.

    - `folder`: the folder of the model.

    The errors are those of `external_bytes`.
    """
    for tensor in filter(is_external, _tensors(model)):
        tensor.raw_data = external_bytes(tensor, folder).tobytes()
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")


def external_bytes(tensor: onnx.TensorProto, folder: str) -> Array:
    """Return the bytes of an external tensor.

    - `folder`: the folder of the model.

    ValueError: the tensor's location leads out of the folder, or the file does not have the
    tensor's bytes. OSError: the file cannot be read.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _file(tensor, folder, entries.get("location", ""))
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        offset = _checked_extent(tensor, "offset", entries.get("offset", "0"), size)
        present = size - offset
        length = _checked_extent(tensor, "length", entries.get("length", str(present)), present)
        data = np.empty(length, np.uint8)
        file.seek(offset)
        if file.readinto(data.data) != length:
            raise OSError(f"{path} was cut off while it was read")
    return data


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers of a model's graphs and the tensors in attributes of its nodes."""
    for graph in graph_protos(model.graph):
        yield from graph.initializer
    for node in chain(nodes_of(model.graph), *map(nodes_of, model.functions)):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _file(tensor: onnx.TensorProto, folder: str, location: str) -> str:
    """Return the path of an external tensor's file, which is in the folder and not a link."""
    place = f"the bytes of tensor {tensor.name!r} are in {location[:200]!r}"
    top = os.path.realpath(folder)
    path = os.path.normpath(os.path.join(top, location))
    if not location or os.path.isabs(location) or os.path.commonpath((top, path)) != top:
        raise ValueError(f"{place}, expected a file in the folder of the model.")
    if os.path.normcase(os.path.realpath(path)) != os.path.normcase(path):
        raise ValueError(f"{place}, which is a link. Put the file itself into the model's folder.")
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise ValueError(
            f"{place}, which does not exist. Keep it in the folder of the model."
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{place}, which is not a regular file.")
    if status.st_nlink > 1:
        raise ValueError(f"{place}, which has several hard links. Replace it by a copy.")
    return path


def _checked_extent(tensor: onnx.TensorProto, key: str, text: str, available: int) -> int:
    """Return the offset or length of an external tensor. ValueError: the file has fewer bytes."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not 0 <= number <= available:
        raise ValueError(
            f"tensor {tensor.name!r} has the {key} {text[:200]!r} in its file, expected a number"
            f" from 0 to {available}."
        )
    return number
