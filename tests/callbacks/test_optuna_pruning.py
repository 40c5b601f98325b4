"""OptunaPruning, against a trial that writes down its calls, and against Optuna where installed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from onnxfit.callbacks import Callback, CSVLogger, LambdaCallback, OptunaPruning
from onnxfit.errors import InstallationError, SettingError
from tests.callbacks.helpers import Recorder, Script, X, Y, fit, line, rows, run, same


class Trial:
    """A trial that is pruned once it was told of so many figures."""

    def __init__(self, pruned_after=None, directions=("minimize",)):
        self.reported = []
        self.pruned_after = pruned_after
        self.study = SimpleNamespace(directions=directions)

    def report(self, value, step):
        self.reported.append((step, value))

    def should_prune(self):
        return len(self.reported) == self.pruned_after


@pytest.fixture
def optuna(monkeypatch):
    module = ModuleType("optuna")
    module.TrialPruned = type("TrialPruned", (Exception,), {})
    monkeypatch.setitem(sys.modules, "optuna", module)
    return module


def test_every_epoch_with_the_figure_is_reported(optuna):
    trial = Trial()
    with pytest.warns(
        UserWarning, match="OptunaPruning monitors 'val_loss', which this epoch did not compute"
    ):
        run([3.0, None, 2.0], OptunaPruning(trial))
    assert trial.reported == [(0, 3.0), (2, 2.0)]


def test_a_pruned_trial_ends_after_its_epoch(optuna, tmp_path):
    raised = []

    class Watching(Callback):
        def on_exception(self, exception):
            raised.append(exception)

    on, script = line(), Script([3.0, 4.0, 5.0])
    pruning, log = OptunaPruning(Trial(pruned_after=2)), CSVLogger(tmp_path / "log.csv")
    recorder = Recorder()
    recorder.phase = "logger"
    with pytest.raises(optuna.TrialPruned, match="pruned at epoch 2: val_loss is 4") as pruned:
        fit(pruning, script, log, recorder, Watching(), on=on, epochs=3)
    assert raised == [pruned.value]
    # loggers have the epoch, and the weights are those of its end
    assert [row["val_loss"] for row in rows(tmp_path / "log.csv")] == ["3.0", "4.0"]
    assert recorder.hooks()[-3:] == ["epoch_end1", "exception", "close"]
    assert on.history.history["val_loss"] == [3.0, 4.0]
    assert same(on.get_weights(), script.weights[-1])
    assert on.stop_reason == "OptunaPruning: pruned at epoch 2: val_loss is 4."
    # the trainer and the callback serve another fit
    pruning.trial = Trial()
    fit(pruning, Script([1.0]), on=on)
    assert on.history.history["val_loss"] == [1.0]


def test_what_cannot_be_pruned_is_refused_before_training(optuna, monkeypatch):
    on = line()
    with pytest.raises(SettingError, match=r"one objective.* has 2 directions"):
        fit(OptunaPruning(Trial(directions=("minimize", "maximize"))), on=on)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InstallationError, match=r"pip install onnxfit\[optuna\]"):
        fit(OptunaPruning(Trial()), on=on)
    assert on.global_step == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_real_optuna_prunes_what_is_worse_than_the_median():
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    on = line()
    start, closed = on.get_state(), []

    def objective(trial):
        rate = trial.suggest_categorical("rate", [0.1, 0.001])
        on.set_state(start)
        on.learning_rate = rate
        closing = LambdaCallback(on_close=lambda: closed.append(trial.number))
        history = on.fit(
            X, Y, epochs=4, verbose=0, callbacks=[OptunaPruning(trial, monitor="loss"), closing]
        )
        return history.history["loss"][-1]

    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(1, 1))
    for rate in (0.1, 0.001, 0.1):
        study.enqueue_trial({"rate": rate})
    study.optimize(objective, n_trials=3)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert [list(trial.intermediate_values) for trial in study.trials] == [
        [0, 1, 2, 3],
        [0, 1],
        [0, 1, 2, 3],
    ]
    assert closed == [0, 1, 2]
    several = optuna.create_study(directions=["minimize", "minimize"])
    with pytest.raises(SettingError, match="2 directions"):
        on.fit(X, Y, verbose=0, callbacks=OptunaPruning(several.ask()))
