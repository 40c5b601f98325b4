"""What onnxcustom 0.4 computed, in numpy, and onnxfit beside it: its formulas where they were
right, and laws where they were not.

In the formulas y is the label, p the prediction, s a raw score, w one weight a row, d = y - p.
docs/from-onnxcustom.md has the differences in words.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx.parser
import pytest
from scipy import special

import onnxfit
from onnxfit import Trainer
from onnxfit.callbacks import Callback, LambdaCallback, TerminateOnNaN
from onnxfit.losses import (
    BinaryCrossEntropy,
    BinaryCrossEntropyWithLogits,
    CrossEntropy,
    Elastic,
    Loss,
    MeanAbsoluteError,
    MeanSquaredError,
)
from onnxfit.optimizers import SGD, Adam, Optimizer
from onnxfit.schedules import Constant, InverseScaling, Optimal, Schedule
from tests.gradients.test_functions import ByHand, run
from tests.models import linear, mlp, two_inputs

RNG = np.random.default_rng(0)


def column(values: object, dtype: type = np.float64) -> np.ndarray:
    return np.asarray(values, dtype).reshape(-1, 1)


def evaluated(
    loss: Loss, y: np.ndarray, p: np.ndarray, w: np.ndarray | None = None
) -> tuple[float, np.ndarray]:
    """The loss of a batch and its gradient."""
    model = loss.build_onnx_function(
        ("batch", p.shape[1]), p.dtype, gradient=True, sample_weight=w is not None
    )
    result = run(model, {"y_true": y, "y_pred": p, "sample_weight": w})
    return result["loss"].item(), result["y_pred_grad"]


# ---------------------------------------------------------------------- losses


def _log_of_two_columns(y, p, w, eps=1e-6):
    q = np.clip(p, eps, 1 - eps)
    q /= q.sum(axis=1, keepdims=True)
    return -(w * ((1 - y) * np.log(q[:, :1]) + y * np.log(q[:, 1:]))).sum()


# name -> ours, times this, is the sum over rows that onnxcustom took, and its gradient (None: it
# had none)
REGRESSION = {
    "square": (
        MeanSquaredError(reduction="sum"),
        0.5,
        lambda d, w: (0.5 * (w * d * d).sum(), -w * d),
    ),
    "squared_error": (
        MeanSquaredError(reduction="sum"),
        1,
        lambda d, w: ((w * d * d).sum(), -2 * w * d),
    ),
    "absolute": (
        MeanAbsoluteError(reduction="sum"),
        1,
        lambda d, w: ((w * abs(d)).sum(), -w * np.sign(d)),
    ),
    "elastic": (
        Elastic(0.1, 0.9, reduction="sum"),
        1,
        lambda d, w: ((w * (0.1 * abs(d) + 0.9 * d * d)).sum(), -w * (0.1 * np.sign(d) + 1.8 * d)),
    ),
}


@pytest.mark.parametrize("name", REGRESSION)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_of_a_number_is_theirs(name: str, weighted: bool) -> None:
    loss, factor, theirs = REGRESSION[name]
    y, p = RNG.normal(size=(9, 1)), RNG.normal(size=(9, 1))
    w = RNG.uniform(size=9).astype(np.float32) if weighted else None
    value, gradient = evaluated(loss, y, p, w)
    expected = theirs(y - p, np.ones((9, 1)) if w is None else column(w))
    assert factor * value == pytest.approx(expected[0], rel=1e-12)
    np.testing.assert_allclose(factor * gradient, expected[1], rtol=1e-12)


@pytest.mark.parametrize(
    "loss", [MeanAbsoluteError(), Elastic(0.1, 0.9), MeanSquaredError()], ids=repr
)
def test_a_gradient_points_away_from_the_label(loss: Loss) -> None:
    """The L1 part of its gradient had the other sign, so that absolute and elastic losses grew."""
    gradient = evaluated(loss, column([0, 0]), column([3, -3]))[1]
    assert np.sign(gradient).ravel().tolist() == [1, -1]


@pytest.mark.parametrize(
    "loss", [MeanAbsoluteError(), Elastic(0.1, 0.9), "absolute_error", "elastic"], ids=repr
)
def test_absolute_and_elastic_losses_find_a_line(loss: object) -> None:
    x = np.linspace(-1, 1, 60, dtype=np.float32)[:, None]
    trainer = Trainer(linear(1, 1, 0.0, b=0.0), loss=loss, optimizer=SGD(InverseScaling(0.5, 0.5)))
    trainer.fit(x, 3 * x + 1, epochs=200, batch_size=20, verbose=0)
    found = trainer.get_weights()
    assert found["w"].item() == pytest.approx(3, abs=0.05)
    assert found["b"].item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    "loss",
    [
        BinaryCrossEntropyWithLogits,
        lambda **settings: BinaryCrossEntropy(from_logits=True, **settings),
    ],
)
def test_neglog_of_a_score_is_theirs(loss) -> None:
    s, y, w = (
        RNG.normal(scale=2, size=(9, 1)),
        column(RNG.integers(0, 2, 9)),
        RNG.uniform(size=9).astype(np.float32),
    )
    p = np.clip(special.expit(s), 1e-5, 1 - 1e-5)
    value, gradient = evaluated(loss(reduction="sum"), y, s, w)
    assert value == pytest.approx(
        -(column(w) * ((1 - y) * np.log(1 - p) + y * np.log(p))).sum(), rel=1e-12
    )
    np.testing.assert_allclose(gradient, column(w) * (p - y), rtol=1e-10)
    assert (
        onnxfit.losses.get_loss("neglog")
        == BinaryCrossEntropyWithLogits()
        != BinaryCrossEntropy(from_logits=True)
    )


def test_log_of_two_columns_of_probabilities_is_theirs() -> None:
    p, y, w = (
        special.softmax(RNG.normal(size=(9, 2)), axis=1),
        RNG.integers(0, 2, 9),
        RNG.uniform(size=9).astype(np.float32),
    )
    value, gradient = evaluated(CrossEntropy(from_logits=False, reduction="sum"), y, p, w)
    assert value == pytest.approx(_log_of_two_columns(column(y), p, column(w)), rel=1e-12)
    np.testing.assert_allclose(
        gradient, np.stack([-w * (1 - y) / p[:, 0], -w * y / p[:, 1]], axis=1), rtol=1e-10
    )


def test_two_classes_cost_the_same_in_every_form() -> None:
    """One score, one probability, two scores, two probabilities."""
    s, y = RNG.normal(scale=3, size=(20, 1)), column(RNG.integers(0, 2, 20))
    two = np.hstack([np.zeros_like(s), s])
    costs = [
        evaluated(BinaryCrossEntropyWithLogits(), y, s)[0],
        evaluated(BinaryCrossEntropy(), y, special.expit(s))[0],
        evaluated(CrossEntropy(), y[:, 0].astype(int), two)[0],
        evaluated(
            CrossEntropy(from_logits=False), y[:, 0].astype(int), special.softmax(two, axis=1)
        )[0],
    ]
    np.testing.assert_allclose(costs, costs[0], rtol=1e-12)


@pytest.mark.parametrize("size", [100, 1e4])
@pytest.mark.parametrize("y", [0, 1])
def test_large_scores_stay_finite(size: float, y: int) -> None:
    for score in (size, -size):
        p = special.expit(np.float64(score))
        one = np.array([[score]], np.float32)
        value, gradient = evaluated(BinaryCrossEntropyWithLogits(), column([y]), one)
        assert value == pytest.approx(max(score, 0) - y * score, rel=1e-6)
        assert gradient.item() == pytest.approx(p - y, abs=1e-7)
        two = np.array([[0, score]], np.float32)
        value, gradient = evaluated(CrossEntropy(), np.array([y]), two)
        assert value == pytest.approx(max(score, 0) - y * score, rel=1e-6)
        np.testing.assert_allclose(gradient, [[y - p, p - y]], atol=1e-7)


@pytest.mark.parametrize("y", [0, 1])
@pytest.mark.parametrize("p", [0.0, 1.0, 1e-38, 0.5])
def test_probabilities_at_their_ends_stay_finite(p: float, y: int) -> None:
    one, two = np.array([[p]], np.float32), np.array([[1 - p, p]], np.float32)
    for loss, labels, outputs in (
        (BinaryCrossEntropy(), column([y]), one),
        (BinaryCrossEntropy(), np.array([[1 - y, y]]), two),
        (CrossEntropy(from_logits=False), np.array([y]), two),
    ):
        value, gradient = evaluated(loss, labels, outputs)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        assert (value < 1e-6) == (p == y or (p == 1e-38 and y == 0))


@pytest.mark.parametrize("score", [100.0, -100.0])
@pytest.mark.parametrize("y", [0, 1])
def test_a_file_that_ends_in_a_sigmoid_trains_at_large_scores(score: float, y: int) -> None:
    """A converted classifier gives probabilities: in float32 those are exactly 0 and 1 here."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        logistic (float[N, 1] x) => (float[N, 1] p) <float[1, 1] w = {1}> { s = MatMul(x, w)  p = Sigmoid(s) }"""
    )
    trainer = Trainer(model, loss="log_loss", optimizer=0.1)
    result = trainer.train_on_batch(np.array([[score]], np.float32), np.array([y]))
    assert np.isfinite(result["loss"])
    assert np.isfinite(trainer.get_weights()["w"]).all()


# ---------------------------------------------------------------------- rows, columns, weights


X = RNG.normal(size=(23, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]]) + 0.1 * RNG.normal(size=(23, 1))).astype(np.float32)
W = RNG.uniform(0.1, 3, 23).astype(np.float32)


@pytest.mark.parametrize("shape", [(23,), (23, 1)], ids=str)
@pytest.mark.parametrize("labels", [Y, Y[:, 0]], ids=["(n, 1)", "(n,)"])
def test_a_weight_a_row_weighs_its_row(shape: tuple[int, ...], labels: np.ndarray) -> None:
    """(n, 1) losses times (n,) weights were (n, n) numbers."""
    trainer = Trainer(linear(3, 1, 0.5), loss="mse", optimizer=0.1)
    d = Y - X.astype(float) @ np.full((3, 1), 0.5)
    result = trainer.train_on_batch(X, labels, W.reshape(shape))
    assert result["loss"] == pytest.approx((column(W) * d * d).mean(), rel=1e-5)
    expected = 0.5 + 0.1 * 2 * X.T @ (column(W) * d) / 23
    np.testing.assert_allclose(trainer.get_weights()["w"], expected, rtol=1e-5)


def test_weights_count_in_validation() -> None:
    """There the validation loss was 0 as soon as the rows had weights."""
    trainer = Trainer(linear(3, 1, 0.5), loss="mse", optimizer=0.01)
    for weights in (W, None):
        history = trainer.fit(
            X,
            Y,
            W,
            epochs=2,
            batch_size=5,
            validation_data=(X, Y, weights) if weights is not None else (X, Y),
            verbose=0,
        )
        d = Y - X.astype(float) @ trainer.get_weights()["w"]
        expected = ((1 if weights is None else column(weights)) * d * d).mean()
        assert history.history["val_loss"][-1] == pytest.approx(expected, rel=1e-5)
        assert trainer.evaluate(X, Y, weights, batch_size=7)["loss"] == pytest.approx(
            expected, rel=1e-5
        )


def test_two_columns_of_labels_stay_two_columns() -> None:
    both = np.hstack([Y, -2 * Y]).astype(np.float32)
    trainer = Trainer(linear(3, 2, 0.0), loss="mse", optimizer=0.3)
    trainer.fit(X, both, epochs=300, batch_size=23, verbose=0)
    np.testing.assert_allclose(
        trainer.get_weights()["w"], np.linalg.lstsq(X, both, rcond=None)[0], atol=1e-4
    )


@pytest.mark.parametrize("batch_size", [5, 7, 23, 64])
def test_an_epoch_is_every_row_once(batch_size: int) -> None:
    """Row i moves weight i alone, by the same amount whatever its batch; the last row was never
    drawn, and a third was left out.
    """
    rows = np.eye(23, dtype=np.float32)
    trainer = Trainer(linear(23), loss=MeanSquaredError(reduction="sum"), optimizer=0.25)
    trainer.fit(rows, np.ones(23), epochs=1, batch_size=batch_size, verbose=0)
    assert trainer.get_weights()["w"].ravel().tolist() == [0.5] * 23
    trainer.fit(rows, np.ones(23), epochs=1, batch_size=batch_size, verbose=0)
    assert trainer.get_weights()["w"].ravel().tolist() == [0.75] * 23


def test_the_order_of_rows_changes_from_epoch_to_epoch() -> None:
    class Losses(Callback):
        def __init__(self) -> None:
            self.seen: list[list[float]] = []

        def on_epoch_begin(self, epoch, logs):
            self.seen.append([])

        def on_train_batch_end(self, batch, logs):
            self.seen[-1].append(logs["batch_loss"])

    losses = Losses()
    # it stays, so a batch's loss says which rows it had
    trainer = Trainer(linear(1, 1, 0.0), loss="mse", optimizer=0.0)
    x, y = np.ones((23, 1), np.float32), np.arange(23, dtype=np.float32) ** 0.5
    trainer.fit(x, y, epochs=3, batch_size=1, callbacks=[losses], verbose=0)
    for epoch in losses.seen:
        np.testing.assert_allclose(sorted(epoch), np.arange(23), rtol=1e-5)
    assert all(a != b for a, b in itertools.combinations(losses.seen, 2))


# ---------------------------------------------------------------------- schedules and momentum


def _optimal(eta0: float, alpha: float, t: int) -> float:
    typical = np.sqrt(1.0 / np.sqrt(alpha))
    t0 = 1.0 / (typical / max(1.0, 2 * (1 + typical)) * alpha)
    c = eta0 / (1.0 / (alpha * t0))
    return c / (alpha * (t0 + t))


SCHEDULES = {
    "constant": (Constant(0.05), lambda t: 0.05),
    "invscaling by default": (InverseScaling(), lambda t: 0.01 / np.power(t + 1, 0.25)),
    "invscaling": (InverseScaling(0.3, 0.6), lambda t: 0.3 / np.power(t + 1, 0.6)),
    "optimal by default": (Optimal(), lambda t: _optimal(0.01, 1e-4, t)),
    "optimal": (Optimal(0.5, alpha=0.02), lambda t: _optimal(0.5, 0.02, t)),
    "optimal, strong": (Optimal(0.5, alpha=20.0), lambda t: _optimal(0.5, 20.0, t)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_theirs_for_a_thousand_steps(name: str) -> None:
    schedule, theirs = SCHEDULES[name]
    np.testing.assert_allclose(
        [schedule(t) for t in range(1000)], [theirs(t) for t in range(1000)], rtol=1e-12
    )


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_the_second_learning_rate_is_not_the_first(name: str) -> None:
    rates: list[float] = []
    schedule = SCHEDULES[name][0]
    trainer = Trainer(linear(3, 1), loss="mse", optimizer=SGD(schedule))
    record = LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(trainer.learning_rate)
    )
    trainer.fit(X, Y, epochs=2, batch_size=8, callbacks=[record], verbose=0)
    assert rates == [schedule(t) for t in range(6)]
    assert all(later < earlier for earlier, later in itertools.pairwise(rates))


def test_a_learning_rate_is_a_number_or_an_object() -> None:
    ends = []
    for optimizer in (
        0.05,
        SGD(0.05),
        SGD(Constant(0.05)),
        SGD(lambda step: 0.05),
        SGD(learning_rate=np.float32(0.05)),
    ):
        trainer = Trainer(linear(3, 1), loss="mse", optimizer=optimizer)
        trainer.fit(X, Y, epochs=3, verbose=0)
        ends.append(trainer.get_weights()["w"])
    np.testing.assert_allclose(ends, [ends[0]] * 5, rtol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("schedule", "scaled"),
    [
        (Constant(0.05), False),
        (Constant(0.05), True),
        (InverseScaling(0.05), True),
        (Optimal(0.05, 0.1), True),
    ],
    ids=repr,
)
def test_momentum_is_theirs_for_fifty_steps(
    schedule: Schedule, scaled: bool, nesterov: bool
) -> None:
    hand = ByHand(
        SGD(schedule, momentum=0.9, nesterov=nesterov, scaled_velocity=scaled),
        RNG.normal(size=(3, 1)),
    )
    w, G, beta = hand.w.copy(), np.zeros((3, 1)), 0.9
    x, y = X.astype(float), Y.astype(float)
    for t in range(50):
        a, g = -schedule(t), x.T @ (x @ w - y) / 23
        Z = beta * G + a * g
        w, G = (w + beta * Z + a * g if nesterov else w + Z), Z
        hand(x.T @ (x @ hand.w - y) / 23)
        np.testing.assert_allclose(hand.w, w, rtol=1e-10)


def test_a_velocity_of_gradients_and_one_of_distances_part_when_the_learning_rate_moves() -> None:
    ends = []
    for scaled in (False, True):
        hand = ByHand(
            SGD(InverseScaling(0.1, 1.0), momentum=0.9, scaled_velocity=scaled), np.ones((3, 1))
        )
        for _ in range(3):
            hand(hand.w)
        ends.append(hand.w)
    assert not np.allclose(*ends, rtol=1e-3)


# ---------------------------------------------------------------------- whole trajectories


def theirs(
    w,
    schedule,
    epochs,
    batch,
    *,
    momentum=0.0,
    nesterov=False,
    l1=0.0,
    l2=0.0,
    loss_gradient=lambda d: -d,
):
    """Weights after the loop of OrtGradientForwardBackwardOptimizer, with its rows in order and all
    of them.

    Gradients are sums, divided by the batch size at the update; the schedule moves once an epoch;
    the penalty shrinks a weight without learning rate.
    """
    x, y = X.astype(float), Y.astype(float)
    G = np.zeros_like(w)
    for epoch in range(epochs):
        for start in range(0, 20, batch):
            xs, ys = x[start : start + batch], y[start : start + batch]
            g = xs.T @ loss_gradient(ys - xs @ w)
            w = (1 - 2 * l2) * w - l1 * np.sign(w)
            a = -schedule(epoch) / batch
            Z = momentum * G + a * g
            w, G = (w + momentum * Z + a * g if nesterov else w + Z), Z
    return w


def ours(loss, optimizer: Optimizer, epochs: int, batch: int, penalty=None) -> np.ndarray:
    trainer = Trainer(linear(3, 1, 0.25), loss=loss, penalty=penalty, optimizer=optimizer)
    trainer.fit(X[:20], Y[:20], epochs=epochs, batch_size=batch, shuffle=False, verbose=0)
    return trainer.get_weights()["w"]


def half(op, y_true, y_pred):
    """Half the squared error, whose gradient is -d."""
    return 0.5 * (y_true - y_pred) ** 2


START = np.full((3, 1), 0.25)


@pytest.mark.parametrize(
    "momentum", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str
)
def test_the_same_path_with_a_constant_learning_rate(momentum: dict[str, object]) -> None:
    np.testing.assert_allclose(
        ours(half, SGD(0.05, **momentum), 6, 5),
        theirs(START, lambda t: 0.05, 6, 5, **momentum),
        rtol=1e-4,
    )


def test_the_same_path_with_twice_the_gradient_and_half_the_learning_rate() -> None:
    np.testing.assert_allclose(
        ours("mse", SGD(0.025), 6, 5), theirs(START, lambda t: 0.05, 6, 5), rtol=1e-4
    )


def test_the_same_path_with_a_schedule_that_moves_once_an_epoch() -> None:
    schedule, batches = InverseScaling(0.1, 0.5), 4
    optimizer = SGD(
        lambda step: schedule(step // batches), momentum=0.9, nesterov=True, scaled_velocity=True
    )
    np.testing.assert_allclose(
        ours(half, optimizer, 6, 5),
        theirs(START, schedule, 6, 5, momentum=0.9, nesterov=True),
        rtol=1e-4,
    )


def test_the_same_path_with_a_penalty_divided_by_the_learning_rate() -> None:
    found = ours(half, SGD(0.05), 6, 5, penalty={"w": {"l1": 0.002 / 0.05, "l2": 0.01 / 0.05}})
    np.testing.assert_allclose(
        found, theirs(START, lambda t: 0.05, 6, 5, l1=0.002, l2=0.01), rtol=1e-4
    )


def test_the_same_path_with_decay_and_momentum() -> None:
    momentum = {"momentum": 0.9, "nesterov": True}
    found = ours(half, SGD(0.05, weight_decay=2 * 0.01 / 0.05, **momentum), 6, 5)
    np.testing.assert_allclose(
        found, theirs(START, lambda t: 0.05, 6, 5, l2=0.01, **momentum), rtol=1e-4
    )


def test_the_same_path_with_two_columns_and_twice_the_learning_rate() -> None:
    trainer = Trainer(linear(3, 2, 0.25), loss=half, optimizer=2 * 0.05)
    trainer.fit(X[:20], np.hstack([Y, Y])[:20], epochs=6, batch_size=5, shuffle=False, verbose=0)
    np.testing.assert_allclose(
        trainer.get_weights()["w"], np.hstack([theirs(START, lambda t: 0.05, 6, 5)] * 2), rtol=1e-4
    )


def test_the_same_path_with_an_elastic_loss_whose_sign_is_right() -> None:
    expected = theirs(
        START, lambda t: 0.05, 6, 5, loss_gradient=lambda d: -(0.1 * np.sign(d) + 1.8 * d)
    )
    np.testing.assert_allclose(ours(Elastic(0.1, 0.9), SGD(0.05), 6, 5), expected, rtol=1e-4)


# ---------------------------------------------------------------------- figures, and going on


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("penalty", [None, {"w": {"l1": 0.01, "l2": 0.1}}], ids=["", "penalty"])
def test_train_losses_are_means_over_rows(weighted: bool, penalty: object) -> None:
    """Of the losses that the batches had when their turn came: 5 + 5 + 5 + 5 + 3 rows, in three
    fits.
    """
    trainer = Trainer(linear(3, 1, 0.25), loss="mse", penalty=penalty, optimizer=0.05)
    w, s, expected = np.full((3, 1), 0.25), column(W) if weighted else np.ones((23, 1)), []
    x, y = X.astype(float), Y.astype(float)
    for epochs in (1, 2, 1):
        trainer.fit(
            X, Y, W if weighted else None, epochs=epochs, batch_size=5, shuffle=False, verbose=0
        )
        for _ in range(epochs):
            total = 0.0
            for start in range(0, 23, 5):
                rows = slice(start, start + 5)
                d, n = y[rows] - x[rows] @ w, len(x[rows])
                cost = 0.0 if penalty is None else 0.01 * abs(w).sum() + 0.1 * (w * w).sum()
                total += (s[rows] * d * d).sum() + n * cost
                pull = 0.0 if penalty is None else 0.01 * np.sign(w) + 0.2 * w
                w = w - 0.05 * (-2 * x[rows].T @ (s[rows] * d) / n + pull)
            expected.append(total / 23)
    assert trainer.train_losses_ == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(trainer.get_weights()["w"], w, rtol=1e-4)


def test_train_losses_can_be_means_by_weight() -> None:
    trainer = Trainer(
        linear(3, 1, 0.25), loss=MeanSquaredError(reduction="weighted_mean"), optimizer=0.0
    )
    trainer.fit(X, Y, W, epochs=1, batch_size=5, verbose=0)
    d = Y - X.astype(float) @ START
    assert trainer.train_losses_ == pytest.approx([np.average(d * d, weights=column(W))], rel=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [SGD(InverseScaling(0.1), momentum=0.9, nesterov=True), Adam(0.01), SGD(0.1)],
    ids=repr,
)
def test_a_second_fit_goes_on_where_the_first_stopped(optimizer: Optimizer) -> None:
    """Weights, slots, counters, learning rate, order of rows: two fits are one, bit for bit."""
    classes = (X[:, 0] > 0).astype(int)

    def trained(*epochs: int) -> Trainer:
        trainer = Trainer(mlp((3, 8, 2)), loss="cross_entropy", optimizer=optimizer)
        for n in epochs:
            trainer.fit(X, classes, epochs=n, batch_size=5, verbose=0)
        return trainer

    once, twice = trained(5), trained(2, 3)
    np.testing.assert_equal(once.get_state(), twice.get_state())
    assert once.train_losses_ == twice.train_losses_
    assert twice.global_step == 25


def test_training_begins_with_the_weights_of_the_file() -> None:
    """They were replaced by random numbers unless warm_start was set."""
    trainer = Trainer(linear(3, 1, 0.25), loss="mse", optimizer=0.0)
    trainer.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(trainer.get_weights()["w"], START)


def test_weights_may_be_named_in_any_order() -> None:
    names = ["u", "v"]
    ends = []
    for order in (names, names[::-1]):
        trainer = Trainer(two_inputs(), weights=order, loss="mse", optimizer=0.1)
        trainer.fit({"left": X[:, :1], "right": X[:, 1:2]}, Y, epochs=3, verbose=0)
        ends.append(trainer.get_weights())
    for name in names:
        np.testing.assert_array_equal(ends[0][name], ends[1][name])


def test_states_outlive_their_trainer() -> None:
    trainer = Trainer(linear(3, 1, 0.25), loss="mse", optimizer=Adam(0.1))
    trainer.fit(X, Y, verbose=0)
    state, kept = trainer.get_state(), trainer.get_weights()["w"]
    trainer.fit(X, Y, verbose=0)
    assert not np.array_equal(trainer.get_weights()["w"], kept)
    del trainer
    another = Trainer(linear(3, 1, 0.25), loss="mse", optimizer=Adam(0.1))
    another.set_state(state)
    np.testing.assert_array_equal(another.get_weights()["w"], kept)


def test_divergence_names_the_learning_rate_and_the_last_losses() -> None:
    trainer = Trainer(linear(3, 1, 0.25), loss="mse", optimizer=1e30)
    with pytest.raises(onnxfit.DivergenceError, match=r"learning rate 1e\+30, last losses"):
        trainer.fit(
            X, Y, epochs=10, batch_size=5, callbacks=[TerminateOnNaN(raise_error=True)], verbose=0
        )
    assert np.isfinite(trainer.get_weights()["w"]).all()


def test_arrays_that_reuse_memory_are_read_anew() -> None:
    """Bindings were kept by address: another batch at the same place gave the old answer."""
    trainer = Trainer(linear(3, 1, 0.25), loss="mse", optimizer=0.0)
    place = np.zeros((23, 3), np.float32)
    for rows in (23, 4, 23):
        place[:rows] = rows
        np.testing.assert_allclose(
            trainer.predict_on_batch(place[:rows]), place[:rows] @ START, rtol=1e-6
        )


def test_other_types_than_float32_train() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        line (double[N, 3] x) => (double[N, 1] y) <double[3, 1] w = {0, 0, 0}> { y = MatMul(x, w) }"""
    )
    x, y = X.astype(float), Y.astype(float)
    trainer = Trainer(model, loss="mse", optimizer=0.3)
    trainer.fit(x, y, epochs=400, batch_size=23, verbose=0)
    np.testing.assert_allclose(
        trainer.get_weights()["w"], np.linalg.lstsq(x, y, rcond=None)[0], rtol=1e-9
    )
