"""Batches that come one by one, from iterables, by number or out of a data set's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from itertools import islice
from typing import Any

from onnxfit.data.batch import Batch, Source, ended
from onnxfit.data.convert import as_array
from onnxfit.data.feed import DataAdapter, MatchedData
from onnxfit.data.loader import Loader
from onnxfit.data.order import batch_indices, check_fixed, check_steps, count_steps, permutation
from onnxfit.data.structure import common_rows, length_of, rows_of
from onnxfit.errors import DataError


class StreamSource(Source):
    """Batches made elsewhere;

    `passes(epoch, skip)` begins a pass over them, and `make` fits each to the model.
    """

    def __init__(
        self,
        feed: DataAdapter,
        passes: Callable[[int, int], Iterator[Any]],
        *,
        steps: int | None = None,
        rows: int | None = None,
        batch_size: int | None = None,
        re_iterable: bool = True,
        make: Callable[[Any], Batch] | None = None,
        again: Callable[[int, bool | None], Source] | None = None,
    ) -> None:
        """`again`, for data that are cut here: the source for another batch size, with or without a
        short last batch.
        """
        self.what, self.steps, self.rows, self.batch_size, self.re_iterable = (
            feed.what,
            steps,
            rows,
            batch_size,
            re_iterable,
        )
        self._make = feed.batch if make is None else make
        self._passes = passes
        self._again = again

    def with_batch_size(self, batch_size: int, drop_last: bool | None = None) -> Source:
        return (
            super().with_batch_size(batch_size)
            if self._again is None
            else self._again(batch_size, drop_last)
        )

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        number = skip
        with ended(self._passes(epoch, skip)) as given:
            for item in given:
                try:
                    batch = self._make(item)
                except DataError as error:
                    raise DataError(f"In batch {number} of the {self.what} data: {error}") from None
                yield batch
                number += 1
        if not number:
            used = (
                "" if self.re_iterable else " An iterator can be passed over once: is it used up?"
            )
            raise DataError(f"The {self.what} data gave no batch.{used}")


def stream_source(
    data: Any, feed: DataAdapter, batch_size: int, shuffle: bool, seed: int
) -> Source:
    """The source for whatever gives batches."""
    what, kinds = feed.what, type(data).__mro__
    if hasattr(data, "with_format") and hasattr(data, "iter"):
        return _columns_stream(data.with_format("numpy"), feed, batch_size, shuffle, seed)
    if any(
        kind.__name__ == "Dataset" and kind.__module__.startswith("torch.utils.data")
        for kind in kinds
    ):
        raise DataError(
            f"The {what} data is a torch Dataset ({type(data).__name__}), which gives single"
            " samples: pass torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    length = length_of(data)
    size = getattr(data, "batch_size", None)
    if not isinstance(size, int):
        size = None
    if hasattr(data, "__getitem__") and length is not None and not isinstance(data, (str, bytes)):
        return StreamSource(
            feed, _indexed_passes(data, seed if shuffle else None), steps=length, batch_size=size
        )
    if hasattr(data, "__iter__") and not isinstance(data, (str, bytes)):
        if isinstance(data, Iterator):
            return StreamSource(
                feed,
                lambda epoch, skip: islice(data, skip, None),
                re_iterable=False,
                steps=length,
                batch_size=size,
            )
        return StreamSource(
            feed, _iterated_passes(data, lambda: data), steps=length, batch_size=size
        )
    if callable(data):
        return StreamSource(feed, lambda epoch, skip: _from(iter(data()), skip))
    raise DataError(
        f"The {what} data is {'None' if data is None else 'of type ' + type(data).__name__}:"
        " expected arrays, a dict or list of arrays, an onnxfit.DataLoader, an iterable of"
        " batches, or a function that returns an iterator of batches."
    )


def mapped_source(
    given: MatchedData,
    feed: DataAdapter,
    batch_size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
) -> Source:
    """Arrays of which some are on disk: each batch is read, cast and checked when it comes, and
    only a first row before.
    """
    given = given.map(
        lambda place, value: value if hasattr(value, "__array__") else as_array(value, place)
    )
    rows = common_rows(given.leaves(), feed.what)
    check_fixed(feed.fixed, rows, batch_size, drop_last, feed.what)
    check_steps(rows, batch_size, drop_last, feed.what)
    feed.convert(_some(given, slice(0, 1)))
    size, steps = min(batch_size, rows), count_steps(rows, batch_size, drop_last)

    def gather(epoch: int, skip: int) -> Iterator[Any]:
        indices = batch_indices(rows, size, steps, seed if shuffle else None, epoch, skip)
        return (_some(given, index) for index in indices)

    def again(batch_size: int, last: bool | None) -> Source:
        return mapped_source(
            given, feed, batch_size, shuffle, seed, drop_last if last is None else last
        )

    return StreamSource(
        feed,
        gather,
        steps=steps,
        rows=rows,
        batch_size=batch_size,
        make=feed.matched_batch,
        again=again,
    )


def _some(given: MatchedData, index: Any) -> MatchedData:
    return given.map(lambda place, value: rows_of(value, index))


def loader_source(loader: Loader, feed: DataAdapter, seed: int | None) -> Source:
    """A loader of files; seed None keeps the order of its rows."""
    check_fixed(
        feed.fixed,
        loader.rows,
        loader.batch_size,
        loader.drop_last,
        feed.what,
        type(loader).__name__,
    )

    def again(batch_size: int, drop_last: bool | None) -> Source:
        other = copy(loader)  # of the caller's own nothing changes
        other.batch_size, other.drop_last = (
            batch_size,
            (loader.drop_last if drop_last is None else drop_last),
        )
        return loader_source(other, feed, seed)

    return StreamSource(
        feed,
        lambda epoch, skip: loader.batches(epoch, skip, seed),
        steps=len(loader),
        rows=loader.rows,
        batch_size=loader.batch_size,
        again=again,
    )


def _columns_stream(
    data: Any, feed: DataAdapter, batch_size: int, shuffle: bool, seed: int, drop_last: bool = False
) -> Source:
    """A HF dataset: rows by their numbers, or, where it is a stream itself, in its own order."""
    rows = length_of(data)
    if rows is None:
        return StreamSource(
            feed,
            _iterated_passes(data, lambda: data.iter(batch_size=batch_size)),
            batch_size=batch_size,
        )
    size, steps = min(batch_size, max(rows, 1)), count_steps(rows, batch_size, drop_last)
    check_fixed(feed.fixed, rows, batch_size, drop_last, feed.what)

    def gather(epoch: int, skip: int) -> Iterator[Any]:
        for index in batch_indices(rows, size, steps, seed if shuffle else None, epoch, skip):
            yield data[index if isinstance(index, slice) else index.tolist()]

    def again(batch_size: int, last: bool | None) -> Source:
        return _columns_stream(
            data, feed, batch_size, shuffle, seed, drop_last if last is None else last
        )

    return StreamSource(feed, gather, steps=steps, rows=rows, batch_size=batch_size, again=again)


def _indexed_passes(data: Any, seed: int | None) -> Callable[[int, int], Iterator[Any]]:
    """Batches by number, in a new order every epoch; Keras's hook between epochs is called."""

    def passes(epoch: int, skip: int) -> Iterator[Any]:
        length = len(data)
        order = range(length) if seed is None else permutation(seed, epoch, length).tolist()
        for number in order[skip:]:
            yield data[number]
        if hasattr(data, "on_epoch_end"):
            data.on_epoch_end()

    return passes


def _iterated_passes(
    data: Any, begin: Callable[[], Iterable[Any]]
) -> Callable[[int, int], Iterator[Any]]:
    """Batches in the data's own order, which may depend on the epoch that it is told."""

    def passes(epoch: int, skip: int) -> Iterator[Any]:
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        return _from(iter(begin()), skip)

    return passes


def _from(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    """The iterator itself, `skip` batches on: a generator can then still be closed."""
    for _ in islice(batches, skip):
        pass
    return batches
