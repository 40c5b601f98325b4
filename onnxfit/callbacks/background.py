"""Write files in a background thread while training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread
from typing import Any, Union

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.checks import require_frequency
from onnxfit.errors import SettingError
from onnxfit.graph import tensors

__all__: list[str] = []  # no class of the public package


class SavingCallback(Callback):
    """Base class of callbacks that write files.

    A callback has at most one save in progress. The callbacks of one `fit` write one after another,
    so that a file is written after the files that it refers to. An error of a save is raised at the
    callback's next save, or at the end of training; the saves queued after it are skipped.
    """

    background: Union[bool, None] = None
    save_freq: Union[str, int] = "epoch"
    every_n_steps: Union[int, None] = None
    _has_small_state = True
    _current_save: _Save | None = None

    @property
    def copies_state(self) -> bool:
        """Whether the state is copied, and written in the background."""
        return self._has_small_state if self.background is None else self.background

    def may_save_mid_window(self, batch: int) -> bool:
        return isinstance(self.save_freq, int) and batch % self.save_freq == 0

    def needs_synced_logs(self, batch: int) -> bool:
        every = self.every_n_steps
        by_step = every is not None and self.trainer.global_step % every == 0
        return by_step or self.may_save_mid_window(self.trainer.global_batch)

    def on_train_begin(self, logs: Logs) -> None:
        """Raise SettingError if a save would fall between two averages of the ranks' weights."""
        super().on_train_begin(logs)
        state = self.trainer.get_state(copy=False)
        size = sum(a.nbytes for kind in ("weights", "slots") for a in state[kind].values())
        self._has_small_state = size <= tensors.MAX_COPIED_BYTES
        every = self.callbacks.world.average_every or 1
        for name in ("save_freq", "every_n_steps"):
            number = getattr(self, name, None)
            if isinstance(number, int) and number % every:
                raise SettingError(
                    f"{type(self).__name__} needs {name} to be a multiple of {every}, got {number}."
                    f" The ranks average their weights only once in {every} updates."
                )

    def save(self, job: Callable[[], object]) -> None:
        """Run a function, in the background if it writes a copy; call `finish_save` first.

        - `job`: the function that writes the files.
        """
        current = [c._current_save for c in self.callbacks if isinstance(c, SavingCallback)]
        self._current_save = _Save(job, [save for save in current if save is not None])
        if not self.copies_state:
            self.finish_save()

    def finish_save(self) -> None:
        """Wait for the save in progress and raise its error."""
        if self._current_save is not None:
            # Ctrl-C may interrupt this line; `on_close` then waits again.
            self._current_save.join()
            error = self._current_save.error
            self._current_save = None
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
    """Thread that runs a job after other saves, and not at all if one of them failed."""

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
        self.failed = any(other.failed for other in self.after)
        job = self.job
        # Release the snapshot and the earlier threads as soon as they are not needed.
        self.job = None
        self.after = []
        if job is not None and not self.failed:
            try:
                job()
            except BaseException as error:
                self.error = error
                self.failed = True


def require_save_freq(owner: str, save_freq: object) -> None:
    """Raise SettingError unless `save_freq` is "epoch" or a number of batches >= 1."""
    needed = f"{owner} needs save_freq to be 'epoch' or a number of batches >= 1"
    require_frequency(needed, save_freq, ("epoch",))


def require_adapters(settings: Mapping[str, Any]) -> None:
    """Raise SettingError for the settings of a Trainer without adapters.

    - `settings`: the arguments of its constructor.
    """
    if settings["adapters"] is None:
        raise SettingError(
            "adapters_only=True saves adapters without the frozen model, but this trainer has no"
            " adapters. Remove adapters_only, or train adapters with Trainer(...,"
            " adapters=onnxfit.LoRA(rank=8))."
        )
