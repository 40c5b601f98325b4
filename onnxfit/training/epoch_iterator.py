"""The batches of each epoch."""

from __future__ import annotations

from collections.abc import Iterator

from onnxfit.data import Batch, Source
from onnxfit.errors import SettingError, warn_user
from onnxfit.training.position import Position


class EpochIterator:
    """Iterator over the batches of one epoch after another.

    An epoch is one iteration over `data` (a data epoch). With `steps_per_epoch` it has that many
    batches, and the data epochs go on from one epoch to the next. `data_epoch` is the number of the
    first data epoch, which decides its order of rows; `start` is the position of an interrupted
    fit.
    """

    def __init__(
        self, data: Source, steps_per_epoch: int | None, data_epoch: int, start: Position
    ) -> None:
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise SettingError(f"steps_per_epoch is at least 1, got {steps_per_epoch}.")
        self.data = data
        self._steps_per_epoch = steps_per_epoch
        self._next_data_epoch = data_epoch if start.data_epoch is None else start.data_epoch
        self._first_batch = 0 if start.trained else start.batch  # of the next epoch
        self._skip = start.data_batch  # batches of the next data epoch
        self._warned = False
        self._batches: Iterator[Batch] = iter(())
        self._drawn = 0  # batches drawn from the running data epoch; 0 if none has begun

    def with_batch_size(self, batch_size: int) -> None:
        """Draw batches of `batch_size` rows from the next data epoch on.

        Raises DataError or SettingError if the data does not allow it.
        """
        data = self.data.with_batch_size(batch_size)
        self.data.close()
        self.data = data

    def close(self) -> None:
        """Close the data."""
        self.data.close()

    @property
    def steps(self) -> int | None:
        """Number of batches in an epoch, or None if only the data can tell."""
        known = self.data.steps
        if self._steps_per_epoch is None or known is None:
            return self._steps_per_epoch or known
        return min(self._steps_per_epoch, known)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield the batches of the next epoch with their numbers, from 0."""
        steps, index = self._steps_per_epoch, self._first_batch
        self._first_batch = 0
        if not self._drawn or steps is None:
            self._begin_data_epoch(self._skip)
            self._skip = 0
        while steps is None or index < steps:
            batch = next(self._batches, None)
            if batch is not None:
                self._drawn += 1
                yield index, batch
                index += 1
                continue
            drawn = self._drawn
            self._drawn = 0
            if steps is None:
                return
            if drawn < steps or not self.data.re_iterable:
                self._warn_of_short_epoch(index)
                return
            self._begin_data_epoch(0)

    @property
    def data_position(self) -> tuple[int, int]:
        """Number of the running (or next) data epoch, and how many of its batches are drawn."""
        if self._drawn:
            return self._next_data_epoch - 1, self._drawn
        return self._next_data_epoch, 0

    def _begin_data_epoch(self, skip: int) -> None:
        self._batches = self.data.batches(self._next_data_epoch, skip)
        self._next_data_epoch += 1
        self._drawn = skip

    def _warn_of_short_epoch(self, batches: int) -> None:
        if self._warned:
            return
        self._warned = True
        warn_user(
            f"ran out of data: the epoch has {batches} batches,"
            f" steps_per_epoch={self._steps_per_epoch} asks for more."
        )
