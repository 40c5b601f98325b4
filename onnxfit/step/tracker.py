"""Running means of the loss, its parts and the metrics, over an epoch or an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Union

import numpy.typing as npt

from onnxfit.data import Batch
from onnxfit.graph import names
from onnxfit.step.objectives import Objective, OutputMetric

Figures = dict[str, Union[float, npt.NDArray[Any], Callable[[], float]]]


class StepResult(Protocol):
    """What a step tells of its batch: scalars by name, copies of the outputs, and the batch's
    arrays as they were fed.
    """

    @property
    def scalars(self) -> Mapping[str, npt.NDArray[Any]]: ...

    def prediction(self) -> dict[str, npt.NDArray[Any]]: ...

    def fed(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]: ...


class Mean:
    """A weighted mean that grows; NaN before the first value."""

    __slots__ = ("total", "weight")

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def add(self, value: float, weight: float) -> None:
        if weight:  # a batch in which every row is masked counts nothing
            self.total += value * weight
            self.weight += weight

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


class Tracker:
    """Adds up what every batch reports; the means are exact whatever the sizes of the batches."""

    def __init__(
        self, objectives: Mapping[str, Objective], metrics: Sequence[OutputMetric]
    ) -> None:
        self._weights = {output: objective.weight for output, objective in objectives.items()}
        self._several = len(objectives) > 1
        self._count = names.count(next(iter(objectives), ""))
        self._metrics = metrics
        self.reset()

    def reset(self) -> None:
        self.rows = 0
        # of the whole loss; with several outputs, of what is not theirs: the penalties
        self._loss = Mean()
        self._parts = {output: Mean() for output in self._weights} if self._several else {}
        for bound in self._metrics:
            bound.metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """What was added up so far, as numbers and arrays."""
        return {
            "rows": self.rows,
            "loss": [self._loss.total, self._loss.weight],
            "parts": {output: [mean.total, mean.weight] for output, mean in self._parts.items()},
            "metrics": {bound.name: bound.metric.state_dict() for bound in self._metrics},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.rows = int(state["rows"])
        self._loss.total, self._loss.weight = state["loss"]
        for output, mean in self._parts.items():
            mean.total, mean.weight = state["parts"][output]
        for bound in self._metrics:
            bound.metric.load_state_dict(state["metrics"][bound.name])

    def update(self, report: StepResult, batch: Batch) -> float:
        """Take in what the step reported of a batch; returns the batch's own loss."""
        scalars, rows = report.scalars, batch.rows
        self.rows += rows
        loss: float = scalars[names.TOTAL].item()
        if self._parts:
            rest = loss
            for output, mean in self._parts.items():
                part = scalars[names.part(output)].item()
                count = scalars.get(names.count(output))
                mean.add(part, rows if count is None else count.item())
                rest -= self._weights[output] * part
            self._loss.add(rest, rows)
        else:
            count = scalars.get(self._count)
            self._loss.add(loss, rows if count is None else count.item())
        if self._metrics:
            self._update_metrics(report, batch)
        return loss

    def _update_metrics(self, report: StepResult, batch: Batch) -> None:
        predictions, arrays = report.prediction(), report.fed(batch)
        weight = arrays.get(names.SAMPLE_WEIGHT)
        for bound in self._metrics:
            labels = arrays[names.target(bound.output)]
            bound.metric.update(
                labels, predictions[bound.output], weight if bound.metric.weighted else None
            )

    @property
    def loss(self) -> float:
        if not self._parts:
            return self._loss.value
        return self._loss.value + sum(
            self._weights[output] * mean.value
            for output, mean in self._parts.items()
            if mean.weight
        )

    def figures(self) -> Figures:
        """Name -> mean so far; metrics as functions, since some are dear and few are read in every
        batch.
        """
        figures: Figures = {"loss": self.loss}
        for output, mean in self._parts.items():
            figures[f"{output}_loss"] = mean.value
        for bound in self._metrics:
            if bound.metric.scalar:
                figures[bound.name] = bound.metric.result
        return figures

    def results(self) -> Figures:
        """Name -> figure over all that was seen."""
        return {**self.figures(), **{bound.name: bound.metric.result() for bound in self._metrics}}
