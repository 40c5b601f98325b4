"""Change the number of batches per update between epochs."""

from __future__ import annotations

from collections.abc import Mapping

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.checks import check_arguments
from onnxfit.errors import SettingError

__all__ = ["GradientAccumulationScheduler"]


class GradientAccumulationScheduler(Callback):
    """Change the number of batches whose gradients are averaged per update, from given epochs on.

    - `schedule`: epoch (from 0) -> number of batches >= 1 whose gradients are averaged for one
      update from that epoch on. The Trainer's own `accumulate` applies before the first epoch of
      the schedule, and again after the `fit`.

    The Trainer must be created with `accumulate=2` or more, because only then does it build the
    graphs that accumulate gradients. Each step of this trainer costs one more run and the sums of
    the gradients, except in epochs where the number is 1.

    SettingError: an epoch is below 0, or a number below 1. Before training: the Trainer was created
    with `accumulate=1`.

    >>> larger_later = GradientAccumulationScheduler({0: 1, 4: 8})
    >>> GradientAccumulationScheduler({4: 0})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: GradientAccumulationScheduler needs whole numbers ... got 0 ...
    """

    @check_arguments
    def __init__(self, schedule: Mapping[int, int]) -> None:
        for epoch, batches in schedule.items():
            if not isinstance(epoch, int) or epoch < 0:
                raise SettingError(
                    "GradientAccumulationScheduler needs epochs that are whole numbers >= 0, got"
                    f" {epoch!r}."
                )
            if not isinstance(batches, int) or batches < 1:
                raise SettingError(
                    "GradientAccumulationScheduler needs whole numbers of batches >= 1, got"
                    f" {batches!r} for epoch {epoch}."
                )
        self.schedule = dict(sorted(schedule.items()))
        self._initial = 1  # the Trainer's setting before this fit
        self._began = False

    def on_train_begin(self, logs: Logs) -> None:
        self._initial = self.trainer.accumulate
        self._began = True
        largest = max(self.schedule.values(), default=1)
        if largest > 1 and self.trainer.settings["accumulate"] == 1:
            raise SettingError(
                "GradientAccumulationScheduler needs a Trainer that can accumulate gradients."
                " Create it with Trainer(..., accumulate=2) or more."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        due = [batches for begin, batches in self.schedule.items() if begin <= epoch]
        self.trainer.accumulate = due[-1] if due else self._initial

    def on_close(self) -> None:
        if self._began:
            self._began = False
            self.trainer.accumulate = self._initial
