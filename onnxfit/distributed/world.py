"""The ranks that train together, and what they do at the same time."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from onnxfit.distributed.communicator import Communicator
from onnxfit.distributed.messages import decode, encode
from onnxfit.distributed.watchdog import watch
from onnxfit.errors import SettingError

__all__: list[str] = []

# A short message travels with the name of its exchange, in int64 numbers; one that is longer, or
# one among many ranks, follows in an exchange of its own.
MESSAGE_NUMBERS = 64
MAX_RANKS_WITH_SHORT_MESSAGES = 64


class World:
    """The ranks of a communicator; one rank alone without a communicator.

    `gather`, `from_main` and `require_same` are for every rank at once. Each call has a name, and
    ranks that meet under different names raise a SettingError on all of them, which says who is
    where. `sum` saves that check, for the gradients of every step: no code of the user runs between
    it and the last call that checks. One thread at a time may call any of them.

    - `average_every`: number of updates after which the ranks average their weights; None where
      they share every gradient.
    - `timeout`: seconds that a rank waits for the others before the watchdog ends the job; None for
      ever.
    - `waiting`: name of the exchange that this rank is in; None outside of exchanges.
    - `exchanges`: number of exchanges that this rank has begun.
    - `is_failing`: whether this rank ends after an error, while the others may be anywhere.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self.communicator = communicator
        self.rank = 0 if communicator is None else communicator.rank
        self.size = 1 if communicator is None else communicator.size
        self.average_every: int | None = getattr(communicator, "average_every", None)
        self.timeout: float | None = getattr(communicator, "timeout", None)
        self.waiting: str | None = None
        self.exchanges = 0
        self._checked = 0  # exchanges until the last one that compared names
        self._alone: tuple[str, str] | None = None  # why the ranks may not meet now, and the fix
        self._turn = threading.RLock()  # of the thread whose exchanges are under way
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

    def threads(self, chosen: int | None) -> int | None:
        """Return the threads of this rank: those chosen, or its part of this machine's cores."""
        local_size = getattr(self.communicator, "local_size", 1)
        if chosen is not None or local_size == 1:
            return chosen
        cores = os.cpu_count() or 1
        # Open MPI binds each rank to cores of its own.
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
        # This runs in every step: two attributes, without a clock, serve the watchdog.
        self.exchanges += 1
        self.waiting = name
        try:
            for buffer in buffers:
                if buffer.size:
                    communicator.allreduce(buffer)
        finally:
            self.waiting = None
            self._turn.release()

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return what each rank passed, in their order: JSON values and arrays."""
        if self.communicator is None:
            return [value]
        own = encode(value)
        with self.turn(name):
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

    def from_main(self, name: str, value: Any) -> Any:
        """Return what rank 0 passed: JSON values and arrays."""
        if self.communicator is None:
            return value
        own = encode(value) if self.is_main else b""
        with self.turn(name):
            lengths, messages = self._meet(name, own)
            if lengths[0] <= self._message_numbers * 8:
                return decode(messages[0])
            with self._exchange(name):
                return decode(self.communicator.broadcast(own))

    def require_same(self, name: str, values: Mapping[str, Any], fix: str = "") -> None:
        """Raise SettingError on all ranks where one has another value than rank 0; it names both.

        A value that one of the two lacks counts as different.

        - `values`: what is compared -> a JSON value.
        - `fix`: the end of the message, for those who meant the difference.
        """
        if self.communicator is None:
            return
        everyone = self.gather(name, dict(values))
        for rank, theirs in enumerate(everyone):
            for key in {**everyone[0], **theirs}:
                own, expected = theirs.get(key), everyone[0].get(key)
                if own != expected:
                    raise SettingError(
                        f"Rank {rank} has {key} {own!r}, rank 0 has {expected!r}: all"
                        f" ranks run the same program on the same data. {fix}".rstrip()
                    )

    def meet(self, name: str) -> None:
        """Wait for all ranks. SettingError on all of them where one does something else."""
        if self.communicator is not None:
            with self.turn(name):
                self._meet(name, b"")

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Keep other threads of this rank from exchanges meanwhile; SettingError in a second one.

        The ranks find each other by the order of their exchanges, which two threads would mix.

        - `name`: what this thread does, for the message.
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
            f"{name} needs all {self.size} ranks, and another thread of rank {self.rank} works with"
            " them at the moment: call it in that thread, such as in a callback, or after it."
        )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Refuse exchanges while callbacks end after an error of this rank."""
        self.is_failing = True
        try:
            yield
        finally:
            self.is_failing = False

    @contextmanager
    def only_here(self, what: str) -> Iterator[None]:
        """Refuse, with an error in the place of a hang, whatever needs the other ranks meanwhile.

        - `what`: what this rank does alone, for the message.
        """
        fix = "call it in a callback that runs on all of them (ranks = 'all')"
        with self._refusing(f"{what} runs on rank {self.rank} alone", fix):
            yield

    @contextmanager
    def in_step(self, what: str) -> Iterator[None]:
        """Refuse whatever needs the other ranks within a step.

        The sums of a step have no names, by which ranks could notice that they differ.

        - `what`: the code of the user that runs in the step, for the message.
        """
        fix = "call it in another hook, such as on_train_batch_end"
        with self._refusing(f"{what} runs within a step", fix):
            yield

    @contextmanager
    def _refusing(self, why: str, fix: str) -> Iterator[None]:
        if self.communicator is None:  # there is nobody to wait for
            yield
            return
        outer, self._alone = self._alone, (why, fix)
        try:
            yield
        finally:
            self._alone = outer

    def meet_at_end(self) -> None:
        """Wait until all ranks end; SettingError where one does something else.

        Rank 0 may draw pictures for an hour, so that nobody loses patience. Only where a sum was
        the last exchange the timeout stays: the other ranks may wait in another sum.
        """
        if self.communicator is None:
            return
        if self.exchanges == self._checked:
            self.timeout = None
        self.meet("the end of the program")

    def abort(self) -> None:
        """End all ranks at once."""
        if self.communicator is not None:
            self.communicator.abort()

    @contextmanager
    def _exchange(self, name: str) -> Iterator[None]:
        """Let the watchdog know that this rank waits, in an exchange whose name is checked."""
        self.exchanges += 1
        self.waiting = name
        try:
            yield
        finally:
            self.waiting = None
        self._checked = self.exchanges

    def _meet(self, name: str, message: bytes) -> tuple[list[int], list[bytes]]:
        """Wait for all ranks; return the lengths of their messages, and those that are short.

        SettingError where the names of the ranks differ.
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
            f"The ranks do not do the same: {listed}. What needs all ranks is called on all of"
            " them, not below `if trainer.is_main:`."
        )

    def refuse_alone(self, name: str) -> None:
        """Raise SettingError for what needs all ranks, where this one acts alone."""
        if self.is_failing and self.size > 1:
            raise SettingError(
                f"{name} needs all ranks, and rank {self.rank} ends after an error: call it before"
                " the error, or in the next run."
            )
        if self._alone is not None:
            why, fix = self._alone
            raise SettingError(f"{why}, and {name} needs all ranks: {fix}.")


ALONE = World()
