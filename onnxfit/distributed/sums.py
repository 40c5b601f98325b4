"""Sums of one array of each rank, made once and added up in every step."""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt

from onnxfit.distributed.world import World

__all__: list[str] = []

# Files in this folder lie in memory. Only Linux has it.
FOLDER = "/dev/shm"
# A message of fewer elements is as fast as the two meetings of a sum in shared memory.
MIN_ELEMENTS = 4096
# The arrays of several ranks fit into a processor's cache, part by part.
ELEMENTS_OF_PART = 2**16
ALIGNMENT = 4096


Floats = npt.NDArray[np.floating]


class RankSum(Protocol):
    """A flat array of each rank, and the sum of these arrays.

    - `own`: the array of this rank, to be written before `add_up`.
    - `total`: the sums, for reading only, until this rank writes `own` or calls `add_up` again.
    """

    own: Floats
    total: Floats

    def add_up(self, name: str) -> None:
        """Write the sums of all ranks' arrays to `total`; `name` is the name of the exchange."""


class MessageSum:
    """A `RankSum` by a message, in place: `total` is `own`."""

    def __init__(self, world: World, dtype: npt.DTypeLike, size: int) -> None:
        self._world = world
        self.own = self.total = np.zeros(size, dtype)

    def add_up(self, name: str) -> None:
        self._world.sum(name, self.own)


class SharedSum:
    """A `RankSum` in memory that the ranks of one machine share.

    Each rank adds up one part of all arrays. Nothing is copied: all ranks read the same `total`.
    """

    def __init__(
        self, world: World, memory: mmap.mmap, dtype: npt.DTypeLike, size: int, stride: int
    ) -> None:
        self._world = world
        arrays = [
            np.frombuffer(memory, dtype, size, offset=i * stride) for i in range(world.size + 1)
        ]
        self.own: Floats = arrays[world.rank]
        self.total: Floats = arrays.pop()
        begin, end = (size * rank // world.size for rank in (world.rank, world.rank + 1))
        starts = range(begin, end, ELEMENTS_OF_PART)
        parts = [slice(start, min(end, start + ELEMENTS_OF_PART)) for start in starts]
        self._parts = [(self.total[part], [array[part] for array in arrays]) for part in parts]
        self._meeting = np.zeros(1, np.int64)

    def add_up(self, name: str) -> None:
        # After this meeting all arrays are written, and no rank reads the previous sums any more.
        self._world.sum(name, self._meeting)
        with np.errstate(all="ignore"):  # a network that diverges shows it in its loss
            for total, (first, second, *others) in self._parts:
                np.add(first, second, out=total)
                for other in others:
                    np.add(total, other, out=total)
        # After this meeting all sums are written.
        self._world.sum(name, self._meeting)


def rank_sum(world: World, dtype: npt.DTypeLike, size: int, *, shared: bool = True) -> RankSum:
    """Return a sum of arrays of `size` elements, in shared memory where all ranks can have it.

    All ranks must call it together.

    - `shared`: False for messages in any case.
    """
    if shared and world.shares_memory and size >= MIN_ELEMENTS:
        stride = -(-size * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        memory = _memory_of(world, stride * (world.size + 1))
        if memory is not None:
            return SharedSum(world, memory, dtype, size, stride)
    return MessageSum(world, dtype, size)


def _memory_of(world: World, size: int) -> mmap.mmap | None:
    """Return the same memory on all ranks, or None if a rank cannot have it."""
    path = _create_file(size) if world.is_main else None
    try:
        path = world.broadcast("the file of the shared memory", path)
        memory = _map_file(path, size) if path else None
        have_memory = world.gather("the shared memory", memory is not None)
    finally:
        if world.is_main and path:
            os.unlink(path)  # the memory stays until the last rank ends, however it ends
    return memory if all(have_memory) else None


def _create_file(size: int) -> str | None:
    """Create a file of `size` bytes in memory; None if there is no room or no such folder."""
    path = None
    try:
        descriptor, path = tempfile.mkstemp(prefix="onnxfit-", dir=FOLDER)
        try:
            # Without this, a rank would be killed when it writes to memory that is not there.
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
    except OSError:
        if path is not None:
            os.unlink(path)
        return None
    return path


def _map_file(path: str, size: int) -> mmap.mmap | None:
    with suppress(OSError), open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), size)
    return None
