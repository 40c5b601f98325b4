"""Metrics of decided classes: counts of right and wrong decisions, and their ratios."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from onnxfit.checks import check_number
from onnxfit.metrics.alignment import (
    aligned,
    check_average,
    check_class_count,
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

__all__ = [
    "F1",
    "BalancedAccuracy",
    "FBeta",
    "FalseNegatives",
    "FalsePositives",
    "Precision",
    "Recall",
    "Specificity",
    "TrueNegatives",
    "TruePositives",
]


class Counts(NamedTuple):
    """The weights of decisions, an entry for each class.

    - `hits`: the weight of the rows in which the class was rightly predicted.
    - `predicted`, `true`: the weights of the rows in which it was predicted, and in which it is
      true.
    - `total`: the weight of all rows, without those whose output is NaN and whose label is another
      class: they are neither right nor wrong rejections.
    """

    hits: Array
    predicted: Array
    true: Array
    total: Array

    @property
    def rejected(self) -> Array:
        """The weight of the rows in which the class is neither predicted nor true."""
        return self.total - self.predicted - self.true + self.hits

    def with_negatives(self) -> Counts:
        """Return the counts of two classes, if there is one output for each row."""
        if len(self.hits) != 1:
            return self
        negatives = (self.rejected, self.total - self.predicted, self.total - self.true, self.total)
        return Counts(*(np.concatenate(pair) for pair in zip(negatives, self)))


@dataclass
class CountingMetric(Metric):
    """Base class of metrics of the `Counts` of each class.

    - `threshold`, `from_logits`: as in `BinaryAccuracy`, for one output per row.
    - `weighted`, `name`: as in `Metric`.
    """

    mode = "max"

    threshold: float = 0.5
    from_logits: bool | None = None

    def __post_init__(self) -> None:
        check_threshold(self, self.threshold, self.from_logits)
        super().__post_init__()

    def reset(self) -> None:
        self._sums: Array | None = None  # the counts, a column per class

    @property
    def decides_columns(self) -> bool:
        """Whether each column is decided by the threshold, even if there are several."""
        return False

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        if self.decides_columns or is_binary(y_true, y_pred):
            sums = self._of_elements(y_true, y_pred, weights)
        else:
            sums = self._of_classes(y_true, y_pred, weights)
        self._sums = summed_counts(self._sums, sums)

    def _of_elements(self, y_true: Array, y_pred: Array, weights: Array | None) -> Array:
        true, pred = aligned(self, y_true, y_pred)
        positive = true > 0.5
        predicted = pred > cut_at(self, self.threshold, self.from_logits, pred)
        weighting = per_element(weights, pred.shape)
        axes = tuple(i for i in range(pred.ndim) if not (self.decides_columns and i == 1))
        counted = (positive & predicted, predicted, positive, positive | ~np.isnan(pred))
        return np.stack([np.atleast_1d((weighting * mask).sum(axis=axes)) for mask in counted])

    def _of_classes(self, y_true: Array, y_pred: Array, weights: Array | None) -> Array:
        true, guess, per_row, count = decided(self, y_true, y_pred, weights)
        counted = ((true, per_row * (true == guess)), (guess, per_row), (true, per_row))
        sums = [np.bincount(classes, w, minlength=count + 1)[:count] for classes, w in counted]
        is_nan = guess == count
        without_output = np.bincount(true[is_nan], per_row[is_nan], minlength=count)
        return np.stack([*sums, per_row[~is_nan].sum() + without_output])

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._sums = summed_counts(
            self._sums, *(other._sums for other in merged_copies(self, states))
        )


@dataclass
class DecisionMetric(CountingMetric):
    """Base class of precision, recall and their relatives, figures of the counts of each class.

    - One output per row: the positive class alone counts.
    - `(batch, classes)` with integer or one-hot labels: the highest score is the prediction; a row
      with NaN predicts nothing.
    - `threshold`, `from_logits`: as in `BinaryAccuracy`.
    - `average`, for several classes: "macro", the mean over the classes that occur or are
      predicted; "weighted", counted by how often each class is true; "micro", over all decisions at
      once; None for the figure of each class, an array, which logs have under the name of the
      metric and of the class: `f1_class0`.
    - `multi_label`: any number of the columns of `(batch, labels)` may be true; each is decided by
      the threshold.
    - `class_names`: with `average=None`, the names of the classes in logs, in their order. None
      means `class0`, `class1` and so on.
    - `weighted`, `name`: as in `Metric`.

    0/0 is 0, as in scikit-learn. SettingError: a setting is invalid. DataError: the outputs have
    another number of classes than there are names.
    """

    average: str | None = "macro"
    multi_label: bool = False
    class_names: Sequence[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_average(self, "macro", "micro", "weighted")
        super().__post_init__()

    @abstractmethod
    def score(self, counts: Counts) -> Array:
        """Return the figure of each class, from its `counts`."""

    @property
    def decides_columns(self) -> bool:
        return self.multi_label

    @property
    def figure_names(self) -> tuple[str, ...]:
        return tuple(self.class_names or ()) if self.average is None else ()

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        super().update(y_true, y_pred, sample_weight)
        if self._sums is not None and self._sums.any():
            check_class_count(self, self.class_names, self._sums.shape[1])

    def result(self) -> Any:
        if self._sums is None:
            empty = np.full(len(self.class_names or ()), math.nan)
            return empty if self.average is None else math.nan
        if self.average == "micro":
            return float(self.score(Counts(*self._sums.sum(axis=1))))
        counts = Counts(*self._sums)
        scores = self.score(counts)
        if self.average is None:
            return scores
        if len(scores) == 1:
            return float(scores[0])
        if self.average == "weighted":
            true = counts.true
            return float((scores * true).sum() / true.sum()) if true.sum() else math.nan
        counted = (counts.predicted + counts.true > 0) | self.multi_label
        return float(scores[counted].mean()) if counted.any() else math.nan


@dataclass
class Precision(DecisionMetric):
    r"""Share of the positive predictions that are right, $TP / (TP + FP)$, in [0, 1]
    (`sklearn.metrics.precision_score`).

    - `threshold`, `from_logits`: as in `BinaryAccuracy`.
    - `average`: of several classes, "macro" (the mean over classes), "weighted" (by how often each
      is true), "micro" (over all decisions at once) or None (each class of its own).
    - `multi_label`: several columns of `(batch, labels)` may be true at once.
    - `class_names`: with `average=None`, the names of the classes in logs, as in `DecisionMetric`.
    - `weighted`, `name`: as in `Metric`.

    0/0 is 0. SettingError: a setting is invalid.

    >>> metric = Precision()
    >>> metric.update(np.array([0, 1, 1]), np.array([0.6, 0.9, 0.2]))
    >>> metric.result()
    0.5
    """

    aliases = ("precision_score", "positive_predictive_value", "binary_precision")

    def score(self, counts: Counts) -> Array:
        return ratio(counts.hits, counts.predicted)


@dataclass
class Recall(DecisionMetric):
    r"""Share of the positive labels that were predicted, $TP / (TP + FN)$, in [0, 1]
    (`sklearn.metrics.recall_score`).

    `threshold`, `from_logits`, `average`, `multi_label`, `class_names`, `weighted` and `name` are
    as in `Precision`. 0/0 is 0.

    >>> metric = Recall()
    >>> metric.update(np.array([1, 1, 1, 0]), np.array([0.6, 0.9, 0.2, 0.1]))
    >>> round(metric.result(), 3)
    0.667
    """

    aliases = ("sensitivity", "recall_score", "true_positive_rate", "binary_recall")

    def score(self, counts: Counts) -> Array:
        return ratio(counts.hits, counts.true)


@dataclass
class Specificity(DecisionMetric):
    r"""Share of the negative labels that were predicted as negative, $TN / (TN + FP)$, in [0, 1]:
    the recall of the negative class.

    Of several classes, each has the others as its negatives. `threshold`, `from_logits`,
    `average`, `multi_label`, `class_names`, `weighted` and `name` are as in `Precision`. 0/0 is 0.

    >>> metric = Specificity()
    >>> metric.update(np.array([0, 0, 1, 0]), np.array([0.6, 0.4, 0.2, 0.1]))
    >>> round(metric.result(), 3)
    0.667
    """

    aliases = ("true_negative_rate", "binary_specificity")

    def score(self, counts: Counts) -> Array:
        return ratio(counts.rejected, counts.total - counts.true)


@dataclass
class FBeta(DecisionMetric):
    r"""Weighted harmonic mean of precision and recall,
    $(1 + \beta^2) TP / ((1 + \beta^2) TP + \beta^2 FN + FP)$, in [0, 1]
    (`sklearn.metrics.fbeta_score`; van Rijsbergen 1979).

    - `beta`: $\beta > 0$. Recall counts $\beta$ times as much as precision.
    - `threshold`, `from_logits`, `average`, `multi_label`, `class_names`, `weighted` and `name` are
      as in `Precision`.

    0/0 is 0. SettingError: a setting is invalid.

    >>> metric = FBeta(beta=2.0)
    >>> metric.update(np.array([1, 1, 1, 0]), np.array([0.6, 0.9, 0.2, 0.1]))
    >>> round(metric.result(), 3)
    0.714
    """

    aliases = ("fbeta_score", "f2", "f2_score", "binary_fbeta_score")

    beta: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        check_number(self, "beta", above=0)
        super().__post_init__()

    def score(self, counts: Counts) -> Array:
        square = self.beta**2
        return ratio((1 + square) * counts.hits, counts.predicted + square * counts.true)


@dataclass
class F1(DecisionMetric):
    r"""Harmonic mean of precision and recall, $2 TP / (2 TP + FP + FN)$, in [0, 1]
    (`sklearn.metrics.f1_score`).

    `threshold`, `from_logits`, `average`, `multi_label`, `class_names`, `weighted` and `name` are
    as in `Precision`. 0/0 is 0.

    >>> metric = F1(average="micro")
    >>> metric.update(np.array([0, 1, 2]), np.eye(3)[[0, 1, 1]])
    >>> round(metric.result(), 3)
    0.667
    """

    aliases: ClassVar[tuple[str, ...]] = ("f1_score", "f_score", "binary_f1_score")

    def score(self, counts: Counts) -> Array:
        return ratio(2 * counts.hits, counts.predicted + counts.true)


# ---------------------------------------------------------------------- counts


@dataclass
class TruePositives(DecisionMetric):
    r"""Number of positive labels that were predicted, $\sum_i w_i [y_i = 1][\hat y_i = 1]$.

    - `average`: of several classes, "micro" adds up all classes, "macro" is the mean over classes
      and None is the number of each class.
    - `threshold`, `from_logits`, `multi_label`, `class_names`, `weighted` and `name` are as in
      `Precision`.

    >>> metric = TruePositives()
    >>> metric.update(np.array([1, 1, 1, 0]), np.array([0.6, 0.9, 0.2, 0.1]))
    >>> metric.result()
    2.0
    """

    average: str | None = "micro"

    def score(self, counts: Counts) -> Array:
        return counts.hits


@dataclass
class FalsePositives(DecisionMetric):
    r"""Number of negative labels that were predicted as positive,
    $\sum_i w_i [y_i = 0][\hat y_i = 1]$.

    `average` and the other settings, such as `weighted` and `name`, are as in `TruePositives`.

    >>> metric = FalsePositives()
    >>> metric.update(np.array([1, 0, 0, 0]), np.array([0.6, 0.9, 0.2, 0.1]))
    >>> metric.result()
    1.0
    """

    mode = "min"

    average: str | None = "micro"

    def score(self, counts: Counts) -> Array:
        return counts.predicted - counts.hits


@dataclass
class TrueNegatives(DecisionMetric):
    r"""Number of negative labels that were predicted as negative,
    $\sum_i w_i [y_i = 0][\hat y_i = 0]$.

    `average` and the other settings, such as `weighted` and `name`, are as in `TruePositives`.

    >>> metric = TrueNegatives()
    >>> metric.update(np.array([1, 0, 0, 0]), np.array([0.6, 0.9, 0.2, 0.1]))
    >>> metric.result()
    2.0
    """

    average: str | None = "micro"

    def score(self, counts: Counts) -> Array:
        return counts.rejected


@dataclass
class FalseNegatives(DecisionMetric):
    r"""Number of positive labels that were not predicted, $\sum_i w_i [y_i = 1][\hat y_i = 0]$.

    `average` and the other settings, such as `weighted` and `name`, are as in `TruePositives`.

    >>> metric = FalseNegatives()
    >>> metric.update(np.array([1, 1, 1, 0]), np.array([0.6, 0.9, 0.2, 0.1]))
    >>> metric.result()
    1.0
    """

    mode = "min"

    average: str | None = "micro"

    def score(self, counts: Counts) -> Array:
        return counts.true - counts.hits


# ---------------------------------------------------------------------- means over classes


@dataclass
class BalancedAccuracy(CountingMetric):
    r"""Mean over the classes that occur of their recall, $\frac1C \sum_c TP_c / (TP_c + FN_c)$, in
    [0, 1] (`sklearn.metrics.balanced_accuracy_score`).

    One output per row counts as two classes: the figure is then the mean of `Recall` and
    `Specificity`. `threshold` and `from_logits` are as in `BinaryAccuracy`, `weighted` and `name`
    as in `Metric`.

    >>> metric = BalancedAccuracy()
    >>> metric.update(np.array([0, 0, 0, 1]), np.array([0.6, 0.4, 0.2, 0.9]))
    >>> round(metric.result(), 3)
    0.833
    """

    aliases = ("balanced_accuracy_score", "mean_per_class_accuracy")

    def result(self) -> float:
        if self._sums is None:
            return math.nan
        counts = Counts(*self._sums).with_negatives()
        occurs = counts.true > 0
        return float(ratio(counts.hits, counts.true)[occurs].mean()) if occurs.any() else math.nan
