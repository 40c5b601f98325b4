"""Change the learning rate between epochs: by a function of the epoch, or when a monitored figure
stands still.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onnxfit.callbacks.callback import StatefulCallback
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.monitor import Monitor
from onnxfit.errors import SettingError

if TYPE_CHECKING:
    from onnxfit.trainer import Trainer

__all__ = ["LearningRateScheduler", "ReduceLROnPlateau"]


class LearningRateScheduler(StatefulCallback):
    """Sets the learning rate before every epoch to `schedule(epoch)`, or `schedule(epoch,
    learning_rate)` with the rate in force.

    The rate in force is passed where the function has two parameters without defaults, or one
    called `lr` or `learning_rate`. To change the rate with every update instead, give the optimizer
    a Schedule. SettingError (a ValueError): the function returns no finite number >= 0. TypeError,
    before training: the optimizer's learning rate is driven by a Schedule.

    >>> halve = LearningRateScheduler(lambda epoch, lr: lr / 2)
    """

    remembered = ("epoch",)

    def __init__(self, schedule: Callable[..., float]) -> None:
        if not callable(schedule):
            raise SettingError(
                f"LearningRateScheduler needs a function of the epoch, got {schedule!r}."
            )
        self.schedule = schedule
        self._takes_rate = _takes_rate(schedule)
        self.reset()

    def reset(self) -> None:
        self.epoch: int | None = None  # the last epoch whose rate has been set

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        _refuse_schedule(self.trainer, "LearningRateScheduler")

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        if self._resumes and epoch == self.epoch:
            # training resumes within this epoch, whose rate the checkpoint holds: `lr / 2` must not
            # halve it again
            return
        self.epoch = epoch
        rate: Any = (
            self.schedule(epoch, self.trainer.learning_rate)
            if self._takes_rate
            else self.schedule(epoch)
        )
        if not _is_number(rate) or not (math.isfinite(rate) and rate >= 0):
            raise SettingError(
                f"LearningRateScheduler's schedule must return a finite number >= 0, got {rate!r}"
                f" for epoch {epoch}."
            )
        self.trainer.learning_rate = float(rate)


class ReduceLROnPlateau(StatefulCallback):
    """Multiplies the learning rate by `factor` when the monitored figure has not improved for
    `patience` epochs.

    - `monitor`, `mode`: as for EarlyStopping; epochs without the figure are passed over.
    - `factor` in (0, 1); `min_lr` >= 0: the rate never goes below it.
    - `patience` >= 0 epochs; 0 is as 1.
    - `min_delta` >= 0: only a change by more than this is an improvement.
    - `cooldown` >= 0 epochs after a reduction in which nothing counts against `patience`.

    Every `fit` begins afresh unless a saved state was loaded. SettingError (a ValueError): a
    setting out of its range. TypeError, before training: the optimizer's learning rate is driven by
    a Schedule.

    >>> ReduceLROnPlateau(factor=1.0)
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: ReduceLROnPlateau needs 0 < factor < 1, got 1.0.
    """

    remembered = ("best", "cooldown_left", "wait")

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise SettingError(f"ReduceLROnPlateau needs 0 < factor < 1, got {factor}.")
        for name, value in (("patience", patience), ("cooldown", cooldown), ("min_lr", min_lr)):
            if not value >= 0:
                raise SettingError(f"ReduceLROnPlateau needs {name} >= 0, got {value}.")
        self.monitor = Monitor("ReduceLROnPlateau", monitor, mode, min_delta)
        self.factor = factor
        self.patience = patience
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
        _refuse_schedule(self.trainer, "ReduceLROnPlateau")
        self.monitor.start(self.trainer)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self.monitor.read(logs)
        if value is None:
            return
        self.cooldown_left = max(self.cooldown_left - 1, 0)
        if self.monitor.better(value, self.best):
            self.best, self.wait = value, 0
        elif self.cooldown_left == 0:
            self.wait += 1
            rate = self.trainer.learning_rate
            if self.wait >= self.patience and rate > self.min_lr:
                self.trainer.learning_rate = max(rate * self.factor, self.min_lr)
                self.wait, self.cooldown_left = 0, self.cooldown


def _takes_rate(schedule: Callable[..., Any]) -> bool:
    """Whether a schedule wants the rate in force besides the epoch."""
    try:
        parameters = inspect.signature(schedule).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][
        :2
    ]
    return len(positional) == 2 and (
        positional[1].default is inspect.Parameter.empty
        or positional[1].name in ("lr", "learning_rate")
    )


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _refuse_schedule(trainer: Trainer, owner: str) -> None:
    rate = trainer.optimizer.learning_rate
    if callable(rate):
        raise TypeError(
            f"{owner} cannot change a learning rate that {rate!r} sets at every update: keep the"
            f" schedule and drop {owner}, or keep {owner} and give"
            f" {type(trainer.optimizer).__name__} a number as its learning_rate."
        )
