"""Metrics of decided classes: counts of right and wrong decisions, and their ratios."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfit.errors import SettingError
from onnxfit.metrics.alignment import (
    aligned,
    check_threshold,
    counted_rows,
    cut_at,
    decided,
    is_binary,
    per_element,
    ratio,
    summed_counts,
)
from onnxfit.metrics.base import Array, Metric, merged_copies

__all__ = ["F1", "ConfusionMatrix", "Precision", "Recall"]


@dataclass
class DecisionMetric(Metric):
    """Base class of precision, recall and F1: for each class the weight of the rows in which it
    was rightly predicted, predicted, and true.

    - One output per row: the positive class alone counts.
    - `(batch, classes)` with integer or one-hot labels: the highest score is the prediction; a row
      with NaN predicts nothing.
    - `threshold`, `from_logits`: as in `BinaryAccuracy`.
    - `average`, for several classes: "macro", the mean over the classes that occur or are
      predicted; "weighted", counted by how often each class is true; "micro", over all decisions at
      once.
    - `multi_label`: any number of the columns of `(batch, labels)` may be true; each is decided by
      the threshold.
    - `weighted`, `name`: as in `Metric`.

    0/0 is 0, as in scikit-learn. Raises SettingError for an invalid setting.
    """

    mode = "max"

    threshold: float = 0.5
    from_logits: bool | None = None
    average: str = "macro"
    multi_label: bool = False

    def __post_init__(self) -> None:
        check_threshold(self, self.threshold, self.from_logits)
        if self.average not in ("macro", "micro", "weighted"):
            raise SettingError(
                f"{type(self).__name__} needs average 'macro', 'micro' or 'weighted', got"
                f" {self.average!r}."
            )
        super().__post_init__()

    @abstractmethod
    def score(self, hits: Array, predicted: Array, true: Array) -> Array:
        """Return the figure of each class, from the weights of the rows in which it was rightly
        predicted (`hits`), `predicted`, and `true`.
        """

    def reset(self) -> None:
        self._sums: Array | None = None  # hits, predicted, true; a column per class

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        if self.multi_label or is_binary(y_true, y_pred):
            sums = self._of_elements(y_true, y_pred, weights)
        else:
            sums = self._of_classes(y_true, y_pred, weights)
        self._sums = summed_counts(self._sums, sums)

    def _of_elements(self, y_true: Array, y_pred: Array, weights: Array | None) -> Array:
        true, pred = aligned(self, y_true, y_pred)
        positive = true > 0.5
        predicted = pred > cut_at(self, self.threshold, self.from_logits, pred)
        weighting = per_element(weights, pred.shape)
        axes = tuple(i for i in range(pred.ndim) if not (self.multi_label and i == 1))
        counted = (positive & predicted, predicted, positive)
        return np.stack([np.atleast_1d((weighting * mask).sum(axis=axes)) for mask in counted])

    def _of_classes(self, y_true: Array, y_pred: Array, weights: Array | None) -> Array:
        true, guess, per_row, count = decided(self, y_true, y_pred, weights)
        counted = ((true, per_row * (true == guess)), (guess, per_row), (true, per_row))
        return np.stack(
            [np.bincount(classes, w, minlength=count + 1)[:count] for classes, w in counted]
        )

    def result(self) -> float:
        if self._sums is None:
            return math.nan
        hits, predicted, true = self._sums
        if self.average == "micro":
            return float(self.score(hits.sum(), predicted.sum(), true.sum()))
        scores = self.score(hits, predicted, true)
        if len(scores) == 1:
            return float(scores[0])
        if self.average == "weighted":
            return float((scores * true).sum() / true.sum()) if true.sum() else math.nan
        counted = (predicted + true > 0) | self.multi_label
        return float(scores[counted].mean()) if counted.any() else math.nan

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._sums = summed_counts(
            self._sums, *(other._sums for other in merged_copies(self, states))
        )


@dataclass
class Precision(DecisionMetric):
    r"""Share of the positive predictions that are right, $TP / (TP + FP)$, in [0, 1]
    (`sklearn.metrics.precision_score`).

    - `threshold`, `from_logits`: as in `BinaryAccuracy`.
    - `average`: of several classes, "macro" (the mean over classes), "weighted" (by how often each
      is true) or "micro" (over all decisions at once).
    - `multi_label`: several columns of `(batch, labels)` may be true at once.
    - `weighted`, `name`: as in `Metric`.

    0/0 is 0. Raises SettingError for an invalid setting.

    >>> metric = Precision()
    >>> metric.update(np.array([0, 1, 1]), np.array([0.6, 0.9, 0.2]))
    >>> metric.result()
    0.5
    """

    def score(self, hits: Array, predicted: Array, true: Array) -> Array:
        return ratio(hits, predicted)


@dataclass
class Recall(DecisionMetric):
    r"""Share of the positive labels that were predicted, $TP / (TP + FN)$, in [0, 1]
    (`sklearn.metrics.recall_score`).

    `threshold`, `from_logits`, `average`, `multi_label`, `weighted` and `name` are as in
    `Precision`. 0/0 is 0.

    >>> metric = Recall()
    >>> metric.update(np.array([1, 1, 1, 0]), np.array([0.6, 0.9, 0.2, 0.1]))
    >>> round(metric.result(), 3)
    0.667
    """

    aliases = ("sensitivity",)

    def score(self, hits: Array, predicted: Array, true: Array) -> Array:
        return ratio(hits, true)


@dataclass
class F1(DecisionMetric):
    r"""Harmonic mean of precision and recall, $2 TP / (2 TP + FP + FN)$, in [0, 1]
    (`sklearn.metrics.f1_score`).

    `threshold`, `from_logits`, `average`, `multi_label`, `weighted` and `name` are as in
    `Precision`. 0/0 is 0.

    >>> metric = F1(average="micro")
    >>> metric.update(np.array([0, 1, 2]), np.eye(3)[[0, 1, 1]])
    >>> round(metric.result(), 3)
    0.667
    """

    aliases = ("f1_score",)

    def score(self, hits: Array, predicted: Array, true: Array) -> Array:
        return ratio(2 * hits, predicted + true)


@dataclass
class ConfusionMatrix(Metric):
    r"""Count of how often each class (row) was predicted as each class (column),
    $C_{ij} = \sum_n [c_n = i][\hat c_n = j]$, shape `(classes, classes)`; float64 if `weighted`,
    else int64.

    One output per row counts as two classes. A row with NaN is in no cell.

    - `threshold`, `from_logits`: for one output per row, those of `BinaryAccuracy`.
    - `weighted`, `name`: as in `Metric`.

    >>> matrix = ConfusionMatrix()
    >>> matrix.update(np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]))
    >>> matrix.result().tolist()
    [[1, 0], [1, 1]]
    """

    mode = "max"
    scalar = False

    threshold: float = 0.5
    from_logits: bool | None = None

    def __post_init__(self) -> None:
        check_threshold(self, self.threshold, self.from_logits)
        super().__post_init__()

    def reset(self) -> None:
        self._cells: Array = np.zeros((0, 0))

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        if is_binary(y_true, y_pred):
            cut = cut_at(self, self.threshold, self.from_logits, y_pred)
            count = 2
            true = (y_true > 0.5).ravel().astype(np.int64)
            guess = np.where(np.isnan(y_pred), count, y_pred > cut).ravel().astype(np.int64)
            weighting = per_element(weights, y_pred.shape).ravel()
        else:
            true, guess, weighting, count = decided(self, y_true, y_pred, weights)
        cells = np.bincount(
            true * (count + 1) + guess, weighting, minlength=count * (count + 1)
        ).reshape(count, count + 1)[:, :count]
        self._cells = summed_counts(self._cells, cells)

    def result(self) -> Array:
        return self._cells.copy() if self.weighted else self._cells.astype(np.int64)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._cells = summed_counts(
            self._cells, *(other._cells for other in merged_copies(self, states))
        )
