"""Batches: rows of the data under the names of a graph's inputs."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]
Columns = tuple[tuple[str, Array], ...]

__all__ = ["Batch", "Target"]


class Target(Protocol):
    """The graph input that takes the labels of an output, and the preparation of the labels."""

    @property
    def input(self) -> str:
        """Name of the graph input that takes the labels."""

    def prepare(self, y: Array) -> Array:
        """Return the labels `y`, one row per sample, in the shape and type that the loss expects.

        DataError: the labels do not fit.
        """


@dataclass(slots=True, eq=False)
class Batch:
    """Some rows of the data. Nothing is copied before `write` or `arrays`.

    - `rows`: the number of rows.
    - `signature`: a string that is equal for two batches of the same names, types and shapes. It
      is a string because a string caches its hash.
    - `columns`: pairs (graph input, array) of the arrays that have rows. `index` selects the rows
      of this batch.
    - `scalars`: pairs (graph input, array) of inputs without rows, which are the same for every
      row. Most are single numbers.
    - `index`: a slice, or an array of row numbers.
    - `whole_rows`: if this batch is the share of one rank, the number of rows of the batch of all
      ranks; a share may have 0 rows. None if this is the whole batch.
    """

    rows: int
    signature: str
    columns: Columns
    scalars: Columns
    index: slice | Array
    whole_rows: int | None = None

    @property
    def rows_of_all(self) -> int:
        """The number of rows of the batch of all ranks."""
        return self.rows if self.whole_rows is None else self.whole_rows

    def arrays(self) -> dict[str, Array]:
        """Return a dict graph input -> array, with exactly this batch's rows."""
        return {name: array[self.index] for name, array in self.columns} | dict(self.scalars)

    def only(self, names: Container[str]) -> Batch:
        """Return a batch of the same rows with fewer arrays.

        - `names`: the graph inputs whose arrays the batch has.
        """
        columns = tuple(column for column in self.columns if column[0] in names)
        scalars = tuple(scalar for scalar in self.scalars if scalar[0] in names)
        signature = signature_of(columns, scalars, self.rows)
        return replace(self, signature=signature, columns=columns, scalars=scalars)

    def write(self, buffers: Mapping[str, Array]) -> None:
        """Copy this batch's rows into `buffers`, a dict graph input -> array to write.

        Each buffer has the shape and type of the array written to it. Arrays without a buffer of
        their name are not written, and other buffers do not change.
        """
        index = self.index
        if isinstance(index, slice):
            for name, array in self.columns:
                if name in buffers:
                    buffers[name][...] = array[index]
        else:
            for name, array in self.columns:
                if name in buffers:
                    # "clip" lets numpy write without an internal buffer; no index is out of range
                    array.take(index, 0, buffers[name], "clip")
        for name, array in self.scalars:
            if name in buffers:
                buffers[name][...] = array


def signature_of(columns: Columns, scalars: Columns, rows: int) -> str:
    """Return the names, types and shapes of a batch of `rows` rows, as one string."""
    shapes = (f"{name}:{a.dtype.str}{(rows, *a.shape[1:])}" for name, a in columns)
    return ";".join((*shapes, *(f"{name}:{a.dtype.str}{a.shape}" for name, a in scalars)))
