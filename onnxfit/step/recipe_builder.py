"""Build the recipe of a training from a model and the settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxfit.checks import matching_names, name_list
from onnxfit.data.convert import is_float
from onnxfit.errors import (
    GradientError,
    ModelError,
    SettingError,
    UnknownNameError,
    listed_names,
    warn_user,
)
from onnxfit.gradients import GradientSource, gradient_source
from onnxfit.gradients.blocker import HALF_PRECISION
from onnxfit.gradients.paths import reachable_values
from onnxfit.gradients.update import initial_slots_to_read
from onnxfit.graph import names, scopes
from onnxfit.graph.layers import layers_after
from onnxfit.graph.model import clone, share_tensors, spec_of, tensor_outputs
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder
from onnxfit.graph.weights import FLOATS, all_weights, select_weights
from onnxfit.load.batch_axis import BatchLayout
from onnxfit.load.normalize import normalize
from onnxfit.load.trainable import TrainableModel
from onnxfit.load.training_form import keep_batch_norms, unmeasured_batch_norms
from onnxfit.optimizers import Optimizer, get_optimizer
from onnxfit.optimizers.base import WeightInfo, WeightOptimizer
from onnxfit.optimizers.constraints import constraints_by_pattern
from onnxfit.penalties import Penalty, PenaltyLike, penalties_for
from onnxfit.step.differentiation import check_gradient
from onnxfit.step.distillation import Distillation, Teacher
from onnxfit.step.frozen_rows import frozen_rows
from onnxfit.step.limits import check_fits, clip_bound, norm_dtype
from onnxfit.step.loss_weights import loss_weights_of
from onnxfit.step.objectives import (
    Objective,
    get_objectives,
    get_output_metrics,
    outputs_read,
    read_as_output,
)
from onnxfit.step.precision import StepPrecision, get_precision
from onnxfit.step.providers import forms_of_device, kind_of_device
from onnxfit.step.recipe import Recipe, initializer_array
from onnxfit.step.settings import TrainerSettings


def build_recipe(
    trainable: TrainableModel,
    settings: TrainerSettings,
    *,
    needs_loss: bool = True,
    distillation: Distillation | None = None,
) -> Recipe:
    """Return the recipe for training a model.

    A model without a loss can only predict. With `needs_loss=False` it can train with gradients
    from the caller. `distillation` has the model's teacher. ModelError, GradientError, SettingError
    or UnknownNameError: the model cannot train; the message says why.
    """
    optimizer = get_optimizer(settings.optimizer)
    precision = get_precision(settings.precision)
    normalized = normalize(trainable.model)
    if settings.stop_gradients is not None:
        stop_gradients(normalized, settings.stop_gradients)
    outputs = tensor_outputs(normalized)
    graph = normalized.graph
    graph.outputs[:] = [value for value in graph.outputs if value.name in outputs]
    objectives = get_objectives(
        settings.loss, settings.loss_weights, normalized, needed=False, seed=settings.seed
    )
    _refuse_half_precision([outputs[name] for name in objectives if name in outputs])
    metrics = get_output_metrics(settings.metrics, objectives, outputs)
    differentiated = outputs_read(objectives) or [n for n in outputs if n == names.LOSS]
    teacher = _teacher(distillation, trainable.layout, normalized, objectives)
    differentiated += [] if teacher is None else teacher.features
    patterns = trainable.selected(settings.weights)
    trains = bool(differentiated) or not needs_loss
    if not differentiated:
        differentiated = [name for name, spec in outputs.items() if spec.dtype.kind == "f"]
    if trains:
        weights = _trained_weights(normalized, patterns, differentiated)
    else:
        weights = _weights(normalized, patterns)
    dtypes = {name: spec_of(graph.initializers[name]).dtype for name in weights}
    wide = [norm_dtype(dtypes.values())]
    penalties = _penalties(settings.penalty, weights, trainable.bounds, objectives)
    optimizers = _optimizers(optimizer, normalized, weights)
    _check_settings_fit(dtypes, optimizers, penalties)
    slots = _initial_slots(optimizers, graph.initializers)
    keep_batch_norms(normalized, settings.batch_norm)
    recipe = Recipe(
        model=normalized,
        weights=tuple(weights),
        objectives=objectives,
        penalties=penalties,
        optimizer=optimizer,
        optimizers=optimizers,
        gradient=_gradient_source(settings, precision),
        device=forms_of_device(settings.device),
        slots=slots,
        frozen_rows=frozen_rows(normalized, weights, settings.freeze_rows),
        metrics=tuple(metrics),
        batch_norm=settings.batch_norm,
        precision=precision,
        clip_norm=clip_bound("clip_norm", settings.clip_norm, wide),
        clip_value=clip_bound("clip_value", settings.clip_value, dtypes.values()),
        clip_adaptive=clip_bound("clip_adaptive", settings.clip_adaptive, wide),
        trainable=None if trainable.is_file else trainable,
        layout=trainable.layout,
        state_outputs=dict(settings.state_outputs or {}),
        teacher=teacher,
    )
    trainable.check(recipe.weights, recipe.statistics)
    _warn_of_unmeasured(normalized, recipe.statistics if trains else ())
    _refuse_reserved_names(recipe)
    _refuse_inner_values(recipe)
    if trains:
        check_gradient(recipe)
    return recipe


def with_numbers(recipe: Recipe, trainable: TrainableModel, optimizer: Optimizer) -> Recipe:
    """Return a recipe for a file that differs only in the numbers of its tensors.

    - `optimizer`: the optimizer of the recipe, perhaps with another learning rate.
    """
    model = clone(recipe.model)
    initializers = model.graph.initializers
    share_tensors(model.graph, trainable.model, initializers)
    dtypes = {name: spec_of(initializers[name]).dtype for name in recipe.weights}
    optimizers = _optimizers(optimizer, model, recipe.weights)
    _check_settings_fit(dtypes, optimizers, recipe.penalties)
    return replace(
        recipe,
        model=model,
        optimizer=optimizer,
        optimizers=optimizers,
        slots=_initial_slots(optimizers, initializers),
        layout=trainable.layout,
    )


def _optimizers(
    optimizer: Optimizer, model: ir.Model, weights: Sequence[str]
) -> dict[str, WeightOptimizer]:
    """Return the update of each weight.

    SettingError: the groups do not fit. UnknownNameError: a pattern matches no weight.
    """
    for member in optimizer.members:
        for pattern in constraints_by_pattern(member.constraints):
            matching_names(pattern, weights, "trained weight")
    after = layers_after(model.graph) if optimizer.needs_layers else {}
    specs = (spec_of(model.graph.initializers[name]) for name in weights)
    return optimizer.for_weights(
        [WeightInfo(s.name, s.shape or (), s.dtype, after.get(s.name, 0)) for s in specs]
    )


def _initial_slots(
    optimizers: Mapping[str, WeightOptimizer], initializers: Mapping[str, ir.Value]
) -> dict[str, Mapping[str, np.ndarray[Any, Any]]]:
    """Return each weight's slots before the first update."""
    return {
        name: initial_slots_to_read(one.optimizer, name, initializer_array(initializers[name]))
        for name, one in optimizers.items()
    }


def _gradient_source(settings: TrainerSettings, precision: StepPrecision) -> GradientSource:
    """Return the source of gradients. SettingError: it, or the device, lacks the precision."""
    forms = forms_of_device(settings.device)
    if precision.tf32 and kind_of_device(settings.device) != "cuda":
        raise SettingError(
            f"precision={precision.name!r} is for CUDA, got device={settings.device!r}. Use"
            " precision='float32'."
        )
    if precision.splits and kind_of_device(settings.device) != "cpu":
        raise SettingError(
            f"precision={precision.name!r} is for the CPU, got device={settings.device!r}. Use"
            " precision='float32', or on CUDA precision='tf32'."
        )
    if precision.half is not None or precision.splits:
        if forms not in ("cpu", "cuda"):
            raise SettingError(
                f"precision={precision.name!r} is for the CPU and CUDA, got"
                f" device={settings.device!r}. Use precision='float32'."
            )
        if settings.gradient == "onnxruntime":
            raise SettingError(
                f"precision={precision.name!r} needs gradient='onnx' or 'auto', got"
                " gradient='onnxruntime', whose gradients expect float32. Use gradient='auto'."
            )
    return gradient_source(settings.gradient, forms)


def _refuse_half_precision(outputs: Sequence[TensorSpec]) -> None:
    """Raise GradientError if an output with a loss is a float of 16 bits or fewer."""
    for output in outputs:
        if is_float(output.dtype) and output.dtype.itemsize < 4:
            raise GradientError(
                f"The loss must be a scalar in float32 or float64, but output {output.name!r} is"
                f" {output.dtype}. {HALF_PRECISION}"
            )


def _teacher(
    distillation: Distillation | None,
    layout: BatchLayout,
    model: ir.Model,
    objectives: Mapping[str, Objective],
) -> Teacher | None:
    """Return the teacher of a model, if it has a teacher, for the losses of single outputs."""
    if distillation is None:
        return None
    if layout.changes_graph:
        raise SettingError(
            "A teacher needs a model whose inputs and outputs all have the batch on the first axis."
            f" This model has {'; '.join(layout.lines())}. Remove the teacher, or transpose in the"
            " exported models."
        )
    graph = model.graph
    inputs = [spec_of(value) for value in graph.inputs]
    opset = graph.opset_imports[""]
    values = {v.name or "": v for v in (*graph.inputs, *(v for n in graph for v in n.outputs))}
    for name in distillation.features:
        if name not in values:
            raise UnknownNameError("value of the model, in Distillation(features=),", name, values)
    features = {name: spec_of(values[name]) for name in distillation.features}
    losses = [name for name, one in objectives.items() if one.reads == (name,)]
    teacher = distillation.teacher_of(inputs, tensor_outputs(model), losses, opset, features)
    if teacher is None:
        return None
    followed = {read_as_output(model, values[n]): of for n, of in teacher.features.items()}
    return replace(teacher, features=followed)


def _check_settings_fit(
    dtypes: Mapping[str, np.dtype[Any]],
    optimizers: Mapping[str, WeightOptimizer],
    penalties: Mapping[str, Penalty],
) -> None:
    """Raise SettingError if a number of the optimizer or of a penalty does not fit a weight.

    `dtypes` has the element types of the weights by name.
    """
    fitting: set[tuple[np.dtype[Any], int]] = set()  # element types that the numbers fit
    for name, dtype in dtypes.items():
        optimizer = optimizers[name].optimizer
        if (dtype, id(optimizer)) not in fitting:
            check_fits(optimizer, dtype, f"weight {name!r}")
            fitting.add((dtype, id(optimizer)))
        check_fits(penalties.get(name), dtype, f"weight {name!r}")


def _trained_weights(
    model: ir.Model, patterns: Sequence[str] | str | None, outputs: Sequence[str]
) -> list[str]:
    """Return the selected weights that a gradient path connects to one of `outputs`.

    SettingError: a user selected a weight without a path. ModelError: no weight has a path.
    """
    of_loss = loss_weights_of([value.name or "" for value in model.graph.outputs])
    selected = _with_loss_weights(select_weights(model, patterns), of_loss, patterns)
    reaching = set(reachable_values(model, outputs, selected))
    trained = [name for name in selected if name in reaching]
    if not trained:
        raise ModelError(
            f"No weight has a gradient path to the loss. The weights are {listed_names(selected)}."
        )
    unreached = [name for name in selected if name not in reaching]
    if patterns is not None and unreached:
        raise SettingError(
            f"No loss depends on {listed_names(unreached)}. Exclude these weights from weights= or"
            " from the target of adapters=, or add a loss to an output that depends on them."
        )
    return trained


def _penalties(
    penalty: PenaltyLike,
    weights: Sequence[str],
    own: Collection[str],
    objectives: Mapping[str, Objective],
) -> dict[str, Penalty]:
    """Return the penalties of weights by name.

    Only a dict can name the tensors of losses.

    - `own`: the weights that belong to the trainable form, which have no penalty.
    """
    left_out = {*own}
    if not isinstance(penalty, Mapping):
        left_out.update(loss_weights_of(outputs_read(objectives)))
    return penalties_for(penalty, [name for name in weights if name not in left_out])


def _with_loss_weights(
    selected: Sequence[str], of_loss: Sequence[str], patterns: Sequence[str] | str | None
) -> list[str]:
    """Return the selected weights with the tensors of losses, unless a pattern excludes these."""
    given = [] if patterns is None else name_list("weights", patterns)
    excluded = [pattern[1:] for pattern in given if pattern.startswith("!")]
    trained = [n for n in of_loss if not any(fnmatchcase(n, pattern) for pattern in excluded)]
    return [*(name for name in selected if name not in of_loss), *trained]


def _weights(model: ir.Model, patterns: Sequence[str] | None) -> list[str]:
    """Return the weights of a model that only predicts; it may have none."""
    return all_weights(model) if patterns is None else select_weights(model, patterns)


def _warn_of_unmeasured(model: ir.Model, measured: Collection[str]) -> None:
    """Warn of BatchNormalizations whose outputs in evaluation differ from those of the file.

    `measured` are the running statistics that training updates.
    """
    nodes = unmeasured_batch_norms(model, measured)
    if nodes:
        warn_user(
            f"BatchNormalization {listed_names(map(repr, nodes))} normalizes by the batch in the"
            " file (training_mode=1) and has no measured statistics. evaluate, predict and export"
            " use the statistics. Pass batch_norm='batch', which normalizes by the batch as the"
            " file does, or train its scale and bias, or export measured statistics."
        )


def _refuse_inner_values(recipe: Recipe) -> None:
    """Raise SettingError if a loss reads values that an evaluation of the file does not return."""
    if recipe.evaluates_file and recipe.inner_values:
        raise SettingError(
            f"The loss reads {listed_names(recipe.inner_values)} inside the model, but this"
            " quantized file is evaluated by its inputs and outputs alone. Export the model with"
            " these values as outputs."
        )


def _refuse_reserved_names(recipe: Recipe) -> None:
    """Raise ModelError if the model has a tensor or node with a name that a step adds."""
    graph = recipe.model.graph
    added = {names.updated(name) for name in recipe.state}
    added |= {names.gradient_sum(name) for name in recipe.weights}
    for weight, slots in recipe.slots.items():
        added |= {names.slot(weight, slot) for slot in slots}
        added |= {names.updated(names.slot(weight, slot)) for slot in slots}
    outputs = [value for node in graph for value in node.outputs]
    values = [*graph.inputs, *graph.initializers.values(), *outputs]
    read = {v for v in graph.outputs if names.is_read(v.name or "")}
    tensor_names = {v.name for v in values if v.name and v not in read}
    conflicts = sorted(n for n in tensor_names if names.reserved(n) or n in added)
    node_names = {node.name for node in graph if node.name and names.reserved(node.name)}
    conflicts += sorted(node_names.difference(conflicts))
    if conflicts:
        raise ModelError(
            f"The model has tensors or nodes called {listed_names(conflicts)}, which are reserved"
            " for the training step. Rename them."
        )


def stop_gradients(model: ir.Model, patterns: Sequence[str] | str) -> None:
    """Let the nodes that read some values get them without a gradient, in place.

    An output of the model keeps its gradient, for its own loss.

    - `model`: a normalized model.
    - `patterns`: names or fnmatch patterns of values, one or several; "!pattern" excludes.

    UnknownNameError: a pattern matches no float value. SettingError: a pattern is the name of an
    initializer.
    """
    graph = model.graph
    computed = [value for node in graph for value in node.outputs]
    values = {v.name: v for v in (*graph.inputs, *computed) if v.name and v.dtype in FLOATS}
    selected = _selected_weights(graph, name_list("stop_gradients", patterns), list(values))
    bodies = list(graph.subgraphs())
    op = GraphBuilder(graph)
    for name in selected:
        value = values[name]
        uses = tuple(value.uses())
        with op.scope(scopes.STOP_GRADIENT):
            stopped = op.stop_gradient(op.wrap(value)).ir
        for node, i in uses:
            node.replace_input_with(i, stopped)
        for body in bodies:  # a branch may return a captured value unchanged
            body.outputs[:] = [stopped if v is value else v for v in body.outputs]
    if selected:
        graph.sort()


def _selected_weights(graph: ir.Graph, patterns: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names that patterns select, in the order of the graph."""
    excluding = [p for p in patterns if p.startswith("!") and p not in known]
    including = [p for p in patterns if p not in excluding]
    selected = set(known) if excluding and not including else set()
    for pattern in including:
        if pattern in graph.initializers:
            raise SettingError(
                f"stop_gradients has {pattern!r}, which is an initializer. Freeze it with"
                f" weights=['!{pattern}']."
            )
        selected |= matching_names(pattern, known, "float value of the model")
    for pattern in excluding:
        selected -= matching_names(pattern[1:], known, "float value of the model")
    return [name for name in known if name in selected]
