"""The loss and the metrics of each output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, ClassVar, Union

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.checks import set_field
from onnxfit.errors import DataError, SettingError, UnknownNameError, listed_names
from onnxfit.graph import names, scopes
from onnxfit.graph.labels import AllowedLabels, declared_labels, refuse_where
from onnxfit.graph.model import spec_of, tensor_outputs
from onnxfit.graph.probabilities import LogitsDecision, decide_logits
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.load.batch_axis import ValueLayout
from onnxfit.losses import NLL, ClassLoss, Joint, Loss, UncertaintyWeights, get_loss
from onnxfit.losses.base import loss_name
from onnxfit.losses.lookup import LossLike
from onnxfit.metrics import Metric, get_metric
from onnxfit.metrics.alignment import class_axes
from onnxfit.metrics.lookup import MetricLike
from onnxfit.registry import is_newest
from onnxfit.step.limits import check_fits, check_loss_weight
from onnxfit.step.loss_weights import add_initializer, add_loss_weights
from onnxfit.step.read_only import read_only, refusing_writes

Losses = Union[LossLike, Mapping[str, LossLike], None]
Metrics = Union[
    MetricLike, Sequence[MetricLike], Mapping[str, Union[MetricLike, Sequence[MetricLike]]], None
]
LossWeights = Union[Mapping[str, float], UncertaintyWeights, None]
JOINT = "joint"  # the name of the only loss of a model, if it is a Joint
LOG_VARIANCE = "log_variance"


@dataclass(frozen=True)
class Objective:
    """A loss, its weight in the sum, and the outputs of the model that it reads.

    `reads` has the outputs: the one of the objective's name, or those of a `Joint`. `decision`
    tells whether the loss reads the output as logits, for a loss with `from_logits`; the loss has
    the decision as its setting. `is_explained` tells whether the graph shows what the output is, if
    that matters to the loss. `weights` maps the tensors that the loss trains to the outputs with
    which it reads them. `log_variance` is the output with the logarithm of its learned variance.
    """

    loss: Loss
    weight: float = 1.0
    decision: LogitsDecision | None = None
    is_explained: bool = True
    reads: tuple[str, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    log_variance: str | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """All outputs that the loss reads, those with its own tensors included."""
        learned = () if self.log_variance is None else (self.log_variance,)
        return (*self.reads, *self.weights.values(), *learned)


@dataclass(frozen=True)
class DeclaredTarget:
    """Labels that a loss declares.

    - `spec`: their input of the graph.
    - `owner`: the name of the loss and of the labels, for messages.
    - `allowed`: the numbers that the loss accepts.
    """

    spec: TensorSpec
    owner: str
    allowed: AllowedLabels
    is_declared: ClassVar[bool] = True

    @property
    def input(self) -> str:
        return self.spec.name

    def prepare(self, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
        labels = declared_labels(self.owner, y, self.spec)
        if self.allowed.values is not None:
            numbers = ", ".join(f"{value:g}" for value in self.allowed.values)
            wrong = ~np.isin(labels, self.allowed.values)
            refuse_where(self.owner, labels, wrong, f"one of the labels {numbers}", self.spec)
        return labels


@dataclass(frozen=True)
class OutputTarget:
    """An output with labels: their input of the graph, and the form that the loss expects.

    `batch` is the batch axis of the output in the file, if that is known.
    """

    output: TensorSpec
    loss: Loss
    batch: ValueLayout | None = None

    @cached_property
    def input(self) -> str:
        return names.target(self.output.name)

    @cached_property
    def spec(self) -> TensorSpec:
        """The labels as the graph reads them."""
        expected = self.loss.target(self.output)
        return TensorSpec(self.input, expected.dtype, expected.shape)

    @property
    def allowed(self) -> AllowedLabels:
        """The labels that the graph expects, for other hosts."""
        return self.loss.allowed_labels(self.output)

    @cached_property
    def keeps_finite(self) -> bool:
        """Whether `prepare` accepts all finite labels, and returns those of the right type
        unchanged."""
        return type(self.loss).prepare is Loss.prepare and self.loss.label_range == Loss.label_range

    def hint(self, rows: int, shape: Sequence[int]) -> str:
        """Return advice for labels that have another number of rows than the inputs.

        The batch axis of the output may be the reason if no name determines it, or if the file
        declares it wrongly. Labels for one row then often are an array of the output's own shape.

        - `rows`: the rows of the inputs.
        - `shape`: the shape of the labels. If one of its other sizes is the number of rows, or
          none, the advice has the axis.
        """
        found, name = self.batch, self.output.name
        if found is None or (rows > 1 and found.evidence not in ("position", "assumed")):
            return ""
        place = "No axis" if found.axis is None else f"Axis {found.axis}"
        axes = [n for n, size in enumerate(shape) if size == rows and n != found.axis]
        axis = "axis" if len(axes) > 1 else axes[0] if axes else None
        return (
            f" {place} is taken as the batch of {name!r} ({found.reason}). If that is wrong, pass"
            f" Trainer(batch_axes={{{name!r}: {axis}}}), or None for no batch. Labels have the rows"
            " first."
        )

    def prepare(self, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
        with refusing_writes(f"{type(self.loss).__name__}.prepare changes the labels"):
            try:
                return self.loss.prepare(read_only(y), self.output)
            except DataError as error:
                expected = self.loss.target(self.output).rank
                hint = self.hint(len(y), y.shape) if expected not in (None, y.ndim) else ""
                raise DataError(f"{error}{hint}") from None


LabelTarget = Union[OutputTarget, DeclaredTarget]


@dataclass(frozen=True)
class OutputMetric:
    """A metric, the objective whose labels and outputs it reads, and its name in logs.

    - `output`: the name of the objective, which is that of its output unless it is a `Joint`.
    - `labels`, `outputs`: the names of several arrays, for a metric of dicts; None for one array.
    """

    name: str
    output: str
    metric: Metric
    labels: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None

    @property
    def mode(self) -> str:
        return self.metric.mode

    @property
    def figures(self) -> dict[str, Callable[[], float]]:
        """The figures in logs: name -> the function that computes the figure."""
        if names := self.metric.figure_names:
            result = cache(self.metric.result)  # once for all of its entries
            entries = [partial(_result_at, result, index) for index in range(len(names))]
            return {f"{self.name}_{name}": entry for name, entry in zip(names, entries)}
        return {self.name: self.metric.result} if self.metric.scalar else {}

    @property
    def reads(self) -> tuple[str, ...]:
        """The outputs of the model that the metric reads."""
        return (self.output,) if self.outputs is None else self.outputs

    def sums(
        self, op: GraphBuilder, loss: Loss, y_true: Value, y_pred: Value, weight: Value | None
    ) -> Mapping[str, Value] | None:
        """Return attribute of the metric -> what a batch adds to it, as `Metric.sums` does; None
        where the metric reads the outputs themselves.

        - `loss`: the loss of the output, which says how metrics see the labels.
        - `weight`: the sample weights of a batch, if it has some.
        """
        if not is_newest(type(loss), "metric_labels_in_graph", "metric_labels"):
            return None
        if not is_newest(type(self.metric), "sums", "update", "reset"):
            return None
        labels, weights = loss.metric_labels_in_graph(op, y_true, weight)
        return self.metric.sums(op, labels, y_pred, weights if self.metric.weighted else None)

    def copy(self) -> OutputMetric:
        """Return the same metric with its own sums: an evaluation inside an epoch does not change
        the epoch's figures.
        """
        metric = copy.copy(self.metric)
        metric.reset()
        return replace(self, metric=metric)


def _result_at(result: Callable[[], npt.NDArray[Any]], index: int) -> float:
    return float(result()[index])


# ---------------------------------------------------------------------- losses


def label_names(objectives: Mapping[str, Objective]) -> dict[str, list[str]]:
    """Return objective -> the names of its labels, as data and graphs have them.

    A single array has the name of the objective, several arrays "objective/label".
    """
    names_of = {}
    for name, objective in objectives.items():
        declared = objective.loss.declared
        labels = [""] if declared is None else declared
        names_of[name] = [f"{name}/{label}" if label else name for label in labels]
    return names_of


def outputs_read(objectives: Mapping[str, Objective]) -> list[str]:
    """Return the outputs that objectives read."""
    return list(dict.fromkeys(name for one in objectives.values() for name in one.outputs))


def get_targets(
    objectives: Mapping[str, Objective],
    outputs: Mapping[str, TensorSpec],
    layouts: Mapping[str, ValueLayout] | None = None,
) -> dict[str, LabelTarget]:
    """Return name -> the labels that a batch needs.

    - `outputs`: the specs of the outputs that objectives read.
    - `layouts`: the batch axes of outputs in the file.
    """
    targets: dict[str, LabelTarget] = {}
    for name, labels in label_names(objectives).items():
        loss = objectives[name].loss
        if loss.declared is None:
            spec = outputs[name].with_rows()
            targets[name] = OutputTarget(spec, loss, (layouts or {}).get(name))
            continue
        for label, spec in zip(labels, loss.declared.values()):
            owner = f"{loss_name(loss)} of {name!r}"
            allowed = loss.allowed_labels(spec)
            targets[label] = DeclaredTarget(replace(spec, name=names.target(label)), owner, allowed)
    return targets


def get_objectives(
    loss: Losses,
    loss_weights: LossWeights,
    model: ir.Model,
    *,
    needed: bool = True,
    seed: int = 0,
) -> dict[str, Objective]:
    """Return output -> Objective for the outputs that have a loss, in the model's order, and then
    the name of each `Joint` -> Objective.

    With `loss=None` the result is empty, and the model has its own scalar output `loss`; with
    `needed=False` it may lack this output. Values that a `Joint` reads become outputs of `model`,
    with names for which `names.is_read` is true. The tensors that losses train become initializers
    and such outputs; `seed` decides their random initial values.
    """
    outputs = tensor_outputs(model)
    if loss is None:
        _check_own_loss(outputs, loss_weights, needed)
        return {}
    if isinstance(loss, Joint):
        loss = {JOINT: loss}
    elif not isinstance(loss, Mapping):
        outputs = _only_output(outputs)
        loss = dict.fromkeys(outputs, loss)
    joint = {name: one for name, one in loss.items() if isinstance(one, Joint)}
    weights = _fixed_weights(loss, loss_weights, [*joint, *outputs])
    values = {value.name: value for value in model.graph.outputs}
    objectives = {}
    for name, output in outputs.items():
        if name in loss and name not in joint:
            weight = check_loss_weight(weights.get(name, 1.0), output.dtype, name)
            objectives[name] = _objective(get_loss(loss[name]), weight, values[name])
            check_fits(objectives[name].loss, output.dtype, f"output {name!r}")
    for name, one in joint.items():
        _check_joint_name(name, one)
        reads = _read_outputs(model, one)
        weight = check_loss_weight(weights.get(name, 1.0), np.dtype(np.float32), name)
        objectives[name] = Objective(copy.copy(one), weight, reads=reads)
    learned = loss_weights if isinstance(loss_weights, UncertaintyWeights) else None
    return _with_tensors(objectives, learned, model, seed)


def _with_tensors(
    objectives: Mapping[str, Objective],
    learned: UncertaintyWeights | None,
    model: ir.Model,
    seed: int,
) -> dict[str, Objective]:
    """Return the objectives with the tensors that they train, which become initializers.

    - `learned`: the weights of the losses, if they are learned.
    """
    if learned is not None and len(objectives) < 2:
        raise SettingError(
            f"UncertaintyWeights weighs several losses against each other, got {len(objectives)}."
            " Pass a loss for each of several outputs, or remove loss_weights=."
        )
    complete = {}
    for name, one in objectives.items():
        prefix = name if len(objectives) > 1 else ""
        weights = add_loss_weights(model, one.loss, prefix, one.reads, seed)
        changes: dict[str, Any] = {"weights": weights}
        if learned is not None:
            first = np.array(learned.initial, spec_of(_output_named(model, one.reads[0])).dtype)
            own = names.loss_weight(LOG_VARIANCE, name)
            changes |= {"log_variance": add_initializer(model, own, first)}
            changes |= {"weight": one.weight * learned.factor(one.loss)}
        complete[name] = replace(one, **changes)
    return complete


def _output_named(model: ir.Model, name: str) -> ir.Value:
    return next(value for value in model.graph.outputs if value.name == name)


def _check_joint_name(name: str, loss: Joint) -> None:
    if not name or "/" in name:
        raise SettingError(f"The name of a Joint loss must have no '/', got {name!r}.")


def _read_outputs(model: ir.Model, loss: Joint) -> tuple[str, ...]:
    """Return the outputs of a model that a Joint reads, after adding those that it lacks."""
    graph = model.graph
    outputs = {value.name or "": value for value in graph.outputs}
    results = {value.name or "": value for node in graph for value in node.outputs}
    inputs = {value.name or "": value for value in graph.inputs}
    own = {name: value for name, value in outputs.items() if not names.is_read(name)}
    known = {"output": own, "input": inputs, "value": {**results, **graph.initializers}}
    wanted = {"output": loss.outputs, "input": loss.inputs, "value": loss.values}
    reads = []
    for kind, values in known.items():
        for name in wanted[kind]:
            if name not in values:
                raise UnknownNameError(f"{kind} of the model, in Joint({kind}s=),", name, values)
            reads.append(read_as_output(model, values[name]))
    return tuple(reads)


def read_as_output(model: ir.Model, value: ir.Value) -> str:
    """Return the output with which a step reads a value, after adding it to a model if needed."""
    outputs = {v.name for v in model.graph.outputs}
    name = value.name or ""
    if name in outputs and not names.is_read(name):
        return name
    read = names.read(name)
    if read not in outputs:
        op = GraphBuilder(model.graph)
        with op.scope(scopes.LOSS):
            op.output(read, op.wrap(value))
    return read


def _check_own_loss(
    outputs: Mapping[str, TensorSpec], loss_weights: LossWeights, needed: bool
) -> None:
    if loss_weights:
        raise SettingError(
            "loss_weights needs a dict of losses. With loss=None, the model's own loss has weight"
            " 1."
        )
    own = outputs.get(names.LOSS)
    if own is None and not needed:
        return
    if own is None or own.shape not in ((), (1,)):
        specs = ", ".join(map(str, outputs.values()))
        raise SettingError(
            f"loss=None needs a model with a scalar output {names.LOSS!r}. Its outputs are"
            f" {specs}. Pass a loss."
        )


def _only_output(outputs: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the output of a loss that is not assigned by name."""
    floats = {name: spec for name, spec in outputs.items() if spec.dtype.kind == "f"}
    if len(floats) == 1:  # classifiers of other libraries also return the class
        return floats
    if len(outputs) > 1:
        raise SettingError(
            f"The model has {len(outputs)} outputs ({listed_names(outputs)}). Give each"
            f" output its loss: loss={{{next(iter(outputs))!r}: ...}}."
        )
    return outputs


def _fixed_weights(
    loss: Mapping[str, Any],
    loss_weights: LossWeights,
    outputs: Sequence[str],
) -> Mapping[str, float]:
    """Return the fixed weights of losses, none if they are learned."""
    if isinstance(loss_weights, UncertaintyWeights):
        loss_weights = None
    if loss_weights is not None and not isinstance(loss_weights, Mapping):
        raise SettingError(
            "loss_weights must be a dict from output name to number, or"
            f" losses.UncertaintyWeights(), got {loss_weights!r}."
        )
    if len(loss) > 1 and "val" in loss:
        raise SettingError(
            "An output called 'val' cannot have a loss if other outputs have one too, because"
            " 'val_loss' is the validation loss. Rename the output."
        )
    weights = loss_weights or {}
    for name in (*loss, *weights):
        if name not in outputs:
            raise UnknownNameError("output", name, outputs)
    return weights


def _objective(loss: Loss, weight: float, output: ir.Value) -> Objective:
    """Return the loss with `from_logits=None` replaced by True or False for this output.

    This is decided here, with the whole model at hand: a split step has the loss in a separate
    graph.
    """
    # A copy for each trainer, because a loss warns once of an unsuitable output. It is copied, not
    # constructed, because a subclass's constructor may take other arguments than the fields.
    loss = copy.copy(loss)
    vars(loss).pop("_has_warned", None)
    reads = (output.name or "",)
    if not (hasattr(loss, "from_logits") or isinstance(loss, NLL)):
        return Objective(loss, weight, reads=reads)
    shown = decide_logits(None, output, loss.assumes_logits)
    if not hasattr(loss, "from_logits"):
        return Objective(loss, weight, is_explained=shown.is_shown, reads=reads)
    if loss.from_logits is None:
        set_field(loss, "from_logits", shown.logits)
        return Objective(loss, weight, shown, shown.is_shown, reads)
    decision = decide_logits(loss.from_logits, output, loss.assumes_logits)
    return Objective(loss, weight, decision, shown.is_shown, reads)


# ---------------------------------------------------------------------- metrics


def get_output_metrics(
    metrics: Metrics, objectives: Mapping[str, Objective], outputs: Mapping[str, TensorSpec]
) -> list[OutputMetric]:
    """Return every metric with its output. With several outputs, its name begins with the output's.

    A metric with `from_logits=None` reads an output as logits if its loss does. A metric of each
    class gets the names of the classes, if it has none.

    - `outputs`: the specs of the model's outputs.
    """
    several = len(objectives) > 1
    bound = []
    for output, entries in _metrics_by_output(metrics, objectives).items():
        for entry in entries:
            metric = get_metric(entry)  # a new metric, so that its settings can be changed here
            loss = objectives[output].loss
            if getattr(metric, "from_logits", False) is None:
                vars(metric)["from_logits"] = _takes_logits(metric, objectives[output].loss)
            if getattr(metric, "task", "") is None:
                vars(metric)["task"] = objectives[output].loss.task
            for setting in metric.settings_of_loss:
                if getattr(metric, setting) is None:
                    vars(metric)[setting] = getattr(objectives[output].loss, setting, None)
            if (
                getattr(metric, "class_names", ()) is None
                and getattr(metric, "average", "") is None
            ):
                vars(metric)["class_names"] = _class_names(metric, loss, outputs[output])
            name = f"{output}_{metric.name}" if several else metric.name
            bound.append(OutputMetric(name, output, metric, *_arrays_of(metric, output, loss)))
    chosen = [name for metric in bound for name in metric.figures or [metric.name]]
    _check_names(chosen, list(objectives) if several else [])
    return bound


def _class_names(metric: Metric, loss: Loss, output: TensorSpec) -> tuple[str, ...]:
    """Return names for the classes of an output: class0, class1 and so on."""
    rank = 0 if output.shape is None else len(output.shape)
    axis = class_axes(rank)[0] if rank > 1 else 0
    if getattr(metric, "multi_label", False):
        axis = 1
    elif isinstance(loss, ClassLoss):
        axis = loss.class_axis(rank)
    classes = output.shape[axis] if output.shape is not None and rank > 1 else 1
    if output.shape is None or not isinstance(classes, int):
        raise SettingError(
            f"{type(metric).__name__}(average=None) needs the number of classes for its names in"
            f" logs, but the output {output} has a free size there. Pass class_names=[...], a name"
            " for each class."
        )
    return tuple(f"class{number}" for number in range(classes))


def _arrays_of(
    metric: Metric, output: str, loss: Loss
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Return the names of the arrays that a metric compares, as `OutputMetric` has them.

    SettingError: there are several, or no labels, and the metric does not take dicts.
    """
    if not (metric.takes_dicts or _compares_arrays(loss)):
        raise SettingError(
            f"{type(metric).__name__} compares one output with one array of labels, but {output!r}"
            " has no loss of one output with one array of labels. Pass a function (y_true, y_pred)"
            " of dicts of arrays, or a metric that takes dicts, such as MeanAveragePrecision."
        )
    labels = None if loss.declared is None or "" in loss.declared else tuple(loss.declared)
    outputs = tuple(loss.outputs) if isinstance(loss, Joint) else None
    if not (outputs is None or outputs):
        raise SettingError(
            f"{metric.name!r} needs outputs of the model, but {loss_name(loss)} of {output!r} reads"
            " none. Name them in Joint(outputs=...)."
        )
    return labels, outputs


def _metrics_by_output(
    metrics: Metrics, objectives: Mapping[str, Objective]
) -> dict[str, list[MetricLike]]:
    if isinstance(metrics, Mapping):
        for name in metrics:
            if name not in objectives:
                raise UnknownNameError("output with a loss", name, list(objectives))
        return {name: _as_list(metrics[name]) for name in objectives if name in metrics}
    if not metrics:
        return {}
    if not objectives:
        raise SettingError(
            "metrics= needs labels, but with loss=None there are no labels. Pass a loss, or remove"
            " the metrics."
        )
    # Metrics of all losses are those of one output and one array of labels, unless there are none.
    comparable = [name for name, one in objectives.items() if _compares_arrays(one.loss)]
    return {name: _as_list(metrics) for name in comparable or objectives}


def _compares_arrays(loss: Loss) -> bool:
    """Whether a loss compares one output with one array of labels, which the output predicts."""
    has_labels = loss.declared is None or "" in loss.declared
    return has_labels and loss.predicts_labels and not isinstance(loss, Joint)


def _as_list(metrics: Any) -> list[MetricLike]:
    return list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]


def _takes_logits(metric: Metric, loss: Loss) -> bool:
    """Whether a metric reads outputs as logits, as their loss does.

    A threshold outside the range of probabilities applies to the outputs themselves. The outputs of
    `NLL` are log-probabilities, which are also logits.
    """
    logits = getattr(loss, "from_logits", isinstance(loss, NLL))
    return bool(logits) and 0 < getattr(metric, "threshold", 0.5) < 1


def _check_names(chosen: Sequence[str], outputs: Sequence[str]) -> None:
    """Raise SettingError for a metric with the name of another figure, such as the loss of one of
    `outputs`.
    """
    reserved = {"loss", "batch_loss", "learning_rate", *(f"{output}_loss" for output in outputs)}
    for name in chosen:
        if name in reserved or name.startswith("val_"):
            raise SettingError(
                f"A metric cannot be called {name!r}, because another value in the logs has this"
                " name. Set another name, such as Accuracy(name='...')."
            )
        if chosen.count(name) > 1:
            raise SettingError(
                f"Two metrics are called {name!r}. Give one of them another name, such as"
                " Accuracy(name='...')."
            )
