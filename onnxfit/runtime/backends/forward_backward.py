"""The forward_backward backend: forward, loss, backward, penalty and update are separate graphs,
and gradients are there in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.data import Batch
from onnxfit.graph import names
from onnxfit.runtime.backends.backend import Array, Backend, Specs, specs, write_scalars
from onnxfit.runtime.backends.forward_pass import Pass, Passes
from onnxfit.runtime.backends.two_sessions import make_passes
from onnxfit.runtime.session import BoundSession
from onnxfit.runtime.values import array_of
from onnxfit.step import split
from onnxfit.step.recipe import Recipe
from onnxfit.step.tracker import StepResult


@dataclass(eq=False)
class CompiledStep:
    """What a batch goes through: the passes, and the loss between them.

    It is the report of its last batch.
    """

    passes: Passes
    loss: BoundSession
    handed: Mapping[str, str]  # output -> the loss graph's name for its gradient
    last: Pass | None = None
    scalars: Mapping[str, Array] = None  # type: ignore[assignment]  # there after the first batch

    def prediction(self) -> dict[str, Array]:
        assert self.last is not None
        return {name: np.array(value.numpy()) for name, value in self.last.outputs.items()}

    def fed(self, batch: Batch) -> Mapping[str, Array]:
        return self.loss.fed(batch)


class ForwardBackwardBackend(Backend):
    """Gradients can be read, changed or brought from outside before the update."""

    builders = {
        "forward": lambda recipe, batch: _training_passes(recipe, batch).forward,
        "loss": lambda recipe, batch: _loss(recipe, batch, _training_passes(recipe, batch))[0],
        "backward": lambda recipe, batch: _training_passes(recipe, batch).backward,
        "penalty": split.penalty_graph,
        "accumulate": split.accumulate_graph,
        "apply": split.update_graph,
    }

    @property
    def kinds(self) -> tuple[str, ...]:
        penalty = ["penalty"] if self.recipe.penalties else []
        accumulate = ["accumulate"] if self.adds_up else []
        loss_outputs = self.recipe.loss_outputs
        return (
            "forward", *(["loss"] if loss_outputs else []), "backward", *penalty, *accumulate, "update", *(["evaluate"] if loss_outputs else []), "predict",
        )  # fmt: skip

    def graph(self, kind: str, batch: Specs) -> onnx.ModelProto:
        return super().graph("apply" if kind == "update" and not self.adds_up else kind, batch)

    def train(self, batch: Batch, learning_rate: float, step: int, seed: int) -> StepResult:
        chain = self.compiled("chain", batch.signature, lambda: specs(batch), self._chain)
        passes = chain.passes
        if passes.feeds:
            batch.write(passes.feeds)
        values = {} if passes.feeds else batch.arrays()
        chain.last = forward = passes.forward(values, step * self.accumulate + self.window, seed)
        try:
            gradients = self._gradients(chain, forward, batch)
            if self.accumulate == 1 and not self.window:
                self.apply(gradients, learning_rate, step)
            else:
                self._add(gradients)
        except BaseException:
            self.state.revert(["statistics"])  # what the forward pass wrote
            raise
        if self.window >= self.accumulate:
            self.flush(learning_rate, step)
        return chain

    def apply(self, gradients: Mapping[str, Any], learning_rate: float, step: int) -> None:
        """Clip, and give every weight and slot its next value."""
        runner = self.once("apply")
        write_scalars(runner, learning_rate, step, 0)
        runner.run({names.gradient(name): value for name, value in gradients.items()})

    def penalised(self, gradients: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The gradients with those of the penalties added, and the penalties' sum."""
        if not self.recipe.penalties:
            return dict(gradients), 0.0
        runner = self.once("penalty")
        runner.run({names.gradient(name): gradients[name] for name in self.recipe.penalties})
        found = runner.outputs()
        return {
            name: found.get(names.penalised(name), value) for name, value in gradients.items()
        }, runner.scalars[names.PENALTY][()]

    def _gradients(self, chain: CompiledStep, forward: Pass, batch: Batch) -> dict[str, Any]:
        """Loss and backward pass; the gradients of the weights, as callbacks left them."""
        loss = chain.loss
        if any(name in loss.open_inputs for name, _ in batch.columns):
            arrays = batch.arrays()
            for name in arrays.keys() & loss.feeds.keys():
                loss.feeds[name][...] = arrays[name]
        else:
            arrays = {}
            batch.write(loss.feeds)
        loss.run({**arrays, **forward.outputs})
        found = loss.outputs()
        arriving = {
            name: found[self_name]
            for name, self_name in chain.handed.items()
            if name in chain.passes.graphs.arriving
        }
        gradients, penalty = self.penalised(chain.passes.backward(forward, arriving))
        chain.scalars = {**loss.scalars, names.TOTAL: loss.scalars[names.TOTAL] + penalty}
        if self.on_gradients is not None:
            self._show(gradients)
        return gradients

    def _show(self, gradients: dict[str, Any]) -> None:
        """Let callbacks read and change the gradients."""
        assert self.on_gradients is not None
        arrays = {name: array_of(value) for name, value in gradients.items()}
        self.on_gradients(arrays)
        for name, value in gradients.items():
            if self.device.kind != "cpu":
                value.update_inplace(arrays[name])

    def _add(self, gradients: Mapping[str, Any]) -> None:
        """Add the gradients of a batch to those of its window."""
        runner = self.once("accumulate")
        runner.feeds[names.FIRST][()] = self.window == 0
        runner.run({names.gradient(name): value for name, value in gradients.items()})
        self.window += 1

    def _chain(self, shapes: Specs) -> CompiledStep:
        graphs = _training_passes(self.recipe, shapes)
        model, handed = _loss(self.recipe, shapes, graphs)
        return CompiledStep(
            make_passes(
                graphs,
                self.state,
                self.device,
                self.threads,
                self.recipe.gradient,
                alternating=True,
            ),
            BoundSession(
                model,
                self.state,
                self.device,
                self.threads,
                "loss",
                given=graphs.outputs,
                reuse=True,
            ),
            handed,
        )


def _training_passes(recipe: Recipe, batch: Specs) -> split.Passes:
    """Both passes with the outputs that the loss and the metrics look at (all, where there is no
    loss), differentiated by the weights.
    """
    outputs = [v.name for v in recipe.model.graph.outputs]
    wanted = {*(recipe.loss_outputs or outputs), *recipe.metric_outputs}
    return split.passes(
        recipe,
        batch,
        [v.name or "" for v in recipe.model.graph.outputs if v.name in wanted],
        recipe.weights,
    )


def _loss(
    recipe: Recipe, batch: Specs, graphs: split.Passes
) -> tuple[onnx.ModelProto, dict[str, str]]:
    outputs = {v.name: v for v in ir.from_proto(graphs.forward).graph.outputs}
    return split.loss_graph(recipe, batch, [outputs[name] for name in recipe.loss_outputs])
