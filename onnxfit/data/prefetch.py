"""Batches gathered ahead, by a thread in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from onnxfit.data.batch import Batch, Source, ended
from onnxfit.data.structure import holds_arrays
from onnxfit.errors import SettingError

T = TypeVar("T")


class Prefetch:
    """Whatever gives batches, with a background thread that has `depth` of them ready: a source as
    slow as the step then costs next to nothing.

    `data` is what `fit` takes as batches: a list, an iterable, batches by number, a torch
    DataLoader, a function that returns an iterator. In `fit` the thread also checks, casts and
    copies. The thread ends with the pass, and with `close`; what goes wrong in it is raised where
    the batch is asked for, with the traceback of where it happened. A thread hides waiting (disk,
    network) and what numpy, Pillow or pyarrow compute; Python code still takes turns with the loop.

    SettingError: arrays, which `DataLoader(X, y, prefetch=2)` cuts into batches; a depth below 1.

    >>> [x for (x,) in Prefetch(lambda: ((n,) for n in range(3)))]
    [0, 1, 2]
    """

    def __init__(self, data: Any, depth: int = 2) -> None:
        if holds_arrays(data):
            raise SettingError(
                "Prefetch is for what gives batches: DataLoader(X, y, prefetch=2) prefetches"
                " arrays."
            )
        if depth < 1:
            raise SettingError(f"Prefetch needs depth >= 1, got {depth}.")
        self.data, self.depth = data, depth
        self._running: list[Ahead[Any]] = []

    def __len__(self) -> int:
        """Batches in a pass, where the data knows."""
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        data = (
            self.data if hasattr(self.data, "__iter__") or not callable(self.data) else self.data()
        )
        return prefetched(
            islice(data, None) if data is self.data and isinstance(data, Iterator) else data,
            self.depth,
            self._running,
        )

    def close(self) -> None:
        """End the background thread, if one runs."""
        close_all(self._running)


class Ahead(Iterator[T]):
    """An iterator that a background thread keeps `depth` items ahead; its exceptions are raised
    here, with their traceback.
    """

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._ready: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._over = False
        self._thread = threading.Thread(
            target=self._work, args=(items,), name="onnxfit prefetch", daemon=True
        )
        self._thread.start()

    def _work(self, items: Iterable[T]) -> None:
        try:
            with ended(iter(items)) as iterator:
                self._room.acquire()
                while not self._over:
                    try:
                        item = next(iterator)
                    except StopIteration:
                        break
                    self._ready.put((True, item))
                    self._room.acquire()
        except BaseException as error:
            self._ready.put((False, error))
        else:
            self._ready.put((False, StopIteration()))

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
        self.what, self.rows, self.steps, self.batch_size = (
            inner.what,
            inner.rows,
            inner.steps,
            inner.batch_size,
        )
        self.re_iterable = inner.re_iterable
        self._inner = inner
        self._depth = depth
        self._running: list[Ahead[Batch]] = []

    def with_batch_size(self, batch_size: int, drop_last: bool | None = None) -> PrefetchedSource:
        return PrefetchedSource(self._inner.with_batch_size(batch_size, drop_last), self._depth)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        return prefetched(_gathered(self._inner.batches(epoch, skip)), self._depth, self._running)

    def close(self) -> None:
        close_all(self._running)
        self._inner.close()


def prefetched(items: Iterable[T], depth: int, running: list[Ahead[T]]) -> Iterator[T]:
    """The items, gathered by a thread that is listed in `running` while it lives."""
    ahead = Ahead(items, depth)
    running.append(ahead)
    try:
        yield from ahead
    finally:
        ahead.close()
        running.remove(ahead)


def close_all(running: Iterable[Ahead[Any]]) -> None:
    for ahead in running:
        ahead.close()


def _gathered(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches with their rows copied out."""
    with ended(batches):
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
