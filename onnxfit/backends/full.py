"""The full backend: forward, loss, penalty, gradient and update are one graph, run once per batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.data import Batch
from onnxfit.errors import GradientError
from onnxfit.graph import names
from onnxfit.graph.model import spec_of
from onnxfit.graph.spec import TensorSpec
from onnxfit.runtime import Device, Runner, State
from onnxfit.step import (
    Recipe,
    StepBuilder,
    accumulate_graph,
    deployed_graph,
    evaluate_graph,
    predict_graph,
    train_graph,
    update_graph,
)

Array = npt.NDArray[Any]
BUILDERS: dict[str, StepBuilder] = {
    "train": train_graph,
    "accumulate": accumulate_graph,
    "update": update_graph,
    "evaluate": evaluate_graph,
    "predict": predict_graph,
}
STATIC_SIGNATURES = 4  # graphs compiled for fixed shapes, per kind; a fifth shape of batch gets the graph for any shape


class FullBackend:
    """Compiled graphs for the batches met so far, and the state they share."""

    name = "full"

    def __init__(
        self, recipe: Recipe, arrays: Mapping[str, Array], *, device: Device, threads: int | None, accumulate: int
    ) -> None:
        self.recipe = recipe
        self.window = 0  # batches whose gradients wait for an update
        self._accumulate = accumulate
        self._device = device
        self._threads = threads
        slots = {names.slot(w, slot): array for w, slots in recipe.slots.items() for slot, array in slots.items()}
        sums = {names.gradient_sum(w): np.zeros_like(arrays[w]) for w in recipe.weights} if accumulate > 1 else {}
        self.state = State(
            {
                "weights": {**{w: arrays[w] for w in recipe.weights}, **slots},
                "statistics": {s: arrays[s] for s in recipe.statistics},
                "sums": sums,
            },
            device,
        )
        self._fixed: dict[str, OrderedDict[Any, Runner]] = {}
        self._open: dict[str, Runner | None] = {}
        self._deployed: tuple[int, Runner] | None = None  # and the version of the state it has inside

    def train(self, batch: Batch, learning_rate: float, step: int, seed: int) -> Runner:
        """One batch; an update once the window of `accumulate` batches is full (then `window` is 0 again)."""
        if self._accumulate == 1:
            return self._run("train", batch, learning_rate, step, seed)
        # the draw of a window's second batch must not repeat the first's
        runner = self._run("accumulate", batch, learning_rate, step * self._accumulate + self.window, seed)
        self.window += 1
        if self.window == self._accumulate:
            self.flush(learning_rate, step)
        return runner

    def flush(self, learning_rate: float, step: int) -> bool:
        """Update with the gradients that wait, divided by their true number; False where none do."""
        if not self.window:
            return False
        runner = self._open.get("update") or self._compile("update", {})
        self._open["update"] = runner
        runner.feeds[names.WINDOW][()] = self.window
        _write_scalars(runner, learning_rate, step, 0)
        runner.run()
        self.window = 0
        return True

    def evaluate(self, batch: Batch) -> Runner:
        return self._run("evaluate", batch, 0.0, 0, 0)

    def predict(self, batch: Batch) -> Runner:
        """With the weights where training has them: nothing is compiled when they change."""
        return self._run("predict", batch, 0.0, 0, 0)

    def deployed(self, batch: Batch) -> Runner:
        """The model compiled with its weights inside, as whoever loads the exported file has it: faster, and equal to it to the last bit."""
        if self._deployed is None or self._deployed[0] != self.state.version:
            model = deployed_graph(self.recipe, {name: self.state.get(name) for name in self.recipe.state})
            self._deployed = self.state.version, Runner(model, self.state, self._device, self._threads, "prediction")
        return _run_on(self._deployed[1], batch)

    def revert(self) -> None:
        """Take weights, slots and statistics back to before the last step; with a window under way, forget its gradients instead."""
        if self.window:
            self.window = 0
            self.state.revert(["statistics"])
        else:
            self.state.revert(["weights", "statistics"])

    def graph(self, kind: str, batch: Mapping[str, TensorSpec]) -> onnx.ModelProto:
        """The graph of a step for a batch of these shapes, not compiled."""
        return BUILDERS[kind](self.recipe, batch)

    def any_graph(self, kind: str, batch: Mapping[str, TensorSpec]) -> onnx.ModelProto:
        """The graph of a step for a batch of any size, or, where its gradient needs known sizes, for the last batch that was run."""
        try:
            return self.graph(kind, batch)
        except GradientError as error:
            compiled = self._fixed.get(kind)
            if not compiled:
                raise GradientError(
                    f"{error}\nThere is no {kind} graph for any size of batch. Once a batch was trained, there is one for its sizes."
                ) from None
            return next(reversed(compiled.values())).model

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("train", "evaluate", "predict") if self._accumulate == 1 else ("accumulate", "update", "evaluate", "predict")

    def _run(self, kind: str, batch: Batch, learning_rate: float, step: int, seed: int) -> Runner:
        runner = self._fixed.setdefault(kind, OrderedDict()).get(batch.signature)
        if runner is None:
            runner = self._runner(kind, batch)
        _write_scalars(runner, learning_rate, step, seed)
        if kind == "accumulate":
            runner.feeds[names.FIRST][()] = self.window == 0
        return _run_on(runner, batch)

    def _runner(self, kind: str, batch: Batch) -> Runner:
        """The graph for exactly this batch's shapes, or for any once there are many."""
        fixed, specs = self._fixed[kind], _specs(batch)
        if len(fixed) < STATIC_SIGNATURES and kind != "predict":
            runner = fixed[batch.signature] = self._compile(kind, specs)
            return runner
        ranks = tuple((name, spec.dtype.str, spec.rank) for name, spec in specs.items())
        key = f"{kind}{ranks}"
        if key not in self._open:
            try:
                self._open[key] = self._compile(kind, {n: _any_size(s, self._declared(n)) for n, s in specs.items()})
            except GradientError:
                self._open[key] = None  # some operators can only be differentiated with known sizes
        runner_or_none = self._open[key]
        if runner_or_none is None:
            runner_or_none = fixed[batch.signature] = self._compile(kind, specs)
            if len(fixed) > 4 * STATIC_SIGNATURES:
                fixed.popitem(last=False)
        return runner_or_none

    def _declared(self, name: str) -> TensorSpec | None:
        return next((spec_of(v) for v in self.recipe.model.graph.inputs if v.name == name), None)

    def _compile(self, kind: str, specs: Mapping[str, TensorSpec]) -> Runner:
        writes = kind in ("train", "accumulate", "update")
        return Runner(self.graph(kind, specs), self.state, self._device, self._threads, kind, writes=writes)


def _specs(batch: Batch) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, array.dtype, array.shape) for name, array in batch.arrays().items()}


def _run_on(runner: Runner, batch: Batch) -> Runner:
    """Run on a batch: gathered into the bound buffers, or handed over where only the batch tells the sizes."""
    if not runner.open_inputs:
        batch.write(runner.feeds)
        runner.run()
        return runner
    arrays = batch.arrays()
    for name in arrays.keys() & runner.feeds.keys():
        runner.feeds[name][...] = arrays[name]
    runner.run(arrays)
    return runner


def _write_scalars(runner: Runner, learning_rate: float, step: int, seed: int) -> None:
    feeds = runner.feeds
    if names.LEARNING_RATE in feeds:
        feeds[names.LEARNING_RATE][()] = learning_rate
    if names.STEP in feeds:
        feeds[names.STEP][()] = step
    if names.SEED in feeds:
        feeds[names.SEED][()] = seed


def _any_size(spec: TensorSpec, declared: TensorSpec | None) -> TensorSpec:
    """The spec with the model's own symbolic sizes, or with a name for the batch and nothing known elsewhere."""
    if declared is not None and declared.shape is not None:
        return TensorSpec(spec.name, spec.dtype, declared.shape)
    assert spec.shape is not None
    return TensorSpec(spec.name, spec.dtype, ("batch", *[None] * (len(spec.shape) - 1)) if spec.shape else ())
