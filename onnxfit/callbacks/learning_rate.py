"""Change the learning rate between epochs: by a function of the epoch, or on a plateau."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import Any, ClassVar

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.monitor import Monitor
from onnxfit.callbacks.progress import print_line
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.checks import check_arguments, is_finite, require_at_least
from onnxfit.errors import SettingError, UnsupportedError
from onnxfit.files import COUNT, NUMBER, optional

__all__ = ["LearningRateScheduler", "ReduceLROnPlateau"]


class LearningRateScheduler(StatefulCallback):
    """Set the learning rate before every epoch by a function of the epoch.

    - `schedule`: a function of the epoch, from 0, that returns the learning rate, a finite number
      >= 0. If it has two parameters without defaults, or a parameter called `lr` or
      `learning_rate`, it gets the current learning rate as well.
    - `verbose`: 1 prints a line for every epoch; 0 is silent.

    To change the rate at every update instead, give the optimizer a Schedule. SettingError (a
    ValueError): the function returned something else. TypeError, before training: a Schedule sets
    the optimizer's learning rate.

    >>> halve = LearningRateScheduler(lambda epoch, lr: lr / 2)
    """

    is_brief: ClassVar[bool] = True
    state_attributes = {"epoch": optional(COUNT)}

    @check_arguments
    def __init__(self, schedule: Callable[..., float], *, verbose: int = 0) -> None:
        if not callable(schedule):
            raise SettingError(
                f"LearningRateScheduler needs schedule to be a function of the epoch, got"
                f" {schedule!r}."
            )
        self.schedule = schedule
        self.verbose = verbose
        self._takes_rate = _takes_rate(schedule)
        self.reset()

    def reset(self) -> None:
        self.epoch: int | None = None  # the last epoch whose rate has been set

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        _require_constant_rate(self, "LearningRateScheduler")

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        if self._resumes and epoch == self.epoch:
            # Training resumes within this epoch at the rate from the checkpoint. A schedule such as
            # `lr / 2` must not halve that rate again.
            return
        self.epoch = epoch
        arguments = (epoch, self.trainer.learning_rate) if self._takes_rate else (epoch,)
        rate: Any = self.schedule(*arguments)
        if not _is_number(rate) or not (is_finite(rate) and rate >= 0):
            raise SettingError(
                "LearningRateScheduler's schedule must return a finite number >= 0, got"
                f" {rate!r} from schedule({', '.join(map(repr, arguments))})."
            )
        self.trainer.learning_rate = float(rate)
        if self.verbose and self.trainer.is_main:
            print_line(
                f"Epoch {epoch + 1}: LearningRateScheduler sets the learning rate to {rate:.6g}."
            )


class ReduceLROnPlateau(StatefulCallback):
    """Reduce the learning rate when a monitored metric has not improved for `patience` epochs.

    - `monitor`: a name in the logs of an epoch's end, such as "val_loss". Epochs whose logs lack it
      are skipped.
    - `factor`: the learning rate is multiplied by this number, in (0, 1).
    - `patience` >= 0 epochs without improvement; 0 behaves like 1.
    - `verbose`: 1 prints a line for every reduction; 0 is silent.
    - `mode`: "min", "max", or "auto" (the metric's own mode; "min" for a loss).
    - `min_delta` >= 0: only a change by more than this is an improvement.
    - `cooldown` >= 0: epochs after a reduction that do not count against `patience`.
    - `min_lr` >= 0: the learning rate never goes below this.

    Every `fit` begins with a fresh state unless a saved state was loaded. SettingError (a
    ValueError): a setting is out of its range, or, before the first step, `monitor` names nothing
    that the `fit` can compute. TypeError, before training: a Schedule sets the optimizer's learning
    rate.

    >>> reduce = ReduceLROnPlateau(factor=0.5, patience=3)
    >>> ReduceLROnPlateau(factor=1.0)
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: ReduceLROnPlateau needs 0 < factor < 1, got 1.0.
    """

    is_brief: ClassVar[bool] = True
    state_attributes = {"best": optional(NUMBER), "cooldown_left": COUNT, "wait": COUNT}

    @check_arguments
    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise SettingError(f"ReduceLROnPlateau needs 0 < factor < 1, got {factor}.")
        require_at_least(
            "ReduceLROnPlateau", 0, patience=patience, cooldown=cooldown, min_lr=min_lr
        )
        self.monitor = Monitor("ReduceLROnPlateau", monitor, mode, min_delta)
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self.reset()

    @property
    def state_key(self) -> str:
        return f"ReduceLROnPlateau({self.monitor.name})"

    def reset(self) -> None:
        self.best: float | None = None
        self.wait = 0
        self.cooldown_left = 0

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        _require_constant_rate(self, "ReduceLROnPlateau")
        self.monitor.require(self.callbacks)
        self.monitor.start(self.trainer)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self.monitor.read(logs)
        if value is None:
            return
        self.cooldown_left = max(self.cooldown_left - 1, 0)
        if self.monitor.better(value, self.best):
            self.best = value
            self.wait = 0
        elif self.cooldown_left == 0:
            self.wait += 1
            if self.wait >= self.patience and self.trainer.learning_rate > self.min_lr:
                self._reduce(epoch)

    def _reduce(self, epoch: int) -> None:
        rate = max(self.trainer.learning_rate * self.factor, self.min_lr)
        self.trainer.learning_rate = rate
        self.wait = 0
        self.cooldown_left = self.cooldown
        if self.verbose and self.trainer.is_main:
            print_line(
                f"Epoch {epoch + 1}: ReduceLROnPlateau reduces the learning rate to {rate:.6g}."
            )


def _takes_rate(schedule: Callable[..., Any]) -> bool:
    """Return whether a schedule takes the current learning rate in addition to the epoch."""
    try:
        parameters = inspect.signature(schedule).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return False
    second = positional[1]
    return second.default is inspect.Parameter.empty or second.name in ("lr", "learning_rate")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def require_constant_rate(callback: Callback, owner: str, fix: str) -> None:
    """Raise UnsupportedError if a Schedule sets the learning rate, so that a callback cannot.

    - `callback`: the callback, whose trainer's optimizer is checked.
    - `owner`: the callback's class, named in the message.
    - `fix`: a sentence that says how to change the settings.
    """
    rate = callback.trainer.optimizer.settings.learning_rate
    if callable(rate):
        raise UnsupportedError(
            f"{owner} cannot change the learning rate, because {rate!r} sets it at every update."
            f" {fix}"
        )


def _require_constant_rate(callback: StatefulCallback, owner: str) -> None:
    optimizer = type(callback.trainer.optimizer.settings).__name__
    fix = (
        f"Remove {owner} to keep the schedule, or give {optimizer} a number as its learning_rate to"
        f" keep {owner}."
    )
    require_constant_rate(callback, owner, fix)
