"""Losses of numbers: regression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfit.checks import check_number
from onnxfit.errors import SettingError
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss
from onnxfit.losses.checks import check_length, require, set_numbers
from onnxfit.losses.outputs import per_row

__all__ = [
    "Elastic",
    "Huber",
    "LogCosh",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Quantile",
    "SmoothL1",
]


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    r"""Squared error $d^2$; the gradient is $-2 d$ before the reduction.

    Labels have the output's shape; the loss has the unit of $y^2$. `reduction` is as in `Loss`.

    >>> MeanSquaredError()
    MeanSquaredError(reduction='mean')
    """

    aliases = ("mse", "mse_loss", "l2", "l2_loss", "squared_error")
    elementwise = True

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = y_pred - y_true  # -d: the same square, and a gradient without a Neg
        return distance * distance


@dataclass(frozen=True)
class MeanAbsoluteError(Loss):
    r"""Absolute error $|d|$; the gradient is $-\mathrm{sign}(d)$, and 0 where $d = 0$.

    Labels have the output's shape; the loss has the unit of $y$. `reduction` is as in `Loss`.

    >>> MeanAbsoluteError()
    MeanAbsoluteError(reduction='mean')
    """

    aliases = ("mae", "mae_loss", "l1", "l1_loss", "absolute_error")
    elementwise = True

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return abs(y_pred - y_true)


@dataclass(frozen=True)
class Elastic(Loss):
    r"""Elastic error $l_1 |d| + l_2 d^2$; the gradient is $-l_1\,\mathrm{sign}(d) - 2 l_2 d$.

    Labels have the output's shape.

    - `l1_weight` $l_1 \ge 0$, `l2_weight` $l_2 \ge 0$.
    - `reduction` is as in `Loss`.

    >>> Elastic(l1_weight=0.1, l2_weight=0.9)
    Elastic(reduction='mean', l1_weight=0.1, l2_weight=0.9)
    """

    elementwise = True
    l1_weight: float = 0.5
    l2_weight: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "l1_weight", at_least=0)
        check_number(self, "l2_weight", at_least=0)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = y_true - y_pred
        return self.l1_weight * abs(distance) + self.l2_weight * (distance * distance)


@dataclass(frozen=True)
class Huber(Loss):
    r"""Huber loss: $\tfrac12 d^2$ where $|d| \le \delta$, else $\delta (|d| - \tfrac12 \delta)$
    (Huber 1964; `torch.nn.HuberLoss`).

    Labels have the output's shape.

    - `delta` $\delta > 0$, in the unit of $y$.
    - `reduction` is as in `Loss`.

    >>> Huber(delta=2.0)
    Huber(reduction='mean', delta=2.0)
    """

    aliases = ("huber_loss",)
    elementwise = True

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "delta", above=0)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = abs(y_pred - y_true)
        near = op.Min(distance, self.delta)
        return near * (distance - 0.5 * near)


@dataclass(frozen=True)
class SmoothL1(Loss):
    r"""Huber loss divided by its bound: $\tfrac{1}{2\beta} d^2$ where $|d| \le \beta$, else
    $|d| - \tfrac12 \beta$ (Girshick 2015, arXiv:1504.08083; `torch.nn.SmoothL1Loss`).

    Labels have the output's shape; the loss has the unit of $y$.

    - `beta` $\beta > 0$, in the unit of $y$.
    - `reduction` is as in `Loss`.

    >>> SmoothL1(beta=0.1)
    SmoothL1(reduction='mean', beta=0.1)
    """

    aliases = ("smooth_l1",)
    elementwise = True

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "beta", above=0)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = abs(y_pred - y_true)
        near = op.Min(distance, self.beta)
        return near * (distance - 0.5 * near) / self.beta


@dataclass(frozen=True)
class LogCosh(Loss):
    r"""Logarithm of the hyperbolic cosine, $\log\cosh d = |d| + \log(1 + e^{-2|d|}) - \log 2$; the
    gradient is $-\tanh d$ (`keras.losses.LogCosh`).

    Labels have the output's shape. `reduction` is as in `Loss`.

    >>> LogCosh()
    LogCosh(reduction='mean')
    """

    aliases = ("logcosh",)
    elementwise = True

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = abs(y_pred - y_true)
        return distance + op.Log(1 + op.Exp(-2 * distance)) - math.log(2)


@dataclass(frozen=True)
class MeanSquaredLogarithmicError(Loss):
    r"""Squared error of the logarithms, $(\log(1 + y) - \log(1 + \hat y))^2$, for labels $y \ge 0$.

    For outputs below 0 the logarithm continues as a straight line, $\log(1 + \hat y) := \hat y$, so
    a model that starts there has a gradient (Keras clips, which has no gradient). Labels have the
    output's shape. `reduction` is as in `Loss`.

    >>> MeanSquaredLogarithmicError()
    MeanSquaredLogarithmicError(reduction='mean')
    """

    aliases = ("msle",)
    label_range = (0.0, math.inf)
    elementwise = True

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = op.Log(1 + y_true) - (op.Log(1 + op.Max(y_pred, 0)) + op.Min(y_pred, 0))
        return distance * distance


@dataclass(frozen=True)
class MeanAbsolutePercentageError(Loss):
    r"""Relative error $100\,|d| / \max(|y|, 10^{-7})$, in percent
    (`keras.losses.MeanAbsolutePercentageError`).

    A label of 0 makes the loss very large. Labels have the output's shape. `reduction` is as in
    `Loss`.

    >>> MeanAbsolutePercentageError()
    MeanAbsolutePercentageError(reduction='mean')
    """

    aliases = ("mape",)
    elementwise = True

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return abs(y_pred - y_true) * (100 / op.Max(abs(y_true), 1e-7))


@dataclass(frozen=True)
class Quantile(Loss):
    r"""Pinball loss $\max(q d, (q - 1) d)$: smallest where the output is the quantile $q$ of the
    labels (Koenker and Bassett 1978).

    - `quantile` $q$ in (0, 1). With one number, labels have the output's shape. With a sequence of
      $k$ numbers, the output has $k$ quantiles in its last axis, which the labels and the loss
      lack: output `(batch, ..., k)`, labels `(batch, ...)`; the loss is the mean of the $k$.
    - `reduction` is as in `Loss`. The loss has the unit of $y$.

    SettingError: the output's last axis does not have $k$ entries.

    >>> Quantile(0.9)
    Quantile(reduction='mean', quantile=0.9)
    >>> import numpy as np
    >>> spec = TensorSpec("y", np.dtype("float32"), ("batch", 3))
    >>> Quantile([0.1, 0.5, 0.9]).target(spec).shape
    ('batch',)
    """

    aliases = ("quantile_loss", "pinball", "pinball_loss")

    quantile: float | tuple[float, ...] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "0 < quantile < 1"
        given: Any = self.quantile
        if isinstance(given, (list, tuple, np.ndarray)):
            set_numbers(self, "quantile", given, expected, lambda v: 0 < v < 1)
        else:
            require(self, expected, given, lambda v: 0 < v < 1)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        shape = y_pred.shape
        if shape is None or not isinstance(self.quantile, tuple):
            return super().target(y_pred)
        if len(shape) < 2:
            raise SettingError(
                f"Quantile with {len(self.quantile)} numbers needs an output with a batch axis and"
                f" an axis of quantiles, got {y_pred}."
            )
        check_length(self, "quantile", self.quantile, y_pred, len(shape) - 1)
        return TensorSpec("y_true", y_pred.dtype, shape[:-1])

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        if not isinstance(self.quantile, tuple):
            distance = y_true - y_pred
            return 0.5 * abs(distance) + (self.quantile - 0.5) * distance
        distance = op.Unsqueeze(y_true, [-1]) - y_pred
        slopes = op.constant([q - 0.5 for q in self.quantile], y_pred.dtype)
        return op.ReduceMean(0.5 * abs(distance) + slopes * distance, [-1], keepdims=0)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        return per_row(op, counts, y_pred.rank)
