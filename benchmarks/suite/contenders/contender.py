"""What every contender is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

from workloads import COMPARED_STEPS, Array, Job

Step = Callable[[Array, Array], Any]


class Refused(Exception):
    """Why a contender does not train a workload."""


def nothing() -> None:
    """The callback of ours that every `fit` calls after each batch."""


class Contender(ABC):
    """One way to train.

    `load` imports, `build` makes everything for a job from the job's weights; both are timed.
    """

    remark = ""  # for the table, where a build does less than the contender's title says

    @abstractmethod
    def load(self) -> None:
        """Import the library; ImportError where it is not installed."""

    @abstractmethod
    def build(self, job: Job) -> None:
        """Forget the last job and get ready for this one. Refused where that cannot be done."""

    @abstractmethod
    def losses(self) -> list[float]:
        """Of the first steps, each before its update; asked for once, right after `build`."""

    def step(self) -> Callable[[], object] | None:
        """What makes one bare step, on batches that are ready;

        None where the library has no such thing.
        """
        return None

    @abstractmethod
    def fit(self, epochs: int, on_batch: Callable[[], None]) -> None:
        """Whole epochs: shuffled, with accuracy where there are classes, a history, and a callback
        after each batch.
        """


def over(step: Step, batches: Sequence[tuple[Any, Any]]) -> Callable[[], object]:
    """Calls `step` with one batch after the other, for ever."""
    after = cycle(batches).__next__
    return lambda: step(*after())


def first_losses(step: Step, batches: Sequence[tuple[Any, Any]]) -> list[float]:
    return [float(step(x, y)) for _, (x, y) in zip(range(COMPARED_STEPS), cycle(batches))]
