"""Batches prepared ahead of the training loop, by a thread in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from onnxfit.data.adapter import DataAdapter
from onnxfit.data.batch import Batch
from onnxfit.data.source import Batching, Source, closing_generator
from onnxfit.data.structure import holds_arrays
from onnxfit.errors import SettingError
from onnxfit.registry import check_arguments

__all__ = ["Prefetch", "PrefetchedSource"]

T = TypeVar("T")


class Prefetch:
    """Batches of any kind, of which a background thread keeps some ready.

    A source as slow as the training step then costs next to nothing.

    - `data`: anything that `fit` takes as batches: a list, an iterable, batches with numbers, a
      torch DataLoader, a function that returns an iterator.
    - `depth`: how many batches are ready at most, 1 or more.

    In `fit` the thread also checks, casts and copies. The thread ends with the epoch, and with
    `close`. Its exceptions are raised where the batch is asked for, with their traceback. A thread
    hides waiting (disk, network) and what numpy, Pillow or pyarrow compute; Python code still
    competes with the training loop for the interpreter.

    SettingError: arrays, which `DataLoader(X, y, prefetch=2)` cuts into batches; a depth below 1.

    >>> [x for (x,) in Prefetch(lambda: ((n,) for n in range(3)))]
    [0, 1, 2]
    """

    @check_arguments
    def __init__(self, data: Any, depth: int = 2) -> None:
        if holds_arrays(data):
            raise SettingError(
                "Prefetch is for data that gives batches: DataLoader(X, y, prefetch=2) prefetches"
                " arrays."
            )
        if depth < 1:
            raise SettingError(f"Prefetch needs depth >= 1, got {depth}.")
        self.data = data
        self.depth = depth
        self._running: list[PrefetchIterator[Any]] = []

    def __len__(self) -> int:
        """Return the number of batches in an epoch. TypeError where the data has no length."""
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        data = self.data
        if not hasattr(data, "__iter__") and callable(data):
            data = data()
        elif isinstance(data, Iterator):
            data = islice(data, None)  # an iterator of the caller's own stays open
        return prefetched(data, self.depth, self._running)

    def close(self) -> None:
        """End the background thread, if one runs."""
        close_all(self._running)


class PrefetchIterator(Iterator[T]):
    """An iterator that a background thread advances, up to `depth` items ahead.

    Exceptions of the thread are raised here, with their traceback.
    """

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._ready: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._free = threading.Semaphore(depth)
        self._ended = False
        self._thread = threading.Thread(
            target=self._work, args=(items,), name="onnxfit prefetch", daemon=True
        )
        self._thread.start()

    def _work(self, items: Iterable[T]) -> None:
        try:
            with closing_generator(iter(items)) as iterator:
                self._free.acquire()
                while not self._ended:
                    try:
                        item = next(iterator)
                    except StopIteration:
                        break
                    self._ready.put((True, item))
                    self._free.acquire()
        except BaseException as error:
            self._ready.put((False, error))
        else:
            self._ready.put((False, StopIteration()))

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        is_item, item = self._ready.get()
        if not is_item:
            self._ended = True
            raise item
        self._free.release()
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread, and drop the items that are ready."""
        self._ended = True
        self._free.release()
        if self._thread is not threading.current_thread():
            self._thread.join()


class PrefetchedSource(Source):
    """Another source, whose batches are prepared in the background."""

    def __init__(self, inner: Source, depth: int) -> None:
        self.purpose = inner.purpose
        self.rows = inner.rows
        self.steps = inner.steps
        self.batch_size = inner.batch_size
        self.re_iterable = inner.re_iterable
        self._inner = inner
        self._depth = depth
        self._running: list[PrefetchIterator[Batch]] = []

    @classmethod
    def accepts(cls, data: Any) -> bool:
        return isinstance(data, Prefetch)

    @classmethod
    def from_data(cls, adapter: DataAdapter, data: Any, batching: Batching) -> Source:
        shuffle = batching.seed is not None
        source = adapter.source(data.data, batch_size=batching.batch_size, shuffle=shuffle)
        return cls(source, data.depth)

    def with_batch_size(self, batch_size: int, drop_last: bool = False) -> PrefetchedSource:
        return PrefetchedSource(self._inner.with_batch_size(batch_size, drop_last), self._depth)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        return prefetched(_copied(self._inner.batches(epoch, skip)), self._depth, self._running)

    def close(self) -> None:
        close_all(self._running)
        self._inner.close()


def prefetched(items: Iterable[T], depth: int, running: list[PrefetchIterator[T]]) -> Iterator[T]:
    """Yield the items, which a thread prepares; `running` lists its iterator meanwhile."""
    iterator = PrefetchIterator(items, depth)
    running.append(iterator)
    try:
        yield from iterator
    finally:
        iterator.close()
        running.remove(iterator)


def close_all(running: Iterable[PrefetchIterator[Any]]) -> None:
    """Close every iterator."""
    for iterator in running:
        iterator.close()


def _copied(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the same batches with their rows copied out of the arrays."""
    with closing_generator(batches):
        for batch in batches:
            columns = {
                name: np.ascontiguousarray(array[batch.index]) for name, array in batch.columns
            }
            yield Batch(
                batch.rows,
                batch.signature,
                tuple(columns.items()),
                batch.scalars,
                slice(0, batch.rows),
            )
