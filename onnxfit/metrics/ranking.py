"""Metrics of the order that scores give, which need every score."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from onnxfit.checks import check_number
from onnxfit.metrics.alignment import (
    check_average,
    check_class_count,
    classes_and_scores,
    counted_rows,
    is_binary,
    per_element,
    softmax,
)
from onnxfit.metrics.base import Array, Metric, merged_copies, without_warnings

__all__ = [
    "AUC",
    "AveragePrecision",
    "PrecisionAtRecall",
    "PrecisionRecallAUC",
    "RecallAtPrecision",
    "SensitivityAtSpecificity",
    "SpecificityAtSensitivity",
]


class Curve(NamedTuple):
    """The weights of positive and negative rows of one column at each score that occurs, from the
    highest score to the lowest.
    """

    up: Array
    down: Array

    @property
    def recall(self) -> Array:
        """The recall if the scores from the highest to each one count as positive."""
        return np.asarray(np.cumsum(self.up) / self.up.sum())

    @property
    def precision(self) -> Array:
        """The precision if the scores from the highest to each one count as positive."""
        hits = np.cumsum(self.up)
        return np.asarray(hits / (hits + np.cumsum(self.down)))

    @property
    def specificity(self) -> Array:
        """The specificity if the scores from the highest to each one count as positive."""
        return np.asarray(1 - np.cumsum(self.down) / self.down.sum())


@dataclass
class ScoreMetric(Metric):
    """Base class of figures of the order of scores, each column against the rest.

    - `from_logits`: take the softmax over several classes first. One output per row needs no
      softmax, because only the order counts. None is as in `Metric`.
    - `average`: of several classes or labels, "macro" is the mean over columns, "weighted" is
      weighted by how often each is true; None is the figure of each column, which logs have under
      the name of the metric and of the class, as in `DecisionMetric`.
    - `class_names`: with `average=None`, the names of the classes in logs.
    - `weighted`, `name`: as in `Metric`.
    """

    mode = "max"

    from_logits: bool | None = None
    average: str | None = field(default="macro", kw_only=True)
    class_names: Sequence[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_average(self, "macro", "weighted")
        super().__post_init__()

    @abstractmethod
    def score(self, curve: Curve) -> float:
        """Return the figure of a column from its `curve`, which has positive rows."""

    @property
    def figure_names(self) -> tuple[str, ...]:
        return tuple(self.class_names or ()) if self.average is None else ()

    def reset(self) -> None:
        # positive, score: a column per class; weight
        self._batches: list[tuple[Array, Array, Array]] = []

    @without_warnings
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        if is_binary(y_true, y_pred):
            rows = per_element(weights, y_pred.shape).reshape(-1)
            positive = (y_true > 0.5).reshape(-1, 1)
            score = y_pred.reshape(-1, 1)
        elif y_true.shape == y_pred.shape and y_true.ndim == 2:
            rows = per_element(weights, y_pred.shape[:1])
            positive = y_true > 0.5
            score = y_pred
        else:
            classes, score = classes_and_scores(self, y_true, y_pred)
            counted = classes >= 0
            rows = per_element(weights, classes.shape)[counted]
            score = score[counted]
            positive = classes[counted][:, None] == np.arange(score.shape[-1])
        if self.from_logits and score.shape[1] > 1:
            score = softmax(score)
        used = rows != 0  # the score of a single label of weight 0 may be NaN
        if used.any():  # an empty batch does not determine the class axis
            check_class_count(self, self.class_names, score.shape[1])
            self._batches.append((positive[used], score[used], rows[used]))

    def result(self) -> Any:
        if not self._batches:
            empty = np.full(len(self.class_names or ()), math.nan)
            return empty if self.average is None else math.nan
        positive, score, weight = (np.concatenate(arrays) for arrays in zip(*self._batches))
        if np.isnan(score).any():
            return np.full(score.shape[1], math.nan) if self.average is None else math.nan
        curves = [_curve(p, s, weight) for p, s in zip(positive.T, score.T)]
        scores = np.array([self.score(c) if c.up.any() else math.nan for c in curves])
        if self.average is None:
            return scores
        defined = ~np.isnan(scores)
        if not defined.any():
            return math.nan
        true = np.array([curve.up.sum() for curve in curves])
        counts = true[defined] if self.average == "weighted" else None
        return float(np.average(scores[defined], weights=counts))

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        added = [batch for other in merged_copies(self, states) for batch in other._batches]
        self._batches = [*self._batches, *added]  # a new list, because a state may be the old list


def _curve(positive: Array, score: Array, weight: Array) -> Curve:
    levels, level = np.unique(score, return_inverse=True)
    up = np.bincount(level, weight * positive, minlength=len(levels))
    down = np.bincount(level, weight * ~positive, minlength=len(levels))
    return Curve(up[::-1], down[::-1])


@dataclass
class AUC(ScoreMetric):
    r"""Area under the ROC curve, exact: $P(s_+ > s_-) + \frac12 P(s_+ = s_-)$ for scores of a
    positive and a negative row, in [0, 1] (`sklearn.metrics.roc_auc_score`).

    For several classes (integer or one-hot labels), or several labels, it is the mean over the
    columns, each against the rest. Columns that are always or never true are left out. NaN if no
    column remains, or a score is NaN. Stores all scores in memory.

    - `from_logits`: take the softmax over several classes first. One output per row needs no
      softmax, because only the order counts. None is as in `Metric`.
    - `average`: "macro", the mean over columns; "weighted", by how often each is true; None, the
      area of each column, which logs have under the name of the metric and of the class.
    - `class_names`: with `average=None`, the names of the classes in logs, instead of `class0` etc.
    - `weighted`, `name`: as in `Metric`.

    >>> metric = AUC()
    >>> metric.update(np.array([0, 1, 1]), np.array([0.1, 0.4, 0.1]))
    >>> metric.result()
    0.75
    """

    aliases = ("roc_auc", "auroc", "roc_auc_score", "binary_auroc")

    def score(self, curve: Curve) -> float:
        # Each positive row counts the negative rows below it, and half of those with its score.
        down = curve.down
        pairs = curve.up.sum() * down.sum()
        below = down.sum() - np.cumsum(down) + down / 2
        return float((curve.up * below).sum() / pairs) if pairs else math.nan


@dataclass
class AveragePrecision(ScoreMetric):
    r"""Average precision $\sum_t (R_t - R_{t-1}) P_t$ over the thresholds $t$ from the highest
    score to the lowest, with recall $R$ and precision $P$, in [0, 1]
    (`sklearn.metrics.average_precision_score`).

    It is the area under the curve of precision over recall as a step function. Columns that are
    never true are left out. NaN if no column remains, or a score is NaN. Stores all scores in
    memory. `from_logits`, `average`, `class_names`, `weighted` and `name` are as in `AUC`.

    >>> metric = AveragePrecision()
    >>> metric.update(np.array([0, 1, 1]), np.array([0.2, 0.4, 0.1]))
    >>> round(metric.result(), 3)
    0.833
    """

    aliases = ("average_precision_score", "binary_average_precision")

    def score(self, curve: Curve) -> float:
        return float((np.diff(curve.recall, prepend=0) * curve.precision).sum())


@dataclass
class PrecisionRecallAUC(ScoreMetric):
    r"""Area under the curve of precision over recall by trapezoids,
    $\sum_t (R_t - R_{t-1}) (P_t + P_{t-1}) / 2$ with $P_0 = 1$, in [0, 1]
    (`sklearn.metrics.auc` of `precision_recall_curve`).

    The straight lines between thresholds are too optimistic; `AveragePrecision` has none (Davis and
    Goadrich 2006). Columns that are never true are left out. Stores all scores in memory.
    `from_logits`, `average`, `class_names`, `weighted` and `name` are as in `AUC`.

    >>> metric = PrecisionRecallAUC()
    >>> metric.update(np.array([0, 1, 1]), np.array([0.2, 0.4, 0.1]))
    >>> round(metric.result(), 3)
    0.792
    """

    aliases = ("pr_auc", "auc_pr", "prauc")

    def score(self, curve: Curve) -> float:
        precision = np.concatenate([[1.0], curve.precision])
        heights = (precision[1:] + precision[:-1]) / 2
        return float((np.diff(curve.recall, prepend=0) * heights).sum())


@dataclass
class PrecisionAtRecall(ScoreMetric):
    r"""Highest precision of a threshold with at least a given recall,
    $\max_t \{P_t : R_t \ge r\}$, in [0, 1] (`keras.metrics.PrecisionAtRecall`).

    All scores that occur are thresholds. NaN if no row is positive. Stores all scores in memory.

    - `recall`: the recall $r$ in [0, 1].
    - `from_logits`, `average`, `class_names`, `weighted`, `name`: as in `AUC`.

    SettingError: `recall` is out of range.

    >>> metric = PrecisionAtRecall(recall=0.5)
    >>> metric.update(np.array([0, 1, 1]), np.array([0.2, 0.4, 0.1]))
    >>> metric.result()
    1.0
    """

    aliases = ("precision_at_fixed_recall",)

    recall: float = field(default=0.5, kw_only=True)

    def __post_init__(self) -> None:
        check_number(self, "recall", at_least=0, at_most=1)
        super().__post_init__()

    def score(self, curve: Curve) -> float:
        return _best(curve.precision, curve.recall, self.recall)


@dataclass
class RecallAtPrecision(ScoreMetric):
    r"""Highest recall of a threshold with at least a given precision,
    $\max_t \{R_t : P_t \ge p\}$, in [0, 1]; 0 if no threshold has it
    (`keras.metrics.RecallAtPrecision`).

    All scores that occur are thresholds. NaN if no row is positive. Stores all scores in memory.

    - `precision`: the precision $p$ in [0, 1].
    - `from_logits`, `average`, `class_names`, `weighted`, `name`: as in `AUC`.

    SettingError: `precision` is out of range.

    >>> metric = RecallAtPrecision(precision=0.9)
    >>> metric.update(np.array([0, 1, 1]), np.array([0.2, 0.4, 0.1]))
    >>> metric.result()
    0.5
    """

    aliases = ("recall_at_fixed_precision",)

    precision: float = field(default=0.5, kw_only=True)

    def __post_init__(self) -> None:
        check_number(self, "precision", at_least=0, at_most=1)
        super().__post_init__()

    def score(self, curve: Curve) -> float:
        return _best(curve.recall, curve.precision, self.precision)


@dataclass
class SensitivityAtSpecificity(ScoreMetric):
    r"""Highest recall of a threshold with at least a given specificity,
    $\max_t \{R_t : S_t \ge s\}$, in [0, 1]; 0 if no threshold has it
    (`keras.metrics.SensitivityAtSpecificity`).

    All scores that occur are thresholds. NaN if all rows are positive, or none. Stores all scores
    in memory.

    - `specificity`: the specificity $s$ in [0, 1].
    - `from_logits`, `average`, `class_names`, `weighted`, `name`: as in `AUC`.

    SettingError: `specificity` is out of range.

    >>> metric = SensitivityAtSpecificity(specificity=0.9)
    >>> metric.update(np.array([0, 1, 1]), np.array([0.2, 0.4, 0.1]))
    >>> metric.result()
    0.5
    """

    specificity: float = field(default=0.5, kw_only=True)

    def __post_init__(self) -> None:
        check_number(self, "specificity", at_least=0, at_most=1)
        super().__post_init__()

    def score(self, curve: Curve) -> float:
        if not curve.down.any():
            return math.nan
        return _best(curve.recall, curve.specificity, self.specificity)


@dataclass
class SpecificityAtSensitivity(ScoreMetric):
    r"""Highest specificity of a threshold with at least a given recall,
    $\max_t \{S_t : R_t \ge r\}$, in [0, 1] (`keras.metrics.SpecificityAtSensitivity`).

    All scores that occur are thresholds. NaN if all rows are positive, or none. Stores all scores
    in memory.

    - `sensitivity`: the recall $r$ in (0, 1].
    - `from_logits`, `average`, `class_names`, `weighted`, `name`: as in `AUC`.

    SettingError: `sensitivity` is out of range.

    >>> metric = SpecificityAtSensitivity(sensitivity=1.0)
    >>> metric.update(np.array([0, 1, 0]), np.array([0.2, 0.4, 0.6]))
    >>> metric.result()
    0.5
    """

    sensitivity: float = field(default=0.5, kw_only=True)

    def __post_init__(self) -> None:
        check_number(self, "sensitivity", above=0, at_most=1)
        super().__post_init__()

    def score(self, curve: Curve) -> float:
        if not curve.down.any():
            return math.nan
        return _best(curve.specificity, curve.recall, self.sensitivity)


def _best(figures: Array, others: Array, bound: float) -> float:
    """Return the highest figure where the other one reaches the bound; 0 if it never does."""
    # The sums of weights are rounded, and a bound that they reach must not be missed.
    return float(figures[others >= bound - 1e-12].max(initial=0.0))
