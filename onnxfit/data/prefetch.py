"""Batches prepared ahead of the training loop, by a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar, TypeVar

import numpy as np

from onnxfit.checks import check_arguments
from onnxfit.data.adapter import DataAdapter
from onnxfit.data.batch import Batch
from onnxfit.data.content import Content
from onnxfit.data.share import Share
from onnxfit.data.source import Batching, Source, closing_generator
from onnxfit.data.structure import holds_arrays
from onnxfit.errors import SettingError

__all__ = ["Prefetch", "PrefetchedSource"]

T = TypeVar("T")
# Seconds that closing waits for a thread. A source that takes longer for its batch may never end.
MAX_CLOSE_SECONDS = 1.0
# Seconds after which waiting for a batch begins again: on Windows, Ctrl-C does not end a wait.
WAIT_SECONDS = 0.1


class Prefetch:
    """Batches of any kind that a background thread prepares ahead.

    A source that is as slow as the training step then costs next to no time.

    - `data`: anything that `fit` takes as batches: a list, an iterable, batches that can be
      indexed, a torch DataLoader, or a function that returns an iterator.
    - `depth`: the maximum number of batches that are ready, 1 or more.

    The thread copies arrays, because some loaders write every batch into the same arrays; in `fit`
    it also checks and casts them. Its exceptions are raised by the request for the batch, with
    their traceback. The thread ends with the epoch, or with `close`. Closing waits at most a second
    for a batch in preparation; the next iteration begins when the thread has ended. A thread hides
    the time of waiting (disk, network) and of computations in numpy, Pillow or pyarrow; Python code
    still competes with the training loop for the interpreter.

    SettingError: the data is an array (use `DataLoader(X, y, prefetch=2)`), or `depth` is below 1.

    >>> [x for (x,) in Prefetch(lambda: ((n,) for n in range(3)))]
    [0, 1, 2]
    """

    @check_arguments
    def __init__(self, data: Any, depth: int = 2) -> None:
        if holds_arrays(data):
            raise SettingError(
                "Prefetch needs data that comes in batches, got arrays. Use DataLoader(X, y,"
                " prefetch=2) for arrays."
            )
        if depth < 1:
            raise SettingError(f"Prefetch needs depth >= 1, got {depth}.")
        self.data = data
        self.depth = depth
        self._running: list[PrefetchIterator[Any]] = []

    def __len__(self) -> int:
        """Return the number of batches in an epoch. TypeError: the data has no length."""
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        data = self.data
        if not hasattr(data, "__iter__") and callable(data):
            data = data()
        elif isinstance(data, Iterator):
            data = islice(data, None)  # the caller's iterator stays open
        return prefetched(copied_items(data), self.depth, self._running, self.data)

    def close(self) -> None:
        """End the background thread, if one runs."""
        close_all(self._running)


class PrefetchIterator(Iterator[T]):
    """An iterator that a background thread advances, up to `depth` items ahead.

    Exceptions of the thread are raised here, with their traceback.

    - `owner`: the data that is iterated. Two threads must not iterate it at once: if the thread of
      a closed iterator still waits for an item of the same owner, that thread ends first.
    """

    # Pairs (owner, thread) of closed iterators whose threads had not ended.
    _still_running: ClassVar[list[tuple[object, threading.Thread]]] = []

    def __init__(self, items: Iterable[T], depth: int, owner: object = None) -> None:
        self._ready: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._free = threading.Semaphore(depth)
        self._ended = False  # whether there are no more items
        self._closed = False
        self._owner = items if owner is None else owner
        self._still_running[:] = [entry for entry in self._still_running if entry[1].is_alive()]
        before = [thread for owner, thread in self._still_running if owner is self._owner]
        # Python does not wait for daemon threads at exit.
        self._thread = threading.Thread(
            target=self._work, args=(items, before), name="onnxfit prefetch", daemon=True
        )
        self._thread.start()

    def _work(self, items: Iterable[T], before: list[threading.Thread]) -> None:
        try:
            for thread in before:
                thread.join()
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
        while not self._ended:
            with suppress(queue.Empty):
                is_item, item = self._ready.get(timeout=WAIT_SECONDS)
                if not is_item:
                    self._ended = True
                    raise item
                self._free.release()
                return item  # type: ignore[no-any-return]
        raise StopIteration

    def close(self) -> None:
        """Drop the items that are ready, and end the thread.

        A thread that waits for an item of its source ends once it has that item.
        """
        if self._closed:
            return
        self._closed = self._ended = True
        self._free.release()
        if self._thread is not threading.current_thread():
            self._thread.join(MAX_CLOSE_SECONDS)
            if self._thread.is_alive():
                self._still_running.append((self._owner, self._thread))


class PrefetchedSource(Source):
    """A source that prepares the batches of another source in the background.

    - `inner`: the other source.
    - `depth`: the maximum number of batches that are ready.
    - `owner`: the caller's data that `inner` iterates; None for `inner` itself.
    """

    def __init__(self, inner: Source, depth: int, owner: object = None) -> None:
        self.describe_as(inner)
        self.is_sharded = inner.is_sharded
        self._inner = inner
        self._depth = depth
        self._owner = inner if owner is None else owner
        self._running: list[PrefetchIterator[Batch]] = []

    @classmethod
    def accepts(cls, data: Any) -> bool:
        return isinstance(data, Prefetch)

    @classmethod
    def from_data(cls, adapter: DataAdapter, data: Any, batching: Batching) -> Source:
        shuffle = batching.seed is not None
        source = adapter.source(data.data, batch_size=batching.batch_size, shuffle=shuffle)
        return cls(source, data.depth, data.data)

    def with_batch_size(self, batch_size: int, drop_last: bool = False) -> PrefetchedSource:
        inner = self._inner.with_batch_size(batch_size, drop_last)
        return PrefetchedSource(inner, self._depth, self._owner)

    def _shard(self, share: Share) -> PrefetchedSource:
        inner = self._inner.shard(share.rank, share.size)
        return PrefetchedSource(inner, self._depth, self._owner)

    def fingerprint(self) -> dict[str, Any]:
        return self._inner.fingerprint()

    def content(self) -> Content | None:
        return self._inner.content()

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        batches = _copied_batches(self._inner.batches(epoch, skip))
        return prefetched(batches, self._depth, self._running, self._owner)

    def close(self) -> None:
        close_all(self._running)
        self._inner.close()


def prefetched(
    items: Iterable[T], depth: int, running: list[PrefetchIterator[T]], owner: object
) -> Iterator[T]:
    """Yield items that a thread prepares ahead.

    While this runs, `running` lists its iterator. `owner` is the same as for `PrefetchIterator`.
    """
    iterator = PrefetchIterator(items, depth, owner)
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


def _copied_batches(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the same batches with arrays that share no memory with other code."""
    with closing_generator(batches):
        for batch in batches:
            columns = {name: array[batch.index] for name, array in batch.columns}
            scalars = dict(batch.scalars)
            if isinstance(batch.index, slice):  # indexing by an array of row numbers copies
                columns = {name: array.copy() for name, array in columns.items()}
                scalars = {name: array.copy() for name, array in scalars.items()}
            yield Batch(
                batch.rows,
                batch.signature,
                tuple(columns.items()),
                tuple(scalars.items()),
                slice(0, batch.rows),
                batch.whole_rows,
            )


def copied_items(items: Iterable[T]) -> Iterator[T]:
    """Yield the same items with copies of their arrays."""
    with closing_generator(iter(items)) as iterator:
        for item in iterator:
            yield _copied(item)


def _copied(item: Any) -> Any:
    """Return an item with copies of the NumPy arrays and torch tensors in its dicts and lists."""
    if isinstance(item, np.ndarray):
        return item.copy()
    if isinstance(item, Mapping):
        return {name: _copied(value) for name, value in item.items()}
    if isinstance(item, (list, tuple)):
        copies = map(_copied, item)
        return type(item)(*copies) if hasattr(item, "_fields") else type(item)(copies)
    is_tensor = hasattr(item, "__array__") and hasattr(item, "clone")
    return item.clone() if is_tensor else item
