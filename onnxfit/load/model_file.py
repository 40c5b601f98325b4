"""Write a model to a file, tensor by tensor.

The elements of a large model go from their arrays to the file. Memory holds no copy of all of them,
and a computed tensor, such as a merged weight, is in memory only while it is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir

from onnxfit.files import require_suffix, write_atomically
from onnxfit.graph import tensors as limits
from onnxfit.graph.shared_tensors import Contents, contents_of, shared_arrays, whole_model
from onnxfit.graph.tensors import (
    Message,
    Storable,
    copy_fields,
    detached,
    initializer_arrays,
    is_large,
    nbytes,
    write_elements,
    write_tensors,
)
from onnxfit.load.lean_reading import with_places
from onnxfit.load.wire import (
    GRAPH_OF_MODEL,
    INITIALIZER_OF_GRAPH,
    RAW_DATA_OF_TENSOR,
    field_key,
    varint,
)


def write_model(
    path: str | os.PathLike[str], model: onnx.ModelProto, weights: Collection[str] = ()
) -> Path:
    """Write a .onnx file atomically and return its path.

    More than 2 GB of tensors are written to the file `<path>.data` next to it. If an older model
    may need that file, they are written to `<path>.onnxfit-1.data`, and the older file is deleted
    once the .onnx file is replaced. At any time, the .onnx file and its data therefore match.

    - `path`: the file to write; an existing one is replaced.
    - `model`: the model. Its tensors may refer to arrays.
    - `weights`: initializers that go into the second file even if they are small.

    SettingError: the name of the file has the suffix of another format, such as `.keras`.
    """
    require_suffix(path, "an ONNX model", ".onnx")
    if not is_large(model):
        return write_atomically(path, lambda file: _write_message(file, model))
    path = Path(path)
    old = _data_files(path)
    data = path.with_name(_free_name(path) if path.exists() else f"{path.name}.data")
    whole_bytes = [t for t in model.graph.initializer if ir.DataType(t.data_type).bitwidth >= 8]
    own = {tensor.name for tensor in whole_bytes if contents_of(tensor) is None}
    bare, tensors = detached(model, initializer_arrays(model, own.intersection(weights)), data.name)
    newest = old[-1] if old else None
    write_atomically(data, lambda file: write_tensors(file, tensors), replaced=newest)
    write_atomically(path, lambda file: _write_message(file, bare))
    for other in old:
        if other != data:
            with suppress(OSError):  # another program may have it open; the next call deletes it
                other.unlink()
    return path


def _free_name(path: Path) -> str:
    """Return a name that no file has, for the tensors of the model `path`."""
    names = chain([f"{path.name}.data"], (f"{path.name}.onnxfit-{n}.data" for n in count(1)))
    return next(name for name in names if not os.path.lexists(path.with_name(name)))


def _data_files(path: Path) -> list[Path]:
    """Return the files with tensors of models `path`, the newest last."""
    pattern = re.compile(rf"{re.escape(path.name)}(\.onnxfit-\d+)?\.data")
    files = [file for file in path.parent.glob("*.data") if pattern.fullmatch(file.name)]
    return sorted(files, key=lambda file: file.lstat().st_mtime_ns)


@dataclass(frozen=True, eq=False)
class ModelSnapshot:
    """A trained model as it was at one moment. Any thread may write it while training continues.

    - `model`: the model, which may refer to arrays.
    - `arrays`: these arrays.
    - `weights`: the initializers that training changes.
    - `writes`: False for a process that writes nothing because another process does.
    """

    model: onnx.ModelProto
    arrays: Sequence[Contents]
    weights: Collection[str]
    writes: bool = True

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the model to a .onnx file as `write_model` does, and return its path."""
        return write_model(path, self.model, self.weights) if self.writes else Path(path)

    def whole(self) -> onnx.ModelProto:
        """Return the model with all tensors in it."""
        return whole_model(self.model)

    def written(self, path: str | os.PathLike[str]) -> onnx.ModelProto:
        """Write the model, and return it.

        Tensors that refer to arrays are then external data, at their places in the new file.
        """
        self.write(path)
        if not self.arrays or not self.writes:
            return self.whole()
        return with_places(os.fspath(path))


def _write_message(file: BinaryIO, model: onnx.ModelProto) -> None:
    for piece in _message(model):
        if isinstance(piece, bytes):
            file.write(piece)
        else:
            write_elements(file, piece)


def _message(model: onnx.ModelProto) -> Iterator[bytes | Storable]:
    """Yield the bytes of a model, and the tensors whose elements follow them."""
    graph = model.graph
    has_references = bool(shared_arrays(model))
    if not has_references and sum(map(nbytes, graph.initializer)) <= limits.MAX_COPIED_BYTES:
        yield model.SerializeToString(deterministic=True)
        return
    before, after = _parts(model, onnx.ModelProto, GRAPH_OF_MODEL)
    graph_before, graph_after = _parts(graph, onnx.GraphProto, INITIALIZER_OF_GRAPH)
    sizes = [_message_size(tensor) for tensor in graph.initializer]
    heads = [field_key(INITIALIZER_OF_GRAPH) + varint(size) for size in sizes]
    size = len(graph_before) + sum(map(len, heads)) + sum(sizes) + len(graph_after)
    yield before + field_key(GRAPH_OF_MODEL) + varint(size) + graph_before
    for head, tensor in zip(heads, graph.initializer):
        yield head
        yield from _tensor_message(tensor)
    yield graph_after + after


def _tensor_message(tensor: onnx.TensorProto) -> Iterator[bytes | Storable]:
    """Yield the bytes of a tensor, in which its elements are those of the array it refers to."""
    contents = contents_of(tensor)
    if contents is None:
        yield tensor.SerializeToString(deterministic=True)
        return
    before, after = _tensor_parts(tensor)
    yield before + field_key(RAW_DATA_OF_TENSOR) + varint(contents.nbytes)
    yield contents
    yield after


def _message_size(tensor: onnx.TensorProto) -> int:
    """Return the number of bytes of `_tensor_message`, which computes nothing."""
    contents = contents_of(tensor)
    if contents is None:
        size: int = tensor.ByteSize()
        return size
    before, after = _tensor_parts(tensor)
    head = field_key(RAW_DATA_OF_TENSOR) + varint(contents.nbytes)
    return len(before) + len(head) + contents.nbytes + len(after)


def _tensor_parts(tensor: onnx.TensorProto) -> tuple[bytes, bytes]:
    """Return the bytes before and after the elements of a tensor that refers to an array."""
    stub = onnx.TensorProto()
    copy_fields(tensor, stub, {"external_data", "data_location"})
    return _parts(stub, onnx.TensorProto, RAW_DATA_OF_TENSOR)


def _parts(message: Message, kind: type[Message], number: int) -> tuple[bytes, bytes]:
    """Return the bytes of a message's fields before and after the field with a number."""
    before, after = kind(), kind()
    fields = message.DESCRIPTOR.fields
    copy_fields(message, before, {field.name for field in fields if field.number >= number})
    copy_fields(message, after, {field.name for field in fields if field.number <= number})
    return before.SerializeToString(deterministic=True), after.SerializeToString(deterministic=True)
