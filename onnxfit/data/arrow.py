"""Files of columns, as pyarrow reads them: which columns they have, how many rows in how many
groups, and the numbers of a group.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnxfit.data.batch import Array
from onnxfit.data.convert import as_array
from onnxfit.data.optional import optional
from onnxfit.errors import DataError


class ColumnFile(ABC):
    """A file that is opened for every group anew, so that there may be any number of files."""

    path: Path
    names: list[str]
    groups: int
    rows: int
    columns: list[str]  # those that are read

    def read(self, group: int, most: int) -> Iterator[dict[str, Array]]:
        """The columns of a group, in parts of at most `most` rows.

        DataError for what is not numbers.
        """
        with naming(self.path):
            for part in self.parts(group, most):
                for start in range(0, part.num_rows, most):
                    some = part.slice(start, most)
                    yield {
                        name: _numbers(some.column(name), f"column {name!r} of {str(self.path)!r}")
                        for name in self.columns
                    }

    @abstractmethod
    def parts(self, group: int, most: int) -> Iterator[Any]:
        """The group as record batches, of about `most` rows where the format allows."""


class ParquetFile(ColumnFile):
    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata = optional("pyarrow.parquet", "parquet", "pyarrow").read_metadata(path)
        self.names = self._metadata.schema.to_arrow_schema().names
        self.groups, self.rows = self._metadata.num_row_groups, self._metadata.num_rows

    def parts(self, group: int, most: int) -> Iterator[Any]:
        with optional("pyarrow.parquet", "parquet", "pyarrow").ParquetFile(
            self.path, metadata=self._metadata
        ) as file:
            yield from file.iter_batches(most, row_groups=[group], columns=self.columns)


class ArrowFile(ColumnFile):
    """Its groups are record batches; where they are not compressed, only those of their bytes are
    read that are needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            self.names, self.groups = file.schema.names, file.num_record_batches
            self.rows = sum(file.get_batch(group).num_rows for group in range(self.groups))

    def parts(self, group: int, most: int) -> Iterator[Any]:
        with self._open([self.names.index(name) for name in self.columns]) as file:
            yield file.get_batch(group)

    @contextmanager
    def _open(self, fields: list[int] | None = None) -> Iterator[Any]:
        pyarrow, ipc = (
            optional(module, "parquet", "pyarrow") for module in ("pyarrow", "pyarrow.ipc")
        )
        with pyarrow.memory_map(str(self.path)) as source:
            yield ipc.open_file(source, options=ipc.IpcReadOptions(included_fields=fields))


FORMATS: dict[str, type[ParquetFile] | type[ArrowFile]] = {
    ".parquet": ParquetFile, ".pq": ParquetFile, ".arrow": ArrowFile, ".feather": ArrowFile,
}  # fmt: skip


def column_files(paths: Sequence[str | os.PathLike[str]], columns: list[str]) -> list[ColumnFile]:
    """The files, and those of the folders, of which `columns` will be read.

    DataError where a file lacks one, or none has a row.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        found += (
            sorted(p for p in path.rglob("*") if p.suffix in FORMATS and p.is_file())
            if path.is_dir()
            else [path]
        )
    files: list[ColumnFile] = []
    for path in found:
        if path.suffix not in FORMATS:
            raise DataError(f"{str(path)!r} is none of {', '.join(FORMATS)}.")
        with naming(path):
            file = FORMATS[path.suffix](path)
        missing = [name for name in columns if name not in file.names]
        if missing:
            raise DataError(
                f"{str(path)!r} has no column {', '.join(map(repr, missing))}; it has"
                f" {', '.join(map(repr, file.names))}."
            )
        file.columns = columns
        files.append(file)
    if not any(file.rows for file in files):
        raise DataError(
            f"No rows in {', '.join(repr(str(path)) for path in paths) or 'no files'}"
            f" ({', '.join(FORMATS)})."
        )
    return files


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What pyarrow says of a file that is none of its formats, with the name of the file."""
    pyarrow = optional("pyarrow", "parquet", "pyarrow")
    try:
        yield
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}") from error


def _numbers(column: Any, place: str) -> Array:
    """A column as an array; lists become further dimensions."""
    types, compute = (
        optional("pyarrow.types", "parquet", "pyarrow"),
        optional("pyarrow.compute", "parquet", "pyarrow"),
    )
    shape = [len(column)]
    while True:
        if column.null_count:
            raise DataError(f"{place} has nulls: fill them, or leave these rows out.")
        if hasattr(column, "to_numpy_ndarray"):  # tensors of one shape
            array = column.to_numpy_ndarray()
            return as_array(array.reshape(*shape, *array.shape[1:]), place)
        if hasattr(column, "storage"):
            column = column.storage
        elif types.is_dictionary(column.type):
            column = column.dictionary_decode()
        elif (
            types.is_list(column.type)
            or types.is_large_list(column.type)
            or types.is_fixed_size_list(column.type)
        ):
            lengths = compute.unique(compute.list_value_length(column)).to_pylist()
            if len(lengths) > 1:
                raise DataError(
                    f"{place} has lists of different lengths:"
                    f" {', '.join(map(str, sorted(lengths)[:5]))}."
                )
            shape += lengths
            column = column.flatten()
        else:
            return as_array(column.to_numpy(zero_copy_only=False), place).reshape(shape)
