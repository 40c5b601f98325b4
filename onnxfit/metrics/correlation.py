"""Metrics of how labels and outputs vary together."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from onnxfit.metrics.alignment import counted_rows, elementwise, per_element
from onnxfit.metrics.base import Array, Metric, merged_copies, without_warnings

__all__ = [
    "R2",
    "ConcordanceCorrelation",
    "ExplainedVariance",
    "PearsonCorrelation",
    "SpearmanCorrelation",
]


class PairedColumns(NamedTuple):
    """Labels and outputs of a batch, and their weights: an array of rows and outputs each. Entries
    of weight 0 are 0.

    - `weights`: a column if outputs have no separate weights.
    """

    true: Array
    pred: Array
    weights: Array


def columns_of(
    metric: Metric, y_true: Array, y_pred: Array, sample_weight: Array | None
) -> PairedColumns:
    """Return the columns of a batch, without rows of weight 0."""
    y_true, y_pred, weights = counted_rows(metric, y_true, y_pred, sample_weight)
    true, pred = elementwise(metric, y_true, y_pred)
    shape = (len(pred), math.prod(pred.shape[1:]))
    if weights is None or weights.ndim == 1:
        return PairedColumns(
            true.reshape(shape), pred.reshape(shape), per_element(weights, (len(pred), 1))
        )
    w = per_element(weights, pred.shape).reshape(shape)
    true, pred = (np.where(w == 0, 0.0, array.reshape(shape)) for array in (true, pred))
    return PairedColumns(true, pred, w)


class Moments(NamedTuple):
    r"""Weighted moments of pairs $(a, b)$, each for every output.

    - `weight`: the sum of the weights; a number if all outputs have the same.
    - `mean`: the means of $a$ and $b$, shape `(2, outputs)`.
    - `spread`: the sums of $w (a - \bar a)^2$, of $w (b - \bar b)^2$ and of
      $w (a - \bar a)(b - \bar b)$, shape `(3, outputs)`.
    """

    weight: Any
    mean: Array
    spread: Array


@dataclass
class MomentMetric(Metric):
    """Base class of figures of the moments of labels and outputs.

    The moments about the means are merged from those of the batches by the update of Chan, Golub
    and LeVeque (1979), which avoids cancellation. `weighted` and `name` are as in `Metric`.
    """

    mode = "max"

    def reset(self) -> None:
        self._rows = 0
        self._weight: Any = 0.0  # an array if outputs have separate weights
        # These numbers are subtracted from the pairs, so that the variance of a constant is
        # exactly 0.
        self._first: Array | None = None
        self._mean = np.zeros((2, 1))
        self._spread = np.zeros((3, 1))

    def pair(self, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
        """Return the pair $(a, b)$ for labels `y_true` and outputs `y_pred`: by default these."""
        return y_true, y_pred

    @abstractmethod
    def score(self, moments: Moments) -> Array:
        """Return the figure of each output from its `moments`."""

    @without_warnings
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        true, pred, w = columns_of(self, y_true, y_pred, sample_weight)
        weight = float(w.sum()) if w.shape[1] != true.shape[1] else w.sum(axis=0)
        if not np.any(weight):
            return
        pairs = np.stack(self.pair(true, pred))
        # the first counted pair of each output
        first = pairs[:, (w != 0).argmax(axis=0), np.arange(true.shape[1])]
        pairs = pairs - first[:, None]
        mean = (w * pairs).sum(axis=1) / np.where(weight == 0, 1.0, weight)
        a, b = pairs - mean[:, None]
        spread = np.stack(
            [(w * a * a).sum(axis=0), (w * b * b).sum(axis=0), (w * a * b).sum(axis=0)]
        )
        self._add(first, weight, mean, spread)
        self._rows += len(true)

    def _add(self, first: Array, weight: Any, mean: Array, spread: Array) -> None:
        """Add rows of this `weight`, with the `mean` of the pairs counted from `first` and the
        `spread` about that mean.
        """
        if self._first is None:
            self._first = first
        total = self._weight + weight
        share = weight / np.where(total == 0, 1.0, total)
        step = (first - self._first) + (mean - self._mean)
        between = np.stack([step[0] ** 2, step[1] ** 2, step[0] * step[1]])
        self._spread = self._spread + spread + between * (self._weight * share)
        self._mean = self._mean + step * share
        self._weight = total

    def result(self) -> float:
        if self._rows < 2 or self._first is None:
            return math.nan
        moments = Moments(self._weight, self._first + self._mean, self._spread)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return float(self.score(moments).mean())

    @without_warnings
    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        for other in merged_copies(self, states):
            if other._first is not None:
                self._add(other._first, other._weight, other._mean, other._spread)
                self._rows += other._rows


def share_explained(unexplained: Array, spread: Array) -> Array:
    """Return 1 minus a ratio; for a constant y, 1 if every prediction is right, else 0."""
    of_constant = np.where(unexplained == 0, 1.0, 0.0)
    shares = np.where(spread == 0, of_constant, 1 - unexplained / spread)
    return np.where(np.isnan(unexplained), np.nan, shares)


@dataclass
class R2(MomentMetric):
    r"""Coefficient of determination $1 - \sum w (y - \hat y)^2 / \sum w (y - \bar y)^2$, at most 1;
    the mean over outputs (`sklearn.metrics.r2_score`).

    Labels have the outputs' shape. If y is constant: 1 if every prediction is right, else 0, as in
    scikit-learn. With fewer than two rows: NaN. `weighted` and `name` are as in `Metric`.

    >>> metric = R2()
    >>> metric.update(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0]))
    >>> metric.result()
    0.5
    """

    aliases = ("r2_score",)

    def pair(self, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
        return y_true, y_true - y_pred

    def score(self, moments: Moments) -> Array:
        residual = moments.spread[1] + moments.weight * moments.mean[1] ** 2
        return share_explained(residual, moments.spread[0])


@dataclass
class ExplainedVariance(MomentMetric):
    r"""Share of the variance of y that the outputs explain,
    $1 - \mathrm{Var}(y - \hat y) / \mathrm{Var}(y)$, at most 1; the mean over outputs
    (`sklearn.metrics.explained_variance_score`).

    Unlike `R2` it ignores a constant error. Labels have the outputs' shape. If y is constant: 1 if
    the error is, too, else 0. With fewer than two rows: NaN. `weighted` and `name` are as in
    `Metric`.

    >>> metric = ExplainedVariance()
    >>> metric.update(np.array([1.0, 2.0, 3.0]), np.array([2.0, 3.0, 4.0]))
    >>> metric.result()
    1.0
    """

    aliases = ("explained_variance_score",)

    def pair(self, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
        return y_true, y_true - y_pred

    def score(self, moments: Moments) -> Array:
        return share_explained(moments.spread[1], moments.spread[0])


@dataclass
class PearsonCorrelation(MomentMetric):
    r"""Pearson's correlation of labels and outputs over the rows,
    $\mathrm{Cov}(y, \hat y) / \sqrt{\mathrm{Var}(y) \mathrm{Var}(\hat y)}$, in [-1, 1]; the mean
    over outputs (`scipy.stats.pearsonr`).

    Labels have the outputs' shape. NaN if the labels or the outputs of a column are constant, or
    with fewer than two rows. `weighted` and `name` are as in `Metric`.

    >>> metric = PearsonCorrelation()
    >>> metric.update(np.array([1.0, 2.0, 3.0]), np.array([3.0, 5.0, 7.0]))
    >>> round(metric.result(), 3)
    1.0
    """

    aliases = ("pearson", "pearsonr", "pearson_corr_coef", "correlation")

    def score(self, moments: Moments) -> Array:
        true, pred, both = moments.spread
        return np.asarray(both / np.sqrt(true * pred))


@dataclass
class ConcordanceCorrelation(MomentMetric):
    r"""Lin's concordance of labels and outputs,
    $2 \mathrm{Cov}(y, p) / (\mathrm{Var}(y) + \mathrm{Var}(p) + (\bar y - \bar p)^2)$ for outputs
    $p$, in [-1, 1]: Pearson's correlation, reduced by errors of scale and place; the mean over
    outputs (Lin 1989).

    Variances divide by the number of rows. Labels have the outputs' shape. NaN if labels and
    outputs of a column are the same constant, or with fewer than two rows. `weighted` and `name`
    are as in `Metric`.

    >>> metric = ConcordanceCorrelation()
    >>> metric.update(np.array([1.0, 2.0, 3.0]), np.array([2.0, 3.0, 4.0]))
    >>> round(metric.result(), 3)
    0.571
    """

    aliases = ("concordance", "concordance_corr_coef", "ccc")

    def score(self, moments: Moments) -> Array:
        true, pred, both = moments.spread
        distance = moments.weight * (moments.mean[0] - moments.mean[1]) ** 2
        return np.asarray(2 * both / (true + pred + distance))


@dataclass
class SpearmanCorrelation(Metric):
    r"""Spearman's correlation, which is Pearson's of the ranks of labels and outputs, in [-1, 1];
    the mean over outputs (`scipy.stats.spearmanr`).

    Equal numbers share the mean of their ranks. Labels have the outputs' shape. NaN if the labels
    or the outputs of a column are constant, or with fewer than two rows. Stores all labels and
    outputs in memory. `weighted` and `name` are as in `Metric`; a row of weight $w$ counts like $w$
    equal rows.

    >>> metric = SpearmanCorrelation()
    >>> metric.update(np.array([1.0, 2.0, 3.0]), np.array([1.0, 10.0, 1000.0]))
    >>> round(metric.result(), 3)
    1.0
    """

    mode = "max"
    aliases = ("spearman", "spearmanr", "spearman_corr_coef")

    def reset(self) -> None:
        self._batches: list[tuple[Array, Array, Array]] = []  # labels, outputs, weights

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        columns = columns_of(self, y_true, y_pred, sample_weight)
        if len(columns.true):
            true, pred, w = map(np.array, columns)
            self._batches.append((true, pred, w))

    @without_warnings
    def result(self) -> float:
        if sum(len(true) for true, *_ in self._batches) < 2:
            return math.nan
        true, pred, w = (np.concatenate(arrays) for arrays in zip(*self._batches))
        w = np.broadcast_to(w, true.shape)
        found = [_rank_correlation(*columns) for columns in zip(true.T, pred.T, w.T)]
        return float(np.mean(found))

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        added = [batch for other in merged_copies(self, states) for batch in other._batches]
        self._batches = [*self._batches, *added]  # a new list, because a state may be the old list


def _rank_correlation(true: Array, pred: Array, weights: Array) -> float:
    """Return the correlation of the ranks of one column; NaN if a number is NaN."""
    if np.isnan(true).any() or np.isnan(pred).any():
        return math.nan
    a, b = (_mean_ranks(values, weights) for values in (true, pred))
    a, b = (ranks - np.average(ranks, weights=weights) for ranks in (a, b))
    spread = math.sqrt((weights * a * a).sum() * (weights * b * b).sum())
    return float((weights * a * b).sum() / spread) if spread else math.nan


def _mean_ranks(values: Array, weights: Array) -> Array:
    """Return the rank of each value, up to a constant: the weight below it and half of its own."""
    levels, level = np.unique(values, return_inverse=True)
    own = np.bincount(level, weights, minlength=len(levels))
    return np.asarray((np.cumsum(own) - own / 2)[level])
