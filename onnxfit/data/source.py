"""Sources: objects that give batches to the training loop, one class for each kind of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import isabstract
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from onnxfit.data.batch import Array, Batch
from onnxfit.data.content import Content
from onnxfit.data.fingerprint import fingerprint_of
from onnxfit.data.order import batch_indices, check_fixed, checked_batch_size, count_steps
from onnxfit.data.share import WHOLE, Share, checked_share, refusal, without_rows
from onnxfit.errors import DataError, SettingError
from onnxfit.registry import exported_members

if TYPE_CHECKING:
    from onnxfit.data.adapter import DataAdapter

__all__ = ["Source"]

S = TypeVar("S", bound="Source")
Sh = TypeVar("Sh", bound="ShardedSource")
R = TypeVar("R", bound="RowSource")
It = TypeVar("It", bound=Iterator[Any])


class Splittable(ABC):
    """Data that can split itself, for `fit(validation_split=...)`."""

    @abstractmethod
    def split(self, fraction: float) -> tuple[Any, Any]:
        """Return the training data and the validation data, which has a fraction of the rows."""


class Source(ABC):
    """Base class of data that gives the batches of one epoch at a time.

    `fit` uses every subclass that a module of `onnxfit.data` lists in its `__all__`, for the data
    that its `accepts` recognises.

    - `purpose`: "training", "validation", "evaluation", "prediction" or "calibration", for
      messages.
    - `rows`, `steps` (batches in an epoch) and `batch_size` are None if unknown.
    - `re_iterable` is False for data that can be iterated only once.
    - `priority`: sources of higher priority are asked first. A source for one type of object has
      priority 0; a source for any object with a protocol, such as iterables, has a lower priority.
    - `is_sharded`: whether the batches are the share of one rank, made by `shard`. In any case,
      `rows`, `steps` and `batch_size` count the rows of all ranks.
    - `takes_labels`: whether y and sample_weight may be passed as separate arguments. Otherwise the
      data gives batches that contain them.
    """

    priority: ClassVar[int] = 0
    takes_labels: ClassVar[bool] = False

    purpose: str
    rows: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    re_iterable: bool = True
    is_sharded: bool = False

    @classmethod
    def accepts(cls, data: Any) -> bool:
        """Return whether this class makes batches of `data`, without changing or iterating it."""
        return False

    @classmethod
    def from_data(cls, adapter: DataAdapter, data: Any, batching: Batching) -> Source:
        """Return a source for data that `accepts` recognised.

        - `adapter`: matches, checks and casts; its `batch` turns an item of a loader into a Batch.
        - `data`: the data; with `takes_labels`, a tuple of the data, the labels and the sample
          weights.
        - `batching`: rows of a batch, and the seed of the order of rows, or None to keep the order.
          Data that comes in batches may ignore `batching`.
        """
        raise NotImplementedError(f"{cls.__name__} accepts no data.")

    @abstractmethod
    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Return an iterator over the batches of one epoch.

        - `epoch`: the number of the data epoch, from 0, which determines the order of rows. It
          equals the epoch of `fit`, unless `steps_per_epoch` is set.
        - `skip`: the number of batches to leave out at the beginning.
        """

    def with_batch_size(self, batch_size: int, drop_last: bool = False) -> Source:
        """Return a source of the same data in batches of another size.

        - `batch_size`: rows of a batch, at least 1.
        - `drop_last`: leave out a shorter last batch, even if this source does not.

        SettingError: the data already comes in batches. DataError: an epoch would have no batch, or
        the model's batch dimension is fixed at another size.
        """
        raise SettingError(
            f"Cannot change the batch size: the {self.purpose} data already comes in batches. Pass"
            " arrays, a DataLoader or a loader of files."
        )

    def shard(self, rank: int, size: int) -> Source:
        """Return a source of the same data whose batches are the share of one rank.

        Rank r has the rows `numpy.array_split(rows of the batch, size)[r]` of every batch, and
        `whole_rows` is the number of rows of all ranks. If the batch is small, a share may have 0
        rows; every rank gets the same number of batches. The ranks do not communicate. If the data
        has its own method `shard`, each of its batches counts as one of `size` equal shares.

        - `rank`: the number of the rank, from 0.
        - `size`: the number of ranks; 1 returns this source.

        DataError: the data may give each rank other batches, as an iterator may. SettingError: the
        rank or size is impossible, or this source is already sharded.
        """
        share = checked_share(rank, size)
        if share.size == 1:
            return self
        if self.is_sharded:
            raise SettingError(
                f"The {self.purpose} data already belongs to one rank and cannot be divided again."
                " Call shard on the whole data instead."
            )
        return self._shard(share)

    def _shard(self, share: Share) -> Source:
        """Return the source of one of several ranks. DataError: the data cannot be divided.

        A source that gives every rank the same batches returns `ShardedSource(self, share)`.
        """
        raise self._refusal(share, f"of type {type(self).__name__}", "it has no shard method")

    def _refusal(self, share: Share, what: str, why: str) -> DataError:
        return refusal(
            what,
            self.purpose,
            share.size,
            why,
            "Add a method shard(rank, size) that returns the batches of that rank; or pass arrays,"
            " a list of batches, or a loader such as onnxfit.DataLoader",
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return JSON values that are equal on two ranks if both have the same data.

        The values are found fast: a checksum covers at most 64 KiB of an array, and data that is
        not in memory is not read; instead, the names of all files are included. A sharded source
        describes the data of all ranks.
        """
        return {
            "kind": type(self).__name__,
            "rows": self.rows,
            "steps": self.steps,
            "batch_size": self.batch_size,
        }

    def content(self) -> Content | None:
        """Return the hashes of all data, or None if this kind of data cannot be hashed.

        The data is read once. Data above 1 GB is not hashed. A sharded source describes the data of
        all ranks.
        """
        return None

    def require_re_iterable(self, epochs: int) -> None:
        """Raise DataError if data that can be iterated only once is needed for `epochs` > 1."""
        if epochs > 1 and not self.re_iterable:
            raise DataError(
                f"The {self.purpose} data is an iterator, which can be iterated only once, but is"
                f" needed for {epochs} epochs. Pass the function that returns the generator"
                " (fit(batches), not fit(batches())), a list of batches, or an onnxfit.DataLoader;"
                " or set steps_per_epoch."
            )

    def describe_batch(self, number: int) -> str:
        """Return a description of a batch for a message.

        - `number`: the number of the batch in its epoch, from 0.
        """
        return f"batch {number} of the {self.purpose} data"

    def describe_as(self, other: Source) -> None:
        """Copy another source's description of its data, for a source that draws from it.

        - `other`: the other source.
        """
        self.purpose = other.purpose
        self.rows = other.rows
        self.steps = other.steps
        self.batch_size = other.batch_size
        self.re_iterable = other.re_iterable

    def close(self) -> None:  # noqa: B027  most sources have no thread to end
        """End background threads."""

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ShardedSource(Source):
    """A source of one rank's share of the batches of another source.

    - `inner`: makes every batch with the rows of all ranks. For arrays, only the rows of this rank
      are copied, because a batch copies nothing before it is written.
    - `share`: the share of this rank.
    """

    is_sharded: bool = True

    def __init__(self, inner: Source, share: Share) -> None:
        self.describe_as(inner)
        self._inner = inner
        self._share = share

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        cut = self._share.cut
        signatures: dict[str, str] = {}
        with closing_generator(self._inner.batches(epoch, skip)) as batches:
            for batch in batches:
                yield cut(batch, signatures)

    def with_batch_size(self: Sh, batch_size: int, drop_last: bool = False) -> Sh:
        return type(self)(self._inner.with_batch_size(batch_size, drop_last), self._share)

    def fingerprint(self) -> dict[str, Any]:
        return self._inner.fingerprint()

    def content(self) -> Content | None:
        return self._inner.content()

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class Batching:
    """The division of rows into batches: their number in a batch, and their order.

    `seed` None keeps the order of the rows; otherwise each epoch has its own permutation, or draws
    rows with `chances`.
    """

    batch_size: int
    seed: int | None = None
    drop_last: bool = False
    chances: Array | None = field(default=None, compare=False)


class RowSource(Source):
    """Base class of data whose rows can be indexed, and so divided into batches of any size.

    - `loader`: the name of the class that messages recommend, with drop_last=True.

    If a subclass takes the rows of its batches from `indices`, each rank can read only its own
    rows: its `_shard` returns `self._shard_rows(share)`.
    """

    rows: int
    steps: int
    batch_size: int
    _share: Share = WHOLE

    def __init__(
        self, adapter: DataAdapter, rows: int, batching: Batching, loader: str = "DataLoader"
    ) -> None:
        self.adapter = adapter
        self.purpose = adapter.purpose
        self.rows = rows
        self._loader_name = loader
        self._set_batching(batching)

    def with_batch_size(self: R, batch_size: int, drop_last: bool = False) -> R:
        batching = self._batching
        other = copy(self)
        other._set_batching(
            replace(
                batching,
                batch_size=checked_batch_size(batch_size),
                drop_last=batching.drop_last or drop_last,
            )
        )
        return other

    def _set_batching(self, batching: Batching) -> None:
        """Set the batch size. DataError: it does not fit the model or the number of rows."""
        size = batching.batch_size
        check_fixed(
            self.adapter.fixed_input,
            self.rows,
            size,
            batching.drop_last,
            self.purpose,
            self._loader_name,
            self.adapter.ranks,
        )
        steps = count_steps(self.rows, size, batching.drop_last)
        if batching.drop_last and not steps:
            raise DataError(
                f"drop_last=True would drop all {self.purpose} data: {self.rows} rows do not fill"
                f" a batch of batch_size={size}. Pass a smaller batch_size, or drop_last=False."
            )
        self._batching = batching
        self.batch_size = size
        self.steps = steps

    def _shard(self, share: Share) -> Source:
        other = copy(self)
        other.adapter = self.adapter.shared_by(share.size)
        other._set_batching(self._batching)
        return ShardedSource(other, share)

    def _shard_rows(self, share: Share) -> Source:
        """Return the source of one rank, which reads only the rows of its share."""
        other = copy(self)
        other._share = share
        other.adapter = self.adapter.shared_by(share.size, converts_shares=True)
        other._set_batching(self._batching)
        return RowShareSource(other, share)

    def fingerprint(self) -> dict[str, Any]:
        found = super().fingerprint() | {"seed": self._batching.seed}
        if self._batching.chances is not None:
            found |= fingerprint_of([("chances", self._batching.chances)])
        return found

    def describe_batch(self, number: int) -> str:
        text = super().describe_batch(number)
        start, stop = self._share.bounds(next(self.whole_rows(number), self._full_rows))
        if self._share is WHOLE or start == stop:
            return text
        own = f"rows 0 to {stop - start - 1} of rank {self._share.rank}"
        return f"{text} (its rows {start} to {stop - 1} are {own})"

    def whole_rows(self, skip: int) -> Iterator[int]:
        """Return the number of rows of each batch of all ranks, without the first `skip`."""
        size = self._full_rows
        return (min(size, self.rows - number * size) for number in range(skip, self.steps))

    @property
    def _full_rows(self) -> int:
        """Number of rows of a full batch; the batch size may exceed the data."""
        return max(min(self.batch_size, self.rows), 1)

    def indices(self, epoch: int, skip: int) -> Iterator[slice | Array]:
        """Return the row numbers of each batch of an epoch, without the first `skip`.

        If the source reads only the rows of one rank, these are the row numbers of that rank.
        """
        seed, chances = self._batching.seed, self._batching.chances
        indices = batch_indices(self.rows, self._full_rows, self.steps, seed, epoch, skip, chances)
        return indices if self._share is WHOLE else map(self._share.select, indices)


class RowShareSource(ShardedSource):
    """A RowSource that reads the rows of one rank only."""

    _inner: RowSource

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        whole = self._inner.whole_rows(skip)
        with closing_generator(self._inner.batches(epoch, skip)) as batches:
            for batch, whole_rows in zip(batches, whole):
                start, stop = self._share.bounds(whole_rows)
                if batch.rows == stop - start:
                    batch.whole_rows = whole_rows
                    yield batch
                elif start == stop:  # the row that replaces an empty share
                    yield without_rows(batch, whole_rows)
                else:  # a subclass of a loader made the rows of all ranks
                    yield self._share.cut(batch, {})


@cache
def source_classes() -> tuple[type[Source], ...]:
    """Return the source classes that modules of `onnxfit.data` export, in order of priority."""
    classes: list[type[Source]] = [
        member
        for member in exported_members("onnxfit.data").values()
        if isinstance(member, type) and issubclass(member, Source) and not isabstract(member)
    ]
    return tuple(sorted(classes, key=lambda source: -source.priority))


def source_class(data: Any) -> type[Source] | None:
    """Return the first class that accepts `data`, or None."""
    return next((source for source in source_classes() if source.accepts(data)), None)


@contextmanager
def closing_generator(iterator: It) -> Iterator[It]:
    """Close the iterator at the end if it has a method `close`, as generators do.

    The caller's own iterator stays open, because sources wrap it in an islice.
    """
    try:
        yield iterator
    finally:
        close = getattr(iterator, "close", None)
        if callable(close):
            close()
