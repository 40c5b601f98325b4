"""Lookahead around another optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from onnxfit.checks import check_number, set_field
from onnxfit.errors import SettingError
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.optimizers.base import (
    Array,
    Optimizer,
    Scheduled,
    Selector,
    WeightInfo,
    WeightOptimizer,
)
from onnxfit.optimizers.constraints import Constraints
from onnxfit.optimizers.groups import Groups
from onnxfit.optimizers.lookup import OptimizerLike, get_optimizer
from onnxfit.schedules import LearningRate

__all__ = ["Lookahead"]


@dataclass(frozen=True)
class Lookahead(Optimizer):
    r"""Lookahead (Zhang et al. 2019): after every $k$ updates of another optimizer, go a part of
    the way from the weights before them.

    After each update whose number is a multiple of $k$:

    $$s \leftarrow s + \alpha (w - s), \quad w \leftarrow s$$

    - `optimizer`: the optimizer of the updates in between, without schedules of its settings and
      without `cautious`. Its settings are those of this optimizer.
    - `k` $\ge 1$, `alpha` $\alpha$ in (0, 1].

    Slots: those of the optimizer, and `slow` $s$, which starts at the weight. After a number of
    updates that is no multiple of $k$, the weights are those in between. SettingError: the
    optimizer is a Groups or a Lookahead, is cautious, or has a schedule of a setting.

    >>> list(Lookahead("adam").slots(np.ones(2)))
    ['m', 'v', 'slow']
    """

    named: ClassVar[bool] = False

    optimizer: OptimizerLike = "adam"
    k: int = 5
    alpha: float = 0.5
    learning_rate: LearningRate = field(init=False, repr=False, compare=False, default=0.0)
    weight_decay: Scheduled = field(init=False, repr=False, compare=False, default=0.0)
    exclude_from_weight_decay: Sequence[Selector] | Selector = field(
        init=False, repr=False, compare=False, default=()
    )
    learning_rate_multipliers: Mapping[str, float] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    ema_momentum: float | None = field(init=False, repr=False, compare=False, default=None)
    cautious: bool = field(init=False, repr=False, compare=False, default=False)
    constraints: Constraints = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        check_number(self, "k", at_least=1, whole=True)
        check_number(self, "alpha", above=0, at_most=1)
        inner = get_optimizer(self.optimizer)
        is_wrapper = isinstance(inner, (Groups, Lookahead))
        if is_wrapper or inner.cautious or inner.scheduled_settings():
            raise SettingError(
                "Lookahead needs an optimizer without groups, cautious and schedules of its"
                f" settings, got {type(inner).__name__}. Give each group a Lookahead of its own."
            )
        set_field(self, "optimizer", inner)
        for name in ("learning_rate", "weight_decay", "ema_momentum", "constraints"):
            set_field(self, name, getattr(inner, name))

    @property
    def inner(self) -> Optimizer:
        """The optimizer of the updates in between."""
        return get_optimizer(self.optimizer)

    @property
    def elementwise(self) -> bool:  # type: ignore[override]  # a constant of other classes
        return self.inner.elementwise

    @property
    def applies_weight_decay(self) -> bool:  # type: ignore[override]  # a constant of others
        return self.inner.applies_weight_decay

    @property
    def average_slot(self) -> str | None:
        return self.inner.average_slot

    def with_settings(self, **settings: Any) -> Optimizer:
        own = {name: settings.pop(name) for name in ("optimizer", "k", "alpha") if name in settings}
        inner = get_optimizer(own.get("optimizer", self.optimizer)).with_settings(**settings)
        return replace(self, **{**own, "optimizer": inner})

    def for_weights(self, weights: Sequence[WeightInfo]) -> dict[str, WeightOptimizer]:
        own = self.inner.for_weights(weights)
        wrapped = {
            id(one): replace(one, optimizer=replace(self, optimizer=one.optimizer))
            for one in own.values()
        }
        return {name: wrapped[id(one)] for name, one in own.items()}

    def slots(self, w: Array) -> dict[str, Array]:
        return {**self.inner.slots(w), "slow": np.array(w)}

    def coefficients(self, op: GraphBuilder, lr: Value, step: Value) -> tuple[Value, ...]:
        is_last = op.Equal(step, self.k * op.Floor(step / self.k))
        share = op.cast(op.cast(is_last, np.float64), lr.dtype)
        return *self.inner.coefficients(op, lr, step), share

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, *values: Any, **_: Any
    ) -> tuple[Value, ...]:
        *others, slow = values
        own = self.inner.slots(np.zeros([1] * (w.rank or 0), w.dtype))
        split = len(others) - len(own)
        coefficients, slots = [lr, step, *others[:split]], others[split:]
        *inner_coefficients, is_last = coefficients
        result: Any = self.inner.update(op, w, g, *inner_coefficients, *slots)
        fast, *next_slots = result if isinstance(result, tuple) else (result,)
        merged = slow + self.alpha * (fast - slow)
        new_slow = op.Where(is_last > 0, merged, slow)
        return op.Where(is_last > 0, merged, fast), *next_slots, new_slow
