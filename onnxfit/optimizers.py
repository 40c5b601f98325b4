r"""Optimizers: the next value of a weight and its slots, computed from the gradient.

In the formulas $w$ is a weight, $g$ its gradient, $\eta$ the learning rate, $t$ the number of the
update counted from 1; a slot before the update has the index $t-1$. Slots have the shape of their
weight and start at 0 unless stated otherwise. Settings have the names and defaults of torch.optim
(`betas`, `eps`, `alpha`, ...), except that the learning rate is called `learning_rate`, SGD's
default is 0.01, and `weight_decay` is always decoupled. For the same gradients, the weights equal
torch.optim's.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, ClassVar, Union

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.checks import (
    ChecksArguments,
    check_number,
    is_finite,
    is_number,
    matching_names,
    name_list,
    set_field,
    shortened,
)
from onnxfit.errors import SettingError, listed_names
from onnxfit.graph.spec import Dim
from onnxfit.graph.sums import sum_of_squares
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.registry import lookup, registry
from onnxfit.schedules import Constant, LearningRate

__all__ = [
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Groups",
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
# A number, a Schedule or a callable of the update's number. In `update` it is a number or a Value.
Scheduled = Any
OF_GROUP = ("weights", "optimizer", "learning_rate_multiplier")  # the other keys are settings
BIAS_AND_NORM = "bias_and_norm"  # selects weights of at most one axis, as timm does


@dataclass(frozen=True)
class WeightInfo:
    """Description of a weight: the argument of a function in `Groups`.

    - `name`, `shape`, `dtype`: those of the weight; a size is None if it is unknown.
    - `layers_after`: the number of layers between the weight's layer and the outputs.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: np.dtype[Any]
    layers_after: int = 0

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, for known sizes."""
        return prod(size for size in self.shape if isinstance(size, int))


Selector = Union[str, Callable[[WeightInfo], bool]]


@dataclass(frozen=True)
class WeightOptimizer:
    """The update of a weight, which all weights with the same settings share.

    - `optimizer`: the optimizer, with the settings for these weights.
    - `multiplier`: the factor of the learning rate.
    - `schedule`: the learning rate before the factor; None for that of the Trainer.
    """

    optimizer: Optimizer
    multiplier: float = 1.0
    schedule: Callable[[int], float] | None = None


@dataclass(frozen=True)
class Optimizer(ChecksArguments, ABC):
    r"""Base class of every optimizer.

    - `learning_rate` $\eta \ge 0$: a number, a Schedule, or a callable that takes the number of
      the update, counted from 0, and returns the rate.
    - `weight_decay` $\lambda \ge 0$: decoupled (Loshchilov & Hutter 2019), $w \leftarrow w -
      \eta\lambda w$ before the update. For decay through the gradient, pass a `penalty` to the
      Trainer. It may be a Schedule, as may `momentum` and the first of `betas`.
    - `exclude_from_weight_decay`: one or more patterns; weights whose name matches are not decayed.
      "bias_and_norm" stands for all weights with at most one axis and those whose name ends with
      ".bias", as in timm. A function of the weight, such as `lambda w: w.ndim <= 1`, is called with
      its `name`, `shape`, `ndim`, `size` and `dtype`.
    - `learning_rate_multipliers`: pattern -> factor $\ge 0$; the first pattern that matches a
      weight's name scales the weight's learning rate.
    - `ema_momentum` $m$ in (0, 1), or None: keep an average of each weight, $a \leftarrow m a +
      (1-m) w$ after the update, which starts at the weight itself. `Trainer.export(averaged=True)`
      writes the averages.

    Patterns are fnmatch patterns, and case matters. `Groups` gives other settings to some weights.
    Raises SettingError for a number out of range.

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
    weight_decay: Scheduled = field(default=0.0, kw_only=True)
    exclude_from_weight_decay: Sequence[Selector] | Selector = field(default=(), kw_only=True)
    learning_rate_multipliers: Mapping[str, float] = field(
        default_factory=dict, kw_only=True, hash=False
    )
    ema_momentum: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.learning_rate):
            check_number(self, "learning_rate", at_least=0)
        _check_scheduled(self, "weight_decay")
        if self.ema_momentum is not None:
            check_number(self, "ema_momentum", above=0, below=1)
        owner = type(self).__name__
        excluded = _selectors(
            f"{owner}'s exclude_from_weight_decay", self.exclude_from_weight_decay
        )
        set_field(self, "exclude_from_weight_decay", excluded)
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

    def scheduled_settings(self) -> dict[str, Callable[[int], float]]:
        """Return the schedules of settings other than the learning rate, by field.

        That of `betas` belongs to its first number.
        """
        found = {}
        for name in ("weight_decay", "momentum", "betas"):
            value = getattr(self, name, None)
            first = value[0] if isinstance(value, tuple) and value else value
            if callable(first):
                found[name] = first
        return found

    def with_scheduled(self, value: Callable[[str], Any], *, checked: bool = True) -> Optimizer:
        """Return the optimizer with values in place of the schedules of its settings.

        - `value`: returns the value of a field of `scheduled_settings`.
        - `checked`: raise SettingError for an impossible number; False for values of a graph.
        """
        names = self.scheduled_settings()
        if not names:
            return self
        values = {name: value(name) for name in names}
        if "betas" in values:
            values["betas"] = values["betas"], *getattr(self, "betas")[1:]  # noqa: B009
        if checked:
            return replace(self, **values)
        result = copy.copy(self)
        for name, one in values.items():
            set_field(result, name, one)
        return result

    @property
    def members(self) -> tuple[Optimizer, ...]:
        """The optimizers of the weights: this one, or those of the groups."""
        return (self,)

    @property
    def needs_layers(self) -> bool:
        """Whether `for_weights` reads `WeightInfo.layers_after`."""
        return False

    def with_learning_rate(self, learning_rate: LearningRate) -> Optimizer:
        """Return this optimizer with another learning rate."""
        return replace(self, learning_rate=learning_rate)

    def for_weights(self, weights: Sequence[WeightInfo]) -> dict[str, WeightOptimizer]:
        """Return the update of each weight by name. Weights with the same settings share one.

        - `weights`: the descriptions of all trained weights.
        """
        chosen: dict[tuple[float, bool], WeightOptimizer] = {}
        exclusions = _selectors("exclude_from_weight_decay", self.exclude_from_weight_decay)
        result = {}
        for w in weights:
            matching = (
                float(factor)
                for pattern, factor in self.learning_rate_multipliers.items()
                if fnmatchcase(w.name, pattern)
            )
            excluded = any(_selects(s, w) for s in exclusions)
            key = next(matching, 1.0), excluded and bool(self.weight_decay)
            if key not in chosen:
                own = replace(self, weight_decay=0.0) if key[1] else self
                chosen[key] = WeightOptimizer(own, key[0])
            result[w.name] = chosen[key]
        return result

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

    momentum: Scheduled = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    scaled_velocity: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_scheduled(self, "momentum")
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
        return not _is_used(self.momentum)

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
        if not _is_used(self.momentum):
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
    betas: tuple[Scheduled, float] = (0.9, 0.999)
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

    weight_decay: Scheduled = field(default=0.01, kw_only=True)


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
    betas: tuple[Scheduled, float] = (0.9, 0.999)
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
    betas: tuple[Scheduled, float] = (0.9, 0.999)
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
    betas: tuple[Scheduled, float] = (0.9, 0.999)
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
    momentum: Scheduled = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "alpha", at_least=0, below=1)
        check_number(self, "eps", above=0)
        _check_scheduled(self, "momentum")

    def slots(self, w: Array) -> dict[str, Array]:
        slots = ["v"]
        if self.centered:
            slots.append("mean")
        if _is_used(self.momentum):
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
        if _is_used(self.momentum):
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
    betas: tuple[Scheduled, float] = (0.9, 0.99)

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
    betas: tuple[Scheduled, float] = (0.9, 0.999)
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
        if _is_used(self.weight_decay):
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
        return (undecayed * w if _is_used(self.weight_decay) else w) - size * u, *slots


@dataclass(frozen=True)
class Groups(Optimizer):
    r"""Groups of weights, each with its own optimizer or settings (parameter groups of
    `torch.optim`, `optax.multi_transform`, timm's `layer_decay`).

    With `layer_decay` $d$, the learning rate of a weight is multiplied by $d^n$, where $n$ is the
    number of layers after the weight's own (Clark et al. 2020; Bao et al. 2022).

    - `groups`: a list of dicts, or a dict from pattern to an Optimizer or a dict of settings. Each
      dict of a list has
        - `weights`: names or fnmatch patterns, one or several, as in `Trainer(weights=...)`, where
          "!pattern" excludes; or a function of a weight, such as `lambda w: w.ndim <= 1`, which is
          called with its `name`, `shape`, `ndim`, `size` and `dtype`; or "bias_and_norm", the
          weights with at most one axis and those whose name ends with ".bias".
        - `optimizer`: the optimizer of the group; otherwise `default`.
        - settings that replace those of the optimizer, such as `learning_rate`, `weight_decay` or
          `betas`.
        - `learning_rate_multiplier`: a factor of the group's learning rate.
    - `default`: the optimizer of the weights in no group. With None, every weight must be in one.
    - `layer_decay` $d$ in (0, 1], or None.
    - `layers`: patterns of the layers for `layer_decay`, from the input to the output; an entry may
      be a list of patterns. By default, operators with a matrix, filters or an embedding table are
      counted along the longest path of the graph, and biases and norms belong to the layer before
      them. Give `layers` to count each block of a transformer as one layer.

    The first group that matches a weight counts. `trainer.learning_rate` is the rate of `default`,
    or of the first group without `default`. If it is a number, setting it scales all rates that are
    numbers by the same factor. A rate that is a Schedule or a function is followed by its group
    alone, and if the rate of `default` is one, so is a number. `trainer.optimizer.learning_rates`
    has the rates of all weights.

    A function cannot be saved: `Trainer.load` then needs `optimizer=...` again. Raises SettingError
    for a group without weights and for a weight in no group, and UnknownNameError for a pattern
    that matches no trained weight.

    >>> optimizer = Groups(
    ...     [
    ...         {"weights": "backbone.*", "learning_rate": 1e-5, "betas": (0.9, 0.98)},
    ...         {"weights": lambda w: w.ndim <= 1, "weight_decay": 0.0},
    ...         {"weights": "head.*", "optimizer": SGD(0.01, momentum=0.9)},
    ...     ],
    ...     default=AdamW(1e-4, weight_decay=0.05),
    ... )
    >>> optimizer.learning_rate
    0.0001
    """

    named: ClassVar[bool] = False

    groups: Any = ()
    default: OptimizerLike | None = None
    layer_decay: float | None = field(default=None, kw_only=True)
    layers: Sequence[str | Sequence[str]] = field(default=(), kw_only=True)
    learning_rate: LearningRate = field(init=False, repr=False, compare=False, default=0.0)
    weight_decay: Scheduled = field(init=False, repr=False, compare=False, default=0.0)
    exclude_from_weight_decay: Sequence[Selector] | Selector = field(
        init=False, repr=False, compare=False, default=()
    )
    learning_rate_multipliers: Mapping[str, float] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    ema_momentum: float | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.default is not None:
            set_field(self, "default", get_optimizer(self.default))
        if isinstance(self.default, Groups):
            raise SettingError("Groups needs default to be an optimizer without groups.")
        set_field(self, "groups", _checked_groups(self.groups, self.default))
        if self.layer_decay is not None:
            check_number(self, "layer_decay", above=0, at_most=1)
        elif self.layers:
            raise SettingError("Groups needs layer_decay for its layers.")
        layers = [self.layers] if isinstance(self.layers, str) else self.layers
        named = tuple(tuple(name_list("A layer of Groups", layer)) for layer in layers)
        set_field(self, "layers", named)
        first = self.members[0]
        averages = [member.ema_momentum for member in self.members]
        set_field(self, "learning_rate", first.learning_rate)
        set_field(self, "ema_momentum", None if None in averages else averages[0])

    def __hash__(self) -> int:
        return hash((type(self), self.default, len(self.groups), self.layer_decay, self.layers))

    @property
    def members(self) -> tuple[Optimizer, ...]:
        own = [_group_optimizer(group, self.default) for group in self.groups]
        return (*(get_optimizer(d) for d in [self.default] if d is not None), *own)

    @property
    def needs_layers(self) -> bool:
        return self.layer_decay is not None and not self.layers

    def with_learning_rate(self, learning_rate: LearningRate) -> Optimizer:
        if self.default is not None:
            default = get_optimizer(self.default)
            return replace(self, default=default.with_learning_rate(learning_rate))
        first, *others = self.groups
        return replace(self, groups=[{**first, "learning_rate": learning_rate}, *others])

    def for_weights(self, weights: Sequence[WeightInfo]) -> dict[str, WeightOptimizer]:
        result: dict[str, WeightOptimizer] = {}
        for i, group in enumerate(self.groups):
            selected = _selected(f"Group {i + 1} of Groups", group["weights"], weights)
            members = [w for w in weights if w.name in selected and w.name not in result]
            if not members:
                shown = listed_names(group["weights"])
                raise SettingError(
                    f"Group {i + 1} of Groups has no weight: {shown} selects none that is in no"
                    " earlier group. Move the group forward, or remove it."
                )
            own = _group_optimizer(group, self.default).for_weights(members)
            factor = float(group.get("learning_rate_multiplier", 1.0))
            result |= {name: self._with_rate(one, factor) for name, one in own.items()}
        rest = [w for w in weights if w.name not in result]
        if rest and self.default is None:
            raise SettingError(
                f"{listed_names([w.name for w in rest])} {'is' if len(rest) == 1 else 'are'} in no"
                " group of Groups. Pass default=..., add a group, or leave the weights out of"
                " weights=."
            )
        if self.default is not None:
            result |= get_optimizer(self.default).for_weights(rest)
        decayed = self._with_layer_decay(weights, result)
        shared: list[WeightOptimizer] = []
        for name in decayed:  # equal ones become the same object
            if decayed[name] not in shared:
                shared.append(decayed[name])
            decayed[name] = shared[shared.index(decayed[name])]
        return {w.name: decayed[w.name] for w in weights}

    def _with_rate(self, one: WeightOptimizer, factor: float) -> WeightOptimizer:
        """Return the update of a group's weight with the rate of the group."""
        rate, base = one.optimizer.learning_rate, self.learning_rate
        factor *= one.multiplier
        if rate == base:
            return replace(one, multiplier=factor)
        if callable(rate) or callable(base) or not base:
            schedule = rate if callable(rate) else Constant(rate)
            return replace(one, multiplier=factor, schedule=schedule)
        return replace(one, multiplier=factor * (rate / base))

    def _with_layer_decay(
        self, weights: Sequence[WeightInfo], result: Mapping[str, WeightOptimizer]
    ) -> dict[str, WeightOptimizer]:
        """Return the updates with their rates multiplied by the decay of their layers."""
        if self.layer_decay is None:
            return dict(result)
        after = {w.name: w.layers_after for w in weights}
        if self.layers:
            after = {}
            for i, layer in enumerate(self.layers):
                for name in _selected("layers of Groups", tuple(layer), weights):
                    after.setdefault(name, len(self.layers) - 1 - i)
        missing = [w.name for w in weights if w.name not in after]
        if missing:
            raise SettingError(
                f"{listed_names(missing)} {'is' if len(missing) == 1 else 'are'} in no layer of"
                " Groups(layers=...). Add a pattern for each of them."
            )
        return {
            name: replace(one, multiplier=one.multiplier * self.layer_decay ** after[name])
            for name, one in result.items()
        }

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, *slots: Any, **_: Any
    ) -> Value | tuple[Value, ...]:
        raise SettingError("Groups updates no weight itself: for_weights returns who does.")


def _checked_groups(groups: Any, default: Any) -> tuple[dict[str, Any], ...]:
    """Return groups as dicts with "weights", "optimizer" if it is given, and settings.

    Raises SettingError for a setting that the optimizer of its group does not have.
    """
    if isinstance(groups, Mapping):
        groups = [
            {
                "weights": pattern,
                **dict(entry if isinstance(entry, Mapping) else {"optimizer": entry}),
            }
            for pattern, entry in groups.items()
        ]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) for g in groups):
        raise SettingError(
            "Groups needs a list of dicts, such as [{'weights': 'head.*', 'learning_rate': 0.01}],"
            f" or a dict from pattern to optimizer, got {shortened(groups)}."
        )
    if not groups and default is None:
        raise SettingError("Groups needs at least one group, or a default.")
    checked = []
    for group in groups:
        if "weights" not in group:
            raise SettingError(
                "A group of Groups needs 'weights' (torch: 'params'), the names or patterns of its"
                f" weights, got {shortened(group)}."
            )
        entry = {**group, "weights": _selectors("The weights of a group", group["weights"])}
        if not entry["weights"]:
            raise SettingError("A group of Groups has an empty list of weights.")
        if "optimizer" in entry:
            entry["optimizer"] = get_optimizer(entry["optimizer"])
        factor = entry.get("learning_rate_multiplier", 1.0)
        if not (is_number(factor) and is_finite(factor) and factor >= 0):
            raise SettingError(
                "A group of Groups needs learning_rate_multiplier to be a number >= 0, got"
                f" {shortened(factor)}."
            )
        own = _group_optimizer(entry, default)  # which has lists as tuples
        settings = {name: getattr(own, name) for name in entry if name not in OF_GROUP}
        checked.append({**entry, **settings})
    return tuple(checked)


def _group_optimizer(group: Mapping[str, Any], default: Any) -> Optimizer:
    """Return the optimizer of a group, with the group's settings. Raises SettingError."""
    optimizer: Any = group.get("optimizer", default)
    if optimizer is None:
        raise SettingError(
            f"The group of {listed_names(group['weights'])} needs an 'optimizer', because Groups"
            " has no default."
        )
    if isinstance(optimizer, Groups):
        raise SettingError("A group of Groups needs an optimizer without groups.")
    settings = {name: value for name, value in group.items() if name not in OF_GROUP}
    own: Optimizer = replace(optimizer, **settings) if settings else optimizer
    return own


def _selectors(setting: str, given: Any) -> tuple[Selector, ...]:
    """Return names, patterns and functions, one or several, as a tuple."""
    if callable(given):
        return (given,)
    if isinstance(given, (list, tuple)) and any(map(callable, given)):
        names = [entry for entry in given if not callable(entry)]
        name_list(setting, names)
        return tuple(given)
    return tuple(name_list(setting, given))


def _selects(selector: Selector, w: WeightInfo) -> bool:
    """Return whether a pattern, a function or BIAS_AND_NORM selects a weight."""
    if not isinstance(selector, str):
        return bool(selector(w))
    if selector == BIAS_AND_NORM:
        return w.ndim <= 1 or w.name.endswith(".bias")
    return fnmatchcase(w.name, selector)


def _selected(
    setting: str, selectors: Sequence[Selector], weights: Sequence[WeightInfo]
) -> set[str]:
    """Return the names of the weights that selectors select; "!pattern" excludes.

    Raises UnknownNameError for a pattern that matches no weight, and SettingError for a function.
    """
    known = [w.name for w in weights]
    chosen: set[str] = set()
    excluded: set[str] = set()
    for selector in selectors:
        if isinstance(selector, str) and selector != BIAS_AND_NORM:
            if selector.startswith("!") and selector not in known:
                excluded |= matching_names(selector[1:], known, "trained weight")
            else:
                chosen |= matching_names(selector, known, "trained weight")
            continue
        found = {w.name for w in weights if _selects(selector, w)}
        if not found:
            what = selector if isinstance(selector, str) else selector.__name__
            raise SettingError(
                f"{setting}: {what} selects none of the trained weights {listed_names(known)}."
            )
        chosen |= found
    is_exclusion = [isinstance(s, str) and s.startswith("!") and s not in known for s in selectors]
    return (set(known) if all(is_exclusion) else chosen) - excluded


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
    return rate_at(optimizer.learning_rate, step)


def rate_at(learning_rate: LearningRate, step: int) -> float:
    """Return the value of a learning rate for update number `step`, counted from 0.

    Raises SettingError (a ValueError) unless the rate is a finite number >= 0.
    """
    rate: Any = learning_rate(step) if callable(learning_rate) else learning_rate
    if not (is_number(rate) and is_finite(rate) and rate >= 0):
        raise SettingError(
            f"learning_rate must be a finite number >= 0, but {learning_rate!r} returned"
            f" {rate!r} for update {step}."
        )
    return float(rate)


def _is_used(setting: Scheduled) -> bool:
    """Return whether a setting is another number than 0, a schedule or a value of a graph."""
    return not is_number(setting) or setting != 0


def _check_scheduled(optimizer: Optimizer, name: str) -> None:
    """Raise SettingError unless a field is a number >= 0, or a callable of the update's number."""
    if not callable(getattr(optimizer, name)):
        check_number(optimizer, name, at_least=0)


def _check_betas(optimizer: Optimizer) -> None:
    betas: Any = getattr(optimizer, "betas")  # noqa: B009  # a field of subclasses
    first, *others = betas if isinstance(betas, (list, tuple)) and betas else (None,)
    if callable(first):
        set_field(optimizer, "betas", tuple(others))
    check_number(optimizer, "betas", at_least=0, below=1, sequence=True)
    if callable(first):
        set_field(optimizer, "betas", (first, *getattr(optimizer, "betas")))  # noqa: B009
    betas = getattr(optimizer, "betas")  # noqa: B009
    if len(betas) != 2:
        raise SettingError(f"{type(optimizer).__name__} needs two betas, got {betas}.")


def _average(average: Value, new: Value, beta: float) -> Value:
    return beta * average + (1 - beta) * new


def _norm(op: GraphBuilder, x: Value) -> Value:
    return op.Sqrt(sum_of_squares(op, x))  # onnxruntime has no ReduceL2 for float64


def _rms(op: GraphBuilder, x: Value) -> Value:
    return op.Sqrt(op.ReduceMean(x * x, keepdims=0))
