"""The protocol of a library for messages between processes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

__all__ = ["Communicator"]


class Communicator(Protocol):
    """Processes (ranks) that exchange arrays and bytes; for `Trainer(distribute=)`.

    Any object with these members will do. Every rank calls the same methods in the same order.

    - `rank`: number of this process, from 0. Rank 0 writes files and decides.
    - `size`: number of processes.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allreduce(self, buffer: npt.NDArray[Any]) -> None:
        """Replace every element of `buffer` by its sum over all ranks.

        `buffer` lies in C order and has the same shape and type on every rank: float32, float64,
        int64 or uint8. The sums are the same on every rank, to the last bit.
        """

    def broadcast(self, data: bytes) -> bytes:
        """Return the bytes that rank 0 passed; those of other ranks are not used."""

    def abort(self) -> None:
        """End all ranks at once, this one included; called after a failure."""
