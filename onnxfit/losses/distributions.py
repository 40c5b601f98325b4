"""Negative log-likelihoods of distributions whose parameters the model computes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxfit.checks import check_number
from onnxfit.errors import SettingError
from onnxfit.graph.logarithms import log_softmax
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss
from onnxfit.losses.outputs import (
    bounded_exp,
    log_sum_exp,
    per_row,
)

__all__ = ["GaussianNLL", "MixtureNLL", "Poisson"]

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
    `(batch, ..., 2k)`, labels and loss `(batch, ..., k)`. SettingError: the output's last axis has
    an odd size.

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


@dataclass(frozen=True)
class MixtureNLL(Loss):
    r"""Negative log-likelihood of a mixture of $k$ normal distributions, a mixture density network:
    $-\log \sum_i \pi_i \prod_j \mathcal N(y_j; \mu_{ij}, \sigma_{ij}^2)$ (Bishop 1994).

    The output's last axis holds $k$ logits, whose softmax is $\pi$, then $k d$ means and $k d$
    logarithms of $\sigma$, each component by component: output `(batch, ..., k (1 + 2 d))`, labels
    `(batch, ..., d)`, loss `(batch, ...)`. Below $\log \sigma = -20$, $1/\sigma^2$ continues as its
    tangent.

    - `components` $k \ge 1$.
    - `reduction` is as in `Loss`.

    SettingError: the output's last axis has another size, or an unknown one.

    >>> import numpy as np
    >>> spec = TensorSpec("y", np.dtype("float32"), ("batch", 15))
    >>> MixtureNLL(components=3).target(spec).shape
    ('batch', 2)
    """

    named = False

    components: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "components", at_least=1, whole=True)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        shape, k = y_pred.shape or (), self.components
        size = shape[-1] if len(shape) > 1 else None
        numbers, rest = divmod(size - k, 2 * k) if isinstance(size, int) else (0, 0)
        if numbers < 1 or rest:
            raise SettingError(
                f"MixtureNLL({k}) needs an output whose last axis has {3 * k} entries for labels of"
                f" one number, and {2 * k} more for each further number of a label, got {y_pred}."
            )
        return TensorSpec("y_true", y_pred.dtype, (*shape[:-1], numbers))

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        k = self.components
        spec = self.target(TensorSpec(y_pred.name, y_pred.dtype, y_pred.shape))
        size = (spec.shape or ())[-1]
        assert isinstance(size, int)
        logits, means, logs = op.Split(y_pred, [k, k * size, k * size], _outputs=3, axis=-1)
        by_component = [0] * (y_pred.rank - 1) + [k, size]
        means, logs = (op.Reshape(x, by_component) for x in (means, logs))
        distance = op.Unsqueeze(y_true, [-2]) - means
        squares = distance * distance * bounded_exp(op, -2 * logs)
        log_p = -op.ReduceSum(squares / 2 + logs, [-1], keepdims=0)
        log_p = log_p - size / 2 * math.log(2 * math.pi)
        total = log_sum_exp(op, log_p + log_softmax(op, logits, y_pred.rank - 1), y_pred.rank - 1)
        return -op.Squeeze(total, [-1])

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        """Return the mean of the squared differences of the parameters."""
        squares = super().distillation_loss(op, y_true, y_pred, y_teacher, temperature)
        return op.ReduceMean(squares, [-1], keepdims=0)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        return per_row(op, counts, y_pred.rank)
