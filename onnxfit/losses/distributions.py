"""Negative log-likelihoods of distributions whose parameters the model computes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxfit.errors import SettingError
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss
from onnxfit.losses.outputs import bounded_exp, per_row

__all__ = ["GaussianNLL", "Poisson"]

LEAST_RATE = 1e-7


@dataclass(frozen=True)
class Poisson(Loss):
    r"""Negative log-likelihood of counts $y \ge 0$, without the term that depends on $y$ alone.

    Labels have the output's shape.

    - `log_input=True`: the output is the logarithm of the rate, any number: $e^{\hat y} - y \hat
      y$ (`torch.nn.PoissonNLLLoss`). Above 40 the exponential continues as its tangent.
    - `log_input=False`: the output is the rate: $\hat y - y \log \hat y$ (`keras.losses.Poisson`).
      A rate below 1e-7 counts as 1e-7, and its logarithm continues as its tangent.
    - `reduction` is as in `Loss`.

    >>> Poisson(log_input=False)
    Poisson(reduction='mean', log_input=False)
    """

    aliases = ("poisson_nll", "poisson_nll_loss")
    label_range = (0.0, math.inf)
    elementwise = True

    log_input: bool = True

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        if self.log_input:
            return bounded_exp(op, y_pred) - y_true * y_pred
        rate = op.Max(y_pred, LEAST_RATE)
        return rate - y_true * (op.Log(rate) + (y_pred - rate) / rate)


@dataclass(frozen=True)
class GaussianNLL(Loss):
    r"""Negative log-likelihood of a normal distribution, without its constant:
    $\tfrac12 (\log v + (y - \mu)^2 / v)$ (Nix and Weigend 1994; `torch.nn.GaussianNLLLoss`).

    The output's last axis holds the means $\mu$, then as many values for the variances $v$: output
    `(batch, ..., 2k)`, labels and loss `(batch, ..., k)`. Raises SettingError for an output with an
    odd last axis.

    - `log_variance=True`: the values are $\log v$, any number; below -40, $1/v$ continues as its
      tangent.
    - `log_variance=False`: the values are $v$; a variance below 1e-6 counts as 1e-6.
    - `reduction` is as in `Loss`.

    >>> import numpy as np
    >>> GaussianNLL().target(TensorSpec("y", np.dtype("float32"), ("batch", 6))).shape
    ('batch', 3)
    """

    aliases = ("gaussian_nll", "gaussian_nll_loss")

    log_variance: bool = True

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if y_pred.shape is None:
            return TensorSpec("y_true", y_pred.dtype, None)
        last = y_pred.shape[-1] if len(y_pred.shape) > 1 else 1
        if isinstance(last, int) and last % 2:
            raise SettingError(
                "GaussianNLL needs an output whose last axis has an even size, means followed by"
                f" variances, got {y_pred}."
            )
        half = last // 2 if isinstance(last, int) else None
        return TensorSpec("y_true", y_pred.dtype, (*y_pred.shape[:-1], half))

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        mean, spread = op.Split(y_pred, _outputs=2, axis=-1, num_outputs=2)
        distance = y_true - mean
        if self.log_variance:
            return 0.5 * (spread + distance * distance * bounded_exp(op, -spread))
        variance = op.Max(spread, 1e-6)
        return 0.5 * (op.Log(variance) + distance * distance / variance)

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        """Return the mean of the squared differences of a mean and of its variance."""
        squares = super().distillation_loss(op, y_true, y_pred, y_teacher, temperature)
        of_mean, of_spread = op.Split(squares, _outputs=2, axis=-1, num_outputs=2)
        return 0.5 * (of_mean + of_spread)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        counted = per_row(op, counts, y_pred.rank)
        # Weights of single means also apply to their variances.
        return op.Concat(counted, counted, axis=-1) if counts.rank == y_pred.rank else counted
