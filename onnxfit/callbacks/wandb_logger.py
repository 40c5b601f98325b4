"""Write a run to Weights & Biases, which is imported when training begins."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Union

from onnxfit.callbacks.hyperparameters import hyperparameters
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.callbacks.write_guard import WriteGuard
from onnxfit.checks import check_arguments, require_frequency
from onnxfit.errors import InstallationError, SettingError, warn_user
from onnxfit.files import ValueType, optional

__all__ = ["WandbLogger"]

# W&B uses the id in addresses and in the names of folders.
RUN_ID = ValueType(
    "the id of a W&B run",
    lambda value: isinstance(value, str) and bool(re.fullmatch(r"[\w.-]{1,128}", value)),
)
# The exit codes by which W&B tells how a run ended.
FINISHED = 0
FAILED = 1
INTERRUPTED = 255


class WandbLogger(StatefulCallback):
    """Write every `fit` to a run of Weights & Biases: its parameters and its metrics.

    - `project`: the project of the run; None for W&B's own setting.
    - `run`: a run that you have started, to which the metrics are written. None uses the active run
      (`wandb.run`) if there is one, and otherwise a new run.
    - `update_freq`: "epoch" writes only the metrics of epochs; "batch" also the metrics of every
      update, and a number n those of every n-th update.
    - `parameters`: name -> value, written in addition to optimizer, learning rate, loss, batch size
      and epochs.
    - `log_model`: if training ends normally, write the inference model as an artifact of type
      "model" with the file `model.onnx`.
    - `settings`: further arguments of `wandb.init`, such as `name`, `tags` or `mode="offline"`.

    The metrics of an epoch have the same names as in the logs, over `epoch`, from 1. The metrics of
    an update are `batch_loss`, `batch_<metric>` and `batch_learning_rate`, over `global_step`. A
    run that this callback has started is finished when training ends; after an exception it is
    marked as failed. A resumed fit continues this run under the same id, and may write the last
    metrics again, over the same epoch or update. A run that you have started stays active; finish
    it yourself. `run_id` is the id of the run. An error of W&B causes a warning, and training
    continues without it. If a run could not be started, nothing is written.

    SettingError: `run` is given together with arguments for a new run, or `update_freq` is out of
    its range.
    InstallationError, before training: `wandb` is not installed.

    >>> logger = WandbLogger("digits", name="first", tags=["v2"], update_freq=100)
    """

    phase: ClassVar[str] = "logger"
    state_attributes = {"run_id": optional(RUN_ID)}

    @check_arguments
    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        update_freq: Union[str, int] = "epoch",
        parameters: Mapping[str, Any] | None = None,
        log_model: bool = False,
        **settings: Any,
    ) -> None:
        require_frequency(
            "WandbLogger needs update_freq to be 'epoch', 'batch' or a number >= 1", update_freq
        )
        self.project = project
        self.run = run
        self.update_freq = update_freq
        self.parameters = dict(parameters or {})
        self.log_model = log_model
        self.settings = settings
        if run is not None and self._init_arguments():
            raise SettingError(
                "WandbLogger got run= (a run that was already started) and arguments for a new"
                f" run: {', '.join(self._init_arguments())}. Pass only one of the two."
            )
        self._guard = WriteGuard("WandbLogger", "the run", (Exception,))
        self._active: Any = None
        self._owns_run = False
        self._exit_code = FAILED
        self._defined: set[str] = set()  # figures whose horizontal axis is defined in W&B
        self._rate = 0.0
        self._written_step = 0
        self.reset()

    @property
    def state_key(self) -> str:
        return f"WandbLogger({self.project}, {self.settings.get('name')})"

    def reset(self) -> None:
        self.run_id: str | None = None

    def overrides(self, hook: str) -> bool:
        by_batch = self.update_freq != "epoch"
        return super().overrides(hook) and (by_batch or not hook.startswith("on_train_batch"))

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise InstallationError(
                "WandbLogger needs Weights & Biases: pip install onnxfit[wandb]."
            ) from None
        self._exit_code = FAILED
        self._defined = set()
        self._written_step = self.trainer.global_step
        self._guard.reset()
        with self._guard:
            self._begin(wandb)

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        # Read the rate now: at the end of the batch, a schedule has already set the next rate.
        self._rate = self.trainer.learning_rate

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        step = self.trainer.global_step
        every = self.update_freq if isinstance(self.update_freq, int) else 1
        if step == self._written_step or step % every:
            return
        self._written_step = step
        figures = {
            name if name == "batch_loss" else f"batch_{name}": value
            for name, value in logs.items()
            if name != "loss"  # the mean since the epoch began
        }
        figures["batch_learning_rate"] = self._rate
        self._log(figures, "global_step", step)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._log(dict(logs), "epoch", epoch + 1)

    def on_train_end(self, logs: Logs) -> None:
        self._exit_code = FINISHED
        if self.log_model and self._active is not None:
            with self._guard, tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                self.trainer.export(path)
                name = f"run-{self._active.id}-model"
                self._active.log_artifact(str(path), name=name, type="model")

    def on_exception(self, exception: BaseException) -> None:
        interrupted = isinstance(exception, KeyboardInterrupt)
        self._exit_code = INTERRUPTED if interrupted else FAILED

    def on_close(self) -> None:
        super().on_close()
        run = self._active
        self._active = None
        if run is not None and self._owns_run:
            with self._guard:
                run.finish(exit_code=self._exit_code)

    def _init_arguments(self) -> dict[str, Any]:
        """Return the arguments that the user gave for a new run."""
        project = {} if self.project is None else {"project": self.project}
        return {**project, **self.settings}

    def _begin(self, wandb: Any) -> None:
        """Start a run, or write the parameters to a run that is already active."""
        others = {"epochs": self.params["epochs"], **self.parameters}
        config = hyperparameters(self.trainer, others)
        arguments = self._init_arguments()
        run = wandb.run if self.run is None else self.run
        if run is None:
            config |= arguments.pop("config", None) or {}
            if self.run_id is not None:
                arguments = {"id": self.run_id, "resume": "allow", **arguments}
            run = wandb.init(config=config, **arguments)
            self._owns_run = True
        else:
            if arguments:
                warn_user(
                    f"WandbLogger writes to the active run {run.id!r} and ignores"
                    f" {', '.join(arguments)}. To start a new run, finish the active run before"
                    " fit.",
                    UserWarning,
                )
            run.config.update(config, allow_val_change=True)
            self._owns_run = False
        self.run_id = run.id
        self._active = run

    def _log(self, figures: dict[str, float], axis: str, position: int) -> None:
        """Write figures over the axis `axis`, at `position`.

        W&B's own step is not set: W&B ignores figures with a smaller step than the last one, and
        other calls of `wandb.log` increase that step.
        """
        if self._active is None:
            return
        with self._guard:
            for name in figures:
                if name not in self._defined:
                    self._active.define_metric(name, step_metric=axis)
                    self._defined.add(name)
            self._active.log({**figures, axis: position})
