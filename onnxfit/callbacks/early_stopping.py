"""Stop training when a monitored metric no longer improves."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.monitor import Monitor
from onnxfit.callbacks.progress import print_line
from onnxfit.callbacks.stateful_callback import StatefulCallback, require_weights
from onnxfit.checks import check_arguments, require_at_least
from onnxfit.files import ARRAY, COUNT, NUMBER, mapping_of, optional

__all__ = ["EarlyStopping"]


class EarlyStopping(StatefulCallback):
    """Stop training when a monitored metric has not improved for `patience` epochs.

    - `monitor`: a name in the logs of an epoch's end, such as "val_loss". Epochs whose logs lack it
      neither count nor reset the count.
    - `min_delta` >= 0: only a change by more than this is an improvement.
    - `patience` >= 0 epochs; 0 behaves like 1: the first epoch without improvement stops training.
      Epoch 0 never stops training.
    - `verbose`: 1 prints a line when training stops, and when weights are restored; 0 is silent.
    - `mode`: "min", "max", or "auto" (the metric's own mode; "min" for a loss).
    - `baseline`: until a value better than this has been seen, every epoch counts against
      `patience`, even an improving one. (Keras never stops while the value improves, however far it
      is from the baseline.)
    - `restore_best_weights`: at the end of training, stopped early or not, restore the weights of
      the best epoch. NaN is never best.
    - `start_from_epoch`: epochs before this one, counted from 0, are ignored.
    - `stopping_threshold`: stop as soon as the value is better than this.
    - `divergence_threshold`: stop as soon as the value is worse than this.
    - `check_finite`: stop as soon as the value is NaN or infinite.

    Afterwards `stopped_epoch` is the epoch that stopped training, from 0 (0 if none did), `best`
    and `best_epoch` are the best value and its epoch (None before the first), and
    `trainer.stop_reason` gives the reason with the numbers. Every `fit` begins with a fresh state
    unless a saved state was loaded. SettingError: a setting is out of its range, or, before the
    first step, `monitor` names nothing that the `fit` can compute.

    >>> stopping = EarlyStopping("val_accuracy", patience=3, restore_best_weights=True)
    >>> EarlyStopping(patience=-1)
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: EarlyStopping needs patience >= 0, got -1.
    """

    is_brief: ClassVar[bool] = True
    state_attributes = {
        "best": optional(NUMBER),
        "best_epoch": optional(COUNT),
        "best_weights": optional(mapping_of(ARRAY)),
        "stopped_epoch": COUNT,
        "wait": COUNT,
    }

    @check_arguments
    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_finite: bool = False,
    ) -> None:
        require_at_least("EarlyStopping", 0, patience=patience, start_from_epoch=start_from_epoch)
        self.monitor = Monitor("EarlyStopping", monitor, mode, min_delta)
        self.patience = patience
        self.verbose = verbose
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_finite = check_finite
        self.reset()

    @property
    def state_key(self) -> str:
        return f"EarlyStopping({self.monitor.name})"

    def reset(self) -> None:
        self.wait = 0
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.best_weights: dict[str, Any] | None = None
        self.stopped_epoch = 0

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        require_weights(self, "best_weights", self.best_weights or {})
        self.monitor.require(self.callbacks)
        self.monitor.start(self.trainer)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if epoch < self.start_from_epoch:
            return
        value = self.monitor.read(logs)
        if value is None:
            return
        self.wait += 1
        if self.monitor.better(value, self.best):
            self.best = value
            self.best_epoch = epoch
            if self.restore_best_weights:
                self.best_weights = self.trainer.get_weights()
            if self.baseline is None or self.monitor.better(value, self.baseline):
                self.wait = 0
        reason = self._reason(epoch, value)
        if reason:
            self.stopped_epoch = epoch
            self.trainer.stop_reason = f"EarlyStopping: {reason}"
            self.trainer.stop_training = True
            if self.verbose and self.trainer.is_main:
                print_line(f"Epoch {epoch + 1}: EarlyStopping stops training.")

    def on_train_end(self, logs: Logs) -> None:
        if self.best_weights is None or self.best_epoch is None:
            return
        self.trainer.set_weights(self.best_weights)
        if self.verbose and self.trainer.is_main:
            print_line(f"EarlyStopping restored the weights of epoch {self.best_epoch + 1}.")

    def _reason(self, epoch: int, value: float) -> str | None:
        """Return the reason to stop after this epoch, or None to continue."""
        now = f"{self.monitor.name} is {value:.6g} at epoch {epoch + 1}"
        epochs = f"{self.wait} epoch{'s' * (self.wait != 1)}"
        threshold = self._crossed_threshold(value)
        if threshold:
            return f"{now}, {threshold}."
        if self.wait < max(self.patience, 1) or epoch == 0:
            return None
        if self.best is None or self.best_epoch is None:
            return f"{now}, and was NaN in the last {epochs}."
        best = f"the best was {self.best:.6g} at epoch {self.best_epoch + 1}"
        if self.baseline is not None and not self.monitor.better(self.best, self.baseline):
            return (
                f"{now}. In the last {epochs} it was never better than the baseline"
                f" {self.baseline:g}; {best}."
            )
        return (
            f"{now}. It has not improved by more than {self.monitor.min_delta:g} for {epochs};"
            f" {best}."
        )

    def _crossed_threshold(self, value: float) -> str | None:
        """Return the limit that the value has crossed, in words, or None."""
        good = self.stopping_threshold
        bad = self.divergence_threshold
        if self.check_finite and not math.isfinite(value):
            return "which is not finite"
        if good is not None and self.monitor.beyond(value, good):
            return f"better than the stopping_threshold {good:g}"
        if bad is not None and self.monitor.worse(value, bad):
            return f"worse than the divergence_threshold {bad:g}"
        return None
