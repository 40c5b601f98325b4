"""Optimizers with a momentum: SGD, Lion and Rprop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxfit.checks import (
    check_number,
)
from onnxfit.errors import SettingError
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.optimizers.base import (
    Array,
    Optimizer,
    Scheduled,
    average,
    check_betas,
    check_scheduled,
    is_used,
)
from onnxfit.schedules import LearningRate

__all__ = ["SGD", "Lion", "Rprop"]


@dataclass(frozen=True)
class SGD(Optimizer):
    r"""Gradient descent, with or without momentum (`torch.optim.SGD`).

    $$v_t = \mu v_{t-1} + (1-\tau) g, \quad w \leftarrow w - \eta v_t \quad\text{or, with
    nesterov,}\quad w \leftarrow w - \eta (g + \mu v_t)$$

    - `momentum` $\mu \ge 0$. With 0 there are no slots, else the slot `velocity` $v$.
    - `nesterov`: Nesterov's momentum; needs `momentum` and no `dampening`.
    - `dampening` $\tau$ in [0, 1]; 0 at the first update, $v_1 = g$.
    - `scaled_velocity`: store the velocity times the learning rate, as Keras and scikit-learn do.
      Each gradient is multiplied by the learning rate of its own update, $v_t = \mu v_{t-1} +
      \eta_t (1-\tau) g$ and $w \leftarrow w - v_t$ or $w \leftarrow w - (\eta_t g + \mu v_t)$.
      With a constant learning rate, the weights are the same.

    `learning_rate`, `weight_decay`, `exclude_from_weight_decay`, `learning_rate_multipliers`,
    `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`. SettingError: two settings
    exclude each other.

    >>> SGD(0.1, momentum=0.9, nesterov=True).slots(np.ones(2))
    {'velocity': array([0., 0.])}
    """

    elementwise = True

    momentum: Scheduled = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    scaled_velocity: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scheduled(self, "momentum")
        check_number(self, "dampening", at_least=0, at_most=1)
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise SettingError(
                f"SGD's nesterov needs momentum > 0 and dampening 0, got momentum {self.momentum}"
                f" and dampening {self.dampening}."
            )
        if self.dampening and not self.momentum:
            raise SettingError(
                f"SGD's dampening needs momentum > 0, got dampening {self.dampening} with"
                " momentum 0."
            )
        if self.scaled_velocity and not self.momentum:
            raise SettingError("SGD's scaled_velocity needs momentum > 0, got 0.")

    @property
    def is_plain_sgd(self) -> bool:
        return not is_used(self.momentum) and not self.cautious

    def slots(self, w: Array) -> dict[str, Array]:
        return {"velocity": np.zeros_like(w)} if self.momentum else {}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        if not self.dampening:
            return lr, step
        undamped = op.Where(
            step > 1, op.constant(1 - self.dampening, np.float64), op.constant(1, np.float64)
        )
        return lr, op.cast(undamped, lr.dtype)

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, undamped: Value, *slots: Value
    ) -> Value | tuple[Value, ...]:
        if not is_used(self.momentum):
            return w - lr * g
        (velocity,) = slots
        if self.scaled_velocity:
            g = lr * g
        velocity = self.momentum * velocity + (undamped * g if self.dampening else g)
        move = g + self.momentum * velocity if self.nesterov else velocity
        return w - (move if self.scaled_velocity else lr * move), velocity


@dataclass(frozen=True)
class Lion(Optimizer):
    r"""Lion (Chen et al. 2023): every element moves by the learning rate.

    $$w \leftarrow w - \eta\,\mathrm{sign}(\beta_1 m_{t-1} + (1-\beta_1) g), \quad m_t = \beta_2
    m_{t-1} + (1-\beta_2) g$$

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1).

    Slot `m`. A good `learning_rate` is a third to a tenth of Adam's; `weight_decay`,
    `exclude_from_weight_decay`, `learning_rate_multipliers`, `ema_momentum`, `cautious` and
    `constraints` are as in `Optimizer`.

    >>> list(Lion(1e-4, betas=(0.9, 0.99)).slots(np.ones(2)))
    ['m']
    """

    elementwise = True

    learning_rate: LearningRate = 0.0001
    betas: tuple[Scheduled, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"m": np.zeros_like(w)}

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, m: Value
    ) -> tuple[Value, ...]:
        return w - lr * op.Sign(average(m, g, self.betas[0])), average(m, g, self.betas[1])


@dataclass(frozen=True)
class Rprop(Optimizer):
    r"""Rprop (Riedmiller & Braun 1993; `torch.optim.Rprop`), for gradients of all rows: only the
    signs count.

    $$s_t = \mathrm{clip}(s_{t-1} \eta^\pm), \quad w \leftarrow w - \eta s_t\,\mathrm{sign}(g_t)$$

    where $\eta^\pm$ is the second of `etas` if $g_t g_{t-1} > 0$, the first if it is negative, and
    1 otherwise. If it is negative, the element does not move, and $g_t$ counts as 0 in the next
    update.

    - `etas`: the factors of the step, the first in (0, 1), the second > 1.
    - `step_sizes`: bounds of $s$, relative to the learning rate; torch's bounds divided by it.

    Slots `last`, the last gradient, and `size` $s$, which starts at 1. `learning_rate`,
    `weight_decay`, `exclude_from_weight_decay`, `learning_rate_multipliers`, `ema_momentum`,
    `cautious` and `constraints` are as in `Optimizer`.

    >>> Rprop(0.01).slots(np.ones(2))
    {'last': array([0., 0.]), 'size': array([1., 1.])}
    """

    elementwise = True

    learning_rate: LearningRate = 0.01
    etas: tuple[float, float] = (0.5, 1.2)
    step_sizes: tuple[float, float] = (1e-4, 5e3)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "etas", above=0, sequence=True)
        check_number(self, "step_sizes", above=0, sequence=True)
        if len(self.etas) != 2 or not self.etas[0] < 1 < self.etas[1]:
            raise SettingError(f"Rprop needs etas = (a number < 1, a number > 1), got {self.etas}.")
        if len(self.step_sizes) != 2 or self.step_sizes[0] > self.step_sizes[1]:
            raise SettingError(
                f"Rprop needs step_sizes = (smallest, largest), got {self.step_sizes}."
            )

    def slots(self, w: Array) -> dict[str, Array]:
        return {"last": np.zeros_like(w), "size": np.ones_like(w)}

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, last: Value, size: Value
    ) -> tuple[Value, ...]:
        # The signs, since the product of two small gradients may be 0.
        agreement = op.Sign(g) * op.Sign(last)
        less, more = (op.constant(eta, w.dtype) for eta in self.etas)
        zero, one = op.constant(0, w.dtype), op.constant(1, w.dtype)
        factor = op.Where(agreement > 0, more, op.Where(agreement < 0, less, one))
        size = op.Min(op.Max(size * factor, self.step_sizes[0]), self.step_sizes[1])
        g = op.Where(agreement < 0, zero, g)
        return w - lr * size * op.Sign(g), g, size
