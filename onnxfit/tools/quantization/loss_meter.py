"""The loss of outputs from any model or session."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import onnx

from onnxfit.data import Batch
from onnxfit.errors import SettingError, listed_names
from onnxfit.graph import names
from onnxfit.graph.model import model_errors, tensor_outputs
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.normalize import normalize
from onnxfit.load.opset import empty_graph
from onnxfit.load.reading import read_model
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.device import CPU
from onnxfit.runtime.session import BoundSession
from onnxfit.step.finish import finish
from onnxfit.step.forward import add_loss_outputs, keep_outputs
from onnxfit.step.objectives import (
    LabelTarget,
    Losses,
    get_objectives,
    get_targets,
    label_names,
    outputs_read,
)
from onnxfit.step.tracker import Tracker
from onnxfit.trainable.quantized.parameters import Array


class LossMeter:
    """Computes the loss of a model's outputs in a graph of its own.

    - `model`: the model, which decides whether its outputs are logits.
    - `loss`: as for `Trainer`.

    SettingError or UnknownNameError: the loss does not fit the outputs.
    """

    @model_errors()
    def __init__(self, model: onnx.ModelProto, loss: Losses) -> None:
        work = normalize(read_model(model))
        self._outputs = tensor_outputs(work)
        self._objectives = get_objectives(loss, None, work)
        hidden = [names.shown(name) for name in self.reads if names.is_read(name)]
        if hidden:
            raise SettingError(
                f"The loss reads {listed_names(hidden)}, but here it can read outputs of the model"
                " only. Export the model with these values as outputs."
            )
        self._sessions: dict[tuple[str, ...], BoundSession] = {}

    @cached_property
    def targets(self) -> dict[str, LabelTarget]:
        """The labels that the loss needs, by the names of `label_names`."""
        return get_targets(self._objectives, self._outputs)

    @cached_property
    def reads(self) -> list[str]:
        """The outputs that the loss reads."""
        return outputs_read(self._objectives)

    @property
    def losses(self) -> dict[str, list[str]]:
        """The names of the labels of each loss."""
        return label_names(self._objectives)

    def tracker(self) -> Tracker:
        """Return a new sum of losses."""
        return Tracker(self._objectives, ())

    def add(self, tracker: Tracker, outputs: Mapping[str, Array], batch: Batch) -> None:
        """Add the loss of a batch's `outputs` to a tracker; the batch has the labels."""
        arrays = batch.arrays()
        session = self._session(tuple(filter(names.is_sample_weight, arrays)))
        session.run({**arrays, **outputs})
        tracker.update(session, batch)

    def _session(self, weights: tuple[str, ...]) -> BoundSession:
        if weights not in self._sessions:
            graph = self._graph(weights)
            inputs = [value.name for value in graph.graph.input]
            state = DoubleBufferedState({}, CPU)
            self._sessions[weights] = BoundSession(
                graph, state, CPU, None, "loss", per_run_inputs=inputs
            )
        return self._sessions[weights]

    @model_errors()
    def _graph(self, weights: tuple[str, ...]) -> onnx.ModelProto:
        """Return a model whose inputs are the outputs of `model`, their labels and `weights`."""
        op = empty_graph("loss")
        batch = {}
        for name in self.reads:
            y = self._outputs[name]
            op.graph.outputs.append(op.input(name, y.dtype, y.shape or ()).ir)
        for target in self.targets.values():
            batch[target.input] = target.spec
        for name in weights:
            batch[name] = TensorSpec(name, np.dtype(np.float32), ("batch",))
        add_loss_outputs(op, self._objectives, {}, batch)
        keep_outputs(op, ())
        return finish(op)
