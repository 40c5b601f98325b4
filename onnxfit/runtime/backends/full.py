"""The full backend: forward pass, loss, penalty, gradients and update are one graph."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import onnx

from onnxfit.data import Batch
from onnxfit.graph import names
from onnxfit.runtime.backends.backend import Array, Backend
from onnxfit.runtime.backends.inputs import run_on, share_of_rows
from onnxfit.runtime.backends.shape_cache import Specs
from onnxfit.runtime.joined_weights import join_weights, weights_to_join
from onnxfit.runtime.reduction import GradientReduction
from onnxfit.runtime.session import BoundSession
from onnxfit.step.differentiation import is_scaled
from onnxfit.step.graphs import (
    accumulate_graph,
    compact_train_graph,
    gradient_graph,
    train_graph,
    update_graph,
)
from onnxfit.step.recipe import Recipe
from onnxfit.step.update import FUSING, fused_weights

__all__ = ["FullBackend"]


class FullBackend(Backend):
    """One graph per step, run once per batch: the fastest way to train with a loss."""

    name = "full"
    needs_loss = True
    shows_gradients = False
    steps_by_hand = False
    reduces_each_batch = False
    kinds: ClassVar[tuple[str, ...]] = (
        "train",
        "gradients",
        "accumulate",
        "counts",
        "evaluate",
        "predict",
    )

    def __init__(self, recipe: Recipe, arrays: Mapping[str, Array], **settings: Any) -> None:
        super().__init__(recipe, arrays, **settings)
        # For each batch in a window with pending gradients: only statistics and loss.
        self._window_reduction: GradientReduction | None = None
        if self.world.shares_gradients and self.accumulator.enabled:
            statistics = {name: arrays[name] for name in recipe.statistics}
            self._window_reduction = GradientReduction(self.world, {}, statistics, self.device)

    def train(
        self, batch: Batch, learning_rate: float, step: int, seed: int
    ) -> BoundSession | None:
        if self.accumulator.is_used:
            accumulated = self._accumulate(batch, learning_rate, step, seed)
            if self.accumulator.is_full:
                self.flush(learning_rate, step)
            return accumulated
        if self.reduction is not None:
            return self._train_share(self.reduction, batch, learning_rate, step, seed)
        session: BoundSession = self.compiled("train", batch)
        self.write_scalars(session, learning_rate, step, seed)
        self.last_update = run_on(session, batch)
        return session

    def _train_share(
        self,
        reduction: GradientReduction,
        batch: Batch,
        learning_rate: float,
        step: int,
        seed: int,
    ) -> BoundSession | None:
        """Train on this rank's share of a batch; the ranks add up their gradients between two
        graphs.
        """
        with reduction.overlapped() if batch.rows else nullcontext():
            session = self._run_share("gradients", batch, learning_rate, step, seed)
        if session is None:
            reduction.clear()
        self._reduce(reduction, session, batch)
        update = self._batchless.get("apply") or self._compile_apply(reduction)
        self.write_scalars(update, learning_rate, step, 0)
        update.run()
        self.last_update = update
        return session

    def _compile_apply(self, reduction: GradientReduction) -> BoundSession:
        """Return the graph of the update, bound to the gradients that the ranks have summed."""
        buffers = {names.gradient(w): buffer for w, buffer in reduction.sums.items()}
        self._batchless["apply"] = self.bind(
            "apply", self.graph("apply", {}), input_buffers=buffers, overwrite_outputs=True
        )
        return self._batchless["apply"]

    def _accumulate(
        self, batch: Batch, learning_rate: float, step: int, seed: int
    ) -> BoundSession | None:
        """Add the gradients of a batch to the window's gradients."""
        number = self.accumulator.number(step)
        session = self._run_share("accumulate", batch, learning_rate, number, seed)
        if session is None and not self.accumulator.count:
            self.accumulator.set_to_zeros()
        if self._window_reduction is not None:
            self._reduce(self._window_reduction, session, batch)
        self.accumulator.add()
        self.last_update = None
        return session

    def _reduce(
        self, reduction: GradientReduction, session: BoundSession | None, batch: Batch
    ) -> None:
        """Sum the buffers of `reduction`, and the loss of the batch, over all ranks."""
        loss = session.scalars[names.SHARED].item() if session is not None else 0.0
        self.shared_loss = reduction.sum(share_of_rows(batch), loss, self.state)

    def _run_share(
        self, kind: str, batch: Batch, learning_rate: float, step: int, seed: int
    ) -> BoundSession | None:
        """Run a graph on a batch, and return its session; None for a rank without a row."""
        if not batch.rows:
            self.shares_of_counts(batch)
            return None
        session: BoundSession = self.compiled(kind, batch)
        self.write_scalars(session, learning_rate, step, seed)
        if self.reduction is not None:
            self.write_shares(session, batch)
        if names.FIRST in session.feeds:
            session.feeds[names.FIRST][()] = not self.accumulator.count
        return run_on(session, batch)

    def graph(self, kind: str, shapes: Specs) -> onnx.ModelProto:
        if kind == "train":
            graph = compact_train_graph(self.recipe, shapes, self._updated_as_one)
            return join_weights(graph, self._joined)
        if kind == "gradients":
            return gradient_graph(self.recipe, shapes, shared=self.reduction is not None)
        if kind == "apply":
            scaled = is_scaled(self.recipe)
            return update_graph(self.recipe, self._updated_as_one, scaled=scaled)
        if kind == "accumulate":
            shared = self.reduction is not None
            return accumulate_graph(self.recipe, shapes, shared=shared)
        return super().graph(kind, shapes)

    def compile(self, kind: str, shapes: Specs) -> Any:
        if kind != "gradients" or self.reduction is None:
            return super().compile(kind, shapes)
        buffers = {names.gradient(w): buffer for w, buffer in self.reduction.buffers.items()}
        graph = self.graph(kind, shapes)
        self.reduction.announce(graph, {w: names.gradient(w) for w in self.reduction.buffers})
        return self.bind(kind, graph, output_buffers=buffers)

    def step_graphs(self, shapes: Specs) -> dict[str, onnx.ModelProto]:
        if not self.accumulator.enabled:
            return {"train": train_graph(self.recipe, shapes)}
        return {
            "accumulate": accumulate_graph(self.recipe, shapes),
            "update": update_graph(self.recipe, averages=True),
        }

    def _fuse_weights(self, arrays: Mapping[str, Array]) -> dict[str, list[str]]:
        recipe = self.recipe
        weights = {n: arrays[n] for n in recipe.weights if n not in recipe.frozen_rows}
        # Weights with slots are updated as one tensor. Weights without slots are updated one by
        # one, but a step reads and writes many of them as one tensor.
        self._updated_as_one: dict[str, list[str]] = {}
        self._joined: dict[str, list[str]] = {}
        if not self.accumulator.enabled and self.device.kind in FUSING:
            forms = self.device.forms
            groups = fused_weights(recipe.optimizers, weights, recipe.slots, recipe.bounds, forms)
            self._updated_as_one = {names.fused(i): members for i, members in enumerate(groups)}
            # Only the graph of a whole step, in one process, joins them.
            if "train" in self.kinds and not self.world.shares_gradients:
                alone = {name: w for name, w in weights.items() if not recipe.slots[name]}
                groups = weights_to_join(alone)
                self._joined = {names.joined(i): members for i, members in enumerate(groups)}
        return {**self._updated_as_one, **self._joined}
