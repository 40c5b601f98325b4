"""The protocol of a library for messages between processes."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import numpy.typing as npt

from onnxfit.errors import SettingError, listed_names
from onnxfit.registry import shortened

__all__ = ["Communicator"]

MEMBERS = ("rank", "size", "allreduce", "broadcast", "abort")


class Communicator(Protocol):
    """Processes (ranks) that exchange arrays and bytes; for `Trainer(distribute=)`.

    Any object with these members will do. Every rank calls the same methods in the same order.

    - `rank`: number of this process, from 0. Rank 0 writes files and decides.
    - `size`: number of processes.

    A communicator may have more members, which `MPI` and `Torch` have:

    - `timeout`: seconds that a rank waits for the others before the job ends; None for ever.
    - `average_every`: number of updates after which the ranks average their weights; None where
      they share the gradients of every update.
    - `is_closed`: whether messages are no longer possible.
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
        """Return the bytes that rank 0 passed; those of other ranks are not used.

        - `data`: the bytes.
        """
        ...

    def abort(self) -> None:
        """End all ranks at once, this one included; called after a failure."""


def require_communicator(given: Any) -> None:
    """Raise SettingError unless an object has the members of `Communicator`."""
    if inspect.isclass(given):
        raise SettingError(
            f"distribute is a communicator, got the class {given.__name__}: make an object of it,"
            f" such as {given.__name__}()."
        )
    if type(given).__module__.partition(".")[0] == "mpi4py":
        raise SettingError(
            f"distribute got {shortened(given)} of mpi4py: pass"
            " onnxfit.distributed.MPI(communicator)."
        )
    missing = [name for name in MEMBERS if not hasattr(given, name)]
    if missing:
        raise SettingError(
            f"distribute is 'auto', 'mpi', 'torch', None or a communicator, got {shortened(given)},"
            f" which lacks {listed_names(missing)}. onnxfit.distributed.Communicator lists what a"
            " communicator has."
        )
