"""Which output has which loss and which metrics."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import numpy.typing as npt

from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.graph import names
from onnxfit.graph.spec import TensorSpec
from onnxfit.losses import Loss, LossLike, get_loss
from onnxfit.metrics import Metric, MetricLike, get_metric

Losses = Union[LossLike, Mapping[str, LossLike], None]
Metrics = Union[MetricLike, Sequence[MetricLike], Mapping[str, Union[MetricLike, Sequence[MetricLike]]], None]


@dataclass(frozen=True)
class Objective:
    """One output's loss and what it counts in the sum."""

    loss: Loss
    weight: float = 1.0


@dataclass(frozen=True)
class Target:
    """An output that has labels: where they enter the graph, and how its loss wants them."""

    output: TensorSpec
    loss: Loss

    @property
    def input(self) -> str:
        return names.target(self.output.name)

    def prepare(self, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self.loss.prepare(y, self.output)


@dataclass(frozen=True)
class OutputMetric:
    """A metric, the output it looks at, and the name it is logged under."""

    name: str
    output: str
    metric: Metric

    @property
    def mode(self) -> str:
        return self.metric.mode

    def copy(self) -> OutputMetric:
        """The same metric with a memory of its own, so that an evaluation inside an epoch leaves the epoch's figures alone."""
        metric = copy.copy(self.metric)
        metric.reset()
        return replace(self, metric=metric)


def get_objectives(
    loss: Losses, loss_weights: Mapping[str, float] | None, outputs: Mapping[str, TensorSpec]
) -> dict[str, Objective]:
    """A loss per output that has one, in the model's order."""
    if loss is None:
        if loss_weights:
            raise SettingError("loss_weights needs a dict of losses; with loss=None the model's own output counts.")
        own = outputs.get(names.LOSS)
        if own is None or own.shape not in ((), (1,)):
            found = ", ".join(map(str, outputs.values()))
            raise SettingError(
                f"loss=None needs a model with a scalar output {names.LOSS!r}; its outputs are {found}. Name a loss."
            )
        return {}
    if not isinstance(loss, Mapping):
        if len(outputs) > 1:
            raise SettingError(
                f"The model has {len(outputs)} outputs ({', '.join(outputs)}): say which has which loss, loss={{{next(iter(outputs))!r}: ...}}."
            )
        loss = dict.fromkeys(outputs, loss)
    weights = dict(loss_weights or {})
    for name in (*loss, *weights):
        if name not in outputs:
            raise UnknownNameError("output", name, outputs)
    return {name: Objective(get_loss(loss[name]), float(weights.get(name, 1.0))) for name in outputs if name in loss}


def get_output_metrics(metrics: Metrics, outputs: list[str]) -> list[OutputMetric]:
    """Every metric bound to its output; with several outputs its name begins with the output's."""
    if isinstance(metrics, Mapping):
        for name in metrics:
            if name not in outputs:
                raise UnknownNameError("output with a loss", name, outputs)
        chosen = {name: _listed(metrics[name]) for name in outputs if name in metrics}
    else:
        chosen = {name: _listed(metrics) for name in outputs} if metrics else {}
        if metrics and not outputs:
            raise SettingError("metrics compare outputs with labels; with loss=None there are none.")
    bound = []
    for output, entries in chosen.items():
        for entry in entries:
            metric = get_metric(entry)
            bound.append(OutputMetric(metric.name if len(outputs) == 1 else f"{output}_{metric.name}", output, metric))
    taken = [m.name for m in bound]
    for name in taken:
        if taken.count(name) > 1:
            raise SettingError(f"Two metrics are called {name!r}: give one another name, such as Accuracy(name='...').")
    return bound


def _listed(metrics: Any) -> list[MetricLike]:
    return list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
