"""Log the learning rate of every step."""

from __future__ import annotations

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError

__all__ = ["LearningRateMonitor"]


class LearningRateMonitor(Callback):
    """Adds the learning rate that a batch was trained with to the logs of its end, as `name`.

    `TensorBoard(update_freq="batch")` and every other logger of batches behind it write it with the
    other figures. The logs of an epoch's end have `learning_rate` without this. SettingError: a
    name that a figure of every batch has.
    """

    def __init__(self, name: str = "lr") -> None:
        if name in ("", "loss", "batch_loss"):
            raise SettingError(
                f"LearningRateMonitor needs a name of its own for the rate, got {name!r}."
            )
        self.name = name

    @property
    def state_key(self) -> str:
        return f"LearningRateMonitor({self.name})"

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        # a schedule's next value is in force when the batch ends
        self._rate = self.trainer.learning_rate

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self.trainer.log(self.name, self._rate)
