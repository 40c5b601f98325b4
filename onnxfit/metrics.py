"""Metrics: figures about predictions, exact over the data set, not averaged over batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy.typing as npt

__all__ = ["Metric"]


@dataclass
class Metric(ABC):
    """The base of every metric: `reset`, then `update` per batch, then `result`.

    Fields are settings; what is remembered between batches is set by `reset`. `weighted=True` counts every row by its sample weight
    (and puts `weighted_` before the name); `name` overrides the name under which it is logged. `mode` says which way is better.
    """

    mode: ClassVar[str] = "min"

    weighted: bool = field(default=False, kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Forget every batch."""

    @abstractmethod
    def update(self, y_true: npt.NDArray[Any], y_pred: npt.NDArray[Any], sample_weight: npt.NDArray[Any] | None = None) -> None:
        """Take in a batch."""

    @abstractmethod
    def result(self) -> Any:
        """The figure over all batches since `reset`: a float (an array for a confusion matrix)."""
