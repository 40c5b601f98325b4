"""Arrays on disk: .npy and .npz files, mapped into memory and read batch by batch."""

from __future__ import annotations

import math
import mmap
import os
import zipfile
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeGuard

import numpy as np

from onnxfit.data.adapter import DataAdapter, MatchedData
from onnxfit.data.batch import Array, Batch, Columns
from onnxfit.data.content import MAX_HASHED_BYTES, Content, content_of
from onnxfit.data.convert import as_array
from onnxfit.data.fingerprint import fingerprint_of
from onnxfit.data.npy import READ_ERRORS, read_header
from onnxfit.data.share import Share
from onnxfit.data.source import Batching, RowSource, Source
from onnxfit.data.stream import StreamSource
from onnxfit.data.structure import select_rows
from onnxfit.errors import DataError
from onnxfit.files import require_regular_file

__all__ = ["MappedSource"]

SUFFIXES = (".npy", ".npz")
# Bytes of a zip archive before the name of a member. The last four are the lengths of that name and
# of the extra field that follows it.
LOCAL_HEADER_BYTES = 30


class MappedSource(RowSource, StreamSource):
    """Arrays, some of them on disk.

    Each batch is read, checked and cast when the loop asks for it. At first, only one row is
    checked. `array_source` matches arrays and creates this source.
    """

    def __init__(self, adapter: DataAdapter, matched: MatchedData, batching: Batching) -> None:
        self._matched = matched.map(
            lambda name, value: value if hasattr(value, "__array__") else as_array(value, name)
        )
        without = {spec.name for spec in adapter.inputs if not spec.has_rows}
        values = [pair for pair in self._matched.named_values() if pair[0] not in without]
        rows = adapter.common_rows(values)
        super().__init__(adapter, rows, batching)
        adapter.convert(self._select(slice(0, 1)))

    def items(self, epoch: int, skip: int) -> Iterator[MatchedData]:
        return (self._select(index) for index in self.indices(epoch, skip))

    def convert(self, item: MatchedData) -> Batch:
        return self.adapter.matched_batch(item)

    def _shard(self, share: Share) -> Source:
        return self._shard_rows(share)

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | fingerprint_of(self._matched.named_values())

    def content(self) -> Content | None:
        """Return the hashes of all rows, converted as for a batch; see `Source.content`."""
        adapter = copy(self.adapter)
        adapter._warned = True  # the batches of training warn

        def block(index: slice) -> tuple[Columns, Columns]:
            data = adapter.convert(self._select(index))
            return data.columns, data.scalars

        columns, scalars = block(slice(0, 1))
        row_bytes = sum(array.nbytes for _, array in columns)
        if row_bytes * self.rows + sum(a.nbytes for _, a in scalars) > MAX_HASHED_BYTES:
            return None
        try:
            return content_of(self.rows, block)
        except DataError:  # rows with NaN, which the batch that reads them reports
            return None

    def _select(self, index: slice | Array) -> MatchedData:
        return self.adapter.selected(self._matched, lambda value: select_rows(value, index))


def open_paths(data: Any) -> Any:
    """Return data with every path replaced by the contents of the file, mapped read-only.

    A .npy becomes an array, a .npz a dict name -> array. DataError: a file is of another kind, is a
    compressed .npz, contains Python objects, is missing, or cannot be read.
    """
    if is_path(data):
        return _map(Path(data))
    if isinstance(data, Mapping) and any(map(is_path, data.values())):
        return {
            name: _map(Path(value)) if is_path(value) else value for name, value in data.items()
        }
    if isinstance(data, (list, tuple)) and any(_is_array_path(item) for item in data):
        return [_map(Path(item)) if is_path(item) else item for item in data]
    return data


def is_path(data: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether data is a string or another path."""
    return isinstance(data, (str, os.PathLike))


def _is_array_path(item: Any) -> bool:
    """Return whether an item of a list is a path, as opposed to the name of a class."""
    return isinstance(item, os.PathLike) or (isinstance(item, str) and item.endswith(SUFFIXES))


def is_mapped(array: Any) -> bool:
    """Return whether an array's numbers are in a file that is mapped into memory."""
    while isinstance(array, (np.ndarray, memoryview)):
        array = array.obj if isinstance(array, memoryview) else array.base
    return isinstance(array, mmap.mmap)


def _map(path: Path) -> Any:
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{str(path)!r} is a path, but only paths of .npy and .npz files can be passed as data."
            " Use onnxfit.ParquetLoader for Parquet and Arrow files, and onnxfit.ImageFolder for a"
            " folder of images."
        )
    try:
        return map_array(path) if path.suffix == ".npy" else _map_archive(path)
    except DataError:
        raise
    except READ_ERRORS as error:
        raise DataError(f"{str(path)!r} cannot be mapped into memory: {error}") from error


def map_array(path: Path) -> Array:
    """Return the array of a .npy file, mapped read-only. One of READ_ERRORS: it is damaged."""
    require_regular_file(path)
    with path.open("rb") as file:
        return _map_at(path, file, path.stat().st_size)


def _map_archive(path: Path) -> dict[str, Array]:
    """Return the arrays of a .npz by name. Each array is a .npy file inside the archive."""
    require_regular_file(path)
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        return {
            member.filename.removesuffix(".npy"): _map_member(path, file, member)
            for member in archive.infolist()
        }


def _map_member(path: Path, file: BinaryIO, member: zipfile.ZipInfo) -> Array:
    if member.compress_type != zipfile.ZIP_STORED:
        raise DataError(
            f"{str(path)!r} is compressed, so its rows cannot be read one by one. Pass"
            " np.load(path) if it fits into memory, or write it with np.savez instead of"
            " np.savez_compressed."
        )
    file.seek(member.header_offset)
    header = file.read(LOCAL_HEADER_BYTES)
    name_bytes = int.from_bytes(header[-4:-2], "little")
    extra_bytes = int.from_bytes(header[-2:], "little")
    file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
    return _map_at(path, file, member.file_size)


def _map_at(path: Path, file: BinaryIO, size: int) -> Array:
    """Return the array whose .npy file of `size` bytes begins at the position of `file`."""
    header = read_header(file, size)
    if not math.prod(header.shape):
        return np.empty(header.shape, header.dtype)  # an empty array cannot be mapped
    order: Literal["C", "F"] = "F" if header.fortran_order else "C"
    return np.memmap(path, header.dtype, "r", file.tell(), header.shape, order)
