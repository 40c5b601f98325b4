"""How the loop behaves, number by number, in every way to train: both backends, both sources of
gradients.

Each figure is from a calculation by hand or from Keras.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit import DataLoader, Trainer
from onnxfit.callbacks import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    TerminateOnNaN,
)
from onnxfit.callbacks.callback import HOOKS
from onnxfit.data.order import permutation
from onnxfit.errors import DataError, SettingError
from onnxfit.graph import names
from onnxfit.losses import CrossEntropy
from onnxfit.optimizers import SGD, Adam
from onnxfit.schedules import Exponential
from tests.builds import every_way, needs_builder
from tests.helpers import Recorder, classification, column
from tests.models import convolutional, linear, mlp, two_outputs

Way = dict[str, str]


def images(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 1, 8, 8)).astype(np.float32), rng.integers(0, 3, rows)


def weight(trainer: Trainer) -> float:
    return trainer.get_weights()["w"].item()


def assert_same(one: Trainer, other: Trainer) -> None:
    """Equal bit for bit: weights, slots, counters, history."""
    np.testing.assert_equal(one.get_state(), other.get_state())
    assert one.history.history == other.history.history
    assert one.train_losses_ == other.train_losses_


class Hooks(Callback):
    """The names of hooks as they are called; raises in one of them, or stops there."""

    def __init__(
        self,
        *,
        gradients: bool = True,
        fail: tuple[str, BaseException] | None = None,
        stop: str = "",
    ) -> None:
        self.called: list[str] = []
        for hook in HOOKS:
            if gradients or hook != "on_gradients":
                setattr(self, hook, lambda *arguments, hook=hook: self.record(hook, fail, stop))

    def record(self, hook: str, fail: tuple[str, BaseException] | None, stop: str) -> None:
        self.called.append(hook.removeprefix("on_"))
        if hook == stop:
            self.trainer.stop_training = True
        if fail and fail[0] == hook:
            raise fail[1]


# ---------------------------------------------------------------- hooks


@every_way
def test_the_order_of_hooks(way: Way) -> None:
    between = way["backend"] == "forward_backward"
    hooks = Hooks(gradients=between)
    x = column(1, 2)
    Trainer(linear(), loss="mse", **way).fit(
        x, x, batch_size=1, epochs=2, validation_data=(x, x), verbose=0, callbacks=[hooks]
    )
    batch = ["train_batch_begin", *["gradients"] * between, "train_batch_end"]
    test = [
        "test_begin",
        "test_batch_begin",
        "test_batch_end",
        "test_batch_begin",
        "test_batch_end",
        "test_end",
    ]
    assert hooks.called == [
        "train_begin",
        *["epoch_begin", *batch, *batch, *test, "epoch_end"] * 2,
        "train_end",
        "close",
    ]


@every_way
@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end"])
def test_a_stop_in_a_batch_hook_skips_the_batches_that_remain(way: Way, hook: str) -> None:
    hooks, recorder, x = Hooks(gradients=False, stop=hook), Recorder(), column(1, 2, 3)
    trainer = Trainer(linear(), loss="mse", **way)
    trainer.fit(
        x, x, batch_size=1, epochs=3, validation_data=(x, x), verbose=0, callbacks=[hooks, recorder]
    )
    assert (trainer.global_step, trainer.epoch) == (1, 1)
    expected = [
        "epoch_begin",
        "train_batch_begin",
        "train_batch_end",
        "test_begin",
        "test_end",
        "epoch_end",
        "train_end",
    ]
    assert [called for called in hooks.called[1:-1] if "test_batch" not in called] == expected
    assert set(recorder.events[-1][2]) == {"loss", "val_loss", "learning_rate"}


@every_way
@pytest.mark.parametrize(
    "hook",
    [
        "on_epoch_begin",
        "on_test_begin",
        "on_test_batch_begin",
        "on_test_batch_end",
        "on_test_end",
        "on_epoch_end",
    ],
)
def test_a_stop_outside_of_batches_ends_training_with_its_epoch(way: Way, hook: str) -> None:
    hooks, x = Hooks(gradients=False, stop=hook), column(1, 2)
    trainer = Trainer(linear(), loss="mse", **way)
    history = trainer.fit(
        x, x, batch_size=1, epochs=3, validation_data=(x, x), verbose=0, callbacks=[hooks]
    )
    assert history.epoch == [0]
    assert trainer.global_step == (0 if hook == "on_epoch_begin" else 2)
    assert hooks.called[-3:] == ["epoch_end", "train_end", "close"]


@every_way
@pytest.mark.parametrize(
    "hook",
    [hook for hook in HOOKS if "predict" not in hook and hook not in ("on_exception", "on_close")],
)
def test_ctrl_c_in_a_hook_leaves_a_trainer_that_goes_on(way: Way, hook: str) -> None:
    if hook == "on_gradients" and way["backend"] != "forward_backward":
        return
    x = column(1, 2)
    trainer = Trainer(linear(), loss="mse", optimizer=Adam(0.1), **way)
    error = KeyboardInterrupt()
    hooks = Hooks(gradients=hook == "on_gradients", fail=(hook, error))
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.fit(
            x, x, batch_size=1, epochs=2, validation_data=(x, x), verbose=0, callbacks=[hooks]
        )
    assert raised.value is error
    assert hooks.called[-2:] == ["exception", "close"]
    plain = Trainer(linear(), loss="mse", optimizer=Adam(0.1), **way)
    plain.set_state(trainer.get_state())  # all that decides how training goes on
    for other in (trainer, plain):
        other.fit(x, x, batch_size=1, epochs=2, verbose=0)
    np.testing.assert_equal(trainer.get_state(), plain.get_state())


@every_way
def test_an_exception_in_the_data_is_told_to_callbacks_and_raised(way: Way) -> None:
    error = OSError("the disk is gone")

    def batches() -> Iterator[Any]:
        yield column(1), column(0)
        raise error

    hooks, trainer = Hooks(gradients=False), Trainer(linear(w=1), loss="mse", optimizer=0.1, **way)
    with pytest.raises(OSError, match="the disk is gone") as raised:
        trainer.fit(batches, epochs=2, verbose=0, callbacks=[hooks])
    assert raised.value is error
    assert hooks.called[-3:] == ["train_batch_end", "exception", "close"]
    assert weight(trainer) == pytest.approx(0.8)


@every_way
def test_gradients_may_be_changed_in_place_and_are_those_of_the_update(way: Way) -> None:
    seen: list[np.ndarray] = []

    class Doubles(Callback):
        def on_gradients(self, gradients: dict[str, np.ndarray]) -> None:
            seen.append(gradients["w"].copy())
            gradients["w"] *= 2

    trainer = Trainer(linear(w=1), loss="mse", optimizer=0.1, **way)
    if way["backend"] != "forward_backward":
        with pytest.raises(SettingError, match=r"Doubles overrides on_gradients"):
            trainer.fit(column(1), column(0), callbacks=[Doubles()], verbose=0)
        assert (trainer.global_step, trainer.history.epoch) == (0, [])
        return
    trainer.fit(column(1), column(0), epochs=2, callbacks=[Doubles()], verbose=0)
    assert np.ravel(seen) == pytest.approx([2, 1.2])  # 2 w
    assert weight(trainer) == pytest.approx(0.36)


@every_way
def test_counters_are_saved_and_go_on(way: Way, tmp_path: Path) -> None:
    def fit(trainer: Trainer) -> tuple[int, ...]:
        trainer.fit(column(1, 2, 3), column(0, 0, 0), batch_size=2, epochs=2, verbose=0)
        return trainer.epoch, trainer.global_step, trainer.global_batch, trainer.samples_seen

    trainer = Trainer(linear(), loss="mse", accumulate=2, **way)
    assert fit(trainer) == (2, 2, 4, 6)
    loaded = Trainer.load(trainer.save(tmp_path / "a"))
    assert loaded.backend == way["backend"]
    assert fit(loaded) == (4, 4, 8, 12) == fit(trainer)


# ---------------------------------------------------------------- gradients, accumulation,
# schedules, undoing


@every_way
def test_schedules_and_averages_tick_with_updates_not_batches(way: Way) -> None:
    rates: list[float] = []
    trainer = Trainer(
        linear(w=1),
        loss="mse",
        optimizer=SGD(Exponential(0.1, 1, 0.5), ema_momentum=0.5),
        accumulate=2,
        **way,
    )
    see = LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(trainer.learning_rate)
    )
    trainer.fit(
        column(1, 1, 1), column(0, 0, 0), batch_size=1, epochs=2, callbacks=[see], verbose=0
    )
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.025, 0.025, 0.0125])
    assert trainer.history.history["learning_rate"] == pytest.approx([0.05, 0.0125])
    w = average = 1.0
    for rate in (0.1, 0.05, 0.025, 0.0125):
        w -= rate * 2 * w
        average = 0.5 * average + 0.5 * w
    assert weight(trainer) == pytest.approx(w)
    assert onnx.numpy_helper.to_array(
        trainer.export(averaged=True).graph.initializer[0]
    ).item() == pytest.approx(average)


@every_way
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_can_be_undone(way: Way, accumulate: int) -> None:
    """Weights, slots and statistics; within a window, what waits is forgotten."""
    x, y = images(12)
    trainer = Trainer(
        convolutional(dropout=0.3),
        loss="cross_entropy",
        optimizer=SGD(0.1, momentum=0.9),
        accumulate=accumulate,
        **way,
    )
    for _ in range(2 * accumulate - 1):  # the last batch of a window but one, or an update
        before = trainer.get_state()
        trainer.train_on_batch(x, y)
    assert not np.array_equal(
        before["weights"]["bn.mean"], trainer.get_state()["weights"]["bn.mean"]
    )
    if way["backend"] == "in_place" and accumulate == 1:
        before = trainer.get_state()
        with pytest.raises(SettingError, match="cannot undo an update"):
            trainer.revert_step()
        np.testing.assert_equal(trainer.get_state(), before)
        return
    trainer.revert_step()
    after = trainer.get_state()
    np.testing.assert_equal(after["weights"], before["weights"])
    for name in ("conv.weight", "bn.scale", "fc.bias"):
        slot = names.slot(name, "velocity")
        np.testing.assert_array_equal(after["slots"][slot], before["slots"][slot])
    trainer.revert_step()  # only the last one can be undone
    np.testing.assert_equal(trainer.get_state()["weights"], after["weights"])


@every_way
@pytest.mark.parametrize(
    ("poison", "loss", "message"),
    [(3e38, "inf", "the loss is inf"), (np.inf, "nan", "the loss is nan")],
    ids=["inf", "nan"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bad", [1, 2])
def test_terminate_on_nan_stops_in_that_batch_with_the_weights_before_it(
    way: Way, poison: float, loss: str, message: str, accumulate: int, bad: int, tmp_path: Path
) -> None:
    weights: list[float] = []
    x = np.ones((5, 1), np.float32)
    x[bad] = poison
    trainer = Trainer(
        linear(w=1.0 if loss == "inf" else 0.0),
        loss="mse",
        optimizer=SGD(0.1, momentum=0.9),
        accumulate=accumulate,
        **way,
    )
    see = LambdaCallback(on_train_batch_begin=lambda batch, logs: weights.append(weight(trainer)))
    trainer.fit(
        x,
        0 * column(1, 1, 1, 1, 1),
        batch_size=1,
        shuffle=False,
        epochs=2,
        verbose=0,
        callbacks=[see, TerminateOnNaN(), CSVLogger(tmp_path / "log.csv")],
    )
    assert len(weights) == bad + 1
    assert weight(trainer) == weights[-1]
    assert np.isfinite(trainer.get_state()["slots"][names.slot("w", "velocity")]).all()
    assert trainer.stop_reason is not None
    assert message in trainer.stop_reason
    assert (tmp_path / "log.csv").read_text().splitlines()[-1].startswith(f"1,{loss}")


@every_way
def test_early_stopping_gives_back_the_weights_of_the_best_epoch(way: Way) -> None:
    """[.2, .15, .1, .11, .12] with patience 2: ran 5, the weights after epoch 2."""
    values, weights = [0.2, 0.15, 0.1, 0.11, 0.12, 0], []

    def log(epoch: int, logs: Any) -> None:
        trainer.log("val_loss", values[epoch])
        weights.append(trainer.get_weights())

    trainer = Trainer(mlp(), loss="cross_entropy", optimizer="adam", **way)
    stopping = EarlyStopping(patience=2, restore_best_weights=True)
    trainer.fit(
        *classification(),
        epochs=6,
        verbose=0,
        callbacks=[LambdaCallback(on_epoch_end=log), stopping],
    )
    assert len(weights) == 5
    np.testing.assert_equal(trainer.get_weights(), weights[2])
    assert (
        trainer.stop_reason
        == "EarlyStopping: val_loss is 0.12 at epoch 5. It has not improved by more than 0 for 2 epochs;"
        " the best was 0.1 at epoch 3."
    )


# ---------------------------------------------------------------- resume


class Killed(BaseException):
    """What ends a process, as far as callbacks can tell."""


@every_way
@pytest.mark.parametrize(
    ("rows", "batch_size", "killed_after", "batches"),
    [
        pytest.param(
            10, 4, 2, 15, id="10 samples, batch 4, killed after 2 batches: 15 batches in all"
        ),
        pytest.param(
            6,
            1,
            3,
            30,
            id="6 samples, batch 1, killed after 3: samples 4-6 of the same permutation",
        ),
    ],
)
def test_what_was_killed_goes_on_with_the_batches_that_are_left(
    way: Way, rows: int, batch_size: int, killed_after: int, batches: int, tmp_path: Path
) -> None:
    x, y = images(rows)

    class Sees(Callback):
        phase = "logger"

        def __init__(self, kill_after: int) -> None:
            self.ran, self.kill_after = 0, kill_after

        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            self.ran += 1

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if self.ran == self.kill_after:
                raise Killed

    def trained(kill_after: int, folder: str) -> tuple[Trainer, Sees]:
        sees = Sees(kill_after)
        trainer = Trainer(
            convolutional(dropout=0.4),
            loss="cross_entropy",
            optimizer=SGD(Exponential(0.05, 5, 0.8), momentum=0.9),
            seed=3,
            **way,
        )
        callbacks = [
            BackupAndRestore(tmp_path / folder, every_n_steps=1),
            EarlyStopping("loss", patience=9),
            sees,
        ]
        # a label says which row it is of, as far as three classes can
        trainer.fit(x, y, epochs=5, batch_size=batch_size, verbose=0, callbacks=callbacks)
        return trainer, sees

    whole, _ = trained(-1, "a")
    with pytest.raises(Killed):
        trained(killed_after, "b")
    resumed, sees = trained(-1, "b")
    assert killed_after + sees.ran == batches == resumed.global_batch
    assert_same(resumed, whole)
    # a plain fit afterwards is a whole one
    assert resumed.fit(x, y, epochs=3, verbose=0).epoch == [0, 1, 2]


@every_way
def test_a_resumed_epoch_has_the_rows_that_are_left_of_its_permutation(
    way: Way, tmp_path: Path
) -> None:
    seen: list[float] = []
    x = column(*range(1, 7))

    def see(batch: int, logs: Any) -> None:
        seen.append(round(np.sqrt(logs["batch_loss"])))
        if len(seen) == 3:
            raise Killed

    def fit() -> None:
        callbacks = [
            LambdaCallback(on_train_batch_end=see),
            BackupAndRestore(tmp_path / "b", every_n_steps=1),
        ]
        Trainer(linear(w=1), loss="mse", optimizer=0.0, seed=5, **way).fit(
            x, 0 * x, batch_size=1, epochs=2, verbose=0, callbacks=callbacks
        )

    with pytest.raises(Killed):
        fit()
    fit()  # the third sample was not backed up any more: it comes again
    first, second = (1 + permutation(5, epoch, 6) for epoch in range(2))
    assert seen == [*first[:3], *first[2:], *second]


# ---------------------------------------------------------------- seeds


def seeded(gradient: str) -> list[str]:
    """Digests of the weights after training with both backends, for two seeds."""
    x, y = images(12)
    digests = []
    for backend in ("full", "forward_backward"):
        for seed in (0, 1):
            model = convolutional(dropout=0.5)
            trainer = Trainer(
                model,
                loss="cross_entropy",
                optimizer="adam",
                seed=seed,
                backend=backend,
                gradient=gradient,
            )
            trainer.fit(x, y, epochs=2, batch_size=4, verbose=0)
            weights = b"".join(w.tobytes() for w in trainer.get_weights().values())
            digests.append(hashlib.sha256(weights).hexdigest())
    return digests


@pytest.mark.parametrize("gradient", ["onnx", pytest.param("onnxruntime", marks=needs_builder)])
def test_the_same_seed_gives_the_same_weights_in_another_process(gradient: str) -> None:
    root = Path(onnxfit.__file__).parent.parent
    script = f"from tests.test_behaviour import seeded; print(*seeded({gradient!r}))"
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", script]
    found = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    assert found == seeded(gradient)
    assert not set(found[::2]) & set(found[1::2])


@every_way
def test_a_seed_decides_the_order_of_rows(way: Way) -> None:
    def order(seed: int) -> list[int]:
        recorder = Recorder()
        trainer = Trainer(linear(w=1), loss="mse", optimizer=0.0, seed=seed, **way)
        trainer.fit(
            column(*range(9)),
            column(*[0] * 9),
            batch_size=1,
            epochs=2,
            callbacks=[recorder],
            verbose=0,
        )
        return [round(value) for value in np.sqrt(recorder.logs("batch", "batch_loss"))]

    for seed in (0, 1):
        assert order(seed) == [*permutation(seed, 0, 9), *permutation(seed, 1, 9)]
    assert order(0) != order(1)
    assert order(0)[:9] != order(0)[9:]


@every_way
def test_a_seed_and_the_step_decide_what_dropout_drops(way: Way) -> None:
    """With x = w = 1 and rate ½ the output is 2 where kept: the loss of 64 numbers is 4 times the
    part that is kept.
    """
    model = linear(64, 64)
    model.graph.node[0].output[0] = "s"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "ratio"))
    model.graph.node.append(onnx.helper.make_node("Dropout", ["s", "ratio"], ["y"]))
    model.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(np.eye(64, dtype=np.float32), "w")
    )
    x = np.ones((4, 64), np.float32)

    def kept(seed: int) -> list[float]:
        trainer = Trainer(model, loss="mse", optimizer=0.0, seed=seed, **way)
        recorder = Recorder()
        trainer.fit(
            x, 0 * x, batch_size=1, epochs=2, shuffle=False, verbose=0, callbacks=[recorder]
        )
        return recorder.logs("batch", "batch_loss")

    first, second = kept(0), kept(1)
    assert first == kept(0)
    assert len(set(first)) > 2  # every step draws anew
    assert first != second
    assert np.mean(first) == pytest.approx(2, abs=0.5)


@every_way
def test_reading_ahead_changes_no_weight(way: Way) -> None:
    x, y = images(22)

    def trained(prefetch: int) -> Trainer:
        trainer = Trainer(convolutional(dropout=0.5), loss="cross_entropy", optimizer="adam", **way)
        trainer.fit(DataLoader(x, y, batch_size=4, prefetch=prefetch), epochs=2, verbose=0)
        return trainer

    assert_same(trained(3), trained(0))


# ---------------------------------------------------------------- the loop's arithmetic


@every_way
def test_running_loss_is_the_mean_over_rows(way) -> None:
    recorder = Recorder()
    trainer = Trainer(linear(w=1), loss="mse", optimizer=0.0, **way)
    trainer.fit(
        column(1, 1, 3, 3, 5),
        column(0, 0, 0, 0, 0),
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=[recorder],
    )
    assert recorder.logs("batch", "loss") == [1, 5, 9]
    assert recorder.logs("batch", "batch_loss") == [1, 9, 25]
    assert recorder.logs("epoch", "loss") == [9] == trainer.train_losses_


@every_way
def test_evaluation_does_not_depend_on_the_batch_size(way) -> None:
    x, y = classification(100)
    trainer = Trainer(mlp(), loss="cross_entropy", penalty=0.1, metrics=["accuracy"], **way)
    first, second = trainer.evaluate(x, y, batch_size=80), trainer.evaluate(x, y, batch_size=100)
    assert first == pytest.approx(second, rel=1e-6)
    assert set(first) == {"loss", "accuracy"}


@every_way
def test_sample_weights(way) -> None:
    metrics = ["mse", onnxfit.metrics.MeanSquaredError(weighted=True)]
    trainer = Trainer(linear(w=1), loss="mse", metrics=metrics, optimizer=0.0, **way)
    found = trainer.evaluate(column(1, 2, 3, 4), column(0, 0, 0, 0), [0, 0, 1, 1], batch_size=3)
    assert found == pytest.approx({"loss": 6.25, "mse": 7.5, "weighted_mean_squared_error": 12.5})


@every_way
@pytest.mark.parametrize(("class_weight", "loss"), [({0: 0.2, 1: 0.3}, 1.225), ({0: 0.2}, 3.5)])
def test_class_weights(way, class_weight, loss) -> None:
    trainer = Trainer(linear(w=1), loss="mse", optimizer=0.0, **way)
    history = trainer.fit(
        column(1, 2, 3, 4), np.array([0, 0, 1, 1]), class_weight=class_weight, verbose=0
    )
    assert history.history["loss"] == pytest.approx([loss])


@every_way
def test_class_and_sample_weights_together(way) -> None:
    with pytest.raises(ValueError, match=r"class_weight"):
        Trainer(linear(), loss="mse", **way).fit(
            column(1, 2), np.array([0, 1]), [1, 1], class_weight={0: 1}, verbose=0
        )


@every_way
def test_weight_2_is_the_row_twice_and_weight_0_no_row(way) -> None:
    x, y = classification(12)
    weights = np.array([2, 0] + [1] * 10, np.float32)

    def trained(x, y, w):
        trainer = Trainer(mlp(), loss="cross_entropy", optimizer=0.5, **way)
        trainer.fit(x, y, w, batch_size=64, epochs=3, verbose=0)
        return trainer.get_weights()

    rows = [0, 0, *range(2, 12)]
    # 12 rows each: the mean divides alike
    first, second = trained(x, y, weights), trained(x[rows], y[rows], None)
    for name in first:
        np.testing.assert_allclose(first[name], second[name], atol=1e-6)


@every_way
def test_three_batches_on_ones(way) -> None:
    """Dense(3) of ones without bias on ones(100, 4): Keras's own numbers."""
    x, y = np.ones((100, 4), np.float32), np.zeros((100, 3), np.float32)
    trainer = Trainer(linear(4, 3, w=1), loss="mse", optimizer=SGD(0.01), **way)
    assert trainer.train_on_batch(x, y)["loss"] == pytest.approx(16.0)
    assert trainer.train_on_batch(x, y)["loss"] == pytest.approx(15.158, abs=1e-3)
    assert trainer.test_on_batch(x, y)["loss"] == pytest.approx(14.360, abs=1e-3)
    assert trainer.predict_on_batch(x) == pytest.approx(np.full((100, 3), 3.7895), abs=1e-4)
    assert trainer.global_step == 2


@every_way
def test_several_losses_and_their_weights(way) -> None:
    trainer = Trainer(
        two_outputs(),
        loss={"a": "mse", "b": "mae"},
        loss_weights={"a": 0.1, "b": 0.2},
        metrics={"b": "mae"},
        penalty=0.5,
        **way,
    )
    found = trainer.evaluate(column(1, 3), {"a": column(0, 0), "b": column(0, 0)}, batch_size=1)
    assert found == pytest.approx(
        {"loss": 0.1 * 5 + 0.2 * 4 + 0.5 * (1 + 4), "a_loss": 5, "b_loss": 4, "b_mae": 4}
    )
    assert list(trainer.get_weights()) == ["u", "v"]  # t leads to no loss


@every_way
def test_an_ignored_row_counts_nowhere(way) -> None:
    x, y = classification(30)
    y = y.astype(np.int64)
    y[::3] = -100
    trainer = Trainer(mlp(), loss=CrossEntropy(ignore_index=-100), **way)
    kept = y >= 0
    for batch_size in (7, 30):
        assert trainer.evaluate(x, y, batch_size=batch_size)["loss"] == pytest.approx(
            trainer.evaluate(x[kept], y[kept])["loss"], rel=1e-6
        )


@every_way
def test_accumulated_gradients_update_once_a_window(way) -> None:
    weights = []
    trainer = Trainer(
        linear(w=0), loss=lambda op, y_true, y_pred: y_pred, optimizer=1.0, accumulate=3, **way
    )
    for _ in range(3):
        trainer.train_on_batch(column(1), column(0))
        weights.append(trainer.get_weights()["w"].item())
    assert weights == [0, 0, -1]
    assert (trainer.global_batch, trainer.global_step) == (3, 1)


@every_way
def test_a_short_window_is_flushed_and_divided_by_its_true_count(way) -> None:
    seen: list[float] = []
    trainer = Trainer(linear(w=1), loss="mse", optimizer=0.1, accumulate=2, **way)
    see = LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(trainer.get_weights()["w"].item()),
        on_epoch_end=lambda epoch, logs: seen.append(trainer.get_weights()["w"].item()),
    )
    trainer.fit(
        column(1, 1, 1), column(0, 0, 0), batch_size=1, epochs=2, callbacks=[see], verbose=0
    )
    # the third batch's own update comes with the end of the epoch
    assert seen == pytest.approx([1, 0.8, 0.8, 0.64, 0.64, 0.512, 0.512, 0.4096])
    assert trainer.global_step == 4


@every_way
@pytest.mark.parametrize(
    ("clip", "expected"),
    [({"clip_norm": 1.0}, [-0.4472, -0.8944]), ({"clip_value": 1.0}, [-1, -1])],
)
def test_clipping(way, clip, expected) -> None:
    trainer = Trainer(
        two_outputs(),
        loss=dict.fromkeys("ab", lambda op, t, p: p),
        optimizer=1.0,
        loss_weights={"a": 50, "b": 100},
        **clip,
        **way,
    )
    before = trainer.get_weights()
    trainer.train_on_batch(column(1), {"a": column(0), "b": column(0)})
    after = trainer.get_weights()
    assert [(after[n] - before[n]).item() for n in "uv"] == pytest.approx(expected, abs=1e-4)


@every_way
def test_steps_per_epoch_go_on_through_the_passes(way) -> None:
    rows: list[float] = []
    trainer = Trainer(linear(w=1), loss="mse", optimizer=0.0, **way)
    see = LambdaCallback(
        on_train_batch_end=lambda batch, logs: rows.append(np.sqrt(logs["batch_loss"]))
    )
    history = trainer.fit(
        column(*range(10)),
        column(*[0] * 10),
        batch_size=1,
        shuffle=False,
        steps_per_epoch=9,
        epochs=4,
        callbacks=[see],
        verbose=0,
    )
    assert np.round(rows).tolist() == [*range(10), *range(10), *range(10), *range(6)]
    assert len(history.epoch) == 4


@every_way
def test_running_out_of_data_is_said_once(way) -> None:
    trainer = Trainer(linear(w=1), loss="mse", optimizer=0.0, **way)
    with pytest.warns(
        UserWarning,
        match=r"Ran out of data: the epoch ended after 10 batches, but steps_per_epoch=11",
    ) as caught:
        trainer.fit(
            column(*range(10)),
            column(*range(10)),
            batch_size=1,
            steps_per_epoch=11,
            epochs=3,
            verbose=0,
        )
    assert len(caught) == 1
    assert trainer.global_step == 30


@every_way
def test_a_generator_serves_one_epoch_only(way) -> None:
    def batches():
        for _ in range(3):
            yield column(1), column(0)

    trainer = Trainer(linear(w=1), loss="mse", **way)
    with pytest.raises(DataError, match=r"function"):
        trainer.fit(batches(), epochs=3, verbose=0)
    assert trainer.global_step == 0
    trainer.fit(batches(), epochs=1, verbose=0)
    trainer.fit(batches, epochs=3, verbose=0)
    assert trainer.global_step == 12


@every_way
def test_so_does_one_of_validation(way) -> None:
    trainer = Trainer(linear(w=1), loss="mse", **way)
    with pytest.raises(DataError, match=r"validation"):
        trainer.fit(
            column(1),
            column(0),
            epochs=3,
            validation_data=(b for b in [(column(1), column(0))]),
            verbose=0,
        )
    assert trainer.global_step == 0


@every_way
def test_predictions_come_in_input_order(way) -> None:
    trainer = Trainer(linear(w=2), loss="mse", **way)
    x = column(*range(9))
    np.testing.assert_array_equal(trainer.predict(lambda: iter([x[:2], x[2:5], x[5:]])), 2 * x)


@every_way
@pytest.mark.parametrize(
    "validation",
    [{"validation_split": 0.25}, {"validation_data": (column(8, 9, 10), column(0, 0, 0))}],
)
def test_validation(way, validation) -> None:
    trainer = Trainer(linear(w=1), loss="mse", optimizer=0.0, **way)
    history = trainer.fit(
        column(*range(1, 11)),
        column(*[0] * 10),
        epochs=5,
        validation_freq=3,
        verbose=0,
        **validation,
    )
    assert history.history["val_loss"] == pytest.approx([(64 + 81 + 100) / 3])


@every_way
@pytest.mark.parametrize(("freq", "epochs"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3]), ([1, 4], [0, 3])])
def test_validation_freq(way, freq, epochs) -> None:
    recorder = Recorder()
    Trainer(linear(), loss="mse", **way).fit(
        column(1),
        column(0),
        epochs=5,
        validation_data=(column(1), column(0)),
        validation_freq=freq,
        callbacks=[recorder],
        verbose=0,
    )
    assert [
        epoch for kind, epoch, logs in recorder.events if kind == "epoch" and "val_loss" in logs
    ] == epochs


@every_way
def test_none_stands_for_nothing(way) -> None:
    trainer = Trainer(linear(), loss="mse", metrics=None, **way)
    trainer.fit(column(1), column(0), callbacks=None, verbose=0)
    assert list(trainer.evaluate(column(1), column(0), callbacks=None)) == ["loss"]


@every_way
def test_initial_epoch(way) -> None:
    trainer = Trainer(linear(), loss="mse", **way)
    assert trainer.fit(column(1), column(0), epochs=5, initial_epoch=3, verbose=0).epoch == [3, 4]
    assert trainer.fit(column(1), column(0), epochs=0, verbose=0).epoch == []
    assert trainer.epoch == 2


@every_way
def test_counters_go_on_in_a_second_fit(way) -> None:
    trainer = Trainer(linear(), loss="mse", **way)
    for _ in range(2):
        trainer.fit(column(1, 2, 3), column(0, 0, 0), batch_size=2, epochs=2, verbose=0)
    assert (trainer.epoch, trainer.global_step, trainer.global_batch, trainer.samples_seen) == (
        4,
        8,
        8,
        12,
    )


@every_way
def test_stop_in_a_batch_ends_the_epoch_early_but_whole(way) -> None:
    events = []

    class Stop(Callback):
        def on_train_batch_end(self, batch, logs):
            self.trainer.stop_training = batch == 1

        def on_epoch_end(self, epoch, logs):
            events.append(sorted(logs))

        def on_train_end(self, logs):
            events.append("end")

    trainer = Trainer(linear(w=1), loss="mse", **way)
    trainer.fit(
        column(*range(9)),
        column(*range(9)),
        batch_size=1,
        epochs=3,
        validation_data=(column(1), column(0)),
        callbacks=[Stop()],
        verbose=0,
    )
    assert events == [["learning_rate", "loss", "val_loss"], "end"]
    assert trainer.global_step == 2


@every_way
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)], ids=["(N,)", "(N, 1)"])
def test_shapes_of_sample_weights(way: Way, shape: tuple[int, ...]) -> None:
    weights = np.array([1, 0, 3, 0.5], np.float32).reshape(shape)
    trainer = Trainer(linear(w=1), loss="mse", optimizer=0.1, **way)
    history = trainer.fit(column(1, 2, 3, 4), column(0, 0, 0, 0), weights, verbose=0)
    assert history.history["loss"] == pytest.approx([(1 + 27 + 8) / 4])
    assert weight(trainer) == pytest.approx(1 - 0.1 * 2 * (1 + 27 + 8) / 4)


@every_way
def test_running_means_weigh_rows_by_their_sample_weights_as_the_loss_does(way: Way) -> None:
    recorder = Recorder()
    trainer = Trainer(linear(w=1), loss="mse", optimizer=0.0, **way)
    trainer.fit(
        column(1, 2, 3),
        column(0, 0, 0),
        np.array([1, 2, 3]),
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=[recorder],
    )
    assert recorder.logs("batch", "loss") == pytest.approx([(1 + 8) / 2, (1 + 8 + 27) / 3])
    assert recorder.logs("batch", "batch_loss") == pytest.approx([9 / 2, 27])


@pytest.mark.parametrize(
    ("rows", "fraction", "trained"),
    [(10, 0.2, 8), (10, 0.25, 7), (100, 0.29, 71), (7, 0.5, 3), (3, 0.2, 2), (10, 0.05, 9)],
)
def test_validation_split_takes_the_last_rows_before_shuffling(
    rows: int, fraction: float, trained: int
) -> None:
    seen: dict[str, list[int]] = {"train": [], "test": []}

    def see(kind: str) -> Any:
        return lambda batch, logs: seen[kind].append(round(np.sqrt(logs["batch_loss"])))

    trainer, x = Trainer(linear(w=1), loss="mse", optimizer=0.0), column(*range(rows))
    look = LambdaCallback(on_train_batch_end=see("train"), on_test_batch_end=see("test"))
    trainer.fit(
        x, 0 * x, batch_size=1, epochs=2, validation_split=fraction, verbose=0, callbacks=[look]
    )
    assert sorted(seen["train"]) == sorted([*range(trained)] * 2)
    assert trained < 4 or seen["train"][:trained] != [*range(trained)]
    assert seen["test"] == [*range(trained, rows)] * 2


def test_validation_split_that_leaves_no_row_to_train_on() -> None:
    trainer = Trainer(linear(), loss="mse")
    with pytest.raises(ValueError, match="leaves no rows for training"):
        trainer.fit(column(1, 2, 3), column(0, 0, 0), validation_split=0.9, verbose=0)
    assert trainer.global_step == 0


@every_way
@pytest.mark.parametrize("kind", ["generator", "function", "list", "by number", "arrays"])
def test_predictions_of_2_3_and_4_rows_are_9_in_input_order(way: Way, kind: str) -> None:
    x = column(*range(9))
    parts = [x[:2], x[2:5], x[5:]]

    class Numbered:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> np.ndarray:
            return parts[number]

    data = {
        "generator": (p for p in parts),
        "function": lambda: iter(parts),
        "list": [(p,) for p in parts],
        "by number": Numbered(),
        "arrays": x,
    }
    np.testing.assert_array_equal(
        Trainer(linear(w=2), loss="mse", **way).predict(data[kind], batch_size=4), 2 * x
    )
