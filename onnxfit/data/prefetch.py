"""Batches gathered ahead, by a thread in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from onnxfit.data.batch import Batch, Source

T = TypeVar("T")


class Prefetch(Iterator[T]):
    """An iterator that a background thread keeps `depth` items ahead; its exceptions are raised here, with their traceback."""

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._ready: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._over = False
        self._thread = threading.Thread(target=self._work, args=(items,), name="onnxfit prefetch", daemon=True)
        self._thread.start()

    def _work(self, items: Iterable[T]) -> None:
        try:
            iterator = iter(items)
            while True:
                self._room.acquire()
                if self._over:
                    return
                self._ready.put((True, next(iterator)))
        except BaseException as error:  # StopIteration too: it ends the loop that reads
            self._ready.put((False, error))

    def __next__(self) -> T:
        if self._over:
            raise StopIteration
        fine, item = self._ready.get()
        if not fine:
            self._over = True
            raise item
        self._room.release()
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread; what it gathered is dropped."""
        self._over = True
        self._room.release()
        if self._thread is not threading.current_thread():
            self._thread.join()


class PrefetchedSource(Source):
    """Another source, gathered in the background."""

    def __init__(self, inner: Source, depth: int) -> None:
        self.what, self.rows, self.steps, self.batch_size = inner.what, inner.rows, inner.steps, inner.batch_size
        self.re_iterable = inner.re_iterable
        self._inner = inner
        self._depth = depth
        self._running: list[Prefetch[Batch]] = []

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        return prefetched(map(_gathered, self._inner.batches(epoch, skip)), self._depth, self._running)

    def close(self) -> None:
        close_all(self._running)
        self._inner.close()


def prefetched(items: Iterable[T], depth: int, running: list[Prefetch[T]]) -> Iterator[T]:
    """The items, gathered by a thread that is listed in `running` while it lives."""
    ahead = Prefetch(items, depth)
    running.append(ahead)
    try:
        yield from ahead
    finally:
        ahead.close()
        running.remove(ahead)


def close_all(running: Iterable[Prefetch[Any]]) -> None:
    for ahead in running:
        ahead.close()


def _gathered(batch: Batch) -> Batch:
    """The same batch with its rows copied out."""
    columns = {name: np.ascontiguousarray(array[batch.index]) for name, array in batch.columns}
    return Batch(batch.rows, batch.signature, tuple(columns.items()), batch.scalars, slice(0, batch.rows))
