"""Shares of batches: the rows of every batch that one of several ranks (processes) keeps."""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any

from onnxfit.checks import shortened
from onnxfit.data.batch import Array, Batch, signature_of
from onnxfit.errors import DataError, SettingError

ALONE = "or let each process train a model of its own: Trainer(..., distribute=None)"


@dataclass(frozen=True, slots=True)
class Share:
    """The part of every batch that one rank keeps: `numpy.array_split(rows, size)[rank]`.

    The parts are contiguous. If the rows do not divide evenly, the first ranks have one row more.

    - `rank`: the number of the rank, from 0.
    - `size`: the number of ranks.
    """

    rank: int = 0
    size: int = 1

    def bounds(self, rows: int) -> tuple[int, int]:
        """Return the first row of the part of a batch of `rows` rows, and the row after its last.

        >>> [Share(rank, 3).bounds(7) for rank in range(3)]
        [(0, 3), (3, 5), (5, 7)]
        """
        each, longer = divmod(rows, self.size)
        start = self.rank * each + min(self.rank, longer)
        return start, start + each + (self.rank < longer)

    def select(self, index: slice | Array) -> slice | Array:
        """Return the row numbers of the part, given the row numbers `index` of a batch.

        If the part is empty, the first row of the batch is returned instead, because sources make
        batches of one row or more. `ShardedSource` removes that row.
        """
        if isinstance(index, slice):
            start, stop = self.bounds(index.stop - index.start)
            if start == stop:
                start, stop = 0, 1
            return slice(index.start + start, index.start + stop)
        return self.select_rows(index)

    def select_rows(self, rows: Array) -> Array:
        """Return the same as `select`, for an array of row numbers."""
        start, stop = self.bounds(len(rows))
        return rows[start:stop] if stop > start else rows[:1]

    def cut(self, batch: Batch, signatures: dict[str, str]) -> Batch:
        """Return this rank's part of a batch that has the rows of all ranks. Nothing is copied.

        - `batch`: the batch of all ranks.
        - `signatures`: a cache, signature of a batch -> signature of its part. It is extended.
        """
        rows = batch.rows
        start, stop = self.bounds(rows)
        signature = signatures.get(batch.signature)
        if signature is None:
            signature = signature_of(batch.columns, batch.scalars, stop - start)
            signatures[batch.signature] = signature
        index = batch.index
        if isinstance(index, slice):
            index = slice(index.start + start, index.start + stop)
        else:
            index = index[start:stop]
        return Batch(stop - start, signature, batch.columns, batch.scalars, index, rows)


WHOLE = Share()


def without_rows(batch: Batch, whole_rows: int) -> Batch:
    """Return a batch with 0 rows and the same columns, as a share of `whole_rows` rows."""
    signature = signature_of(batch.columns, batch.scalars, 0)
    return Batch(0, signature, batch.columns, batch.scalars, slice(0, 0), whole_rows)


def checked_share(rank: Any, size: Any) -> Share:
    """Return the share of a rank. SettingError unless both are integers and 0 <= rank < size."""
    try:
        share = Share(operator.index(rank), operator.index(size))
    except TypeError:
        share = Share(-1)
    if not 0 <= share.rank < share.size:
        raise SettingError(
            "shard(rank, size) needs whole numbers with 0 <= rank < size, got"
            f" {shortened(rank)} and {shortened(size)}."
        )
    return share


def data_of_rank(data: Any, share: Share, purpose: str) -> Any:
    """Return `data.shard(rank, size)`, which gives the batches of one rank.

    DataError: the method `shard` takes other arguments, as in some other libraries.
    """
    try:
        inspect.signature(data.shard).bind(rank=share.rank, size=share.size)
    except TypeError:
        raise DataError(
            f"{type(data).__name__}.shard of the {purpose} data must take the arguments rank and"
            f" size, got the signature {inspect.signature(data.shard)}. Wrap the data in an object"
            " whose shard(rank, size) returns the batches of that rank."
        ) from None
    except ValueError:  # a callable without a signature
        pass
    return data.shard(rank=share.rank, size=share.size)


def refusal(what: str, purpose: str, size: int, why: str, fix: str) -> DataError:
    """Return the error for data that cannot be divided among ranks: the reason and a fix."""
    return DataError(
        f"The {purpose} data is {what}, which cannot be divided among {size} ranks: {why}.\n"
        f"{fix}; {ALONE}."
    )
