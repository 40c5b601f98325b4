"""Metrics of probabilities, against scikit-learn, torch and bins counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

from onnxfit.errors import SettingError
from onnxfit.metrics import BrierScore, ExpectedCalibrationError, LogLoss, Metric, Perplexity

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(60, 4))
SHARES = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
CLASSES = RNG.integers(0, 4, 60)
LABELS = RNG.integers(0, 2, 60).astype(float)
SCORES = RNG.normal(size=60)
CHANCES = 1 / (1 + np.exp(-SCORES))
WEIGHTS = RNG.integers(0, 4, 60)


def figure(metric: Metric, y: Any, p: Any, w: Any = None) -> Any:
    """The result over three batches."""
    metric.reset()
    for rows in (slice(0, 7), slice(7, 30), slice(30, None)):
        metric.update(y[rows], p[rows], None if w is None else w[rows])
    return metric.result()


@pytest.mark.parametrize("w", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("logits", [False, True])
def test_scikit_learn_agrees(w: np.ndarray | None, logits: bool) -> None:
    settings: dict[str, Any] = {"from_logits": logits, "weighted": w is not None}
    for cls, score in ((LogLoss, sk.log_loss), (BrierScore, sk.brier_score_loss)):
        several = figure(cls(**settings), CLASSES, LOGITS if logits else SHARES, w)
        np.testing.assert_allclose(several, score(CLASSES, SHARES, sample_weight=w), rtol=1e-12)
        one_hot = figure(cls(**settings), np.eye(4)[CLASSES], LOGITS if logits else SHARES, w)
        assert one_hot == several
        for shape in ((60,), (60, 1)):
            data = (LABELS.reshape(shape), (SCORES if logits else CHANCES).reshape(shape))
            expected = score(LABELS, CHANCES, sample_weight=w)
            np.testing.assert_allclose(figure(cls(**settings), *data, w), expected, rtol=1e-12)
    expected = np.exp(sk.log_loss(LABELS, CHANCES, sample_weight=w))
    data = (LABELS, SCORES if logits else CHANCES)
    np.testing.assert_allclose(figure(Perplexity(**settings), *data, w), expected)


def test_large_logits_do_not_overflow() -> None:
    metric = LogLoss(from_logits=True)
    assert figure(metric, np.array([1.0, 0.0]), np.array([-1000.0, 1000.0])) == 1000
    assert figure(metric, np.array([1.0, 0.0]), np.array([1000.0, -1000.0])) == 0


def calibration_error(confidence: Any, right: Any, w: Any, bins: int) -> float:
    """The sum over bins, each from its rows."""
    total = 0.0
    for i in range(bins):
        rows = (confidence > i / bins) & (confidence <= (i + 1) / bins)
        if w[rows].sum():
            accuracy = np.average(right[rows], weights=w[rows])
            mean = np.average(confidence[rows], weights=w[rows])
            total += w[rows].sum() * abs(accuracy - mean)
    return total / w.sum()


@pytest.mark.parametrize("bins", [1, 4, 15])
@pytest.mark.parametrize("weighted", [False, True])
def test_calibration_of_bins(bins: int, weighted: bool) -> None:
    w = WEIGHTS if weighted else np.ones(60)
    right = SHARES.argmax(axis=1) == CLASSES
    expected = calibration_error(SHARES.max(axis=1), right, w, bins)
    of_positive = calibration_error(CHANCES, LABELS, w, bins)
    for logits in (False, True):
        metric = ExpectedCalibrationError(bins, from_logits=logits, weighted=weighted)
        outputs = LOGITS if logits else SHARES
        np.testing.assert_allclose(figure(metric, CLASSES, outputs, w), expected)
        binary = figure(metric, LABELS, SCORES if logits else CHANCES, w)
        np.testing.assert_allclose(binary, of_positive)
    masked = figure(
        ExpectedCalibrationError(bins), np.append(CLASSES, -1), np.append(SHARES, SHARES[:1], 0)
    )
    plain = calibration_error(SHARES.max(axis=1), right, np.ones(60), bins)
    np.testing.assert_allclose(masked, plain)


def test_a_number_of_bins() -> None:
    with pytest.raises(SettingError, match=r"bins to be a whole number >= 1, got 0"):
        ExpectedCalibrationError(0)
    certain = ExpectedCalibrationError()
    assert figure(certain, np.array([0.0, 1.0]), np.array([0.0, 1.0])) == 0, "edges are in bins"
