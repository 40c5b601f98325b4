"""Running means of losses and metrics, from the scalars of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import Trainer, losses
from onnxfit.data import Batch
from onnxfit.errors import CheckpointError, DataError, UnsupportedError
from onnxfit.graph import names
from onnxfit.graph.spec import TensorSpec
from onnxfit.losses import MeanSquaredError
from onnxfit.metrics import Accuracy, ConfusionMatrix, MeanAbsoluteError, Metric
from onnxfit.registry import registry
from onnxfit.step.objectives import Objective, OutputMetric
from onnxfit.step.tracker import Mean, Tracker
from tests.helpers import Recorder, exchanged
from tests.models import linear, mlp, two_outputs


class Step:
    """The result of a step, as a tracker reads it."""

    def __init__(self, scalars: Mapping[str, float]) -> None:
        self.scalars = {name: np.array(value) for name, value in scalars.items()}

    def prediction(self) -> dict[str, Any]:
        return {"a": np.array([2.0, 4.0]), "b": np.array([1.0, 1.0])}

    def inputs_of(self, batch: Batch) -> Mapping[str, Any]:
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
    running, other = two_losses(), two_losses()
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
        OutputMetric("matrix", "a", ConfusionMatrix(threshold=1.5)),
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


OUTPUT = TensorSpec("y", np.dtype(np.float32), ("batch", 4))


def labels_of(loss: losses.Loss, outputs: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    if isinstance(loss, losses.ClassLoss):
        classes = np.arange(ROWS) % outputs
        return np.where(classes == 1, -1, classes) if loss.ignore_index is not None else classes
    if isinstance(loss, losses.LovaszHinge):
        return (rng.random((ROWS, outputs)) < 0.5).astype(np.float32)
    if isinstance(loss, losses.IoU):
        return np.sort(rng.normal(size=(ROWS, 2, 2)), axis=1).reshape(ROWS, 4).astype(np.float32)
    if loss.allowed_labels(OUTPUT).values == (-1, 1):
        return np.sign(rng.normal(size=(ROWS, outputs))).astype(np.float32)
    if isinstance(loss, losses.GaussianNLL):
        outputs //= 2
    y = rng.uniform(0.1, 1, (ROWS, outputs)).astype(np.float32)
    return y / y.sum(1, keepdims=True)


def variants() -> list[losses.Loss]:
    # CausalLM is below, CTC in tests/test_ctc.py
    own = (losses.CausalLM, losses.CTC)
    plain = [cls() for cls in LOSSES.values() if cls not in own]
    masked = [losses.CrossEntropy(ignore_index=-1), losses.NLL(class_weights=(1.0, 0.5, 0, 2.0))]
    return [*plain, *masked]


@pytest.mark.filterwarnings("ignore:.*the model's output comes from")
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


NEXT_TOKENS = np.random.default_rng(2).integers(0, 3, (ROWS, 5))
NEXT_TOKENS[0, 1:] = NEXT_TOKENS[1, 3:] = -100  # nothing counts in the first row


def of_tokens() -> onnx.ModelProto:
    """Return a model of 3 classes for each token of a row."""
    return onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        tokens (float[N, T, 2] x) => (float[N, T, 3] y)
        <float[2, 3] w = {1, 0, 0.5, -1, 1, 0}, float[3] b = {0, 0.1, 0}>
        { s = MatMul(x, w)  y = Add(s, b) }"""
    )


@pytest.mark.parametrize("size", [1, 3, ROWS])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_figures_of_next_tokens_do_not_depend_on_the_batch_size(size, ignored) -> None:
    """The loss, its exponential, and the share of tokens that are the likeliest ones."""
    x = np.random.default_rng(3).normal(size=(ROWS, 5, 2)).astype(np.float32)
    labels = np.where(NEXT_TOKENS == -100, ignored, NEXT_TOKENS)
    trainer = Trainer(
        of_tokens(),
        loss=losses.CausalLM(ignore_index=ignored),
        metrics=["perplexity", "accuracy", "token_accuracy"],
    )
    figures = trainer.evaluate(x, labels, batch_size=size)
    outputs = trainer.predict(x).astype(np.float64)[:, :-1]
    counts = labels[:, 1:] != ignored
    odds = np.exp(outputs - outputs.max(-1, keepdims=True))
    own = np.take_along_axis(odds / odds.sum(-1, keepdims=True), labels[:, 1:, None] % 3, -1)
    loss = -np.log(own[..., 0][counts]).mean()
    right = (outputs.argmax(-1) == labels[:, 1:])[counts].mean()
    assert figures["loss"] == pytest.approx(loss, rel=1e-6)
    assert figures["perplexity"] == pytest.approx(np.exp(loss), rel=1e-6)
    assert figures["accuracy"] == figures["token_accuracy"] == pytest.approx(right, rel=1e-12)


def test_metrics_weigh_the_labels_of_next_tokens() -> None:
    x = np.random.default_rng(3).normal(size=(ROWS, 5, 2)).astype(np.float32)
    w = np.random.default_rng(4).uniform(0, 2, (ROWS, 5)).astype(np.float32)
    trainer = Trainer(of_tokens(), loss="causal_lm", metrics=Accuracy(weighted=True))
    figure = trainer.evaluate(x, NEXT_TOKENS, w)["weighted_accuracy"]
    right = trainer.predict(x)[:, :-1].argmax(-1) == NEXT_TOKENS[:, 1:]
    counts = w[:, 1:] * (NEXT_TOKENS[:, 1:] >= 0)
    assert figure == pytest.approx((right * counts).sum() / counts.sum(), rel=1e-6)


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
    again._training.tracker.load_state_dict(trainer._training.tracker.state_dict())
    assert again._training.tracker.loss == total + extra


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


# ---------------------------------------------------------------------- several processes


def close(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


class Shared:
    """A tracker for each process, and one that sees the batches of all."""

    def __init__(self, make: Callable[[], Tracker], processes: int) -> None:
        self.whole = make()
        self.parts = [make() for _ in range(processes)]

    def update(self, rank: int, result: Any, batch: Batch) -> None:
        self.parts[rank].update(result, batch)
        self.whole.update(result, batch)

    def check(self) -> None:
        states = [exchanged(one.state_dict()) for one in self.parts]
        for order in (states, states[::-1]):
            for one in self.parts:
                merged = one.merged(order)
                close(merged.results(), self.whole.results())
                assert merged.rows == self.whole.rows
                np.testing.assert_allclose(merged.loss, self.whole.loss, rtol=1e-12)
                assert list(merged.figures()) == list(self.whole.figures())
        for one, state in zip(self.parts, states):  # merging leaves the trackers as they are
            np.testing.assert_equal(exchanged(one.state_dict()), state)


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_merged_losses_are_those_of_all_batches(processes: int, reduction: str) -> None:
    """Shares of 22, 21 and 21 rows and of none, masks in which nothing counts, and a penalty that
    changes from step to step.
    """
    rng = np.random.default_rng(processes)
    objectives = {
        "a": Objective(MeanSquaredError(reduction=reduction), 0.5),
        "b": Objective(MeanSquaredError(), 2.0),
    }
    for outputs in (["a"], ["a", "b"]):
        chosen = {name: objectives[name] for name in outputs}
        shared = Shared(lambda chosen=chosen: Tracker(chosen, []), processes)
        for penalty in (0.7, 0.6, 0.4):
            for rank, share in enumerate(np.array_split(np.arange(64), processes)):
                rows = 0 if penalty == 0.6 and rank == processes - 1 else len(share)
                values = {name: rng.random() if rows else np.nan for name in outputs}
                counts = {name: float(rng.integers(0, 2) * rows) for name in outputs}
                if reduction == "sum":
                    counts.pop("a")
                scalars = {names.count(name): count for name, count in counts.items()}
                if len(outputs) > 1:
                    scalars |= {names.output_loss(name): value for name, value in values.items()}
                if len(outputs) > 1 or reduction == "sum":
                    scalars[names.PENALTY] = penalty
                total = sum(chosen[name].weight * value for name, value in values.items())
                shared.update(rank, step(total + penalty, **scalars), batch(rows))
        shared.check()


def test_a_sum_over_no_rows_adds_nothing_even_if_it_is_nan() -> None:
    one = Tracker({"a": Objective(MeanSquaredError(reduction="sum"))}, [])
    one.update(step(np.nan), batch(0))
    assert np.isnan(one.loss)
    one.update(step(3.0), batch(2))
    assert one.loss == 3 == one.merged([one.state_dict()]).loss


def test_merged_losses_by_hand() -> None:
    """22, 21 and 21 rows with losses 1, 2 and 4, and a process that has none."""
    ranks = [tracker({"a": 1.0}) for _ in range(4)]
    for one, loss, rows in zip(ranks, (1.0, 2.0, 4.0), (22, 21, 21)):
        one.update(step(loss), batch(rows))
    states = [one.state_dict() for one in ranks]
    merged = ranks[3].merged(states)
    assert (merged.loss, merged.rows) == ((22 + 2 * 21 + 4 * 21) / 64, 64)
    assert ranks[0].loss == 1
    assert ranks[3].rows == 0
    nothing = ranks[3].merged([ranks[3].state_dict()] * 2)
    assert np.isnan(nothing.loss)
    assert nothing.rows == 0
    merged.update(step(5.0), batch(64))  # a merged tracker goes on
    assert merged.loss == ((22 + 2 * 21 + 4 * 21) / 64 + 5) / 2


METRICS = {cls.__name__: cls for cls in registry("onnxfit.metrics", Metric).values()}


@pytest.mark.filterwarnings("ignore:.*outside 0..1")
@pytest.mark.parametrize(
    ("reduction", "weighted"), [("sum", False), ("mean", True), ("weighted_mean", True)]
)
def test_merged_evaluations_of_shares_are_those_of_the_whole(reduction, weighted) -> None:
    """A real model and every metric that takes its labels: several batches for each process, a
    class that the loss ignores, and rows of weight 0.
    """
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    y = np.arange(64) % 5 - 1
    w = np.arange(64) % 4 / np.float32(2) if weighted else None
    loss = losses.CrossEntropy(ignore_index=-1, reduction=reduction)
    chosen = [cls(weighted=weighted) for cls in METRICS.values() if takes(cls, y, x)]
    assert len(chosen) > 7
    trainer = Trainer(mlp((4, 4)), loss=loss, metrics=chosen, penalty=0.3)
    shared = Shared(trainer._training.new_tracker, 4)
    ranks = []  # of the running evaluation, the last

    class Both(Tracker):
        def update(self, result: Any, batch: Batch) -> float:
            shared.update(ranks[-1], result, batch)
            return super().update(result, batch)

    trainer._training.new_tracker = lambda: Both(  # type: ignore[method-assign]
        trainer.objectives, [metric.copy() for metric in trainer._training.recipe.metrics]
    )
    for rank, rows in enumerate((slice(0, 22), slice(22, 43), slice(43, 64))):  # the last has none
        ranks.append(rank)
        trainer.evaluate(x[rows], y[rows], None if w is None else w[rows], batch_size=8)
    shared.check()
    merged = shared.parts[0].merged([one.state_dict() for one in shared.parts]).results()
    whole = trainer.evaluate(x, y, w, batch_size=64)
    for name, value in whole.items():  # the model computes in float32
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, err_msg=name)


def takes(cls: type[Metric], y_true: np.ndarray, y_pred: np.ndarray) -> bool:
    try:
        cls().update(y_true, y_pred)
    except DataError:
        return False
    return True


def test_a_merged_tracker_has_metrics_of_its_own_and_the_norms_of_the_last_step() -> None:
    metric = OutputMetric("mae", "a", MeanAbsoluteError())
    one = tracker({"a": 1.0}, metric)
    one.update(step(1.0), batch(2))
    one.gradient_norms = {"w": 2.0}
    merged = one.merged([one.state_dict()] * 2)
    assert merged.gradient_norms == {"w": 2.0}
    merged.reset()
    assert (one.results()["mae"], one.rows, one.gradient_norms) == (3, 2, {"w": 2.0})


class Unmerged(MeanAbsoluteError):
    merge = Metric.merge


@pytest.mark.parametrize("count", [0, 2])
def test_a_metric_without_merge_is_refused_before_there_is_a_state(count: int) -> None:
    one = tracker({"a": 1.0}, OutputMetric("mae", "a", Unmerged()))
    with pytest.raises(UnsupportedError, match=r"Implement Unmerged\.merge"):
        one.merged([one.state_dict()] * count)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": -1}, "tracker of a process has rows = -1"),
        ({"parts": {"a": [0.0, 0.0]}}, "process's parts must have b"),
        ({"metrics": {}}, "process's metrics must have mae"),
    ],
)
def test_states_of_other_trackers_are_not_merged(change, message) -> None:
    one = tracker({"a": 1.0, "b": 1.0}, OutputMetric("mae", "a", MeanAbsoluteError()))
    with pytest.raises(CheckpointError, match=message):
        one.merged([one.state_dict(), {**one.state_dict(), **change}])


def test_metrics_leave_out_the_labels_that_the_loss_ignores() -> None:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    labels = np.arange(ROWS) % 3
    loss = losses.CrossEntropy(ignore_index=1)
    trainer = Trainer(mlp((4, 3)), loss=loss, metrics=["accuracy", "perplexity"])
    figures = trainer.evaluate(x, labels)
    counts = labels != 1
    right = (trainer.predict(x).argmax(axis=1) == labels)[counts]
    assert figures["accuracy"] == pytest.approx(right.mean())
    assert figures["perplexity"] == pytest.approx(np.exp(figures["loss"]), rel=1e-6)
