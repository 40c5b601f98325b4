"""A row of weight 0 has no influence on training and evaluation, even if it is not finite."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import onnxfit
from onnxfit import Trainer, losses
from onnxfit.metrics import AUC, MeanSquaredError
from tests.builds import every_way
from tests.models import linear, mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 4)).astype(np.float32)
Y = RNG.normal(size=(10, 3)).astype(np.float32)
W = (np.arange(10) % 3 > 0).astype(np.float32)


def outcome(x, y, **settings):
    """The figures of training and evaluation, and the weights."""
    trainer = Trainer(
        mlp(), loss="mse", optimizer="adam", metrics=[MeanSquaredError(weighted=True)], **settings
    )
    history = trainer.fit(x, y, W, epochs=2, batch_size=4, verbose=0).history
    return {**history, **trainer.evaluate(x, y, W, batch_size=4), **trainer.get_weights()}


@cache
def outcome_of_finite_rows(backend, gradient):
    return outcome(X, Y, backend=backend, gradient=gradient)


@every_way
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "y"])
def test_it_may_hold_nan_and_infinity(way, value, where) -> None:
    x, y = X.copy(), Y.copy()
    {"x": x, "y": y}[where][W == 0] = value
    expected = outcome_of_finite_rows(**way)
    for name, figure in outcome(x, y, **way).items():
        np.testing.assert_allclose(figure, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


@every_way
def test_its_loss_may_overflow(way) -> None:
    y = Y.copy()
    y[W == 0] = 9.96921e36  # the fill value of netCDF, whose square is infinite
    expected = outcome_of_finite_rows(**way)
    for name, figure in outcome(X, y, **way).items():
        np.testing.assert_allclose(figure, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_class_of_weight_0_may_hold_nan() -> None:
    x, classes = X.copy(), np.arange(10) % 3
    x[classes == 2] = np.nan
    trainer = Trainer(mlp(), loss="cross_entropy", metrics=[AUC(weighted=True)])
    history = trainer.fit(x, classes, class_weight={2: 0}, epochs=2, verbose=0).history
    assert np.isfinite([*history["loss"], *history["weighted_auc"]]).all()
    assert all(np.isfinite(w).all() for w in trainer.get_weights().values())


def test_a_mask_does_not_hide_where_the_output_comes_from() -> None:
    model = linear(2, 3, b=0.0)
    for sample_weight in (False, True):
        with pytest.warns(UserWarning, match="comes from a Add"):
            onnxfit.add_loss(
                model, losses.CrossEntropy(from_logits=False), sample_weight=sample_weight
            )
