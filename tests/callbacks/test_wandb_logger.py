"""WandbLogger, against a module that writes down its calls, and against W&B where installed."""

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from onnxfit.callbacks import BackupAndRestore, LambdaCallback, WandbLogger
from onnxfit.errors import CheckpointError, InstallationError, SettingError
from onnxfit.optimizers import SGD
from onnxfit.schedules import Cosine
from tests.callbacks.helpers import fit, line


class Run:
    """What a run of W&B does, for a test to look at; every argument is named as there."""

    def __init__(self, calls, run_id=None):
        self.id = run_id or "new"
        self.calls = calls
        self.config = SimpleNamespace(
            update=lambda d, allow_val_change=None: calls.append(("config", d, allow_val_change))
        )

    def define_metric(self, name, step_metric=None):
        self.calls.append(("axis", name, step_metric))

    def log(self, data, step=None, commit=None):
        assert step is None
        self.calls.append(("log", data))

    def log_artifact(self, artifact_or_path, name=None, type=None):  # noqa: A002
        path = Path(artifact_or_path)
        self.calls.append(("artifact", name, type, path.name, path.read_bytes()))

    def finish(self, exit_code=None):
        self.calls.append(("finish", self.id, exit_code))

    def logged(self):
        return [call[1] for call in self.calls if call[0] == "log"]


@pytest.fixture
def wandb(monkeypatch):
    def init(project=None, config=None, id=None, name=None, tags=None, resume=None):  # noqa: A002
        module.calls.append(("init", project, config, id, name, tags, resume))
        module.last = Run(module.calls, id)
        return module.last

    module = ModuleType("wandb")
    module.calls = []
    module.run = None
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def kinds(calls):
    return [call[0] for call in calls]


def test_a_run_of_wandb(wandb):
    settings = {"name": "first", "tags": ["k"], "config": {"seed": 3}}
    logger = WandbLogger("mine", parameters={"note": 5}, log_model=True, **settings)
    on = fit(logger, epochs=2)
    config = {
        "optimizer": "SGD",
        "learning_rate": 0.1,
        "loss": "mse",
        "batch_size": 2,
        "epochs": 2,
        "note": 5,
        "seed": 3,
    }
    assert wandb.calls[0] == ("init", "mine", config, None, "first", ["k"], None)
    assert {call[1:] for call in wandb.calls if call[0] == "axis"} == {
        ("loss", "epoch"),
        ("learning_rate", "epoch"),
    }
    assert wandb.last.logged() == [
        {"loss": loss, "learning_rate": 0.1, "epoch": epoch}
        for epoch, loss in enumerate(on.history.history["loss"], 1)
    ]
    assert wandb.calls[-2:] == [
        ("artifact", "run-new-model", "model", "model.onnx", on.export().SerializeToString()),
        ("finish", "new", 0),
    ]
    assert kinds(wandb.calls).count("axis") == 2  # each figure once
    assert logger.run_id == "new"


@pytest.mark.parametrize(("update_freq", "steps"), [("batch", [1, 2, 3, 4]), (3, [3])])
def test_figures_of_batches_have_the_updates_as_their_axis(wandb, update_freq, steps):
    rate = Cosine(0.1, 8)
    fit(WandbLogger(update_freq=update_freq), on=line(SGD(rate)), epochs=2)
    of_batches = [one for one in wandb.last.logged() if "global_step" in one]
    assert [one["global_step"] for one in of_batches] == steps
    assert set(of_batches[0]) == {
        "batch_loss",
        "batch_learning_rate",
        "global_step",
    }
    for one in of_batches:
        # the rate that this batch was trained with
        expected = 0.05 * (1 + math.cos(math.pi * (one["global_step"] - 1) / 8))
        assert one["batch_learning_rate"] == pytest.approx(expected)
    assert ("axis", "batch_loss", "global_step") in wandb.calls
    assert sum("epoch" in one for one in wandb.last.logged()) == 2


@pytest.mark.parametrize("given", [True, False], ids=["given", "active"])
def test_a_run_that_the_user_has_begun_is_not_finished(wandb, given):
    run = Run(wandb.calls, "mine")
    if not given:
        wandb.run = run
    logger = WandbLogger(run=run if given else None)
    fit(logger)
    assert kinds(wandb.calls) == ["config", "axis", "axis", "log"]
    assert wandb.calls[0][1]["loss"] == "mse"
    assert wandb.calls[0][2] is True
    assert logger.run_id == "mine"


def test_arguments_that_an_active_run_cannot_take_are_named(wandb):
    wandb.run = Run(wandb.calls, "mine")
    with pytest.warns(UserWarning, match="active run 'mine' and ignores project, name"):
        fit(WandbLogger("digits", name="first"))
    with pytest.raises(SettingError, match=r"got run= .* new run: name"):
        WandbLogger(run=wandb.run, name="first")
    with pytest.raises(
        SettingError, match=r"WandbLogger needs update_freq to be 'epoch', .* got 0"
    ):
        WandbLogger(update_freq=0)


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("no"), 1), (KeyboardInterrupt(), 255)])
def test_a_run_ends_as_training_ended_and_a_resumed_fit_goes_on_with_it(
    wandb, tmp_path, error, code
):
    def fail(epoch, logs):
        if epoch == 1:
            raise error

    def callbacks():
        return [WandbLogger("p"), BackupAndRestore(tmp_path / "b")]

    with pytest.raises(type(error)):
        fit(*callbacks(), LambdaCallback(on_epoch_begin=fail), epochs=2)
    assert wandb.calls[-1] == ("finish", "new", code)
    wandb.calls.clear()
    fit(*callbacks(), epochs=2)
    init = wandb.calls[0]
    assert (init[1], init[3], init[6]) == ("p", "new", "allow")
    assert wandb.calls[-1] == ("finish", "new", 0)
    with pytest.raises(CheckpointError, match="run_id"):
        WandbLogger().load_state_dict({"run_id": "../elsewhere"})


def test_a_failure_of_wandb_is_a_warning_and_training_goes_on(wandb):
    def refuse(**settings):
        raise RuntimeError("no API key")

    init, wandb.init = wandb.init, refuse
    with pytest.warns(RuntimeWarning, match="WandbLogger cannot write 'the run': no API key"):
        assert fit(WandbLogger(log_model=True), epochs=2).epoch == 2
    assert wandb.calls == []
    wandb.init = init

    class Failing(Run):
        def log(self, data, step=None, commit=None):
            raise OSError("disk full")

    wandb.run = Failing(wandb.calls)
    with pytest.warns(RuntimeWarning, match="disk full") as warned:
        fit(WandbLogger(), epochs=3)
    assert len(warned) == 1


def test_without_wandb_one_is_told_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    on = line()
    with pytest.raises(InstallationError, match=r"pip install onnxfit\[wandb\]"):
        fit(WandbLogger(), on=on)
    assert on.global_step == 0


@pytest.mark.filterwarnings("ignore:::wandb", "ignore::DeprecationWarning")
def test_the_real_wandb_takes_every_call(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("DIR", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    logger = WandbLogger("digits", name="first", update_freq="batch", log_model=True)
    fit(logger, epochs=2)
    assert wandb.run is None
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")  # W&B's service fills it later
    assert file.stem == f"run-{logger.run_id}"
    run = wandb.init(project="digits", config={"batch_size": 7})
    try:
        on = fit(WandbLogger(run=run, update_freq="batch", log_model=True), epochs=2)
        assert run.summary["loss"] == on.history.history["loss"][-1]
        assert run.summary["batch_loss"] == on.last_losses[-1]
        assert (run.summary["epoch"], run.summary["global_step"]) == (1, 4)
        assert run.config["batch_size"] == 2
        run.log({"mine": 1.0})  # it is active still
    finally:
        run.finish()
