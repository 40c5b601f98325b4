"""The guard that lets one thread at a time train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from onnxfit.errors import SettingError


class TrainingGuard:
    """Context in which only this thread trains, outside of a step.

    `in_step` tells whether a step is running, which user code (a metric, `on_gradients`) may call
    back from.

    SettingError while another thread trains, which is not waited for: the weights would depend on
    the order in which the threads happen to run. SettingError inside a step.
    """

    def __init__(self) -> None:
        self.in_step = False
        self._fit_runs = False
        self._lock = RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise SettingError(
                "Another thread is training this Trainer: wait for its end, or give each thread a"
                " Trainer of its own. Beside training, other threads may predict and evaluate."
            )
        if self.in_step:
            self._lock.release()
            raise SettingError(
                "A step is running, so that no other one can begin: on_gradients and metrics may"
                " predict and evaluate. Train in another hook, such as on_train_batch_end."
            )

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Let only one fit run; SettingError in a callback of a fit, and in another thread."""
        with self:
            if self._fit_runs:
                raise SettingError(
                    "fit is running already: a callback may evaluate, predict and call"
                    " train_on_batch, and another fit needs another Trainer."
                )
            self._fit_runs = True
            try:
                yield
            finally:
                self._fit_runs = False
