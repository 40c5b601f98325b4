"""Running figures of the losses and metrics, over an epoch or an evaluation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Union

import numpy as np
import numpy.typing as npt

from onnxfit.data import Batch
from onnxfit.errors import CheckpointError, OnnxfitError
from onnxfit.files import COUNT, FIGURE, LIST, MAPPING, list_of, mapping_of, require_types
from onnxfit.graph import names
from onnxfit.metrics.alignment import each_array
from onnxfit.step.objectives import Objective, OutputMetric
from onnxfit.step.read_only import read_only, refusing_writes

# of the state of a Tracker in a checkpoint
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

    def inputs_of(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]: ...


class Mean:
    """A running weighted mean; NaN before the first value."""

    __slots__ = ("total", "weight")

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def add(self, value: float, weight: float) -> None:
        if weight:  # a batch with only masked rows does not count
            self.total += value * weight
            self.weight += weight

    def add_sums(self, total: float, weight: float) -> None:
        """Add the sums of another mean."""
        self.total += total
        self.weight += weight

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan


class Sum(Mean):
    """A running sum; NaN before the first value."""

    __slots__ = ()

    def add(self, value: float, weight: float) -> None:
        if weight:  # the loss of no rows may be NaN
            self.total += value
            self.weight += weight

    @property
    def value(self) -> float:
        return self.total if self.weight else math.nan


# Rows, sums of the means, attributes of the metrics, and lists in them with their lengths.
Savepoint = tuple[int, list[tuple[float, float]], list[dict[str, Any]], list[tuple[list[Any], int]]]


def _rows_of_output(output: str, batch: Batch) -> int:
    """Return the rows of an output, which are those of its labels where inputs have no rows."""
    for name, array in batch.scalars:
        if name == names.target(output):
            return len(array)
    return batch.rows


class Tracker:
    """Running figures over batches, exact for any batch sizes.

    A loss of `reduction="sum"` is the sum over all rows, every other loss a mean. A penalty counts
    once, as its mean over the rows.
    """

    def __init__(
        self, objectives: Mapping[str, Objective], metrics: Sequence[OutputMetric]
    ) -> None:
        self._several = len(objectives) > 1
        # The loss of a single output includes its weight; "" is the model's own loss.
        self._weights = {next(iter(objectives), ""): 1.0}
        if self._several:
            self._weights = {output: one.weight for output, one in objectives.items()}
        self._sums = {name for name, one in objectives.items() if one.loss.reduction == "sum"}
        self._learned = [o for o, one in objectives.items() if one.log_variance is not None]
        self._counts = {output: names.count(output) for output in self._weights}
        self._losses = {output: one.loss for output, one in objectives.items()}
        self._metrics = metrics
        self.reset()

    def reset(self) -> None:
        self._reset_losses()
        self.gradient_norms: dict[str, float] = {}  # the norms that the last step reported
        self._resumes = False  # from sums of a checkpoint, before the first batch
        for metric in self._metrics:
            metric.metric.reset()

    def _reset_losses(self) -> None:
        self.rows = 0
        self._penalty = Mean()  # only if the step reports the penalty separately
        self._output_losses = {o: Sum() if o in self._sums else Mean() for o in self._weights}
        # the losses times their learned factors, which every step changes
        self._terms = {o: Sum() if o in self._sums else Mean() for o in self._learned}

    def savepoint(self) -> Savepoint:
        """Return the present sums for `restore`, after a failed update.

        A metric that changes an array in place keeps the change.
        """
        means = [(mean.total, mean.weight) for mean in self._all_means()]
        states = [vars(metric.metric).copy() for metric in self._metrics]
        lists = [value for state in states for value in state.values() if type(value) is list]
        return self.rows, means, states, [(value, len(value)) for value in lists]

    def restore(self, savepoint: Savepoint) -> None:
        """Restore the sums at a savepoint."""
        self.rows, means, states, lengths = savepoint
        for mean, (total, weight) in zip(self._all_means(), means):
            mean.total, mean.weight = total, weight
        for metric, state in zip(self._metrics, states):
            vars(metric.metric).update(state)
        for value, length in lengths:
            del value[length:]

    def _all_means(self) -> list[Mean]:
        return [self._penalty, *self._output_losses.values(), *self._terms.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far, as numbers and arrays."""
        losses = {o: [mean.total, mean.weight] for o, mean in self._output_losses.items()}
        penalty = [self._penalty.total, self._penalty.weight]
        return {
            "rows": self.rows,
            "loss": penalty if self._several else next(iter(losses.values())),
            "parts": losses if self._several else {},
            "penalty": penalty,
            "terms": {o: [mean.total, mean.weight] for o, mean in self._terms.items()},
            "metrics": {metric.name: metric.metric.state_dict() for metric in self._metrics},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums that `state_dict` returned.

        CheckpointError, here or at the next update: the sums have another form.
        """
        sums = self._checked_sums(state, "The tracker of the checkpoint")
        self._reset_losses()
        self._add_sums(*sums)
        self._resumes = True
        for metric in self._metrics:
            with self._as_checkpoint_error(metric.name), np.errstate(all="ignore"):
                metric.metric.load_state_dict(state["metrics"][metric.name])
                metric.metric.result()

    def merged(self, states: Sequence[Mapping[str, Any]]) -> Tracker:
        """Return a new tracker with the figures of all batches of several trackers.

        With it, processes that train on shares of the rows compute the figures of all rows. This
        tracker stays unchanged, and supplies the norms of the gradients.

        - `states`: the `state_dict` of the tracker of each process, this one included. The trackers
          have the same losses and metrics; a tracker without rows adds nothing.

        UnsupportedError: a metric has no `merge`. The check needs no states, so `merged([])` makes
        it before training. CheckpointError: the sums of a state have another form.
        """
        whole = copy.copy(self)
        whole._metrics = [metric.copy() for metric in self._metrics]
        whole.reset()
        whole.gradient_norms = dict(self.gradient_norms)
        for state in states:
            whole._add_sums(*whole._checked_sums(state, "The tracker of a process"))
        for metric in whole._metrics:
            metric.metric.merge([state["metrics"][metric.name] for state in states])
        return whole

    def _checked_sums(
        self, state: Mapping[str, Any], place: str
    ) -> tuple[int, list[float], Mapping[str, list[float]], Mapping[str, list[float]]]:
        """Return the rows of a state, and the sums of its penalty, of its losses, and of losses
        times learned factors. CheckpointError: the sums have another form; the message has `place`
        as the name of the state.
        """
        require_types(place, state, SUM_TYPES)
        state = {"penalty": [0.0, 0.0], **state}  # checkpoints of older versions have no penalty
        require_types(place, state, {"penalty": list_of(FIGURE, 2)})
        parts = state["parts"] if self._several else dict.fromkeys(self._weights, state["loss"])
        require_types(f"{place}'s parts", parts, dict.fromkeys(self._output_losses, LIST))
        metrics = {metric.name: MAPPING for metric in self._metrics}
        require_types(f"{place}'s metrics", state["metrics"], metrics)
        terms = state.get("terms", {})
        require_types(f"{place}'s terms", terms, dict.fromkeys(self._terms, list_of(FIGURE, 2)))
        return state["rows"], state["loss"] if self._several else state["penalty"], parts, terms

    def _add_sums(
        self,
        rows: int,
        penalty: list[float],
        losses: Mapping[str, list[float]],
        terms: Mapping[str, list[float]],
    ) -> None:
        self.rows += rows
        self._penalty.add_sums(*penalty)
        for output, mean in self._output_losses.items():
            mean.add_sums(*losses[output])
        for output, mean in self._terms.items():
            mean.add_sums(*terms[output])

    @contextmanager
    def _as_checkpoint_error(self, name: str) -> Iterator[None]:
        """Raise CheckpointError if a metric cannot restore its sums from a checkpoint."""
        try:
            yield
        except OnnxfitError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            if not self._resumes:
                raise
            raise CheckpointError(
                f"The metric {name!r} cannot restore its state from the checkpoint: {error}."
            ) from error

    def update(self, result: StepResult, batch: Batch) -> float:
        """Add the result of a step on a batch, and return the loss of that batch."""
        scalars, rows = result.scalars, batch.rows
        if self._metrics:  # first, because user code may fail
            self._update_metrics(result, batch)
        self.rows += rows
        loss: float = scalars[names.TOTAL].item()
        penalty = 0.0
        if names.PENALTY in scalars:
            penalty = scalars[names.PENALTY].item()
            self._penalty.add(penalty, rows)
        for output, mean in self._output_losses.items():
            value = loss - penalty
            if self._several:
                value = scalars[names.output_loss(output)].item()
            count = scalars.get(self._counts[output])
            weight = _rows_of_output(output, batch) if count is None else count.item()
            mean.add(value, weight)
            if output in self._terms:
                self._terms[output].add(scalars[names.weighted_loss(output)].item(), weight)
        return loss

    def _update_metrics(self, result: StepResult, batch: Batch) -> None:
        """Update every metric, by the sums that the step has computed, or by the outputs."""
        sums: dict[str, dict[str, float]] = {}
        for name, value in result.scalars.items():
            found = names.metric_of_sum(name)
            if found is not None:
                sums.setdefault(found[0], {})[found[1]] = value.item()
        for metric in self._metrics:
            if metric.name in sums:
                with self._as_checkpoint_error(metric.name):
                    metric.metric.add_sums(sums[metric.name])
        others = [metric for metric in self._metrics if metric.name not in sums]
        if others:
            self._update_by_outputs(others, result, batch)
        self._resumes = False

    def _update_by_outputs(
        self, metrics: Sequence[OutputMetric], result: StepResult, batch: Batch
    ) -> None:
        """Update metrics. They share their arguments, which are therefore read-only."""
        predictions, arrays = result.prediction(), result.inputs_of(batch)
        for metric in metrics:
            weights = names.weight_of(metric.output, arrays)
            if metric.labels is None:
                loss, target = self._losses[metric.output], names.target(metric.output)
                labels: Any
                labels, weights = loss.metric_labels(arrays[target], weights)
            else:
                targets = {name: names.target(metric.output, name) for name in metric.labels}
                labels = {name: arrays[target] for name, target in targets.items()}
            labels = each_array(read_only, labels)
            # A scalar is the output of the only row.
            found = {n: read_only(np.atleast_1d(predictions[n])) for n in metric.reads}
            outputs: Any = found[metric.output] if metric.outputs is None else found
            row_weights = None
            if metric.metric.weighted and weights is not None:
                row_weights = read_only(weights)
            change = f"Metric {metric.name!r} changes its arguments"
            with self._as_checkpoint_error(metric.name), refusing_writes(change):
                metric.metric.update(labels, outputs, row_weights)

    @property
    def has_counted(self) -> bool:
        """Whether any label has counted; False if all are masked."""
        return any(mean.weight for mean in self._output_losses.values())

    @property
    def loss(self) -> float:
        """The loss over the batches so far, with the penalty; NaN before the first."""
        total, counted = 0.0, False
        for output, mean in self._output_losses.items():
            if mean.weight:
                total += self._weights[output] * self._terms.get(output, mean).value
                counted = True
        if not counted:
            return math.nan
        return total + self._penalty.value if self._penalty.weight else total

    def figure_names(self) -> list[str]:
        """Return the names of all figures that are numbers at the end of an epoch."""
        metrics = [name for metric in self._metrics for name in metric.figures]
        return list(dict.fromkeys([*self.figures(), *metrics]))

    def figures(self) -> Figures:
        """Return a mapping from name to the mean so far.

        Metrics are functions that compute it, because some are slow and few are read in each batch.
        """
        figures: Figures = {"loss": self.loss}
        for output, mean in self._output_losses.items() if self._several else ():
            figures[f"{output}_loss"] = mean.value
        for metric in self._metrics:
            if metric.metric.running:
                figures.update(metric.figures)
        return figures

    def results(self) -> Figures:
        """Return a mapping from name to figure, with the metrics computed."""
        results = self.figures()
        for metric in self._metrics:
            figure = metric.metric.result()
            if metric.metric.figure_names:
                results.update(zip(metric.figures, figure.tolist()))
            else:
                results[metric.name] = figure
        return results
