"""The full backend: forward pass, loss, penalty, gradients and update are one graph."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from onnxfit.data import Batch
from onnxfit.graph import names
from onnxfit.runtime.backends.backend import Array, Backend, run_on, write_scalars
from onnxfit.runtime.backends.shape_cache import Specs
from onnxfit.runtime.session import BoundSession
from onnxfit.step.graphs import accumulate_graph, compact_train_graph, train_graph, update_graph
from onnxfit.step.update import fused_weights

__all__ = ["FullBackend"]


class FullBackend(Backend):
    """One graph per step, run once per batch: the fastest way to train with a loss."""

    name = "full"
    needs_loss = True
    shows_gradients = False
    steps_by_hand = False
    kinds = ("train", "accumulate", "evaluate", "predict")

    def train(self, batch: Batch, learning_rate: float, step: int, seed: int) -> BoundSession:
        session: BoundSession
        if self.accumulate == 1 and not self.window:
            session = self.compiled("train", batch)
            write_scalars(session, learning_rate, step, seed)
            self.last_update = run_on(session, batch)
            return session
        session = self.compiled("accumulate", batch)
        # Each batch of a window draws random numbers of its own.
        write_scalars(session, learning_rate, step * self.accumulate + self.window, seed)
        session.feeds[names.FIRST][()] = self.window == 0
        run_on(session, batch)
        self.window += 1
        self.last_update = None
        if self.window >= self.accumulate:
            self.flush(learning_rate, step)
        return session

    def graph(self, kind: str, shapes: Specs) -> onnx.ModelProto:
        if kind == "train":
            return compact_train_graph(self.recipe, shapes, self.fused)
        if kind == "accumulate":
            return accumulate_graph(self.recipe, shapes)
        return super().graph(kind, shapes)

    def step_graphs(self, shapes: Specs) -> dict[str, onnx.ModelProto]:
        if not self.can_accumulate:
            return {"train": train_graph(self.recipe, shapes)}
        return {
            "accumulate": accumulate_graph(self.recipe, shapes),
            "update": update_graph(self.recipe, shapes),
        }

    def _fuse_weights(self, arrays: Mapping[str, Array]) -> dict[str, list[str]]:
        if self.can_accumulate or self.device.kind != "cpu":
            return {}
        weights = {name: arrays[name] for name in self.recipe.weights}
        groups = fused_weights(self.recipe.optimizer, weights, self.recipe.slots)
        return {names.fused(i): members for i, members in enumerate(groups)}
