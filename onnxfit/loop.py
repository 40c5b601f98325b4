"""What the loop counts: which batches make an epoch, when validation is due, where a fit stands, and where an interrupted one goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

from onnxfit.callbacks.callback import CallbackList
from onnxfit.callbacks.logs import Logs
from onnxfit.data import Batch, Source
from onnxfit.errors import DataError, SettingError


@dataclass
class Resume:
    """Where an interrupted `fit` stands: the epoch under way (or next), and how many of its batches are done.

    `number` is the number of the pass over the data under way (None where none is), of which `in_pass` batches of `batch_size` rows (None where
    only the data can tell) are taken; `rate` is the learning rate of the last step. With `trained`, what is left of the epoch is its validation.
    """

    epoch: int = 0
    batch: int = 0
    number: int | None = None
    in_pass: int = 0
    rate: float | None = None
    trained: bool = False
    batch_size: int | None = None


@dataclass(frozen=True)
class Unfinished:
    """What a checkpoint holds of a fit that has not come to its end, for the next one to go on with."""

    place: Resume = field(default_factory=Resume)
    tracker: Mapping[str, Any] = field(default_factory=dict)  # the sums of the epoch under way
    ended: Mapping[str, Any] = field(default_factory=dict)  # the hook of which loggers were still to be told
    callbacks: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # their states

    def from_epoch(self, epoch: int) -> Unfinished:
        """The same for a fit that begins at this epoch or, where this one was further, there."""
        return self if epoch <= self.place.epoch else Unfinished(Resume(epoch), callbacks=self.callbacks)


class Epochs:
    """Which batches an epoch has: one pass over the data, or `steps_per_epoch` of passes that go on and wrap.

    `number` is the number of the first pass, which decides its order of rows; `start` is where an interrupted fit stood.
    """

    def __init__(self, data: Source, steps_per_epoch: int | None, number: int, start: Resume) -> None:
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

    def cut(self, batch_size: int) -> None:
        """Batches of so many rows from now on; for a pass that has not begun. DataError or SettingError for data that do not allow it."""
        data = self.data.cut(batch_size)
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
                f"ran out of data: the epoch has {index} batches, steps_per_epoch={self._steps} asks for more.", stacklevel=5
            )


@dataclass
class Course:
    """Where the fit under way stands, or the last one."""

    epochs: Epochs
    calls: CallbackList
    place: Resume  # without the batches taken from the pass, which `epochs` counts
    idle: Source | None = None  # the data, while none of its epochs runs
    telling: tuple[str, int, Logs] | None = None  # what callbacks are told right now
    running: bool = True
    warned: bool = False  # of a loss that is not finite
    callbacks: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # their states when an error ended the fit

    def now(self) -> Resume:
        """Where the next fit goes on, from a checkpoint written now; the very beginning after a fit that came to its end."""
        if self.place == Resume():
            return self.place
        number, in_pass = self.epochs.place
        return replace(self.place, number=number, in_pass=in_pass, batch_size=self.epochs.data.batch_size)

    def require_same_batches(self) -> None:
        """SettingError in the middle of a pass whose batches were of another size: some rows would come twice, others never."""
        was, size = self.place.batch_size, self.epochs.data.batch_size
        if self.place.in_pass and was != size and None not in (was, size):
            raise SettingError(
                f"The checkpoint was written after {self.place.in_pass} batches of {was} rows, in the middle of an epoch: go on with "
                f"batch_size={was}, not {size}, or begin the next epoch, initial_epoch={self.place.epoch + 1}."
            )


def validation_due(freq: Union[int, Sequence[int]]) -> Callable[[int], bool]:
    """Whether epoch number `epoch`, from 0, is validated: every `freq`-th, or those listed, counted from 1 as in Keras."""
    if isinstance(freq, int):
        if freq < 1:
            raise SettingError(f"validation_freq is at least 1, got {freq}.")
        return lambda epoch: (epoch + 1) % freq == 0
    listed = {int(e) for e in freq}
    return lambda epoch: epoch + 1 in listed


def require_data(found: object, what: str) -> None:
    """DataError for an evaluation or prediction of nothing."""
    if not found:
        raise DataError(f"The {what} data gave no batch.")
