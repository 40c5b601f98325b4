"""Change between epochs over how many batches gradients are averaged."""

from __future__ import annotations

from collections.abc import Mapping

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError

__all__ = ["GradientAccumulationScheduler"]


class GradientAccumulationScheduler(Callback):
    """Averages the gradients of so many batches for one update, from the given epochs on;

    `{0: 1, 4: 8}` is 1, and 8 from epoch 4 on.

    Before the first epoch named it is what the Trainer was built with, and so it is after the
    `fit`. The graphs that add gradients up are made with the Trainer: build it with `accumulate=2`
    or more, whatever the schedule begins with. A step of a trainer built so costs one more run and
    the sums of the gradients, except in epochs where the number is 1. SettingError: an epoch below
    0, a number below 1; before training, a Trainer built with `accumulate=1`.

    >>> GradientAccumulationScheduler({4: 0})
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: GradientAccumulationScheduler needs whole numbers of batches from 1 on, got 0 for epoch 4.
    """

    def __init__(self, schedule: Mapping[int, int]) -> None:
        for epoch, batches in schedule.items():
            if not isinstance(epoch, int) or epoch < 0:
                raise SettingError(
                    f"GradientAccumulationScheduler needs epochs from 0 on, got {epoch!r}."
                )
            if not isinstance(batches, int) or batches < 1:
                raise SettingError(
                    "GradientAccumulationScheduler needs whole numbers of batches from 1 on, got"
                    f" {batches!r} for epoch {epoch}."
                )
        self.schedule = dict(sorted(schedule.items()))
        self._own = 1  # what the Trainer was set to before this fit
        self._begun = False

    def on_train_begin(self, logs: Logs) -> None:
        trainer = self.trainer
        self._own, self._begun = trainer.accumulate, True
        if max(self.schedule.values(), default=1) > 1 and trainer.settings["accumulate"] == 1:
            raise SettingError(
                "GradientAccumulationScheduler needs graphs that add gradients up: build the"
                " Trainer with accumulate=2 or more."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        due = [batches for begin, batches in self.schedule.items() if begin <= epoch]
        self.trainer.accumulate = due[-1] if due else self._own

    def on_close(self) -> None:
        if self._begun:
            self._begun = False
            self.trainer.accumulate = self._own
