"""Optimizers that scale the update of each weight by norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxfit.checks import (
    check_number,
)
from onnxfit.graph.sums import sum_of_squares
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.optimizers.base import (
    Array,
    Optimizer,
    Scheduled,
    average,
    check_betas,
    check_scheduled,
    is_used,
    norm,
)
from onnxfit.schedules import LearningRate

__all__ = ["Lamb", "Lars", "NovoGrad"]


@dataclass(frozen=True)
class Lamb(Optimizer):
    r"""LAMB (You et al. 2020), for large batches: Adam's direction, scaled to the norm of each
    weight.

    $$u = \frac{m_t/(1-\beta_1^t)}{\sqrt{v_t/(1-\beta_2^t)} + \epsilon} + \lambda w, \quad
    w \leftarrow w - \eta \frac{\|w\|}{\|u\|} u$$

    with $m_t$, $v_t$ of Adam. The quotient of the norms counts as 1 if either norm is 0.

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1).
    - `eps` $\epsilon > 0$.
    - `weight_decay` $\lambda \ge 0$ is inside the quotient, as in the paper.

    Slots `m` and `v`. `learning_rate`, `exclude_from_weight_decay`, `learning_rate_multipliers`,
    `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> list(Lamb(0.001, betas=(0.9, 0.99), eps=1e-7, weight_decay=0.01).slots(np.ones(2)))
    ['m', 'v']
    """

    applies_weight_decay: ClassVar[bool] = True

    learning_rate: LearningRate = 0.001
    betas: tuple[Scheduled, float] = (0.9, 0.999)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"m": np.zeros_like(w), "v": np.zeros_like(w)}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        root = op.Sqrt(1 - self.betas[1] ** step)
        return (
            lr,
            op.cast(root / (1 - self.betas[0] ** step), lr.dtype),
            op.cast(self.eps * root, lr.dtype),
        )

    def update(
        self,
        op: GraphBuilder,
        w: Value,
        g: Value,
        lr: Value,
        correction: Value,
        eps: Value,
        m: Value,
        v: Value,
    ) -> tuple[Value, ...]:
        m = average(m, g, self.betas[0])
        v = average(v, g * g, self.betas[1])
        u = correction * m / (op.Sqrt(v) + eps)
        if is_used(self.weight_decay):
            u = u + self.weight_decay * w
        length = norm(op, w)
        size = norm(op, u)
        ratio = op.Where((length > 0) & (size > 0), length / size, op.constant(1, w.dtype))
        return w - lr * ratio * u, m, v


@dataclass(frozen=True)
class Lars(Optimizer):
    r"""LARS (You et al. 2017), for large batches: momentum, with gradients scaled to the norm of
    each weight.

    $$r = \frac{\tau \|w\|}{\|g\| + \lambda \|w\| + \epsilon}, \quad v_t = \mu v_{t-1} + \eta\,r
    (g + \lambda w), \quad w \leftarrow w - v_t$$

    $r$ counts as 1 if the norm of the weight or of the gradient is 0. Biases and norms usually have
    another optimizer: `Groups({"bias_and_norm": SGD(0.1, 0.9)}, default=Lars(0.1))`.

    - `momentum` $\mu \ge 0$.
    - `trust_coefficient` $\tau > 0$.
    - `eps` $\epsilon > 0$.
    - `weight_decay` $\lambda \ge 0$ is inside the quotient, as in the paper.

    Slot `velocity` $v$. `learning_rate`, `exclude_from_weight_decay`, `learning_rate_multipliers`,
    `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> list(Lars(0.1, weight_decay=1e-4).slots(np.ones(2)))
    ['velocity']
    """

    applies_weight_decay: ClassVar[bool] = True

    learning_rate: LearningRate = 0.1
    momentum: Scheduled = 0.9
    trust_coefficient: float = 0.001
    eps: float = 1e-9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scheduled(self, "momentum")
        check_number(self, "trust_coefficient", above=0)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"velocity": np.zeros_like(w)}

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, velocity: Value
    ) -> tuple[Value, ...]:
        length, slope = norm(op, w), norm(op, g)
        direction, size = g, slope
        if is_used(self.weight_decay):
            direction, size = g + self.weight_decay * w, slope + self.weight_decay * length
        ratio = self.trust_coefficient * length / (size + self.eps)
        ratio = op.Where((length > 0) & (slope > 0), ratio, op.constant(1, w.dtype))
        velocity = self.momentum * velocity + lr * ratio * direction
        return w - velocity, velocity


@dataclass(frozen=True)
class NovoGrad(Optimizer):
    r"""NovoGrad (Ginsburg et al. 2019): gradients divided by the running norm of each weight's
    gradient.

    $$v_t = \beta_2 v_{t-1} + (1-\beta_2) \|g\|^2, \quad m_t = \beta_1 m_{t-1} +
    \frac{g}{\sqrt{v_t} + \epsilon} + \lambda w, \quad w \leftarrow w - \eta m_t$$

    with $v_1 = \|g\|^2$.

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1).
    - `eps` $\epsilon > 0$.
    - `weight_decay` $\lambda \ge 0$ is a part of the momentum, as in the paper.

    Slots `m` and `v`, a scalar. `learning_rate`, `exclude_from_weight_decay`,
    `learning_rate_multipliers`, `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> NovoGrad(0.01).slots(np.ones(2))
    {'m': array([0., 0.]), 'v': array(0.)}
    """

    applies_weight_decay: ClassVar[bool] = True

    learning_rate: LearningRate = 0.01
    betas: tuple[Scheduled, float] = (0.95, 0.98)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"m": np.zeros_like(w), "v": np.zeros((), w.dtype)}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        old_share = op.cast(step > 1, np.float64) * self.betas[1]
        return lr, op.cast(old_share, lr.dtype), op.cast(1 - old_share, lr.dtype)

    def update(
        self,
        op: GraphBuilder,
        w: Value,
        g: Value,
        lr: Value,
        old_share: Value,
        new_share: Value,
        m: Value,
        v: Value,
    ) -> tuple[Value, ...]:
        v = old_share * v + new_share * sum_of_squares(op, g)
        direction = g / (op.Sqrt(v) + self.eps)
        if is_used(self.weight_decay):
            direction = direction + self.weight_decay * w
        m = self.betas[0] * m + direction
        return w - lr * m, m, v
