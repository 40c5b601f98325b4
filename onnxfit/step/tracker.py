"""Running means of the losses and metrics, over an epoch or an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Union

import numpy.typing as npt

from onnxfit.data import Batch
from onnxfit.graph import names
from onnxfit.step.objectives import Objective, OutputMetric
from onnxfit.step.read_only import explain_write, read_only

Figures = dict[str, Union[float, npt.NDArray[Any], Callable[[], float]]]


class StepResult(Protocol):
    """Result of a step: its scalars by name, copies of its outputs, and the arrays it was fed."""

    @property
    def scalars(self) -> Mapping[str, npt.NDArray[Any]]: ...

    def prediction(self) -> dict[str, npt.NDArray[Any]]: ...

    def fed(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]: ...


class Mean:
    """A running weighted mean; NaN before the first value."""

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
    """Running means over batches, exact whatever the sizes of the batches."""

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
        # the mean of the whole loss; with several outputs, of the penalties alone
        self._loss = Mean()
        outputs = self._weights if self._several else ()
        self._output_losses = {output: Mean() for output in outputs}
        for metric in self._metrics:
            metric.metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far, as numbers and arrays."""
        return {
            "rows": self.rows,
            "loss": [self._loss.total, self._loss.weight],
            "parts": {
                output: [mean.total, mean.weight] for output, mean in self._output_losses.items()
            },
            "metrics": {metric.name: metric.metric.state_dict() for metric in self._metrics},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the sums that `state_dict` returned."""
        self.rows = int(state["rows"])
        self._loss.total, self._loss.weight = state["loss"]
        for output, mean in self._output_losses.items():
            mean.total, mean.weight = state["parts"][output]
        for metric in self._metrics:
            metric.metric.load_state_dict(state["metrics"][metric.name])

    def update(self, result: StepResult, batch: Batch) -> float:
        """Add the result of a step on a batch, and return the loss of that batch."""
        scalars, rows = result.scalars, batch.rows
        self.rows += rows
        loss: float = scalars[names.TOTAL].item()
        if self._output_losses:
            rest = loss
            for output, mean in self._output_losses.items():
                output_loss = scalars[names.output_loss(output)].item()
                count = scalars.get(names.count(output))
                mean.add(output_loss, rows if count is None else count.item())
                rest -= self._weights[output] * output_loss
            self._loss.add(rest, rows)
        else:
            count = scalars.get(self._count)
            self._loss.add(loss, rows if count is None else count.item())
        if self._metrics:
            self._update_metrics(result, batch)
        return loss

    def _update_metrics(self, result: StepResult, batch: Batch) -> None:
        """Update every metric; they share their arguments, which therefore cannot be written."""
        predictions, arrays = result.prediction(), result.fed(batch)
        weight = arrays.get(names.SAMPLE_WEIGHT)
        for metric in self._metrics:
            labels = read_only(arrays[names.target(metric.output)])
            outputs = read_only(predictions[metric.output])
            row_weights = None
            if metric.metric.weighted and weight is not None:
                row_weights = read_only(weight)
            try:
                metric.metric.update(labels, outputs, row_weights)
            except ValueError as error:
                explain_write(error, f"Metric {metric.name!r} changes its arguments")
                raise

    @property
    def loss(self) -> float:
        if not self._output_losses:
            return self._loss.value
        return self._loss.value + sum(
            self._weights[output] * mean.value
            for output, mean in self._output_losses.items()
            if mean.weight
        )

    def figures(self) -> Figures:
        """Return name -> mean so far.

        Metrics are functions that compute it, since some are slow and few are read in each batch.
        """
        figures: Figures = {"loss": self.loss}
        for output, mean in self._output_losses.items():
            figures[f"{output}_loss"] = mean.value
        for metric in self._metrics:
            if metric.metric.scalar:
                figures[metric.name] = metric.metric.result
        return figures

    def results(self) -> Figures:
        """Return name -> figure, the metrics computed."""
        metrics = {metric.name: metric.metric.result() for metric in self._metrics}
        return {**self.figures(), **metrics}
