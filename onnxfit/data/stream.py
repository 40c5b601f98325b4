"""Batches that come one by one, from iterables, by number or out of a data set's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from onnxfit.data.batch import Batch, Source
from onnxfit.data.feed import Feed
from onnxfit.data.order import batch_indices, check_fixed, count_steps, permutation
from onnxfit.data.structure import length_of
from onnxfit.errors import DataError


class StreamSource(Source):
    """Batches made elsewhere; `passes(epoch, skip)` begins a pass over them."""

    def __init__(
        self,
        feed: Feed,
        passes: Callable[[int, int], Iterator[Any]],
        *,
        steps: int | None = None,
        rows: int | None = None,
        batch_size: int | None = None,
        re_iterable: bool = True,
    ) -> None:
        self.what, self.steps, self.rows, self.batch_size, self.re_iterable = feed.what, steps, rows, batch_size, re_iterable
        self._feed = feed
        self._passes = passes

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        given = self._passes(epoch, skip)
        number = skip
        try:
            for item in given:
                try:
                    batch = self._feed.batch(item)
                except DataError as error:
                    raise DataError(f"In batch {number} of the {self.what} data: {error}") from None
                yield batch
                number += 1
        finally:
            end = getattr(given, "close", None)
            if callable(end):  # a generator; one of the caller's own comes as an islice, which leaves it open
                end()
        if not number:
            used = "" if self.re_iterable else " An iterator can be passed over once: is it used up?"
            raise DataError(f"The {self.what} data gave no batch.{used}")


def stream_source(data: Any, feed: Feed, batch_size: int, shuffle: bool, seed: int) -> Source:
    """The source for whatever gives batches."""
    what, kinds = feed.what, type(data).__mro__
    if hasattr(data, "with_format") and hasattr(data, "iter"):
        return _columns_stream(data.with_format("numpy"), feed, batch_size, shuffle, seed)
    if any(kind.__name__ == "Dataset" and kind.__module__.startswith("torch.utils.data") for kind in kinds):
        raise DataError(
            f"The {what} data is a torch Dataset ({type(data).__name__}), which gives single samples: "
            "pass torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    length = length_of(data)
    size = getattr(data, "batch_size", None)
    if not isinstance(size, int):
        size = None
    if hasattr(data, "__getitem__") and length is not None and not isinstance(data, (str, bytes)):
        return StreamSource(feed, _indexed_passes(data, seed if shuffle else None), steps=length, batch_size=size)
    if hasattr(data, "__iter__") and not isinstance(data, (str, bytes)):
        if isinstance(data, Iterator):
            return StreamSource(
                feed, lambda epoch, skip: islice(data, skip, None), re_iterable=False, steps=length, batch_size=size
            )
        return StreamSource(feed, _iterated_passes(data, lambda: data), steps=length, batch_size=size)
    if callable(data):
        return StreamSource(feed, lambda epoch, skip: _from(iter(data()), skip))
    raise DataError(
        f"The {what} data is {'None' if data is None else 'of type ' + type(data).__name__}: expected arrays, a dict or list of "
        "arrays, an onnxfit.DataLoader, an iterable of batches, or a function that returns an iterator of batches."
    )


def _columns_stream(data: Any, feed: Feed, batch_size: int, shuffle: bool, seed: int) -> Source:
    """A HF dataset: rows by their numbers, or, where it is a stream itself, in its own order."""
    rows = length_of(data)
    if rows is None:
        return StreamSource(feed, _iterated_passes(data, lambda: data.iter(batch_size=batch_size)), batch_size=batch_size)
    size, steps = min(batch_size, max(rows, 1)), count_steps(rows, batch_size, False)
    check_fixed(feed.fixed, rows, batch_size, False, feed.what)

    def gather(epoch: int, skip: int) -> Iterator[Any]:
        for index in batch_indices(rows, size, steps, seed if shuffle else None, epoch, skip):
            yield data[index if isinstance(index, slice) else index.tolist()]

    return StreamSource(feed, gather, steps=steps, rows=rows, batch_size=batch_size)


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


def _iterated_passes(data: Any, begin: Callable[[], Iterable[Any]]) -> Callable[[int, int], Iterator[Any]]:
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
