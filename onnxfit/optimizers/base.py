"""The base class of optimizers, and what their formulas share."""

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
    name_list,
    set_field,
    shortened,
)
from onnxfit.errors import SettingError
from onnxfit.graph import names
from onnxfit.graph.spec import Dim
from onnxfit.graph.sums import sum_of_squares
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.optimizers.constraints import Constraint, Constraints, constraints_by_pattern
from onnxfit.optimizers.other_names import advice_for_schedule
from onnxfit.schedules import LearningRate

__all__ = ["Optimizer"]

Array = npt.NDArray[Any]
# A number, a Schedule or a callable of the update's number. In `update` it is a number or a Value.
Scheduled = Any
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
    - `constraint`: the projection after the update, or None.
    """

    optimizer: Optimizer
    multiplier: float = 1.0
    schedule: Callable[[int], float] | None = None
    constraint: Constraint | None = None


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
    - `cautious`: move only the elements whose step has the sign of $-g$, and divide these steps by
      their share of the weight, at least 0.001 (Liang et al. 2024).
    - `constraints`: a dict from pattern to a Constraint, such as `{"head.*": MaxNorm(3.0)}`, or a
      Constraint for all weights. The first pattern that matches a weight counts, and None is no
      constraint. It projects the weight after each update.

    Patterns are fnmatch patterns, and case matters. `Groups` gives other settings to some weights.
    SettingError: a number is out of range.

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
    cautious: bool = field(default=False, kw_only=True)
    constraints: Constraints = field(default=None, kw_only=True, hash=False)

    def __post_init__(self) -> None:
        if not callable(self.learning_rate):
            advice = advice_for_schedule(self.learning_rate)
            if advice:
                raise SettingError(
                    f"{type(self).__name__} needs learning_rate as a number or a Schedule, got"
                    f" {self.learning_rate!r}.{advice}"
                )
            check_number(self, "learning_rate", at_least=0)
        check_scheduled(self, "weight_decay")
        if self.ema_momentum is not None:
            check_number(self, "ema_momentum", above=0, below=1)
        owner = type(self).__name__
        if self.constraints is not None:
            set_field(self, "constraints", constraints_by_pattern(self.constraints))
        excluded = selectors(f"{owner}'s exclude_from_weight_decay", self.exclude_from_weight_decay)
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
        fields = self.scheduled_settings()
        if not fields:
            return self
        values = {name: value(name) for name in fields}
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

    @property
    def average_slot(self) -> str | None:
        """The slot with the average of a weight, or None."""
        return None if self.ema_momentum is None else names.EMA

    def with_learning_rate(self, learning_rate: LearningRate) -> Optimizer:
        """Return this optimizer with another learning rate."""
        return self.with_settings(learning_rate=learning_rate)

    def with_settings(self, **settings: Any) -> Optimizer:
        """Return this optimizer with other values of some `settings`, by name."""
        return replace(self, **settings)

    def for_weights(self, weights: Sequence[WeightInfo]) -> dict[str, WeightOptimizer]:
        """Return the update of each weight by name. Weights with the same settings share one.

        - `weights`: the descriptions of all trained weights.
        """
        chosen: dict[tuple[float, bool, Constraint | None], WeightOptimizer] = {}
        exclusions = selectors("exclude_from_weight_decay", self.exclude_from_weight_decay)
        result = {}
        for w in weights:
            matching = (
                float(factor)
                for pattern, factor in self.learning_rate_multipliers.items()
                if fnmatchcase(w.name, pattern)
            )
            excluded = any(selects(s, w) for s in exclusions)
            constraint = self._constraint(w)
            key = next(matching, 1.0), excluded and bool(self.weight_decay), constraint
            if key not in chosen:
                own = replace(self, weight_decay=0.0) if key[1] else self
                chosen[key] = WeightOptimizer(own, key[0], constraint=constraint)
            result[w.name] = chosen[key]
        return result

    def _constraint(self, w: WeightInfo) -> Constraint | None:
        """Return the constraint of a weight. SettingError: the weight lacks its axis."""
        for pattern, constraint in constraints_by_pattern(self.constraints).items():
            if w.name == pattern or fnmatchcase(w.name, pattern):
                if constraint is not None:
                    constraint.check_axes(w.name, w.ndim)
                return constraint
        return None

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

        >>> from onnxfit.optimizers import SGD
        >>> graph = SGD(momentum=0.9).build_onnx_function().graph
        >>> [v.name for v in graph.input]
        ['weight', 'gradient', 'learning_rate', 'step', 'weight/velocity']
        >>> [v.name for v in graph.output]
        ['weight/next', 'weight/velocity/next']
        """
        # Imported late: an optimizer is a formula, and does not need the graph builders.
        from onnxfit.gradients import functions

        return functions.update_function(self, shape, dtype, name)


def is_used(setting: Scheduled) -> bool:
    """Return whether a setting is another number than 0, a schedule or a value of a graph."""
    return not is_number(setting) or setting != 0


def check_scheduled(optimizer: Optimizer, name: str) -> None:
    """Raise SettingError unless a field is a number >= 0, or a callable of the update's number."""
    if not callable(getattr(optimizer, name)):
        check_number(optimizer, name, at_least=0)


def check_betas(optimizer: Optimizer, count: int = 2) -> None:
    """Raise SettingError unless `betas` has `count` numbers in [0, 1); a schedule may be first."""
    betas: Any = getattr(optimizer, "betas")  # noqa: B009  # a field of subclasses
    first, *others = betas if isinstance(betas, (list, tuple)) and betas else (None,)
    if callable(first):
        set_field(optimizer, "betas", tuple(others))
    check_number(optimizer, "betas", at_least=0, below=1, sequence=True)
    if callable(first):
        set_field(optimizer, "betas", (first, *getattr(optimizer, "betas")))  # noqa: B009
    betas = getattr(optimizer, "betas")  # noqa: B009
    if len(betas) != count:
        number = {2: "two", 3: "three"}[count]
        raise SettingError(f"{type(optimizer).__name__} needs {number} betas, got {betas}.")


def average(average: Value, new: Value, beta: float) -> Value:
    return beta * average + (1 - beta) * new


def norm(op: GraphBuilder, x: Value) -> Value:
    return op.Sqrt(sum_of_squares(op, x))  # onnxruntime has no ReduceL2 for float64


def rms(op: GraphBuilder, x: Value) -> Value:
    return op.Sqrt(op.ReduceMean(x * x, keepdims=0))


def selectors(setting: str, given: Any) -> tuple[Selector, ...]:
    """Return names, patterns and functions, one or several, as a tuple."""
    if callable(given):
        return (given,)
    if isinstance(given, (list, tuple)) and any(map(callable, given)):
        names = [entry for entry in given if not callable(entry)]
        name_list(setting, names)
        return tuple(given)
    return tuple(name_list(setting, given))


def selects(selector: Selector, w: WeightInfo) -> bool:
    """Return whether a pattern, a function or BIAS_AND_NORM selects a weight."""
    if not isinstance(selector, str):
        return bool(selector(w))
    if selector == BIAS_AND_NORM:
        return w.ndim <= 1 or w.name.endswith(".bias")
    return fnmatchcase(w.name, selector)


def rate_at(learning_rate: LearningRate, step: int) -> float:
    """Return the value of a learning rate for update number `step`, counted from 0.

    SettingError (a ValueError): the rate is not a finite number >= 0.
    """
    rate: Any = learning_rate(step) if callable(learning_rate) else learning_rate
    if not (is_number(rate) and is_finite(rate) and rate >= 0):
        raise SettingError(
            f"learning_rate must be a finite number >= 0, but {learning_rate!r} returned"
            f" {rate!r} for update {step}."
        )
    return float(rate)


def learning_rate_at(optimizer: Optimizer, step: int) -> float:
    """Return the optimizer's learning rate for update number `step`, counted from 0.

    SettingError (a ValueError): the rate is not a finite number >= 0.

    >>> from onnxfit.optimizers import SGD
    >>> learning_rate_at(SGD(lambda step: 0.5**step), 2)
    0.25
    """
    return rate_at(optimizer.learning_rate, step)
