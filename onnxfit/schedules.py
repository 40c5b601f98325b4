"""Learning-rate schedules: the learning rate as a function of the number of updates done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["Constant", "Schedule"]


@dataclass(frozen=True)
class Schedule(ABC):
    """The base of every schedule: `schedule(step)` is the learning rate of update number `step`, counted from 0."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 0."""


@dataclass(frozen=True)
class Constant(Schedule):
    """Always `learning_rate`."""

    learning_rate: float

    def __call__(self, step: int) -> float:
        return self.learning_rate
