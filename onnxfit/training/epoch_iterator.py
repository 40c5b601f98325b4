"""The batches of each epoch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from onnxfit.data import Batch, Source
from onnxfit.errors import SettingError
from onnxfit.training.position import Position


class EpochIterator:
    """Which batches an epoch has: one pass over the data, or `steps_per_epoch` of passes that go on
    and wrap.

    `number` is the number of the first pass, which decides its order of rows; `start` is where an
    interrupted fit stood.
    """

    def __init__(
        self, data: Source, steps_per_epoch: int | None, number: int, start: Position
    ) -> None:
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise SettingError(f"steps_per_epoch is at least 1, got {steps_per_epoch}.")
        self.data = data
        self._steps = steps_per_epoch
        self._number = number if start.number is None else start.number
        self._done = 0 if start.trained else start.batch  # batches of the next epoch
        self._skip = start.in_pass  # batches of the next pass
        self._warned = False
        self._pass: Iterator[Batch] = iter(())
        self._in_pass = 0  # batches taken from the pass under way; 0: the next pass has not begun

    def with_batch_size(self, batch_size: int) -> None:
        """Batches of so many rows from now on; for a pass that has not begun.

        DataError or SettingError for data that do not allow it.
        """
        data = self.data.with_batch_size(batch_size)
        self.data.close()
        self.data = data

    def close(self) -> None:
        self.data.close()

    @property
    def steps(self) -> int | None:
        """Batches of an epoch, None where only the data can tell."""
        known = self.data.steps
        if self._steps is None or known is None:
            return self._steps or known
        return min(self._steps, known)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """The batches of the next epoch, counted from 0."""
        index, self._done = self._done, 0
        if not self._in_pass or self._steps is None:
            skip, self._skip = self._skip, 0
            self._begin(skip)
        while self._steps is None or index < self._steps:
            batch = next(self._pass, None)
            if batch is None:
                length, self._in_pass = self._in_pass, 0
                if self._steps is None:
                    return
                if length < self._steps or not self.data.re_iterable:
                    self._ran_out(index)
                    return
                self._begin(0)
                continue
            self._in_pass += 1
            yield index, batch
            index += 1

    @property
    def place(self) -> tuple[int, int]:
        """The number of the pass under way (or next), and how many of its batches are taken."""
        return (self._number - 1, self._in_pass) if self._in_pass else (self._number, 0)

    def _begin(self, skip: int) -> None:
        self._pass = self.data.batches(self._number, skip)
        self._number += 1
        self._in_pass = skip

    def _ran_out(self, index: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"ran out of data: the epoch has {index} batches, steps_per_epoch={self._steps}"
                " asks for more.",
                stacklevel=5,
            )
