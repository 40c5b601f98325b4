r"""Optimizers: from a weight, its gradient and its slots to the next weight and slots, as operators
of the step graph.

In the formulas $w$ is a weight, $g$ its gradient, $\eta$ the learning rate, $t$ the number of the
update counted from 1; a slot before the update has the index $t-1$. Slots have the shape of their
weight and begin at 0 unless said otherwise. Settings have the names and defaults of torch.optim
(`betas`, `eps`, `alpha`, ...), but the learning rate is `learning_rate`, SGD's is 0.01, and
`weight_decay` is decoupled everywhere. Weights, given the same gradients, follow torch.optim's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Union

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.errors import SettingError
from onnxfit.gradients import functions
from onnxfit.graph import names, scopes
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.registry import lookup, registry
from onnxfit.schedules import LearningRate, check_number

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
]

Array = npt.NDArray[Any]
OptimizerLike = Union[str, float, "Optimizer"]

AVERAGE = "ema"  # the slot of `ema_momentum`
MAX_ELEMENTS_TO_FUSE = (
    2**17
)  # elements, whose copies into a tensor of several weights take less time than a dozen operators of their own
# elements of such a tensor at most: all operators of a larger one leave the processor's cache
MAX_FUSED_ELEMENTS = 2**19


@dataclass(frozen=True)
class Optimizer(ABC):
    r"""The base of every optimizer.

    - `learning_rate` $\eta \ge 0$: a number, a Schedule, or a callable of the update's number
      counted from 0.
    - `weight_decay` $\lambda \ge 0$: decoupled (Loshchilov & Hutter 2019), $w \leftarrow w -
      \eta\lambda w$ before the update; weights whose name matches a pattern of
      `exclude_from_weight_decay` are spared. For the coupled kind use `penalty=`.
    - `learning_rate_multipliers`: pattern -> factor >= 0; the first pattern that matches a weight's
      name scales its learning rate.
    - `ema_momentum` $m$ in (0, 1): keeps an average of each weight, $a \leftarrow m a + (1-m) w$
      after the update, begun at the weight itself, which `Trainer.export(averaged=True)` writes.

    Patterns are fnmatch's; case matters. An optimizer of your own is a frozen dataclass with
    `update`, and `slots` if it remembers:

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
    """

    # True: `update` applies `weight_decay` itself, because its formula needs the weight before the
    # decay
    applies_weight_decay: ClassVar[bool] = False
    # True: every element of a weight goes its own way, so that many small weights can be updated as
    # one
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
        spared = self.exclude_from_weight_decay
        object.__setattr__(
            self,
            "exclude_from_weight_decay",
            (spared,) if isinstance(spared, str) else tuple(spared),
        )
        object.__setattr__(self, "learning_rate_multipliers", dict(self.learning_rate_multipliers))
        for pattern, factor in self.learning_rate_multipliers.items():
            if not (isinstance(factor, (int, float, np.number)) and 0 <= factor < np.inf):
                raise SettingError(
                    f"{type(self).__name__} needs learning_rate_multipliers >= 0, got {factor!r}"
                    f" for {pattern!r}."
                )

    def slots(self, w: Array) -> dict[str, Array]:
        """What this optimizer remembers for a weight: slot name -> value before the first update,
        of any shape and element type.
        """
        return {}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        """What `update` receives in the place of `lr` and `step`: scalars that all weights share,
        computed once per graph.

        Override it where much, such as a correction for bias, depends on the learning rate and the
        step alone; at least two values.
        """
        return lr, step

    @abstractmethod
    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, *slots: Any, **_: Any
    ) -> Value | tuple[Value, ...]:
        """The next weight, or (next weight, next slots in the order of `slots`).

        `lr` is a scalar of the weight's element type; `step` a float64 scalar, 1 for the first
        update (float64, so that `1 - beta**step` keeps its digits: cast what you make of it with
        `op.cast(..., w.dtype)`). `coefficients`, where overridden, takes the place of both. Name
        your slots as parameters; `**_` is never passed, it tells type checkers that you may.
        """

    def build_onnx_function(
        self,
        shape: Sequence[Dim] = ("rows", "columns"),
        dtype: npt.DTypeLike = np.float32,
        *,
        name: str = "weight",
    ) -> onnx.ModelProto:
        """The update of one weight as a model of its own, for a weight of this shape and type.

        Inputs: `weight`, `gradient`, the scalars `learning_rate` (float32; float64 for a float64
        weight) and `step` (int64, the updates done before), then `weight/<slot>` for each slot,
        whose first values `initial_slots` gives. Outputs: `weight/next`, then `weight/<slot>/next`.
        `name` is what the patterns of the settings know the weight as. It runs in any onnxruntime.

        >>> graph = SGD(momentum=0.9).build_onnx_function().graph
        >>> [v.name for v in graph.input], [v.name for v in graph.output]
        (['weight', 'gradient', 'learning_rate', 'step', 'weight/velocity'], ['weight/next', 'weight/velocity/next'])
        """
        op = functions.new_function(self)
        wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
        w, g = op.input("weight", dtype, shape), op.input("gradient", dtype, shape)
        lr, done = op.input("learning_rate", wide, ()), op.input("step", np.int64, ())
        slots = {
            s.name: op.input(names.slot("weight", s.name), s.dtype, s.shape or ())
            for s in _slot_specs(self, name, shape, w.dtype)
        }
        with op.scope(scopes.OPTIMIZER):
            step = op.cast(done, np.float64) + 1
        updated, rest = apply_update(op, self, {name: w}, {name: g}, {name: slots}, lr, step)
        op.output(names.updated("weight"), updated[name])
        for slot, value in rest[name].items():
            op.output(names.updated(names.slot("weight", slot)), value)
        return functions.finished(op)


@dataclass(frozen=True)
class SGD(Optimizer):
    r"""Gradient descent, with momentum if asked for.

    $$v_t = \mu v_{t-1} + (1-\tau) g, \quad w \leftarrow w - \eta v_t \quad\text{or, with
    nesterov,}\quad w \leftarrow w - \eta (g + \mu v_t)$$

    `momentum` $\mu \ge 0$; `dampening` $\tau$ in [0, 1], 0 at the first update: $v_1 = g$.
    `nesterov` needs momentum and no dampening. Without momentum nothing is remembered.

    `scaled_velocity=True` keeps the velocity as a distance, as Keras and scikit-learn do: each
    gradient counts with the learning rate of its own update, $v_t = \mu v_{t-1} + \eta_t (1-\tau)
    g$ and $w \leftarrow w - v_t$ or $w \leftarrow w - (\eta_t g + \mu v_t)$. While the learning
    rate stays the same, so do the weights.
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
                f"SGD's nesterov needs momentum > 0 and dampening 0, got {self.momentum} and"
                f" {self.dampening}."
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
        return lr, op.cast(
            op.Where(
                step > 1, op.constant(1 - self.dampening, np.float64), op.constant(1, np.float64)
            ),
            lr.dtype,
        )

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, unique_name: Value, *slots: Value
    ) -> Value | tuple[Value, ...]:
        if not self.momentum:
            return w - lr * g
        (velocity,) = slots
        if self.scaled_velocity:
            g = lr * g
        velocity = self.momentum * velocity + (unique_name * g if self.dampening else g)
        move = g + self.momentum * velocity if self.nesterov else velocity
        return w - (move if self.scaled_velocity else lr * move), velocity


@dataclass(frozen=True)
class Adam(Optimizer):
    r"""Adam (Kingma & Ba 2015).

    $$m_t = \beta_1 m_{t-1} + (1-\beta_1) g, \quad v_t = \beta_2 v_{t-1} + (1-\beta_2) g^2, \quad
    w \leftarrow w - \eta \frac{m_t/(1-\beta_1^t)}{\sqrt{v_t/(1-\beta_2^t)} + \epsilon}$$

    `betas` in [0, 1); `eps` > 0. `amsgrad=True` (Reddi et al. 2018) divides by the largest $v$ so
    far instead of $v_t$.
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
        return {slot: np.zeros_like(w) for slot in ("m", "v", *(["v_max"] if self.amsgrad else []))}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        # sqrt(v / c2) + eps = (sqrt(v) + eps * sqrt(c2)) / sqrt(c2): the corrections leave the
        # tensors to the scalars
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
    """Adam with the weight decay it was published with (Loshchilov & Hutter 2019):

    `weight_decay` is 0.01 unless given.
    """

    weight_decay: float = field(default=0.01, kw_only=True)


@dataclass(frozen=True)
class Adamax(Optimizer):
    r"""Adam in the infinity norm (Kingma & Ba 2015, section 7.1).

    $$m_t = \beta_1 m_{t-1} + (1-\beta_1) g, \quad u_t = \max(\beta_2 u_{t-1}, |g| + \epsilon),
    \quad w \leftarrow w - \frac{\eta}{1-\beta_1^t}\frac{m_t}{u_t}$$

    `betas` in [0, 1); `eps` > 0.
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
    r"""Adam with Nesterov's momentum (Dozat 2016).

    With $m_t$, $v_t$ of Adam, $\mu_t = \beta_1 (1 - 0.96^{t\psi}/2)$ and $M_t = \mu_1 \cdots
    \mu_t$:

    $$w \leftarrow w - \eta \frac{\mu_{t+1} m_t/(1-M_t\mu_{t+1}) + (1-\mu_t)
    g/(1-M_t)}{\sqrt{v_t/(1-\beta_2^t)} + \epsilon}$$

    `betas` in [0, 1); `eps` > 0; `momentum_decay` $\psi \ge 0$. The slot `mu_product` $M$ is a
    scalar, 1 at the beginning.
    """

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
    r"""Adam with a rectified variance (Liu et al. 2020).

    With $m_t$, $v_t$ of Adam, $\rho_\infty = 2/(1-\beta_2) - 1$ and $\rho_t = \rho_\infty - 2 t
    \beta_2^t/(1-\beta_2^t)$: while $\rho_t \le 5$

    $$w \leftarrow w - \eta \frac{m_t}{1-\beta_1^t}, \quad\text{then}\quad
    w \leftarrow w - \eta \frac{m_t}{1-\beta_1^t} \frac{\sqrt{1-\beta_2^t}}{\sqrt{v_t} + \epsilon}
    \sqrt{\frac{(\rho_t-4)(\rho_t-2)\rho_\infty}{(\rho_\infty-4)(\rho_\infty-2)\rho_t}}$$

    `betas` in [0, 1); `eps` > 0.
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
        # while it is not rectified the length may be negative: 5 keeps the root, which is not used
        # then, real
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
        # one of the two sizes is 0
        return w - (rectified / (op.Sqrt(v) + self.eps) + plain) * m, m, v


@dataclass(frozen=True)
class RMSprop(Optimizer):
    r"""RMSprop (Tieleman & Hinton 2012; centered: Graves 2013).

    $$v_t = \alpha v_{t-1} + (1-\alpha) g^2, \quad b_t = \mu b_{t-1} + g/(\sqrt{v_t} + \epsilon),
    \quad w \leftarrow w - \eta b_t$$

    `alpha` in [0, 1); `eps` > 0; `momentum` $\mu \ge 0$. `centered=True` takes $v_t - a_t^2$ for
    $v_t$ under the root, with $a_t = \alpha a_{t-1} + (1-\alpha) g$.
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
        names = [
            "v",
            *(["mean"] if self.centered else []),
            *(["velocity"] if self.momentum else []),
        ]
        return {name: np.zeros_like(w) for name in names}

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, *slots: Value
    ) -> tuple[Value, ...]:
        v, *others = slots
        v = variance = _average(v, g * g, self.alpha)
        kept = [v]
        if self.centered:
            mean = _average(others.pop(0), g, self.alpha)
            variance = op.Max(v - mean * mean, 0.0)  # rounding may leave it below 0
            kept.append(mean)
        direction = g / (op.Sqrt(variance) + self.eps)
        if self.momentum:
            direction = self.momentum * others.pop(0) + direction
            kept.append(direction)
        return w - lr * direction, *kept


@dataclass(frozen=True)
class Adagrad(Optimizer):
    r"""Adagrad (Duchi et al. 2011).

    $$s_t = s_{t-1} + g^2, \quad w \leftarrow w - \frac{\eta}{1 + (t-1) d} \frac{g}{\sqrt{s_t} +
    \epsilon}$$

    `lr_decay` $d \ge 0$; `eps` > 0; the slot `sum` $s$ begins at `initial_accumulator_value` >= 0.
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
    r"""Adadelta (Zeiler 2012).

    $$v_t = \rho v_{t-1} + (1-\rho) g^2, \quad \delta = \frac{\sqrt{d_{t-1} + \epsilon}}{\sqrt{v_t +
    \epsilon}} g, \quad d_t = \rho d_{t-1} + (1-\rho) \delta^2, \quad w \leftarrow w - \eta \delta$$

    `rho` in [0, 1); `eps` > 0.
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
    r"""Lion (Chen et al. 2023): every element moves by the learning rate, so take a third to a
    tenth of Adam's.

    $$w \leftarrow w - \eta\,\mathrm{sign}(\beta_1 m_{t-1} + (1-\beta_1) g), \quad m_t = \beta_2
    m_{t-1} + (1-\beta_2) g$$

    `betas` in [0, 1).
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
    r"""LAMB (You et al. 2020), for large batches:

    Adam's direction at the length of each weight tensor.

    $$u = \frac{m_t/(1-\beta_1^t)}{\sqrt{v_t/(1-\beta_2^t)} + \epsilon} + \lambda w, \quad
    w \leftarrow w - \eta \frac{\|w\|}{\|u\|} u$$

    with $m_t$, $v_t$ of Adam; the quotient of the norms counts as 1 where either is 0. `betas` in
    [0, 1); `eps` > 0. `weight_decay` $\lambda$ is inside the quotient, as in the paper.
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
        length, norm = _norm(op, w), _norm(op, u)
        ratio = op.Where((length > 0) & (norm > 0), length / norm, op.constant(1, w.dtype))
        return w - lr * ratio * u, m, v


@dataclass(frozen=True)
class Adafactor(Optimizer):
    r"""Adafactor (Shazeer & Stern 2018) as in torch.optim: a second moment kept as its means over
    rows and columns.

    With $\beta_t = 1 - t^{\gamma}$, $R_t = \beta_t R_{t-1} + (1-\beta_t)\,\mathrm{mean}(g^2)$ over
    the last axis, and $C_t$ likewise over the last but one:

    $$\hat v = \frac{R_t C_t}{\max(\mathrm{mean}(R_t), \epsilon_1)}, \quad u =
    \frac{g}{\max(\sqrt{\hat v}, \epsilon_1)}, \quad w \leftarrow w - \min(\eta, t^{-1/2})
    \max(\epsilon_2, \mathrm{rms}(w)) \frac{u}{\max(1, \mathrm{rms}(u)/d)}$$

    A weight with fewer than two axes keeps its whole second moment. `beta2_decay` $\gamma \le 0$;
    `d` >= 1; `eps` = ($\epsilon_1 > 0$, or None: the spacing of the weight's element type at 1;
    $\epsilon_2 \ge 0$). Slots: `rows` (..., n, 1) and `columns` (..., 1, m), or `v`.
    """

    applies_weight_decay: ClassVar[bool] = True  # rms(w) is the undecayed weight's

    learning_rate: LearningRate = 0.01
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "beta2_decay", at_most=0)
        check_number(self, "d", at_least=1)
        eps: Any = self.eps
        if len(eps) != 2 or not (eps[0] is None or 0 < eps[0] < np.inf) or not 0 <= eps[1] < np.inf:
            raise SettingError(
                f"Adafactor needs eps = (a number > 0 or None, a number >= 0), got {eps!r}."
            )
        object.__setattr__(self, "eps", tuple(eps))

    def slots(self, w: Array) -> dict[str, Array]:
        if w.ndim < 2:
            return {"v": np.zeros_like(w)}
        return {
            "rows": np.zeros_like(w, shape=(*w.shape[:-1], 1)),
            "columns": np.zeros_like(w, shape=(*w.shape[:-2], 1, w.shape[-1])),
        }

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        unique_name = step**self.beta2_decay
        size = op.Min(lr, op.cast(step**-0.5, lr.dtype))
        return (
            size,
            op.cast(unique_name, lr.dtype),
            op.cast(1 - unique_name, lr.dtype),
            1 - lr * self.weight_decay,
        )

    def update(
        self,
        op: GraphBuilder,
        w: Value,
        g: Value,
        size: Value,
        unique_name: Value,
        kept: Value,
        undecayed: Value,
        *slots: Value,
    ) -> tuple[Value, ...]:
        eps1 = float(np.finfo(w.dtype).eps) if self.eps[0] is None else self.eps[0]
        square = g * g
        if len(slots) == 2:
            rows = kept * slots[0] + unique_name * op.ReduceMean(square, [-1])
            columns = kept * slots[1] + unique_name * op.ReduceMean(square, [-2])
            slots = rows, columns
            v = rows / op.Max(op.ReduceMean(rows, [-2]), eps1) * columns
        else:
            slots = (v := kept * slots[0] + unique_name * square,)
        u = g / op.Max(op.Sqrt(v), eps1)
        size = size * op.Max(_rms(op, w), self.eps[1]) / op.Max(_rms(op, u) / self.d, 1.0)
        return (undecayed * w if self.weight_decay else w) - size * u, *slots


def initial_slots_to_read(optimizer: Optimizer, name: str, w: Array) -> dict[str, Array]:
    """The same, not to be written: a slot that is one number throughout, as nearly all begin, takes
    no memory.
    """

    def spread(value: Array) -> Array:
        if not value.size or (value != value.flat[0]).any():
            return value
        return np.broadcast_to(np.array(value.flat[0], value.dtype), value.shape)

    return {slot: spread(value) for slot, value in initial_slots(optimizer, name, w).items()}


def fused_weights(
    optimizer: Optimizer, weights: Mapping[str, Array], slots: Mapping[str, Mapping[str, Array]]
) -> list[list[str]]:
    """Small weights that may be updated one after the other in one tensor: the operators of an
    update cost more than their elements.

    Weights without slots are no such: their update is one or two operators.
    """
    alike: dict[Any, list[str]] = {}
    for name, w in weights.items():
        small = 0 < w.size <= MAX_ELEMENTS_TO_FUSE and w.dtype in (np.float32, np.float64)
        if (
            optimizer.elementwise
            and small
            and slots[name]
            and all(s.shape == w.shape for s in slots[name].values())
        ):
            rule, factor = _rule_of(optimizer, name)
            alike.setdefault((w.dtype, factor, rule.weight_decay), []).append(name)
    return [pack for found in alike.values() for pack in _packs(found, weights) if len(pack) > 1]


def _packs(found: Sequence[str], weights: Mapping[str, Array]) -> list[list[str]]:
    """Weights in their order, of so many elements together as one tensor may have."""
    packs: list[list[str]] = []
    room = 0
    for name in found:
        size = weights[name].size
        if size > room:
            packs.append([])
            room = MAX_FUSED_ELEMENTS
        packs[-1].append(name)
        room -= size
    return packs


def get_optimizer(spec: OptimizerLike) -> Optimizer:
    """The optimizer meant by a name, an Optimizer or a number: SGD with that learning rate.

    UnknownNameError (a SettingError) for a name that none has, with the nearest; SettingError for
    anything else.

    >>> get_optimizer("rmsprop").eps, get_optimizer(0.5).learning_rate
    (1e-08, 0.5)
    """
    if isinstance(spec, Optimizer):
        return spec
    if isinstance(spec, str):
        known = registry(__name__, Optimizer)  # type: ignore[type-abstract]
        return lookup("optimizer", spec if spec in known else spec.lower(), known)
    given: Any = spec
    if isinstance(given, (int, float, np.number)) and not isinstance(given, bool):
        return SGD(float(given))
    hint = (
        f" Make one: {given.__name__}()."
        if isinstance(given, type) and issubclass(given, Optimizer)
        else ""
    )
    raise SettingError(f"optimizer is a name, an Optimizer or a number, got {given!r}.{hint}")


def learning_rate_at(optimizer: Optimizer, step: int) -> float:
    """The learning rate of update number `step`, counted from 0.

    SettingError (a ValueError) unless it is a finite number >= 0.

    >>> learning_rate_at(SGD(lambda step: 0.5**step), 2)
    0.25
    """
    rate: Any = optimizer.learning_rate
    if callable(rate):
        rate = rate(step)
    if (
        not isinstance(rate, (int, float, np.number))
        or isinstance(rate, bool)
        or not 0 <= rate < np.inf
    ):
        raise SettingError(
            f"learning_rate must be a finite number >= 0, {optimizer.learning_rate!r} gave {rate!r}"
            f" for update {step}."
        )
    return float(rate)


def initial_slots(optimizer: Optimizer, name: str, w: Array) -> dict[str, Array]:
    """Slot name -> value before the first update, for the weight called `name`; the average of
    `ema_momentum` is among them, as `ema`.
    """
    slots = {slot: np.array(value) for slot, value in optimizer.slots(w).items()}
    if optimizer.ema_momentum is None:
        return slots
    if AVERAGE in slots:
        raise SettingError(
            f"{type(optimizer).__name__} has a slot {AVERAGE!r} for {name!r}, which is the name of"
            " ema_momentum's: rename it."
        )
    return {**slots, AVERAGE: np.array(w)}


def apply_update(
    op: GraphBuilder,
    optimizer: Optimizer,
    weights: Mapping[str, Value],
    gradients: Mapping[str, Value],
    slots: Mapping[str, Mapping[str, Value]],
    lr: Value,
    step: Value,
    *,
    scaled: bool = False,
) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """The next value of every weight and of every slot.

    `slots[name]` is in the order of `initial_slots(optimizer, name, w)`.

    `scaled`: the gradients are times the learning rate, and the optimizer is `is_plain_sgd`.

    SettingError where `update` returns another number of values, or a value of another type or
    shape, than it was given.
    """
    shared: dict[
        Any, tuple[Value | None, tuple[Value, ...]]
    ] = {}  # what weights of one type, learning rate and decay have in common
    next_weights: dict[str, Value] = {}
    next_slots: dict[str, dict[str, Value]] = {}
    for name, w in weights.items():
        rule, factor = _rule_of(optimizer, name)
        group = (w.dtype, factor, rule.weight_decay)
        if group not in shared:
            with op.scope(scopes.OPTIMIZER):
                rate = op.cast(lr if factor == 1 else lr * factor, w.dtype)
                decays = rule.weight_decay and not rule.applies_weight_decay
                shared[group] = (
                    1 - rate * rule.weight_decay if decays else None,
                    rule.coefficients(op, rate, step),
                )
        undecayed, coefficients = shared[group]
        own = dict(slots[name])
        average = own.pop(AVERAGE, None) if rule.ema_momentum is not None else None
        with op.scope(scopes.update_of(name)):
            w_decayed, g = w if undecayed is None else undecayed * w, gradients[name]
            if scaled:
                result: Any = w_decayed - (g if factor == 1 else g * factor)
            else:
                result = rule.update(op, w_decayed, g, *coefficients, *own.values())
            new, *rest = result if isinstance(result, tuple) else (result,)
            _check_returned(rule, name, {name: w, **own}, [new, *rest])
            next_slots[name] = dict(zip(own, rest))
            if average is not None and rule.ema_momentum is not None:
                next_slots[name][AVERAGE] = _average(average, new, rule.ema_momentum)
        next_weights[name] = new
    return next_weights, next_slots


def clip_gradients(
    op: GraphBuilder,
    gradients: Mapping[str, Value],
    clip_norm: float | None,
    clip_value: float | None,
) -> dict[str, Value]:
    """Gradients clipped element by element to ±clip_value, then scaled so that their common L2 norm
    is at most clip_norm.

    None leaves out either. A NaN stays one, and with clip_norm spreads to all gradients.
    """
    clipped = dict(gradients)
    if clip_value is not None:
        clipped = {name: op.Clip(g, -clip_value, clip_value) for name, g in clipped.items()}
    if clip_norm is None or not clipped:
        return clipped
    # float16 squares overflow beyond 256
    wide = np.float64 if any(g.dtype == np.float64 for g in clipped.values()) else np.float32
    squares = [op.ReduceSumSquare(op.cast(g, wide), keepdims=0) for g in clipped.values()]
    factor = clip_norm / op.Max(op.Sqrt(op.Sum(*squares)), clip_norm)
    factors = {dtype: op.cast(factor, dtype) for dtype in {g.dtype: None for g in clipped.values()}}
    return {name: g * factors[g.dtype] for name, g in clipped.items()}


def _rule_of(optimizer: Optimizer, name: str) -> tuple[Optimizer, float]:
    """The optimizer as it treats the weight called `name`, and the factor of its learning rate."""
    factor = next(
        (
            f
            for pattern, f in optimizer.learning_rate_multipliers.items()
            if fnmatchcase(name, pattern)
        ),
        1.0,
    )
    if optimizer.weight_decay and any(
        fnmatchcase(name, pattern) for pattern in optimizer.exclude_from_weight_decay
    ):
        return replace(optimizer, weight_decay=0.0), float(factor)
    return optimizer, float(factor)


def _check_returned(
    optimizer: Optimizer, name: str, given: Mapping[str, Value], returned: Sequence[Value]
) -> None:
    where = f"{type(optimizer).__name__}.update for {name!r}"
    if len(returned) != len(given):
        slots = ", ".join(list(given)[1:]) or "no slots"
        raise SettingError(
            f"{where} returned {len(returned)} values, expected {len(given)}: the weight and"
            f" {slots}."
        )
    for what, before, after in zip(given, given.values(), returned):
        if before.dtype != after.dtype or (
            None not in (before.shape, after.shape) and before.shape != after.shape
        ):
            was, became = (f"{v.dtype}{list(v.shape or ())}" for v in (before, after))
            raise SettingError(
                f"{where} made {what!r} {became}; it was {was}. Keep shapes, and cast numbers made"
                " of `step` to w.dtype."
            )


def _slot_specs(
    optimizer: Optimizer, name: str, shape: Sequence[Dim], dtype: np.dtype[Any]
) -> list[TensorSpec]:
    """The slots of a weight whose sizes may be names: a size that changes with the weight's is that
    of the weight's axis.
    """
    small, large = (
        initial_slots(
            optimizer, name, np.zeros([d if isinstance(d, int) else size for d in shape], dtype)
        )
        for size in (2, 3)
    )
    specs = []
    for slot, array in small.items():
        sizes: list[Dim] = []
        for axis, (size, other) in enumerate(zip(array.shape, large[slot].shape)):
            sizes.append(
                size if size == other else shape[axis] if array.ndim == len(shape) else None
            )
        specs.append(TensorSpec(slot, array.dtype, tuple(sizes)))
    return specs


def _check_betas(optimizer: Optimizer) -> None:
    check_number(optimizer, "betas", at_least=0, below=1, sequence=True)
    betas = getattr(optimizer, "betas")  # noqa: B009  # a field of the subclasses that call this
    if len(betas) != 2:
        raise SettingError(f"{type(optimizer).__name__} needs two betas, got {betas}.")


def _average(so_far: Value, new: Value, beta: float) -> Value:
    return beta * so_far + (1 - beta) * new


def _norm(op: GraphBuilder, x: Value) -> Value:
    return op.Sqrt(op.ReduceSumSquare(x, keepdims=0))  # onnxruntime has no ReduceL2 for float64


def _rms(op: GraphBuilder, x: Value) -> Value:
    return op.Sqrt(op.ReduceMean(x * x, keepdims=0))
