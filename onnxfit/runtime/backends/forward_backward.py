"""The forward_backward backend: a step as separate graphs.

Forward pass, loss, backward pass, penalty and update are one graph each. Between them, the
gradients can be read and changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir

from onnxfit.data import Batch
from onnxfit.graph import names
from onnxfit.losses import NLL
from onnxfit.runtime.backends.backend import Array, Backend
from onnxfit.runtime.backends.forward_pass import ForwardBackward, ForwardPass
from onnxfit.runtime.backends.inputs import share_of_rows, write_batch
from onnxfit.runtime.backends.shape_cache import Specs
from onnxfit.runtime.backends.two_sessions import compile_passes
from onnxfit.runtime.reduction import GradientReduction
from onnxfit.runtime.session import BoundSession
from onnxfit.runtime.values import array_of, copied_arrays
from onnxfit.step import split
from onnxfit.step.forward import reports_penalty
from onnxfit.step.graphs import accumulate_graph, update_graph
from onnxfit.step.recipe import Recipe
from onnxfit.step.split import SplitStep
from onnxfit.step.tracker import StepResult

__all__ = ["ForwardBackwardBackend"]


@dataclass(eq=False)
class StepSessions:
    """The sessions of a batch up to its gradients, and the results of the last batch.

    - `passes`: the forward and the backward pass.
    - `loss`: the session of the loss.
    - `outputs_read`: the outputs of the forward pass that the loss reads.
    - `output_gradients`: output of the model -> the loss session's name of its gradient.
    - `forward`: the last forward pass; None before the first batch.
    - `scalars`: the loss of the last batch, and its terms.
    """

    passes: ForwardBackward
    loss: BoundSession
    outputs_read: Sequence[str]
    output_gradients: Mapping[str, str]
    forward: ForwardPass | None = None
    scalars: Mapping[str, Array] = field(default_factory=dict)

    def prediction(self) -> dict[str, Array]:
        """Return copies of the model's outputs for the last batch."""
        assert self.forward is not None
        own = {n: value for n, value in self.forward.outputs.items() if not names.reserved(n)}
        return copied_arrays(own)

    def inputs_of(self, batch: Batch) -> Mapping[str, Array]:
        """Return the arrays of `batch`, which was just run."""
        return self.loss.inputs_of(batch)


@dataclass(frozen=True)
class StepGraphs:
    """The graphs of a step up to its gradients, from one split of the model.

    - `outputs_read`: the outputs of the forward pass that the loss reads.
    """

    passes: SplitStep
    loss: onnx.ModelProto
    output_gradients: Mapping[str, str]
    outputs_read: Sequence[str]


class ForwardBackwardBackend(Backend):
    """Separate graphs per step, so that gradients can be read, changed or come from the caller."""

    name = "forward_backward"
    needs_loss = False
    shows_gradients = True
    steps_by_hand = True
    kinds = ("step", "counts", "evaluate", "predict")

    def train(self, batch: Batch, learning_rate: float, step: int, seed: int) -> StepResult | None:
        if not batch.rows:
            self._finish_step(self._without_rows(batch), learning_rate, step)
            return None
        compiled: StepSessions = self.compiled("step", batch)
        gradients = self._run_passes(compiled, batch, step, seed)
        self._finish_step(gradients, learning_rate, step)
        return compiled

    def loss_and_gradients(
        self, batch: Batch, step: int, seed: int
    ) -> tuple[float, dict[str, Array]]:
        """Return the loss of a batch with its penalties, and the gradient of each weight, without
        an update.
        """
        compiled: StepSessions = self.compiled("step", batch)
        gradients = self._run_passes(compiled, batch, step, seed)
        loss = float(compiled.scalars[names.TOTAL])
        return loss, {name: array_of(value) for name, value in gradients.items()}

    def _run_passes(
        self, compiled: StepSessions, batch: Batch, step: int, seed: int
    ) -> dict[str, Any]:
        """Run forward pass, loss and backward pass; return the gradients of the weights."""
        passes = compiled.passes
        if passes.feeds:
            batch.write(passes.feeds)
        values = {} if passes.feeds else batch.arrays()
        compiled.forward = passes.forward(values, self.accumulator.number(step), seed)
        return self._gradients(compiled, compiled.forward, batch)

    def _finish_step(self, gradients: Mapping[str, Any], learning_rate: float, step: int) -> None:
        """Update with the gradients of a batch, or add them to the window's gradients."""
        if not self.accumulator.is_used:
            self.apply(gradients, learning_rate, step)
            return
        self._accumulate(gradients)
        if self.accumulator.is_full:
            self.flush(learning_rate, step)

    def apply(self, gradients: Mapping[str, Any], learning_rate: float, step: int) -> None:
        session = self.batchless_session("apply")
        self.write_scalars(session, learning_rate, step, 0)
        session.run({names.gradient(name): value for name, value in gradients.items()})
        self.last_update = session

    def add_penalty(self, gradients: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        if not self.recipe.penalties:
            return dict(gradients), 0.0
        session = self.batchless_session("penalty")
        session.run({names.gradient(name): gradients[name] for name in self.recipe.penalties})
        outputs = session.outputs()
        penalised = {
            name: outputs.get(names.penalised(name), value) for name, value in gradients.items()
        }
        return penalised, session.scalars[names.PENALTY][()]

    def step_graphs(self, shapes: Specs) -> dict[str, onnx.ModelProto]:
        recipe = self.recipe
        if recipe.loss_outputs:
            split_graphs = loss_and_passes(recipe, shapes)
            passes = split_graphs.passes
            graphs = {
                "forward": passes.forward,
                "loss": split_graphs.loss,
                "backward": passes.backward,
            }
        else:
            passes = split_for_training(recipe, shapes)
            graphs = {"forward": passes.forward, "backward": passes.backward}
        if recipe.penalties:
            graphs["penalty"] = self.graph("penalty", shapes)
        if self.accumulator.enabled:
            graphs["accumulate"] = self.graph("accumulate", shapes)
        graphs["update"] = self.graph("update" if self.accumulator.enabled else "apply", shapes)
        return graphs

    def graph(self, kind: str, shapes: Specs) -> onnx.ModelProto:
        if kind == "penalty":
            return split.penalty_graph(self.recipe, shapes)
        if kind == "accumulate":
            return accumulate_graph(self.recipe, shapes, whole=False)
        if kind == "apply":
            return update_graph(self.recipe)
        return super().graph(kind, shapes)

    def compile(self, kind: str, shapes: Specs) -> Any:
        if kind != "step":
            return super().compile(kind, shapes)
        graphs = loss_and_passes(self.recipe, shapes, shared=self.reduction is not None)
        if self.reduction is not None and self.recipe.gradient.name != "onnxruntime":
            self.reduction.announce(graphs.passes.backward, graphs.passes.input_gradients)
        passes = compile_passes(
            graphs.passes,
            self.state,
            self.device,
            self.threads,
            self.recipe.gradient,
            alternating=True,
            gradients=self.reduction.buffers if self.reduction is not None else None,
        )
        loss = self.bind(
            "loss", graphs.loss, per_run_inputs=graphs.outputs_read, overwrite_outputs=True
        )
        return StepSessions(passes, loss, graphs.outputs_read, graphs.output_gradients)

    def _gradients(
        self, compiled: StepSessions, forward: ForwardPass, batch: Batch
    ) -> dict[str, Any]:
        """Run loss and backward pass; return the weights' gradients, which callbacks may change."""
        loss = compiled.loss
        if self.reduction is not None:
            self.write_shares(loss, batch)
        read = compiled.outputs_read
        loss.run({**write_batch(loss, batch), **{name: forward.outputs[name] for name in read}})
        values = loss.outputs()
        output_gradients = {
            output: values[gradient]
            for output, gradient in compiled.output_gradients.items()
            if output in compiled.passes.graphs.output_gradients
        }
        with self.reduction.overlapped() if self.reduction is not None else nullcontext():
            gradients = compiled.passes.backward(forward, output_gradients)
        if self.reduction is None:
            gradients, penalty = self.add_penalty(gradients)
        else:
            self.reduction.take(gradients)
            own = loss.scalars[names.SHARED].item()
            gradients, penalty = self._whole_gradients(self.reduction, own, batch)
        compiled.scalars = {**loss.scalars, names.TOTAL: loss.scalars[names.TOTAL] + penalty}
        if self.recipe.penalties and reports_penalty(self.recipe.objectives):
            own_terms = loss.scalars.get(names.PENALTY, 0)  # of variances and of a teacher
            compiled.scalars[names.PENALTY] = penalty + own_terms
        if self.on_gradients is not None:
            self._call_on_gradients(gradients)
        return gradients

    def _whole_gradients(
        self, reduction: GradientReduction, loss: float, batch: Batch
    ) -> tuple[dict[str, Any], Any]:
        """Return the gradients of the whole batch, penalties included, and the penalties' sum.

        `loss` is this rank's summand of the loss without penalties.
        """
        loss = reduction.sum(share_of_rows(batch), loss, self.state)
        gradients, penalty = self.add_penalty(reduction.own_sums())
        self.shared_loss = loss + float(penalty)
        return gradients, penalty

    def _without_rows(self, batch: Batch) -> dict[str, Any]:
        """Return the gradients of the whole batch, on a rank without a row."""
        assert self.reduction is not None
        self.shares_of_counts(batch)
        self.reduction.clear()
        gradients, _ = self._whole_gradients(self.reduction, 0.0, batch)
        if self.on_gradients is not None:
            self._call_on_gradients(gradients)
        return gradients

    def _call_on_gradients(self, gradients: dict[str, Any]) -> None:
        """Let callbacks read and change the gradients, with the step's lock released."""
        assert self.on_gradients is not None
        arrays = {name: array_of(value) for name, value in gradients.items()}
        self.unlock()
        try:
            with self.world.forbid_collectives_in_step("on_gradients"):
                self.on_gradients(arrays)
        finally:
            self.relock()
        for name, value in gradients.items():
            if not self.device.on_host:
                value.update_inplace(arrays[name])

    def _accumulate(self, gradients: Mapping[str, Any]) -> None:
        """Add the gradients of a batch to the window's gradients."""
        session = self.batchless_session("accumulate")
        session.feeds[names.FIRST][()] = not self.accumulator.count
        session.run({names.gradient(name): value for name, value in gradients.items()})
        self.accumulator.add()
        self.last_update = None


def split_for_training(recipe: Recipe, shapes: Specs) -> SplitStep:
    """Return the forward and the backward pass, with the weights' gradients.

    The outputs are those that the loss reads; without a loss, all outputs.
    """
    outputs = [v.name or "" for v in recipe.model.graph.outputs]
    learned = recipe.learned_outputs
    needed = [*learned, *recipe.state_outputs] if recipe.loss_outputs else outputs
    scored = [
        output
        for output, objective in recipe.objectives.items()
        if hasattr(objective.loss, "from_logits") or isinstance(objective.loss, NLL)
    ]
    return split.split_step(
        recipe,
        shapes,
        [name for name in outputs if name in needed],
        recipe.weights,
        scored,
        [name for name in recipe.state_outputs if name not in learned],
    )


def loss_and_passes(recipe: Recipe, shapes: Specs, *, shared: bool = False) -> StepGraphs:
    """Split the model for training into both passes and the loss between them.

    `shared` is as for `add_loss_outputs`.
    """
    passes = split_for_training(recipe, shapes)
    outputs = {v.name: v for v in ir.from_proto(passes.forward).graph.outputs}
    read = {name: outputs[passes.logarithms.get(name, name)] for name in recipe.learned_outputs}
    loss, output_gradients = split.loss_graph(recipe, shapes, read, shared=shared)
    return StepGraphs(passes, loss, output_gradients, [v.name or "" for v in read.values()])
