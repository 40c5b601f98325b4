"""Optimizers: from a weight, its gradient and its slots to the next weight and slots, as operators of the step graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from onnxfit.errors import SettingError
from onnxfit.graph.values import Op, Value
from onnxfit.schedules import Schedule

__all__ = ["SGD", "Optimizer"]

LearningRate = Union[float, Schedule, Callable[[int], float]]


@dataclass(frozen=True)
class Optimizer(ABC):
    r"""The base of every optimizer.

    `learning_rate`: a number, a Schedule, or a callable of the update's number counted from 0.
    `weight_decay` $\lambda \ge 0$: decoupled (Loshchilov & Hutter 2019), $w \leftarrow w - \eta\lambda w$ before the update; weights whose name matches a
    pattern of `exclude_from_weight_decay` are spared. For the coupled kind use `penalty=`.
    `learning_rate_multipliers`: pattern -> factor; the first pattern that matches a weight's name scales its learning rate.
    `ema_momentum` $m$ in (0, 1): keeps an average of each weight, $a \leftarrow m a + (1-m) w$, which `Trainer.export(averaged=True)` writes.
    """

    learning_rate: LearningRate = 0.01
    weight_decay: float = field(default=0.0, kw_only=True)
    exclude_from_weight_decay: tuple[str, ...] = field(default=(), kw_only=True)
    learning_rate_multipliers: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    ema_momentum: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.learning_rate) and not self.learning_rate >= 0:
            raise SettingError(f"{type(self).__name__} needs learning_rate >= 0, got {self.learning_rate}.")

    def slots(self, w: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """What this optimizer remembers for a weight: slot name -> value before the first update."""
        return {}

    @abstractmethod
    def update(self, op: Op, w: Value, g: Value, lr: Value, step: Value, *slots: Value) -> Value | tuple[Value, ...]:
        """The next weight, or (next weight, next slots in the order of `slots`).

        `lr` is a scalar of the weight's element type; `step` a float64 scalar, 1 for the first update (float64, so that
        `1 - beta**step` keeps its digits: cast what you make of it with `op.cast(..., w.dtype)`).
        """


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent."""

    def update(self, op: Op, w: Value, g: Value, lr: Value, step: Value, *slots: Value) -> Value | tuple[Value, ...]:
        return w - lr * g


def apply_update(
    op: Op,
    optimizer: Optimizer,
    weights: Mapping[str, Value],
    gradients: Mapping[str, Value],
    slots: Mapping[str, Mapping[str, Value]],
    lr: Value,
    step: Value,
) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """The next value of every weight and of every slot. `slots[name]` is in the order of `initial_slots(optimizer, name, w)`."""
    next_weights: dict[str, Value] = {}
    next_slots: dict[str, dict[str, Value]] = {}
    for name, w in weights.items():
        with op.scope(f"optimizer/{name}"):
            result = optimizer.update(op, w, gradients[name], op.cast(lr, w.dtype), step, *slots[name].values())
        new, *rest = result if isinstance(result, tuple) else (result,)
        next_weights[name] = new
        next_slots[name] = dict(zip(slots[name], rest))
    return next_weights, next_slots


def initial_slots(optimizer: Optimizer, name: str, w: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Slot name -> value before the first update, for the weight called `name` (the average of `ema_momentum` included, as `ema`)."""
    return {slot: np.asarray(value, w.dtype) for slot, value in optimizer.slots(w).items()}


def clip_gradients(op: Op, gradients: Mapping[str, Value], clip_norm: float | None, clip_value: float | None) -> dict[str, Value]:
    """Gradients clipped element by element to ±clip_value, then scaled so that their common L2 norm is at most clip_norm."""
    raise NotImplementedError
