"""Columns of Parquet and Arrow files, read a group of rows at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from onnxfit.data.arrow import ColumnFile, column_files
from onnxfit.data.batch import Array
from onnxfit.data.convert import in_dtype, is_float
from onnxfit.data.loader import Loader
from onnxfit.data.order import permutation
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec

Source = Union[str, "os.PathLike[str]"]
Columns = Union[str, Sequence[str], Mapping[str, Union[str, Sequence[str]]]]
Table = dict[str, Array]  # column -> its values, all with the same number of rows


class ParquetLoader(Loader):
    """Columns of Parquet files (.parquet, .pq) and Arrow files (.arrow, .feather: the IPC file
    format), which may be larger than memory.

    - `paths`: a file, several, or a folder of them, whose files are taken in the order of their
      names. All have the columns asked for.
    - `inputs`: what x is. A column's name: its values, `(batch,)`, or `(batch, k)` for a column of
      lists, all of one length. A list of names: those columns side by side, `(batch, columns)`. For
      several inputs, a dict input name -> one of these.
    - `labels`, in the same way, is y; `sample_weight` the name of a column.
    - `dtype`: what floats become, as writers of these files make them double. None: what they are.
    - `shuffle`: groups of rows come in a new order every epoch, and `buffer` rows of them at a time
      are mixed; both depend on `(seed, epoch)` only, and every row comes once. Files sorted by
      class want small groups and a buffer of many groups.
    - `buffer`: rows that are read and kept at a time.
    - `batch_size`, `seed`, `drop_last`, `prefetch`: as in `DataLoader`; two batches are made ahead.

    DataError: files without rows or without a column asked for, by name; while batches are made, a
    column with nulls, text or lists of different lengths. SettingError: an impossible setting.
    InstallationError: pyarrow is missing.
    """

    def __init__(
        self,
        paths: Source | Sequence[Source],
        inputs: Columns,
        labels: Columns | None = None,
        sample_weight: str | None = None,
        *,
        dtype: npt.DTypeLike | None = np.float32,
        batch_size: int = 32,
        shuffle: bool = True,
        buffer: int = 16384,
        seed: int | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
    ) -> None:
        if sample_weight is not None and labels is None:
            raise DataError("ParquetLoader got sample weights without labels.")
        if buffer < 1:
            raise SettingError(f"ParquetLoader needs buffer >= 1, got {buffer}.")
        self.buffer = buffer
        self.dtype = None if dtype is None else np.dtype(dtype)
        if self.dtype is not None and not is_float(self.dtype):
            raise SettingError(
                "ParquetLoader's dtype is what floats become, itself a type of floats, got"
                f" {self.dtype}."
            )
        self._parts = [part for part in (inputs, labels, sample_weight) if part is not None]
        columns = list(dict.fromkeys(name for part in self._parts for name in _names(part)))
        self.files: list[ColumnFile] = column_files(
            [paths] if isinstance(paths, (str, os.PathLike)) else paths, columns
        )
        self._groups = [(file, group) for file in self.files for group in range(file.groups)]
        super().__init__(
            sum(file.rows for file in self.files), batch_size, shuffle, seed, drop_last, prefetch
        )

    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        size, number, rest = self.batch_size, 0, Table()
        for block in self._blocks(epoch, seed):
            rest = _joined([rest, block]) if rest else block
            full = _rows(rest) // size
            for start in range(0, full * size, size):
                if number >= skip:
                    yield self._batch_of(_some(rest, slice(start, start + size)))
                number += 1
            rest = _some(rest, slice(full * size, None))
        if skip <= number < len(self):
            yield self._batch_of(rest)

    def _blocks(self, epoch: int, seed: int | None) -> Iterator[Table]:
        """Tables of `buffer` rows and a shorter last one; with a seed, the groups they are made of
        and their rows come in a new order.
        """
        number, ready = 0, Table()
        for table in self._tables(epoch, seed):
            ready = _joined([ready, table]) if ready else table
            while _rows(ready) >= self.buffer:
                number += 1
                yield _mixed(_some(ready, slice(0, self.buffer)), epoch, seed, number)
                ready = _some(ready, slice(self.buffer, None))
        if _rows(ready):
            yield _mixed(ready, epoch, seed, number + 1)

    def _tables(self, epoch: int, seed: int | None) -> Iterator[Table]:
        """The groups, each in tables of at most `buffer` rows."""
        groups = len(self._groups)
        for position in (
            range(groups) if seed is None else permutation(seed, epoch, groups).tolist()
        ):
            file, group = self._groups[position]
            for table in file.read(group, self.buffer):
                yield {
                    name: self._floats(column, f"column {name!r} of {str(file.path)!r}")
                    for name, column in table.items()
                }

    def _floats(self, array: Array, place: str) -> Array:
        wanted = self.dtype is not None and is_float(array.dtype)
        return in_dtype(array, TensorSpec(place, np.dtype(self.dtype), None)) if wanted else array

    def _batch_of(self, table: Table) -> tuple[Any, ...]:
        return tuple(self._part(part, table) for part in self._parts)

    def _part(self, part: Columns, table: Table) -> Any:
        if isinstance(part, str):
            return table[part]
        if isinstance(part, Mapping):
            return {name: self._part(columns, table) for name, columns in part.items()}
        beside = np.concatenate([table[name].reshape(_rows(table), -1) for name in part], axis=1)
        return self._floats(beside, "columns")  # integers beside floats are double


def _names(part: Columns) -> list[str]:
    """Every column that is asked for. SettingError where none is."""
    if isinstance(part, str):
        return [part]
    names = (
        [name for columns in part.values() for name in _names(columns)]
        if isinstance(part, Mapping)
        else list(part)
    )
    if not names:
        raise SettingError(
            "ParquetLoader needs the names of columns wherever there is something to feed, got"
            " none."
        )
    return names


def _rows(table: Table) -> int:
    return len(next(iter(table.values()), ()))


def _some(table: Table, index: Any) -> Table:
    return {name: column[index] for name, column in table.items()}


def _joined(tables: list[Table]) -> Table:
    """One after the other. DataError where lists have another length."""
    joined = {}
    for name in tables[0]:
        columns = [table[name] for table in tables]
        if len({column.shape[1:] for column in columns}) > 1:
            raise DataError(
                f"column {name!r} has rows of different shapes:"
                f" {', '.join(str(c.shape[1:]) for c in columns)}."
            )
        joined[name] = np.concatenate(columns)
    return joined


def _mixed(table: Table, epoch: int, seed: int | None, number: int) -> Table:
    return table if seed is None else _some(table, permutation(seed, epoch, _rows(table), number))
