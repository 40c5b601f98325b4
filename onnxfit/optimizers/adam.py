"""Adam and its relatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from onnxfit.checks import (
    check_number,
)
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.optimizers.base import Array, Optimizer, Scheduled, average, check_betas, is_used
from onnxfit.schedules import LearningRate

__all__ = [
    "AdaBelief",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "Adopt",
    "NAdam",
    "RAdam",
    "ScheduleFreeAdamW",
]


@dataclass(frozen=True)
class Adam(Optimizer):
    r"""Adam (Kingma & Ba 2015; `torch.optim.Adam`).

    $$m_t = \beta_1 m_{t-1} + (1-\beta_1) g, \quad v_t = \beta_2 v_{t-1} + (1-\beta_2) g^2, \quad
    w \leftarrow w - \eta \frac{m_t/(1-\beta_1^t)}{\sqrt{v_t/(1-\beta_2^t)} + \epsilon}$$

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1): the shares of the old averages.
    - `eps` $\epsilon > 0$.
    - `amsgrad`: divide by the largest $v$ so far, the slot `v_max`, instead of $v_t$ (Reddi et al.
      2018).

    Slots `m` and `v`. `learning_rate`, `weight_decay`, `exclude_from_weight_decay`,
    `learning_rate_multipliers`, `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> list(Adam(0.001, betas=(0.9, 0.99), amsgrad=True).slots(np.ones(2)))
    ['m', 'v', 'v_max']
    """

    elementwise = True

    learning_rate: LearningRate = 0.001
    betas: tuple[Scheduled, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        slots = ("m", "v", "v_max") if self.amsgrad else ("m", "v")
        return {slot: np.zeros_like(w) for slot in slots}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        # sqrt(v / c2) + eps = (sqrt(v) + eps * sqrt(c2)) / sqrt(c2): the corrections move from the
        # tensors to the scalars.
        root = op.Sqrt(1 - self.betas[1] ** step)
        size = lr * op.cast(root / (1 - self.betas[0] ** step), lr.dtype)
        return size, op.cast(self.eps * root, lr.dtype)

    def update(
        self, op: GraphBuilder, w: Value, g: Value, size: Value, eps: Value, *slots: Value
    ) -> tuple[Value, ...]:
        m, v, *largest = slots
        m = average(m, g, self.betas[0])
        v = average(v, g * g, self.betas[1])
        if not self.amsgrad:
            return w - size * m / (op.Sqrt(v) + eps), m, v
        v_max = op.Max(largest[0], v)
        return w - size * m / (op.Sqrt(v_max) + eps), m, v, v_max


@dataclass(frozen=True)
class AdamW(Adam):
    r"""Adam with decoupled weight decay (Loshchilov & Hutter 2019; `torch.optim.AdamW`).

    $$w \leftarrow w - \eta \lambda w, \quad\text{then the update of Adam}$$

    The same as `Adam(weight_decay=0.01)`. `learning_rate`, `betas`, `eps` and `amsgrad` are as in
    `Adam`; `weight_decay`, `exclude_from_weight_decay`, `learning_rate_multipliers`,
    `ema_momentum`, `cautious` and `constraints` as in `Optimizer`.

    >>> AdamW(0.001, exclude_from_weight_decay="*.bias").weight_decay
    0.01
    """

    weight_decay: Scheduled = field(default=0.01, kw_only=True)


@dataclass(frozen=True)
class Adamax(Optimizer):
    r"""Adam in the infinity norm (Kingma & Ba 2015, section 7.1; `torch.optim.Adamax`).

    $$m_t = \beta_1 m_{t-1} + (1-\beta_1) g, \quad u_t = \max(\beta_2 u_{t-1}, |g| + \epsilon),
    \quad w \leftarrow w - \frac{\eta}{1-\beta_1^t}\frac{m_t}{u_t}$$

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1).
    - `eps` $\epsilon > 0$.

    Slots `m` and `u`. `learning_rate`, `weight_decay`, `exclude_from_weight_decay`,
    `learning_rate_multipliers`, `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> list(Adamax(0.002, betas=(0.9, 0.99), eps=1e-7).slots(np.ones(2)))
    ['m', 'u']
    """

    elementwise = True

    learning_rate: LearningRate = 0.002
    betas: tuple[Scheduled, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"m": np.zeros_like(w), "u": np.zeros_like(w)}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        return lr / op.cast(1 - self.betas[0] ** step, lr.dtype), step

    def update(
        self, op: GraphBuilder, w: Value, g: Value, size: Value, step: Value, m: Value, u: Value
    ) -> tuple[Value, ...]:
        m = average(m, g, self.betas[0])
        u = op.Max(self.betas[1] * u, abs(g) + self.eps)
        return w - size * m / u, m, u


@dataclass(frozen=True)
class NAdam(Optimizer):
    r"""Adam with Nesterov's momentum (Dozat 2016; `torch.optim.NAdam`).

    With $m_t$, $v_t$ of Adam, $\mu_t = \beta_1 (1 - 0.96^{t\psi}/2)$ and $M_t = \mu_1 \cdots
    \mu_t$:

    $$w \leftarrow w - \eta \frac{\mu_{t+1} m_t/(1-M_t\mu_{t+1}) + (1-\mu_t)
    g/(1-M_t)}{\sqrt{v_t/(1-\beta_2^t)} + \epsilon}$$

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1).
    - `eps` $\epsilon > 0$.
    - `momentum_decay` $\psi \ge 0$.

    Slots `m`, `v` and `mu_product` $M$, a scalar that begins at 1. `learning_rate`, `weight_decay`,
    `exclude_from_weight_decay`, `learning_rate_multipliers`, `ema_momentum`, `cautious` and
    `constraints` are as in `Optimizer`.

    >>> NAdam(0.002, betas=(0.9, 0.99), eps=1e-7, momentum_decay=0.01).slots(np.ones(2))
    {'m': array([0., 0.]), 'v': array([0., 0.]), 'mu_product': array(1.)}
    """

    # Not elementwise: the slot `mu_product` is one number for all elements of a weight.

    learning_rate: LearningRate = 0.002
    betas: tuple[Scheduled, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum_decay: float = 0.004

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)
        check_number(self, "eps", above=0)
        check_number(self, "momentum_decay", at_least=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"m": np.zeros_like(w), "v": np.zeros_like(w), "mu_product": np.ones((), w.dtype)}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        root = op.Sqrt(1 - self.betas[1] ** step)
        mu, mu_next = (
            self.betas[0] * (1 - 0.5 * 0.96 ** (t * self.momentum_decay)) for t in (step, step + 1)
        )
        rate = lr * op.cast(root, lr.dtype)
        return (
            op.cast(mu, lr.dtype),
            op.cast(mu_next, lr.dtype),
            rate * op.cast(1 - mu, lr.dtype),
            rate * op.cast(mu_next, lr.dtype),
            op.cast(self.eps * root, lr.dtype),
        )

    def update(
        self,
        op: GraphBuilder,
        w: Value,
        g: Value,
        mu: Value,
        mu_next: Value,
        size_g: Value,
        size_m: Value,
        eps: Value,
        m: Value,
        v: Value,
        mu_product: Value,
    ) -> tuple[Value, ...]:
        m = average(m, g, self.betas[0])
        v = average(v, g * g, self.betas[1])
        mu_product = mu_product * mu
        direction = size_m / (1 - mu_product * mu_next) * m + size_g / (1 - mu_product) * g
        return w - direction / (op.Sqrt(v) + eps), m, v, mu_product


@dataclass(frozen=True)
class RAdam(Optimizer):
    r"""Adam with a rectified variance (Liu et al. 2020; `torch.optim.RAdam`).

    With $m_t$, $v_t$ of Adam, $\rho_\infty = 2/(1-\beta_2) - 1$ and $\rho_t = \rho_\infty - 2 t
    \beta_2^t/(1-\beta_2^t)$: while $\rho_t \le 5$

    $$w \leftarrow w - \eta \frac{m_t}{1-\beta_1^t}, \quad\text{then}\quad
    w \leftarrow w - \eta \frac{m_t}{1-\beta_1^t} \frac{\sqrt{1-\beta_2^t}}{\sqrt{v_t} + \epsilon}
    \sqrt{\frac{(\rho_t-4)(\rho_t-2)\rho_\infty}{(\rho_\infty-4)(\rho_\infty-2)\rho_t}}$$

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1).
    - `eps` $\epsilon > 0$.

    Slots `m` and `v`. `learning_rate`, `weight_decay`, `exclude_from_weight_decay`,
    `learning_rate_multipliers`, `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> list(RAdam(0.001, betas=(0.9, 0.99), eps=1e-7).slots(np.ones(2)))
    ['m', 'v']
    """

    elementwise = True

    learning_rate: LearningRate = 0.001
    betas: tuple[Scheduled, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"m": np.zeros_like(w), "v": np.zeros_like(w)}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        size = lr / op.cast(1 - self.betas[0] ** step, lr.dtype)
        limit = 2 / (1 - self.betas[1]) - 1
        if limit <= 5:  # the length of the average never exceeds its limit: no update is rectified
            return 0 * size, size
        power = self.betas[1] ** step
        length = limit - 2 * step * power / (1 - power)
        rectified = length > 5
        # While no update is rectified, the length may be negative. The bound 5 keeps the unused
        # root real.
        length = op.Max(length, 5.0)
        root = op.Sqrt(
            (1 - power)
            * (length - 4)
            * (length - 2)
            * (limit / ((limit - 4) * (limit - 2)))
            / length
        )
        return size * op.cast(
            op.Where(rectified, root, op.cast(0, np.float64)), lr.dtype
        ), size * op.cast(~rectified, lr.dtype)

    def update(
        self,
        op: GraphBuilder,
        w: Value,
        g: Value,
        rectified: Value,
        plain: Value,
        m: Value,
        v: Value,
    ) -> tuple[Value, ...]:
        m = average(m, g, self.betas[0])
        v = average(v, g * g, self.betas[1])
        # One of the two sizes is 0.
        return w - (rectified / (op.Sqrt(v) + self.eps) + plain) * m, m, v


@dataclass(frozen=True)
class AdaBelief(Optimizer):
    r"""AdaBelief (Zhuang et al. 2020): Adam whose second moment is that of the surprise $g - m$.

    $$m_t = \beta_1 m_{t-1} + (1-\beta_1) g, \quad s_t = \beta_2 s_{t-1} + (1-\beta_2) (g - m_t)^2
    + \epsilon, \quad w \leftarrow w - \eta \frac{m_t/(1-\beta_1^t)}{\sqrt{s_t/(1-\beta_2^t)} +
    \epsilon}$$

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1).
    - `eps` $\epsilon > 0$.

    Slots `m` and `s`. `learning_rate`, `weight_decay`, `exclude_from_weight_decay`,
    `learning_rate_multipliers`, `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> list(AdaBelief(0.001).slots(np.ones(2)))
    ['m', 's']
    """

    elementwise = True

    learning_rate: LearningRate = 0.001
    betas: tuple[Scheduled, float] = (0.9, 0.999)
    eps: float = 1e-16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"m": np.zeros_like(w), "s": np.zeros_like(w)}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        root = op.Sqrt(1 - self.betas[1] ** step)
        size = lr * op.cast(root / (1 - self.betas[0] ** step), lr.dtype)
        return size, op.cast(self.eps * root, lr.dtype)

    def update(
        self, op: GraphBuilder, w: Value, g: Value, size: Value, eps: Value, m: Value, s: Value
    ) -> tuple[Value, ...]:
        m = average(m, g, self.betas[0])
        surprise = g - m
        s = average(s, surprise * surprise, self.betas[1]) + self.eps
        return w - size * m / (op.Sqrt(s) + eps), m, s


@dataclass(frozen=True)
class Adan(Optimizer):
    r"""Adan (Xie et al. 2022): Nesterov's momentum from differences of gradients.

    With $d_t = g_t - g_{t-1}$, and $d_1 = 0$:

    $$m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t, \quad v_t = \beta_2 v_{t-1} + (1-\beta_2) d_t, \quad
    n_t = \beta_3 n_{t-1} + (1-\beta_3) (g_t + \beta_2 d_t)^2, \quad w \leftarrow w - \eta
    \frac{\hat m_t + \beta_2 \hat v_t}{\sqrt{\hat n_t} + \epsilon}$$

    where the hats divide by $1 - \beta_i^t$.

    - `betas` $(\beta_1, \beta_2, \beta_3)$, each in [0, 1): the shares of the old averages, as in
      the authors' code. The paper's numbers are one minus these.
    - `eps` $\epsilon > 0$.

    Slots `m`, `v`, `n` and `last`, minus the last gradient. `learning_rate`, `weight_decay`,
    `exclude_from_weight_decay`, `learning_rate_multipliers`, `ema_momentum`, `cautious` and
    `constraints` are as in `Optimizer`.

    >>> list(Adan(0.001).slots(np.ones(2)))
    ['m', 'v', 'n', 'last']
    """

    elementwise = True

    learning_rate: LearningRate = 0.001
    betas: tuple[Scheduled, float, float] = (0.98, 0.92, 0.99)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self, 3)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {slot: np.zeros_like(w) for slot in ("m", "v", "n", "last")}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        root = op.Sqrt(1 - self.betas[2] ** step)
        return (
            lr * op.cast(root / (1 - self.betas[0] ** step), lr.dtype),
            lr * op.cast(root * self.betas[1] / (1 - self.betas[1] ** step), lr.dtype),
            op.cast(self.eps * root, lr.dtype),
            op.cast(step > 1, lr.dtype),
        )

    def update(
        self,
        op: GraphBuilder,
        w: Value,
        g: Value,
        size_m: Value,
        size_v: Value,
        eps: Value,
        later: Value,
        m: Value,
        v: Value,
        n: Value,
        last: Value,
    ) -> tuple[Value, ...]:
        difference = later * (g + last)
        m = average(m, g, self.betas[0])
        v = average(v, difference, self.betas[1])
        ahead = g + self.betas[1] * difference
        n = average(n, ahead * ahead, self.betas[2])
        return w - (size_m * m + size_v * v) / (op.Sqrt(n) + eps), m, v, n, -g


@dataclass(frozen=True)
class Adopt(Optimizer):
    r"""ADOPT (Taniguchi et al. 2024): Adam that divides by the second moment before this update, so
    that it converges for every $\beta_2$.

    The first update only sets $v_1 = g^2$. Then, with $c_t = (t-1)^{1/4}$:

    $$m_t = \beta_1 m_{t-1} + (1-\beta_1)\,\mathrm{clip}\left(\frac{g}{\max(\sqrt{v_{t-1}},
    \epsilon)}, -c_t, c_t\right), \quad w \leftarrow w - \eta m_t, \quad v_t = \beta_2 v_{t-1} +
    (1-\beta_2) g^2$$

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1).
    - `eps` $\epsilon > 0$.

    Slots `m` and `v`. `learning_rate`, `weight_decay`, `exclude_from_weight_decay`,
    `learning_rate_multipliers`, `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> list(Adopt(0.001).slots(np.ones(2)))
    ['m', 'v']
    """

    elementwise = True

    learning_rate: LearningRate = 0.001
    betas: tuple[Scheduled, float] = (0.9, 0.9999)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"m": np.zeros_like(w), "v": np.zeros_like(w)}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        later = op.cast(step > 1, np.float64)
        # The first update replaces v, and its bound 0 leaves m and w as they are.
        old_share = later * self.betas[1]
        bound = op.Sqrt(op.Sqrt(step - 1))
        scalars = (bound, old_share, 1 - old_share)
        return lr, *(op.cast(scalar, lr.dtype) for scalar in scalars)

    def update(
        self,
        op: GraphBuilder,
        w: Value,
        g: Value,
        lr: Value,
        bound: Value,
        old_share: Value,
        new_share: Value,
        m: Value,
        v: Value,
    ) -> tuple[Value, ...]:
        direction = g / op.Max(op.Sqrt(v), self.eps)
        m = average(m, op.Max(op.Min(direction, bound), -bound), self.betas[0])
        return w - lr * m, m, old_share * v + new_share * (g * g)


@dataclass(frozen=True)
class ScheduleFreeAdamW(Optimizer):
    r"""Schedule-free AdamW (Defazio et al. 2024): an average in place of a decay of the learning
    rate.

    The gradient $g$ is taken at $y$, which is the weight while it trains. With $v_t$ of Adam,
    $c_t = \eta_t^2 / \sum_{i \le t} \eta_i^2$ and $y_t = (1-\beta_1) z_t + \beta_1 x_t$:

    $$z_t = z_{t-1} - \eta_t \left(\frac{g}{\sqrt{v_t/(1-\beta_2^t)} + \epsilon} + \lambda
    y_{t-1}\right), \quad x_t = (1 - c_t) x_{t-1} + c_t z_t$$

    The averages $x$ are the result. `export(averaged=True)` writes them, and the callback
    `SwapEMAWeights` validates with them; `evaluate` and `predict` use $y$, as after any update.
    Checkpoints have both. For warmup, pass `learning_rate=schedules.Warmup(0.0025, steps=1000)`.

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1).
    - `eps` $\epsilon > 0$.

    Slots `z`, `x` and `v`, where `z` and `x` start at the weight, and `rates`, the sum of squared
    rates. `learning_rate`, `weight_decay`, `exclude_from_weight_decay`,
    `learning_rate_multipliers`, `ema_momentum`, `cautious` and `constraints` are as in `Optimizer`.

    >>> list(ScheduleFreeAdamW(0.0025).slots(np.ones(2)))
    ['z', 'x', 'v', 'rates']
    """

    aliases: ClassVar[tuple[str, ...]] = ("schedule_free", "adamw_schedule_free")

    applies_weight_decay: ClassVar[bool] = True

    learning_rate: LearningRate = 0.0025
    betas: tuple[Scheduled, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)
        check_number(self, "eps", above=0)

    @property
    def average_slot(self) -> str | None:
        return "x"

    def slots(self, w: Array) -> dict[str, Array]:
        copies = {"z": np.array(w), "x": np.array(w)}
        return {**copies, "v": np.zeros_like(w), "rates": np.zeros((), w.dtype)}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        return lr, op.cast(1 / op.Sqrt(1 - self.betas[1] ** step), lr.dtype)

    def update(
        self,
        op: GraphBuilder,
        w: Value,
        g: Value,
        lr: Value,
        correction: Value,
        z: Value,
        x: Value,
        v: Value,
        rates: Value,
    ) -> tuple[Value, ...]:
        v = average(v, g * g, self.betas[1])
        direction = g / (correction * op.Sqrt(v) + self.eps)
        if is_used(self.weight_decay):
            direction = direction + self.weight_decay * w
        rates = rates + lr * lr
        zero = op.constant(0, w.dtype)
        c = op.Where(rates > 0, lr * lr / op.Max(rates, float(np.finfo(w.dtype).tiny)), zero)
        y = w + c * (z - w) - lr * (1 - self.betas[0] * (1 - c)) * direction
        z = z - lr * direction
        return y, z, x + c * (z - x), v, rates
