"""Stop training when a metric is good enough."""

from __future__ import annotations

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.monitor import Monitor
from onnxfit.checks import check_arguments

__all__ = ["ThresholdStop"]


class ThresholdStop(Callback):
    """Stop after the epoch in which a monitored metric reaches a threshold.

    - `monitor`: a name in the logs of an epoch's end. Epochs whose logs lack it are skipped.
    - `threshold`: training stops if the value is as good as this, or better. NaN never reaches the
      threshold.
    - `mode`: "min", "max", or "auto" (the metric's own mode; "min" for a loss).

    `trainer.stop_reason` names the metric. SettingError: the mode is unknown, or, before the first
    step, `monitor` names nothing that the `fit` can compute.

    >>> stop = ThresholdStop("val_accuracy", threshold=0.95)
    """

    @check_arguments
    def __init__(self, monitor: str, *, threshold: float, mode: str = "auto") -> None:
        self.monitor = Monitor("ThresholdStop", monitor, mode)
        self.threshold = threshold

    @property
    def state_key(self) -> str:
        return f"ThresholdStop({self.monitor.name}, {self.threshold})"

    def on_train_begin(self, logs: Logs) -> None:
        self.monitor.require(self.callbacks)
        self.monitor.start(self.trainer)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self.monitor.read(logs)
        if value is None:
            return
        if value == self.threshold or self.monitor.beyond(value, self.threshold):
            self.trainer.stop_reason = (
                f"ThresholdStop: {self.monitor.name} is {value:.6g} at epoch {epoch + 1} and has"
                f" reached the threshold {self.threshold:g}."
            )
            self.trainer.stop_training = True
