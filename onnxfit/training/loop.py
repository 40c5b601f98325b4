"""The state of a running fit, and when validation is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

from onnxfit.callbacks.callback import CallbackList
from onnxfit.callbacks.logs import Logs
from onnxfit.data import Source
from onnxfit.errors import DataError, SettingError
from onnxfit.training.epoch_iterator import EpochIterator
from onnxfit.training.position import Position


@dataclass
class FitState:
    """Where the fit under way stands, or the last one."""

    epochs: EpochIterator
    calls: CallbackList
    place: Position  # without the batches taken from the pass, which `epochs` counts
    idle: Source | None = None  # the data, while none of its epochs runs
    telling: tuple[str, int, Logs] | None = None  # what callbacks are told right now
    running: bool = True
    warned: bool = False  # of a loss that is not finite
    # their states when an error ended the fit
    callbacks: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def now(self) -> Position:
        """Where the next fit goes on, from a checkpoint written now; the very beginning after a fit
        that came to its end.
        """
        if self.place == Position():
            return self.place
        number, in_pass = self.epochs.place
        return replace(
            self.place, number=number, in_pass=in_pass, batch_size=self.epochs.data.batch_size
        )

    def require_same_batches(self) -> None:
        """SettingError in the middle of a pass whose batches were of another size: some rows would
        come twice, others never.
        """
        was, size = self.place.batch_size, self.epochs.data.batch_size
        if self.place.in_pass and was != size and None not in (was, size):
            raise SettingError(
                f"The checkpoint was written after {self.place.in_pass} batches of {was} rows, in"
                f" the middle of an epoch: go on with batch_size={was}, not {size}, or begin the"
                f" next epoch, initial_epoch={self.place.epoch + 1}."
            )


def validation_due(freq: Union[int, Sequence[int]]) -> Callable[[int], bool]:
    """Whether epoch number `epoch`, from 0, is validated: every `freq`-th, or those listed, counted
    from 1 as in Keras.
    """
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
