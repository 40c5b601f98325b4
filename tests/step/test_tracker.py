"""Running means of losses and metrics, from the scalars of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer, losses
from onnxfit.data import Batch
from onnxfit.graph import names
from onnxfit.losses import MeanSquaredError
from onnxfit.metrics import ConfusionMatrix, MeanAbsoluteError
from onnxfit.registry import registry
from onnxfit.step.objectives import Objective, OutputMetric
from onnxfit.step.tracker import Mean, Tracker
from tests.helpers import Recorder
from tests.models import linear, mlp, two_outputs


class Step:
    """The result of a step, as a tracker reads it."""

    def __init__(self, scalars: Mapping[str, float]) -> None:
        self.scalars = {name: np.array(value) for name, value in scalars.items()}

    def prediction(self) -> dict[str, Any]:
        return {"a": np.array([2.0, 4.0]), "b": np.array([1.0, 1.0])}

    def fed(self, batch: Batch) -> Mapping[str, Any]:
        zeros = np.zeros(2)
        return {names.target("a"): zeros, names.target("b"): zeros}


def step(total: float, **others: float) -> Step:
    return Step({names.TOTAL: total, **others})


def batch(rows: int) -> Batch:
    return Batch(rows, "", (), (), slice(0, rows))


def tracker(weights: Mapping[str, float], *metrics: OutputMetric) -> Tracker:
    objectives = {name: Objective(MeanSquaredError(), weight) for name, weight in weights.items()}
    return Tracker(objectives, metrics)


def counted(output: str, count: float) -> dict[str, float]:
    return {names.count(output): count}


def test_a_mean_weighs_its_values_and_is_nan_before_the_first() -> None:
    mean = Mean()
    assert np.isnan(mean.value)
    mean.add(np.nan, 0)  # a batch in which every row is masked
    assert np.isnan(mean.value)
    mean.add(1, 1)
    mean.add(4, 3)
    assert mean.value == 13 / 4
    mean.add(np.nan, 0)
    assert mean.value == 13 / 4


def test_the_loss_is_the_mean_over_rows_and_over_those_that_count() -> None:
    running = tracker({"a": 1.0})
    assert running.update(step(2.0), batch(3)) == 2
    assert running.update(step(6.0), batch(1)) == 6
    assert (running.loss, running.rows) == (3, 4)
    assert running.figures() == {"loss": 3} == running.results()
    running.update(step(7.0, **counted("a", 4)), batch(100))
    assert (running.loss, running.rows) == (5, 104)
    running.reset()
    assert np.isnan(running.loss)
    assert running.rows == 0
    running.update(step(1.0), batch(2))
    assert running.loss == 1


def two_losses() -> Tracker:
    running = tracker({"a": 0.5, "b": 2.0})
    for penalty, a, b, rows, count in ((1.0, 4.0, 1.0, 1, 1), (1.0, 8.0, 2.0, 3, 1)):
        losses = {names.output_loss("a"): a, names.output_loss("b"): b, names.PENALTY: penalty}
        total = penalty + 0.5 * a + 2.0 * b
        result = step(total, **losses, **counted("b", count))
        assert running.update(result, batch(rows)) == total
    return running


def test_several_losses_have_means_of_their_own_and_the_sum_has_their_weights() -> None:
    running = two_losses()
    # a: 1 and 3 rows; b: 1 row each counts; the penalty is the same in both
    assert running.figures() == {"loss": 1 + 0.5 * 7 + 2 * 1.5, "a_loss": 7, "b_loss": 1.5}


def test_a_reset_forgets_every_mean_and_the_penalty() -> None:
    running = two_losses()
    running.reset()
    losses = {names.output_loss("a"): 0.0, names.output_loss("b"): 0.0, names.PENALTY: 5.0}
    running.update(step(5.0, **losses), batch(1))
    assert running.figures() == {"loss": 5, "a_loss": 0, "b_loss": 0}


def test_an_output_that_counts_no_row_leaves_the_loss_alone() -> None:
    running = tracker({"a": 1.0, "b": 1.0})
    losses = {names.output_loss("a"): 3.0, names.output_loss("b"): 0.0}
    running.update(step(3.0, **losses, **counted("b", 0)), batch(2))
    figures = running.figures()
    assert (figures["loss"], figures["a_loss"]) == (3, 3)
    assert np.isnan(figures["b_loss"])


def test_sums_go_on_from_a_state() -> None:
    running, other = two_losses(), tracker({"a": 0.5, "b": 2.0})
    other.load_state_dict(running.state_dict())
    assert other.figures() == running.figures()
    losses = {names.output_loss("a"): 1.0, names.output_loss("b"): 1.0}
    for one in (running, other):
        one.update(step(3.5, **losses), batch(2))
    assert other.figures() == running.figures()
    assert other.state_dict() == running.state_dict()


def test_metrics_are_functions_among_figures_and_numbers_among_results() -> None:
    metrics = [
        OutputMetric("mae", "a", MeanAbsoluteError()),
        OutputMetric("matrix", "b", ConfusionMatrix()),
    ]
    running = tracker({"a": 1.0}, *metrics)
    running.update(step(1.0), batch(2))
    figures = running.figures()
    assert list(figures) == ["loss", "mae"]
    assert figures["mae"]() == 3  # type: ignore[operator]
    results = running.results()
    assert results["mae"] == 3
    np.testing.assert_array_equal(results["matrix"], [[0, 2], [0, 0]])
    other = tracker({"a": 1.0}, *(metric.copy() for metric in metrics))
    assert np.isnan(other.results()["mae"])  # a copy has sums of its own
    other.load_state_dict(running.state_dict())
    assert other.results()["mae"] == 3
    running.reset()
    assert np.isnan(running.results()["mae"])


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
