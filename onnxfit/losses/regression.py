"""Losses of numbers: regression."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxfit.checks import check_number
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss
from onnxfit.losses.checks import require

__all__ = [
    "Elastic",
    "Huber",
    "LogCosh",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Quantile",
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

    aliases = ("huber_loss", "smooth_l1")
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

    Labels have the output's shape; the loss has the unit of $y$.

    - `quantile` $q$ in (0, 1).
    - `reduction` is as in `Loss`.

    >>> Quantile(0.9)
    Quantile(reduction='mean', quantile=0.9)
    """

    aliases = ("quantile_loss", "pinball", "pinball_loss")
    elementwise = True

    quantile: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "0 < quantile < 1", self.quantile, lambda v: 0 < v < 1)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = y_true - y_pred
        return 0.5 * abs(distance) + (self.quantile - 0.5) * distance
