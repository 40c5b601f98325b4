"""SwapEMAWeights and StochasticWeightAveraging, by averages computed by hand."""

import numpy as np
import pytest

import onnxfit
from onnxfit.callbacks import (
    BackupAndRestore,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    SwapEMAWeights,
)
from onnxfit.errors import SettingError
from onnxfit.graph import names
from onnxfit.optimizers import SGD
from onnxfit.schedules import Cosine
from tests.callbacks.helpers import KillAfter, Killed, X, Y, both_backends, fit, line, same
from tests.models import convolutional, linear


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
    saved = onnxfit.Trainer((tmp_path / "4.onnx").read_bytes(), loss="mse").get_weights()
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
    with pytest.raises(TypeError, match="Remove either"):
        fit(StochasticWeightAveraging(learning_rate=0.1), on=line(SGD(Cosine(0.1, 9))))
    for settings in ({"start_epoch": -1}, {"start_epoch": 1.5}, {"learning_rate": -1.0}):
        with pytest.raises(SettingError, match="StochasticWeightAveraging needs"):
            StochasticWeightAveraging(**settings)
