"""Saves that go on in a thread while training does."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs

__all__: list[str] = []


class SavingCallback(Callback):
    """A callback that writes files: at most one save of it is under way, and the callbacks of one
    `fit` write one after another.

    So a file that says that another one is there is written after that one. What a save raises is
    raised at the callback's next one, or at the end of training; a save that would have come after
    it is not made.
    """

    background = True
    _save_under_way: _Save | None = None

    def save(self, job: Callable[[], object]) -> None:
        """Run the job, in a thread unless `background` is false; `finish_save` comes first."""
        others = [c._save_under_way for c in self.callbacks if isinstance(c, SavingCallback)]
        self._save_under_way = _Save(job, [other for other in others if other is not None])
        if not self.background:
            self.finish_save()

    def finish_save(self) -> None:
        """Wait for the save under way and raise what it raised."""
        if self._save_under_way is not None:
            # Ctrl-C may end this before it has ended: `on_close` waits again
            self._save_under_way.join()
            error, self._save_under_way = self._save_under_way.error, None
            if error is not None:
                raise error

    def on_train_end(self, logs: Logs) -> None:
        self.finish_save()

    def on_close(self) -> None:
        try:
            self.finish_save()
        finally:
            super().on_close()


class _Save(Thread):
    """Runs after others, and not at all if one of them failed."""

    def __init__(self, job: Callable[[], object], after: list[_Save]) -> None:
        super().__init__(name="onnxfit-save")
        self.job: Callable[[], Any] | None = job
        self.after = after
        self.failed = False
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        for other in self.after:
            other.join()
        job, self.job, self.failed = self.job, None, any(other.failed for other in self.after)
        self.after = []
        if job is not None and not self.failed:
            try:
                job()
            except BaseException as error:
                self.error, self.failed = error, True
