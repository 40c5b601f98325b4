"""The protocol of objects that exchange messages between processes."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import numpy.typing as npt

from onnxfit.checks import shortened
from onnxfit.errors import SettingError, listed_names

__all__ = ["Communicator"]

TIMEOUT = 600.0  # seconds
MEMBERS = ("rank", "size", "allreduce", "broadcast", "abort")


class Communicator(Protocol):
    """Processes (ranks) that exchange arrays and bytes; for `Trainer(distribute=)`.

    Any object with these members can be used. Every rank calls the same methods in the same order.

    - `rank`: number of this process, from 0. Rank 0 writes files and decides.
    - `size`: number of processes.

    A communicator may have more members, which `MPI` and `Torch` have:

    - `timeout`: seconds that a rank waits for the others before the job ends; None for no limit.
    - `average_every`: number of updates after which the ranks average their weights; None if they
      share the gradients of every update.
    - `local_size`: number of ranks on this machine. If it equals `size`, the ranks on Linux add up
      their gradients in memory that they share, instead of by `allreduce`.
    - `overlaps`: whether another thread than the main thread may call `allreduce`, and waits there
      without using a processor. If so, the ranks of several machines sum gradients while they
      compute others. Calls never overlap each other.
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
        """Return the bytes that rank 0 passed; the bytes of other ranks are ignored.

        - `data`: the bytes.
        """
        ...

    def abort(self) -> None:
        """End all ranks at once, this one included; called after a failure."""


def require_communicator(given: Any) -> None:
    """Raise SettingError unless an object has the members of `Communicator`."""
    if inspect.isclass(given):
        raise SettingError(
            f"distribute must be a communicator, got the class {given.__name__}. Create an object:"
            f" {given.__name__}()."
        )
    if type(given).__module__.partition(".")[0] == "mpi4py":
        raise SettingError(
            f"distribute must be a communicator, got {shortened(given)} of mpi4py. Pass"
            " onnxfit.distributed.MPI(communicator)."
        )
    missing = [name for name in MEMBERS if not hasattr(given, name)]
    if missing:
        raise SettingError(
            "distribute must be 'auto', 'mpi', 'torch', None or a communicator, got"
            f" {shortened(given)}, which lacks {listed_names(missing)}. See"
            " onnxfit.distributed.Communicator for the members of a communicator."
        )


def require_settings(owner: object, timeout: float | None, average_every: int | None) -> None:
    """Raise SettingError unless a communicator's settings are in their ranges.

    - `owner`: the communicator, named in the message.
    - `timeout`: seconds, above 0, or None.
    - `average_every`: a whole number from 1, or None.
    """
    name = type(owner).__name__
    if timeout is not None and not timeout > 0:
        raise SettingError(
            f"{name} needs timeout > 0 seconds, or None for no limit, got {timeout}."
        )
    if average_every is not None and (average_every < 1 or average_every != int(average_every)):
        raise SettingError(
            f"{name} needs average_every to be a whole number >= 1, or None to share every"
            f" gradient, got {average_every}."
        )
