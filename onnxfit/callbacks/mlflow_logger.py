"""Write a run to MLflow, which is imported when training begins."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from onnxfit.callbacks.hyperparameters import hyperparameters
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.callbacks.write_guard import WriteGuard
from onnxfit.checks import check_arguments
from onnxfit.errors import InstallationError
from onnxfit.files import ValueType, optional

__all__ = ["MLflowLogger"]


# MLflow looks a run up by its id, which is the name of a folder in some stores.
RUN_ID = ValueType(
    "the id of an MLflow run",
    lambda value: isinstance(value, str) and bool(re.fullmatch(r"[a-zA-Z0-9][\w-]{0,255}", value)),
)


class MLflowLogger(StatefulCallback):
    """Write every `fit` as a run of MLflow: its parameters, and every epoch's metrics.

    - `experiment`: the name of the experiment, which is created if it does not exist.
    - `run_name`: the name of the run; None lets MLflow choose one.
    - `tracking_uri`: a server, or a database such as "sqlite:///mlflow.db"; None for MLflow's own
      setting.
    - `tags`: name -> value, the tags of the run.
    - `parameters`: name -> value, written in addition to optimizer, learning rate, loss, batch size
      and epochs.
    - `log_model`: if training ends normally, write the inference model as the artifact
      `model.onnx`.

    Metrics are at step `epoch`, from 1. The run ends as FINISHED, as FAILED after an exception, or
    as KILLED after Ctrl-C. A resumed fit continues its run. Characters that MLflow does not allow
    in names become `_`. MLflow's own active run is not touched. `run_id` is the id of the run.
    If the store or server fails, a warning says so, and training continues without it. If the run
    could not be created, nothing is written. InstallationError, before training: `mlflow` is not
    installed.

    >>> logger = MLflowLogger("digits", run_name="first", tags={"data": "v2"})
    """

    phase: ClassVar[str] = "logger"
    state_attributes = {"run_id": optional(RUN_ID)}

    @check_arguments
    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        log_model: bool = False,
    ) -> None:
        self.experiment = experiment
        self.run_name = run_name
        self.tracking_uri = tracking_uri
        self.tags = dict(tags or {})
        self.parameters = dict(parameters or {})
        self.log_model = log_model
        self._client: Any = None
        # MLflow raises exceptions of many libraries, depending on the kind of store.
        self._guard = WriteGuard("MLflowLogger", tracking_uri or "the tracking store", (Exception,))
        self._status = "FAILED"
        self.reset()

    @property
    def state_key(self) -> str:
        return f"MLflowLogger({self.experiment}, {self.run_name})"

    def reset(self) -> None:
        self.run_id: str | None = None

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        try:
            mlflow: Any = importlib.import_module("mlflow")
        except ImportError:
            raise InstallationError(
                "MLflowLogger needs MLflow: pip install onnxfit[mlflow]."
            ) from None
        self._status = "FAILED"
        self._guard.reset()
        with self._guard:
            client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
            if self.run_id is None:
                self._create_run(client)
            else:
                client.update_run(self.run_id, status="RUNNING")
            self._client = client

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self._client is None:
            return
        with self._guard:
            for name, value in logs.items():
                self._client.log_metric(self.run_id, _allowed(name), value, step=epoch + 1)

    def on_train_end(self, logs: Logs) -> None:
        self._status = "FINISHED"
        if self.log_model and self._client is not None:
            with self._guard, tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                self.trainer.export(path)
                self._client.log_artifact(self.run_id, str(path))

    def on_exception(self, exception: BaseException) -> None:
        self._status = "KILLED" if isinstance(exception, KeyboardInterrupt) else "FAILED"

    def on_close(self) -> None:
        super().on_close()
        if self._client is not None:
            client = self._client
            self._client = None
            with self._guard:
                client.set_terminated(self.run_id, status=self._status)

    def _create_run(self, client: Any) -> None:
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            experiment_id = client.create_experiment(self.experiment)
        else:
            experiment_id = experiment.experiment_id
        run = client.create_run(experiment_id, tags=self.tags, run_name=self.run_name)
        self.run_id = run.info.run_id
        others = {"epochs": self.params["epochs"], **self.parameters}
        settings = hyperparameters(self.trainer, others)
        for name, value in settings.items():
            client.log_param(self.run_id, _allowed(name), value)


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)
