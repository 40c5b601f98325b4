"""Running means of the losses and metrics, over an epoch or an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Union

import numpy as np
import numpy.typing as npt

from onnxfit.data import Batch
from onnxfit.errors import CheckpointError, OnnxfitError
from onnxfit.files import COUNT, FIGURE, LIST, MAPPING, list_of, mapping_of, require_types
from onnxfit.graph import names
from onnxfit.step.objectives import Objective, OutputMetric

# of the state of a Tracker, as a checkpoint keeps it
SUM_TYPES = {
    "rows": COUNT,
    "loss": list_of(FIGURE, 2),
    "parts": mapping_of(list_of(FIGURE, 2)),
    "metrics": mapping_of(MAPPING),
}
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
        self._resumes = False  # from sums of a checkpoint, to which no batch has been added yet
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
        """Go on from the sums that `state_dict` returned.

        CheckpointError, here or at the next update, for sums of another form.
        """
        place = "The tracker of the checkpoint"
        require_types(place, state, SUM_TYPES)
        require_types(f"{place}'s parts", state["parts"], dict.fromkeys(self._output_losses, LIST))
        metrics = {metric.name: metric for metric in self._metrics}
        require_types(f"{place}'s metrics", state["metrics"], dict.fromkeys(metrics, MAPPING))
        self.rows = state["rows"]
        self._loss.total, self._loss.weight = state["loss"]
        for output, mean in self._output_losses.items():
            mean.total, mean.weight = state["parts"][output]
        self._resumes = True
        for name, metric in metrics.items():
            with self._refusing(name), np.errstate(all="ignore"):
                metric.metric.load_state_dict(state["metrics"][name])
                metric.metric.result()

    @contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Raise CheckpointError where a metric cannot go on from the sums of a checkpoint."""
        try:
            yield
        except OnnxfitError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            if not self._resumes:
                raise
            raise CheckpointError(
                f"The metric {name!r} cannot go on from its sums in the checkpoint: {error}."
            ) from error

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
        predictions, arrays = result.prediction(), result.fed(batch)
        weight = arrays.get(names.SAMPLE_WEIGHT)
        for metric in self._metrics:
            labels = arrays[names.target(metric.output)]
            row_weights = weight if metric.metric.weighted else None
            with self._refusing(metric.name):
                metric.metric.update(labels, predictions[metric.output], row_weights)
        self._resumes = False

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
