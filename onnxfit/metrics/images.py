"""Metrics that compare images."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from onnxfit.checks import check_number
from onnxfit.errors import DataError, SettingError
from onnxfit.metrics.alignment import elementwise
from onnxfit.metrics.base import Array
from onnxfit.metrics.means import MeanMetric

__all__ = ["PSNR", "SSIM"]

# of the Gaussian window of SSIM, and its constants, by Wang et al.
WINDOW_SIZE, WINDOW_SIGMA = 11, 1.5
LUMINANCE, CONTRAST = 0.01, 0.03


@dataclass
class PSNR(MeanMetric):
    r"""Peak signal-to-noise ratio of images, the mean over images of
    $10 \log_{10}(L^2 / \mathrm{mean}(y - \hat y)^2)$, in decibel (`tf.image.psnr`).

    An image without error has an infinite ratio, and makes the mean infinite. Labels have the
    outputs' shape, `(batch, ...)`.

    - `max_value`: the largest possible value $L > 0$ minus the smallest: 1 for images in [0, 1],
      255 for bytes.
    - `weighted`, `name`: as in `Metric`. A weight belongs to an image.

    SettingError: `max_value` is out of range.

    >>> metric = PSNR()
    >>> metric.update(np.zeros((1, 2, 2)), np.full((1, 2, 2), 0.1))
    >>> round(metric.result(), 3)
    20.0
    """

    mode = "max"
    aliases = ("peak_signal_noise_ratio", "peak_signal_to_noise_ratio")

    max_value: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "max_value", above=0)
        super().__post_init__()

    def values(self, y_true: Array, y_pred: Array) -> Array:
        true, pred = elementwise(self, y_true, y_pred)
        error = ((true - pred) ** 2).reshape(len(true), -1).mean(axis=1)
        with np.errstate(divide="ignore"):
            return np.asarray(20 * math.log10(self.max_value) - 10 * np.log10(error))


@dataclass
class SSIM(MeanMetric):
    r"""Structural similarity of images, the mean of $\frac{(2 \mu_y \mu_p + c_1)(2 \sigma_{yp} +
    c_2)} {(\mu_y^2 + \mu_p^2 + c_1)(\sigma_y^2 + \sigma_p^2 + c_2)}$ over windows, channels and
    images, at most 1 (`tf.image.ssim`; Wang, Bovik, Sheikh, Simoncelli 2004).

    The means and variances of labels $y$ and outputs $p$ are those of a Gaussian window of 11 × 11
    pixels with a deviation of 1.5, wherever it fits into the image; $c_1 = (0.01 L)^2$ and $c_2 =
    (0.03 L)^2$. Images are `(batch, channels, height, width)` or `(batch, height, width)`, and
    labels have the outputs' shape.

    - `max_value`: the largest possible value $L > 0$ minus the smallest: 1 for images in [0, 1],
      255 for bytes.
    - `channels`: "first", or "last" for images `(batch, height, width, channels)`.
    - `weighted`, `name`: as in `Metric`. A weight belongs to an image.

    SettingError: a setting is invalid. DataError: the images are smaller than the window.

    >>> metric = SSIM()
    >>> ramp = np.linspace(0, 1, 16 * 16).reshape(1, 1, 16, 16)
    >>> metric.update(ramp, ramp)
    >>> metric.result()
    1.0
    """

    mode = "max"
    aliases = ("structural_similarity", "structural_similarity_index_measure")

    max_value: float = 1.0
    channels: str = field(default="first", kw_only=True)

    def __post_init__(self) -> None:
        check_number(self, "max_value", above=0)
        if self.channels not in ("first", "last"):
            raise SettingError(f"SSIM needs channels 'first' or 'last', got {self.channels!r}.")
        super().__post_init__()

    def values(self, y_true: Array, y_pred: Array) -> Array:
        images = elementwise(self, y_true, y_pred)
        if self.channels == "last" and y_pred.ndim == 4:
            images = (np.moveaxis(images[0], -1, 1), np.moveaxis(images[1], -1, 1))
        true, pred = images
        if pred.ndim not in (3, 4) or min(pred.shape[-2:]) < WINDOW_SIZE:
            raise DataError(
                f"SSIM needs images of at least {WINDOW_SIZE} × {WINDOW_SIZE} pixels, in"
                " (batch, channels, height, width) or (batch, height, width), got labels of shape"
                f" {y_true.shape} and outputs of shape {y_pred.shape}."
            )
        mean_true, mean_pred = _blurred(true), _blurred(pred)
        spread_true = _blurred(true * true) - mean_true**2
        spread_pred = _blurred(pred * pred) - mean_pred**2
        both = _blurred(true * pred) - mean_true * mean_pred
        c1, c2 = (LUMINANCE * self.max_value) ** 2, (CONTRAST * self.max_value) ** 2
        likeness = (2 * mean_true * mean_pred + c1) * (2 * both + c2)
        size = (mean_true**2 + mean_pred**2 + c1) * (spread_true + spread_pred + c2)
        return np.asarray((likeness / size).reshape(len(pred), -1).mean(axis=1))


def _blurred(images: Array) -> Array:
    """Return the Gaussian means of all windows that fit into images."""
    places = np.arange(WINDOW_SIZE) - (WINDOW_SIZE - 1) / 2
    window = np.exp(-((places / WINDOW_SIGMA) ** 2) / 2)
    window /= window.sum()
    for axis in (-2, -1):
        images = np.lib.stride_tricks.sliding_window_view(images, WINDOW_SIZE, axis) @ window
    return images
