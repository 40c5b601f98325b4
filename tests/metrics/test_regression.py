"""Metrics of numbers and of how they vary together, against scikit-learn, scipy and formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from sklearn import metrics as sk

from onnxfit.errors import DataError
from onnxfit.metrics import (
    R2,
    ConcordanceCorrelation,
    ExplainedVariance,
    LogCosh,
    MaxError,
    MeanAbsolutePercentageError,
    MeanSquaredLogarithmicError,
    Metric,
    PearsonCorrelation,
    RootMeanSquaredLogarithmicError,
    SpearmanCorrelation,
    SymmetricMeanAbsolutePercentageError,
)

RNG = np.random.default_rng(0)
TRUE = np.round(RNG.gamma(2.0, size=(50, 3)), 1) + 0.1  # some numbers are equal
PRED = np.round(TRUE + RNG.normal(scale=0.5, size=TRUE.shape), 1)
WEIGHTS = RNG.integers(0, 4, 50)


def figure(metric: Metric, y: Any = TRUE, p: Any = PRED, w: Any = None) -> Any:
    """The result over three batches."""
    metric.reset()
    for rows in (slice(0, 7), slice(7, 30), slice(30, None)):
        metric.update(y[rows], p[rows], None if w is None else w[rows])
    return metric.result()


@pytest.mark.parametrize("w", [None, WEIGHTS], ids=["plain", "weighted"])
def test_scikit_learn_agrees(w: np.ndarray | None) -> None:
    def same(metric: Metric, score: Any, p: np.ndarray = PRED, factor: float = 1) -> None:
        metric.weighted = w is not None
        expected = factor * score(TRUE, p, sample_weight=w)
        np.testing.assert_allclose(figure(metric, p=p, w=w), expected, rtol=1e-12)

    positive = np.maximum(PRED, 0)
    same(MeanAbsolutePercentageError(), sk.mean_absolute_percentage_error, factor=100)
    same(MeanSquaredLogarithmicError(), sk.mean_squared_log_error, positive)
    same(ExplainedVariance(), sk.explained_variance_score)
    same(R2(), sk.r2_score)
    log_error = math.sqrt(sk.mean_squared_log_error(TRUE, positive, sample_weight=w))
    metric = RootMeanSquaredLogarithmicError(weighted=w is not None)
    np.testing.assert_allclose(figure(metric, p=positive, w=w), log_error)


def test_formulas() -> None:
    smape = 200 * np.abs(TRUE - PRED) / (np.abs(TRUE) + np.abs(PRED))
    np.testing.assert_allclose(figure(SymmetricMeanAbsolutePercentageError()), smape.mean())
    zeros = np.zeros((50, 3))
    assert figure(SymmetricMeanAbsolutePercentageError(), zeros, zeros) == 0
    np.testing.assert_allclose(figure(LogCosh()), np.log(np.cosh(PRED - TRUE)).mean())
    assert figure(MaxError()) == np.abs(TRUE - PRED).max()
    below = figure(MeanSquaredLogarithmicError(), TRUE, -PRED)
    above = np.log1p(TRUE) - np.log1p(np.maximum(-PRED, 0))
    np.testing.assert_allclose(below, (above**2).mean())
    with pytest.raises(
        DataError, match=r"MeanSquaredLogarithmicError needs labels >= 0, got -0\.5"
    ):
        MeanSquaredLogarithmicError().update(np.array([-0.5]), np.array([1.0]))


def repeated(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, WEIGHTS, axis=0)


@pytest.mark.parametrize("weighted", [False, True])
def test_correlations(weighted: bool) -> None:
    y, p = (repeated(TRUE), repeated(PRED)) if weighted else (TRUE, PRED)
    columns = list(zip(y.T, p.T))
    for metric, function in (
        (PearsonCorrelation(), scipy.stats.pearsonr),
        (SpearmanCorrelation(), scipy.stats.spearmanr),
    ):
        metric.weighted = weighted
        expected = np.mean([function(*column).statistic for column in columns])
        np.testing.assert_allclose(figure(metric, w=WEIGHTS), expected, rtol=1e-12)
    concordance = [
        2 * np.cov(a, b, bias=True)[0, 1] / (a.var() + b.var() + (a.mean() - b.mean()) ** 2)
        for a, b in columns
    ]
    metric = ConcordanceCorrelation(weighted=weighted)
    np.testing.assert_allclose(figure(metric, w=WEIGHTS), np.mean(concordance), rtol=1e-12)


def test_each_label_may_have_its_weight() -> None:
    w = RNG.integers(0, 3, TRUE.shape)
    for cls, function in (
        (PearsonCorrelation, scipy.stats.pearsonr),
        (SpearmanCorrelation, scipy.stats.spearmanr),
    ):
        expected = [
            function(np.repeat(a, n), np.repeat(b, n)).statistic
            for a, b, n in zip(TRUE.T, PRED.T, w.T)
        ]
        np.testing.assert_allclose(figure(cls(weighted=True), w=w), np.mean(expected))


@pytest.mark.parametrize("cls", [PearsonCorrelation, SpearmanCorrelation])
def test_a_constant_has_no_correlation(cls: type[Metric]) -> None:
    constant = np.full(50, 0.1)
    assert math.isnan(figure(cls(), constant, RNG.random(50)))
    assert math.isnan(figure(cls(), RNG.random(50), constant))
    assert figure(ExplainedVariance(), constant, constant + 1) == 1
    assert figure(R2(), constant, constant + 1) == 0


@pytest.mark.parametrize("cls", [PearsonCorrelation, ExplainedVariance, ConcordanceCorrelation])
def test_large_numbers_do_not_cancel(cls: type[Metric]) -> None:
    same_spread = figure(cls())
    np.testing.assert_allclose(figure(cls(), TRUE + 1e8, PRED + 1e8), same_spread, rtol=1e-6)
