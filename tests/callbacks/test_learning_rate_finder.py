"""LearningRateFinder, by losses computed by hand."""

import sys

import numpy as np
import pytest

import onnxfit
from onnxfit.callbacks import BackupAndRestore, LambdaCallback, LearningRateFinder
from onnxfit.errors import DataError, InstallationError, SettingError
from onnxfit.optimizers import SGD
from onnxfit.schedules import Cosine
from tests.callbacks.helpers import (
    KillAfter,
    Killed,
    X,
    Y,
    both_backends,
    fit,
    line,
    same,
    ten_rows,
)
from tests.models import linear, mlp


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
    finder = LearningRateFinder(1e-3, max_lr=30.0, steps=30, mode="exponential", stop_factor=1.5)
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
    finder = LearningRateFinder(0.1, max_lr=0.3, steps=5, mode="linear")
    fit(finder, epochs=0)
    assert finder.rates == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    flat = LearningRateFinder(steps=5)
    on = fit(
        flat,
        on=onnxfit.Trainer(linear(w=0.0), loss="mse", optimizer=0.1, gradient="onnx"),
        epochs=0,
    )
    assert (flat.suggestion, on.learning_rate) == (None, 0.1)
    wild = LearningRateFinder(1.0, max_lr=1e38, steps=20, stop_factor=None)
    with np.errstate(all="ignore"):
        fit(wild, epochs=0)
    assert 1 < len(wild.losses) < 20
    assert np.isfinite(wild.losses).all()


def test_the_finder_s_limits(tmp_path):
    with pytest.raises(TypeError, match="Pass set_rate=False"):
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
    with pytest.raises(SettingError, match="on_train_begin and on_train_end"):
        next(line().trial_steps([0.1]))
    on = line()
    with pytest.raises(SettingError, match="on_train_begin and on_train_end"):
        fit(LambdaCallback(on_epoch_end=lambda epoch, logs: next(on.trial_steps([0.1]))), on=on)


def test_the_finder_does_not_look_again_when_training_resumes(tmp_path):
    def callbacks():
        return [LearningRateFinder(1e-3, max_lr=0.4, steps=8), BackupAndRestore(tmp_path / "b")]

    with pytest.raises(Killed):
        fit(*callbacks(), KillAfter(3), epochs=3)
    again = callbacks()
    resumed, whole = (
        fit(*again, epochs=3),
        fit(LearningRateFinder(1e-3, max_lr=0.4, steps=8), epochs=3),
    )
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
