"""Metrics of images, against formulas and a convolution by scipy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.signal

from onnxfit.errors import DataError, SettingError
from onnxfit.metrics import PSNR, SSIM, Metric

RNG = np.random.default_rng(0)
TRUE = RNG.random((6, 3, 17, 14))
PRED = np.clip(TRUE + RNG.normal(scale=0.1, size=TRUE.shape), 0, 1)
WEIGHTS = np.array([0, 1, 2, 3, 1, 0])


def figure(metric: Metric, y: Any = TRUE, p: Any = PRED, w: Any = None) -> Any:
    """The result over two batches."""
    metric.reset()
    for rows in (slice(0, 2), slice(2, None)):
        metric.update(y[rows], p[rows], None if w is None else w[rows])
    return metric.result()


@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_the_ratio_of_each_image(scale: float) -> None:
    each = [10 * np.log10(1 / ((a - b) ** 2).mean()) for a, b in zip(TRUE, PRED)]
    metric = PSNR(scale)
    np.testing.assert_allclose(figure(metric, scale * TRUE, scale * PRED), np.mean(each))
    metric.weighted = True
    expected = np.average(each, weights=WEIGHTS)
    np.testing.assert_allclose(figure(metric, scale * TRUE, scale * PRED, WEIGHTS), expected)
    assert figure(PSNR(), TRUE, TRUE) == np.inf


def similarity(y: np.ndarray, p: np.ndarray, size: float) -> float:
    """SSIM of a channel, from windows in two dimensions."""
    places = np.arange(-5, 6)
    window = np.exp(-(places[:, None] ** 2 + places**2) / (2 * 1.5**2))
    window /= window.sum()

    def mean(image: np.ndarray) -> np.ndarray:
        return scipy.signal.correlate2d(image, window, mode="valid")

    a, b = mean(y), mean(p)
    c1, c2 = (0.01 * size) ** 2, (0.03 * size) ** 2
    top = (2 * a * b + c1) * (2 * (mean(y * p) - a * b) + c2)
    spread = mean(y * y) - a * a + mean(p * p) - b * b
    return float((top / ((a * a + b * b + c1) * (spread + c2))).mean())


@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_structural_similarity(scale: float) -> None:
    y, p = scale * TRUE, scale * PRED
    each = [np.mean([similarity(*pair, scale) for pair in zip(a, b)]) for a, b in zip(y, p)]
    np.testing.assert_allclose(figure(SSIM(scale), y, p), np.mean(each), rtol=1e-9)
    last = figure(SSIM(scale, channels="last"), np.moveaxis(y, 1, -1), np.moveaxis(p, 1, -1))
    np.testing.assert_allclose(last, np.mean(each), rtol=1e-9)
    weighted = figure(SSIM(scale, weighted=True), y, p, WEIGHTS)
    np.testing.assert_allclose(weighted, np.average(each, weights=WEIGHTS), rtol=1e-9)
    gray = np.mean([similarity(a[0], b[0], scale) for a, b in zip(y, p)])
    np.testing.assert_allclose(figure(SSIM(scale), y[:, 0], p[:, 0]), gray, rtol=1e-9)


def test_images_and_settings_that_do_not_fit() -> None:
    with pytest.raises(
        DataError, match=r"SSIM needs images of at least 11 × 11 .*\(6, 3, 10, 14\)"
    ):
        SSIM().update(TRUE[:, :, :10], PRED[:, :, :10])
    with pytest.raises(SettingError, match="SSIM needs channels 'first' or 'last', got 'middle'"):
        SSIM(channels="middle")
    with pytest.raises(SettingError, match="PSNR needs max_value > 0, got 0"):
        PSNR(0)
