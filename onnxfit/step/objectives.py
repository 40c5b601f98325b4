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
Metrics = Union[
    MetricLike, Sequence[MetricLike], Mapping[str, Union[MetricLike, Sequence[MetricLike]]], None
]


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
        """The same metric with a memory of its own, so that an evaluation inside an epoch leaves
        the epoch's figures alone.
        """
        metric = copy.copy(self.metric)
        metric.reset()
        return replace(self, metric=metric)


def get_objectives(
    loss: Losses,
    loss_weights: Mapping[str, float] | None,
    outputs: Mapping[str, TensorSpec],
    *,
    needed: bool = True,
) -> dict[str, Objective]:
    """A loss per output that has one, in the model's order;

    `needed=False` lets a model do without any.
    """
    if loss is None:
        if loss_weights:
            raise SettingError(
                "loss_weights needs a dict of losses; with loss=None the model's own output counts."
            )
        own = outputs.get(names.LOSS)
        if own is None and not needed:
            return {}
        if own is None or own.shape not in ((), (1,)):
            found = ", ".join(map(str, outputs.values()))
            raise SettingError(
                f"loss=None needs a model with a scalar output {names.LOSS!r}; its outputs are"
                f" {found}. Name a loss."
            )
        return {}
    if not isinstance(loss, Mapping):
        floats = {name: spec for name, spec in outputs.items() if spec.dtype.kind == "f"}
        if len(floats) == 1:  # classifiers of other libraries give the class, too
            outputs = floats
        if len(outputs) > 1:
            raise SettingError(
                f"The model has {len(outputs)} outputs ({', '.join(outputs)}): say which has which"
                f" loss, loss={{{next(iter(outputs))!r}: ...}}."
            )
        loss = dict.fromkeys(outputs, loss)
    if loss_weights is not None and not isinstance(loss_weights, Mapping):
        raise SettingError(f"loss_weights is a dict output name -> number, got {loss_weights!r}.")
    if len(loss) > 1 and "val" in loss:
        raise SettingError(
            "An output called 'val' cannot have a loss beside others: 'val_loss' is the validation"
            " loss."
        )
    weights = dict(loss_weights or {})
    for name in (*loss, *weights):
        if name not in outputs:
            raise UnknownNameError("output", name, outputs)
    return {
        name: Objective(get_loss(loss[name]), float(weights.get(name, 1.0)))
        for name in outputs
        if name in loss
    }


def get_output_metrics(metrics: Metrics, objectives: Mapping[str, Objective]) -> list[OutputMetric]:
    """Every metric bound to its output; with several outputs its name begins with the output's.

    A metric given by name takes outputs as logits where their loss does.
    """
    outputs = list(objectives)
    from_logits = {
        output: getattr(objective.loss, "from_logits", False)
        for output, objective in objectives.items()
    }
    if isinstance(metrics, Mapping):
        for name in metrics:
            if name not in outputs:
                raise UnknownNameError("output with a loss", name, outputs)
        chosen = {name: _listed(metrics[name]) for name in outputs if name in metrics}
    else:
        chosen = {name: _listed(metrics) for name in outputs} if metrics else {}
        if metrics and not outputs:
            raise SettingError(
                "metrics compare outputs with labels; with loss=None there are none."
            )
    bound = []
    for output, entries in chosen.items():
        for entry in entries:
            metric = get_metric(entry)
            if (
                isinstance(entry, str)
                and from_logits.get(output)
                and hasattr(metric, "from_logits")
            ):
                # the loss says what the output is
                metric = replace(metric, from_logits=True)  # type: ignore[call-arg]
            bound.append(
                OutputMetric(
                    metric.name if len(outputs) == 1 else f"{output}_{metric.name}", output, metric
                )
            )
    reserved = (
        {"loss", "batch_loss", "learning_rate", *(f"{output}_loss" for output in outputs)}
        if len(outputs) > 1
        else {"loss", "batch_loss", "learning_rate"}
    )
    taken = [m.name for m in bound]
    for name in taken:
        if name in reserved or name.startswith("val_"):
            raise SettingError(
                f"A metric cannot be called {name!r}, the name of another figure: give it another"
                " one, such as Accuracy(name='...')."
            )
        if taken.count(name) > 1:
            raise SettingError(
                f"Two metrics are called {name!r}: give one another name, such as"
                " Accuracy(name='...')."
            )
    return bound


def _listed(metrics: Any) -> list[MetricLike]:
    return list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
