"""The ingredients of a training step, gathered from a model and the settings of a training."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.data.convert import is_float
from onnxfit.errors import GradientError, ModelError, SettingError, listed_names, warn_user
from onnxfit.gradients import GradientSource, gradient_source
from onnxfit.gradients.blocker import HALF_PRECISION
from onnxfit.gradients.paths import reachable_values
from onnxfit.gradients.update import (
    NO_BOUNDS,
    Bounds,
    FrozenRows,
    initial_slots_to_read,
    schedules_of,
)
from onnxfit.graph import names, tensors
from onnxfit.graph.layers import layers_after
from onnxfit.graph.model import spec_of, tensor_outputs
from onnxfit.graph.quantized import quantized_weights
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.stop_gradients import stop_gradients
from onnxfit.graph.weights import all_weights, select_weights
from onnxfit.load.batch_axis import BatchLayout
from onnxfit.load.normalize import normalize
from onnxfit.load.trainable import TrainableModel
from onnxfit.load.training_form import keep_batch_norms, unmeasured_batch_norms, updated_statistics
from onnxfit.optimizers import Optimizer, WeightInfo, WeightOptimizer, get_optimizer
from onnxfit.penalties import Penalty, penalties_for
from onnxfit.step.distillation import Distillation, Teacher
from onnxfit.step.frozen_rows import frozen_rows
from onnxfit.step.limits import check_fits, clip_bound, largest, norm_dtype
from onnxfit.step.loss_scale import initial_state
from onnxfit.step.objectives import (
    LabelTarget,
    Objective,
    OutputMetric,
    get_objectives,
    get_output_metrics,
    get_targets,
    outputs_read,
)
from onnxfit.step.precision import FLOAT32, StepPrecision, get_precision
from onnxfit.step.providers import forms_of_device, kind_of_device
from onnxfit.step.settings import TrainerSettings

if TYPE_CHECKING:
    from onnxfit.step.reuse import BuiltGraphs

Batch = Mapping[str, TensorSpec]  # every array of a batch: inputs, labels, sample weights
ReportedNorms = Literal["none", "global", "per_weight"]


@dataclass(frozen=True)
class Recipe:
    """Everything that a step is built from.

    `model` is the model that is trained, normalized. It is never changed. It is the user's model,
    unless `trainable` replaces it. `objectives` is empty for a model with a scalar output `loss` of
    its own. `slots` holds each weight's slots before the first update. `device` is the kind of
    device that the graphs are for, as for GraphBuilder. `norms` tells whether an update reports the
    L2 norm of all gradients, and with "per_weight" also the norm of each weight's gradient.
    """

    model: ir.Model
    weights: tuple[str, ...]
    objectives: Mapping[str, Objective]
    penalties: Mapping[str, Penalty]
    optimizer: Optimizer
    optimizers: Mapping[str, WeightOptimizer]
    gradient: GradientSource
    slots: Mapping[str, Mapping[str, np.ndarray[Any, Any]]]
    metrics: tuple[OutputMetric, ...] = ()
    batch_norm: str = "train"
    precision: StepPrecision = FLOAT32
    clip_norm: float | None = None
    clip_value: float | None = None
    device: str = "cpu"
    norms: ReportedNorms = "none"
    # rows of weights that training does not change
    frozen_rows: FrozenRows = field(default_factory=dict)
    # the file and the conversion back to it, unless the file itself is trained
    trainable: TrainableModel | None = None
    # the batch axes of the file; `model` has the batch on the first axis
    layout: BatchLayout = field(default_factory=BatchLayout)
    # output -> the input that gets it in the next batch
    state_outputs: Mapping[str, str] = field(default_factory=dict)
    # the model whose outputs are learned in addition to the labels
    teacher: Teacher | None = None
    # whether graphs add up the metrics that they can; else all metrics read the outputs
    sums_metrics: bool = True
    # the graphs that trainers of equal networks share
    built: BuiltGraphs | None = field(default=None, compare=False, repr=False)

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """The running statistics that a step updates."""
        statistics = updated_statistics(self.model, self.weights, self.batch_norm)
        own = self.trainable.statistics if self.trainable is not None else ()
        return (*statistics, *own)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        """A mapping from initializer to the number of its bytes."""
        values = self.model.graph.initializers
        return {name: v.const_value.nbytes for name, v in values.items() if v.const_value}

    @cached_property
    def large(self) -> bool:
        """Whether the tensors exceed the size limit of one graph."""
        return sum(self._sizes.values()) > tensors.MAX_MODEL_BYTES

    @cached_property
    def _packed_tensors(self) -> frozenset[str]:
        """The packed weights, and the other tensors that their kernel prepares."""
        # A graph refers to packed tensors. Only for other devices, it is compiled with them inside.
        fits = self.device == "cpu" or not self.large
        return frozenset(_packed_tensors(self.model.graph) if fits else ())

    @cached_property
    def packed(self) -> tuple[str, ...]:
        """The packed weights of a few bits, which onnxruntime's kernel reads."""
        return tuple(n for n in quantized_weights(self.model) if n in self._packed_tensors)

    @cached_property
    def prepacks_large_weights(self) -> bool:
        """Whether packed weights are too large for a copy in every compiled graph."""
        sizes = self._sizes
        packed = sum(sizes[name] for name in self._packed_tensors & sizes.keys())
        return packed > tensors.MAX_PACKED_BYTES

    @cached_property
    def _shares_constants(self) -> bool:
        """Whether all graphs share the frozen tensors, instead of having copies."""
        state = set(self.state)
        frozen = sum(size for name, size in self._sizes.items() if name not in state)
        return self.large or frozen > tensors.MAX_COPIED_BYTES

    @cached_property
    def constants(self) -> tuple[str, ...]:
        """The frozen tensors that are inputs of every graph, which shares their memory."""
        if not self._shares_constants:
            return ()
        kept = self._packed_tensors.union(self.state)
        large = (n for n, size in self._sizes.items() if size > tensors.MAX_INLINE_BYTES)
        return tuple(name for name in large if name not in kept)

    @property
    def compiles_weights(self) -> bool:
        """Whether `predict` compiles the model with its tensors inside, like an exported file."""
        return self.evaluates_file or not self._shares_constants

    @classmethod
    def build(
        cls,
        trainable: TrainableModel,
        settings: TrainerSettings,
        *,
        needs_loss: bool = True,
        distillation: Distillation | None = None,
    ) -> Recipe:
        """Return the recipe for training a model, or raise an error that tells why it cannot train.

        A model without a loss can only predict. With `needs_loss=False` it can train with gradients
        from the caller. `distillation` has the model's teacher. Raises ModelError, GradientError,
        SettingError or UnknownNameError.
        """
        from onnxfit.step.differentiation import (
            check_gradient,  # imported late: it builds graphs from a recipe
        )

        optimizer = get_optimizer(settings.optimizer)
        precision = get_precision(settings.precision)
        normalized = normalize(trainable.model)
        if settings.stop_gradients is not None:
            stop_gradients(normalized, settings.stop_gradients)
        outputs = tensor_outputs(normalized)
        graph = normalized.graph
        graph.outputs[:] = [value for value in graph.outputs if value.name in outputs]
        objectives = get_objectives(settings.loss, settings.loss_weights, normalized, needed=False)
        _refuse_half_precision([outputs[name] for name in objectives if name in outputs])
        metrics = get_output_metrics(settings.metrics, objectives, outputs)
        differentiated = outputs_read(objectives) or [n for n in outputs if n == names.LOSS]
        patterns = trainable.selected(settings.weights)
        trains = bool(differentiated) or not needs_loss
        if not differentiated:
            differentiated = [name for name, spec in outputs.items() if spec.dtype.kind == "f"]
        if trains:
            weights = _trained_weights(normalized, patterns, differentiated)
        else:
            weights = _weights(normalized, patterns)
        initializers = graph.initializers
        dtypes = {name: spec_of(initializers[name]).dtype for name in weights}
        own = trainable.bounds
        penalties = penalties_for(settings.penalty, [name for name in weights if name not in own])
        optimizers = _optimizers(optimizer, normalized, weights)
        _check_settings_fit(dtypes, optimizers, penalties)
        slots = _initial_slots(optimizers, initializers)
        keep_batch_norms(normalized, settings.batch_norm)
        recipe = cls(
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
            clip_norm=clip_bound("clip_norm", settings.clip_norm, [norm_dtype(dtypes.values())]),
            clip_value=clip_bound("clip_value", settings.clip_value, dtypes.values()),
            trainable=None if trainable.is_file else trainable,
            layout=trainable.layout,
            state_outputs=dict(settings.state_outputs or {}),
            teacher=_teacher(distillation, trainable.layout, normalized, objectives),
        )
        trainable.check(recipe.weights, recipe.statistics)
        _warn_of_unmeasured(normalized, recipe.statistics if trains else ())
        _refuse_reserved_names(recipe)
        _refuse_inner_values(recipe)
        if trains:
            check_gradient(recipe)
        return recipe

    def with_numbers(self, trainable: TrainableModel, optimizer: Optimizer) -> Recipe:
        """Return the recipe of a file that differs only in the numbers of its tensors.

        - `optimizer`: the optimizer of this recipe, perhaps with another learning rate.
        """
        model = normalize(trainable.model)
        initializers = model.graph.initializers
        dtypes = {name: spec_of(initializers[name]).dtype for name in self.weights}
        optimizers = _optimizers(optimizer, model, self.weights)
        _check_settings_fit(dtypes, optimizers, self.penalties)
        return replace(
            self,
            model=model,
            optimizer=optimizer,
            optimizers=optimizers,
            slots=_initial_slots(optimizers, initializers),
            layout=trainable.layout,
        )

    def for_device(self, device: str) -> Recipe:
        """Return the recipe whose graphs have the forms for a kind of device.

        - `device`: "cpu", "cuda" or "webgpu".
        """
        gradient = gradient_source(self.gradient.name, device)
        return replace(self, device=device, gradient=gradient, built=None)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return the values of an initializer, without a copy where possible."""
        return _array_of(self.model.graph.initializers[name])

    @property
    def state(self) -> tuple[str, ...]:
        """The initializers that training changes: they are inputs of every step."""
        return (*self.weights, *self.statistics)

    @cached_property
    def loss_scale(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Tensor -> its value before the first step, for the scale of the loss and its counters."""
        return initial_state() if self.precision.scales_loss else {}

    @property
    def evaluates_file(self) -> bool:
        """Whether evaluation runs the file: `TrainableModel.evaluates_file`."""
        return self.trainable is not None and self.trainable.evaluates_file

    @property
    def evaluates_outputs(self) -> bool:
        """Whether evaluation computes the loss from outputs of the graph that `predict` runs.

        Evaluation then needs no session of the whole model, which has a copy of packed weights.
        """
        return self.evaluates_file or (bool(self.packed) and not self.inner_values)

    @property
    def inner_values(self) -> list[str]:
        """The values that a loss reads, but that are neither inputs nor outputs of the file."""
        read = [names.shown(name) for name in self.loss_outputs if names.is_read(name)]
        return [name for name in read if name not in self.input_names]

    @cached_property
    def input_names(self) -> frozenset[str]:
        """The names of the model's inputs."""
        return frozenset(spec.name for spec in self.inputs)

    @property
    def bounds(self) -> Bounds:
        """A mapping from weight to the bounds of its numbers: `TrainableModel.bounds`."""
        return self.trainable.bounds if self.trainable is not None else NO_BOUNDS

    @cached_property
    def max_learning_rate(self) -> float:
        """The largest learning rate that, times each weight's multiplier, fits its element type."""
        initializers = self.model.graph.initializers
        rates = [
            largest(spec_of(initializers[name]).dtype) / max(one.multiplier, 1.0)
            for name, one in self.optimizers.items()
            if one.schedule is None
        ]
        return min(rates, default=math.inf)

    @cached_property
    def schedules(self) -> dict[str, Callable[[int], float]]:
        """The schedules that only some weights follow, by the inputs that have their values."""
        found = schedules_of(self.optimizers.values())
        return {names.scheduled(i): schedule for i, schedule in enumerate(found)}

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs, rows first."""
        specs = (spec_of(value) for value in self.model.graph.inputs)
        without = {n for n, one in self.layout.inputs.items() if one.axis is None}
        return tuple(
            replace(spec, batch_axis=None) if spec.name in without else spec for spec in specs
        )

    @cached_property
    def data_inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs as data has them: in the layout of the file, without states."""
        moved = {name: one.spec for name, one in self.layout.inputs.items() if one.axis}
        states = set(self.state_outputs.values())
        return tuple(moved.get(spec.name, spec) for spec in self.inputs if spec.name not in states)

    @property
    def has_free_lengths(self) -> bool:
        """Whether the rows of an input may have different sizes, as sequences do."""
        sizes = [size for s in self.inputs for size in (s.shape or ())[int(s.has_rows) :]]
        return not all(isinstance(size, int) for size in sizes)

    @cached_property
    def outputs(self) -> dict[str, TensorSpec]:
        """The outputs of the file by name, which `predict` returns."""
        return {name: s for name, s in self.all_outputs.items() if not names.is_read(name)}

    @cached_property
    def all_outputs(self) -> dict[str, TensorSpec]:
        """The outputs by name, with the values that only a loss reads."""
        specs = [spec_of(value) for value in self.model.graph.outputs]
        return {spec.name: spec for spec in specs}

    @cached_property
    def loss_outputs(self) -> tuple[str, ...]:
        """The outputs that the losses read; empty if the caller supplies gradients."""
        own = [name for name in self.outputs if name == names.LOSS]
        return tuple(outputs_read(self.objectives) or own)

    @cached_property
    def float_outputs(self) -> tuple[str, ...]:
        """The float outputs, which can have a gradient."""
        return tuple(name for name, spec in self.outputs.items() if spec.dtype.kind == "f")

    @cached_property
    def targets(self) -> dict[str, LabelTarget]:
        """The labels that a batch needs, by the names of `label_names`."""
        return get_targets(self.objectives, self.outputs, self.layout.outputs)

    @cached_property
    def declared_batch(self) -> dict[str, TensorSpec]:
        """The batch that the model declares. Most sizes are symbols."""
        batch = {spec.name: spec for spec in self.inputs}
        return batch | {target.input: target.spec for target in self.targets.values()}


class StepBuilder(Protocol):
    """Function from a recipe and the specs of a batch's arrays to a graph."""

    def __call__(self, recipe: Recipe, batch: Batch, /) -> onnx.ModelProto: ...


def _packed_tensors(graph: ir.Graph) -> set[str]:
    """Return the inputs of every MatMulNBits but the first.

    Its kernel prepares constants when a session is created. Without constants, it took 2 to 45
    times as long (2048x2048, 1 to 32 rows).
    """
    nodes = [node for node in graph if node.op_type == "MatMulNBits"]
    return {value.name or "" for node in nodes for value in node.inputs[1:] if value is not None}


def _array_of(initializer: ir.Value) -> np.ndarray[Any, Any]:
    """Return an initializer's values, without a copy where possible."""
    assert initializer.const_value is not None
    return initializer.const_value.numpy()


def _optimizers(
    optimizer: Optimizer, model: ir.Model, weights: Sequence[str]
) -> dict[str, WeightOptimizer]:
    """Return the update of each weight."""
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
        name: initial_slots_to_read(one.optimizer, name, _array_of(initializers[name]))
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
    if precision.half is not None:
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
    inputs = [spec_of(value) for value in model.graph.inputs]
    opset = model.graph.opset_imports[""]
    losses = [name for name, one in objectives.items() if one.reads == (name,)]
    return distillation.teacher_of(inputs, tensor_outputs(model), losses, opset)


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

    Raises SettingError if a user selected a weight without a path, ModelError if no weight has one.
    """
    selected = select_weights(model, patterns)
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
