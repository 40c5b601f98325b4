"""The loop of `fit` in one way to train; tests/test_behaviour.py has its arithmetic in every way."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import DataLoader, Trainer
from onnxfit.callbacks import Callback, LambdaCallback
from onnxfit.errors import DataError, SettingError
from onnxfit.optimizers import SGD
from onnxfit.schedules import Exponential
from onnxfit.training.position import POSITION_TYPES
from tests.builds import every_way
from tests.helpers import Recorder, column, with_changed_description
from tests.models import convolutional, linear, mlp

X, Y = column(1, 2, 3), column(0, 0, 0)


def new(**settings: Any) -> Trainer:
    return Trainer(linear(w=1), loss="mse", **{"optimizer": 0.01, **settings})


def fit(trainer: Trainer, *callbacks: Callback, **settings: Any) -> Trainer:
    defaults = {"batch_size": 1, "shuffle": False, "verbose": 0}
    trainer.fit(X, Y, callbacks=list(callbacks), **{**defaults, **settings})
    return trainer


class Interrupted(BaseException):
    pass


def raises(*_: object) -> None:
    raise Interrupted


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize(("steps", "rows"), [(1, [4]), (2, [4, 5]), (3, [4, 5, 6]), (None, 4)])
def test_validation_steps_are_a_number_of_batches(steps: int | None, rows: Any) -> None:
    data = column(4, 5, 6, 7)
    expected = np.square([4, 5, 6, 7] if rows == 4 else rows).mean()
    trainer = fit(
        new(optimizer=0.0), validation_data=(data, 0 * data), validation_steps=steps, epochs=2
    )
    assert trainer.history.history["val_loss"] == pytest.approx([expected] * 2)


@pytest.mark.parametrize("steps", [0, -1])
def test_validation_steps_are_at_least_one(steps: int) -> None:
    with pytest.raises(SettingError, match=f"validation_steps must be >= 1, got {steps}"):
        fit(new(), validation_data=(X, Y), validation_steps=steps)


@pytest.mark.parametrize("frequency", [0, -2])
def test_validation_freq_is_at_least_one(frequency: int) -> None:
    with pytest.raises(SettingError, match=f"validation_freq must be >= 1, got {frequency}"):
        fit(new(), validation_freq=frequency)


@pytest.mark.parametrize(("frequency", "epochs"), [(2, [1, 3]), ([1, 4], [0, 3]), ((5,), [])])
def test_validation_freq_is_every_nth_epoch_or_a_list_from_1(
    frequency: Any, epochs: list[int]
) -> None:
    recorder = Recorder()
    data = {"validation_data": (X, Y), "validation_freq": frequency}
    fit(new(), recorder, epochs=4, **data)
    assert [e for kind, e, logs in recorder.events if "val_loss" in logs] == epochs


def test_validation_data_for_one_epoch_of_several_may_be_an_iterator() -> None:
    def batches() -> Iterator[Any]:
        yield X, Y

    trainer = fit(new(), validation_data=batches(), validation_freq=3, epochs=4)
    assert len(trainer.history.history["val_loss"]) == 1
    with pytest.raises(DataError, match="needed for 2 epochs"):
        fit(new(), validation_data=batches(), validation_freq=2, epochs=4)


def test_the_loss_of_an_epoch_is_that_of_training_with_validation_too() -> None:
    trainer = fit(new(optimizer=0.0), validation_data=(10 * X, Y), epochs=2)
    assert trainer.train_losses_ == pytest.approx([14 / 3] * 2)
    assert trainer.epoch == 2


# ---------------------------------------------------------------- where a fit stands


def test_the_flush_of_a_short_window_takes_the_rate_of_its_last_batch() -> None:
    """Not the one that a schedule has for the update after it."""
    trainer = new(optimizer=SGD(Exponential(0.1, 1, 0.5)), accumulate=2)
    fit(trainer)
    w = 1.0
    for rate, rows in ((0.1, [1, 4]), (0.05, [9])):
        w -= rate * 2 * w * float(np.mean(rows))
    assert trainer.get_weights()["w"].item() == pytest.approx(w)
    assert trainer.history.history["learning_rate"] == pytest.approx([0.05])


def test_an_interrupted_epoch_reports_the_rate_of_its_last_step(tmp_path: Path) -> None:
    """Resumed after its last batch, there is no step left that has a rate."""

    def interrupt(batch: int, logs: Any) -> None:
        if batch == 2:
            raise Interrupted

    trainer = new(optimizer=SGD(Exponential(0.1, 1, 0.5)))
    with pytest.raises(Interrupted):
        fit(trainer, LambdaCallback(on_train_batch_end=interrupt))
    resumed = fit(Trainer.load(trainer.save(tmp_path / "c")))
    assert resumed.history.history["learning_rate"] == pytest.approx([0.025])
    assert resumed.global_step == 3


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
def test_what_is_saved_between_two_events_has_no_event_to_deliver(
    hook: str, tmp_path: Path
) -> None:
    """Loggers have seen the last event by then, and a new one is not told of it."""
    next_hook = {"on_train_batch_end": "on_train_batch_begin", "on_epoch_end": "on_epoch_begin"}
    told: list[int] = []

    class Logger(Callback):
        phase = "logger"

    class NewLogger(Logger):
        pass

    setattr(Logger, hook, lambda self, index, logs: told.append(index))

    def save(index: int, logs: Any) -> None:
        if index == 1:
            trainer.save(tmp_path / "c")
            raise Interrupted

    trainer = new()
    with pytest.raises(Interrupted):
        fit(trainer, LambdaCallback(**{next_hook[hook]: save}), Logger(), epochs=2)
    assert told == [0]
    told.clear()
    fit(Trainer.load(tmp_path / "c"), NewLogger(), epochs=2)
    assert told == ([1, 2, 0, 1, 2] if hook == "on_train_batch_end" else [1])


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
@pytest.mark.parametrize("stops", [False, True])
def test_loggers_are_told_once_of_the_event_at_which_a_checkpoint_was_written(
    hook: str, stops: bool, tmp_path: Path
) -> None:
    """What callbacks had decided in it, such as a stop, holds as well."""
    told: list[tuple[int, float]] = []

    class Monitor(Callback):
        pass

    class Saves(Callback):
        phase = "checkpoint"

    class Logger(Callback):
        phase = "logger"

    def decide(self: Callback, index: int, logs: Any) -> None:
        if stops and index == 1:
            self.trainer.stop_training, self.trainer.stop_reason = True, "enough"

    def save(self: Callback, index: int, logs: Any) -> None:
        if index == 1:
            self.trainer.save(tmp_path / "c")
            raise Interrupted

    setattr(Monitor, hook, decide)
    setattr(Saves, hook, save)
    setattr(Logger, hook, lambda self, index, logs: told.append((index, logs["loss"])))
    whole = fit(new(), Monitor(), Logger(), epochs=3)
    everything = told[:]
    told.clear()
    with pytest.raises(Interrupted):
        fit(new(), Monitor(), Saves(), Logger(), epochs=3)
    assert whole.stop_reason == ("enough" if stops else None)
    before = told[:]
    # older versions wrote the stop into the event alone
    older = with_changed_description(tmp_path / "c", without_stop)
    for checkpoint in (tmp_path / "c", older):
        told[:] = before
        resumed = fit(Trainer.load(checkpoint), Monitor(), Logger(), epochs=3)
        assert told == everything
        assert resumed.stop_reason == whole.stop_reason
        assert resumed.history.history == whole.history.history
        np.testing.assert_equal(resumed.get_state(), whole.get_state())


def without_stop(info: dict[str, Any]) -> None:
    position = info["resume"]
    del position[list(POSITION_TYPES).index("stop") :]


def test_a_checkpoint_of_a_validation_does_not_train_the_epoch_again(tmp_path: Path) -> None:
    def interrupt(logs: Any) -> None:
        trainer.save(tmp_path / "c")
        raise Interrupted

    data = {"validation_data": (X, Y), "epochs": 2}
    whole, trainer = fit(new(), **data), new()
    with pytest.raises(Interrupted):
        fit(trainer, LambdaCallback(on_test_begin=interrupt), **data)
    resumed = fit(Trainer.load(tmp_path / "c"), **data)
    assert resumed.history.history == whole.history.history
    np.testing.assert_equal(resumed.get_state(), whole.get_state())


@pytest.mark.parametrize("saves", ["on_test_begin", "on_test_batch_end", "on_test_end"])
@pytest.mark.parametrize("stops", ["on_epoch_begin", "on_train_batch_end", "on_test_begin"])
def test_a_checkpoint_of_a_validation_keeps_a_stop(stops: str, saves: str, tmp_path: Path) -> None:
    """The epoch gets its end, and no other epoch follows it."""

    def stop(*_: object) -> None:
        if trainer.epoch == 1:
            trainer.stop_training, trainer.stop_reason = True, "enough"

    def interrupt(*_: object) -> None:
        if trainer.epoch == 1:
            trainer.save(tmp_path / "c")
            raise Interrupted

    data = {"validation_data": (X, Y), "epochs": 4}
    trainer = new()
    whole = fit(trainer, LambdaCallback(**{stops: stop}), **data)
    trainer = new()
    with pytest.raises(Interrupted):
        fit(trainer, LambdaCallback(**{stops: stop}), LambdaCallback(**{saves: interrupt}), **data)
    resumed = fit(Trainer.load(tmp_path / "c"), **data)
    assert (resumed.epoch, resumed.stop_reason) == (whole.epoch, whole.stop_reason) == (2, "enough")
    assert resumed.history.history == whole.history.history
    np.testing.assert_equal(resumed.get_state(), whole.get_state())


def test_the_rest_of_an_epoch_needs_batches_of_the_same_size(tmp_path: Path) -> None:
    trainer = new()
    with pytest.raises(Interrupted):
        fit(trainer, LambdaCallback(on_train_batch_end=raises))
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    with pytest.raises(SettingError, match="after 1 batches of 1 rows"):
        fit(loaded, batch_size=2)
    assert fit(loaded).global_batch == 3
    assert fit(loaded).global_batch == 6  # there is nothing more to resume


def test_the_states_of_callbacks_are_kept_after_an_error(tmp_path: Path) -> None:
    class Counts(Callback):
        batches = 0

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.batches += 1
            if self.batches == 2:
                raise Interrupted

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batches = 10 * state["batches"]

    trainer = new()
    with pytest.raises(Interrupted):
        fit(trainer, Counts())
    counts = Counts()
    fit(Trainer.load(trainer.save(tmp_path / "c")), counts)
    assert counts.batches == 21


def test_a_fit_that_fails_before_its_first_step_leaves_the_history_of_the_last() -> None:
    trainer = fit(new(), epochs=2)
    history = trainer.history
    with pytest.raises(Interrupted):
        fit(trainer, LambdaCallback(on_epoch_begin=raises))
    assert trainer.history is history
    with pytest.raises(Interrupted):  # after a step there is a new one
        fit(trainer, LambdaCallback(on_train_batch_end=raises))
    assert trainer.history is not history


def test_a_fit_that_fails_before_its_first_step_leaves_what_was_loaded(tmp_path: Path) -> None:
    trainer = new()
    with pytest.raises(Interrupted):
        fit(trainer, LambdaCallback(on_test_begin=raises), validation_data=(X, Y), epochs=2)
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    with pytest.raises(Interrupted):
        fit(loaded, LambdaCallback(on_train_begin=raises), epochs=2)
    assert fit(loaded, epochs=2).global_batch == 6


def test_the_order_of_rows_goes_on_in_the_next_fit() -> None:
    x = column(*range(8))

    def orders(fits: int, epochs: int) -> list[float]:
        recorder, trainer = Recorder(), new(optimizer=0.0)
        for _ in range(fits):
            trainer.fit(x, 0 * x, batch_size=1, epochs=epochs, callbacks=[recorder], verbose=0)
        return recorder.logs("batch", "batch_loss")

    two_fits = orders(2, 1)
    assert two_fits == orders(1, 2)
    assert two_fits[:8] != two_fits[8:]


def test_a_stop_within_a_fit_does_not_end_the_next() -> None:
    def stop(epoch: int, logs: Any) -> None:
        trainer.stop_training, trainer.stop_reason = True, "enough"

    trainer = new()
    assert len(fit(trainer, LambdaCallback(on_epoch_end=stop), epochs=3).history.epoch) == 1
    assert trainer.stop_reason == "enough"
    assert len(fit(trainer, epochs=3).history.epoch) == 3
    assert trainer.stop_reason is None


@pytest.mark.parametrize(
    ("hook", "batches", "epochs"),
    [("on_train_begin", 0, 0), ("on_epoch_begin", 0, 1), ("on_train_batch_begin", 1, 1),
     ("on_train_batch_end", 1, 1), ("on_epoch_end", 3, 1)],
)  # fmt: skip
def test_a_stop_skips_the_batches_and_epochs_that_are_left(
    hook: str, batches: int, epochs: int
) -> None:
    def stop(*_: object) -> None:
        trainer.stop_training = True

    trainer = new()
    fit(trainer, LambdaCallback(**{hook: stop}), epochs=2)
    assert (trainer.global_batch, trainer.epoch) == (batches, epochs)


def test_the_batch_size_is_set_before_the_first_epoch_or_not_at_all() -> None:
    refused = []

    def set_size(*_: object) -> None:
        with pytest.raises(SettingError, match="before the first epoch of a fit"):
            trainer.batch_size = 3
        refused.append(True)

    def first(logs: Any) -> None:
        trainer.batch_size = 3

    trainer = new()
    later = LambdaCallback(
        on_epoch_begin=set_size, on_train_batch_end=set_size, on_epoch_end=set_size,
        on_train_end=set_size,
    )  # fmt: skip
    fit(trainer, LambdaCallback(on_train_begin=first), later, epochs=2)
    assert (trainer.global_batch, len(refused)) == (2, 7)
    set_size()


def test_callbacks_hear_of_an_exception_before_they_are_closed() -> None:
    told: list[str] = []
    watch = LambdaCallback(
        on_exception=lambda error: told.append(type(error).__name__),
        on_close=lambda: told.append("closed"),
    )
    with pytest.raises(Interrupted):
        fit(new(), watch, LambdaCallback(on_epoch_begin=raises))
    assert told == ["Interrupted", "closed"]


def test_a_callback_may_evaluate_and_log_afterwards() -> None:
    class Evaluates(Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            loss = self.trainer.evaluate(X, Y, callbacks=[LambdaCallback()])["loss"]
            self.trainer.log("other_loss", loss)

    trainer = fit(new(optimizer=0.0, metrics=["mae"]), Evaluates())
    assert trainer.history.history["other_loss"] == pytest.approx([14 / 3])


def test_an_evaluation_within_an_epoch_leaves_its_means_alone() -> None:
    class Evaluates(Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.trainer.evaluate(100 * X, Y)

    trainer = fit(new(optimizer=0.0, metrics=["mae"]), Evaluates())
    assert trainer.history.history["loss"] == pytest.approx([14 / 3])
    assert trainer.history.history["mae"] == pytest.approx([2])


def test_figures_that_are_arrays_are_not_in_logs() -> None:
    classes = np.array([0, 1, 2])
    trainer = Trainer(mlp(), loss="cross_entropy", metrics=["confusion_matrix"])
    x = np.ones((3, 4), np.float32)
    history = trainer.fit(x, classes, validation_data=(x, classes), verbose=0).history
    assert set(history) == {"loss", "val_loss", "learning_rate"}
    assert trainer.evaluate(x, classes)["confusion_matrix"].shape == (3, 3)


INPUTS = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
IMAGES = np.random.default_rng(0).normal(size=(9, 1, 8, 8)).astype(np.float32)
TARGETS = np.zeros((9, 2), np.float32)


def normalized(shape: str = "N, 2", layers: int = 1) -> onnx.ModelProto:
    """BatchNormalization of rows, once or twice."""
    state = ", ".join(
        f"float[2] {part}{i} = {{{value}}}"
        for i in range(layers)
        for part, value in (("s", "1, 1"), ("b", "0, 0"), ("m", "0, 0"), ("v", "1, 1"))
    )
    ends = ["x", *(f"h{i}" for i in range(1, layers)), "y"]
    body = "\n".join(
        f"{ends[i + 1]} = BatchNormalization({ends[i]}, s{i}, b{i}, m{i}, v{i})"
        for i in range(layers)
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[{shape}] x) => (float[{shape}] y) <{state}> {{ {body} }}"""
    )
    for i, node in enumerate(model.graph.node):
        node.name = f"bn{i}"
    return model


@every_way
def test_a_batch_of_one_row_without_anything_to_normalize_is_warned_of_once(way) -> None:
    trainer = Trainer(normalized(), loss="mse", **way)
    for _ in range(2):  # once for each fit
        with pytest.warns(
            UserWarning, match="1 row has one value per channel .* 'bn0': .*drop_last"
        ) as caught:
            trainer.fit(INPUTS, TARGETS, batch_size=4, epochs=3, verbose=0)
        assert len(caught) == 1
    with pytest.warns(UserWarning, match="'bn0' and 1 others: "):
        Trainer(normalized(layers=2), loss="mse", **way).fit(INPUTS[:1], TARGETS[:1], verbose=0)


@pytest.mark.parametrize(
    ("model", "x", "y", "settings"),
    [
        (convolutional(), IMAGES, np.arange(9) % 3, {"loss": "cross_entropy"}),
        (normalized(), INPUTS, TARGETS, {"batch_norm": "frozen"}),
        (
            normalized("N, 2, L"),
            INPUTS[:, :, None].repeat(3, 2),
            TARGETS[:, :, None].repeat(3, 2),
            {},
        ),
        (mlp((2, 2)), INPUTS, TARGETS, {}),
    ],
    ids=["several pixels", "frozen", "several steps", "no BatchNormalization"],
)
def test_other_batches_of_one_row_are_fine(model, x, y, settings) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = Trainer(model, **({"loss": "mse"} | settings))
        trainer.fit(x, y, batch_size=4, verbose=0)


def test_one_step_of_one_row_has_one_value_per_channel() -> None:
    x, y = INPUTS[:, :, None], TARGETS[:, :, None]
    trainer = Trainer(normalized("N, 2, L"), loss="mse")
    with pytest.warns(UserWarning, match="one value per channel"):
        trainer.fit(x, y, batch_size=2, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(DataLoader(x, y, batch_size=2, drop_last=True), verbose=0)
        trainer.evaluate(x, y, batch_size=1)
