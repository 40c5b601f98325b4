"""Change the number of batches per update between epochs."""

from __future__ import annotations

from collections.abc import Mapping

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError
from onnxfit.registry import check_arguments

__all__ = ["GradientAccumulationScheduler"]


class GradientAccumulationScheduler(Callback):
    """Average the gradients of more, or fewer, batches per update from given epochs on.

    - `schedule`: epoch (from 0) -> number of batches >= 1 whose gradients are averaged for one
      update from that epoch on. Before the first epoch of the schedule, the Trainer's own
      `accumulate` applies, and so it does after the `fit`.

    The Trainer builds the graphs that add gradients up: create it with `accumulate=2` or more,
    whatever the schedule begins with. Each step of such a trainer costs one more run and the sums
    of the gradients, except in epochs where the number is 1.

    SettingError: an epoch below 0, a number below 1; before training, a Trainer created with
    `accumulate=1`.

    >>> larger_later = GradientAccumulationScheduler({0: 1, 4: 8})
    >>> GradientAccumulationScheduler({4: 0})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: GradientAccumulationScheduler needs whole numbers ..., got 0 ...
    """

    @check_arguments
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
        self._initial = 1  # the Trainer's setting before this fit
        self._began = False

    def on_train_begin(self, logs: Logs) -> None:
        self._initial = self.trainer.accumulate
        self._began = True
        largest = max(self.schedule.values(), default=1)
        if largest > 1 and self.trainer.settings["accumulate"] == 1:
            raise SettingError(
                "GradientAccumulationScheduler needs graphs that add gradients up: build the"
                " Trainer with accumulate=2 or more."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        due = [batches for begin, batches in self.schedule.items() if begin <= epoch]
        self.trainer.accumulate = due[-1] if due else self._initial

    def on_close(self) -> None:
        if self._began:
            self._began = False
            self.trainer.accumulate = self._initial
