"""Write a run to MLflow; imported when training begins."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from onnxfit.callbacks.callback import StatefulCallback
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.tensorboard import _name
from onnxfit.errors import InstallationError

__all__ = ["MLflowLogger"]


class MLflowLogger(StatefulCallback):
    """Makes every `fit` a run of MLflow: parameters where it begins, every epoch's figures as
    metrics at step `epoch`.

    - `experiment`: its name; it is made if there is none. `run_name`, `tags`: the run's.
    - `tracking_uri`: a server, or a database such as "sqlite:///mlflow.db"; None for what MLflow is
      set to.
    - `parameters`: name -> value, written besides optimizer, learning rate, loss, batch size and
      epochs.
    - `log_model`: where training ends normally, the inference model as the artifact `model.onnx`.

    The run ends as FINISHED, as FAILED after an exception, or as KILLED after Ctrl-C. A fit that
    resumes goes on with its run. A character that MLflow has not in names becomes `_`. MLflow's own
    active run is left alone. `run_id` is the run's. InstallationError, before training: `mlflow` is
    not installed.
    """

    phase: ClassVar[str] = "logger"
    remembered = ("run_id",)

    def __init__(
        self,
        experiment: str = "Default",
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
        client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        self._status = "FAILED"
        if self.run_id is None:
            found = client.get_experiment_by_name(self.experiment)
            experiment_id = (
                client.create_experiment(self.experiment) if found is None else found.experiment_id
            )
            self.run_id = client.create_run(
                experiment_id, tags=self.tags, run_name=self.run_name
            ).info.run_id
            for name, value in self._parameters().items():
                client.log_param(self.run_id, _allowed(name), value)
        else:
            client.update_run(self.run_id, status="RUNNING")
        self._client = client

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        for name, value in logs.items():
            self._client.log_metric(self.run_id, _allowed(name), value, step=epoch)

    def on_train_end(self, logs: Logs) -> None:
        self._status = "FINISHED"
        if self.log_model:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                self.trainer.export(path)
                self._client.log_artifact(self.run_id, str(path))

    def on_exception(self, exception: BaseException) -> None:
        self._status = "KILLED" if isinstance(exception, KeyboardInterrupt) else "FAILED"

    def on_close(self) -> None:
        super().on_close()
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self.run_id, status=self._status)

    def _parameters(self) -> dict[str, Any]:
        trainer = self.trainer
        rate = trainer.optimizer.learning_rate
        known = {
            "optimizer": type(trainer.optimizer).__name__,
            "learning_rate": repr(rate) if callable(rate) else float(rate),
            "loss": _name(trainer.loss),
            "batch_size": trainer.batch_size,
            "epochs": self.params["epochs"],
        }
        return {
            name: value for name, value in {**known, **self.parameters}.items() if value is not None
        }


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)
