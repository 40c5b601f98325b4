"""Optimizers that divide by the size of past gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from onnxfit.checks import (
    check_number,
    is_finite,
    is_number,
    set_field,
    shortened,
)
from onnxfit.errors import SettingError
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.optimizers.base import (
    Array,
    Optimizer,
    Scheduled,
    average,
    check_scheduled,
    is_used,
    rms,
)
from onnxfit.schedules import LearningRate

__all__ = ["Adadelta", "Adafactor", "Adagrad", "RMSprop"]


@dataclass(frozen=True)
class RMSprop(Optimizer):
    r"""RMSprop (Tieleman & Hinton 2012; `torch.optim.RMSprop`).

    $$v_t = \alpha v_{t-1} + (1-\alpha) g^2, \quad b_t = \mu b_{t-1} + g/(\sqrt{v_t} + \epsilon),
    \quad w \leftarrow w - \eta b_t$$

    - `alpha` $\alpha$ in [0, 1).
    - `eps` $\epsilon > 0$.
    - `momentum` $\mu \ge 0$; with 0 there is no slot `velocity` $b$.
    - `centered`: use $v_t - a_t^2$ instead of $v_t$ under the root, with $a_t = \alpha a_{t-1} +
      (1-\alpha) g$ (Graves 2013); the slot `mean` $a$.

    Slot `v`, and the two above. `learning_rate`, `weight_decay`, `exclude_from_weight_decay`,
    `learning_rate_multipliers`, `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> list(RMSprop(0.01, alpha=0.9, eps=1e-7, momentum=0.9, centered=True).slots(np.ones(2)))
    ['v', 'mean', 'velocity']
    """

    elementwise = True

    learning_rate: LearningRate = 0.01
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: Scheduled = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "alpha", at_least=0, below=1)
        check_number(self, "eps", above=0)
        check_scheduled(self, "momentum")

    def slots(self, w: Array) -> dict[str, Array]:
        slots = ["v"]
        if self.centered:
            slots.append("mean")
        if is_used(self.momentum):
            slots.append("velocity")
        return {slot: np.zeros_like(w) for slot in slots}

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, *slots: Value
    ) -> tuple[Value, ...]:
        v, *others = slots
        v = variance = average(v, g * g, self.alpha)
        next_slots = [v]
        if self.centered:
            mean = average(others.pop(0), g, self.alpha)
            variance = op.Max(v - mean * mean, 0.0)  # rounding may make it negative
            next_slots.append(mean)
        direction = g / (op.Sqrt(variance) + self.eps)
        if is_used(self.momentum):
            direction = self.momentum * others.pop(0) + direction
            next_slots.append(direction)
        return w - lr * direction, *next_slots


@dataclass(frozen=True)
class Adagrad(Optimizer):
    r"""Adagrad (Duchi et al. 2011; `torch.optim.Adagrad`).

    $$s_t = s_{t-1} + g^2, \quad w \leftarrow w - \frac{\eta}{1 + (t-1) d} \frac{g}{\sqrt{s_t} +
    \epsilon}$$

    - `lr_decay` $d \ge 0$.
    - `initial_accumulator_value` $s_0 \ge 0$.
    - `eps` $\epsilon > 0$.

    Slot `sum` $s$. `learning_rate`, `weight_decay`, `exclude_from_weight_decay`,
    `learning_rate_multipliers`, `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> Adagrad(0.01, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-8).slots(np.ones(2))
    {'sum': array([0.5, 0.5])}
    """

    elementwise = True

    learning_rate: LearningRate = 0.01
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "lr_decay", at_least=0)
        check_number(self, "initial_accumulator_value", at_least=0)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"sum": np.full_like(w, self.initial_accumulator_value)}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        return lr / op.cast(1 + (step - 1) * self.lr_decay, lr.dtype) if self.lr_decay else lr, step

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, total: Value
    ) -> tuple[Value, ...]:
        total = total + g * g
        return w - lr * g / (op.Sqrt(total) + self.eps), total


@dataclass(frozen=True)
class Adadelta(Optimizer):
    r"""Adadelta (Zeiler 2012; `torch.optim.Adadelta`).

    $$v_t = \rho v_{t-1} + (1-\rho) g^2, \quad \delta = \frac{\sqrt{d_{t-1} + \epsilon}}{\sqrt{v_t +
    \epsilon}} g, \quad d_t = \rho d_{t-1} + (1-\rho) \delta^2, \quad w \leftarrow w - \eta \delta$$

    - `rho` $\rho$ in [0, 1).
    - `eps` $\epsilon > 0$.

    Slots `v` and `d`. `learning_rate`, `weight_decay`, `exclude_from_weight_decay`,
    `learning_rate_multipliers`, `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> list(Adadelta(1.0, rho=0.95, eps=1e-6).slots(np.ones(2)))
    ['v', 'd']
    """

    elementwise = True

    learning_rate: LearningRate = 1.0
    rho: float = 0.9
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "rho", at_least=0, below=1)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"v": np.zeros_like(w), "d": np.zeros_like(w)}

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, v: Value, d: Value
    ) -> tuple[Value, ...]:
        v = average(v, g * g, self.rho)
        delta = op.Sqrt((d + self.eps) / (v + self.eps)) * g
        d = average(d, delta * delta, self.rho)
        return w - lr * delta, v, d


@dataclass(frozen=True)
class Adafactor(Optimizer):
    r"""Adafactor (Shazeer & Stern 2018; `torch.optim.Adafactor`): the second moment is stored as
    its means over rows and columns.

    With $\beta_t = 1 - t^{\gamma}$, $R_t = \beta_t R_{t-1} + (1-\beta_t)\,\mathrm{mean}(g^2)$ over
    the last axis, and $C_t$ likewise over the last but one:

    $$\hat v = \frac{R_t C_t}{\max(\mathrm{mean}(R_t), \epsilon_1)}, \quad u =
    \frac{g}{\max(\sqrt{\hat v}, \epsilon_1)}, \quad w \leftarrow w - \min(\eta, t^{-1/2})
    \max(\epsilon_2, \mathrm{rms}(w)) \frac{u}{\max(1, \mathrm{rms}(u)/d)}$$

    A weight with fewer than two axes keeps its whole second moment.

    - `beta2_decay` $\gamma \le 0$.
    - `eps` $(\epsilon_1, \epsilon_2)$: $\epsilon_1 > 0$, or None for the spacing of the weight's
      element type at 1; $\epsilon_2 \ge 0$.
    - `d` $\ge 1$: bound for the root mean square of an update.

    Slots `rows`, shape `(..., n, 1)`, and `columns`, shape `(..., 1, m)`; or `v`. `learning_rate`,
    `weight_decay`, `exclude_from_weight_decay`, `learning_rate_multipliers`, `ema_momentum`,
    `cautious` and `constraints` are as in `Optimizer`.

    >>> slots = Adafactor(0.01, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0).slots(np.ones((4, 3)))
    >>> {slot: array.shape for slot, array in slots.items()}
    {'rows': (4, 1), 'columns': (1, 3)}
    """

    applies_weight_decay: ClassVar[bool] = True  # rms(w) is that of the weight before the decay

    learning_rate: LearningRate = 0.01
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "beta2_decay", at_most=0)
        check_number(self, "d", at_least=1)
        eps: Any = self.eps
        pair = tuple(eps) if isinstance(eps, (list, tuple)) else ()
        numbers = [e for e in pair if is_number(e) and is_finite(e)]
        if (
            len(pair) != 2
            or len(numbers) != 2 - (pair[0] is None)
            or numbers[-1] < 0
            or (pair[0] is not None and pair[0] <= 0)
        ):
            raise SettingError(
                "Adafactor needs eps = (a number > 0 or None, a number >= 0), got"
                f" {shortened(eps)}."
            )
        set_field(self, "eps", tuple(eps))

    def slots(self, w: Array) -> dict[str, Array]:
        if w.ndim < 2:
            return {"v": np.zeros_like(w)}
        return {
            "rows": np.zeros_like(w, shape=(*w.shape[:-1], 1)),
            "columns": np.zeros_like(w, shape=(*w.shape[:-2], 1, w.shape[-1])),
        }

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        new_share = step**self.beta2_decay
        size = op.Min(lr, op.cast(step**-0.5, lr.dtype))
        return (
            size,
            op.cast(new_share, lr.dtype),
            op.cast(1 - new_share, lr.dtype),
            1 - lr * self.weight_decay,
        )

    def update(
        self,
        op: GraphBuilder,
        w: Value,
        g: Value,
        size: Value,
        new_share: Value,
        old_share: Value,
        undecayed: Value,
        *slots: Value,
    ) -> tuple[Value, ...]:
        eps1 = float(np.finfo(w.dtype).eps) if self.eps[0] is None else self.eps[0]
        square = g * g
        if len(slots) == 2:
            rows = old_share * slots[0] + new_share * op.ReduceMean(square, [-1])
            columns = old_share * slots[1] + new_share * op.ReduceMean(square, [-2])
            slots = rows, columns
            v = rows / op.Max(op.ReduceMean(rows, [-2]), eps1) * columns
        else:
            v = old_share * slots[0] + new_share * square
            slots = (v,)
        u = g / op.Max(op.Sqrt(v), eps1)
        size = size * op.Max(rms(op, w), self.eps[1]) / op.Max(rms(op, u) / self.d, 1.0)
        return (undecayed * w if is_used(self.weight_decay) else w) - size * u, *slots
