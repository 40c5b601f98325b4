"""Sample weights of each output by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx.parser
import pytest

from onnxfit import DataLoader, Trainer
from onnxfit.errors import DataError, UnknownNameError
from onnxfit.metrics import MeanSquaredError

BACKENDS = ["full", "forward_backward", "in_place"]
ROWS, RATE = 12, 0.1
rng = np.random.default_rng(0)
X = rng.standard_normal((ROWS, 4)).astype(np.float32)
Y = {"a": np.ones((ROWS, 1), np.float32), "b": rng.standard_normal((ROWS, 1)).astype(np.float32)}
W = {"a": rng.random(ROWS).astype(np.float32), "b": (np.arange(ROWS) < 3).astype(np.float32)}
MODEL = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]> two (float[N, 4] x) => (float[N, 1] a, float[N, 1] b)
    <float[4, 1] wa = {1, 1, 1, 1}, float[4, 1] wb = {1, 1, 1, 1}>
    { a = MatMul(x, wa)  b = MatMul(x, wb) }"""
)


def new(backend: str = "full", **settings: Any) -> Trainer:
    losses = {"a": "mse", "b": "mse"}
    return Trainer(MODEL, loss=losses, optimizer=RATE, backend=backend, **settings)


def expected(weights: dict[str, npt.NDArray[Any]]) -> tuple[float, dict[str, npt.NDArray[Any]]]:
    """Return the loss, the sum of w (x v - y)² / n over the outputs, and the weights of a step."""
    loss, after = 0.0, {}
    for output, y in Y.items():
        w = weights.get(output, np.ones(ROWS))[:, None].astype(np.float64)
        error = X.astype(np.float64).sum(axis=1, keepdims=True) - np.where(w == 0, 0, y)
        loss += float((w * error**2).sum() / ROWS)
        after[f"w{output}"] = 1 - RATE * X.T @ (2 * w * error) / ROWS
    return loss, after


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outputs", ["ab", "a", "b"])
def test_each_output_has_its_weights(backend: str, outputs: str) -> None:
    weights = {output: W[output] for output in outputs}
    trainer = new(backend)
    history = trainer.fit(X, Y, sample_weight=weights, batch_size=ROWS, verbose=0).history
    loss, after = expected(weights)
    assert history["loss"] == [pytest.approx(loss, rel=1e-6)]
    for name, value in trainer.get_weights().items():
        np.testing.assert_allclose(value, after[name], rtol=1e-5)


@pytest.mark.parametrize(
    "give",
    [
        lambda w: {"x": X, "y": Y, "sample_weight": w},
        lambda w: {"x": X, "y": Y, "sample_weight": [w["a"], w["b"]]},
        lambda w: {"x": X, "y": Y, "sample_weight": {k: v[:, None] for k, v in w.items()}},
        lambda w: {"x": DataLoader(X, Y, w, batch_size=ROWS, shuffle=False)},
        lambda w: {"x": [(X, Y, w)]},
    ],
)
def test_every_kind_of_data_gives_the_same(give: Any) -> None:
    assert new().evaluate(**give(W), batch_size=ROWS)["loss"] == pytest.approx(
        expected(W)[0], rel=1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_label_of_weight_0_may_be_missing(backend: str) -> None:
    labels = {**Y, "b": np.where(W["b"][:, None] == 0, np.nan, Y["b"])}
    trainer = new(backend)
    trainer.fit(X, labels, sample_weight=W, batch_size=ROWS, verbose=0)
    for name, value in trainer.get_weights().items():
        np.testing.assert_allclose(value, expected(W)[1][name], rtol=1e-5)
    with pytest.raises(DataError, match="got nan at row 3"):
        new(backend).fit(X, labels, sample_weight={"a": W["a"]}, verbose=0)


def test_an_input_may_be_missing_where_no_output_counts_it() -> None:
    x = X.copy()
    x[5] = np.nan
    weights = {"a": (np.arange(ROWS) != 5).astype(np.float32), "b": W["b"]}
    assert np.isfinite(new().evaluate(x, Y, sample_weight=weights)["loss"])
    with pytest.raises(DataError, match="NaN in row 5"):
        new().evaluate(x, Y, sample_weight={"b": W["b"]})


def test_a_weighted_metric_takes_the_weights_of_its_output() -> None:
    trainer = new(metrics=[MeanSquaredError(weighted=True, name="mse")])
    figures = trainer.evaluate(X, Y, sample_weight=W, batch_size=5)
    for output, y in Y.items():
        errors = (X.sum(axis=1) - y[:, 0]) ** 2
        mean = np.average(errors, weights=W[output])
        assert figures[f"{output}_mse"] == pytest.approx(mean, rel=1e-6)


def test_weights_are_split_with_their_rows() -> None:
    history = new().fit(X, Y, sample_weight=W, validation_split=0.25, epochs=0, verbose=0)
    assert history.history == {}
    trainer = new()
    trainer.fit(X, Y, sample_weight=W, validation_split=0.25, batch_size=ROWS, verbose=0)
    other = new()
    part = {name: w[:9] for name, w in W.items()}
    other.fit(X[:9], {k: v[:9] for k, v in Y.items()}, sample_weight=part, verbose=0)
    for name, value in trainer.get_weights().items():
        np.testing.assert_allclose(value, other.get_weights()[name], rtol=1e-6)


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    trainer = new()
    with pytest.raises(UnknownNameError, match="in sample_weight, is called 'c'"):
        trainer.fit(X, Y, sample_weight={"c": W["a"]}, verbose=0)
    with pytest.raises(DataError, match="sample_weight for b has 3"):
        trainer.fit(X, Y, sample_weight={"b": W["a"][:3]}, verbose=0)
    with pytest.raises(DataError, match="sample_weight for b is NaN in row 0"):
        trainer.fit(X, Y, sample_weight={"b": np.full(ROWS, np.nan)}, verbose=0)
    with pytest.raises(DataError, match="sample_weight for a has shape"):
        trainer.fit(X, Y, sample_weight={"a": np.ones((ROWS, 2))}, verbose=0)


def test_a_single_output_may_be_named() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> one (float[N, 4] x) => (float[N, 1] a)
        <float[4, 1] wa = {1, 1, 1, 1}> { a = MatMul(x, wa) }"""
    )
    trainer = Trainer(model, loss="mse")
    named = trainer.evaluate(X, Y["a"], sample_weight={"a": W["a"]})
    assert named == trainer.evaluate(X, Y["a"], sample_weight=W["a"])
