"""Let Optuna prune the trial of a fit."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.monitor import Monitor
from onnxfit.checks import check_arguments
from onnxfit.errors import InstallationError, SettingError

__all__ = ["OptunaPruning"]


class OptunaPruning(Callback):
    """Report a metric of every epoch to a trial of Optuna, which may prune the trial.

    - `trial`: the `optuna.Trial` that Optuna passes to the objective.
    - `monitor`: the metric to report, at step `epoch`, from 0. An epoch without it is not reported.

    If the pruner prunes the trial, the epoch still ends as usual: History, checkpoints and loggers
    record it. Then training stops, and `fit` raises `optuna.TrialPruned`, which the objective must
    not catch. Callbacks see an exception: loggers mark the run as failed, and BackupAndRestore
    keeps its backups, so each trial needs its own `backup_dir`.

    With several processes, rank 0 reports to its trial and asks whether to prune, and `fit` raises
    `TrialPruned` on all ranks. Other ranks have no trial: pass None there, and train with the
    parameters that the trial of rank 0 suggests.

    InstallationError: `optuna` is not installed. SettingError: the study has several directions, so
    Optuna cannot prune. Both are raised before training.

    >>> def objective(trial):
    ...     rate = trial.suggest_float("rate", 1e-4, 1.0, log=True)
    ...     trainer = Trainer("model.onnx", loss="cross_entropy", optimizer=Adam(rate))
    ...     history = trainer.fit(
    ...         x, y, validation_split=0.2, epochs=20, callbacks=OptunaPruning(trial)
    ...     )
    ...     return history.history["val_loss"][-1]
    """

    # The trial is pruned only after the loggers before it in the list have written the epoch.
    phase: ClassVar[str] = "logger"
    ranks: ClassVar[str] = "all"  # every rank raises TrialPruned

    @check_arguments
    def __init__(self, trial: Any, *, monitor: str = "val_loss") -> None:
        self.trial = trial
        self.monitor = Monitor("OptunaPruning", monitor)
        self._reason: str | None = None

    def on_train_begin(self, logs: Logs) -> None:
        self._reason = None
        self._optuna()
        if not self.trainer.is_main:
            return
        self.monitor.start(self.trainer)
        directions = getattr(getattr(self.trial, "study", None), "directions", ())
        if len(directions) > 1:
            raise SettingError(
                "OptunaPruning needs a study with one objective, because Optuna does not prune"
                f" others. This study has {len(directions)} directions. Remove the callback."
            )

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self.monitor.read(logs) if self.trainer.is_main else None
        if value is None:
            return
        self.trial.report(value, epoch)
        if self.trial.should_prune():
            number = epoch + 1
            self._reason = f"pruned at epoch {number}: {self.monitor.name} is {value:.6g}"
            self.trainer.stop_reason = f"OptunaPruning: {self._reason}."
            self.trainer.stop_training = True

    def on_train_end(self, logs: Logs) -> None:
        reason = self.trainer.broadcast("OptunaPruning", self._reason)
        if reason is not None:
            raise self._optuna().TrialPruned(reason)

    def _optuna(self) -> Any:
        try:
            return importlib.import_module("optuna")
        except ImportError:
            raise InstallationError(
                "OptunaPruning needs Optuna: pip install onnxfit[optuna]."
            ) from None
