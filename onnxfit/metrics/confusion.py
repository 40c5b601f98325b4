"""The confusion matrix, and measures of agreement that it gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfit.checks import require_choice
from onnxfit.metrics.alignment import (
    check_threshold,
    counted_rows,
    cut_at,
    decided,
    is_binary,
    per_element,
    summed_counts,
)
from onnxfit.metrics.base import Array, Metric, merged_copies

__all__ = ["CohenKappa", "ConfusionMatrix", "MatthewsCorrelation"]


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


@dataclass
class MatthewsCorrelation(ConfusionMatrix):
    r"""Matthews's correlation of labels and predicted classes, in [-1, 1], 0 for a guess
    (`sklearn.metrics.matthews_corrcoef`).

    With the weight $s$ of all rows, $c$ of the right ones, and of the rows in which class $k$ is
    true ($t_k$) and predicted ($p_k$), it is
    $(c s - \sum_k t_k p_k) / \sqrt{(s^2 - \sum_k p_k^2)(s^2 - \sum_k t_k^2)}$ (Gorodkin 2004); of
    two classes, $(TP \cdot TN - FP \cdot FN) / \sqrt{\dots}$ (Matthews 1975). 0/0 is 0. A row with
    NaN does not count. `threshold`, `from_logits`, `weighted` and `name` are as in
    `ConfusionMatrix`.

    >>> metric = MatthewsCorrelation()
    >>> metric.update(np.array([0, 0, 1, 1]), np.array([0.1, 0.2, 0.9, 0.3]))
    >>> round(metric.result(), 3)
    0.577
    """

    scalar = True
    aliases = ("matthews_corr_coef", "matthews_corrcoef", "mcc", "phi_coefficient")

    def result(self) -> Any:
        if not self._cells.size:
            return math.nan
        rows, columns, total = self._cells.sum(axis=1), self._cells.sum(axis=0), self._cells.sum()
        covariance = np.trace(self._cells) * total - rows @ columns
        spread = (total**2 - columns @ columns) * (total**2 - rows @ rows)
        return float(covariance / math.sqrt(spread)) if spread > 0 else 0.0


@dataclass
class CohenKappa(ConfusionMatrix):
    r"""Cohen's kappa, the agreement of labels and predicted classes beyond chance:
    $1 - \sum_{ij} v_{ij} C_{ij} / \sum_{ij} v_{ij} E_{ij}$, at most 1, 0 for a guess
    (`sklearn.metrics.cohen_kappa_score`; Cohen 1960, 1968).

    $C$ is the `ConfusionMatrix`, and $E_{ij}$ is the product of its sums of row $i$ and column $j$,
    divided by its sum. NaN if labels and predictions are all of one class. A row with NaN does not
    count.

    - `weights`: the cost $v_{ij}$ of class $j$ instead of $i$: None for 1 in all mistakes,
      "linear" for $|i - j|$, "quadratic" for $(i - j)^2$.
    - `threshold`, `from_logits`, `weighted`, `name`: as in `ConfusionMatrix`.

    SettingError: `weights` is none of these.

    >>> metric = CohenKappa()
    >>> metric.update(np.array([0, 0, 1, 1]), np.array([0.1, 0.2, 0.9, 0.3]))
    >>> metric.result()
    0.5
    """

    scalar = True
    aliases = ("cohen_kappa_score", "kappa")

    weights: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        require_choice("CohenKappa needs weights", self.weights, ("linear", "quadratic", None))
        super().__post_init__()

    def result(self) -> Any:
        cells = self._cells
        if not cells.any():
            return math.nan
        by_chance = np.outer(cells.sum(axis=1), cells.sum(axis=0)) / cells.sum()
        places = np.arange(len(cells))
        distance = np.abs(places[:, None] - places)
        cost = {None: distance > 0, "linear": distance, "quadratic": distance**2}[self.weights]
        expected = (cost * by_chance).sum()
        return float(1 - (cost * cells).sum() / expected) if expected else math.nan
