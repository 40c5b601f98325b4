"""Metrics of the order that scores give, which need every score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfit.metrics.alignment import classes_and_scores, counted_rows, is_binary, per_element
from onnxfit.metrics.base import Array, Metric, merged_copies, without_warnings

__all__ = ["AUC"]


@dataclass
class AUC(Metric):
    r"""Area under the ROC curve, exact: $P(s_+ > s_-) + \frac12 P(s_+ = s_-)$ for scores of a
    positive and a negative row, in [0, 1] (`sklearn.metrics.roc_auc_score`).

    For several classes (integer or one-hot labels), or several labels, it is the mean over the
    columns, each against the rest. Columns that are always or never true are left out. NaN if no
    column remains, or a score is NaN. Stores all scores in memory.

    - `from_logits`: take the softmax over several classes first. One output per row needs no
      softmax, because only the order counts. None is as in `Metric`.
    - `weighted`, `name`: as in `Metric`.

    >>> metric = AUC()
    >>> metric.update(np.array([0, 1, 1]), np.array([0.1, 0.4, 0.1]))
    >>> metric.result()
    0.75
    """

    mode = "max"
    aliases = ("roc_auc",)

    from_logits: bool | None = None

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
            odds = np.exp(score.astype(np.float64) - score.max(axis=1, keepdims=True))
            score = odds / odds.sum(axis=1, keepdims=True)
        used = rows != 0  # the score of a single label of weight 0 may be NaN
        if used.any():  # an empty batch does not determine the class axis
            self._batches.append((positive[used], score[used], rows[used]))

    def result(self) -> float:
        if not self._batches:
            return math.nan
        positive, score, weight = (np.concatenate(arrays) for arrays in zip(*self._batches))
        if np.isnan(score).any():
            return math.nan
        areas = np.array([_area(p, s, weight) for p, s in zip(positive.T, score.T)])
        defined = areas[~np.isnan(areas)]
        return float(defined.mean()) if defined.size else math.nan

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        added = [batch for other in merged_copies(self, states) for batch in other._batches]
        self._batches = [*self._batches, *added]  # a new list, because a state may be the old list


def _area(positive: Array, score: Array, weight: Array) -> float:
    """Return the area of one column: each positive row counts the negative rows below it, and half
    of the negative rows with the same score.
    """
    levels, level = np.unique(score, return_inverse=True)
    up = np.bincount(level, weight * positive, minlength=len(levels))
    down = np.bincount(level, weight * ~positive, minlength=len(levels))
    pairs = up.sum() * down.sum()
    return float((up * (np.cumsum(down) - down / 2)).sum() / pairs) if pairs else math.nan
