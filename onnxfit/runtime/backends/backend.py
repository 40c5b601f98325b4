"""The base of all backends: state, compiled graphs, evaluation and prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import replace
from threading import RLock
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.data import Batch
from onnxfit.distributed.world import ALONE, World
from onnxfit.errors import GradientError
from onnxfit.graph import names
from onnxfit.graph.model import spec_of
from onnxfit.optimizers.base import rate_at
from onnxfit.runtime.backends.accumulator import Accumulator
from onnxfit.runtime.backends.inference_sessions import (
    DeployedModel,
    Evaluation,
    InferenceSessions,
    evaluate_outputs,
)
from onnxfit.runtime.backends.inputs import run_on, share_of_rows, specs_of, write_scalars
from onnxfit.runtime.backends.shape_cache import ShapeCache, Specs, without_sizes
from onnxfit.runtime.buffers import DoubleBufferedState, Savepoint
from onnxfit.runtime.device import Device
from onnxfit.runtime.float16 import convert_by_casts
from onnxfit.runtime.reduction import GradientReduction, completion_order
from onnxfit.runtime.session import BoundSession
from onnxfit.step.graphs import (
    counted_outputs,
    counts_graph,
    evaluate_graph,
    evaluate_outputs_graph,
    predict_graph,
    update_graph,
)
from onnxfit.step.recipe import Recipe, ReportedNorms
from onnxfit.step.reuse import built_once
from onnxfit.step.tracker import StepResult
from onnxfit.step.update import limits_of

__all__ = ["Backend"]

Array = npt.NDArray[Any]
# Kinds of graphs that change the state.
WRITING_KINDS = ("train", "gradients", "accumulate", "update", "apply")
# Kinds of graphs whose runs launch a CUDA graph where that is possible.
CAPTURED_KINDS = ("train", "evaluate")
# Kinds of graphs that compute like the exported file.
INFERENCE_KINDS = ("evaluate", "predict")
# The group of the state with the weights and slots that an update overwrites.
IN_PLACE = "in_place"
# Kinds of graphs for the shapes of a batch that depend on the norms of gradients to report.
NORM_KINDS = ("train", "gradients")


# Kind -> its sessions for batches, and kind -> its session without a batch.
UpdateSessions = tuple[dict[str, ShapeCache[Any]], dict[str, BoundSession]]


class Backend(ABC):
    """The training state, and the compiled graphs that read and change it.

    Backends differ in the graphs of a training step. A concrete subclass that a module of this
    package lists in its `__all__` is a backend of `Trainer`.

    - `recipe`: the model and the other ingredients of a step.
    - `arrays`: the initial weights and running statistics.
    - `device`: the device of state and sessions.
    - `threads`: threads that share an operator; None lets onnxruntime choose the number.
    - `accumulate`: batches averaged for one update.
    - `world`: the ranks that share every batch. They have the same weights after every update.

    `evaluate`, `predict` and `deployed` may be called from several threads. Everything else that
    reads or changes the state or runs a session needs `lock`, which is re-entrant. User code never
    runs while a thread holds it (`unlock`), so a callback may wait for another thread.

    Further attributes: `accumulator`, the gradients that wait for the update; `on_gradients`, a
    function that is called with the gradients before each update where `shows_gradients` is true,
    or None; `state`.
    """

    name: ClassVar[str]  # for `Trainer(backend=)`
    needs_loss: ClassVar[bool] = True  # False for a backend that can train without a loss
    shows_gradients: ClassVar[bool] = False  # whether `on_gradients` is called
    steps_by_hand: ClassVar[bool] = False  # whether `ManualTraining` can use it
    reduces_each_batch: ClassVar[bool] = True  # whether every rank has the gradients of all ranks
    has_deferred_update: ClassVar[bool] = False  # whether `finish_step` updates, and not `train`
    # Whether the values of its bound sessions are in the arena of the process.
    shares_arena: ClassVar[bool] = False
    kinds: ClassVar[tuple[str, ...]]  # graphs that are compiled for the shapes of a batch

    def __init__(
        self,
        recipe: Recipe,
        arrays: Mapping[str, Array],
        *,
        device: Device,
        threads: int | None,
        accumulate: int,
        world: World = ALONE,
    ) -> None:
        self.lock = RLock()
        self.world = world
        self.recipe = recipe
        self.device = device
        self.threads = threads
        self.accumulator = Accumulator(
            {name: arrays[name] for name in recipe.weights},
            accumulate,
            world,
            device,
            has_parts=not self.reduces_each_batch,
        )
        # The state before the running step, and the number of batches that waited for an update.
        self._start: tuple[Savepoint, int]
        self._count_after = 0  # of the running step, while user code sees the one before
        self.first_step = 0  # the update before which the optimizer's slots began
        self.on_gradients: Callable[[dict[str, Array]], None] | None = None
        # Name of a fused tensor -> the weights in it.
        self.fused = self._fuse_weights(arrays)
        self.accumulator.state = self.state = self._create_state(arrays)
        # The loss of the last batch, of all ranks; only where they share it.
        self.shared_loss = 0.0
        self.reduction: GradientReduction | None = None
        convert_by_casts(world.communicator, threads)
        if world.shares_gradients:
            self.reduction = GradientReduction(
                world,
                {w: arrays[w] for w in completion_order(recipe.model.graph, recipe.weights)},
                {name: arrays[name] for name in recipe.statistics},
                device,
            )
        # Number of axes of the sample weights, 0 without any -> outputs whose loss has a divisor.
        self._counted: dict[tuple[tuple[str, int], ...], list[str]] = {}
        # Known sizes make an evaluation of images up to twice as fast (convolutions).
        any_size = {"predict": True, "evaluate": recipe.has_free_lengths}
        self.caches: dict[str, ShapeCache[Any]] = {
            kind: ShapeCache(
                only_any_size=any_size.get(kind, False),
                # On CUDA, the losses of a step for any size were wrong by 1 % for some sizes, for a
                # reason that is not known.
                only_exact=device.kind == "cuda" and kind != "predict",
            )
            for kind in self.kinds
        }
        self._batchless: dict[str, BoundSession] = {}
        # The session of the last update; None after a batch without an update.
        self.last_update: BoundSession | None = None
        # Sessions of updates that report different norms than the current ones.
        self._set_aside: dict[ReportedNorms, UpdateSessions] = {}
        # The shapes of the last batch with labels for which `caches` had no entry.
        self._last_shapes: Specs = {}
        # Evaluations and predictions compute like the exported file.
        self._inference_device = replace(device, tf32=False)
        self._deployed = DeployedModel(self._inference_device, threads)
        self.inference = InferenceSessions(exclusive=recipe.prepacks_large_weights)
        self.inference.owners.update(predict=self.caches["predict"], deployed=self._deployed)

    def _create_state(self, arrays: Mapping[str, Array]) -> DoubleBufferedState:
        recipe = self.recipe
        weights = {name: arrays[name] for name in recipe.weights}
        slots = {
            names.slot(weight, slot): array
            for weight, weight_slots in recipe.slots.items()
            for slot, array in weight_slots.items()
        }
        constants = {name: recipe.array(name) for name in recipe.constants}
        if self.device.kind == "cpu":  # on other devices nothing is freed for them
            constants |= {names.packed(name): recipe.array(name) for name in recipe.packed}
        fused = dict(self.accumulator.fused)
        for name, members in self.fused.items():
            fused[name] = members
            for slot in recipe.slots[members[0]]:
                fused[names.slot(name, slot)] = [names.slot(w, slot) for w in members]
        updated = {**weights, **slots, **recipe.loss_scale}
        in_place = self._in_place_tensors()
        groups = {
            "weights": {name: a for name, a in updated.items() if name not in in_place},
            IN_PLACE: {name: a for name, a in updated.items() if name in in_place},
            "statistics": {name: arrays[name] for name in recipe.statistics},
            "sums": self.accumulator.tensors,
        }
        alignment = limits_of(self.device.forms).alignment
        return DoubleBufferedState(groups, self.device, constants, fused, alignment, [IN_PLACE])

    def _in_place_tensors(self) -> Container[str]:
        """Return the weights and slots that an update overwrites, by their names in the state."""
        return ()

    def _fuse_weights(self, arrays: Mapping[str, Array]) -> dict[str, list[str]]:
        """Return a mapping from fused tensor to the weights that the step updates in it."""
        return {}

    # ------------------------------------------------------------------ training

    @abstractmethod
    def train(self, batch: Batch, learning_rate: float, step: int, seed: int) -> StepResult | None:
        """Train on one batch; update once a window of `accumulate` batches is full.

        `step` counts updates; random numbers depend on `step` and `seed`. The result is None for a
        rank without a row of the batch; `shared_loss` is then the loss of the other ranks. Call
        `begin_step` first, and `undo_step` after an exception.
        """

    def begin_step(self) -> Savepoint:
        """Remember the state before a step, for `undo_step` and `unlock`, and return it."""
        self._start = self.state.savepoint(), self.accumulator.count
        return self._start[0]

    def undo_step(self) -> None:
        """Restore the state at `begin_step`, with the gradients of an unfinished window."""
        savepoint, self.accumulator.count = self._start
        self.state.rollback(savepoint)

    def unlock(self) -> None:
        """Release `lock` for user code, which sees the state before the running step.

        The thread must hold `lock` once.
        """
        savepoint, before = self._start
        self._count_after, self.accumulator.count = self.accumulator.count, before
        self.state.hide(savepoint)
        self.lock.release()

    def relock(self) -> None:
        """Take `lock` again after user code."""
        self.lock.acquire()
        self.accumulator.count = self._count_after
        self.state.unhide()

    def finish_step(self) -> bool:
        """Update with the gradients of `train`; return False if nothing is left to update.

        A backend that cannot undo an update makes it here, after everything else has succeeded.
        For other backends, whose `has_deferred_update` is false, a call does nothing.
        """
        return False

    def flush(self, learning_rate: float, step: int) -> bool:
        """Update with an unfinished window's gradients; return False if none are pending."""
        if not self.accumulator.count:
            return False
        self.accumulator.sum_over_ranks()
        session = self.batchless_session("update")
        session.feeds[names.WINDOW][()] = self.accumulator.count
        self.write_scalars(session, learning_rate, step, 0)
        session.run()
        self.accumulator.count = 0
        self.last_update = session
        return True

    def write_scalars(
        self, session: BoundSession, learning_rate: float, step: int, seed: int
    ) -> None:
        """Write the scalars of a step into the session's inputs for them."""
        write_scalars(session, learning_rate, step, seed)
        for name, schedule in self.recipe.schedules.items():
            if name in session.feeds:
                session.feeds[name][()] = rate_at(schedule, self.first_step + step)
        self.recipe.check_scheduled(self.first_step + step)

    def write_shares(self, session: BoundSession, batch: Batch) -> None:
        """Write this rank's shares of a batch into the session's inputs for them."""
        feeds = session.feeds
        if names.SHARE in feeds:
            feeds[names.SHARE][()] = share_of_rows(batch)
        for output, share in self.shares_of_counts(batch).items():
            feeds[names.share(output)][()] = share

    def shares_of_counts(self, batch: Batch) -> dict[str, float]:
        """Return this rank's parts of the losses' divisors by output, except divisors that count
        entries. Every rank calls this method for each batch.
        """
        key = tuple((n, a.ndim) for n, a in batch.columns if names.is_sample_weight(n))
        if key not in self._counted:
            self._counted[key] = counted_outputs(self.recipe, self.without_sizes(specs_of(batch)))
        counted = self._counted[key]
        if not counted:
            return {}
        own = np.zeros(len(counted))
        if batch.rows:
            scalars = run_on(self.compiled("counts", batch), batch).scalars
            own[:] = [scalars[names.count(output)] for output in counted]
        everyone = own.copy()
        self.world.sum("the divisors of the losses", everyone)
        shares: dict[str, float] = {}
        for name, count, total in zip(counted, own, everyone):
            if self.recipe.objectives[name].loss.reduction == "mean":
                # Without counted entries, the loss is 0 and its divisor the smallest number, so a
                # share above 1 could make the inverse infinite.
                shares[name] = count / (total or 1.0)
            else:
                shares[name] = (count or 1.0) / (total or 1.0)  # as in the loss, 0 counts as 1
        return shares

    def report_norms(self, norms: ReportedNorms) -> None:
        """Let the next updates report these norms of the gradients.

        Sessions with other outputs are kept for the next change, because compiling is slow.
        """
        if norms == self.recipe.norms:
            return
        caches = {kind: self.caches[kind] for kind in NORM_KINDS if kind in self.caches}
        self._set_aside[self.recipe.norms] = caches, self._batchless
        empty: UpdateSessions = {kind: ShapeCache() for kind in caches}, {}
        caches, self._batchless = self._set_aside.pop(norms, empty)
        self.caches.update(caches)
        self.recipe = replace(self.recipe, norms=norms)
        self.last_update = None

    def norms(self) -> dict[str, float]:
        """Return the norms of the last update by their names in logs; {} without an update."""
        if self.recipe.norms == "none" or self.last_update is None:
            return {}
        return {
            names.in_logs(name): value.item()
            for name, value in self.last_update.scalars.items()
            if name.startswith(names.GRADIENT_NORM)
        }

    def add_penalty(self, gradients: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the gradients plus the penalties' gradients, and the sum of the penalties.

        `gradients` maps every weight to a NumPy array or OrtValue.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.steps_by_hand is False, so it has no add_penalty."
        )

    def apply(self, gradients: Mapping[str, Any], learning_rate: float, step: int) -> None:
        """Clip `gradients` (weight -> NumPy array or OrtValue) and update weights and slots."""
        raise NotImplementedError(
            f"{type(self).__name__}.steps_by_hand is False, so it has no apply."
        )

    def revert(self) -> None:
        """Undo the last step: restore weights, slots and statistics.

        In an unfinished window, discard its gradients instead.
        """
        if self.accumulator.count:
            self.accumulator.count = 0
            self.state.revert(["statistics"])
            self.state.commit(["weights"])  # their last update was an earlier step
        else:
            self.state.revert(["weights", "statistics"])

    # ------------------------------------------------------------------ evaluation and prediction

    def evaluate(self, batch: Batch, *, outputs: bool) -> Evaluation:
        """Run forward pass, loss and penalty in inference mode.

        - `outputs`: whether the result includes the model's outputs.
        """
        with self.lock:
            if self.recipe.evaluates_outputs:
                predicted = self.predict(batch.only(self.recipe.input_names))
                scalars = evaluate_outputs(self.compiled("evaluate", batch), batch, predicted)
                return Evaluation(scalars, predicted if outputs else {})
            session = run_on(self.compiled("evaluate", batch), batch)
            scalars = {name: array.copy() for name, array in session.scalars.items()}
            return Evaluation(scalars, session.prediction() if outputs else {})

    def predict(self, batch: Batch) -> dict[str, Array]:
        """Return the model's outputs in inference mode, with the weights of the state as inputs.

        Unlike with `deployed`, nothing is compiled after an update, unless evaluation must run the
        file itself.
        """
        if self.recipe.evaluates_file:
            return self.deployed()(batch)
        with self.lock:
            return run_on(self.compiled("predict", batch), batch).prediction()

    def deployed(self) -> Callable[[Batch], dict[str, Array]]:
        """Return a function from batch to outputs that predicts with the current weights.

        It runs the model compiled with its weights as constants. This is faster, and equals the
        exported model bit for bit. The model is compiled after each change of the state. A model
        whose tensors all graphs share is run by `predict`, because compiling would copy them.
        """
        if not self.recipe.compiles_weights:
            return self.predict
        with self.lock:
            return self._deployed.session(self.recipe, self.state, self.inference).predict

    # ------------------------------------------------------------------ graphs

    def graphs(self, batch: Specs) -> dict[str, onnx.ModelProto]:
        """Return all graphs of this backend by name, in the order in which they run.

        The graphs are readable; a compiled graph may compute the same with fewer operators.
        `batch` has the specs of a batch of any size. If the gradient needs known sizes, the graphs
        of the training step are for the last batch. GradientError: no batch has run.
        """
        try:
            trains = self.recipe.loss_outputs or not self.needs_loss
            graphs = self.step_graphs(batch) if trains else {}
        except GradientError as error:
            if not self._last_shapes:
                raise GradientError(
                    f"{error}\nThe training graph can only be built for a known batch size. Train"
                    " on one batch first; the graph is then built for its size."
                ) from None
            graphs = self.step_graphs(self._last_shapes)
        if self.recipe.loss_outputs:
            graphs["evaluate"] = evaluate_graph(self.recipe, batch)
        graphs["predict"] = predict_graph(self.recipe, batch)
        return graphs

    @abstractmethod
    def step_graphs(self, shapes: Specs) -> dict[str, onnx.ModelProto]:
        """Return the graphs of a training step by name, in the order in which they run."""

    def graph(self, kind: str, shapes: Specs) -> onnx.ModelProto:
        """Return the graph of a kind that is compiled for batches of these shapes."""
        if kind == "update":
            return update_graph(self.recipe, averages=True)
        evaluates_outputs = self.recipe.evaluates_outputs
        builders = {
            "counts": counts_graph,
            "evaluate": evaluate_outputs_graph if evaluates_outputs else evaluate_graph,
            "predict": predict_graph,
        }
        return builders[kind](self.recipe, shapes)

    def compiled(self, kind: str, batch: Batch) -> Any:
        """Return the session of a kind for a batch, or another result of `compile`."""
        compiled = self.caches[kind].get(batch.signature)
        return compiled if compiled is not None else self._compile_for_batch(kind, batch)

    def _compile_for_batch(self, kind: str, batch: Batch) -> Any:
        shapes = specs_of(batch)
        if kind != "predict":  # its batches have no labels
            self._last_shapes = shapes
        return self.caches[kind].compile(
            batch.signature,
            shapes,
            lambda: self.without_sizes(shapes),
            lambda specs: self.compile(kind, specs),
        )

    def without_sizes(self, shapes: Specs) -> Specs:
        """Return the specs of a batch without sizes: the model's declarations, if it has them."""
        declared = {v.name or "": spec_of(v) for v in self.recipe.model.graph.inputs}
        return {name: without_sizes(spec, declared.get(name)) for name, spec in shapes.items()}

    def compile(self, kind: str, shapes: Specs) -> Any:
        """Compile the graph of a kind for batches of these shapes."""
        if kind == "predict":
            self.inference.make_room(kind)
        graph = built_once(self.recipe, (kind, self.world.size), shapes, self.graph)
        return self.bind(kind, graph, busy_wait=kind == "train")

    def batchless_session(self, kind: str) -> BoundSession:
        """Return the compiled graph of a kind that reads no batch, but may read gradients."""
        if kind not in self._batchless:
            self._batchless[kind] = self.bind(
                kind,
                self.graph(kind, {}),
                per_run_inputs=[names.gradient(w) for w in self.recipe.weights],
                overwrite_outputs=True,
            )
        return self._batchless[kind]

    def bind(
        self,
        kind: str,
        model: onnx.ModelProto,
        *,
        per_run_inputs: Collection[str] = (),
        overwrite_outputs: bool = False,
        **settings: Any,
    ) -> BoundSession:
        """Compile a graph and bind it to the state; the arguments are those of `BoundSession`."""
        device = self._inference_device if kind in INFERENCE_KINDS else self.device
        return BoundSession(
            model,
            self.state,
            device,
            self.threads,
            kind,
            writes=kind in WRITING_KINDS,
            per_run_inputs=per_run_inputs,
            overwrite_outputs=overwrite_outputs,
            uses_integers=kind in INFERENCE_KINDS,
            shares_arena=self.shares_arena,
            captures=kind in CAPTURED_KINDS,
            **settings,
        )
