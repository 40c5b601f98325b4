"""What both backends share: the state, graphs compiled for the batches met so far, evaluation and
prediction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.data import Batch
from onnxfit.errors import GradientError
from onnxfit.graph import names
from onnxfit.graph.model import spec_of
from onnxfit.graph.spec import TensorSpec
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.device import Device
from onnxfit.runtime.session import BoundSession
from onnxfit.step.graphs import deployed_graph, evaluate_graph, predict_graph, update_graph
from onnxfit.step.recipe import Recipe, StepBuilder
from onnxfit.step.tracker import StepResult

Array = npt.NDArray[Any]
Specs = Mapping[str, TensorSpec]
T = TypeVar("T")
# graphs compiled for fixed shapes, per kind; a fifth shape of batch gets the graph for any shape
STATIC_SIGNATURES = 4
SHARED: dict[str, StepBuilder] = {
    "update": update_graph,
    "evaluate": evaluate_graph,
    "predict": predict_graph,
}
# what is compiled for batches that have everything
LABELLED = ("train", "accumulate", "chain", "evaluate")
WRITING = ("train", "accumulate", "update", "apply")  # kinds that change the state


class Backend(ABC):
    """Compiled graphs and the state they share; backends differ in how they train."""

    builders: ClassVar[Mapping[str, StepBuilder]]

    def __init__(
        self,
        recipe: Recipe,
        arrays: Mapping[str, Array],
        *,
        device: Device,
        threads: int | None,
        accumulate: int,
    ) -> None:
        self.recipe = recipe
        self.window = 0  # batches whose gradients wait for an update
        # who wants to see them before the update
        self.on_gradients: Callable[[dict[str, Array]], None] | None = None
        # batches of a window; may change, if it was not 1 to begin with
        self.accumulate = accumulate
        self.adds_up = accumulate > 1  # there are graphs and tensors for it
        self.device = device
        self.threads = threads
        self.fused = self._fused_weights(arrays)
        slots = {
            names.slot(w, slot): array
            for w, slots in recipe.slots.items()
            for slot, array in slots.items()
        }
        sums = (
            {names.gradient_sum(w): np.zeros_like(arrays[w]) for w in recipe.weights}
            if accumulate > 1
            else {}
        )
        self.state = DoubleBufferedState(
            {
                "weights": {**{w: arrays[w] for w in recipe.weights}, **slots},
                "statistics": {s: arrays[s] for s in recipe.statistics},
                "sums": sums,
            },
            device,
            {
                name: recipe.model.graph.initializers[name].const_value.numpy()  # type: ignore[union-attr]
                for name in recipe.constants
            },
            {
                name: members
                for fused_name, weights in self.fused.items()
                for name, members in self._fused_tensors(fused_name, weights)
            },
        )
        self._fixed: dict[str, OrderedDict[str, Any]] = {}
        self._open: dict[str, Any] = {}
        self._met: Specs = {}  # the last batch with labels that something was compiled for
        # and the version of the state it has inside
        self._deployed: tuple[int, BoundSession] | None = None

    def _fused_weights(self, arrays: Mapping[str, Array]) -> dict[str, list[str]]:
        """Weights that lie one after the other in memory, and so do their slots."""
        return {}

    def _fused_tensors(
        self, fused_name: str, weights: Sequence[str]
    ) -> Iterator[tuple[str, list[str]]]:
        yield fused_name, [*weights]
        for slot in self.recipe.slots[weights[0]]:
            yield names.slot(fused_name, slot), [names.slot(w, slot) for w in weights]

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """The names of the graphs, in the order they run."""

    @abstractmethod
    def train(self, batch: Batch, learning_rate: float, step: int, seed: int) -> StepResult:
        """One batch; an update once the window of `accumulate` batches is full (then `window` is 0
        again).
        """

    def flush(self, learning_rate: float, step: int) -> bool:
        """Update with the gradients that wait, divided by their true number;

        False where none do.
        """
        if not self.window:
            return False
        runner = self.once("update")
        runner.feeds[names.WINDOW][()] = self.window
        write_scalars(runner, learning_rate, step, 0)
        runner.run()
        self.window = 0
        return True

    def evaluate(self, batch: Batch) -> BoundSession:
        return run_on(self.runner("evaluate", batch), batch)

    def predict(self, batch: Batch) -> BoundSession:
        """With the weights where training has them: nothing is compiled when they change."""
        return run_on(self.runner("predict", batch), batch)

    def deployed(self, batch: Batch) -> BoundSession:
        """The model compiled with its weights inside, as whoever loads the exported file has it:
        faster, and equal to it to the last bit.

        A model that is larger than a session takes with its tensors inside is run as in `predict`.
        """
        if self.recipe.large:
            return self.predict(batch)
        if self._deployed is None or self._deployed[0] != self.state.version:
            model = deployed_graph(
                self.recipe, {name: self.state.get(name) for name in self.recipe.state}
            )
            self._deployed = (
                self.state.version,
                BoundSession(model, self.state, self.device, self.threads, "prediction"),
            )
        return run_on(self._deployed[1], batch)

    def revert(self) -> None:
        """Take weights, slots and statistics back to before the last step; with a window under way,
        forget its gradients instead.
        """
        if self.window:
            self.window = 0
            self.state.revert(["statistics"])
            self.state.commit(["weights"])  # the update before was not the last step
        else:
            self.state.revert(["weights", "statistics"])

    def graph(self, kind: str, batch: Specs) -> onnx.ModelProto:
        """The graph of a step for a batch of these shapes, not compiled."""
        return {**SHARED, **self.builders}[kind](self.recipe, batch)

    def compact_graph(self, kind: str, batch: Specs) -> onnx.ModelProto:
        """The graph of a step as it is compiled, which may read and write packs."""
        return self.graph(kind, batch)

    def any_graph(self, kind: str, batch: Specs) -> onnx.ModelProto:
        """The graph of a step for a batch of any size, or, where its gradient needs known sizes,
        for the last batch that was run.
        """
        try:
            return self.graph(kind, batch)
        except GradientError as error:
            if not self._met:
                raise GradientError(
                    f"{error}\nThere is no {kind} graph for any size of batch. Once a batch was"
                    " trained, there is one for its sizes."
                ) from None
            return self.graph(kind, self._met)

    def runner(self, kind: str, batch: Batch) -> BoundSession:
        """The compiled graph of a kind for a batch."""
        found: BoundSession | None = (
            self._fixed[kind].get(batch.signature) if kind in self._fixed else None
        )
        if found is not None:  # as nearly always
            return found
        return self.compiled(
            kind,
            batch.signature,
            lambda: specs(batch),
            lambda shapes: self.compile(kind, self.compact_graph(kind, shapes)),
        )

    def once(self, kind: str) -> BoundSession:
        """The compiled graph of a kind that sees no batch."""
        if kind not in self._open:
            given = [names.gradient(w) for w in self.recipe.weights]
            self._open[kind] = self.compile(kind, self.graph(kind, {}), given=given, reuse=True)
        runner: BoundSession = self._open[kind]
        return runner

    def compile(
        self, kind: str, model: onnx.ModelProto, given: Collection[str] = (), reuse: bool = False
    ) -> BoundSession:
        writes, busy_wait = kind in WRITING, kind == "train"
        return BoundSession(
            model,
            self.state,
            self.device,
            self.threads,
            kind,
            writes=writes,
            given=given,
            reuse=reuse,
            busy_wait=busy_wait,
        )

    def compiled(
        self, kind: str, signature: str, shapes: Callable[[], Specs], make: Callable[[Specs], T]
    ) -> T:
        """What `make` gives for exactly the shapes of a batch, or for any sizes once there are
        many; made once each.
        """
        fixed = self._fixed.setdefault(kind, OrderedDict())
        if signature in fixed:
            found: T = fixed[signature]
            return found
        exact = shapes()
        if kind in LABELLED:
            self._met = exact
        if len(fixed) < STATIC_SIGNATURES and kind != "predict":
            made = fixed[signature] = make(exact)
            return made
        ranks = tuple((name, spec.dtype.str, spec.rank) for name, spec in exact.items())
        key = f"{kind}{ranks}"
        if key not in self._open:
            try:
                self._open[key] = make(
                    {n: _any_size(s, self._declared(n)) for n, s in exact.items()}
                )
            except GradientError:
                self._open[key] = None  # some operators can only be differentiated with known sizes
        if self._open[key] is not None:
            made = self._open[key]
            return made
        made = fixed[signature] = make(exact)
        if len(fixed) > 4 * STATIC_SIGNATURES:
            fixed.popitem(last=False)
        return made

    @contextmanager
    def trying(self) -> Iterator[None]:
        """What is compiled meanwhile for batches is forgotten afterwards: it is of no use to
        training, and would count as a shape of its batches.
        """
        fixed, opened = (
            {kind: found.copy() for kind, found in self._fixed.items()},
            dict(self._open),
        )
        try:
            yield
        finally:
            self._fixed, self._open = fixed, opened

    def _declared(self, name: str) -> TensorSpec | None:
        return next((spec_of(v) for v in self.recipe.model.graph.inputs if v.name == name), None)


def specs(batch: Batch) -> dict[str, TensorSpec]:
    """What the arrays of a batch look like."""
    return {
        name: TensorSpec(name, array.dtype, array.shape) for name, array in batch.arrays().items()
    }


def run_on(runner: BoundSession, batch: Batch) -> BoundSession:
    """Run on a batch: gathered into the bound buffers, or handed over where only the batch tells
    the sizes.
    """
    if not runner.open_inputs:
        batch.write(runner.feeds)
        runner.run()
        return runner
    arrays = batch.arrays()
    for name in arrays.keys() & runner.feeds.keys():
        runner.feeds[name][...] = arrays[name]
    runner.run(arrays)
    return runner


def write_scalars(runner: BoundSession, learning_rate: float, step: int, seed: int) -> None:
    """What enters a step as a number."""
    feeds = runner.feeds
    if names.LEARNING_RATE in feeds:
        feeds[names.LEARNING_RATE][()] = learning_rate
    if names.STEP in feeds:
        feeds[names.STEP][()] = step
    if names.SEED in feeds:
        feeds[names.SEED][()] = seed


def _any_size(spec: TensorSpec, declared: TensorSpec | None) -> TensorSpec:
    """The spec with the model's own symbolic sizes, or with a name for the batch and nothing known
    elsewhere.
    """
    if declared is not None and declared.shape is not None:
        return TensorSpec(spec.name, spec.dtype, declared.shape)
    assert spec.shape is not None
    return TensorSpec(
        spec.name, spec.dtype, ("batch", *[None] * (len(spec.shape) - 1)) if spec.shape else ()
    )
