"""The batches of each epoch."""

from __future__ import annotations

from collections.abc import Iterator

from onnxfit.data import Batch, Source
from onnxfit.errors import SettingError, warn_user
from onnxfit.training.position import Position


class EpochIterator:
    """Iterator over the batches of one epoch after another.

    An epoch is one iteration over `data` (a data epoch). With `steps_per_epoch`, an epoch has that
    many batches, and data epochs continue from one epoch to the next. `data_epoch` is the number of
    the first data epoch, which determines its order of rows. `start` is the position of an
    interrupted fit.
    """

    def __init__(
        self, data: Source, steps_per_epoch: int | None, data_epoch: int, start: Position
    ) -> None:
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise SettingError(f"steps_per_epoch must be >= 1, got {steps_per_epoch}.")
        self.data = data
        self._steps_per_epoch = steps_per_epoch
        first = data_epoch if start.data_epoch is None else start.data_epoch
        # The data epoch, and the batches trained in it: one tuple, so that Ctrl-C cannot leave only
        # one of them updated.
        self._position = first, start.data_batch
        self._first_batch = 0 if start.trained else start.batch  # of the next epoch
        self._warned = False
        self._batches: Iterator[Batch] | None = None  # of the running data epoch
        self._is_exhausted = False  # whether `_batches` gave its last batch

    def with_batch_size(self, batch_size: int) -> None:
        """Draw batches of `batch_size` rows from the next data epoch on.

        DataError or SettingError: the data does not allow this batch size.
        """
        data = self.data.with_batch_size(batch_size)
        self.data.close()
        self.data = data

    def close(self) -> None:
        """Close the data."""
        self.data.close()

    @property
    def steps(self) -> int | None:
        """Number of batches in an epoch, or None if it is unknown before the data ends."""
        known = self.data.steps
        if self._steps_per_epoch is None or known is None:
            return self._steps_per_epoch or known
        return min(self._steps_per_epoch, known)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield the batches of the next epoch with their numbers, from 0.

        Call `advance` after each batch, before requesting the next one, and `end_epoch` at the end.
        """
        steps, index = self._steps_per_epoch, self._first_batch
        self._first_batch = 0
        if self._batches is not None and steps is None:
            self._end_data_epoch()  # training stopped before its end
        if self._batches is None:
            self._begin_data_epoch()
        while self._batches is not None and (steps is None or index < steps):
            batch = next(self._batches, None)
            if batch is not None:
                yield index, batch
                index += 1
                continue
            if steps is None:
                self._is_exhausted = True
                return
            _, done = self._position
            self._end_data_epoch()
            if done < steps or not self.data.re_iterable:
                self._warn_of_short_epoch(index)
                return
            self._begin_data_epoch()

    def advance(self) -> None:
        """Count the last batch as trained, so that a resumed fit continues after it."""
        number, done = self._position
        self._position = number, done + 1

    def end_epoch(self) -> None:
        """Count the data epoch as finished, if all its batches are trained."""
        if self._is_exhausted:
            self._end_data_epoch()

    @property
    def data_position(self) -> tuple[int, int]:
        """Number of the running (or next) data epoch, and of its trained batches."""
        return self._position

    def _begin_data_epoch(self) -> None:
        self._batches = self.data.batches(*self._position)

    def _end_data_epoch(self) -> None:
        self._batches = None
        self._is_exhausted = False
        self._position = self._position[0] + 1, 0

    def _warn_of_short_epoch(self, batches: int) -> None:
        if self._warned:
            return
        self._warned = True
        warn_user(
            f"Ran out of data: the epoch ended after {batches} batches, but"
            f" steps_per_epoch={self._steps_per_epoch}."
        )
