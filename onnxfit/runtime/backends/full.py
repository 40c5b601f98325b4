"""The full backend: forward, loss, penalty, gradient and update are one graph, run once per batch."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from onnxfit.data import Batch
from onnxfit.graph import names
from onnxfit.optimizers import fused_weights
from onnxfit.runtime.backends.backend import Array, Backend, Specs, run_on, write_scalars
from onnxfit.runtime.session import BoundSession
from onnxfit.step.graphs import accumulate_graph, compact_train_graph, train_graph


class FullBackend(Backend):
    """The fastest way to train a model whose loss is known."""

    builders = {"train": train_graph, "accumulate": accumulate_graph}

    @property
    def kinds(self) -> tuple[str, ...]:
        return (
            ("train", "evaluate", "predict")
            if not self.adds_up
            else ("accumulate", "update", "evaluate", "predict")
        )

    def _fused_weights(self, arrays: Mapping[str, Array]) -> dict[str, list[str]]:
        if self.adds_up or self.device.kind != "cpu":
            return {}
        weights = {name: arrays[name] for name in self.recipe.weights}
        found = fused_weights(self.recipe.optimizer, weights, self.recipe.slots)
        return {names.fused(i): members for i, members in enumerate(found)}

    def compact_graph(self, kind: str, batch: Specs) -> onnx.ModelProto:
        return (
            compact_train_graph(self.recipe, batch, self.fused)
            if kind == "train"
            else self.graph(kind, batch)
        )

    def train(self, batch: Batch, learning_rate: float, step: int, seed: int) -> BoundSession:
        if self.accumulate == 1 and not self.window:
            runner = self.runner("train", batch)
            write_scalars(runner, learning_rate, step, seed)
            return run_on(runner, batch)
        runner = self.runner("accumulate", batch)
        # the draw of a window's second batch must not repeat the first's
        write_scalars(runner, learning_rate, step * self.accumulate + self.window, seed)
        runner.feeds[names.FIRST][()] = self.window == 0
        run_on(runner, batch)
        self.window += 1
        if self.window >= self.accumulate:
            self.flush(learning_rate, step)
        return runner
