"""The base class of callbacks.

The loop calls the hooks in this order:

    on_train_begin
    for every epoch:
        on_epoch_begin
        for every batch:
            on_train_batch_begin
            forward, loss, gradients
            on_gradients                    backend="forward_backward" only
            update
            on_train_batch_end
        with validation data:
            on_test_begin, on_test_batch_begin, on_test_batch_end, ..., on_test_end
        on_epoch_end
    on_train_end
    on_exception                            after an error or Ctrl-C only
    on_close
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import numpy.typing as npt

from onnxfit.callbacks.hooks import KerasModelAlias, older_hook
from onnxfit.callbacks.logs import Logs

if TYPE_CHECKING:
    from onnxfit.callbacks.callback_list import CallbackList
    from onnxfit.trainer import Trainer

__all__ = ["HOOKS", "Callback"]

PHASES = ("monitor", "checkpoint", "backup", "logger")


class Callback:
    """Base class of callbacks: override the hooks you need; every hook is optional.

    Before the first hook runs, three attributes are set:

    - `trainer`: the Trainer. `model` is another name for it, as in Keras.
    - `params`: `{"epochs", "steps", "verbose"}` of the running `fit`; `steps` is None if the number
      of batches is unknown.
    - `callbacks`: the CallbackList in which this callback runs.

    Hooks are called with these arguments:

    - `epoch`, `batch`: integers that count from 0.
    - `logs`: a read-only mapping of metric names to Python floats. `self.trainer.log(name, value)`
      adds a value for every callback that comes later in the list.

    A callback may also have the methods under Keras's older names: `on_batch_begin` for
    `on_train_batch_begin`, and `on_batch_end` for `on_train_batch_end`.

    `phase` is a class attribute: "monitor", "checkpoint", "backup" or "logger". Callbacks run in
    the order of their phases, and within a phase in the order of the list.

    `ranks` is a class attribute, too. It says which ranks call the hooks when several processes
    train together: "all", or only the "first", whose hooks then cannot evaluate or set weights.
    None, the default, means "all" for monitors, which decide by the same logs on every rank, and
    "first" for the other phases, which write files. `trainer.broadcast` sends a value from rank 0
    to all ranks.

    >>> class Stop(Callback):
    ...     def on_epoch_end(self, epoch, logs):
    ...         if logs["loss"] < 0.01:
    ...             self.trainer.stop_training = True
    """

    phase: ClassVar[str] = "monitor"
    ranks: ClassVar[str | None] = None

    # Whether this callback adds figures to the logs. Only classes of onnxfit declare this; every
    # other callback is assumed to add some.
    logs_figures: ClassVar[bool] = False
    # Whether the hooks at the end of batches and epochs take no time. Signals, and other threads
    # that save, wait for their end. Only classes of onnxfit declare this.
    is_brief: ClassVar[bool] = False

    trainer: Trainer
    params: dict[str, Any]
    callbacks: CallbackList
    model = KerasModelAlias()

    @property
    def runs_on_first(self) -> bool:
        """Whether rank 0 alone calls the hooks."""
        return self.ranks == "first" or (self.ranks is None and self.phase != "monitor")

    @property
    def state_key(self) -> str:
        """Name of this callback's state in a checkpoint; by default, the class name.

        Override it if one `fit` may have several instances of the class. Two callbacks with equal
        keys in one list are a SettingError.
        """
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps of this callback.

        Its values are JSON (numbers, strings, lists, dicts) or numpy arrays.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state.

        - `state`: the dict that `state_dict` returned.
        """

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle, without the trainer of the last fit."""
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("trainer", "callbacks")
        }

    def overrides(self, hook: str) -> bool:
        """Return whether the loop must call a hook: by default, whether the hook is overridden.

        The loop prepares no logs for a hook to which no callback listens.

        - `hook`: the name of a hook, such as "on_train_batch_end".
        """
        if getattr(getattr(self, hook), "__func__", None) is not getattr(Callback, hook):
            return True
        return older_hook(self, hook) is not None

    def may_save_mid_window(self, batch: int) -> bool:
        """Return whether a checkpoint may be written after a batch that makes no update.

        With `accumulate` and several processes, each process holds a part of the gradients that
        wait for the update. If the answer is True, rank 0 collects these gradients; otherwise
        `trainer.save` raises an error after this batch. Every process calls this method, so the
        answer must not depend on anything that differs among processes.

        - `batch`: the number of batches trained so far, over all fits.
        """
        return False

    def needs_synced_logs(self, batch: int) -> bool:
        """Return whether `on_train_batch_end` reads figures, or decides anything, after this batch.

        With several processes, the loop exchanges the figures of all rows, and the decisions of
        rank 0, only if a callback returns True. Otherwise `logs` has this process's loss of the
        batch alone. Every process calls this method after each batch, so the answer must not depend
        on anything that differs among processes.

        - `batch`: the argument of the hook.
        """
        return True

    def prepare(self, trainer: Trainer) -> None:
        """Act before `fit` decides at which epoch and batch to begin, e.g. call `trainer.restore`.

        With several processes, all of them call it, regardless of `ranks`.

        - `trainer`: the Trainer, before any hook of this `fit` is called.
        """

    def on_train_begin(self, logs: Logs) -> None:
        """Called once before the first epoch; `logs` is empty."""

    def on_train_end(self, logs: Logs) -> None:
        """Called once after the last epoch; `logs` are those of the last `on_epoch_end`."""

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Called before every `epoch`, counted from 0; `logs` is empty."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Called after every `epoch` and its validation.

        `logs` has the loss, the metrics, `val_` metrics, and `learning_rate`: the rate with which
        the epoch was trained.
        """

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        """Called before every training `batch`, counted from 0; `logs` is empty."""
        older = older_hook(self, "on_train_batch_begin")
        if older is not None:
            older(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after every training `batch`.

        `logs` has the means since the epoch began, and `batch_loss`, the loss of this batch alone.
        """
        older = older_hook(self, "on_train_batch_end")
        if older is not None:
            older(batch, logs)

    def on_test_begin(self, logs: Logs) -> None:
        """Called before every evaluation or validation; `logs` is empty."""

    def on_test_end(self, logs: Logs) -> None:
        """Called after every evaluation or validation; `logs` has no prefix `val_`."""

    def on_test_batch_begin(self, batch: int, logs: Logs) -> None:
        """Called before every `batch` of an evaluation or validation; `logs` is empty."""

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after every `batch` of an evaluation; `logs` has the means so far."""

    def on_predict_begin(self, logs: Logs) -> None:
        """Called before `trainer.predict`; `logs` is empty."""

    def on_predict_end(self, logs: Logs) -> None:
        """Called after `trainer.predict`; `logs` is empty."""

    def on_predict_batch_begin(self, batch: int, logs: Logs) -> None:
        """Called before every `batch` of a prediction; `logs` is empty."""

    def on_predict_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after every `batch` of a prediction, when `trainer.predicted` has its outputs;
        `logs` is empty.
        """

    def on_gradients(self, gradients: dict[str, npt.NDArray[Any]]) -> None:
        """Called before every update, with `backend="forward_backward"` only.

        - `gradients`: weight name -> array, which may be changed in place.
        """

    def on_exception(self, exception: BaseException) -> None:
        """Called when training fails or is interrupted.

        - `exception`: the error or KeyboardInterrupt, which is raised again afterwards.
        """

    def on_close(self) -> None:
        """Called last, whether training ended normally or not: the place to close files."""


# Hook -> names of its arguments
HOOKS = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(Callback).items()
    if name.startswith("on_")
}
