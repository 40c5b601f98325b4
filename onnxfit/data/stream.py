"""Sources of data that comes batch by batch: indexed batches, iterables and functions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from copy import copy
from itertools import islice
from typing import Any, ClassVar

from onnxfit.checks import shortened
from onnxfit.data.adapter import DataAdapter
from onnxfit.data.batch import Batch
from onnxfit.data.content import Content, given_content
from onnxfit.data.order import permutation
from onnxfit.data.share import Share, data_of_rank
from onnxfit.data.source import Batching, ShardedSource, Source, closing_generator
from onnxfit.data.structure import holds_arrays, length_of
from onnxfit.errors import DataError

__all__ = ["FunctionSource", "IndexedSource", "IterableSource"]


class StreamSource(Source):
    """Data whose batches are checked and cast one by one, when the loop asks for them."""

    adapter: DataAdapter

    @abstractmethod
    def items(self, epoch: int, skip: int) -> Iterator[Any]:
        """Return the items of an epoch, one per batch, without the first `skip`."""

    def convert(self, item: Any) -> Batch:
        """Return an item as a Batch. DataError: it does not fit the model."""
        return self.adapter.batch(item)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        number = skip
        with closing_generator(self.items(epoch, skip)) as items:
            for item in items:
                try:
                    batch = self.convert(item)
                except DataError as error:
                    raise DataError(f"In {self.describe_batch(number)}: {error}") from None
                yield batch
                number += 1
        if not number:
            hint = ""
            if not self.re_iterable:
                hint = " It is an iterator, which can be iterated only once. Was it used before?"
            raise DataError(f"The {self.purpose} data is empty: it gave no batches.{hint}")


class RankSource(Source):
    """A source of the batches that the data's own method `shard` made for one rank.

    Only the data knows how many rows the other ranks have. All shares are taken as equal: a batch
    of n rows counts as one of `size` equal shares of n * size rows.

    - `inner`: the batches of this rank.
    - `whole`: the source of the data that was sharded.
    - `size`: the number of ranks.
    """

    is_sharded: bool = True

    def __init__(self, inner: Source, whole: Source, size: int) -> None:
        self.describe_as(whole)
        self.steps = inner.steps
        self.re_iterable = inner.re_iterable
        self._inner = inner
        self._whole = whole
        self._size = size

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        with closing_generator(self._inner.batches(epoch, skip)) as batches:
            for batch in batches:
                batch.whole_rows = batch.rows * self._size
                yield batch

    def fingerprint(self) -> dict[str, Any]:
        return self._whole.fingerprint() | {"steps": self.steps}

    def close(self) -> None:
        self._inner.close()


def source_of_rank(whole: Source, data: Any, adapter: DataAdapter, share: Share) -> Source | None:
    """Return the source of the batches that `data.shard(rank, size)` returns.

    The result is None for data without a method `shard`. DataError: the method returns no batches.

    - `whole`: the source of `data`.
    """
    if not callable(getattr(data, "shard", None)):
        return None
    batches = data_of_rank(data, share, whole.purpose)
    if isinstance(batches, (str, bytes)) or holds_arrays(batches):
        raise DataError(
            f"{type(data).__name__}.shard of the {whole.purpose} data returned an object of type"
            f" {type(batches).__name__}. Expected the batches of one rank: a list or iterable of"
            " batches, or a loader."
        )
    shuffle = getattr(whole, "seed", None) is not None
    inner = adapter.shared_by(1).source(batches, batch_size=1, shuffle=shuffle)
    return RankSource(inner, whole, share.size)


class ProtocolSource(StreamSource):
    """Objects of any type that give batches by one of Python's protocols."""

    def __init__(self, adapter: DataAdapter, data: Any, seed: int | None) -> None:
        self.adapter = adapter
        self.purpose = adapter.purpose
        self.data = data
        self.seed = seed
        self.steps = length_of(data)
        batch_size = getattr(data, "batch_size", None)
        self.batch_size = batch_size if isinstance(batch_size, int) else None

    @classmethod
    def from_data(cls, adapter: DataAdapter, data: Any, batching: Batching) -> Source:
        for kind in type(data).__mro__:
            if kind.__name__ == "Dataset" and kind.__module__.startswith("torch.utils.data"):
                raise DataError(
                    f"The {adapter.purpose} data is a torch Dataset ({type(data).__name__}), which"
                    " returns single samples instead of batches. Pass"
                    " torch.utils.data.DataLoader(dataset, batch_size=...)."
                )
        return cls(adapter, data, batching.seed)

    def _shard(self, share: Share) -> Source:
        source = source_of_rank(self, self.data, self.adapter, share)
        return self._shard_whole(share) if source is None else source

    def _shard_whole(self, share: Share) -> Source:
        """Return the source of one rank for data without a method `shard`."""
        raise self._refusal(share, self._kind(), "each rank may get different rows")

    def _kind(self) -> str:
        """Return a description of the data for messages."""
        return f"an iterable of type {type(self.data).__name__}"

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {"kind": type(self.data).__name__, "seed": self.seed}

    def content(self) -> Content | None:
        return given_content(self.data)


class IndexedSource(ProtocolSource):
    """Batches that can be indexed, `data[0]` to `data[len(data) - 1]`, as in Keras's PyDataset.

    Shuffling gives the batches a new order every epoch. Keras's hook `on_epoch_end` is called.
    """

    priority: ClassVar[int] = -30

    @classmethod
    def accepts(cls, data: Any) -> bool:
        if isinstance(data, (str, bytes)):
            return False
        return hasattr(data, "__getitem__") and length_of(data) is not None

    def items(self, epoch: int, skip: int) -> Iterator[Any]:
        data = self.data
        length = len(data)
        order = list(range(length))
        if self.seed is not None:
            order = permutation(self.seed, epoch, length).tolist()
        for number in order[skip:]:
            yield data[number]
        if hasattr(data, "on_epoch_end"):
            data.on_epoch_end()

    def _shard_whole(self, share: Share) -> Source:
        other = copy(self)
        other.adapter = self.adapter.shared_by(share.size)
        return ShardedSource(other, share)


class IterableSource(ProtocolSource):
    """Iterables of batches in their own order, which may depend on the epoch (`set_epoch`).

    An iterator can be iterated only once, and stays open after an epoch that ends early.
    """

    priority: ClassVar[int] = -40

    def __init__(self, adapter: DataAdapter, data: Any, seed: int | None) -> None:
        super().__init__(adapter, data, seed)
        self.re_iterable = not isinstance(data, Iterator)

    @classmethod
    def accepts(cls, data: Any) -> bool:
        return hasattr(data, "__iter__") and not isinstance(data, (str, bytes))

    def items(self, epoch: int, skip: int) -> Iterator[Any]:
        if not self.re_iterable:
            return islice(self.data, skip, None)
        return iterate_epoch(self.data, self.data, epoch, skip)

    def _kind(self) -> str:
        return super()._kind() if self.re_iterable else "an iterator"


class FunctionSource(ProtocolSource):
    """Functions that return an iterator of batches, and are called for each epoch."""

    priority: ClassVar[int] = -50

    @classmethod
    def accepts(cls, data: Any) -> bool:
        return callable(data)

    def items(self, epoch: int, skip: int) -> Iterator[Any]:
        batches = self.data()
        if not isinstance(batches, Iterable):
            raise DataError(
                f"The {self.purpose} data is a function that returned {shortened(batches)}."
                " Expected an iterator of batches. Use yield, or return a list."
            )
        return _skip(iter(batches), skip)

    def _kind(self) -> str:
        return "a function that returns batches"


def iterate_epoch(data: Any, iterable: Any, epoch: int, skip: int) -> Iterator[Any]:
    """Call `data.set_epoch` if it exists, then iterate without the first `skip` items."""
    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)
    return _skip(iter(iterable), skip)


def _skip(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    """Advance an iterator by `skip` and return the same iterator, so that it can be closed."""
    for _ in islice(batches, skip):
        pass
    return batches
