"""The ingredients of a training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any, Literal, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.gradients import GradientSource, gradient_source
from onnxfit.gradients.update import (
    NO_BOUNDS,
    Bounds,
    FrozenRows,
    schedules_of,
)
from onnxfit.graph import names, tensors
from onnxfit.graph.model import spec_of
from onnxfit.graph.quantized import quantized_weights
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.batch_axis import BatchLayout
from onnxfit.load.trainable import TrainableModel
from onnxfit.load.training_form import updated_statistics
from onnxfit.optimizers import Optimizer
from onnxfit.optimizers.base import WeightOptimizer, rate_at
from onnxfit.penalties import Penalty
from onnxfit.step.distillation import Teacher
from onnxfit.step.limits import largest
from onnxfit.step.loss_scale import initial_state
from onnxfit.step.loss_weights import loss_weights_of
from onnxfit.step.objectives import (
    LabelTarget,
    Objective,
    OutputMetric,
    get_targets,
    outputs_read,
)
from onnxfit.step.precision import FLOAT32, StepPrecision

Batch = Mapping[str, TensorSpec]  # every array of a batch: inputs, labels, sample weights
ReportedNorms = Literal["none", "global", "per_weight"]


MAX_GRAPHS = 8  # of one recipe, that trainers share


class BuiltGraphs:
    """The graphs of the steps of one recipe, in which other constants can be written."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._graphs: dict[Hashable, onnx.ModelProto] = {}

    def graph(
        self, key: Hashable, build: Callable[[], onnx.ModelProto], constants: Mapping[str, bytes]
    ) -> onnx.ModelProto:
        """Return a graph of its own for the caller; build it unless that was done before.

        - `key`: equal for graphs that differ only in constants.
        - `build`: returns the graph with these constants.
        - `constants`: the numbers of the model's constants by name.
        """
        with self._lock:
            built = self._graphs.get(key)
        graph = onnx.ModelProto()
        if built is not None:
            graph.CopyFrom(built)
            for tensor in graph.graph.initializer:
                if tensor.name in constants:
                    tensor.raw_data = constants[tensor.name]
            return graph
        built = build()
        # A constant that is missing may be part of another one.
        initializers = {tensor.name for tensor in built.graph.initializer}
        if constants.keys() <= initializers:
            graph.CopyFrom(built)
            with self._lock:
                if len(self._graphs) < MAX_GRAPHS:
                    self._graphs[key] = graph
        return built


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
    clip_adaptive: float | None = None
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
    def rounds_factors(self) -> bool:
        """Whether products on the CPU multiply numbers of bfloat16, and all else is float32."""
        is_bfloat16 = self.precision.half == ir.DataType.BFLOAT16 or self.precision.splits
        return is_bfloat16 and self.device == "cpu"

    @property
    def compiles_weights(self) -> bool:
        """Whether `predict` compiles the model with its tensors inside, like an exported file."""
        return self.evaluates_file or not self._shares_constants

    def for_device(self, device: str) -> Recipe:
        """Return the recipe whose graphs have the forms for a kind of device.

        - `device`: "cpu", "cuda", "npu" or "webgpu".
        """
        gradient = gradient_source(self.gradient.name, device)
        return replace(self, device=device, gradient=gradient, built=None)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return the values of an initializer, without a copy where possible."""
        return initializer_array(self.model.graph.initializers[name])

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
        """The values of the file that a loss reads, but that are neither its inputs nor outputs."""
        read = [names.shown(name) for name in self.loss_outputs if names.is_read(name)]
        own = self.loss_weights
        return [name for name in read if name not in self.input_names and name not in own]

    @cached_property
    def loss_weights(self) -> tuple[str, ...]:
        """The tensors of `model` that belong to losses, not to the file."""
        return tuple(loss_weights_of(outputs_read(self.objectives)))

    def initial_arrays(self, model: onnx.ModelProto) -> dict[str, np.ndarray[Any, Any]]:
        """Return copies of the tensors that training changes, before the first step.

        - `model`: the model that is trained, without the tensors of losses.
        """
        of_loss = {name: np.array(self.array(name)) for name in self.loss_weights}
        own = [name for name in self.state if name not in of_loss]
        arrays = {**tensors.initializer_arrays(model, own), **of_loss}
        return {name: arrays[name] for name in self.state}

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

    def check_scheduled(self, step: int) -> None:
        """Raise SettingError if a schedule gives a setting an impossible value at an update."""
        for optimizer in self._scheduled:
            schedules = optimizer.scheduled_settings()
            values = {name: rate_at(schedule, step) for name, schedule in schedules.items()}
            optimizer.with_scheduled(values.__getitem__)

    @cached_property
    def _scheduled(self) -> list[Optimizer]:
        """The optimizers of weights that have schedules of settings."""
        found = {id(one.optimizer): one.optimizer for one in self.optimizers.values()}
        return [one for one in found.values() if one.scheduled_settings()]

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
    def learned_outputs(self) -> tuple[str, ...]:
        """The outputs that the losses read in training: also those that follow a teacher."""
        features = {} if self.teacher is None else self.teacher.features
        return tuple(dict.fromkeys([*self.loss_outputs, *features]))

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


def initializer_array(initializer: ir.Value) -> np.ndarray[Any, Any]:
    """Return an initializer's values, without a copy where possible."""
    assert initializer.const_value is not None
    return initializer.const_value.numpy()
