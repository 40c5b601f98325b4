"""MLflowLogger, against a client that writes down its calls."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from onnxfit.callbacks import BackupAndRestore, LambdaCallback, MLflowLogger
from onnxfit.errors import InstallationError
from tests.callbacks.helpers import fit, line


class MlflowClient:
    """What MLflow's client does, for a test to look at."""

    calls: list

    def __init__(self, tracking_uri=None):
        self.calls.append(("client", tracking_uri))

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="7") if name == "known" else None

    def create_experiment(self, name):
        self.calls.append(("experiment", name))
        return "8"

    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        self.calls.append(("run", experiment_id, tags, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def update_run(self, run_id, status=None, name=None):
        self.calls.append(("update", run_id, status))

    def log_param(self, run_id, key, value):
        self.calls.append(("param", key, value))

    def log_metric(self, run_id, key, value, timestamp=None, step=None):
        self.calls.append(("metric", key, value, step))

    def log_artifact(self, run_id, local_path):
        self.calls.append(("artifact", Path(local_path).name, Path(local_path).read_bytes()))

    def set_terminated(self, run_id, status=None, end_time=None):
        self.calls.append(("end", run_id, status))


@pytest.fixture
def mlflow(monkeypatch):
    calls: list = []
    module = ModuleType("mlflow")
    module.MlflowClient = type("MlflowClient", (MlflowClient,), {"calls": calls})
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return calls


def test_a_run_of_mlflow(mlflow):
    odd = LambdaCallback(on_epoch_end=lambda epoch, logs: odd.trainer.log("a(b)", 1.0))
    logger = MLflowLogger(
        "mine",
        run_name="first",
        tracking_uri="http://tracking",
        tags={"k": "v"},
        parameters={"note": 5},
        log_model=True,
    )
    on = fit(logger, odd, epochs=2)
    assert mlflow[:3] == [
        ("client", "http://tracking"),
        ("experiment", "mine"),
        ("run", "8", {"k": "v"}, "first"),
    ]
    params = {call[1]: call[2] for call in mlflow if call[0] == "param"}
    assert params == {
        "optimizer": "SGD",
        "learning_rate": 0.1,
        "loss": "mse",
        "batch_size": 2,
        "epochs": 2,
        "note": 5,
    }
    metrics = [call[1:] for call in mlflow if call[0] == "metric"]
    assert [(value, step) for name, value, step in metrics if name == "loss"] == [
        (value, epoch) for epoch, value in enumerate(on.history.history["loss"], 1)
    ]
    assert {name for name, *_ in metrics} == {"loss", "learning_rate", "a_b_"}
    assert mlflow[-2:] == [
        ("artifact", "model.onnx", on.export().SerializeToString()),
        ("end", "r", "FINISHED"),
    ]


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("no"), "FAILED"), (KeyboardInterrupt(), "KILLED")]
)
def test_a_run_of_mlflow_ends_as_training_ended_and_a_resumed_fit_goes_on_with_it(
    mlflow, tmp_path, error, status
):
    def fail(epoch, logs):
        if epoch == 1:
            raise error

    def callbacks():
        return [MLflowLogger("known"), BackupAndRestore(tmp_path / "b")]

    with pytest.raises(type(error)):
        fit(*callbacks(), LambdaCallback(on_epoch_begin=fail), epochs=2)
    assert mlflow[1][:2] == ("run", "7")
    assert mlflow[-1] == ("end", "r", status)
    mlflow.clear()
    fit(*callbacks(), epochs=2)
    assert ("update", "r", "RUNNING") in mlflow
    assert not any(call[0] in ("run", "param") for call in mlflow)
    assert mlflow[-1] == ("end", "r", "FINISHED")


def test_without_mlflow_one_is_told_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    on = line()
    with pytest.raises(InstallationError, match=r"pip install onnxfit\[mlflow\]"):
        fit(MLflowLogger(), on=on)
    assert on.global_step == 0
