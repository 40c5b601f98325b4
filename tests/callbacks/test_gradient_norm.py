"""GradientNorm: the norms of the gradients that an update gets, computed again with NumPy."""

import numpy as np
import pytest

import onnxfit
from onnxfit.callbacks import BackupAndRestore, Callback, CSVLogger, GradientNorm, LambdaCallback
from onnxfit.optimizers import SGD
from tests.builds import every_way
from tests.callbacks.helpers import (
    KillAfter,
    Killed,
    X,
    Y,
    both_backends,
    fit,
    line,
    rows,
    ten_rows,
)
from tests.models import linear, mlp

WEIGHTS = ("fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias")


def gradients(weights, x, y, penalty):
    """Return the gradients of `mlp()` under cross-entropy and an L2 penalty, in float64."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    hidden = np.tanh(x @ w["fc0.weight"] + w["fc0.bias"])
    logits = hidden @ w["fc1.weight"] + w["fc1.bias"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    d_logits = p / len(y)
    d_hidden = d_logits @ w["fc1.weight"].T * (1 - hidden**2)
    of_loss = {
        "fc0.weight": x.T @ d_hidden,
        "fc0.bias": d_hidden.sum(0),
        "fc1.weight": hidden.T @ d_logits,
        "fc1.bias": d_logits.sum(0),
    }
    return {name: g + 2 * penalty * w[name] for name, g in of_loss.items()}


class Batches(Callback):
    """Keep the weights before each batch, and the figures after it."""

    def __init__(self):
        self.weights = []
        self.logs = []

    def on_train_batch_begin(self, batch, logs):
        self.weights.append(self.trainer.get_weights())

    def on_train_batch_end(self, batch, logs):
        self.logs.append(dict(logs))


def norm(arrays):
    return np.sqrt(sum((array**2).sum() for array in arrays))


@every_way
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": 0.5},
        {"optimizer": "adam", "penalty": 0.05, "clip_norm": 0.1, "accumulate": 2},
        {"optimizer": "adam", "clip_value": 0.01},
    ],
    ids=["plain", "accumulated", "clipped"],
)
def test_the_norms_are_those_of_the_gradients_before_clipping(way, settings):
    x, y = ten_rows()
    on = onnxfit.Trainer(mlp(), loss="cross_entropy", **way, **settings)
    batches, window = Batches(), settings.get("accumulate", 1)
    callbacks = [GradientNorm(per_weight=True), batches]
    history = on.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks).history
    expected = []
    for first in range(0, 3, window):
        terms = [
            gradients(
                batches.weights[first],
                x[4 * i : 4 * i + 4].astype(np.float64),
                y[4 * i : 4 * i + 4],
                settings.get("penalty", 0.0),
            )
            for i in range(first, min(first + window, 3))
        ]
        mean = {name: np.mean([term[name] for term in terms], 0) for name in WEIGHTS}
        each = {f"gradient_norm/{name}": norm([mean[name]]) for name in WEIGHTS}
        expected.append({"gradient_norm": norm(mean.values()), **each})
    names = list(expected[0])
    logged = [[logs[n] for n in names] for logs in batches.logs if names[0] in logs]
    # the update of the last window, which is too short, belongs to no batch
    whole = 3 // window
    assert [names[0] in logs for logs in batches.logs] == [(i + 1) % window == 0 for i in range(3)]
    np.testing.assert_allclose(
        logged, [[one[n] for n in names] for one in expected[:whole]], rtol=2e-5
    )
    means = [np.mean([one[name] for one in expected]) for name in names]
    np.testing.assert_allclose([history[name][0] for name in names], means, rtol=2e-5)
    assert [name for name in history if name.startswith("gradient")] == names


@pytest.mark.torch
@both_backends
def test_the_norm_is_the_one_that_torch_clips_by(backend):
    torch = pytest.importorskip("torch")
    x, y = ten_rows()
    on = onnxfit.Trainer(mlp(), loss="cross_entropy", backend=backend, optimizer="adam")
    theirs = {n: torch.tensor(w, requires_grad=True) for n, w in on.get_weights().items()}
    hidden = torch.tanh(torch.tensor(x) @ theirs["fc0.weight"] + theirs["fc0.bias"])
    logits = hidden @ theirs["fc1.weight"] + theirs["fc1.bias"]
    torch.nn.functional.cross_entropy(logits, torch.tensor(y)).backward()
    expected = torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.1).item()
    history = on.fit(x, y, batch_size=10, verbose=0, callbacks=GradientNorm()).history
    np.testing.assert_allclose(history["gradient_norm"], [expected], rtol=1e-6)


@both_backends
@pytest.mark.parametrize("exponent", [13, -13])
def test_squares_beyond_float32_do_not_matter(backend, exponent):
    # y = w x with w = 1, so that the gradient is 2 x²; a learning rate of 0 keeps w
    on = onnxfit.Trainer(linear(w=1.0), loss="mse", optimizer=0.0, backend=backend)
    x = np.full((2, 1), 10.0**exponent, np.float32)
    history = on.fit(x, 0 * x, verbose=0, callbacks=GradientNorm()).history
    np.testing.assert_allclose(history["gradient_norm"], [2 * 10.0 ** (2 * exponent)], rtol=1e-6)


@both_backends
def test_a_fit_without_the_callback_has_the_graphs_of_before(backend):
    on, never = line(backend=backend), line(backend=backend)
    fit(on=on)
    kind = {"full": "train", "forward_backward": "step", "in_place": "gradients"}[backend]
    compiled = on._training.backend.caches[kind]
    before = dict(compiled.exact)
    fit(GradientNorm(), on=on)
    assert fit(on=on).history.history.keys() == {"loss", "learning_rate"}
    numbers = {"model": b"", "trained": b""}  # of weights, which differ
    assert on.save_onnx_graph(bytes) | numbers == never.save_onnx_graph(bytes) | numbers
    assert on._training.backend.caches[kind].exact == before


def test_fits_with_the_callback_compile_once():
    on = line()
    fit(GradientNorm(), on=on)
    (session,) = on._training.backend._set_aside["global"][0]["train"].exact.values()
    fit(GradientNorm(), on=on, epochs=2)
    assert list(on._training.backend._set_aside["global"][0]["train"].exact.values()) == [session]


def test_the_weights_are_those_of_a_fit_without_the_callback():
    x, y = ten_rows()
    trained = []
    for callbacks in ([], [GradientNorm()]):
        on = onnxfit.Trainer(mlp(), loss="cross_entropy", optimizer="adam", clip_norm=0.5)
        on.fit(x, y, epochs=3, batch_size=4, verbose=0, callbacks=callbacks)
        trained.append(on.get_weights())
    for name in WEIGHTS:
        np.testing.assert_allclose(trained[0][name], trained[1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("killed_after", [2, 4])
def test_the_mean_of_an_epoch_survives_a_crash(tmp_path, killed_after):
    def callbacks():
        return [GradientNorm(), CSVLogger(tmp_path / "log.csv")]

    settings = {"batch_size": 1, "epochs": 2}  # 4 batches an epoch
    whole = fit(*callbacks(), **settings)
    backup = BackupAndRestore(tmp_path / "backup", every_n_steps=1)
    with pytest.raises(Killed):
        fit(*callbacks(), backup, KillAfter(killed_after), **settings)
    again = fit(*callbacks(), backup, **settings)
    assert again.history.history == whole.history.history
    logged = [float(row["gradient_norm"]) for row in rows(tmp_path / "log.csv")]
    assert logged == whole.history.history["gradient_norm"]


def test_steps_of_other_callbacks_are_not_counted():
    def step(batch, logs):
        on.train_on_batch(10 * X, Y)

    on = line(optimizer=SGD(0.0))
    steps = LambdaCallback(on_train_batch_end=step)
    batches = Batches()
    history = fit(steps, GradientNorm(), batches, on=on).history.history
    # y = w x with w = 1 and x = 1: the gradient is 2
    assert [logs["gradient_norm"] for logs in batches.logs] == [2.0, 2.0]
    assert history["gradient_norm"] == [2.0]


def test_what_on_gradients_leaves_is_measured():
    class Double(Callback):
        def on_gradients(self, gradients):
            gradients["w"] *= 2

    on = fit(Double(), GradientNorm(), on=line(SGD(0.0), backend="forward_backward"))
    assert on.history.history["gradient_norm"] == [4.0]
