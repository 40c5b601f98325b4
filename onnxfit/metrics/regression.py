"""Metrics of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.metrics.alignment import counted_rows, elementwise, per_element
from onnxfit.metrics.base import Array, Metric, merged_copies, without_warnings
from onnxfit.metrics.in_graph import difference
from onnxfit.metrics.means import MeanMetric

__all__ = [
    "R2",
    "CosineSimilarity",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "RootMeanSquaredError",
]


@dataclass
class MeanSquaredError(MeanMetric):
    r"""Mean squared error $(y - \hat y)^2$ over rows and outputs, in the square of y's unit.

    Labels have the outputs' shape; axes of size 1 do not matter. `weighted` and `name` are as in
    `Metric`. Raises DataError for other shapes.

    >>> metric = MeanSquaredError()
    >>> metric.update(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    >>> metric.result()
    2.0
    """

    aliases = ("mse",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        return np.square(np.subtract(*elementwise(self, y_true, y_pred)))

    def values_in_graph(
        self, op: GraphBuilder, y_true: Value, y_pred: Value
    ) -> tuple[Value, Value | None] | None:
        error = difference(op, y_true, y_pred)
        return None if error is None else (error * error, None)


@dataclass
class RootMeanSquaredError(MeanSquaredError):
    r"""Root of the mean squared error, $\sqrt{\mathrm{mean} (y - \hat y)^2}$, over the whole data
    set, in the unit of y.

    Labels have the outputs' shape. `weighted` and `name` are as in `Metric`.

    >>> metric = RootMeanSquaredError()
    >>> metric.update(np.array([1.0, 2.0]), np.array([4.0, 5.0]))
    >>> metric.result()
    3.0
    """

    aliases = ("rmse",)

    def result(self) -> float:
        return math.sqrt(super().result())


@dataclass
class MeanAbsoluteError(MeanMetric):
    r"""Mean absolute error $|y - \hat y|$ over rows and outputs, in the unit of y.

    Labels have the outputs' shape. `weighted` and `name` are as in `Metric`.

    >>> metric = MeanAbsoluteError()
    >>> metric.update(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    >>> metric.result()
    1.0
    """

    aliases = ("mae",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        return np.abs(np.subtract(*elementwise(self, y_true, y_pred)))

    def values_in_graph(
        self, op: GraphBuilder, y_true: Value, y_pred: Value
    ) -> tuple[Value, Value | None] | None:
        error = difference(op, y_true, y_pred)
        return None if error is None else (op.Abs(error), None)


@dataclass
class CosineSimilarity(MeanMetric):
    r"""Mean cosine $y \cdot \hat y / (\|y\| \|\hat y\|)$ along the last axis, in [-1, 1]; 0 where a
    vector is zero.

    Labels have the outputs' shape. `weighted` and `name` are as in `Metric`.

    >>> metric = CosineSimilarity()
    >>> metric.update(np.array([[3.0, 4.0]]), np.array([[4.0, 3.0]]))
    >>> metric.result()
    0.96
    """

    mode = "max"
    aliases = ("cosine",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        true, pred = elementwise(self, y_true, y_pred)
        if true.ndim == 1:
            true = true[:, None]
            pred = pred[:, None]
        norms = np.linalg.norm(true, axis=-1) * np.linalg.norm(pred, axis=-1)
        return np.asarray((true * pred).sum(axis=-1) / np.where(norms == 0, 1.0, norms))


@dataclass
class R2(Metric):
    r"""Coefficient of determination $1 - \sum w (y - \hat y)^2 / \sum w (y - \bar y)^2$, at most 1;
    the mean over outputs (`sklearn.metrics.r2_score`).

    Labels have the outputs' shape. If y is constant: 1 if every prediction is right, else 0, as in
    scikit-learn. With fewer than two rows: NaN. The spread about the mean is merged from the
    batches' spreads by the update of Chan, Golub and LeVeque (1979), which avoids cancellation.
    `weighted` and `name` are as in `Metric`.

    >>> metric = R2()
    >>> metric.update(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0]))
    >>> metric.result()
    0.5
    """

    mode = "max"
    aliases = ("r2_score",)

    def reset(self) -> None:
        self._rows = 0
        self._weight: Any = 0.0  # an array if outputs have separate weights
        # This number is subtracted from y, so that the variance of a constant y is exactly 0.
        self._first: Array | None = None
        self._mean = self._spread = self._residual = np.zeros(1)

    @without_warnings
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        true, pred = elementwise(self, y_true, y_pred)
        shape = pred.shape
        outputs = math.prod(shape[1:])
        true = true.reshape(len(true), outputs)
        pred = pred.reshape(len(pred), outputs)
        weight: Any
        if weights is None or weights.ndim == 1:
            w = per_element(weights, (len(true), 1))
            weight = float(w.sum())
        else:  # each output has its own weight
            w = per_element(weights, shape).reshape(true.shape)
            true = np.where(w == 0, 0.0, true)
            pred = np.where(w == 0, 0.0, pred)
            weight = w.sum(axis=0)
        if not np.any(weight):
            return
        # the first counted label of each output
        first = true[(w != 0).argmax(axis=0), np.arange(outputs)]
        y = true - first
        mean = (w * y).sum(axis=0) / np.where(weight == 0, 1.0, weight)
        spread = (w * (y - mean) ** 2).sum(axis=0)
        self._add(first, weight, mean, spread)
        self._residual = self._residual + (w * (true - pred) ** 2).sum(axis=0)
        self._rows += len(true)

    def _add(self, first: Array, weight: Any, mean: Array, spread: Array) -> None:
        """Add rows of this `weight`, with the `mean` of y counted from `first` and the `spread`
        about that mean.
        """
        if self._first is None:
            self._first = first
        total = self._weight + weight
        share = weight / np.where(total == 0, 1.0, total)
        step = (first - self._first) + (mean - self._mean)
        self._spread = self._spread + spread + step**2 * (self._weight * share)
        self._mean = self._mean + step * share
        self._weight = total

    def result(self) -> float:
        if self._rows < 2:
            return math.nan
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.where(
                self._spread == 0,
                np.where(self._residual == 0, 1.0, 0.0),
                1 - self._residual / self._spread,
            )
        return float(np.where(np.isnan(self._residual), np.nan, scores).mean())

    @without_warnings
    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        for other in merged_copies(self, states):
            if other._first is not None:
                self._add(other._first, other._weight, other._mean, other._spread)
                self._residual = self._residual + other._residual
                self._rows += other._rows
