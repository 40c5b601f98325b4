"""Write a model to a file, tensor by tensor.

The elements of a large model go from their arrays to the file. Memory holds no copy of all of them,
and a computed tensor, such as a merged weight, is in memory only while it is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxfit.files import require_suffix, write_atomically
from onnxfit.graph import tensors as limits
from onnxfit.graph.model import OnnxModel
from onnxfit.graph.shared_tensors import (
    Storable,
    contents_of,
    is_sharable,
    shared_arrays,
)
from onnxfit.graph.tensors import (
    FIELDS_OF_NUMBERS,
    Message,
    Writable,
    copy_fields,
    detached,
    initializer_arrays,
    is_large,
    nbytes,
    refer,
    without_initializers,
    write_elements,
    write_tensors,
)
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
    _write(path, model, weights)
    return Path(path)


def _write(
    path: str | os.PathLike[str], model: onnx.ModelProto, weights: Collection[str]
) -> onnx.ModelProto:
    """Write a file as `write_model` does. Return the model, whose larger tensors are in files."""
    require_suffix(path, "an ONNX model", ".onnx")
    path = Path(path)
    if not is_large(model):
        places: dict[int, tuple[int, int]] = {}
        write_atomically(path, lambda file: places.update(write_message(file, model)))
        return _with_places(model, path.name, places)
    old = _data_files(path)
    data = path.with_name(_free_name(path) if path.exists() else f"{path.name}.data")
    whole_bytes = [t for t in model.graph.initializer if ir.DataType(t.data_type).bitwidth >= 8]
    own = {tensor.name for tensor in whole_bytes if contents_of(tensor) is None}
    bare, tensors = detached(model, initializer_arrays(model, own.intersection(weights)), data.name)
    newest = old[-1] if old else None
    write_atomically(data, lambda file: write_tensors(file, tensors), replaced=newest)
    write_atomically(path, lambda file: write_message(file, bare))
    for other in old:
        if other != data:
            with suppress(OSError):  # another program may have it open; the next call deletes it
                other.unlink()
    return bare


def _with_places(
    model: onnx.ModelProto, file: str, places: Mapping[int, tuple[int, int]]
) -> onnx.ModelProto:
    """Return a copy of a model in which initializers are external data.

    - `places`: the number of an initializer -> its first byte in the file, and its bytes.
    """
    copy = without_initializers(model)
    for index, tensor in enumerate(model.graph.initializer):
        added = copy.graph.initializer.add()
        if index in places:
            copy_fields(tensor, added, FIELDS_OF_NUMBERS)
            refer(added, file, *places[index])
        else:
            added.CopyFrom(tensor)
    return copy


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

    - `model`: the model. If its arrays are the memory of the training itself, the snapshot must be
      written before the next step.
    - `weights`: the initializers that training changes.
    - `writes`: False for a process that writes nothing because another process does.
    - `unchanged`: a context in which the arrays have their values, or an error is raised.
    """

    model: OnnxModel
    weights: Collection[str]
    writes: bool = True
    unchanged: Callable[[], AbstractContextManager[None]] = nullcontext

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the model to a .onnx file as `write_model` does, and return its path.

        SettingError: the weights have changed since a snapshot with `copy=False`.
        """
        if not self.writes:
            return Path(path)
        with self.unchanged():
            return write_model(path, self.model.proto, self.weights)

    def whole(self) -> onnx.ModelProto:
        """Copy the arrays into `model`, and return it."""
        with self.unchanged():
            return self.model.whole()

    def written(self, path: str | os.PathLike[str]) -> onnx.ModelProto:
        """Write the model, and return it.

        The larger tensors of a large model are then external data, at their places in the new file.
        """
        size = sum(map(nbytes, self.model.graph.initializer))
        with self.unchanged():
            if size > limits.MAX_COPIED_BYTES and self.writes:
                return _write(path, self.model.proto, self.weights)
            self.write(path)
            return self.whole()


def write_message(file: Writable, model: onnx.ModelProto) -> dict[int, tuple[int, int]]:
    """Write the bytes of a model, in which tensors have the elements of the arrays they refer to.

    - `file`: an open file, or another object with its method `write`, such as a checksum.

    Returns the number of each larger initializer -> its first byte, and its bytes. A small model
    has none.
    """
    tensors = enumerate(model.graph.initializer)
    larger = (index for index, tensor in tensors if _referred_array(tensor) is not None)
    places: dict[int, tuple[int, int]] = {}
    position = 0
    for piece in _message(model):
        if isinstance(piece, bytes):
            file.write(piece)
            position += len(piece)
        else:
            size = write_elements(file, piece)
            places[next(larger)] = position, size
            position += size
    return places


def _message(model: onnx.ModelProto) -> Iterator[bytes | Storable]:
    """Yield the bytes of a model, and the tensors whose elements follow them."""
    graph = model.graph
    has_references = bool(shared_arrays(model))
    if not has_references and sum(map(nbytes, graph.initializer)) <= limits.MAX_COPIED_BYTES:
        yield model.SerializeToString(deterministic=True)
        return
    before, after = _around_field(model, onnx.ModelProto, GRAPH_OF_MODEL)
    graph_before, graph_after = _around_field(graph, onnx.GraphProto, INITIALIZER_OF_GRAPH)
    sizes = [_message_size(tensor) for tensor in graph.initializer]
    heads = [field_key(INITIALIZER_OF_GRAPH) + varint(size) for size in sizes]
    size = len(graph_before) + sum(map(len, heads)) + sum(sizes) + len(graph_after)
    yield before + field_key(GRAPH_OF_MODEL) + varint(size) + graph_before
    for head, tensor in zip(heads, graph.initializer):
        yield head
        yield from _tensor_message(tensor)
    yield graph_after + after


def _tensor_message(tensor: onnx.TensorProto) -> Iterator[bytes | Storable]:
    """Yield the bytes of a tensor; a larger tensor's elements are a piece of their own."""
    elements = _referred_array(tensor)
    if elements is None:
        yield tensor.SerializeToString(deterministic=True)
        return
    before, after = _tensor_parts(tensor)
    yield before + field_key(RAW_DATA_OF_TENSOR) + varint(_size(elements))
    yield elements
    yield after


def _referred_array(tensor: onnx.TensorProto) -> Storable | None:
    """Return the array that a tensor refers to, or the tensor if it has many bytes; else None."""
    contents = contents_of(tensor)
    if contents is not None:
        return contents
    size = nbytes(tensor)
    is_whole = is_sharable(tensor.data_type, size) and len(tensor.raw_data) == size
    return tensor if is_whole else None


def _size(elements: Storable) -> int:
    return nbytes(elements) if isinstance(elements, onnx.TensorProto) else elements.nbytes


def _message_size(tensor: onnx.TensorProto) -> int:
    """Return the number of bytes of `_tensor_message`, which computes nothing."""
    elements = _referred_array(tensor)
    if elements is None:
        size: int = tensor.ByteSize()
        return size
    before, after = _tensor_parts(tensor)
    head = field_key(RAW_DATA_OF_TENSOR) + varint(_size(elements))
    return len(before) + len(head) + _size(elements) + len(after)


def _tensor_parts(tensor: onnx.TensorProto) -> tuple[bytes, bytes]:
    """Return the bytes before and after the elements of a tensor."""
    stub = onnx.TensorProto()
    copy_fields(tensor, stub, {"external_data", "data_location", "raw_data"})
    return _around_field(stub, onnx.TensorProto, RAW_DATA_OF_TENSOR)


def _around_field(message: Message, kind: type[Message], number: int) -> tuple[bytes, bytes]:
    """Return the bytes of a message's fields before and after the field with a number."""
    before, after = kind(), kind()
    fields = message.DESCRIPTOR.fields
    copy_fields(message, before, {field.name for field in fields if field.number >= number})
    copy_fields(message, after, {field.name for field in fields if field.number <= number})
    return before.SerializeToString(deterministic=True), after.SerializeToString(deterministic=True)
