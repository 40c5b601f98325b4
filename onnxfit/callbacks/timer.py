"""Measure the duration of training, and stop training after a given time."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import ClassVar, Union

from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.checks import check_arguments, require_choice
from onnxfit.errors import SettingError
from onnxfit.files import RATE

__all__ = ["Timer"]


class Timer(StatefulCallback):
    """Stop training after a given time, and measure how long it took.

    - `duration`: seconds > 0, or a timedelta; None only measures.
    - `interval`: "batch" checks the clock after every batch; "epoch" only after epochs, so that
      every epoch is complete.

    `elapsed` and `remaining` are seconds. They count the whole fit with validation and callbacks,
    and the time before an interruption from which training resumed. With several processes, the
    clock of rank 0 stops all of them. SettingError: a setting is out of its range.

    >>> Timer(duration=0)
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: Timer needs duration > 0 seconds, got 0.
    """

    is_brief: ClassVar[bool] = True
    state_attributes = {"elapsed": RATE}

    @check_arguments
    def __init__(
        self, duration: Union[float, timedelta, None] = None, *, interval: str = "batch"
    ) -> None:
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
        if seconds is not None and not seconds > 0:
            raise SettingError(f"Timer needs duration > 0 seconds, got {seconds:g}.")
        require_choice("Timer needs interval to be", interval, ("batch", "epoch"))
        self.duration = seconds
        self.interval = interval
        self._last_reading: float | None = None  # of the clock; None outside a fit
        self.reset()

    def reset(self) -> None:
        self._elapsed = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds of training so far."""
        self._read_clock()
        return self._elapsed

    @elapsed.setter
    def elapsed(self, seconds: float) -> None:
        self._elapsed = seconds

    @property
    def remaining(self) -> float | None:
        """Seconds of `duration` that are left, at least 0; None without a duration."""
        return None if self.duration is None else max(self.duration - self.elapsed, 0.0)

    def overrides(self, hook: str) -> bool:
        by_batch = self.interval == "batch" and self.duration is not None
        return super().overrides(hook) and (hook != "on_train_batch_end" or by_batch)

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        self._last_reading = monotonic()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._stop_if_over()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._stop_if_over()

    def on_close(self) -> None:
        super().on_close()
        self._read_clock()
        self._last_reading = None

    def _read_clock(self) -> None:
        if self._last_reading is not None:
            now = monotonic()
            self._elapsed += now - self._last_reading
            self._last_reading = now

    def _stop_if_over(self) -> None:
        if self.duration is not None and self.elapsed >= self.duration:
            self.trainer.stop_reason = (
                f"Timer: {self.elapsed:.1f} seconds have passed; the limit is {self.duration:g}."
            )
            self.trainer.stop_training = True
