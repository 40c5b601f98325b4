"""Log the learning rate of every batch."""

from __future__ import annotations

from typing import ClassVar

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.checks import check_arguments
from onnxfit.errors import SettingError

__all__ = ["LearningRateMonitor"]


class LearningRateMonitor(Callback):
    """Log the learning rate at which each batch was trained.

    - `name`: the rate's name in the logs of a batch's end.

    `TensorBoard(update_freq="batch")` and every other logger of batches write the rate with the
    metrics. The logs of an epoch's end have `learning_rate` even without this callback.
    SettingError: every batch already has a metric of this name.

    >>> rates = LearningRateMonitor()
    """

    logs_figures: ClassVar[bool] = True

    @check_arguments
    def __init__(self, name: str = "lr") -> None:
        if name in ("", "loss", "batch_loss"):
            raise SettingError(
                "LearningRateMonitor needs a name that the logs of a batch do not have yet, got"
                f" {name!r}."
            )
        self.name = name

    @property
    def state_key(self) -> str:
        return f"LearningRateMonitor({self.name})"

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        # Read the rate now: at the end of the batch, a schedule has already set the next rate.
        self._rate = self.trainer.learning_rate

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self.trainer.log(self.name, self._rate)
