"""Stop training when a figure is good enough."""

from __future__ import annotations

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.monitor import Monitor

__all__ = ["ThresholdStop"]


class ThresholdStop(Callback):
    """Stops after the epoch in which the monitored figure reaches `threshold`: is as good as it, or
    better.

    `monitor` and `mode` are as for EarlyStopping; epochs without the figure are passed over, and
    NaN reaches nothing. `trainer.stop_reason` names the figure. SettingError: an unknown mode.

    >>> stop = ThresholdStop("val_accuracy", 0.95)
    """

    def __init__(self, monitor: str, threshold: float, mode: str = "auto") -> None:
        self.monitor = Monitor("ThresholdStop", monitor, mode)
        self.threshold = threshold

    @property
    def state_key(self) -> str:
        return f"ThresholdStop({self.monitor.name}, {self.threshold})"

    def on_train_begin(self, logs: Logs) -> None:
        self.monitor.start(self.trainer)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self.monitor.read(logs)
        if value is not None and (
            value == self.threshold or self.monitor.beyond(value, self.threshold)
        ):
            self.trainer.stop_reason = (
                f"ThresholdStop: {self.monitor.name} is {value:.6g} at epoch {epoch}, and"
                f" {self.threshold:g} was asked for."
            )
            self.trainer.stop_training = True
