"""Metrics of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfit.errors import DataError
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.metrics.alignment import counted_rows, elementwise, per_element, ratio
from onnxfit.metrics.base import Array, Metric, merged_copies, without_warnings
from onnxfit.metrics.in_graph import difference
from onnxfit.metrics.means import MeanMetric

__all__ = [
    "CosineSimilarity",
    "LogCosh",
    "MaxError",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "RootMeanSquaredError",
    "RootMeanSquaredLogarithmicError",
    "SymmetricMeanAbsolutePercentageError",
]

LEAST_LABEL = 1e-7  # by which a percentage divides, as in the loss


@dataclass
class MeanSquaredError(MeanMetric):
    r"""Mean squared error $(y - \hat y)^2$ over rows and outputs, in the square of y's unit.

    Labels have the outputs' shape; axes of size 1 do not matter. `weighted` and `name` are as in
    `Metric`. DataError: labels and outputs have other shapes.

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
class MeanAbsolutePercentageError(MeanMetric):
    r"""Mean relative error $100\,|y - \hat y| / \max(|y|, 10^{-7})$, in percent
    (`keras.metrics.MeanAbsolutePercentageError`).

    scikit-learn and torchmetrics report a hundredth of it. A label of 0 makes the figure very
    large. Labels have the outputs' shape. `weighted` and `name` are as in `Metric`.

    >>> metric = MeanAbsolutePercentageError()
    >>> metric.update(np.array([1.0, 2.0]), np.array([1.5, 2.0]))
    >>> metric.result()
    25.0
    """

    aliases = ("mape",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        true, pred = elementwise(self, y_true, y_pred)
        return np.asarray(100 * np.abs(true - pred) / np.maximum(np.abs(true), LEAST_LABEL))


@dataclass
class SymmetricMeanAbsolutePercentageError(MeanMetric):
    r"""Mean of the error relative to the mean size of label and output,
    $100 \cdot 2 |y - \hat y| / (|y| + |\hat y|)$, in percent, from 0 to 200 (Makridakis 1993).

    torchmetrics reports a hundredth of it. 0/0 is 0. Labels have the outputs' shape. `weighted` and
    `name` are as in `Metric`.

    >>> metric = SymmetricMeanAbsolutePercentageError()
    >>> metric.update(np.array([1.0, 2.0]), np.array([3.0, 2.0]))
    >>> metric.result()
    50.0
    """

    aliases = ("smape",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        true, pred = elementwise(self, y_true, y_pred)
        return 200 * ratio(np.abs(true - pred), np.abs(true) + np.abs(pred))


@dataclass
class MeanSquaredLogarithmicError(MeanMetric):
    r"""Mean squared error of the logarithms, $(\log(1 + y) - \log(1 + \hat y))^2$, for labels
    $y \ge 0$ (`sklearn.metrics.mean_squared_log_error`).

    Outputs below 0 count as 0, as in Keras. Labels have the outputs' shape. `weighted` and `name`
    are as in `Metric`. DataError: a label is below 0.

    >>> metric = MeanSquaredLogarithmicError()
    >>> metric.update(np.array([0.0, np.e - 1]), np.array([0.0, 0.0]))
    >>> round(metric.result(), 3)
    0.5
    """

    aliases = ("msle", "mean_squared_log_error")

    def values(self, y_true: Array, y_pred: Array) -> Array:
        true, pred = elementwise(self, y_true, y_pred)
        if (true < 0).any():
            raise DataError(f"{type(self).__name__} needs labels >= 0, got {true[true < 0][0]:g}.")
        return np.asarray((np.log1p(true) - np.log1p(np.maximum(pred, 0))) ** 2)


@dataclass
class RootMeanSquaredLogarithmicError(MeanSquaredLogarithmicError):
    r"""Root of the mean squared error of the logarithms,
    $\sqrt{\mathrm{mean} (\log(1 + y) - \log(1 + \hat y))^2}$, over the whole data set
    (`sklearn.metrics.root_mean_squared_log_error`).

    Labels and outputs are as in `MeanSquaredLogarithmicError`.

    `weighted` and `name` are as in `Metric`. DataError: a label is below 0.

    >>> metric = RootMeanSquaredLogarithmicError()
    >>> metric.update(np.array([0.0, 0.0]), np.array([0.0, np.exp(2) - 1]))
    >>> round(metric.result(), 3)
    1.414
    """

    aliases = ("rmsle", "root_mean_squared_log_error")

    def result(self) -> float:
        return float(np.sqrt(super().result()))


@dataclass
class LogCosh(MeanMetric):
    r"""Mean logarithm of the hyperbolic cosine of the error, $\log\cosh(\hat y - y)$: half the
    square of small errors, and the size of large ones minus $\log 2$
    (`keras.metrics.LogCoshError`).

    Labels have the outputs' shape. `weighted` and `name` are as in `Metric`.

    >>> metric = LogCosh()
    >>> metric.update(np.array([0.0, 0.0]), np.array([0.0, 100.0]))
    >>> round(metric.result(), 3)
    49.653
    """

    aliases = ("log_cosh", "log_cosh_error")

    def values(self, y_true: Array, y_pred: Array) -> Array:
        distance = np.abs(np.subtract(*elementwise(self, y_true, y_pred)))
        return np.asarray(distance + np.log1p(np.exp(-2 * distance)) - math.log(2))


@dataclass
class MaxError(Metric):
    r"""Largest absolute error $\max |y - \hat y|$ over rows and outputs, in the unit of y
    (`sklearn.metrics.max_error`).

    Labels have the outputs' shape. `weighted` and `name` are as in `Metric`; rows of weight 0 do
    not count, and other weights make no difference.

    >>> metric = MaxError()
    >>> metric.update(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    >>> metric.result()
    2.0
    """

    def reset(self) -> None:
        self._largest = -math.inf

    @without_warnings
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        errors = np.abs(np.subtract(*elementwise(self, y_true, y_pred)))
        errors = errors[per_element(weights, errors.shape) != 0]
        self._largest = float(errors.max(initial=self._largest))  # NaN stays

    def result(self) -> float:
        return self._largest if self._largest != -math.inf else math.nan

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        for other in merged_copies(self, states):
            self._largest = float(np.maximum(self._largest, other._largest))
