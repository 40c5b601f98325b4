"""Ranks as threads of one process, which start at once: for tests of what ranks do together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

SECONDS = 60  # for which a rank waits for the others


class Shared:
    """What the ranks of one test share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size


class ThreadCommunicator:
    """A communicator whose ranks are threads."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank = rank
        self.size = self.local_size = shared.size
        self._shared = shared
        self.calls = 0

    def _exchange(self, value: Any) -> list[Any]:
        shared = self._shared
        self.calls += 1
        shared.slots[self.rank] = value
        shared.barrier.wait(SECONDS)
        values = list(shared.slots)
        shared.barrier.wait(SECONDS)
        return values

    def allreduce(self, buffer: np.ndarray) -> None:
        arrays = self._exchange(buffer.copy())
        if len({(a.shape, a.dtype.str) for a in arrays}) > 1:
            raise AssertionError(
                f"ranks reduce different buffers: {[(a.shape, a.dtype) for a in arrays]}"
            )
        total = arrays[0].copy()
        for array in arrays[1:]:
            total += array
        buffer[...] = total

    def broadcast(self, data: bytes) -> bytes:
        return self._exchange(data)[0]

    def abort(self) -> None:
        self._shared.barrier.abort()


def on_ranks(
    size: int, function: Callable[[ThreadCommunicator], Any], shared: Shared | None = None
) -> list[Any]:
    """Call the function on each of `size` ranks; return the results, or raise the first error.

    - `shared`: that of an earlier call without an error, whose trainers are used again.
    """
    shared = shared or Shared(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(rank, shared))
        except BaseException as error:
            errors[rank] = error
            shared.barrier.abort()

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [error for error in errors if error is not None]
    if failed:
        raise next(
            (e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0]
        )
    return results
