"""What a trainer keeps between steps: learning rate, window, state, and trial steps that undo all."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import Callback, LambdaCallback
from onnxfit.errors import DataError, MissingAttributeError, SettingError, StepError
from onnxfit.metrics import MeanSquaredError, Metric
from onnxfit.optimizers import SGD, Adam
from onnxfit.schedules import Exponential
from tests.helpers import column
from tests.models import linear

X, Y = column(1, 2, 3, 4), column(0, 0, 0, 0)


def new(**settings: Any) -> Trainer:
    return Trainer(linear(w=1), loss="mse", **{"optimizer": 0.01, **settings})


def fit(trainer: Trainer, *callbacks: Callback, **settings: Any) -> Trainer:
    defaults = {"batch_size": 1, "shuffle": False, "verbose": 0}
    trainer.fit(X, Y, callbacks=list(callbacks), **{**defaults, **settings})
    return trainer


class Interrupted(BaseException):
    pass


class InterruptedAfter(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if batch == self.batch:
            raise Interrupted


# ---------------------------------------------------------------- learning rate


@pytest.mark.parametrize("rate", [np.inf, -np.inf, np.nan, -0.1, -1e-30])
def test_a_learning_rate_that_is_refused_changes_nothing(rate: float) -> None:
    trainer = new()
    before = trainer.get_state()
    with pytest.raises(SettingError, match="learning_rate must be a finite number >= 0, got"):
        trainer.learning_rate = rate
    assert trainer.learning_rate == 0.01
    np.testing.assert_equal(trainer.get_state(), before)
    fit(trainer)
    assert trainer.history.history["learning_rate"] == [0.01]


def test_a_learning_rate_of_zero_and_one_that_a_schedule_drives() -> None:
    trainer = new()
    trainer.learning_rate = 0
    assert trainer.learning_rate == 0
    trainer = new(optimizer=SGD(Exponential(0.1, 1, 0.5)), accumulate=2)
    with pytest.raises(TypeError, match="follows the schedule"):
        trainer.learning_rate = 0.1
    trainer.train_on_batch(X, Y)
    assert trainer.learning_rate == 0.1  # no update yet
    trainer.train_on_batch(X, Y)
    assert trainer.learning_rate == 0.05


def test_the_learning_rate_is_part_of_the_state() -> None:
    trainer = new()
    state = trainer.get_state()
    trainer.learning_rate = 0.5
    trainer.set_state(state)
    assert trainer.learning_rate == 0.01
    with pytest.raises(SettingError, match="the learning rate follows a schedule"):
        new(optimizer=SGD(Exponential(0.1, 1, 0.5))).set_state(state)
    assert trainer.learning_rate == 0.01


# ---------------------------------------------------------------- monitors


def test_a_metric_says_itself_which_way_is_better_and_its_validation_too() -> None:
    class Accuracy2(MeanSquaredError):
        """A name that sounds like more is better."""

    trainer = new(metrics=[Accuracy2(), "r2"])
    assert trainer.monitor_mode("accuracy2") == trainer.monitor_mode("val_accuracy2") == "min"
    assert trainer.monitor_mode("val_r2") == "max"
    assert trainer.monitor_mode("val_accuracy") == "max"
    assert trainer.monitor_mode("val_loss") == "min"


# ---------------------------------------------------------------- windows


def test_accumulate_needs_the_graphs_for_it() -> None:
    trainer = new()
    with pytest.raises(SettingError, match="needs a Trainer that was created with accumulate=2"):
        trainer.accumulate = 2
    assert trainer.accumulate == 1


def test_counters_of_batches_updates_and_rows() -> None:
    trainer = fit(new(accumulate=3), batch_size=3, epochs=3)  # two batches are no full window
    assert (trainer.global_batch, trainer.global_step, trainer.samples_seen) == (6, 3, 12)
    assert trainer.epoch == 3


def test_a_window_is_part_of_the_state() -> None:
    trainer = new(accumulate=3)
    trainer.train_on_batch(X, Y)
    state = trainer.get_state()
    rest = []
    for _ in range(2):
        trainer.set_state(state)
        for _ in range(2):
            trainer.train_on_batch(X, Y)
        rest.append((trainer.global_step, trainer.get_weights()["w"].item()))
    assert rest[0] == rest[1]
    assert rest[0][0] == 1


# ---------------------------------------------------------------- trial steps


class Trials(Callback):
    """Try some steps before training, and write down the state before and after."""

    def __init__(self, *rates: float, **settings: Any) -> None:
        self.rates, self.settings = rates, settings
        self.losses: list[float] = []
        self.states: list[Any] = []

    def on_train_begin(self, logs: Any) -> None:
        self.states.append(self.trainer.get_state())
        with closing(self.trainer.trial_steps(self.rates, **self.settings)) as steps:
            self.losses += list(steps)
        self.states.append(self.trainer.get_state())


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_trial_steps_leave_everything_as_it_was(accumulate: int) -> None:
    trials = Trials(0.1, 0.01, 0.001)
    plain, tried = (
        Trainer(linear(w=1), loss="mse", optimizer=Adam(0.1), accumulate=accumulate)
        for _ in range(2)
    )
    fit(plain, epochs=2)
    fit(tried, trials, epochs=2)
    assert len(trials.losses) == 3
    np.testing.assert_equal(trials.states[0], trials.states[1])
    np.testing.assert_equal(tried.get_state(), plain.get_state())
    assert tried.train_losses_ == plain.train_losses_


def test_trial_steps_leave_a_window_under_way_as_it_was(tmp_path: Path) -> None:
    """A fit that resumes within a window averages with the gradients from before."""

    def resumed(*callbacks: Callback) -> Trainer:
        trainer = new(optimizer=Adam(0.1), accumulate=3)
        with pytest.raises(Interrupted):
            fit(trainer, InterruptedAfter(1), epochs=2)
        return fit(Trainer.load(trainer.save(tmp_path / "c")), *callbacks, epochs=2)

    trials = Trials(0.1, 0.1, 0.1, 0.1)
    plain, tried = resumed(), resumed(trials)
    assert trials.states[0]["counters"]["window"] == 2
    np.testing.assert_equal(trials.states[0], trials.states[1])
    np.testing.assert_equal(tried.get_state(), plain.get_state())
    # the trials begin with a window of their own: no update before its third batch
    assert trials.losses[:3] == [1, 4, 9]
    assert trials.losses[3] != 16


def test_trial_steps_call_no_hook_and_gradients_come_back() -> None:
    seen: list[float] = []

    class Sees(Callback):
        def on_gradients(self, gradients: dict[str, Any]) -> None:
            seen.append(gradients["w"].item())

    trials = Trials(0.1, 0.1)
    fit(new(backend="forward_backward"), Sees(), trials)
    assert len(trials.losses) == 2
    assert len(seen) == 4


@pytest.mark.parametrize(("size", "losses"), [(3, 1), (4, 1), (5, 0), (2, 2), (None, 4)])
def test_trial_batches_are_whole(size: int | None, losses: int) -> None:
    trials = Trials(*[0.0] * 9, batch_size=size)
    trainer = fit(new(optimizer=0.0), trials)
    assert len(trials.losses) == losses
    assert trainer.global_batch == 4


def test_graphs_of_trial_batches_are_discarded() -> None:
    trainer = new()
    fit(trainer, Trials(0.0, batch_size=3), batch_size=2)
    shapes = trainer._training.backend.caches["train"].exact
    assert len(shapes) == 1
    trainer.fit(X, Y, batch_size=3, verbose=0)
    assert len(shapes) == 3  # of 3 rows, and of the one that is left


def test_trial_steps_need_data_that_can_be_iterated_again() -> None:
    trainer = new()
    with pytest.raises(DataError, match="needed for 2 epochs"):
        trainer.fit(iter([(X, Y)]), callbacks=[Trials(0.1)], verbose=0)
    assert trainer.global_step == 0
    with pytest.raises(SettingError, match="on_train_begin and on_train_end"):
        next(trainer.trial_steps([0.1]))


# ---------------------------------------------------------------- batch size


def test_callbacks_know_the_number_of_batches_of_a_batch_size_that_was_set() -> None:
    steps = []

    def set_size(logs: Any) -> None:
        trainer.batch_size = 3

    trainer = new()
    watch = LambdaCallback(
        on_train_begin=set_size, on_epoch_begin=lambda e, logs: steps.append(watch.params["steps"])
    )
    fit(trainer, watch)
    assert steps == [2]
    assert trainer.global_batch == 2


# ---------------------------------------------------------------- undoing


def test_revert_step_after_set_weights_does_nothing() -> None:
    """The step that it could undo is no longer the last change."""
    trainer = new(optimizer=Adam(0.1))
    trainer.train_on_batch(X, Y)
    trainer.set_weights({"w": column(5)})
    state = trainer.get_state()
    trainer.revert_step()
    np.testing.assert_equal(trainer.get_state(), state)
    assert trainer.get_weights()["w"].item() == 5


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_revert_step_after_a_failed_step_does_nothing(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed run may have overwritten the values before the last step."""
    trainer = new(optimizer=Adam(0.1), backend=backend)
    trainer.train_on_batch(X, Y)
    state = trainer.get_state()
    session = trainer._training.backend.last_update
    run = session._run

    def fail_late(*arguments: Any) -> None:
        run(*arguments)
        raise RuntimeError("a node at the end failed")

    with monkeypatch.context() as broken:
        broken.setattr(session, "_run", fail_late)
        with pytest.raises(StepError):
            trainer.train_on_batch(X * 2, Y)
    np.testing.assert_equal(trainer.get_state(), state)
    trainer.revert_step()
    np.testing.assert_equal(trainer.get_state(), state)


def test_a_metric_that_fails_undoes_the_step() -> None:
    class Fails(Metric):
        def reset(self) -> None:
            pass

        def update(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            raise ZeroDivisionError

        def result(self) -> float:
            return 0.0

    trainer = new(metrics=[Fails()])
    with pytest.raises(ZeroDivisionError):
        trainer.train_on_batch(X, Y)
    assert (trainer.get_weights()["w"].item(), trainer.global_batch) == (1, 0)


def test_predictions_follow_every_change_of_the_weights() -> None:
    trainer = new()
    assert trainer.predict(column(3)).item() == 3
    trainer.set_weights({"w": column(2)})
    assert trainer.predict(column(3)).item() == 6
    trainer.train_on_batch(X, Y)
    after = trainer.predict(column(3)).item()
    assert after != 6
    trainer.revert_step()
    assert trainer.predict(column(3)).item() == 6


def test_predictions_of_several_batches_are_joined_in_their_order() -> None:
    trainer = new()
    np.testing.assert_array_equal(trainer.predict(X, batch_size=3), X)
    np.testing.assert_array_equal(trainer.predict(X, batch_size=1), X)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lr", "learning_rate is the learning rate of the next update, and can be set"),
        ("callbacks", "takes the callbacks"),
        ("trainable", "There is no mode to set"),
        ("learnig_rate", "Did you mean 'learning_rate'"),
        ("stop_trainning", "Did you mean 'stop_training'"),
        ("batchsize", "Did you mean 'batch_size'"),
        ("epochs", "Did you mean 'epoch'"),
    ],
)
def test_setting_an_attribute_that_would_change_nothing_is_refused(name: str, message: str) -> None:
    trainer = Trainer(linear(), loss="mse")
    with pytest.raises(MissingAttributeError, match=message):
        setattr(trainer, name, 0.1)
    assert name not in vars(trainer)


def test_other_attributes_can_be_set() -> None:
    class Own(Trainer):
        def __init__(self) -> None:
            super().__init__(linear(), loss="mse")
            self.figures = [1]

    trainer = Own()
    trainer.figures, trainer.notes, trainer._private = [2], "mine", 3
    assert (trainer.figures, trainer.notes, trainer._private) == ([2], "mine", 3)
    for name, value in vars(trainer).copy().items():
        setattr(trainer, name, value)
