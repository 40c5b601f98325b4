"""Figures over batches do not depend on the sizes of the batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnxfit import Trainer, losses
from onnxfit.registry import registry
from tests.helpers import Recorder
from tests.models import linear, mlp, two_outputs

LOSSES = {cls.__name__: cls for cls in registry("onnxfit.losses", losses.Loss).values()}
ROWS = 10
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
W = np.linspace(-0.5, 2, ROWS).astype(np.float32)


def labels_of(loss: losses.Loss, outputs: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    if isinstance(loss, losses.ClassLoss):
        classes = np.arange(ROWS) % outputs
        return np.where(classes == 1, -1, classes) if loss.ignore_index is not None else classes
    if isinstance(loss, losses.Hinge | losses.SquaredHinge):
        return np.sign(rng.normal(size=(ROWS, outputs))).astype(np.float32)
    if isinstance(loss, losses.GaussianNLL):
        outputs //= 2
    y = rng.uniform(0.1, 1, (ROWS, outputs)).astype(np.float32)
    return y / y.sum(1, keepdims=True)


def variants() -> list[losses.Loss]:
    plain = [cls() for cls in LOSSES.values()]
    masked = [losses.CrossEntropy(ignore_index=-1), losses.NLL(class_weights=(1.0, 0.5, 0, 2.0))]
    return [*plain, *masked]


@pytest.mark.filterwarnings("ignore:.*takes")
@pytest.mark.parametrize("loss", variants(), ids=repr)
@pytest.mark.parametrize("reduction", ["sum", "mean", "weighted_mean"])
def test_the_loss_of_an_evaluation_does_not_depend_on_the_batch_size(loss, reduction) -> None:
    loss = dataclasses.replace(loss, reduction=reduction)
    trainer = Trainer(mlp((4, 4)), loss=loss, penalty=0.3)
    y = labels_of(loss, 4)
    for weights in (None, W):
        whole = trainer.test_on_batch(X, y, weights)["loss"]
        for size in (1, 3, 4, ROWS):
            found = trainer.evaluate(X, y, weights, batch_size=size)["loss"]
            assert found == pytest.approx(whole, rel=1e-5), size
    if reduction == "sum":
        penalty = 0.3 * sum((w**2).sum() for w in trainer.get_weights().values())
        by_row = [trainer.test_on_batch(X[i : i + 1], y[i : i + 1])["loss"] for i in range(ROWS)]
        expected = sum(by_row) - (ROWS - 1) * penalty
        assert trainer.evaluate(X, y)["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("penalty", [None, 0.5])
def test_a_sum_of_an_epoch_is_the_sum_over_its_rows(penalty, backend) -> None:
    x = np.arange(1.0, 8.0, dtype=np.float32)[:, None]
    loss = losses.MeanSquaredError(reduction="sum")
    trainer = Trainer(linear(w=2.0), loss=loss, optimizer=0.0, penalty=penalty, backend=backend)
    extra = 0.0 if penalty is None else 0.5 * 2**2
    recorder = Recorder()
    history = trainer.fit(
        x,
        0 * x,
        epochs=1,
        batch_size=3,
        shuffle=False,
        validation_data=(x, 0 * x),
        callbacks=[recorder],
        verbose=0,
    ).history
    total = 4 * (x**2).sum()
    assert history["loss"] == history["val_loss"] == [total + extra]
    running = [recorder.logs("batch", name) for name in ("loss", "batch_loss")]
    assert running == [
        [56 + extra, 364 + extra, total + extra],
        [56 + extra, 308 + extra, 196 + extra],
    ]
    # The sums survive a checkpoint within an epoch.
    again = Trainer(linear(w=2.0), loss=loss, penalty=penalty)
    again._tracker.load_state_dict(trainer._tracker.state_dict())
    assert again._tracker.loss == total + extra


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("penalty", [None, 0.5])
def test_outputs_with_a_sum_and_a_mean(penalty, backend) -> None:
    x = np.arange(1.0, 8.0, dtype=np.float32)[:, None]
    trainer = Trainer(
        two_outputs(),
        loss={"a": losses.MeanSquaredError(reduction="sum"), "b": "mse"},
        loss_weights={"a": 0.5, "b": 3.0},
        optimizer=0.0,
        penalty=penalty,
        backend=backend,
    )
    a, b = (x**2).sum(), 4 * (x**2).mean()
    extra = 0.0 if penalty is None else 0.5 * (1 + 4)
    expected = {"loss": 0.5 * a + 3 * b + extra, "a_loss": a, "b_loss": b}
    y = {"a": 0 * x, "b": 0 * x}
    for size in (1, 3, 7):
        assert trainer.evaluate(x, y, batch_size=size) == pytest.approx(expected, rel=1e-6)
        history = trainer.fit(x, y, batch_size=size, verbose=0).history
        found = {name: history[name][0] for name in expected}
        assert found == pytest.approx(expected, rel=1e-6)
