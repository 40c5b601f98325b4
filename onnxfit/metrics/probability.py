"""Metrics of predicted probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from onnxfit.checks import check_number
from onnxfit.graph.logarithms import log_softmax
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.metrics.alignment import (
    aligned,
    classes_and_scores,
    counted_rows,
    is_binary,
    per_element,
    sigmoid,
    softmax,
)
from onnxfit.metrics.base import Array, Metric, merged_copies, without_warnings
from onnxfit.metrics.in_graph import class_axis_in_graph, known_classes
from onnxfit.metrics.means import MeanMetric

__all__ = ["BrierScore", "ExpectedCalibrationError", "LogLoss", "Perplexity"]

LEAST_PROBABILITY = 1e-30  # as in the losses


@dataclass
class LogLoss(MeanMetric):
    r"""Cross entropy $-\frac1n \sum_i \log p_i$, where $p_i$ is the predicted probability of the
    label (`sklearn.metrics.log_loss`).

    One output per row is the probability of the positive class; labels are then 0 and 1. Otherwise
    labels are integers without the class axis, or one-hot. A probability below 1e-30 counts as
    1e-30.

    - `from_logits`: True if $p$ is the softmax of the outputs, or the sigmoid of a single output;
      False if the outputs are $p$; None as in `Metric`.
    - `weighted`, `name`: as in `Metric`.

    >>> metric = LogLoss()
    >>> metric.update(np.array([0, 1]), np.array([[0.5, 0.5], [0.875, 0.125]]))
    >>> round(metric.result(), 3)
    1.386
    """

    aliases: ClassVar[tuple[str, ...]] = (
        "log_loss",
        "cross_entropy",
        "categorical_crossentropy",
        "sparse_categorical_crossentropy",
        "binary_crossentropy",
        "nll",
    )

    from_logits: bool | None = None

    def values(self, y_true: Array, y_pred: Array) -> Array:
        if is_binary(y_true, y_pred):
            return self._binary(*aligned(self, y_true, y_pred))
        classes, scores = classes_and_scores(self, y_true, y_pred)
        own = np.take_along_axis(scores, np.maximum(classes, 0)[..., None], axis=-1)[..., 0]
        own = own.astype(np.float64)
        if self.from_logits:
            largest = scores.max(axis=-1, keepdims=True)
            odds = np.exp(scores - largest).sum(axis=-1, dtype=np.float64)
            costs = np.log(odds) + (largest[..., 0] - own)
        else:
            costs = -np.log(np.maximum(own, LEAST_PROBABILITY))
        return np.ma.MaskedArray(costs, classes < 0)

    def _binary(self, y_true: Array, y_pred: Array) -> Array:
        pred = y_pred.astype(np.float64)
        own = np.where(y_true > 0.5, pred, -pred if self.from_logits else 1 - pred)
        if self.from_logits:
            return np.asarray(np.logaddexp(0, -own))
        return np.asarray(-np.log(np.maximum(own, LEAST_PROBABILITY)))

    def values_in_graph(
        self, op: GraphBuilder, y_true: Value, y_pred: Value
    ) -> tuple[Value, Value | None] | None:
        axis = class_axis_in_graph(y_true, y_pred)
        if axis is None:
            return None
        counted = known_classes(op, y_true, y_pred, axis)
        index = op.Unsqueeze(op.Where(counted, y_true, 0), [axis])
        # The operators of the loss CrossEntropy: onnxruntime computes them once for both.
        scores = log_softmax(op, y_pred, axis) if self.from_logits else y_pred
        own = op.Squeeze(op.GatherElements(scores, index, axis=axis), [axis])
        own = op.cast(own, np.float64)
        return -(own if self.from_logits else op.Log(op.Max(own, LEAST_PROBABILITY))), counted


@dataclass
class Perplexity(LogLoss):
    r"""Perplexity $\exp(-\frac1n \sum_i \log p_i)$, where $p_i$ is the predicted probability of the
    label: 1 for certain and right predictions, the number of classes for uniform guesses.

    The mean is over all labels of the data set that count, not over batches. It is the exponential
    of `LogLoss`, and of the losses CausalLM, and CrossEntropy without label smoothing or weights.

    - `from_logits`, and labels: as in `LogLoss`.
    - `weighted`, `name`: as in `Metric`.

    >>> metric = Perplexity()
    >>> metric.update(np.array([0, 1]), np.array([[0.5, 0.5], [0.875, 0.125]]))
    >>> metric.result()
    4.0
    """

    aliases: ClassVar[tuple[str, ...]] = ()

    def result(self) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(super().result()))


@dataclass
class BrierScore(MeanMetric):
    r"""Mean squared error of probabilities: $(p_i - y_i)^2$ of one output per row, and $\sum_c
    (p_{ic} - y_{ic})^2$ of several classes, from 0 to 2 (`sklearn.metrics.brier_score_loss`; Brier
    1950).

    - `from_logits`: as in `LogLoss`, and labels as there.
    - `weighted`, `name`: as in `Metric`.

    >>> metric = BrierScore()
    >>> metric.update(np.array([0, 1]), np.array([0.5, 1.0]))
    >>> metric.result()
    0.125
    """

    aliases = ("brier", "brier_score_loss")

    from_logits: bool | None = None

    def values(self, y_true: Array, y_pred: Array) -> Array:
        if is_binary(y_true, y_pred):
            true, pred = aligned(self, y_true, y_pred)
            pred = sigmoid(pred) if self.from_logits else pred.astype(np.float64)
            return np.asarray((pred - (true > 0.5)) ** 2)
        classes, scores = classes_and_scores(self, y_true, y_pred)
        shares = softmax(scores) if self.from_logits else scores.astype(np.float64)
        is_true = classes[..., None] == np.arange(shares.shape[-1])
        return np.ma.MaskedArray(((shares - is_true) ** 2).sum(axis=-1), classes < 0)


@dataclass
class ExpectedCalibrationError(Metric):
    r"""Expected calibration error: the mean distance of confidence and accuracy,
    $\sum_b \frac{n_b}{n} |\mathrm{acc}_b - \mathrm{conf}_b|$, over bins of equal width of the
    confidence, in [0, 1] (Naeini, Cooper, Hauskrecht 2015; Guo et al. 2017, arXiv:1706.04599).

    The confidence of several classes is the highest probability, and the accuracy is the share of
    rows whose class has it. The confidence of one output per row is that output, and the accuracy
    is the share of positive labels, as in torchmetrics. A bin contains its upper edge.

    - `bins`: the number of bins, at least 1.
    - `from_logits`: as in `LogLoss`, and labels as there.
    - `weighted`, `name`: as in `Metric`.

    >>> metric = ExpectedCalibrationError(bins=2)
    >>> metric.update(np.array([0, 1, 1, 1]), np.array([0.4, 0.4, 0.7, 0.9]))
    >>> round(metric.result(), 3)  # 0.1 in the lower half, 0.2 in the upper half
    0.15
    """

    aliases = ("ece", "calibration_error")

    bins: int = 15
    from_logits: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_number(self, "bins", at_least=1, whole=True)
        super().__post_init__()

    def reset(self) -> None:
        self._sums = np.zeros((3, self.bins))  # weight, confidence and accuracy of each bin

    @without_warnings
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        if is_binary(y_true, y_pred):
            true, pred = aligned(self, y_true, y_pred)
            right: Array = true > 0.5
            w = per_element(weights, pred.shape)
            confidence = sigmoid(pred) if self.from_logits else pred.astype(np.float64)
        else:
            classes, scores = classes_and_scores(self, y_true, y_pred)
            counted = classes >= 0
            shares = softmax(scores) if self.from_logits else scores.astype(np.float64)
            confidence = shares.max(axis=-1)[counted] if shares.size else np.zeros(0)
            right = (shares.argmax(axis=-1) == classes)[counted] if shares.size else np.zeros(0)
            w = per_element(weights, classes.shape)[counted]
        used = w != 0
        confidence, right, w = confidence[used], right[used], w[used]
        place = np.searchsorted(np.linspace(0, 1, self.bins + 1), confidence) - 1
        place = np.clip(place, 0, self.bins - 1)
        added = [np.bincount(place, x, minlength=self.bins) for x in (w, w * confidence, w * right)]
        self._sums = self._sums + np.stack(added)

    @without_warnings
    def result(self) -> float:
        weight, confidence, accuracy = self._sums
        total = weight.sum()
        return float(np.abs(accuracy - confidence).sum() / total) if total else math.nan

    @without_warnings
    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        for other in merged_copies(self, states):
            self._sums = self._sums + other._sums
