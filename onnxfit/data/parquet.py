"""Columns of Parquet and Arrow files, read one group of rows at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Union

import numpy as np
import numpy.typing as npt

from onnxfit.checks import check_arguments, shortened
from onnxfit.data.arrow import ColumnFile, column_files
from onnxfit.data.batch import Array
from onnxfit.data.convert import in_dtype, is_float
from onnxfit.data.fingerprint import checksum
from onnxfit.data.loader import Loader
from onnxfit.data.order import permutation
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec

__all__ = ["ParquetLoader"]

MAX_FILES = 64  # a fingerprint lists the rows of at most this many files
Path = Union[str, os.PathLike[str]]
Columns = Union[str, Sequence[str], Mapping[str, Union[str, Sequence[str]]]]
Table = dict[str, Array]  # column -> its values, all with the same number of rows


class ParquetLoader(Loader):
    """Columns of Parquet and Arrow files in batches. The files may be larger than memory.

    - `paths`: a file, several files, or a folder, read in the order of their names. Suffixes:
      .parquet and .pq; .arrow and .feather for Arrow's IPC file format. All files must have the
      requested columns.
    - `inputs`: the columns of x. A column's name gives its values, of shape `(batch,)`, or
      `(batch, k)` for a column of lists of length k. A list of names gives the columns side by
      side, of shape `(batch, columns)`. A model with several inputs takes a dict input name -> a
      name or a list of names.
    - `labels`: the columns of y, in the same form; None for batches without labels.
    - `sample_weight`: the name of the column with the weights of the rows, or None.
    - `dtype`: the type to which floats are cast, because most such files contain float64; None
      keeps the type of each column.
    - `batch_size`: rows of a batch, 1 or more. The last batch may be shorter, unless `drop_last`.
    - `shuffle`: read the groups of rows in a new order every epoch, and shuffle `buffer` rows at a
      time. Both orders depend on `(seed, epoch)` only, and every row comes once per epoch. Files
      that are sorted by class need small groups and a buffer of many groups.
    - `buffer`: number of rows that are read and kept in memory at a time, 1 or more.
    - `seed`: an integer; None uses the trainer's seed, or 0 without a trainer.
    - `drop_last`: leave out a last batch that is shorter.
    - `prefetch`: batches that a background thread reads ahead; 0 for no thread.

    DataError: the files have no rows, or lack a requested column. DataError, while batches are
    made: a column has nulls, text or lists of different lengths; the message names the file and the
    column. SettingError: a setting is impossible. InstallationError: pyarrow is missing.

        houses = onnxfit.ParquetLoader("houses.parquet", ["height", "width"], labels="price")
        trainer.fit(houses, epochs=5)
    """

    _reads_share: ClassVar[bool] = True

    @check_arguments
    def __init__(
        self,
        paths: Path | Sequence[Path],
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
            raise DataError("ParquetLoader got sample_weight without labels. Pass labels too.")
        if buffer < 1:
            raise SettingError(f"ParquetLoader needs buffer >= 1, got {buffer}.")
        self.buffer = buffer
        try:
            self.dtype = None if dtype is None else np.dtype(dtype)
        except (TypeError, ValueError):
            raise SettingError(
                f"ParquetLoader needs dtype to be a type such as np.float32, got"
                f" {shortened(dtype)}."
            ) from None
        if self.dtype is not None and not is_float(self.dtype):
            raise SettingError(
                "ParquetLoader casts floats to dtype, so dtype must be a float type, got"
                f" {self.dtype}."
            )
        # The columns of x, y and the weights, the elements of a batch.
        self._elements = [
            columns for columns in (inputs, labels, sample_weight) if columns is not None
        ]
        names = [name for columns in self._elements for name in _requested_columns(columns)]
        self.files: list[ColumnFile] = column_files(
            [paths] if isinstance(paths, (str, os.PathLike)) else paths, list(dict.fromkeys(names))
        )
        self._groups = [(file, group) for file in self.files for group in range(file.groups)]
        super().__init__(
            sum(file.rows for file in self.files), batch_size, shuffle, seed, drop_last, prefetch
        )

    def fingerprint(self) -> dict[str, Any]:
        # The groups decide the order of the rows.
        files = [f"{file.path.name} {file.rows} {file.groups}" for file in self.files]
        rows = [file.rows for file in self.files[:MAX_FILES]]
        return {"rows of files": rows, "files": checksum(*files)}

    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        size = self.batch_size
        number = 0
        remainder = Table()
        for block in self._blocks(epoch, seed):
            remainder = _concatenate([remainder, block]) if remainder else block
            full = _row_count(remainder) // size
            for start in range(0, full * size, size):
                if number >= skip:
                    yield self._make_batch(remainder, slice(start, start + size))
                number += 1
            remainder = _rows_at(remainder, slice(full * size, None))
        if skip <= number < len(self):
            yield self._make_batch(remainder, slice(0, _row_count(remainder)))

    def _blocks(self, epoch: int, seed: int | None) -> Iterator[Table]:
        """Yield tables of `buffer` rows; the last table may be shorter.

        With a seed, both the groups and the rows of a table come in a new order.
        """
        number = 0
        ready = Table()
        for table in self._tables(epoch, seed):
            ready = _concatenate([ready, table]) if ready else table
            while _row_count(ready) >= self.buffer:
                number += 1
                yield _shuffle(_rows_at(ready, slice(0, self.buffer)), epoch, seed, number)
                ready = _rows_at(ready, slice(self.buffer, None))
        if _row_count(ready):
            yield _shuffle(ready, epoch, seed, number + 1)

    def _tables(self, epoch: int, seed: int | None) -> Iterator[Table]:
        """Yield the groups, each in tables of at most `buffer` rows."""
        order = list(range(len(self._groups)))
        if seed is not None:
            order = permutation(seed, epoch, len(self._groups)).tolist()
        for position in order:
            file, group = self._groups[position]
            for table in file.read(group, self.buffer):
                yield {
                    name: self._floats(column, f"column {name!r} of {str(file.path)!r}")
                    for name, column in table.items()
                }

    def _floats(self, array: Array, name: str) -> Array:
        """Return the array with its floats cast to `dtype`."""
        if self.dtype is None or not is_float(array.dtype):
            return array
        return in_dtype(array, TensorSpec(name, self.dtype, None))

    def _make_batch(self, table: Table, rows: slice) -> tuple[Any, ...]:
        """Return the batch of some rows, or this rank's share of the batch."""
        table = _rows_at(table, self._share.select(rows))
        return tuple(self._element(columns, table) for columns in self._elements)

    def _element(self, columns: Columns, table: Table) -> Any:
        """Return x, y or the weights of a batch."""
        if isinstance(columns, str):
            return table[columns]
        if isinstance(columns, Mapping):
            return {name: self._element(column, table) for name, column in columns.items()}
        matrices = [table[name].reshape(_row_count(table), -1) for name in columns]
        # NumPy would concatenate integers and float32 to float64.
        return self._floats(np.concatenate(matrices, axis=1), "columns")


def _requested_columns(columns: Columns) -> list[str]:
    """Return every requested column. SettingError: no column is requested."""
    if isinstance(columns, str):
        return [columns]
    if isinstance(columns, Mapping):
        names = [name for column in columns.values() for name in _requested_columns(column)]
    else:
        names = list(columns)
    if not names:
        raise SettingError(
            "ParquetLoader got an empty list of columns. Pass at least one column for each input,"
            " and for the labels of each output."
        )
    return names


def _row_count(table: Table) -> int:
    return len(next(iter(table.values()), ()))


def _rows_at(table: Table, index: Any) -> Table:
    return {name: column[index] for name, column in table.items()}


def _concatenate(tables: list[Table]) -> Table:
    """Return the rows of all tables as one table. DataError: the lengths of lists differ."""
    result = {}
    for name in tables[0]:
        columns = [table[name] for table in tables]
        if len({column.shape[1:] for column in columns}) > 1:
            raise DataError(
                f"column {name!r} has rows of different shapes:"
                f" {', '.join(str(c.shape[1:]) for c in columns)}."
            )
        result[name] = np.concatenate(columns)
    return result


def _shuffle(table: Table, epoch: int, seed: int | None, number: int) -> Table:
    """Return the rows of block `number` of an epoch in a new order, if there is a seed."""
    if seed is None:
        return table
    return _rows_at(table, permutation(seed, epoch, _row_count(table), number))
