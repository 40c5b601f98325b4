"""The forward pass of a step, and the loss on top of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxfit.errors import ModelError, OnnxfitError, SettingError
from onnxfit.gradients.definitions import write_definitions
from onnxfit.graph import names, scopes
from onnxfit.graph.model import (
    clone,
    complete_shapes,
    infer_shapes,
    initializers_to_inputs,
    model_errors,
    spec_of,
    specialize_shapes,
)
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.load import training_form
from onnxfit.losses import Function, Joint
from onnxfit.losses.base import SoftTargets, loss_name
from onnxfit.penalties import Penalty
from onnxfit.registry import is_exported
from onnxfit.step.distillation import Lessons
from onnxfit.step.finish import prune
from onnxfit.step.loss_scale import kept_if_not_finite
from onnxfit.step.objectives import Objective
from onnxfit.step.precision import autocast
from onnxfit.step.recipe import Batch, Recipe

NO_LESSONS = Lessons()


def forward(recipe: Recipe, batch: Batch, *, trains: bool = False) -> GraphBuilder:
    """Return a builder of the model, with the training state as inputs.

    Shapes of the batch that are numbers are written into the graph. `trains` writes operators that
    will be differentiated without a rule in their definitions.
    """
    model = clone(recipe.model)
    initializers_to_inputs(model.graph, (*recipe.state, *recipe.constants))
    if trains and write_definitions(GraphBuilder(model.graph), recipe.weights):
        model = infer_shapes(model)
    shapes = {}
    for name, spec in batch.items():
        if spec.shape is not None and all(isinstance(d, int) for d in spec.shape):
            shapes[name] = tuple(d for d in spec.shape if isinstance(d, int))
    return GraphBuilder(specialize_shapes(model, shapes).graph, device=recipe.device)


def constant_batch_norms(recipe: Recipe, batch: Batch) -> list[str]:
    """Return the BatchNormalizations that get one value per channel from batches of this shape."""
    if not recipe.statistics:
        return []
    op = forward(recipe, batch)
    return training_form.constant_batch_norms(op, recipe.weights, recipe.batch_norm)


@model_errors()
def training_forward(recipe: Recipe, batch: Batch) -> tuple[GraphBuilder, dict[str, Value]]:
    """Return the forward pass of training, and the next values of the running statistics."""
    op = forward(recipe, batch, trains=True)
    if recipe.rounds_factors:
        op.graph.metadata_props[names.PRODUCTS] = recipe.precision.name
    elif recipe.precision.half is not None:
        autocast(op, recipe.precision.half, (*recipe.state, *recipe.constants))
    seed, step = op.input(names.SEED, np.int64, ()), op.input(names.STEP, np.int64, ())
    statistics = training_form.to_training_form(op, recipe.weights, recipe.batch_norm, seed, step)
    if recipe.trainable is not None:
        statistics |= recipe.trainable.to_training_form(op, step)
    if recipe.precision.scales_loss:
        statistics = kept_if_not_finite(op, statistics)
    return op, statistics


def with_loss(recipe: Recipe, batch: Batch, *, shared: bool = False) -> ir.Model:
    """Add the differentiated part: the forward pass of training, the loss and the penalty.

    `shared` is as for `add_loss_outputs`.
    """
    op, statistics = training_forward(recipe, batch)
    lessons = lessons_of(op, recipe, batch)
    add_loss_outputs(op, recipe.objectives, recipe.penalties, batch, lessons, shared=shared)
    keep_outputs(op, [*add_metric_sums(op, recipe), *recipe.state_outputs])
    for name, value in statistics.items():
        op.output(names.updated(name), value)
    return complete_shapes(prune(op))


def lessons_of(op: GraphBuilder, recipe: Recipe, batch: Batch) -> Lessons:
    """Add the teacher of a step, if it has one, and return its parts of the loss."""
    return NO_LESSONS if recipe.teacher is None else recipe.teacher.add_to(op, batch)


def add_loss_outputs(
    op: GraphBuilder,
    objectives: Mapping[str, Objective],
    penalties: Mapping[str, Penalty],
    batch: Batch,
    lessons: Lessons = NO_LESSONS,
    *,
    shared: bool = False,
) -> None:
    """Add labels, the loss of each output, penalties, and their sum as output `names.TOTAL`.

    `lessons` are a teacher's parts of the loss, which count in addition to the labels.

    `shared` adds the output `names.SHARED` for a rank that has a share of the rows: the losses and
    penalties times this rank's shares, which are inputs. Its sum over all ranks is the loss of the
    whole batch; the same holds for its gradient.
    """
    terms, shared_terms = _loss_terms(op, objectives, batch, lessons.targets, shared)
    values = {**op.graph.initializers, **{v.name or "": v for v in op.graph.inputs}}
    penalty_terms = [*_log_deviations(op, objectives), *lessons.terms]
    for weight, penalty in penalties.items():
        with op.scope(scopes.penalty_of(weight)):
            penalty_terms.append(penalty(op, op.wrap(values[weight])))
    with op.scope(scopes.LOSS):
        if shared:
            of_rows = [_times_share(op, term, names.SHARE) for term in penalty_terms]
            op.output(names.SHARED, _sum_of_scalars([*shared_terms, *of_rows]))
        op.output(names.TOTAL, _sum_of_scalars([*terms, *penalty_terms]))
        if penalty_terms and reports_penalty(objectives):
            op.output(names.PENALTY, _sum_of_scalars(penalty_terms))


def _loss_terms(
    op: GraphBuilder,
    objectives: Mapping[str, Objective],
    batch: Batch,
    targets: Mapping[str, SoftTargets],
    shared: bool,
) -> tuple[list[Value], list[Value]]:
    """Add labels and losses; return the terms of their sum, and these terms times their shares."""
    outputs = {v.name or "": v for v in op.graph.outputs}
    weights: dict[str, Value] = {}
    for name in filter(names.is_sample_weight, batch):
        spec = batch[name]
        assert spec.shape is not None
        weights[name] = op.input(name, spec.dtype, spec.shape)
    if not objectives:
        own = op.wrap(outputs[names.LOSS])
        if own.shape != ():
            own = op.Reshape(own, op.constant(np.zeros(0, np.int64)))
        return [own], [_times_share(op, own, names.SHARE)] if shared else []
    terms: list[Value] = []
    shared_terms: list[Value] = []
    for output, objective in objectives.items():
        if isinstance(objective.loss, Joint):
            y_pred: Any = [_of_known_rank(op.wrap(outputs[name])) for name in objective.reads]
            y_true: Any = _labels_of(op, output, objective, batch)
        else:
            y_pred = _with_rows(_of_known_rank(op.wrap(outputs[output])))
            y_true = _labels_of(op, output, objective, batch)
            if objective.loss.declared is None and spec_of(outputs[output]).shape == ():
                y_true = _of_one_row(output, y_true)
            _require_same_rows(output, objective, y_true, y_pred)
        weight, teacher = names.weight_of(output, weights), targets.get(output)
        tensors = {name: op.wrap(outputs[read]) for name, read in objective.weights.items()}
        value, count = _loss_of(op, objective, output, y_true, y_pred, weight, teacher, tensors)
        if len(objectives) > 1:
            op.output(names.output_loss(output), value)
        if count is not None:
            op.output(names.count(output), count)
        if objective.log_variance is not None:
            with op.scope(scopes.loss_of(output)):
                precision = op.Exp(-op.wrap(outputs[objective.log_variance]))
                value = value * op.cast(precision, value.dtype)
            op.output(names.weighted_loss(output), value)
        terms.append(value if objective.weight == 1 else value * objective.weight)
        if not shared:
            continue
        if objective.loss.reduction == "sum":
            shared_terms.append(terms[-1])
        else:
            share = names.SHARE if count is None else names.share(output)
            shared_terms.append(_times_share(op, terms[-1], share))
    return terms, shared_terms


def _log_deviations(op: GraphBuilder, objectives: Mapping[str, Objective]) -> list[Value]:
    """Return the logarithm of the deviation of each loss with a learned variance.

    These terms depend on tensors alone, as penalties do.
    """
    outputs = {v.name or "": v for v in op.graph.outputs}
    terms = []
    for name, one in objectives.items():
        if one.log_variance is not None:
            with op.scope(scopes.loss_of(name)):
                terms.append(op.wrap(outputs[one.log_variance]) / 2)
    return terms


def _with_rows(y_pred: Value) -> Value:
    """Return an output with an axis of rows. A scalar is the output of the only row of a batch."""
    if y_pred.ir.shape is None or y_pred.rank:
        return y_pred
    return y_pred.op.Unsqueeze(y_pred, [0])


def _of_known_rank(output: Value) -> Value:
    """Return an output. ModelError: its rank is unknown."""
    if output.ir.shape is None:
        raise ModelError(
            f"The rank of output {names.shown(output.name)!r} is unknown, so it cannot have a loss."
            " Export the model with the shape of this output."
        )
    return output


def _labels_of(op: GraphBuilder, name: str, objective: Objective, batch: Batch) -> Any:
    """Add the labels of an objective as inputs, and return them as its loss takes them: one value,
    a dict name -> value, or None.
    """
    declared = objective.loss.declared
    labels: dict[str, Value] = {}
    for label in [""] if declared is None else declared:
        spec = batch[names.target(name, label)]
        assert spec.shape is not None  # a loss derives labels from an output of known rank
        labels[label] = op.input(spec.name, spec.dtype, spec.shape)
    return labels.get("", labels or None)


def _of_one_row(output: str, y_true: Value) -> Value:
    """Return the labels of a scalar output, which has the label of the only row."""
    rows = (y_true.shape or (None,))[0]
    if isinstance(rows, int) and rows != 1:
        raise SettingError(
            f"Output {output!r} is one number for the whole batch, so it needs batches of one row,"
            f" but got {rows} rows. Pass batch_size=1, or export the model with an output of shape"
            " (batch,)."
        )
    return y_true.op.Reshape(y_true, [1])  # refuses other numbers of rows when the step runs


def _require_same_rows(output: str, objective: Objective, y_true: Any, y_pred: Value) -> None:
    """Raise SettingError if an output and its labels have different numbers of rows.

    A loss of the user may expect that.
    """
    labels = next(iter(y_true.values())) if isinstance(y_true, Mapping) else y_true
    shapes = labels.shape, y_pred.shape
    rows, first = (shape[0] if shape else None for shape in shapes)
    is_own = is_exported(type(objective.loss), "onnxfit.losses")
    if is_own and isinstance(rows, int) and isinstance(first, int) and rows != first:
        raise SettingError(
            f"Output {_output_in_words(y_pred, output)} has {first} rows for a batch of {rows}, so"
            " its first axis is not the batch. If another axis is, pass its number:"
            f" Trainer(batch_axes={{{output!r}: 1}}). If no axis is, pass"
            f" batch_axes={{{output!r}: None}} and batch_size=1."
        )


def _loss_of(
    op: GraphBuilder,
    objective: Objective,
    output: str,
    y_true: Any,
    y_pred: Any,
    sample_weight: Value | None,
    targets: SoftTargets | None,
    weights: Mapping[str, Value],
) -> tuple[Value, Value | None]:
    """Return the loss of an objective, and its divisor, as `Loss.reduce` does."""
    try:
        with op.scope(scopes.loss_of(output)):
            return objective.loss.reduce(op, y_true, y_pred, sample_weight, targets, weights)
    except OnnxfitError:
        raise
    except ValueError as error:
        raise SettingError(_loss_refusal(objective, output, y_true, y_pred, error)) from error


def _loss_refusal(
    objective: Objective, output: str, y_true: Any, y_pred: Any, error: ValueError
) -> str:
    """Return the message for a loss that does not accept its output or its labels."""
    name = loss_name(objective.loss)
    several = y_true if isinstance(y_true, Mapping) else {"": y_true}
    given = "; ".join(str(spec_of(one.ir)) for one in several.values() if one is not None)
    if isinstance(objective.loss, Joint):
        read = "; ".join(str(_output_in_words(value, names.shown(value.name))) for value in y_pred)
        with_labels = f" with labels {given}" if given else ""
        return f"{name} does not accept {read}{with_labels}: {error}"
    described = _output_in_words(y_pred, output)
    text = f"{name} does not accept output {described} with labels {given}: {error}"
    if isinstance(objective.loss, Function) and objective.loss.declared is None:
        text += (
            "\nIf the labels have another shape, declare it: onnxfit.losses.Function(f,"
            " labels='float[b, 7, 4]')."
        )
    return text


def _output_in_words(y_pred: Value, output: str) -> TensorSpec:
    spec = spec_of(y_pred.ir)
    return TensorSpec(output, spec.dtype, spec.shape)


def _times_share(op: GraphBuilder, term: Value, name: str) -> Value:
    """Return a term of the loss times the share of that name, an input."""
    inputs = {v.name: v for v in op.graph.inputs}
    share = op.wrap(inputs[name]) if name in inputs else op.input(name, np.float64, ())
    return term * op.cast(share, term.dtype)


def reports_penalty(objectives: Mapping[str, Objective]) -> bool:
    """Whether a step reports the penalty separately from the loss.

    It does so if the loss of an epoch is not a mean of the losses of its batches.
    """
    sums = any(objective.loss.reduction == "sum" for objective in objectives.values())
    return len(objectives) > 1 or sums


def _sum_of_scalars(terms: Sequence[Value]) -> Value:
    """The sum of scalars, in the element type of the first."""
    total = terms[0]
    for term in terms[1:]:
        total = total + total.op.cast(term, total.dtype)
    return total


def add_metric_sums(op: GraphBuilder, recipe: Recipe) -> list[str]:
    """Add what a batch adds to each metric, and return the outputs that other metrics read.

    `op` builds a graph that has the labels already.
    """
    outputs = {v.name or "": v for v in op.graph.outputs}
    inputs = {v.name or "": v for v in op.graph.inputs}
    read: list[str] = []
    for metric in recipe.metrics:
        sums = None
        # WebGPU's kernels do not compare classes in 64 bits.
        has_arrays = metric.labels is None and metric.outputs is None
        if has_arrays and recipe.sums_metrics and recipe.device != "webgpu":
            y_true = op.wrap(inputs[names.target(metric.output)])
            loss = recipe.objectives[metric.output].loss
            weight = names.weight_of(metric.output, inputs)
            with op.scope(scopes.METRICS):
                sums = metric.sums(
                    op,
                    loss,
                    y_true,
                    _with_rows(op.wrap(outputs[metric.output])),
                    None if weight is None else op.wrap(weight),
                )
        if sums is None:
            read.extend(metric.reads)
            continue
        for attribute, value in sums.items():
            op.output(names.metric_sum(metric.name, attribute), value)
    return read


def keep_outputs(op: GraphBuilder, kept: Sequence[str]) -> None:
    """Drop the outputs of the model that are not `kept`. The step's own outputs stay."""
    op.graph.outputs[:] = [
        v for v in op.graph.outputs if v.name in kept or names.is_added(v.name or "")
    ]


def weight_input(
    op: GraphBuilder, recipe: Recipe, weight: str, name_of: Callable[[str], str] = str
) -> Value:
    """Add an input with the type and shape of a weight, such as its gradient.

    - `name_of`: a function that returns the name of the input for that of the weight.
    """
    w = spec_of(recipe.model.graph.initializers[weight])
    assert w.shape is not None
    return op.input(name_of(weight), w.dtype, w.shape)
