"""The parts of a training step: model, weights, losses, penalties, optimizer and source of
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.gradients import GradientSource
from onnxfit.graph import names, tensors
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.training_form import updated_statistics
from onnxfit.optimizers import Optimizer
from onnxfit.penalties import Penalty
from onnxfit.step.objectives import Objective

Batch = Mapping[str, TensorSpec]  # every array of a batch: inputs, labels, sample weights


@dataclass(frozen=True)
class Recipe:
    """Everything a step is made of.

    `model` is the working form of the user's model and is never changed.

    `objectives` is empty for a model that brings its own scalar output `loss`; `metric_outputs` are
    the outputs that a training or evaluation step hands out because a metric looks at them; `slots`
    holds each weight's slots before the first update.
    """

    model: ir.Model
    weights: tuple[str, ...]
    objectives: Mapping[str, Objective]
    penalties: Mapping[str, Penalty]
    optimizer: Optimizer
    gradient: GradientSource
    slots: Mapping[str, Mapping[str, np.ndarray[Any, Any]]]
    metric_outputs: tuple[str, ...] = ()
    batch_norm: str = "train"
    clip_norm: float | None = None
    clip_value: float | None = None
    statistics: tuple[str, ...] = field(init=False)
    large: bool = field(init=False)  # more than one graph can hold
    # then, frozen tensors that are inputs of every step, too
    constants: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "statistics", tuple(updated_statistics(self.model, self.weights, self.batch_norm))
        )
        sizes = {
            name: value.const_value.nbytes
            for name, value in self.model.graph.initializers.items()
            if value.const_value
        }
        large = sum(sizes.values()) > tensors.MAX_MODEL_BYTES
        frozen = [
            name
            for name, size in sizes.items()
            if large and size > tensors.MAX_INLINE_BYTES and name not in self.state
        ]
        object.__setattr__(self, "constants", tuple(frozen))
        object.__setattr__(self, "large", large)

    @property
    def state(self) -> tuple[str, ...]:
        """The initializers that training changes: they are inputs of every step."""
        return (*self.weights, *self.statistics)

    @property
    def loss_outputs(self) -> tuple[str, ...]:
        """The outputs that the loss looks at; none where a caller brings gradients himself."""
        own = [v.name for v in self.model.graph.outputs if v.name == names.LOSS]
        return tuple(self.objectives or own)


class StepBuilder(Protocol):
    """A function below: from a recipe and the arrays of a batch to a graph."""

    def __call__(self, recipe: Recipe, batch: Batch, /) -> onnx.ModelProto: ...
