"""Sample weights of single labels: of tokens, pixels and the elements of a regression."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

import onnxfit
from onnxfit import Trainer, losses
from onnxfit.errors import DataError, SettingError
from onnxfit.gradients import functions
from onnxfit.graph.spec import TensorSpec
from onnxfit.metrics import (
    AUC,
    F1,
    R2,
    Accuracy,
    ConfusionMatrix,
    MeanSquaredError,
    TopKAccuracy,
    get_metric,
)
from onnxfit.registry import registry
from tests import test_losses
from tests.builds import every_way
from tests.models import mlp

ROWS, TOKENS, CLASSES = 6, 5, 3
SHAPE = (2, 4, 4)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, TOKENS, 4)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, (ROWS, TOKENS))
IGNORED = np.where(RNG.random((ROWS, TOKENS)) < 0.2, -100, LABELS)
WEIGHTS = RNG.uniform(-0.5, 2, (ROWS, TOKENS)).astype(np.float32)
WEIGHTS[0, :2] = WEIGHTS[3] = 0
FLAT_X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
FLAT_Y = RNG.normal(size=(ROWS, 3)).astype(np.float32)
FLAT_W = RNG.uniform(0, 2, (ROWS, 3)).astype(np.float32)
FLAT_W[1, 2] = FLAT_W[4] = 0


def tokens(tokens: int | str = "T") -> onnx.ModelProto:
    """y = x @ w + b for each token."""
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        tokens (float[N, {tokens}, 4] x) => (float[N, {tokens}, 3] y)
        <float[4, 3] w = {{1, 0, 0.5, 0, 1, 0, -1, 0, 1, 0, 0, 1}}, float[3] b = {{0, 0.1, 0}}>
        {{ s = MatMul(x, w)  y = Add(s, b) }}"""
    )


def trained(model, loss, x, y, weights, batch_size=ROWS, **way):
    """The loss of a step of plain gradient descent, and the weights after it."""
    trainer = Trainer(model, loss=loss, optimizer=onnxfit.optimizers.SGD(0.5), **way)
    history = trainer.fit(x, y, weights, batch_size=batch_size, shuffle=False, verbose=0).history
    return history["loss"][0], trainer.get_weights()


@every_way
@pytest.mark.parametrize("size", ["T", TOKENS])
def test_weights_of_tokens_are_those_of_torch(way, size) -> None:
    torch = pytest.importorskip("torch")
    w = torch.tensor([[1, 0, 0.5], [0, 1, 0], [-1, 0, 1], [0, 0, 1]], requires_grad=True)
    b = torch.tensor([0, 0.1, 0], requires_grad=True)
    output = torch.tensor(X) @ w + b
    target = torch.tensor(IGNORED)
    cost = torch.nn.functional.cross_entropy(
        output.permute(0, 2, 1), target, reduction="none", ignore_index=-100
    )
    # the mean over the labels that are not ignored, as in Keras
    expected = (torch.tensor(WEIGHTS) * cost).sum() / (target != -100).sum()
    expected.backward()
    loss, weights = trained(
        tokens(size), losses.CrossEntropy(ignore_index=-100), X, IGNORED, WEIGHTS, **way
    )
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(weights["w"], (w - 0.5 * w.grad).detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights["b"], (b - 0.5 * b.grad).detach(), rtol=1e-5, atol=1e-6)


@every_way
def test_weights_of_elements_are_a_sum_over_the_number_of_elements(way) -> None:
    trainer = Trainer(mlp(), loss="mse", optimizer=onnxfit.optimizers.SGD(0.0), **way)
    squares = (trainer.predict(FLAT_X) - FLAT_Y) ** 2
    loss = trainer.evaluate(FLAT_X, FLAT_Y, FLAT_W, batch_size=4)["loss"]
    assert loss == pytest.approx((FLAT_W * squares).sum() / squares.size, rel=1e-5)
    assert trainer.fit(FLAT_X, FLAT_Y, FLAT_W, batch_size=4, verbose=0).history[
        "loss"
    ] == pytest.approx([loss], rel=1e-5)


def test_the_weighted_mean_divides_by_the_weights() -> None:
    weights = abs(WEIGHTS)
    means = []
    for reduction in ("weighted_mean", "sum", "mean"):
        trainer = Trainer(
            tokens(), loss=losses.CrossEntropy(ignore_index=-100, reduction=reduction)
        )
        means.append(trainer.evaluate(X, IGNORED, weights, batch_size=4)["loss"])
    counted = IGNORED != -100
    assert means[0] == pytest.approx(means[1] / weights[counted].sum(), rel=1e-5)
    assert means[2] == pytest.approx(means[1] / counted.sum(), rel=1e-5)


def test_equal_weights_in_a_row_are_the_weight_of_the_row() -> None:
    rows = RNG.uniform(0, 2, ROWS).astype(np.float32)
    for loss, model, x, y, entries in [
        ("cross_entropy", tokens(), X, LABELS, (TOKENS,)),
        ("mse", mlp(), FLAT_X, FLAT_Y, (3,)),
        ("mse", tokens(), X, X[..., :3], (TOKENS,)),  # a weight of a token is of all its numbers
        ("mse", tokens(), X, X[..., :3], (TOKENS, 3)),
    ]:
        spread = np.broadcast_to(rows.reshape(-1, *[1] * len(entries)), (ROWS, *entries))
        expected, by_row = trained(model, loss, x, y, rows, batch_size=4)
        got, by_entry = trained(model, loss, x, y, spread, batch_size=4)
        assert got == pytest.approx(expected, rel=1e-5)
        for name, value in by_row.items():
            np.testing.assert_allclose(by_entry[name], value, rtol=1e-5, atol=1e-6)


@every_way
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_label_of_weight_0_may_be_missing(way, value) -> None:
    missing = np.where(FLAT_W == 0, value, FLAT_Y)
    expected = trained(mlp(), "mse", FLAT_X, FLAT_Y, FLAT_W, 4, **way)
    got = trained(mlp(), "mse", FLAT_X, missing, FLAT_W, 4, **way)
    assert got[0] == pytest.approx(expected[0])
    for name, weight in expected[1].items():
        np.testing.assert_allclose(got[1][name], weight, rtol=1e-5, atol=1e-7)


def every_loss() -> list[losses.Loss]:
    plain = [kind() for kind in dict.fromkeys(registry("onnxfit.losses", losses.Loss).values())]
    function = losses.get_loss(lambda op, y, p: abs(y - p))
    return [*plain, losses.CrossEntropy(axis=1), losses.KLDivergence(axis=1), function]


def labelled_losses() -> list[Any]:
    """Every loss with labels that suit it, and those of classes also with one-hot labels."""
    cases = []
    one_hot = np.broadcast_to(np.eye(4), SHAPE)  # on both axes
    spec = TensorSpec("y", np.dtype(np.float32), SHAPE)
    for loss in every_loss():
        name = type(loss).__name__
        y, p = test_losses.draw(loss, SHAPE, np.float32)
        cases.append(pytest.param(loss, y, p, id=f"{name}-labels"))
        if isinstance(loss, losses.ClassLoss):
            with contextlib.suppress(DataError):  # takes class indices only
                cases.append(
                    pytest.param(loss, loss.prepare(one_hot, spec), p, id=f"{name}-one-hot")
                )
    return cases


def entries(loss, y, p) -> tuple[int, ...]:
    """The shape of a loss without its reduction."""
    op = functions.new_function(loss)
    return loss(op, *(op.input(n, a.dtype, a.shape) for n, a in (("y", y), ("p", p)))).shape


def loss_and_gradient(loss, y, p, s):
    op = functions.new_function(loss)
    arguments = [op.input(n, a.dtype, a.shape) for n, a in (("y_true", y), ("y_pred", p))]
    weight = op.input("sample_weight", s.dtype, s.shape)
    op.output("loss", loss.reduce(op, *arguments, weight)[0])
    model = functions.to_model_proto(op, ("loss", "y_pred"))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {"y_true": y, "y_pred": p, "sample_weight": s})


@pytest.mark.parametrize(("loss", "y", "p"), labelled_losses())
def test_an_output_of_weight_0_may_be_nan_in_every_loss(loss, y, p) -> None:
    s = np.ones(entries(loss, y, p), np.float32)
    s[(0, 2)[: s.ndim]] = 0
    nan = p.copy()
    if s.ndim == 1:  # one entry for each row
        nan[0, 1] = np.nan
    elif getattr(loss, "axis", None) == 1:
        nan[0, :, 2] = np.nan
    elif isinstance(loss, losses.CausalLM):  # the label is that of the output before it
        nan[0, 1] = np.nan
    elif isinstance(loss, losses.Function):  # an entry may depend on all outputs of its row
        s[0] = 0
        nan[0, 1] = np.nan
    else:
        nan[0, 2] = np.nan
    expected = loss_and_gradient(loss, y, p, s)
    value, gradient = loss_and_gradient(loss, y, nan, s)
    assert np.isfinite(value)
    assert value == expected[0]
    np.testing.assert_array_equal(gradient, expected[1])
    assert not gradient[np.isnan(nan)].any()
    assert gradient[1].any()


def test_metrics_weigh_single_labels() -> None:
    p = RNG.normal(size=(ROWS, TOKENS, CLASSES))
    w = np.array(abs(WEIGHTS), np.float64)
    nan = np.where(w[..., None] == 0, np.nan, p)
    for metric in (
        Accuracy(weighted=True),
        F1(weighted=True),
        ConfusionMatrix(weighted=True),
        AUC(weighted=True),
        TopKAccuracy(2, weighted=True),
    ):
        # each token as a row of its own is the same
        metric.update(LABELS.reshape(-1), p.reshape(-1, CLASSES), w.reshape(-1))
        expected = metric.result()
        for outputs in (p, nan):
            metric.reset()
            for rows in (slice(0, 4), slice(4, ROWS)):
                metric.update(LABELS[rows], outputs[rows], w[rows])
            np.testing.assert_allclose(metric.result(), expected, rtol=1e-12)


def test_metrics_weigh_single_elements() -> None:
    p = RNG.normal(size=(ROWS, 3))
    y = np.array(FLAT_Y, np.float64)
    w = np.array(FLAT_W, np.float64)
    nan = np.where(w == 0, np.nan, p)
    squares = (p - y) ** 2
    spread = (w * (y - (w * y).sum(0) / w.sum(0)) ** 2).sum(0)
    for metric, expected in (
        (MeanSquaredError(weighted=True), (w * squares).sum() / w.sum()),
        (R2(weighted=True), (1 - (w * squares).sum(0) / spread).mean()),
    ):
        for outputs in (p, nan):
            metric.reset()
            for rows in (slice(0, 2), slice(2, ROWS)):
                metric.update(y[rows], outputs[rows], w[rows])
            assert metric.result() == pytest.approx(expected, rel=1e-12)


def test_metrics_of_rows_refuse_weights_of_labels() -> None:
    metric = get_metric(lambda y, p: abs(y - p).mean(axis=1))
    metric.weighted = True
    with pytest.raises(DataError, match=r"sample_weight of shape \(5, 3\).*values of shape \(5,\)"):
        metric.update(FLAT_Y, FLAT_Y, FLAT_W)


@every_way
def test_fit_and_evaluate_agree_on_weighted_metrics(way) -> None:
    trainer = Trainer(
        tokens(),
        loss=losses.CrossEntropy(ignore_index=-100),
        optimizer=onnxfit.optimizers.SGD(0.0),
        metrics=[Accuracy(weighted=True)],
        **way,
    )
    weights = abs(WEIGHTS)
    right = trainer.predict(X).argmax(-1) == IGNORED
    expected = (weights * right).sum() / weights[IGNORED != -100].sum()
    history = trainer.fit(X, IGNORED, weights, batch_size=4, verbose=0).history
    assert history["weighted_accuracy"] == pytest.approx([expected], rel=1e-5)
    figures = trainer.evaluate(X, IGNORED, weights, batch_size=5)
    assert figures["weighted_accuracy"] == pytest.approx(expected, rel=1e-5)


def test_weights_of_another_shape_are_refused() -> None:
    trainer = Trainer(mlp(), loss="mse")
    before = trainer.get_weights()
    for shape in ((ROWS, 2), (ROWS, 3, 2)):
        with pytest.raises(DataError, match="one weight for each row"):
            trainer.fit(FLAT_X, FLAT_Y, np.ones(shape), verbose=0)
    classes = Trainer(mlp(), loss="cross_entropy")
    with pytest.raises(
        SettingError, match=r"a loss of shape \(.*sample_weight has shape \(.*, 3\)"
    ):
        classes.fit(FLAT_X, np.eye(3)[LABELS[:, 0]], FLAT_W, verbose=0)
    for name, value in trainer.get_weights().items():
        np.testing.assert_array_equal(value, before[name])
