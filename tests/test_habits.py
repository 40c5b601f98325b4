"""Habits that people bring from Keras, PyTorch, Lightning and scikit-learn, and their mistakes.

Each row of `WORKS` is a call and a check of its result. Each row of `REFUSED` is a call and the fix
that its error names: an OnnxfitError of at most four lines.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from onnxfit import OnnxfitError, Trainer
from onnxfit.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from onnxfit.losses import Huber
from onnxfit.optimizers import SGD, Adam, RMSprop
from onnxfit.schedules import Cosine
from tests.models import linear, mlp

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
CLASSES = (X @ np.eye(4, 3)).argmax(axis=1)
MAX_LINES = 4


class Bench:
    """What the rows use: trainers that are built once, and files in the current folder."""

    def __init__(self) -> None:
        self.regression = Trainer(linear(4), loss="mse", optimizer=0.1, metrics=["mae"])
        self.classification = Trainer(mlp((4, 3)), loss="cross_entropy", optimizer=0.1)
        self.state = self.regression.get_state()

    def fit(self, **settings: Any) -> Any:
        return self.regression.fit(X, Y, **{"verbose": 0, **settings})


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("habits"))
        yield Bench()


def build(**settings: Any) -> Trainer:
    return Trainer(linear(4), **{"loss": "mse", "optimizer": 0.1, **settings})


WORKS: dict[str, tuple[Callable[[Bench], Any], Callable[[Any], bool]]] = {
    "a loss by its name in PyTorch": (
        lambda _: build(loss="MSELoss").objectives["y"].loss,
        lambda loss: type(loss).__name__ == "MeanSquaredError",
    ),
    "a loss with hyphens": (
        lambda _: build(loss="mean-squared-error").objectives["y"].loss,
        lambda loss: type(loss).__name__ == "MeanSquaredError",
    ),
}
REFUSED: dict[str, tuple[Callable[[Bench], Any], str]] = {
    # ------------------------------------------------------------------ keywords
    "Adam(lr=)": (lambda _: Adam(lr=0.1), "'learning_rate'?"),
    "Adam(beta_1=)": (lambda _: Adam(beta_1=0.9), "'betas'?"),
    "Adam(epsilon=)": (lambda _: Adam(epsilon=1e-7), "'eps'?"),
    "Adam(clipnorm=)": (lambda _: Adam(clipnorm=1.0), "Trainer(..., clip_norm=...)"),
    "SGD(decay=)": (lambda _: SGD(decay=0.1), "schedules.InverseTime"),
    "SGD(params=)": (lambda _: SGD(params=[]), "leave it out"),
    "RMSprop(rho=)": (lambda _: RMSprop(rho=0.9), "'alpha'?"),
    "Huber(detla=)": (lambda _: Huber(detla=1.0), "'delta'?"),
    "Cosine(0.1)": (lambda _: Cosine(0.1), "lacks decay_steps"),
    "Trainer(lr=)": (lambda _: build(lr=0.1), "optimizer=Adam(learning_rate=0.001)"),
    "Trainer(criterion=)": (lambda _: Trainer(linear(4), criterion="mse"), "'loss'?"),
    "Trainer(optimiser=)": (lambda _: build(optimiser="adam"), "'optimizer'?"),
    "Trainer(random_state=)": (lambda _: build(random_state=0), "'seed'?"),
    "Trainer(epochs=)": (lambda _: build(epochs=3), "argument of fit"),
    "Trainer()": (lambda _: Trainer(), "lacks model_onnx"),
    "fit(epoch=)": (lambda b: b.fit(epoch=2), "'epochs'?"),
    "fit(max_epochs=)": (lambda b: b.fit(max_epochs=2), "'epochs'?"),
    "fit(lr=)": (lambda b: b.fit(lr=0.1), "setting of the optimizer"),
    "fit(workers=)": (lambda b: b.fit(workers=2), "Prefetch"),
    "fit(val_data=)": (lambda b: b.fit(val_data=(X, Y)), "'validation_data'?"),
    "fit by position": (
        lambda b: b.regression.fit(X, Y, None, 10),
        "takes 3 arguments by position (x, y, sample_weight), got 4",
    ),
    "EarlyStopping(patiance=)": (lambda _: EarlyStopping(patiance=3), "'patience'?"),
    "EarlyStopping by position": (lambda _: EarlyStopping("loss", 0, 3), "(monitor), got 3"),
    "ModelCheckpoint(dirpath=)": (lambda _: ModelCheckpoint(dirpath="a"), "'filepath'?"),
    "ModelCheckpoint(save_best=)": (
        lambda _: ModelCheckpoint("a", save_best=True),
        "'save_best_only'?",
    ),
    "ReduceLROnPlateau(epsilon=)": (lambda _: ReduceLROnPlateau(epsilon=0.1), "'min_delta'?"),
    # ------------------------------------------------------------------ names
    "a loss misspelt": (lambda _: build(loss="mean_sqared_error"), "'mean_squared_error'?"),
    "many known names": (lambda _: build(loss="mean_sqared_error"), " more."),
    "an optimizer misspelt": (lambda _: build(optimizer="adm"), "'adam'?"),
    "a metric misspelt": (lambda _: build(metrics=["acuracy"]), "'accuracy'?"),
    "a weight misspelt": (lambda _: build(weights="W"), "'w'?"),
    "an optimizer's class": (lambda _: build(optimizer=Adam), "Adam()"),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_habit_works(name: str, bench: Bench) -> None:
    run, is_right = WORKS[name]
    result = run(bench)
    assert is_right(result), result


@pytest.mark.parametrize("name", REFUSED)
def test_a_habit_is_refused_with_its_fix(name: str, bench: Bench) -> None:
    run, fix = REFUSED[name]
    before = bench.regression.get_weights(), bench.regression.global_step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(OnnxfitError) as refused:
            run(bench)
    message = str(refused.value)
    assert fix in message
    assert len(message.splitlines()) <= MAX_LINES
    np.testing.assert_equal((bench.regression.get_weights(), bench.regression.global_step), before)
