"""BackupAndRestore, weight averaging, freezing, and what else stands beside the loop: each by
numbers computed by hand or in numpy.
"""

import json
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit.callbacks import (
    BackupAndRestore,
    BatchSizeFinder,
    Callback,
    CSVLogger,
    DeviceStats,
    EarlyStopping,
    Freeze,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    MLflowLogger,
    ModelCheckpoint,
    PredictionWriter,
    RemoteMonitor,
    StochasticWeightAveraging,
    SwapEMAWeights,
    TensorBoard,
    ThresholdStop,
    Timer,
    Unfreeze,
    batch_size_finder,
    device_stats,
    timer,
)
from onnxfit.errors import DataError, InstallationError, SettingError, StepError, UnknownNameError
from onnxfit.graph import names
from onnxfit.optimizers import SGD, Adam
from onnxfit.schedules import Cosine
from tests.models import convolutional, linear, mlp, two_outputs

both_backends = pytest.mark.parametrize("backend", ["full", "forward_backward"])
X, Y = np.ones((4, 1), np.float32), np.zeros((4, 1), np.float32)


def line(optimizer=0.1, **settings):
    """y = w x with w = 1 at first."""
    return onnxfit.Trainer(
        linear(w=1.0), loss="mse", optimizer=optimizer, **{"gradient": "onnx"} | settings
    )


def fit(*callbacks, on=None, x=X, y=Y, **settings):
    on = on or line()
    on.fit(x, y, **{"batch_size": 2, "verbose": 0, "callbacks": list(callbacks)} | settings)
    return on


def same(one, other):
    return set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)


class Killed(BaseException):
    """What ends a process, as far as callbacks can tell."""


class KillAfter(Callback):
    """Raises Killed once `batches` batches have been trained, the last of all callbacks."""

    phase = "logger"

    def __init__(self, batches):
        self.left = batches
        self.ran = 0

    def on_train_batch_begin(self, batch, logs):
        self.ran += 1

    def on_train_batch_end(self, batch, logs):
        if self.ran == self.left:
            raise Killed


# ---------------------------------------------------------------- BackupAndRestore


def ten_rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 4)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int64)


def network(backend="full", **settings):
    optimizer = SGD(Cosine(0.1, 40), momentum=0.9)
    return onnxfit.Trainer(
        mlp(),
        loss="cross_entropy",
        optimizer=optimizer,
        backend=backend,
        gradient="onnx",
        **settings,
    )


@both_backends
@pytest.mark.parametrize("killed_after", [1, 2, 3, 7])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_killed_fit_goes_on_exactly_where_it_was(tmp_path, backend, killed_after, accumulate):
    x, y = ten_rows()
    settings = {"batch_size": 4, "verbose": 0, "validation_data": (x, y)}
    whole = network(backend, accumulate=accumulate, metrics=["accuracy"])
    expected = whole.fit(x, y, epochs=5, callbacks=[EarlyStopping(patience=9)], **settings)
    folder = tmp_path / "backup"

    def callbacks(kill):
        return [
            BackupAndRestore(folder, every_n_steps=1),
            EarlyStopping(patience=9),
            CSVLogger(tmp_path / "log.csv"),
            kill,
        ]

    first = KillAfter(killed_after)
    with pytest.raises(Killed):
        network(backend, accumulate=accumulate, metrics=["accuracy"]).fit(
            x, y, epochs=5, callbacks=callbacks(first), **settings
        )
    again = network(backend, accumulate=accumulate, metrics=["accuracy"])
    second = KillAfter(-1)
    history = again.fit(x, y, epochs=5, callbacks=callbacks(second), **settings)
    if accumulate == 1:
        assert first.ran + second.ran == 15 == again.global_batch
    assert same(again.get_weights(), whole.get_weights())
    assert same(again.get_state()["slots"], whole.get_state()["slots"])
    assert (history.epoch, history.history) == (expected.epoch, expected.history)
    assert again.train_losses_ == whole.train_losses_
    assert [row.split(",")[0] for row in (tmp_path / "log.csv").read_text().splitlines()] == [
        "epoch",
        *"01234",
    ]
    assert not folder.exists()


def test_the_same_trainer_goes_on_after_an_exception(tmp_path):
    on, kill = line(), KillAfter(5)
    backup = BackupAndRestore(tmp_path)
    with pytest.raises(Killed):
        fit(backup, kill, on=on, epochs=4)
    assert on.global_batch == 5
    assert len(list(tmp_path.glob("*.onnxfit"))) == 2
    # the backup is of the end of epoch 1: the batch after it runs again
    fit(backup, kill, on=on, epochs=4)
    assert (on.global_batch, kill.ran) == (8, 9)
    assert same(on.get_weights(), fit(epochs=4).get_weights())


def test_after_a_normal_end_a_plain_fit_runs_all_its_epochs(tmp_path):
    backup = BackupAndRestore(tmp_path / "backup")
    with pytest.raises(Killed):
        fit(backup, KillAfter(4), epochs=3)
    on = fit(backup, epochs=3)
    assert on.history.epoch == [0, 1, 2]
    assert on.fit(X, Y, epochs=3, verbose=0).epoch == [0, 1, 2]
    assert fit(backup, on=on, epochs=3).history.epoch == [0, 1, 2]
    assert not (tmp_path / "backup").exists()


def test_a_spoiled_backup_is_named_and_the_one_before_taken(tmp_path):
    def stop():
        with pytest.raises(Killed):
            fit(BackupAndRestore(tmp_path, every_n_steps=1), KillAfter(3), epochs=4)

    stop()
    newer = max(tmp_path.glob("*.onnxfit"))
    newer.write_bytes(newer.read_bytes()[:-100])
    with pytest.warns(
        UserWarning, match=rf"{newer.name}.* cannot be read; the one before is tried"
    ):
        on = fit(BackupAndRestore(tmp_path, every_n_steps=1), epochs=4)
    assert same(on.get_weights(), fit(epochs=4).get_weights())
    stop()
    for path in tmp_path.glob("*.onnxfit"):
        path.write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="cannot be read") as warned:
        assert fit(BackupAndRestore(tmp_path), epochs=2).global_batch == 4
    assert len(warned) == 2


def test_a_spoiled_backup_is_not_one_of_the_two_that_are_kept(tmp_path):
    with pytest.raises(Killed):
        fit(BackupAndRestore(tmp_path, every_n_steps=1), KillAfter(3), epochs=4)
    older, newer = sorted(tmp_path.glob("*.onnxfit"))
    newer.write_bytes(b"")
    with pytest.warns(UserWarning, match="cannot be read"), pytest.raises(Killed):
        fit(BackupAndRestore(tmp_path, every_n_steps=1), KillAfter(1), epochs=4)
    kept = sorted(tmp_path.glob("*.onnxfit"))
    assert len(kept) == 2
    assert kept[0] == older
    assert newer not in kept


def test_backups_of_another_model_are_refused_and_change_nothing(tmp_path):
    with pytest.raises(Killed):
        fit(BackupAndRestore(tmp_path, every_n_steps=1), KillAfter(1))
    other = network()
    before = other.get_weights()
    with pytest.raises(SettingError, match="another trainer's"):
        other.fit(*ten_rows(), verbose=0, callbacks=[BackupAndRestore(tmp_path)])
    assert same(other.get_weights(), before)
    assert list(tmp_path.glob("*.onnxfit"))


def test_a_backup_has_the_state_of_checkpoints_after_the_event_whatever_the_order(tmp_path):
    def callbacks():
        return [
            BackupAndRestore(tmp_path / "b"),
            ModelCheckpoint(tmp_path / "{epoch}", monitor="loss", top_k=2),
        ]

    def kill(epoch, logs):
        if epoch == 2:
            raise Killed

    with pytest.raises(Killed):
        fit(*callbacks(), LambdaCallback(on_epoch_begin=kill), epochs=4)
    fit(*callbacks(), epochs=4)
    # 1: from there training went on
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]


def test_a_stop_by_a_callback_is_a_normal_end_and_a_failing_close_is_not(tmp_path):
    def stop(batch, logs):
        on.stop_training = True

    def fail(logs):
        raise OSError("disk full")

    on = line()
    fit(
        BackupAndRestore(tmp_path / "b", every_n_steps=1),
        LambdaCallback(on_train_batch_end=stop),
        on=on,
        epochs=3,
    )
    assert not (tmp_path / "b").exists()
    late = LambdaCallback(on_train_end=fail)
    late.phase = "logger"
    with pytest.raises(OSError, match="disk full"):
        fit(BackupAndRestore(tmp_path / "b"), late, epochs=3)
    assert list((tmp_path / "b").iterdir())


def test_restore_is_not_for_a_running_fit(tmp_path):
    on = line()
    on.save(tmp_path / "a")
    restore = LambdaCallback(on_epoch_begin=lambda epoch, logs: on.restore(tmp_path / "a"))
    with pytest.raises(SettingError, match="before fit"):
        fit(restore, on=on)


# ---------------------------------------------------------------- averages


def averaging(backend="full", momentum=0.5):
    return onnxfit.Trainer(
        linear(w=1.0),
        loss="mse",
        optimizer=SGD(0.1, ema_momentum=momentum),
        backend=backend,
        gradient="onnx",
    )


@both_backends
def test_averages_are_in_place_in_validation_and_at_the_end_and_back_between(backend):
    seen = {}

    def look(where):
        return lambda *arguments: seen.setdefault(where, []).append(on.get_weights()["w"].item())

    on = averaging(backend)
    looking = LambdaCallback(
        on_test_begin=look("test"),
        on_epoch_end=look("epoch end"),
        on_epoch_begin=look("epoch begin"),
        on_train_end=look("end"),
    )
    swap = SwapEMAWeights()
    fit(swap, looking, on=on, epochs=2, batch_size=4, validation_data=(X, Y))
    w1, w2 = 0.8, 0.64  # w - 0.1 * 2 w
    a1 = 0.5 * 1 + 0.5 * w1
    a2 = 0.5 * a1 + 0.5 * w2
    assert seen["epoch begin"] == pytest.approx([1, w1])
    assert seen["test"] == pytest.approx([a1, a2])
    assert seen["epoch end"] == pytest.approx([w1, w2])
    assert seen["end"] == pytest.approx([a2])
    assert on.history.history["val_loss"] == pytest.approx([a1**2, a2**2])
    fit(swap, on=on, batch_size=4)  # goes on from the weights, not from their averages
    assert swap.weights["w"].item() == pytest.approx(w2 * 0.8)
    on.set_weights({"w": np.full((1, 1), 2, np.float32)})
    fit(swap, on=on, batch_size=4)
    assert swap.weights["w"].item() == pytest.approx(1.6)


@both_backends
def test_averages_of_an_epoch_are_what_checkpoints_see_and_training_resumes_from_the_weights(
    tmp_path, backend
):
    def callbacks():
        return [
            SwapEMAWeights(swap_on_epoch=True, at_end=False),
            ModelCheckpoint(tmp_path / "{epoch}.onnx", save_weights_only=True),
            BackupAndRestore(tmp_path / "b"),
        ]

    whole, on = averaging(backend), averaging(backend)
    fit(on=whole, epochs=4)
    kill = KillAfter(5)
    with pytest.raises(Killed):
        fit(*callbacks(), kill, on=on, epochs=4)
    on = averaging(backend)
    fit(*callbacks(), on=on, epochs=4)
    assert same(on.get_weights(), whole.get_weights())
    assert not np.array_equal(
        on.get_weights()["w"], on.get_state()["slots"][names.slot("w", "ema")]
    )
    saved = onnxfit.Trainer((tmp_path / "3.onnx").read_bytes(), loss="mse").get_weights()
    assert saved["w"] == on.get_state()["slots"][names.slot("w", "ema")]


def test_averages_leave_after_an_exception_and_are_refused_where_there_are_none():
    def fail(logs):
        raise RuntimeError("no")

    on, plain = averaging(), averaging()
    with pytest.raises(RuntimeError, match="no"):
        fit(
            SwapEMAWeights(),
            LambdaCallback(on_test_end=fail, on_test_begin=fail),
            on=on,
            validation_data=(X, Y),
        )
    fit(on=plain)
    assert same(on.get_weights(), plain.get_weights())
    with pytest.raises(SettingError, match="ema_momentum"):
        fit(SwapEMAWeights())
    on = averaging()
    fit(on=on, epochs=2)
    weights = on.get_weights()
    result = on.evaluate(X, Y, callbacks=[SwapEMAWeights()])
    assert same(on.get_weights(), weights)
    assert result["loss"] > on.evaluate(X, Y)["loss"]


@both_backends
@pytest.mark.parametrize(("start", "first"), [(1, 1), (0.5, 2), (0, 0)])
def test_stochastic_weight_averaging_is_the_mean_of_the_last_epochs(backend, start, first):
    seen, rates = [], []
    look = LambdaCallback(
        on_epoch_end=lambda epoch, logs: (
            seen.append(look.trainer.get_weights()["w"].item()),
            rates.append(logs["learning_rate"]),
        )
    )
    on = fit(
        StochasticWeightAveraging(start, learning_rate=0.02),
        look,
        on=line(backend=backend),
        epochs=4,
    )
    assert on.get_weights()["w"].item() == pytest.approx(np.mean(seen[first:]), rel=1e-6)
    assert rates == pytest.approx([0.1] * first + [0.02] * (4 - first))


@both_backends
@pytest.mark.parametrize("data", ["all", "one batch of two"])
def test_stochastic_weight_averaging_computes_the_statistics_of_the_data_anew(backend, data):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 1, 8, 8)).astype(np.float32), rng.integers(0, 3, 12)

    def train(epochs, *callbacks, rate=0.05):
        on = onnxfit.Trainer(
            convolutional(),
            loss="cross_entropy",
            optimizer=SGD(rate, momentum=0.9),
            backend=backend,
            gradient="onnx",
        )
        size = 12 if data == "all" else 6
        on.fit(
            x,
            y,
            epochs=epochs,
            batch_size=size,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        )
        return on, size

    plain, size = train(3)
    on, _ = train(3, StochasticWeightAveraging(1))
    weights = on.get_weights()
    # the statistics that the averaged weights have on each batch, in numpy: of the convolution's
    # outputs
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (1, 1), (1, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(padded[:, 0], (3, 3), (1, 2))
    outputs = (
        np.einsum("nhwij,kij->nkhw", windows, weights["conv.weight"][:, 0])
        + weights["conv.bias"][:, None, None]
    )
    parts = [outputs[i : i + size] for i in range(0, 12, size)]
    mean = np.mean([part.mean((0, 2, 3)) for part in parts], 0)
    var = np.mean([part.var((0, 2, 3)) for part in parts], 0)
    assert weights["bn.mean"] == pytest.approx(mean, abs=1e-5)
    assert weights["bn.var"] == pytest.approx(var, rel=1e-4)
    assert not np.allclose(plain.get_weights()["bn.var"], var, rtol=1e-2)
    assert same(on.get_state()["slots"], plain.get_state()["slots"])
    assert on.get_state()["counters"] == plain.get_state()["counters"]


def test_stochastic_weight_averaging_averages_statistics_where_no_pass_is_wanted():
    on = onnxfit.Trainer(convolutional(), loss="cross_entropy", optimizer=0.05, gradient="onnx")
    x, y = np.random.default_rng(0).normal(size=(8, 1, 8, 8)).astype(np.float32), np.arange(8) % 3
    seen = []
    look = LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(on.get_weights()["bn.mean"]))
    on.fit(
        x,
        y,
        epochs=2,
        verbose=0,
        callbacks=[StochasticWeightAveraging(0, update_batch_norm=False), look],
    )
    assert on.get_weights()["bn.mean"] == pytest.approx(np.mean(seen, 0), abs=1e-6)


def test_stochastic_weight_averaging_resumes_and_knows_its_limits(tmp_path):
    def callbacks():
        return [StochasticWeightAveraging(1), BackupAndRestore(tmp_path / "b")]

    with pytest.raises(Killed):
        fit(*callbacks(), KillAfter(7), epochs=6)
    assert same(
        fit(*callbacks(), epochs=6).get_weights(),
        fit(StochasticWeightAveraging(1), epochs=6).get_weights(),
    )
    assert same(
        fit(StochasticWeightAveraging(5), epochs=3).get_weights(), fit(epochs=3).get_weights()
    )
    with pytest.raises(TypeError, match="drop either"):
        fit(StochasticWeightAveraging(learning_rate=0.1), on=line(SGD(Cosine(0.1, 9))))
    for settings in ({"start_epoch": -1}, {"start_epoch": 1.5}, {"learning_rate": -1.0}):
        with pytest.raises(SettingError, match="StochasticWeightAveraging needs"):
            StochasticWeightAveraging(**settings)


# ---------------------------------------------------------------- accumulated gradients


@both_backends
def test_gradients_are_accumulated_over_as_many_batches_as_the_epoch_says(backend):
    seen = []
    look = LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(look.trainer.get_weights()["w"].item())
    )
    on = line(accumulate=3, backend=backend)
    fit(GradientAccumulationScheduler({1: 1, 2: 2}), look, on=on, epochs=3, batch_size=1)
    step = 0.8
    first = [1, 1, step, step]  # of 3, and a window of 1 is flushed at the epoch's end
    second = [step**3, step**4, step**5, step**6]
    third = [step**6, step**7, step**7, step**8]
    assert seen == pytest.approx(first + second + third)
    assert on.global_step == 2 + 4 + 2
    assert on.accumulate == 3


def test_accumulating_more_needs_a_trainer_that_accumulates():
    on = line()
    with pytest.raises(SettingError, match="accumulate=2 or more"):
        fit(GradientAccumulationScheduler({3: 2}), on=on)
    assert on.global_step == 0
    fit(GradientAccumulationScheduler({0: 1}), on=on)
    with pytest.raises(SettingError, match="epochs from 0 on, got -1"):
        GradientAccumulationScheduler({-1: 2})
    for value in (0, 1.5):
        with pytest.raises(SettingError, match="whole number"):
            on.accumulate = value
    with pytest.raises(SettingError, match="which this trainer was built without"):
        on.accumulate = 2


@both_backends
@pytest.mark.parametrize("fewer", [1, 2])
def test_a_window_that_is_already_full_when_it_shrinks_ends_with_the_next_batch(backend, fewer):
    on = line(accumulate=4, backend=backend)
    for _ in range(2):
        on.train_on_batch(X, Y)
    on.accumulate = fewer
    on.train_on_batch(X, Y)
    assert (on.global_step, on.get_weights()["w"].item()) == (1, pytest.approx(0.8))
    on.train_on_batch(X, Y)
    assert on.global_step == (2 if fewer == 1 else 1)


def test_accumulation_resumes_within_a_window(tmp_path):
    def run(*callbacks, on=None):
        on = on or line(accumulate=2)
        return fit(GradientAccumulationScheduler({1: 4}), *callbacks, on=on, epochs=3, batch_size=1)

    path = tmp_path / "a"

    def kill(batch, logs):
        if on.global_batch == 6:  # two of the window of four
            on.save(path)
            raise Killed

    on = line(accumulate=2)
    with pytest.raises(Killed):
        run(LambdaCallback(on_train_batch_end=kill), on=on)
    assert same(run(on=onnxfit.Trainer.load(path)).get_weights(), run().get_weights())


# ---------------------------------------------------------------- freezing

ADAM = Adam(0.1, weight_decay=0.1, ema_momentum=0.9)


@both_backends
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", [ADAM, SGD(0.1, momentum=0.9)])
def test_frozen_weights_and_slots_are_byte_identical_until_their_epoch(
    backend, accumulate, optimizer
):
    x, y = ten_rows()
    on = onnxfit.Trainer(
        mlp(),
        loss="cross_entropy",
        optimizer=optimizer,
        penalty=0.1,
        backend=backend,
        gradient="onnx",
        accumulate=accumulate,
    )
    states = [on.get_state()]
    look = LambdaCallback(
        on_train_batch_end=lambda batch, logs: states.append(on.get_state()),
        on_test_begin=lambda logs: states.append(on.get_state()),
        on_epoch_end=lambda epoch, logs: states.append(on.get_state()),
    )
    on.fit(
        x,
        y,
        epochs=2,
        batch_size=4,
        verbose=0,
        validation_data=(x, y),
        callbacks=[look, Freeze("fc0.*", until_epoch=1)],
    )  # after `look`, for the order must not matter
    fc0 = [
        name
        for part in ("weights", "slots")
        for name in states[0][part]
        if "fc0" in name and "sum" not in name
    ]
    assert len(fc0) >= 4
    for state in states[1:6]:
        for name in fc0:
            part = "weights" if name in state["weights"] else "slots"
            assert state[part][name].tobytes() == states[0][part][name].tobytes(), name
    assert not np.array_equal(
        states[5]["weights"]["fc1.weight"], states[0]["weights"]["fc1.weight"]
    )
    assert not np.array_equal(
        states[-1]["weights"]["fc0.weight"], states[0]["weights"]["fc0.weight"]
    )
    assert on.frozen == ()


@both_backends
def test_what_is_not_frozen_trains_as_if_the_rest_were_no_weights(backend):
    x, y = ten_rows()

    def train(callbacks, **settings):
        on = onnxfit.Trainer(
            mlp(),
            loss="cross_entropy",
            optimizer=ADAM,
            backend=backend,
            gradient="onnx",
            **settings,
        )
        on.fit(x, y, epochs=3, batch_size=4, verbose=0, callbacks=callbacks)
        return on.get_weights()

    frozen, left_out = train([Freeze("fc0.*")]), train([], weights="fc1.*")
    for name, weight in left_out.items():
        assert frozen[name] == pytest.approx(weight, rel=1e-5, abs=1e-6)


def test_freezing_by_hand_by_several_and_layer_after_layer():
    x, y = ten_rows()
    on = network()
    frozen = []
    look = LambdaCallback(on_epoch_begin=lambda epoch, logs: frozen.append(on.frozen))
    settings = {"epochs": 4, "batch_size": 4, "verbose": 0}
    on.fit(
        x, y, callbacks=[Freeze("fc0.bias", 3), Freeze("fc0.*", 2, from_epoch=1), look], **settings
    )
    assert frozen == [("fc0.bias",), ("fc0.weight", "fc0.bias"), ("fc0.bias",), ()]
    frozen.clear()
    on.frozen = "fc1.bias"
    on.fit(
        x, y, callbacks=[Unfreeze({3: "fc0.*", 1: ["fc1.weight", "fc0.bias"]}), look], **settings
    )
    whole, one = ("fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"), ("fc0.weight", "fc1.bias")
    assert frozen == [whole, one, one, ("fc1.bias",)]
    assert on.frozen == ("fc1.bias",)
    before = on.get_weights()
    on.train_on_batch(x, y)
    after = on.get_weights()
    assert [name for name in before if np.array_equal(before[name], after[name])] == ["fc1.bias"]
    with pytest.raises(UnknownNameError, match=r"No trained weight is called 'fc9.\*'"):
        on.fit(x, y, callbacks=[Freeze("fc9.*")], **settings)
    assert on.frozen == ("fc1.bias",)


@both_backends
def test_a_step_that_is_taken_back_leaves_frozen_weights_too(backend):
    on = network(backend)
    on.frozen = ["fc0.*"]
    before = on.get_weights()
    on.train_on_batch(*ten_rows())
    on.revert_step()
    assert same(on.get_weights(), before)
    on.set_weights({"fc0.bias": np.ones(8, np.float32)})
    on.train_on_batch(*ten_rows())
    assert np.array_equal(on.get_weights()["fc0.bias"], np.ones(8))


def test_frozen_statistics_stay_and_gradients_by_hand_pass_over_frozen_weights():
    x, y = np.random.default_rng(0).normal(size=(8, 1, 8, 8)).astype(np.float32), np.arange(8) % 3
    on = onnxfit.Trainer(convolutional(), loss="cross_entropy", optimizer=0.05, gradient="onnx")
    before = on.get_weights()
    fit(Freeze("bn.*"), on=on, x=x, y=y)
    after = on.get_weights()
    assert [name for name in before if np.array_equal(before[name], after[name])] == [
        n for n in before if n.startswith("bn.")
    ]
    on = line(backend="forward_backward")
    on.frozen = "w"
    on.apply_gradients(on.backward(np.ones_like(on.forward(X)))["weights"])
    assert on.get_weights()["w"] == 1


def test_freeze_and_unfreeze_refuse_epochs_that_make_no_sense():
    for make in (
        lambda: Freeze("w", 1, from_epoch=2),
        lambda: Freeze("w", from_epoch=-1),
        lambda: Unfreeze({-1: "w"}),
    ):
        with pytest.raises(SettingError, match="got"):
            make()


# ---------------------------------------------------------------- a learning rate, found


@both_backends
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_finder_leaves_nothing_behind_but_the_rate(backend, accumulate):
    x, y = ten_rows()

    def train(*callbacks, rate=0.05):
        on = onnxfit.Trainer(
            mlp(),
            loss="cross_entropy",
            optimizer=SGD(rate, momentum=0.9),
            metrics=["accuracy"],
            backend=backend,
            gradient="onnx",
            accumulate=accumulate,
        )
        history = on.fit(x, y, epochs=2, batch_size=4, verbose=0, callbacks=list(callbacks))
        return on, history

    plain, expected = train()
    finder = LearningRateFinder(steps=9, set_rate=False)
    on, history = train(finder)
    assert len(finder.rates) == 9
    assert same(on.get_weights(), plain.get_weights())
    assert same(on.get_state()["slots"], plain.get_state()["slots"])
    assert on.get_state()["counters"] == plain.get_state()["counters"]
    assert history.history == expected.history
    finder = LearningRateFinder(steps=40)
    on, _ = train(finder)
    assert on.learning_rate == finder.suggestion
    plain, _ = train(rate=finder.suggestion)
    assert same(on.get_weights(), plain.get_weights())


def test_the_finder_sees_the_losses_of_steps_at_rising_rates():
    finder = LearningRateFinder(1e-3, 30.0, steps=30, mode="exponential", stop_factor=1.5)
    on = fit(finder, epochs=0, batch_size=4)
    w, average, losses = 1.0, 0.0, []
    rates = np.geomspace(1e-3, 30.0, 30)
    for step, rate in enumerate(rates):
        average = 0.9 * average + 0.1 * w**2
        losses.append(average / (1 - 0.9 ** (step + 1)))
        if losses[-1] > 1.5 * min(losses):
            break
        w *= 1 - 2 * rate
    assert len(losses) < 30
    assert finder.losses == pytest.approx(losses, rel=1e-3)
    assert finder.rates == pytest.approx(rates[: len(losses)])
    slopes = np.gradient(losses, np.log(rates[: len(losses)]))
    assert finder.suggestion == pytest.approx(rates[slopes.argmin()])
    assert on.learning_rate == finder.suggestion
    assert on.history.epoch == []
    assert on.get_weights()["w"] == 1


def test_the_finder_passes_over_few_data_again_and_knows_linear_rates_and_flat_losses():
    finder = LearningRateFinder(0.1, 0.3, steps=5, mode="linear")
    fit(finder, epochs=0)
    assert finder.rates == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    flat = LearningRateFinder(steps=5)
    on = fit(
        flat,
        on=onnxfit.Trainer(linear(w=0.0), loss="mse", optimizer=0.1, gradient="onnx"),
        epochs=0,
    )
    assert (flat.suggestion, on.learning_rate) == (None, 0.1)
    wild = LearningRateFinder(1.0, 1e38, steps=20, stop_factor=None)
    with np.errstate(all="ignore"):
        fit(wild, epochs=0)
    assert 1 < len(wild.losses) < 20
    assert np.isfinite(wild.losses).all()


def test_the_finder_s_limits(tmp_path):
    with pytest.raises(TypeError, match="give set_rate=False"):
        fit(LearningRateFinder(), on=line(SGD(Cosine(0.1, 9))))
    fit(LearningRateFinder(steps=3, set_rate=False), on=line(SGD(Cosine(0.1, 9))))
    with pytest.raises(DataError, match="once"):
        fit(LearningRateFinder(), x=iter([(X, Y)]), y=None)
    for settings in (
        {"min_lr": 0},
        {"max_lr": 1e-9},
        {"steps": 2},
        {"mode": "log"},
        {"stop_factor": 1},
    ):
        with pytest.raises(SettingError, match="LearningRateFinder needs"):
            LearningRateFinder(**settings)
    with pytest.raises(SettingError, match="on_train_begin or on_train_end"):
        next(line().trial_steps([0.1]))
    on = line()
    with pytest.raises(SettingError, match="on_train_begin or on_train_end"):
        fit(LambdaCallback(on_epoch_end=lambda epoch, logs: next(on.trial_steps([0.1]))), on=on)


def test_the_finder_does_not_look_again_when_training_resumes(tmp_path):
    def callbacks():
        return [LearningRateFinder(1e-3, 0.4, steps=8), BackupAndRestore(tmp_path / "b")]

    with pytest.raises(Killed):
        fit(*callbacks(), KillAfter(3), epochs=3)
    again = callbacks()
    resumed, whole = fit(*again, epochs=3), fit(LearningRateFinder(1e-3, 0.4, steps=8), epochs=3)
    assert same(resumed.get_weights(), whole.get_weights())
    assert resumed.learning_rate == whole.learning_rate == again[0].suggestion
    assert len(again[0].losses) == 8


def test_the_finder_s_picture(tmp_path, monkeypatch):
    finder = LearningRateFinder(steps=5)
    fit(finder, epochs=0)
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(InstallationError, match="matplotlib"):
            finder.plot(tmp_path / "a.png")
    pytest.importorskip("matplotlib")
    finder.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- batch sizes


@pytest.fixture
def machine(monkeypatch):
    """A machine on which a step takes as long as `seconds` says of its rows, and fails where that
    raises.
    """
    now, step = [0.0], onnxfit.Trainer._step

    def set_to(seconds):
        def timed(self, batch, rate):
            now[0] += seconds(batch.rows)
            return step(self, batch, rate)

        monkeypatch.setattr(onnxfit.Trainer, "_step", timed)

    monkeypatch.setattr(batch_size_finder, "perf_counter", lambda: now[0])
    return set_to


def memory_for(most, error):
    def seconds(rows):
        if rows > most:
            raise error
        return 1.0

    return seconds


FULL = MemoryError("Unable to allocate 9 GiB")
ROWS = np.ones((100, 1), np.float32)
SATURATES = (
    lambda rows: max(rows, 16) * 1.0
)  # noqa: E731  from 16 rows on, twice the rows take twice the time


@both_backends
@pytest.mark.parametrize(
    ("seconds", "settings", "tried", "suggestion"),
    [
        pytest.param(lambda rows: 1.0, {}, [2, 4, 8, 16, 32, 64], 64, id="the data end it"),
        pytest.param(lambda rows: 1.0, {"init_val": 100}, [100], 100, id="all rows are a batch"),
        pytest.param(lambda rows: 1.0, {"init_val": 101}, [], None, id="more rows than there are"),
        pytest.param(lambda rows: 1.0, {"init_val": 3, "max_trials": 3}, [3, 6, 12], 12, id="max_trials"),
        pytest.param(lambda rows: 1.0, {"mode": "binsearch"}, [2, 4, 8, 16, 32, 64, 96], 96, id="binsearch, the data end it"),
        pytest.param(SATURATES, {}, [2, 4, 8, 16, 32], 16, id="no gain ends it"),
        pytest.param(SATURATES, {"mode": "binsearch"}, [2, 4, 8, 16, 32, 24, 20, 18, 17], 16, id="binsearch finds no gain"),
        pytest.param(SATURATES, {"min_gain": None}, [2, 4, 8, 16, 32, 64], 64, id="no gain wanted"),
        pytest.param(lambda rows: rows**0.5, {"min_gain": 0.4}, [2, 4, 8, 16, 32, 64], 64, id="a gain of 41 % at 40 %"),
        pytest.param(lambda rows: rows**0.5, {"min_gain": 0.42}, [2, 4], 2, id="a gain of 41 % at 42 %"),
        pytest.param(memory_for(50, FULL), {}, [2, 4, 8, 16, 32, 64], 32, id="memory ends it"),
        pytest.param(
            memory_for(50, FULL), {"mode": "binsearch", "min_gain": None}, [2, 4, 8, 16, 32, 64, 48, 56, 52, 50, 51], 50,
            id="binsearch, memory ends it",
        ),
        pytest.param(memory_for(9, StepError("Failed to allocate memory for requested buffer")), {}, [2, 4, 8, 16], 8, id="onnxruntime's, too"),
        pytest.param(memory_for(1, MemoryError()), {}, [2], None, id="no size runs"),
    ],
)  # fmt: skip
def test_the_batch_size_found(machine, backend, seconds, settings, tried, suggestion):
    machine(seconds)
    finder = BatchSizeFinder(**settings)
    on = fit(finder, on=line(backend=backend), x=ROWS, y=ROWS, epochs=0, batch_size=1)
    assert [result["batch_size"] for result in finder.results] == tried
    assert finder.suggestion == suggestion
    assert on.batch_size == (suggestion or 1)
    for result in finder.results:
        if "error" in result:
            assert (
                result["error"] in (str(FULL), "MemoryError")
                or "allocate memory" in result["error"]
            )
        else:
            assert result["seconds"] == pytest.approx(seconds(result["batch_size"]))
            assert result["samples_per_second"] == result["batch_size"] / result["seconds"]
    json.dumps(finder.results)


@both_backends
@pytest.mark.parametrize("data", ["arrays", "loader", "prefetch", "mapped", "parquet"])
def test_a_fit_with_a_batch_size_that_was_found_is_a_fit_with_that_batch_size(
    machine, backend, data, tmp_path
):
    machine(lambda rows: max(rows, 4) * 1.0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(22, 4)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int64)

    def given(batch_size):
        if data == "arrays":
            return {"x": x, "y": y, "batch_size": batch_size}
        if data == "mapped":
            np.save(tmp_path / "x.npy", x)
            return {"x": str(tmp_path / "x.npy"), "y": y, "batch_size": batch_size}
        if data == "parquet":
            pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip(
                "pyarrow.parquet"
            )
            parquet.write_table(pyarrow.table({"x": list(x), "y": y}), tmp_path / "a.parquet")
            return {
                "x": onnxfit.ParquetLoader(tmp_path / "a.parquet", "x", "y", batch_size=batch_size)
            }
        return {
            "x": onnxfit.DataLoader(x, y, batch_size=batch_size, prefetch=2 * (data == "prefetch"))
        }

    seen, ends = [], []
    finder = BatchSizeFinder()
    look = LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append((look.params["steps"], on.batch_size))
    )
    bar = LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))
    on, plain = (network(backend, metrics=["accuracy"]) for _ in range(2))
    history = on.fit(**given(16), epochs=2, verbose=0, callbacks=[look, finder, bar])
    expected = plain.fit(**given(4), epochs=2, verbose=0)
    assert finder.suggestion == 4
    assert seen == [(6, 4)] * 2
    assert ends == [*range(6)] * 2
    assert same(on.get_weights(), plain.get_weights())
    assert same(on.get_state()["slots"], plain.get_state()["slots"])
    assert on.get_state()["counters"] == plain.get_state()["counters"]
    assert history.history == expected.history
    assert [list(cache.exact) for cache in on._backend.caches.values()] == [
        list(cache.exact) for cache in plain._backend.caches.values()
    ]


def test_a_batch_size_may_be_found_and_not_set(machine):
    machine(lambda rows: 1.0)
    finder = BatchSizeFinder(set_batch_size=False)
    on = fit(finder, x=ROWS, y=ROWS, batch_size=10)
    assert (finder.suggestion, on.batch_size, on.global_batch) == (64, 10, 10)


def test_the_batch_size_finder_does_not_look_again_when_training_resumes(machine, tmp_path):
    machine(lambda rows: max(rows, 4) * 1.0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(22, 4)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int64)

    def callbacks():
        return [BatchSizeFinder(), BackupAndRestore(tmp_path / "b", every_n_steps=1)]

    whole = network()
    whole.fit(x, y, epochs=3, verbose=0, callbacks=[BatchSizeFinder()])
    with pytest.raises(Killed):
        network().fit(x, y, epochs=3, verbose=0, callbacks=[*callbacks(), KillAfter(8)])
    machine(lambda rows: rows**2.0)  # now no larger size would gain
    again, resumed = callbacks(), network()
    resumed.fit(x, y, epochs=3, verbose=0, callbacks=again)
    assert again[0].suggestion == resumed.batch_size == 4
    assert len(again[0].results) == 3
    assert same(resumed.get_weights(), whole.get_weights())
    assert resumed.global_batch == whole.global_batch == 18


def test_the_limits_of_the_batch_size_finder(machine):
    machine(lambda rows: 1.0)
    for settings in (
        {"mode": "linear"},
        {"steps_per_trial": 0},
        {"init_val": 0},
        {"max_trials": 0},
        {"min_gain": -0.1},
        {"min_gain": np.nan},
    ):
        with pytest.raises(SettingError, match="BatchSizeFinder needs"):
            BatchSizeFinder(**settings)
    batches = [(ROWS, ROWS), (ROWS, ROWS)]
    for data in (batches, lambda: iter(batches), iter(batches)):
        on = line()
        with pytest.raises(SettingError, match=r"comes in batches\. Pass arrays, a DataLoader"):
            fit(BatchSizeFinder(), on=on, x=data, y=None)
        assert on.global_batch == 0
    fixed = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[4, 1] x) => (float[4, 1] y) <float[1, 1]'
        " w = {1}> { y = MatMul(x, w) }"
    )
    with pytest.raises(DataError, match="fixed"):
        fit(
            BatchSizeFinder(),
            on=onnxfit.Trainer(fixed, loss="mse", gradient="onnx"),
            x=ROWS,
            y=ROWS,
            batch_size=4,
        )
    machine(memory_for(4, StepError("The step failed: no kernel")))
    with pytest.raises(StepError, match="no kernel"):  # which is not of memory
        fit(BatchSizeFinder(), x=ROWS, y=ROWS)


@pytest.mark.parametrize(
    "hook", ["on_epoch_begin", "on_train_batch_end", "on_epoch_end", "on_train_end"]
)
def test_the_batch_size_is_settled_before_the_first_epoch(hook):
    def change(*arguments):
        on.batch_size = 1

    on = line()
    with pytest.raises(SettingError, match="in on_train_begin"):
        fit(LambdaCallback(**{hook: change}), on=on)
    with pytest.raises(SettingError, match="in on_train_begin"):
        on.batch_size = 1
    assert on.batch_size == 2
    for wrong in (0, 1.5):
        with pytest.raises(SettingError, match="batch_size is"):
            fit(
                LambdaCallback(
                    on_train_begin=lambda logs, wrong=wrong: setattr(on, "batch_size", wrong)
                ),
                on=on,
            )


def test_the_picture_of_batch_sizes(machine, tmp_path, monkeypatch):
    machine(memory_for(50, FULL))
    finder = BatchSizeFinder()
    fit(finder, x=ROWS, y=ROWS, epochs=0)
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(InstallationError, match=r"BatchSizeFinder\.plot needs matplotlib"):
            finder.plot(tmp_path / "a.png")
    pytest.importorskip("matplotlib")
    finder.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- time, machine, rates, thresholds


@pytest.mark.parametrize(
    ("duration", "interval", "batches"),
    [(5, "batch", 5), (5, "epoch", 8), (timedelta(seconds=9), "batch", 9), (None, "batch", 12)],
)
def test_the_timer_stops_training_in_time(monkeypatch, duration, interval, batches):
    now = [100.0]
    monkeypatch.setattr(timer, "monotonic", lambda: now[0])

    def pass_a_second(batch, logs):
        now[0] += 1

    clock = Timer(duration, interval)
    on = fit(LambdaCallback(on_train_batch_begin=pass_a_second), clock, epochs=3, batch_size=1)
    assert on.global_batch == batches
    now[0] += 50  # after the fit no time passes
    assert clock.elapsed == batches
    assert clock.remaining == (None if duration is None else 0)
    assert (on.stop_reason or "").startswith(
        "" if duration is None else f"Timer: {batches}.0 seconds have passed"
    )


def test_the_timer_counts_the_time_before_an_interruption(monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(timer, "monotonic", lambda: now[0])

    def pass_a_second(batch, logs):
        now[0] += 1

    def run(kill):
        second = LambdaCallback(on_train_batch_begin=pass_a_second)
        return fit(
            second,
            Timer(7),
            BackupAndRestore(tmp_path / "b", every_n_steps=1),
            kill,
            epochs=9,
            batch_size=1,
        )

    with pytest.raises(Killed):
        run(KillAfter(3))
    now[0] += 1000
    assert run(KillAfter(-1)).global_batch == 7
    for settings in ((-1,), (timedelta(0),), (1, "step")):
        with pytest.raises(SettingError, match="Timer needs"):
            Timer(*settings)


def test_the_machine_s_figures(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(device_stats, "monotonic", lambda: now[0])
    monkeypatch.setattr(device_stats, "process_time", lambda: now[0] * 1.5)

    def pass_a_second(batch, logs):
        now[0] += 1

    second = LambdaCallback(on_train_batch_begin=pass_a_second, on_test_batch_begin=pass_a_second)
    history = fit(second, DeviceStats(), epochs=2, validation_data=(X, Y)).history.history
    assert history["samples_per_second"] == [2, 2]  # 4 rows in the 2 seconds of training
    assert history["cpu_percent"] == [150, 150]
    if sys.platform != "win32":
        before = history["memory_megabytes"][-1]
        assert 10 < before < 1e6
        if sys.platform == "linux":
            held = np.ones(25_000_000, np.float64)
            more = fit(DeviceStats()).history.history["memory_megabytes"][-1]
            assert more - before > 100 + 0 * held[0]


def test_the_rate_of_every_step_is_in_the_logs_and_in_tensorboard(tmp_path):
    seen = []
    look = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["lr"]))
    schedule = Cosine(0.1, 4)
    board = TensorBoard(tmp_path, update_freq="batch")
    fit(board, LearningRateMonitor(), look, on=line(SGD(schedule)), epochs=2)
    assert seen == [schedule(step) for step in range(4)]
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("batch_lr")] == [
        (s + 1, pytest.approx(schedule(s))) for s in range(4)
    ]
    with pytest.raises(SettingError, match="a name of its own"):
        LearningRateMonitor("loss")


@pytest.mark.parametrize(
    ("values", "threshold", "mode", "ran"),
    [
        ([3, 2, 1, 0], 1, "min", 3),
        ([3, 2, 1, 0], 1.5, "min", 3),
        ([0.5, 0.9, 1.0], 0.9, "max", 2),
        ([float("nan"), 0.5], 1, "min", 2),
        ([3, 2], 0, "auto", 2),
    ],
)
def test_training_stops_when_the_threshold_is_reached(values, threshold, mode, ran):
    script = LambdaCallback(
        on_epoch_end=lambda epoch, logs: script.trainer.log("val_loss", values[epoch])
    )
    on = fit(script, ThresholdStop("val_loss", threshold, mode), epochs=len(values))
    assert len(on.history.epoch) == ran
    assert on.stop_reason is None or "ThresholdStop: val_loss is" in on.stop_reason


def test_a_threshold_of_a_figure_that_is_not_there_is_warned_of_once():
    with pytest.warns(UserWarning, match="ThresholdStop monitors 'val_loss'") as warned:
        fit(ThresholdStop("val_loss", 1), epochs=3)
    assert len(warned) == 1


# ---------------------------------------------------------------- predictions, a server, MLflow


@both_backends
def test_predictions_are_written_batch_after_batch(tmp_path, backend):
    on = onnxfit.Trainer(
        two_outputs(), loss={"a": "mse", "b": "mse"}, backend=backend, gradient="onnx"
    )
    x = np.arange(5, dtype=np.float32)[:, None]
    for batch_size in (2, 3):
        expected = on.predict(
            x, batch_size=batch_size, callbacks=[PredictionWriter(tmp_path / "new")]
        )
        files = sorted((tmp_path / "new").iterdir())
        assert [file.name for file in files] == [
            f"batch-{i:06d}.npz" for i in range(-(-5 // batch_size))
        ]
        parts = [dict(np.load(file)) for file in files]
        for output, array in expected.items():
            assert np.array_equal(np.concatenate([part[output] for part in parts]), array)
    assert on.predicted == {}


class Server:
    """A server on the loopback that keeps what is posted, and answers with the statuses of a list.
    """

    def __init__(self, *statuses):
        posted = self.posted = []
        statuses = list(statuses)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                posted.append((self.path, dict(self.headers), json.loads(body)))
                self.send_response(statuses.pop(0) if statuses else 200)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/logs"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.mark.usefixtures("no_proxy")
def test_figures_are_posted_and_nan_too():
    nan = LambdaCallback(on_epoch_end=lambda epoch, logs: nan.trainer.log("odd", float("nan")))
    with Server() as server:
        on = fit(RemoteMonitor(server.url, headers={"X-Key": "secret"}), nan, epochs=2)
    assert [path for path, *_ in server.posted] == ["/logs"] * 2
    assert all(
        headers["Content-Type"] == "application/json" and headers["X-Key"] == "secret"
        for _, headers, _ in server.posted
    )
    bodies = [body for *_, body in server.posted]
    assert [body["epoch"] for body in bodies] == [0, 1]
    assert [body["loss"] for body in bodies] == on.history.history["loss"]
    assert bodies[0]["odd"] == "NaN"


@pytest.mark.usefixtures("no_proxy")
def test_a_server_that_refuses_or_is_away_costs_one_warning_and_no_epoch():
    with (
        Server(500, 200, 404) as server,
        pytest.warns(RuntimeWarning, match=r"could not reach .*500") as warned,
    ):
        assert fit(RemoteMonitor(server.url), epochs=3).epoch == 3
    assert (len(warned), len(server.posted)) == (1, 3)
    monitor = RemoteMonitor(server.url, timeout=1)  # nobody listens any more
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="Training goes on") as warned:
            assert fit(monitor, epochs=2).epoch == 2
        assert len(warned) == 1
    for settings in ({"url": "ftp://a/"}, {"url": "http:"}, {"url": "http://a", "timeout": 0}):
        with pytest.raises(SettingError, match="RemoteMonitor needs"):
            RemoteMonitor(**settings)


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
        "mine", "first", "http://tracking", {"k": "v"}, {"note": 5}, log_model=True
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
        (value, epoch) for epoch, value in enumerate(on.history.history["loss"])
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
