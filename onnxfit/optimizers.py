r"""Optimizers: the next value of a weight and its slots, computed from the gradient.

In the formulas $w$ is a weight, $g$ its gradient, $\eta$ the learning rate, $t$ the number of the
update counted from 1; a slot before the update has the index $t-1$. Slots have the shape of their
weight and start at 0 unless stated otherwise. Settings have the names and defaults of torch.optim
(`betas`, `eps`, `alpha`, ...), except that the learning rate is called `learning_rate`, SGD's
default is 0.01, and `weight_decay` is always decoupled. For the same gradients, the weights equal
torch.optim's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Union

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.checks import (
    ChecksArguments,
    check_number,
    is_finite,
    is_number,
    name_list,
    set_field,
    shortened,
)
from onnxfit.errors import SettingError
from onnxfit.graph.spec import Dim
from onnxfit.graph.sums import sum_of_squares
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.registry import lookup, registry
from onnxfit.schedules import LearningRate

__all__ = [
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lamb",
    "Lion",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "get_optimizer",
]

Array = npt.NDArray[Any]
OptimizerLike = Union[str, float, "Optimizer"]


@dataclass(frozen=True)
class Optimizer(ChecksArguments, ABC):
    r"""Base class of every optimizer.

    - `learning_rate` $\eta \ge 0$: a number, a Schedule, or a callable that takes the number of
      the update, counted from 0, and returns the rate.
    - `weight_decay` $\lambda \ge 0$: decoupled (Loshchilov & Hutter 2019), $w \leftarrow w -
      \eta\lambda w$ before the update. For decay through the gradient, pass a `penalty` to the
      Trainer.
    - `exclude_from_weight_decay`: one or more patterns; weights whose name matches are not decayed.
    - `learning_rate_multipliers`: pattern -> factor $\ge 0$; the first pattern that matches a
      weight's name scales the weight's learning rate.
    - `ema_momentum` $m$ in (0, 1), or None: keep an average of each weight, $a \leftarrow m a +
      (1-m) w$ after the update, which starts at the weight itself. `Trainer.export(averaged=True)`
      writes the averages.

    Patterns are fnmatch patterns, and case matters. Raises SettingError for a number out of range.

    To write an optimizer, subclass with a frozen dataclass. `update` returns the next weight, then
    the next value of each slot; `slots` gives the slots of a weight before the first update. Set
    `elementwise = True` if each element of a weight and of its slots depends on no other element:
    small weights are then updated as one tensor. Set `applies_weight_decay = True` if `update`
    applies `weight_decay` itself.

    >>> @dataclass(frozen=True)
    ... class HeavyBall(Optimizer):
    ...     friction: float = 0.1
    ...
    ...     def slots(self, w):
    ...         return {"velocity": np.zeros_like(w)}
    ...
    ...     def update(self, op, w, g, lr, step, velocity):
    ...         velocity = (1 - self.friction) * velocity - lr * g
    ...         return w + velocity, velocity
    >>> [v.name for v in HeavyBall(0.05).build_onnx_function().graph.output]
    ['weight/next', 'weight/velocity/next']
    """

    # True: `update` applies `weight_decay` itself, because its formula needs the weight before the
    # decay.
    applies_weight_decay: ClassVar[bool] = False
    # True: each element of a weight and of its slots depends on no other element, so that several
    # weights can be updated as one concatenated tensor. A law in tests/test_optimizers.py checks
    # the flag of every optimizer.
    elementwise: ClassVar[bool] = False

    @property
    def is_plain_sgd(self) -> bool:
        """Whether the update is `w - lr * g`, so that the gradient of the loss times the learning
        rate is all it needs.
        """
        return False

    learning_rate: LearningRate = 0.01
    weight_decay: float = field(default=0.0, kw_only=True)
    exclude_from_weight_decay: Sequence[str] = field(default=(), kw_only=True)
    learning_rate_multipliers: Mapping[str, float] = field(
        default_factory=dict, kw_only=True, hash=False
    )
    ema_momentum: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.learning_rate):
            check_number(self, "learning_rate", at_least=0)
        check_number(self, "weight_decay", at_least=0)
        if self.ema_momentum is not None:
            check_number(self, "ema_momentum", above=0, below=1)
        owner = type(self).__name__
        excluded = name_list(f"{owner}'s exclude_from_weight_decay", self.exclude_from_weight_decay)
        set_field(self, "exclude_from_weight_decay", tuple(excluded))
        multipliers: Any = self.learning_rate_multipliers
        if not isinstance(multipliers, Mapping):
            raise SettingError(
                f"{owner} needs learning_rate_multipliers as a dict from pattern to number, got"
                f" {shortened(multipliers)}."
            )
        name_list(f"A key of {owner}'s learning_rate_multipliers", list(multipliers))
        set_field(self, "learning_rate_multipliers", dict(multipliers))
        for pattern, factor in self.learning_rate_multipliers.items():
            if not (is_number(factor) and is_finite(factor) and factor >= 0):
                raise SettingError(
                    f"{type(self).__name__} needs learning_rate_multipliers >= 0, got {factor!r}"
                    f" for {pattern!r}."
                )

    def slots(self, w: Array) -> dict[str, Array]:
        """Return the optimizer's slots for the weight `w`: a mapping from slot name to the value
        before the first update, of any shape and element type.
        """
        return {}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        """Return the scalars that `update` receives instead of `lr` and `step`.

        They are computed once per graph and shared by all weights. Override this method if much,
        such as a bias correction, depends only on the learning rate and the step. `op` builds the
        graph, `lr` and `step` are as in `update`; return at least two values.
        """
        return lr, step

    @abstractmethod
    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, *slots: Any, **_: Any
    ) -> Value | tuple[Value, ...]:
        """Return the next weight, or (next weight, next slots in the order of `slots`).

        - `op` builds the graph.
        - `w`, `g`: the weight and its gradient, of one shape and element type.
        - `lr`: a scalar of the weight's element type.
        - `step`: a float64 scalar, 1 for the first update. It is float64 so that `1 - beta**step`
          keeps its digits: cast numbers computed from it with `op.cast(..., w.dtype)`.
        - `slots`: the values before the update. An override names its slots as parameters; `_` is
          never passed and tells type checkers that this is allowed.

        An overridden `coefficients` replaces `lr` and `step`.
        """

    def build_onnx_function(
        self,
        shape: Sequence[Dim] = ("rows", "columns"),
        dtype: npt.DTypeLike = np.float32,
        *,
        name: str = "weight",
    ) -> onnx.ModelProto:
        """Build the update of one weight as a model that runs in any onnxruntime.

        - `shape`, `dtype`: shape and element type of the weight; a size may be a name.
        - `name`: the weight's name, for the patterns in the optimizer's settings.

        Inputs: `weight`, `gradient`, the scalars `learning_rate` (float32; float64 for a float64
        weight) and `step` (int64, the number of earlier updates), then `weight/<slot>` for each
        slot, whose first values `initial_slots` returns. Outputs: `weight/next`, then
        `weight/<slot>/next`.

        >>> graph = SGD(momentum=0.9).build_onnx_function().graph
        >>> [v.name for v in graph.input]
        ['weight', 'gradient', 'learning_rate', 'step', 'weight/velocity']
        >>> [v.name for v in graph.output]
        ['weight/next', 'weight/velocity/next']
        """
        # Imported late: an optimizer is a formula, and does not need the graph builders.
        from onnxfit.gradients import functions

        return functions.update_function(self, shape, dtype, name)


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

    `learning_rate`, `weight_decay`, `exclude_from_weight_decay`, `learning_rate_multipliers` and
    `ema_momentum` are as in `Optimizer`. Raises SettingError for settings that exclude each other.

    >>> SGD(0.1, momentum=0.9, nesterov=True).slots(np.ones(2))
    {'velocity': array([0., 0.])}
    """

    elementwise = True

    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    scaled_velocity: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "momentum", at_least=0)
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
        return not self.momentum

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
        if not self.momentum:
            return w - lr * g
        (velocity,) = slots
        if self.scaled_velocity:
            g = lr * g
        velocity = self.momentum * velocity + (undamped * g if self.dampening else g)
        move = g + self.momentum * velocity if self.nesterov else velocity
        return w - (move if self.scaled_velocity else lr * move), velocity


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
    `learning_rate_multipliers` and `ema_momentum` are as in `Optimizer`.

    >>> list(Adam(0.001, betas=(0.9, 0.99), amsgrad=True).slots(np.ones(2)))
    ['m', 'v', 'v_max']
    """

    elementwise = True

    learning_rate: LearningRate = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self)
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
        m = _average(m, g, self.betas[0])
        v = _average(v, g * g, self.betas[1])
        if not self.amsgrad:
            return w - size * m / (op.Sqrt(v) + eps), m, v
        v_max = op.Max(largest[0], v)
        return w - size * m / (op.Sqrt(v_max) + eps), m, v, v_max


@dataclass(frozen=True)
class AdamW(Adam):
    r"""Adam with decoupled weight decay (Loshchilov & Hutter 2019; `torch.optim.AdamW`).

    $$w \leftarrow w - \eta \lambda w, \quad\text{then the update of Adam}$$

    The same as `Adam(weight_decay=0.01)`. `learning_rate`, `betas`, `eps` and `amsgrad` are as
    in `Adam`; `weight_decay`, `exclude_from_weight_decay`, `learning_rate_multipliers` and
    `ema_momentum` as in `Optimizer`.

    >>> AdamW(0.001, exclude_from_weight_decay="*.bias").weight_decay
    0.01
    """

    weight_decay: float = field(default=0.01, kw_only=True)


@dataclass(frozen=True)
class Adamax(Optimizer):
    r"""Adam in the infinity norm (Kingma & Ba 2015, section 7.1; `torch.optim.Adamax`).

    $$m_t = \beta_1 m_{t-1} + (1-\beta_1) g, \quad u_t = \max(\beta_2 u_{t-1}, |g| + \epsilon),
    \quad w \leftarrow w - \frac{\eta}{1-\beta_1^t}\frac{m_t}{u_t}$$

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1).
    - `eps` $\epsilon > 0$.

    Slots `m` and `u`. `learning_rate`, `weight_decay`, `exclude_from_weight_decay`,
    `learning_rate_multipliers` and `ema_momentum` are as in `Optimizer`.

    >>> list(Adamax(0.002, betas=(0.9, 0.99), eps=1e-7).slots(np.ones(2)))
    ['m', 'u']
    """

    elementwise = True

    learning_rate: LearningRate = 0.002
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self)
        check_number(self, "eps", above=0)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"m": np.zeros_like(w), "u": np.zeros_like(w)}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        return lr / op.cast(1 - self.betas[0] ** step, lr.dtype), step

    def update(
        self, op: GraphBuilder, w: Value, g: Value, size: Value, step: Value, m: Value, u: Value
    ) -> tuple[Value, ...]:
        m = _average(m, g, self.betas[0])
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

    Slots `m`, `v` and `mu_product` $M$, a scalar that begins at 1. `learning_rate`,
    `weight_decay`, `exclude_from_weight_decay`, `learning_rate_multipliers` and `ema_momentum` are
    as in `Optimizer`.

    >>> NAdam(0.002, betas=(0.9, 0.99), eps=1e-7, momentum_decay=0.01).slots(np.ones(2))
    {'m': array([0., 0.]), 'v': array([0., 0.]), 'mu_product': array(1.)}
    """

    # Not elementwise: the slot `mu_product` is one number for all elements of a weight.

    learning_rate: LearningRate = 0.002
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum_decay: float = 0.004

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self)
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
        m = _average(m, g, self.betas[0])
        v = _average(v, g * g, self.betas[1])
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
    `learning_rate_multipliers` and `ema_momentum` are as in `Optimizer`.

    >>> list(RAdam(0.001, betas=(0.9, 0.99), eps=1e-7).slots(np.ones(2)))
    ['m', 'v']
    """

    elementwise = True

    learning_rate: LearningRate = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self)
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
        m = _average(m, g, self.betas[0])
        v = _average(v, g * g, self.betas[1])
        # One of the two sizes is 0.
        return w - (rectified / (op.Sqrt(v) + self.eps) + plain) * m, m, v


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
    `learning_rate_multipliers` and `ema_momentum` are as in `Optimizer`.

    >>> list(RMSprop(0.01, alpha=0.9, eps=1e-7, momentum=0.9, centered=True).slots(np.ones(2)))
    ['v', 'mean', 'velocity']
    """

    elementwise = True

    learning_rate: LearningRate = 0.01
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "alpha", at_least=0, below=1)
        check_number(self, "eps", above=0)
        check_number(self, "momentum", at_least=0)

    def slots(self, w: Array) -> dict[str, Array]:
        slots = ["v"]
        if self.centered:
            slots.append("mean")
        if self.momentum:
            slots.append("velocity")
        return {slot: np.zeros_like(w) for slot in slots}

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, *slots: Value
    ) -> tuple[Value, ...]:
        v, *others = slots
        v = variance = _average(v, g * g, self.alpha)
        next_slots = [v]
        if self.centered:
            mean = _average(others.pop(0), g, self.alpha)
            variance = op.Max(v - mean * mean, 0.0)  # rounding may make it negative
            next_slots.append(mean)
        direction = g / (op.Sqrt(variance) + self.eps)
        if self.momentum:
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
    `learning_rate_multipliers` and `ema_momentum` are as in `Optimizer`.

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
    `learning_rate_multipliers` and `ema_momentum` are as in `Optimizer`.

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
        v = _average(v, g * g, self.rho)
        delta = op.Sqrt((d + self.eps) / (v + self.eps)) * g
        d = _average(d, delta * delta, self.rho)
        return w - lr * delta, v, d


@dataclass(frozen=True)
class Lion(Optimizer):
    r"""Lion (Chen et al. 2023): every element moves by the learning rate.

    $$w \leftarrow w - \eta\,\mathrm{sign}(\beta_1 m_{t-1} + (1-\beta_1) g), \quad m_t = \beta_2
    m_{t-1} + (1-\beta_2) g$$

    - `betas` $(\beta_1, \beta_2)$, each in [0, 1).

    Slot `m`. A good `learning_rate` is a third to a tenth of Adam's; `weight_decay`,
    `exclude_from_weight_decay`, `learning_rate_multipliers` and `ema_momentum` are as in
    `Optimizer`.

    >>> list(Lion(1e-4, betas=(0.9, 0.99)).slots(np.ones(2)))
    ['m']
    """

    elementwise = True

    learning_rate: LearningRate = 0.0001
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self)

    def slots(self, w: Array) -> dict[str, Array]:
        return {"m": np.zeros_like(w)}

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, m: Value
    ) -> tuple[Value, ...]:
        return w - lr * op.Sign(_average(m, g, self.betas[0])), _average(m, g, self.betas[1])


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

    Slots `m` and `v`. `learning_rate`, `exclude_from_weight_decay`, `learning_rate_multipliers`
    and `ema_momentum` are as in `Optimizer`.

    >>> list(Lamb(0.001, betas=(0.9, 0.99), eps=1e-7, weight_decay=0.01).slots(np.ones(2)))
    ['m', 'v']
    """

    applies_weight_decay: ClassVar[bool] = True

    learning_rate: LearningRate = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self)
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
        m = _average(m, g, self.betas[0])
        v = _average(v, g * g, self.betas[1])
        u = correction * m / (op.Sqrt(v) + eps)
        if self.weight_decay:
            u = u + self.weight_decay * w
        length = _norm(op, w)
        norm = _norm(op, u)
        ratio = op.Where((length > 0) & (norm > 0), length / norm, op.constant(1, w.dtype))
        return w - lr * ratio * u, m, v


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
    `weight_decay`, `exclude_from_weight_decay`, `learning_rate_multipliers` and `ema_momentum` are
    as in `Optimizer`.

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
        size = size * op.Max(_rms(op, w), self.eps[1]) / op.Max(_rms(op, u) / self.d, 1.0)
        return (undecayed * w if self.weight_decay else w) - size * u, *slots


def get_optimizer(spec: OptimizerLike) -> Optimizer:
    """Return the optimizer that `spec` specifies.

    `spec` is a name (such as "adam"; case does not matter), an Optimizer, which is returned itself,
    or a number: SGD with that learning rate. Raises UnknownNameError (a SettingError), with the
    nearest name, for an unknown name, and SettingError for anything else.

    >>> get_optimizer("rmsprop").eps, get_optimizer(0.5).learning_rate
    (1e-08, 0.5)
    """
    if isinstance(spec, Optimizer):
        return spec
    if isinstance(spec, str):
        known = registry(__name__, Optimizer)  # type: ignore[type-abstract]
        return lookup("optimizer", spec, known)
    given: Any = spec
    if is_number(given):
        return SGD(float(given) if is_finite(given) else given)
    hint = ""
    if isinstance(given, type) and issubclass(given, Optimizer):
        hint = f" Pass an instance: {given.__name__}()."
    raise SettingError(
        f"optimizer must be a name, an Optimizer or a number, got {shortened(given)}.{hint}"
    )


def learning_rate_at(optimizer: Optimizer, step: int) -> float:
    """Return the optimizer's learning rate for update number `step`, counted from 0.

    Raises SettingError (a ValueError) unless the rate is a finite number >= 0.

    >>> learning_rate_at(SGD(lambda step: 0.5**step), 2)
    0.25
    """
    rate: Any = optimizer.learning_rate
    if callable(rate):
        rate = rate(step)
    if not (is_number(rate) and is_finite(rate) and rate >= 0):
        raise SettingError(
            f"learning_rate must be a finite number >= 0, but {optimizer.learning_rate!r} returned"
            f" {rate!r} for update {step}."
        )
    return float(rate)


def _check_betas(optimizer: Optimizer) -> None:
    check_number(optimizer, "betas", at_least=0, below=1, sequence=True)
    betas = getattr(optimizer, "betas")  # noqa: B009  # a field of the subclasses that call this
    if len(betas) != 2:
        raise SettingError(f"{type(optimizer).__name__} needs two betas, got {betas}.")


def _average(average: Value, new: Value, beta: float) -> Value:
    return beta * average + (1 - beta) * new


def _norm(op: GraphBuilder, x: Value) -> Value:
    return op.Sqrt(sum_of_squares(op, x))  # onnxruntime has no ReduceL2 for float64


def _rms(op: GraphBuilder, x: Value) -> Value:
    return op.Sqrt(op.ReduceMean(x * x, keepdims=0))
