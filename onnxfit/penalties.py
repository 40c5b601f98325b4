"""Penalties: what large weights cost, added to the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from onnxfit.errors import SettingError
from onnxfit.graph.values import Op, Value

__all__ = ["L2", "Penalty"]


@dataclass(frozen=True)
class Penalty(ABC):
    """The base of every penalty: from one weight to a scalar."""

    @abstractmethod
    def __call__(self, op: Op, w: Value) -> Value:
        """What this weight costs, shape `()`."""


@dataclass(frozen=True)
class L2(Penalty):
    r"""$\lambda \sum w^2$, with $\lambda \ge 0$; its gradient is $2 \lambda w$."""

    weight: float = 0.01

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise SettingError(f"L2 needs weight >= 0, got {self.weight}.")

    def __call__(self, op: Op, w: Value) -> Value:
        return self.weight * op.ReduceSumSquare(w, keepdims=0)
