"""Columns of Parquet and Arrow files, read with pyarrow one group of rows at a time."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnxfit.data.batch import Array
from onnxfit.data.convert import as_array
from onnxfit.data.optional import import_optional
from onnxfit.errors import DataError, listed_names
from onnxfit.files import require_regular_file


class ColumnFile(ABC):
    """A file of columns, with its rows in groups.

    The file is opened again for every group, so that the number of files is not limited.

    - `names`: all columns of the file; `columns`: the columns to read.
    - `groups`, `rows`: the number of groups and of rows.
    """

    path: Path
    names: list[str]
    groups: int
    rows: int
    columns: list[str]

    def read(self, group: int, max_rows: int) -> Iterator[dict[str, Array]]:
        """Yield the columns of a group, in tables of at most `max_rows` rows.

        DataError: a column does not consist of numbers.
        """
        with file_errors(self.path):
            for batch in self.record_batches(group, max_rows):
                for start in range(0, batch.num_rows, max_rows):
                    yield self._numbers(batch.slice(start, max_rows))

    def _numbers(self, batch: Any) -> dict[str, Array]:
        return {
            name: _numbers(batch.column(name), f"column {name!r} of {str(self.path)!r}")
            for name in self.columns
        }

    @abstractmethod
    def record_batches(self, group: int, max_rows: int) -> Iterator[Any]:
        """Yield the group in record batches of about `max_rows` rows, if the format allows it."""


class ParquetFile(ColumnFile):
    """A Parquet file, with its row groups."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata = import_optional("pyarrow.parquet", "parquet", "pyarrow").read_metadata(
            path
        )
        self.names = self._metadata.schema.to_arrow_schema().names
        self.groups = self._metadata.num_row_groups
        self.rows = self._metadata.num_rows

    def record_batches(self, group: int, max_rows: int) -> Iterator[Any]:
        with import_optional("pyarrow.parquet", "parquet", "pyarrow").ParquetFile(
            self.path, metadata=self._metadata
        ) as file:
            rows, expected = 0, self._metadata.row_group(group).num_rows
            for batch in file.iter_batches(max_rows, row_groups=[group], columns=self.columns):
                rows += batch.num_rows
                yield batch
            if rows != expected:
                raise DataError(
                    f"{str(self.path)!r} is damaged: row group {group} has {rows} rows, but the"
                    f" file's metadata says {expected}. Write or download the file again."
                )


class ArrowFile(ColumnFile):
    """An Arrow file in the IPC format, whose groups are its record batches.

    The file is mapped into memory. Unless it is compressed, only the bytes of the requested columns
    are read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            self.names = file.schema.names
            self.groups = file.num_record_batches
            self.rows = sum(file.get_batch(group).num_rows for group in range(self.groups))

    def record_batches(self, group: int, max_rows: int) -> Iterator[Any]:
        with self._open([self.names.index(name) for name in self.columns]) as file:
            yield file.get_batch(group)

    @contextmanager
    def _open(self, fields: list[int] | None = None) -> Iterator[Any]:
        pyarrow = import_optional("pyarrow", "parquet", "pyarrow")
        ipc = import_optional("pyarrow.ipc", "parquet", "pyarrow")
        with pyarrow.memory_map(str(self.path)) as file:
            yield ipc.open_file(file, options=ipc.IpcReadOptions(included_fields=fields))


FORMATS: dict[str, type[ParquetFile] | type[ArrowFile]] = {
    ".parquet": ParquetFile, ".pq": ParquetFile, ".arrow": ArrowFile, ".feather": ArrowFile,
}  # fmt: skip


def column_files(
    paths: Sequence[str | os.PathLike[str]], columns: list[str], optional: Sequence[str] = ()
) -> list[ColumnFile]:
    """Return the files, including the files in the folders, whose `columns` will be read.

    - `optional`: further columns, which are read from the files that have them.

    DataError: a file lacks a column, or there are no rows.
    """
    file_paths: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            file_paths += sorted(p for p in path.rglob("*") if p.suffix in FORMATS and p.is_file())
        else:
            file_paths.append(path)
    files: list[ColumnFile] = []
    for path in file_paths:
        if path.suffix not in FORMATS:
            raise DataError(
                f"The suffix of {str(path)!r} is unknown. Expected one of {', '.join(FORMATS)}."
            )
        with file_errors(path):
            require_regular_file(path)
            file = FORMATS[path.suffix](path)
        missing = [name for name in columns if name not in file.names]
        if missing:
            raise DataError(
                f"{str(path)!r} has no column {', '.join(map(repr, missing))}. Its columns are"
                f" {listed_names(map(repr, file.names), missing[0])}."
            )
        file.columns = [*columns, *(n for n in optional if n in file.names and n not in columns)]
        files.append(file)
    if not any(file.rows for file in files):
        raise DataError(
            f"Found no rows in {listed_names(repr(str(path)) for path in paths) or 'no files'}."
            f" Files that can be read are {', '.join(FORMATS)}."
        )
    return files


def lists(file: ColumnFile, group: int, max_rows: int) -> Iterator[dict[str, tuple[Array, Array]]]:
    """Yield the lists of any length in the columns of a group.

    Each item has about `max_rows` lists of each column, as the values of all these lists and the
    length of each. DataError: a column does not contain lists, or has nulls.
    """
    with file_errors(file.path):
        for batch in file.record_batches(group, max_rows):
            yield {
                name: _lists(batch.column(name), f"column {name!r} of {str(file.path)!r}")
                for name in file.columns
            }


def _lists(column: Any, title: str) -> tuple[Array, Array]:
    compute = import_optional("pyarrow.compute", "parquet", "pyarrow")
    if not _is_list(column):
        raise DataError(f"{title} has type {column.type}. Expected a list in each row.")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise DataError(f"{title} has nulls. Fill them, or remove these rows.")
    lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False)
    return as_array(values.to_numpy(zero_copy_only=False), title), lengths


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Raise pyarrow's errors as a DataError that names the file."""
    pyarrow = import_optional("pyarrow", "parquet", "pyarrow")
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}") from error


def _numbers(column: Any, name: str) -> Array:
    """Return a column as an array. Lists become further dimensions."""
    types = import_optional("pyarrow.types", "parquet", "pyarrow")
    shape = [len(column)]
    while True:
        if column.null_count:
            raise DataError(f"{name} has nulls. Fill them, or remove these rows.")
        if hasattr(column, "to_numpy_ndarray"):  # tensors of one shape
            array = column.to_numpy_ndarray()
            return as_array(array.reshape(*shape, *array.shape[1:]), name)
        if hasattr(column, "storage"):
            column = column.storage
        elif types.is_dictionary(column.type):
            column = column.dictionary_decode()
        elif _is_list(column):
            shape += _list_lengths(column, name)
            column = column.flatten()
        else:
            return as_array(column.to_numpy(zero_copy_only=False), name).reshape(shape)


def _is_list(column: Any) -> bool:
    types = import_optional("pyarrow.types", "parquet", "pyarrow")
    kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(is_kind(column.type) for is_kind in kinds)


def _list_lengths(column: Any, name: str) -> list[int]:
    """Return the common length of the lists in a column, if any. DataError: the lengths differ."""
    compute = import_optional("pyarrow.compute", "parquet", "pyarrow")
    lengths: list[int] = compute.unique(compute.list_value_length(column)).to_pylist()
    if len(lengths) > 1:
        raise DataError(
            f"{name} has lists of different lengths: {', '.join(map(str, sorted(lengths)[:5]))}."
        )
    return lengths
