"""Ranks that exchange messages by MPI, also in float16, for messages of half the size."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from onnxfit.checks import check_arguments, shortened
from onnxfit.distributed.communicator import TIMEOUT, require_settings
from onnxfit.errors import InstallationError, SettingError, UnknownNameError

__all__ = ["MPI"]

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]

COMPRESSIONS = ("float16",)
# Implementations count elements, and some count bytes, in 32 bits.
MAX_ELEMENTS_OF_MESSAGE = 2**27
# A larger sum between machines sleeps while it waits, because the computation beside it needs the
# processor.
MAX_BYTES_OF_BUSY_SUM = 2**19
PAUSE = 2e-4  # seconds
# Open MPI sends up to 64 KiB by TCP, with a header, before the receiver has answered.
BYTES_OF_PIECE = 60 * 2**10
# A test looks at each of its requests, and a test of a few of them advances all. For 154 MB over
# 1 Gb/s, tests of all needed the processor for 0.38 s, and these for 0.23 s, of 1.3 s.
REQUESTS_OF_TEST = 256
# Below this, two messages of half the bytes take longer than one.
MIN_ELEMENTS_COMPRESSED = 4096


class Float16Converter(Protocol):
    """Converter of arrays in C order. It rounds to nearest, and ties to even."""

    def narrow(self, numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
        """Return the numbers as float16; numbers outside its range become infinite."""
        ...

    def widen(self, numbers: npt.NDArray[np.float16], out: npt.NDArray[np.float32]) -> None:
        """Write the numbers to `out`, which has the same number of elements."""
        ...


class NumpyConverter:
    """Converter that uses NumPy, in software: about 6 ns per number to float16, and 2 ns back."""

    def narrow(self, numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
        with np.errstate(over="ignore"):  # numbers outside the range of float16 become infinite
            return numbers.astype(np.float16)

    def widen(self, numbers: npt.NDArray[np.float16], out: npt.NDArray[np.float32]) -> None:
        out[...] = numbers


class MPI:
    """Processes that `mpiexec` started, by mpi4py: `Trainer(distribute=MPI(...))`.

    `Trainer(distribute="auto")` and `"mpi"` use one with the default settings. Every rank must
    create this object at the same time.

    - `communicator`: an mpi4py communicator, of which a duplicate is used; None for all processes
      (`COMM_WORLD`).
    - `timeout`: seconds > 0 that a rank waits for the others before it ends the job; None for no
      limit.
    - `average_every`: number of updates >= 1 after which the ranks average their weights (local
      SGD); None shares the gradients of every update.
    - `compression`: "float16" halves the bytes of sums of 4,096 float32 elements and more; None
      sends them unchanged. Each rank's numbers and each sum are rounded to 11 significant bits. The
      sums are computed in float32 and are the same on every rank. Numbers below 6e-8 become 0.
      Numbers and sums beyond 65,504 become infinite, which then shows in the loss. A Trainer
      converts with onnxruntime. Compression pays off on networks below about 10 Gbit/s with
      onnxruntime 1.32 and below 3 Gbit/s with 1.19, but not within a machine.
    - `converter`: converts the numbers of compressed sums; a Trainer sets a faster converter.
    - `local_size`: number of ranks on this machine.
    - `overlaps`: whether the ranks of several machines sum gradients while they compute others: not
      with compression, nor with an MPI library that was initialized for one thread.

    InstallationError: mpi4py or an MPI library is missing. SettingError: a setting is impossible.

    A script that `mpiexec -n 4 python train.py` starts, with a slow network between machines:

        from onnxfit.distributed import MPI
        trainer = onnxfit.Trainer("model.onnx", distribute=MPI(compression="float16"))
    """

    @check_arguments
    def __init__(
        self,
        communicator: Any = None,
        *,
        timeout: float | None = TIMEOUT,
        average_every: int | None = None,
        compression: str | None = None,
    ) -> None:
        require_settings(self, timeout, average_every)
        if compression is not None and compression not in COMPRESSIONS:
            raise UnknownNameError("compression", compression, COMPRESSIONS)
        self.timeout = timeout
        self.average_every = average_every
        self.compression = compression
        self.converter: Float16Converter = NumpyConverter()
        self._library = mpi = _library()
        if communicator is None:
            communicator = mpi.COMM_WORLD
        elif not isinstance(communicator, mpi.Intracomm) or communicator == mpi.COMM_NULL:
            raise SettingError(
                "MPI needs communicator to be an mpi4py communicator that includes this process,"
                f" or None, got {shortened(communicator)}."
            )
        # Messages of a duplicate cannot mix with messages of the user's program.
        self._communicator = communicator.Dup()
        self.rank: int = self._communicator.Get_rank()
        self.size: int = self._communicator.Get_size()
        self._group_by_machine(self._communicator.Split_type(mpi.COMM_TYPE_SHARED))
        self.overlaps = compression is None and mpi.Query_thread() >= mpi.THREAD_SERIALIZED

    def _group_by_machine(self, inside: Any) -> None:
        """Set the communicator of the ranks of this machine, and, on the first of them, that of the
        first ranks of all machines.
        """
        self._inside = inside
        self.local_size: int = inside.size
        color = self._library.UNDEFINED if inside.rank else 0
        between = self._communicator.Split(color)
        self._between = None if between == self._library.COMM_NULL else between

    @property
    def is_closed(self) -> bool:
        """Whether the program has finalized MPI, so that no messages are possible."""
        return bool(self._library.Is_finalized())

    def allreduce(self, buffer: Array) -> None:
        """Replace every element of `buffer` by its sum over all ranks.

        - `buffer`: an array in C order, of the same shape and type on every rank.

        SettingError, on a rank that receives a message of another size: the ranks are out of step.
        """
        try:
            self._add_up(buffer)
        except self._library.Exception as error:
            if error.Get_error_class() not in (
                self._library.ERR_TRUNCATE,
                self._library.ERR_IN_STATUS,  # of one of several messages
            ):
                raise
            raise SettingError(
                f"The ranks are out of step: rank {self.rank} sums {buffer.nbytes} bytes, but"
                " another rank sums more. The data's shard method must give every rank the same"
                " number of batches, and calls that need all ranks must be made on all of them."
            ) from error

    def _add_up(self, buffer: Array) -> None:
        is_compressed = self.compression is not None and buffer.dtype == np.float32
        if is_compressed and buffer.size >= MIN_ELEMENTS_COMPRESSED:
            for part in _parts(buffer):
                self._add_float16(part)
        elif buffer.nbytes <= MAX_BYTES_OF_BUSY_SUM or self.local_size == self.size:
            for part in _parts(buffer):
                self._communicator.Allreduce(self._library.IN_PLACE, part)
        else:
            for part in _parts(buffer):
                self._add_by_machine(part)

    def _add_by_machine(self, buffer: Array) -> None:
        """Sum a flat buffer inside each machine, then between the machines, without using the
        processor while it waits for other ranks.
        """
        inside = self._inside
        if inside.size > 1:
            self._wait(inside.Ibarrier())
            is_first = inside.rank == 0
            inside.Reduce(self._library.IN_PLACE if is_first else buffer, buffer)
        if self._between is not None:
            self._add_in_shares(self._between, buffer)
        if inside.size > 1:
            self._wait(inside.Ibarrier())
            inside.Bcast(buffer)

    def _add_in_shares(self, ranks: Any, buffer: Array) -> None:
        """Sum a flat buffer: each rank adds up one share of it, and sends the sums to the others.

        Every rank sends and receives 2 (n - 1) / n of the buffer. Open MPI's sums that can wait
        without the processor send the whole buffer instead, up a tree and down again.

        - `ranks`: their communicator.
        """
        counts, starts = _shares(buffer.size, ranks.size)
        shares = [buffer[start:][:count] for start, count in zip(starts, counts)]
        own = shares[ranks.rank]
        received = np.empty((ranks.size, own.size), buffer.dtype)
        received[ranks.rank] = own
        self._exchange(ranks, shares, list(received))
        with np.errstate(all="ignore"):  # a network that diverges shows it in its loss
            np.add.reduce(received, axis=0, dtype=own.dtype, out=own)
        self._exchange(ranks, [own] * ranks.size, shares)

    def _exchange(self, ranks: Any, sent: Sequence[Array], received: Sequence[Array]) -> None:
        """Send an array to each other rank, and receive one from it, without using the processor.

        The ranks send small pieces, which need no answer before their data. An answer would wait
        behind the data on their way in the other direction.
        """
        others = [(ranks.rank + i) % ranks.size for i in range(1, ranks.size)]
        requests = [
            post(piece, rank)
            for post, arrays in ((ranks.Irecv, received), (ranks.Isend, sent))
            for rank in others
            for piece in _parts(arrays[rank], BYTES_OF_PIECE // arrays[rank].itemsize)
        ]
        self._wait(*requests)

    def _wait(self, *requests: Any) -> None:
        """Wait for messages without using the processor."""
        for start in range(0, len(requests), REQUESTS_OF_TEST):
            while not self._library.Request.Testall(requests[start : start + REQUESTS_OF_TEST]):
                time.sleep(PAUSE)

    def broadcast(self, data: bytes) -> bytes:
        """Return the bytes that rank 0 passed.

        - `data`: the bytes; the bytes of other ranks are ignored.
        """
        length = np.array([len(data)], np.int64)
        self._communicator.Bcast(length, root=0)
        message = np.empty(int(length[0]), np.uint8)
        if self.rank == 0:
            message[...] = np.frombuffer(data, np.uint8)
        for part in _parts(message):
            self._communicator.Bcast(part, root=0)
        return message.tobytes()

    def abort(self) -> None:
        """End all ranks at once, this one included."""
        try:
            self._communicator.Abort(1)
        finally:  # for the case that MPI is finalized, or does not end the process
            os._exit(1)

    def _add_float16(self, buffer: npt.NDArray[np.float32]) -> None:
        """Sum a flat buffer: each rank adds one part of it, and sends the sums to the others."""
        sent = self.converter.narrow(buffer)
        counts, starts = _shares(buffer.size, self.size)
        own = int(counts[self.rank])
        received = np.empty((self.size, own), np.float16)
        bits = self._library.UINT16_T  # MPI has no float16 type, so the bits are sent
        received_counts = np.full(self.size, own)
        self._communicator.Alltoallv(
            [sent, (counts, starts), bits],
            [received, (received_counts, np.arange(self.size) * own), bits],
        )
        numbers = np.empty(received.shape, np.float32)
        self.converter.widen(received, numbers)
        total = numbers[0]
        for addends in numbers[1:]:
            total += addends
        rounded = self.converter.narrow(total)
        self._communicator.Allgatherv([rounded, bits], [sent, (counts, starts), bits])
        self.converter.widen(sent, buffer)


def _library() -> Any:
    try:
        from mpi4py import MPI as library
    except (ImportError, OSError, RuntimeError) as error:
        raise InstallationError(
            f"MPI cannot be used: {error}. Install it with pip install onnxfit[mpi]."
        ) from error
    return library


def _shares(size: int, ranks: int) -> tuple[Integers, Integers]:
    """Return the sizes and the starts of the shares of a buffer that the ranks add up."""
    counts = np.full(ranks, size // ranks)
    counts[: size % ranks] += 1
    return counts, np.cumsum(counts) - counts


def _parts(buffer: Array, elements: int = MAX_ELEMENTS_OF_MESSAGE) -> Iterator[Array]:
    """Yield flat views of a buffer in C order, each small enough for a message."""
    flat = buffer.reshape(-1)
    for start in range(0, flat.size, elements):
        yield flat[start : start + elements]
