"""A monitored metric that can never exist, and one that may."""

import warnings

import numpy as np
import pytest

from onnxfit import SettingError
from onnxfit.callbacks import (
    Callback,
    DeviceStats,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ReduceLROnPlateau,
    ThresholdStop,
)
from tests.callbacks.helpers import X, Y, line


def best(monitor, **settings):
    return ModelCheckpoint("best", monitor=monitor, save_best_only=True, **settings)


WATCHING = {
    "EarlyStopping": EarlyStopping,
    "ReduceLROnPlateau": ReduceLROnPlateau,
    "ThresholdStop": lambda monitor: ThresholdStop(monitor, threshold=-1.0),
    "save_best_only": best,
    "top_k": lambda monitor: ModelCheckpoint("{epoch}", monitor=monitor, top_k=1),
    "initial_value_threshold": lambda monitor: ModelCheckpoint(
        "{epoch}", monitor=monitor, initial_value_threshold=9.0
    ),
}
every_watcher = pytest.mark.parametrize("watcher", WATCHING)


class Score(Callback):
    def on_epoch_end(self, epoch, logs):
        self.trainer.log("score", epoch)


class ThatLogs(EarlyStopping):
    def on_epoch_begin(self, epoch, logs): ...


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trainer():
    return line(metrics=["mae"])


def fit(trainer, *callbacks, **settings):
    return trainer.fit(X, Y, callbacks=callbacks, verbose=0, **settings)


@every_watcher
@pytest.mark.parametrize(
    ("monitor", "settings", "message"),
    [
        (
            "val_los",
            {"validation_data": (X, Y)},
            r"Did you mean 'val_loss'\? It computes loss, mae",
        ),
        ("val_loss", {}, "no validation data. Pass validation_data or validation_split, or"),
        ("lr", {}, "which this fit never computes"),
        ("MAE", {}, "Did you mean 'mae'"),
    ],
)
def test_a_metric_that_can_never_exist_is_refused(trainer, watcher, monitor, settings, message):
    before = trainer.get_weights(), trainer.global_step, trainer.history
    with pytest.raises(SettingError, match=message) as refused:
        fit(trainer, WATCHING[watcher](monitor), **settings)
    assert len(str(refused.value).splitlines()) <= 4
    assert (trainer.global_step, trainer.history) == before[1:]
    np.testing.assert_equal(trainer.get_weights(), before[0])


@every_watcher
@pytest.mark.parametrize("monitor", ["loss", "mae", "learning_rate"])
def test_a_metric_of_training_is_taken(trainer, watcher, monitor):
    fit(trainer, WATCHING[watcher](monitor))


@every_watcher
@pytest.mark.parametrize(
    ("monitor", "others", "settings"),
    [
        ("val_mae", [], {"validation_data": (X, Y), "validation_freq": 2, "epochs": 2}),
        ("score", [Score()], {}),
        ("any", [LambdaCallback(on_train_end=lambda logs: None)], {}),
        ("any", [ThatLogs("loss")], {}),
        ("memory_megabytes", [DeviceStats()], {}),
    ],
)
def test_a_metric_that_may_come_is_waited_for(trainer, watcher, monitor, others, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(trainer, *others, WATCHING[watcher](monitor), **settings)


def test_every_other_checkpoint_may_name_what_it_likes(trainer):
    fit(trainer, ModelCheckpoint("{epoch}", monitor="foo"))


def test_batches_have_figures_of_their_own(trainer):
    fit(trainer, best("batch_loss", save_freq=1))
    fit(trainer, LearningRateMonitor(), best("lr", save_freq=1))
    with pytest.raises(SettingError, match=r"not after batches\. Save after epochs"):
        fit(trainer, best("val_loss", save_freq=1), validation_data=(X, Y))
    with pytest.raises(SettingError, match="which this fit never computes"):
        fit(trainer, best("batch_loss"))


def test_the_warning_of_an_absent_metric_points_at_the_call_of_fit(trainer):
    with pytest.warns(UserWarning, match="which this epoch did not compute") as warned:
        fit(trainer, Score(), EarlyStopping("other"))
    assert [warning.filename for warning in warned] == [__file__]
