"""The guard that allows only one thread at a time to train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from onnxfit.errors import SettingError


class TrainingGuard:
    """Context in which only this thread trains, outside of a step.

    `in_step` tells whether a step is running. User code inside a step (a metric, `on_gradients`)
    may call the trainer.

    SettingError: another thread is training, or a step is running. The guard does not wait for the
    other thread, because the weights would then depend on the order in which threads run.
    """

    def __init__(self) -> None:
        self.in_step = False
        self._fit_runs = False
        self._lock = RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise SettingError(
                "Another thread is training this Trainer. Wait until it has finished, or use a"
                " separate Trainer in each thread. Other threads may predict and evaluate during"
                " training."
            )
        if self.in_step:
            self._lock.release()
            raise SettingError(
                "A training step cannot start inside another step. Inside on_gradients and"
                " metrics, only predict and evaluate may be called. Train in another hook, such as"
                " on_train_batch_end."
            )

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Allow only one fit. SettingError: a fit is running in this or in another thread."""
        with self:
            if self._fit_runs:
                raise SettingError(
                    "fit is already running. A callback may call evaluate, predict and"
                    " train_on_batch. For another fit, use a separate Trainer."
                )
            self._fit_runs = True
            try:
                yield
            finally:
                self._fit_runs = False
