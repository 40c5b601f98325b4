"""The ranks that train together, and their exchanges."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from onnxfit.distributed.communicator import Communicator
from onnxfit.distributed.messages import decode, encode
from onnxfit.distributed.watchdog import watch
from onnxfit.errors import SettingError

__all__: list[str] = []

# A short message is sent with the name of its exchange, in int64 numbers. A longer message, or a
# message among many ranks, follows in a separate exchange.
MESSAGE_NUMBERS = 64
MAX_RANKS_WITH_SHORT_MESSAGES = 64


class World:
    """The ranks of a communicator; one rank alone without a communicator.

    All ranks must call `gather`, `broadcast` and `require_same` together. Each call has a name. If
    the ranks use different names, all raise a SettingError, which lists the name of each rank.
    `sum` skips that check, to be fast for the gradients of every step: no user code runs between it
    and the last call that checks. Only one thread at a time may call these methods.

    - `average_every`: number of updates after which the ranks average their weights; None if they
      share every gradient.
    - `timeout`: seconds that a rank waits for the others before the watchdog ends the job; None for
      no limit.
    - `waiting`: name of the exchange that this rank is in; None outside of exchanges.
    - `exchanges`: number of exchanges that this rank has begun.
    - `is_failing`: whether this rank is ending after an error, while the others may be anywhere.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self.communicator = communicator
        self.rank = 0 if communicator is None else communicator.rank
        self.size = 1 if communicator is None else communicator.size
        self.average_every: int | None = getattr(communicator, "average_every", None)
        self.timeout: float | None = getattr(communicator, "timeout", None)
        self.waiting: str | None = None
        self.exchanges = 0
        self._checked = 0  # number of exchanges up to the last one that compared names
        self._alone: tuple[str, str] | None = None  # why exchanges are forbidden now, and the fix
        self._turn = threading.RLock()  # held by the thread whose exchanges are running
        is_small = self.size <= MAX_RANKS_WITH_SHORT_MESSAGES
        self._message_numbers = MESSAGE_NUMBERS if is_small else 0
        self.is_failing = False
        if self.size > 1 and self.timeout is not None:
            watch(self)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and decides."""
        return self.rank == 0

    @property
    def shares_gradients(self) -> bool:
        """Whether there are several ranks, and they add up the gradients of every step."""
        return self.size > 1 and self.average_every is None

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks run on this machine, and exchange numbers as they are."""
        communicator = self.communicator
        is_compressed = getattr(communicator, "compression", None) is not None
        return (
            self.size > 1
            and getattr(communicator, "local_size", 1) == self.size
            and not is_compressed
        )

    @property
    def overlaps(self) -> bool:
        """Whether the ranks can sum gradients in a second thread, while they compute others.

        Ranks that share memory do not: their sums take no time of a network, and the second thread
        would need the processor that computes the gradients.
        """
        can_overlap: bool = getattr(self.communicator, "overlaps", False)
        return self.shares_gradients and can_overlap and not self.shares_memory

    def threads(self, chosen: int | None) -> int | None:
        """Return the number of threads of this rank: as chosen, or its share of the cores."""
        local_size = getattr(self.communicator, "local_size", 1)
        if chosen is not None or local_size == 1:
            return chosen
        cores = os.cpu_count() or 1
        # Open MPI binds each rank to its own cores.
        own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
        return own if own < cores else max(1, cores // local_size)

    def sum(self, name: str, *buffers: npt.NDArray[Any]) -> None:
        """Replace every element of the buffers by its sum over all ranks."""
        communicator = self.communicator
        if communicator is None:
            return
        if self._alone is not None or self.is_failing:
            self.refuse_alone(name)
        if not self._turn.acquire(False):
            self._refuse_thread(name)
        try:
            self._sum(communicator, name, buffers)
        finally:
            self._turn.release()

    def sum_for_turn(self, name: str, buffer: npt.NDArray[Any]) -> None:
        """Like `sum`, in a second thread, for the thread that waits for it inside `collective`."""
        if self.communicator is not None:
            self._sum(self.communicator, name, [buffer])

    def _sum(
        self, communicator: Communicator, name: str, buffers: Sequence[npt.NDArray[Any]]
    ) -> None:
        # This runs in every step: two attributes, without a clock, serve the watchdog.
        self.exchanges += 1
        self.waiting = name
        try:
            for buffer in buffers:
                if buffer.size:
                    communicator.allreduce(buffer)
        finally:
            self.waiting = None

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order: JSON values and arrays."""
        if self.communicator is None:
            return [value]
        own = encode(value)
        with self.collective(name):
            lengths, messages = self._meet(name, own)
            if max(lengths) > self._message_numbers * 8:
                messages = self._gather_long(name, own, lengths)
        return [decode(message) for message in messages]

    def _gather_long(self, name: str, own: bytes, lengths: list[int]) -> list[bytes]:
        assert self.communicator is not None
        ends = np.cumsum(lengths)
        joined = np.zeros(int(ends[-1]), np.uint8)
        begin = int(ends[self.rank]) - len(own)
        joined[begin : begin + len(own)] = np.frombuffer(own, np.uint8)
        with self._exchange(name):
            self.communicator.allreduce(joined)
        return [joined[end - length : end].tobytes() for end, length in zip(ends, lengths)]

    def broadcast(self, name: str, value: Any) -> Any:
        """Return the value of rank 0: JSON values and arrays."""
        if self.communicator is None:
            return value
        own = encode(value) if self.is_main else b""
        with self.collective(name):
            lengths, messages = self._meet(name, own)
            if lengths[0] <= self._message_numbers * 8:
                return decode(messages[0])
            with self._exchange(name):
                return decode(self.communicator.broadcast(own))

    def require_same(self, name: str, values: Mapping[str, Any], fix: str = "") -> None:
        """Raise SettingError on all ranks if a value of one differs from rank 0; it names both.

        A value that only one of two ranks has counts as different.

        - `values`: description -> a JSON value to compare.
        - `fix`: the end of the message, for an intended difference.
        """
        if self.communicator is None:
            return
        everyone = self.gather(name, dict(values))
        for rank, theirs in enumerate(everyone):
            for key in {**everyone[0], **theirs}:
                own, expected = theirs.get(key), everyone[0].get(key)
                if own != expected:
                    raise SettingError(
                        f"Rank {rank} has {key} {own!r}, but rank 0 has {expected!r}. All ranks"
                        f" must run the same program on the same data. {fix}".rstrip()
                    )

    def barrier(self, name: str) -> None:
        """Wait for all ranks. SettingError on all ranks if one does something else."""
        if self.communicator is not None:
            with self.collective(name):
                self._meet(name, b"")

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Allow exchanges only in this thread; other threads of this rank raise SettingError.

        Exchanges of the ranks are matched by their order, which two threads would mix up.

        - `name`: the call in this thread, for the message.
        """
        if self.size == 1:
            yield
            return
        if not self._turn.acquire(False):
            self._refuse_thread(name)
        try:
            yield
        finally:
            self._turn.release()

    def _refuse_thread(self, name: str) -> NoReturn:
        raise SettingError(
            f"{name} needs all {self.size} ranks, but another thread of rank {self.rank} is using"
            " them. Call it in that thread, such as in a callback, or after that thread has"
            " finished."
        )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Forbid exchanges while callbacks end after an error of this rank."""
        self.is_failing = True
        try:
            yield
        finally:
            self.is_failing = False

    @contextmanager
    def forbid_collectives(self, what: str) -> Iterator[None]:
        """Forbid exchanges inside this block, with an error instead of a hang.

        - `what`: the code that runs on this rank alone, for the message.
        """
        fix = "Call it in a callback that runs on all ranks (ranks = 'all')"
        with self._forbidding(f"{what} runs on rank {self.rank} alone", fix):
            yield

    @contextmanager
    def forbid_collectives_in_step(self, what: str) -> Iterator[None]:
        """Forbid exchanges inside this block, which runs in a step.

        The sums of a step have no names, so ranks could not detect a difference.

        - `what`: the user code that runs in the step, for the message.
        """
        fix = "Call it outside of a step, such as in on_train_batch_end"
        with self._forbidding(f"{what} runs inside a training step", fix):
            yield

    @contextmanager
    def _forbidding(self, why: str, fix: str) -> Iterator[None]:
        if self.communicator is None:  # there is nobody to wait for
            yield
            return
        outer, self._alone = self._alone, (why, fix)
        try:
            yield
        finally:
            self._alone = outer

    def final_barrier(self) -> None:
        """Wait until all ranks end. SettingError: a rank does something else.

        There is no timeout, because rank 0 may draw pictures for an hour. The timeout applies only
        if a sum was the last exchange, because the other ranks may wait in another sum.
        """
        if self.communicator is None:
            return
        if self.exchanges == self._checked:
            self.timeout = None
        self.barrier("the end of the program")

    def abort(self) -> None:
        """End all ranks at once."""
        if self.communicator is not None:
            self.communicator.abort()

    @contextmanager
    def _exchange(self, name: str) -> Iterator[None]:
        """Tell the watchdog that this rank waits, in an exchange whose name is checked."""
        self.exchanges += 1
        self.waiting = name
        try:
            yield
        finally:
            self.waiting = None
        self._checked = self.exchanges

    def _meet(self, name: str, message: bytes) -> tuple[list[int], list[bytes]]:
        """Wait for all ranks; return the lengths of their messages, and the short messages.

        SettingError: the names of the ranks differ.
        """
        assert self.communicator is not None
        self.refuse_alone(name)
        table = np.zeros((self.size, 2 + self._message_numbers), np.int64)
        table[self.rank, :2] = zlib.crc32(name.encode()), len(message)
        short = table[:, 2:].view(np.uint8)
        if len(message) <= short.shape[1]:
            short[self.rank, : len(message)] = np.frombuffer(message, np.uint8)
        with self._exchange(name):
            self.communicator.allreduce(table)
        if (table[:, 0] != table[0, 0]).any():
            self._raise_of_names(name)
        lengths = table[:, 1].tolist()
        return lengths, [row[:length].tobytes() for row, length in zip(short, lengths)]

    def _raise_of_names(self, name: str) -> None:
        assert self.communicator is not None
        width = 120
        names = np.zeros((self.size, width), np.uint8)
        own = name.encode()[:width]
        names[self.rank, : len(own)] = np.frombuffer(own, np.uint8)
        with self._exchange(name):
            self.communicator.allreduce(names)
        places = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in names]
        listed = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
        raise SettingError(
            f"The ranks are out of step: {listed}. Calls that need all ranks must be made on all of"
            " them, not under `if trainer.is_main:`."
        )

    def refuse_alone(self, name: str) -> None:
        """Raise SettingError if this rank acts alone; `name` is a call that needs all ranks."""
        if self.is_failing and self.size > 1:
            raise SettingError(
                f"{name} needs all ranks, but rank {self.rank} is ending after an error. Correct"
                " the error that this rank raised first."
            )
        if self._alone is not None:
            why, fix = self._alone
            raise SettingError(f"{why}, but {name} needs all ranks. {fix}.")


ALONE = World()
