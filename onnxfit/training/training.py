"""A model in training: what its steps need, and the steps themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from threading import local
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnxfit.callbacks.callback_list import CallbackList
from onnxfit.callbacks.history import History
from onnxfit.callbacks.logs import Logs
from onnxfit.data import Batch, Source
from onnxfit.errors import SettingError
from onnxfit.load.trainable import TrainableModel
from onnxfit.runtime.backends.backend import Backend
from onnxfit.runtime.reduction import average_state
from onnxfit.step.recipe import Recipe
from onnxfit.step.settings import check_accumulate
from onnxfit.step.tracker import Figures, StepResult, Tracker
from onnxfit.training.adapting import SingleBatches, adapter_for
from onnxfit.training.carried import CarriedStates
from onnxfit.training.decoding import CompiledFile
from onnxfit.training.guard import TrainingGuard
from onnxfit.training.lineage import Lineage
from onnxfit.training.output_check import OutputCheck
from onnxfit.training.position import PendingFit
from onnxfit.training.ranks import require_same_weights
from onnxfit.training.state import TrainerState, TrainingState, require_same_form

if TYPE_CHECKING:
    from onnxfit.training.loop import FitState

Array = npt.NDArray[Any]
DEFAULT_BATCH_SIZE = 32
# Distance between the seeds of two ranks: a prime number above any seed that users choose.
RANK_STRIDE = 4_294_967_311


class ThreadState(local):
    """State of a trainer's calls in one thread.

    - `callbacks`: the callbacks of the running fit, evaluation or prediction, or None.
    - `current_outputs`: output -> array of the current batch of a prediction.
    - `carried`: the states of the running evaluation or prediction, or None.
    """

    callbacks: CallbackList | None = None
    carried: CarriedStates | None = None

    def __init__(self) -> None:
        self.current_outputs: dict[str, npt.NDArray[Any]] = {}


class Training:
    """A model in training: the object that the modules of this folder share.

    Trainer is its public face. One thread at a time may train, in the context `guard`; the state
    changes in the context `guard.advancing`.

    - `trainable`, `recipe`, `backend`, `world`: the trained form of the file, what a step computes,
      what runs it, and the ranks.
    - `settings`: the arguments of the constructor of Trainer, `weights` as a list of names.
    - `seed`: the seed of the order of rows; `random_seed` the one of dropout, which differs
      between ranks.
    - `state`: weights, slots and counters.
    - `tracker`: the running means of `fit`; `batch_tracker` those of `train_on_batch`, which a
      callback may call while an epoch runs.
    - `fit_state`: the state of the running fit, or of the last one; `pending_fit` is the state from
      which the next fit resumes.
    - `lineage`: the record of what made the weights.
    - `history`, `train_losses`, `last_losses`, `stop_training`, `stop_reason`: see Trainer.
    - `carried_in`: the states between batches of the methods for single batches.
    """

    def __init__(
        self, trainable: TrainableModel, settings: dict[str, Any], recipe: Recipe, backend: Backend
    ) -> None:
        world = backend.world
        self.trainable = trainable
        self.settings = settings
        self.recipe = recipe
        self.backend = backend
        self.world = world
        # Every rank draws its own random numbers.
        self.seed: int = settings["seed"]
        self.random_seed = (self.seed + RANK_STRIDE * world.rank) % 2**63
        self.state = TrainingState(recipe, backend, self.new_carried())
        self.carried_in = {n: self.new_carried() for n in ("evaluation", "prediction")}
        self.guard = TrainingGuard()
        self.thread = ThreadState()
        self.tracker = Tracker(recipe.objectives, recipe.metrics)
        self.batch_tracker = self.new_tracker()
        self.single_batches = SingleBatches(recipe, self.seed, world.rank, world.size)
        self.output_check = OutputCheck(recipe.objectives if world.is_main else {})
        self.fit_state: FitState | None = None
        self.pending_fit = PendingFit()
        self.lineage = Lineage()
        self.history = History()
        self.train_losses: list[float] = []
        self.last_losses: deque[float] = deque(maxlen=5)
        self.stop_training = False
        self.stop_reason: str | None = None

    @cached_property
    def compiled_file(self) -> CompiledFile:
        """The graph with which `generate` decodes."""
        return CompiledFile(self.trainable, self.backend)

    @property
    def accumulate(self) -> int:
        """Number of batches whose gradients are averaged for one update."""
        return self.backend.accumulator.size

    @accumulate.setter
    def accumulate(self, value: int) -> None:
        check_accumulate(value)
        if value > 1 and not self.backend.accumulator.enabled:
            raise SettingError(
                f"accumulate={value} needs a Trainer that was created with accumulate=2 or more."
                " Create it with Trainer(..., accumulate=2); accumulate can then be set to any"
                " number."
            )
        self.backend.accumulator.size = value

    def new_tracker(self) -> Tracker:
        """Return a tracker with sums of its own."""
        recipe = self.recipe
        return Tracker(recipe.objectives, [metric.copy() for metric in recipe.metrics])

    def new_carried(self) -> CarriedStates:
        """Return states between batches in which every sequence begins."""
        return CarriedStates(self.recipe, self.settings["fixed_inputs"] or {})

    def source(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        purpose: str,
        shuffle: bool = False,
        class_weight: Mapping[int, float] | None = None,
    ) -> Source:
        """Return this rank's share of the data, as batches for a `purpose` such as "training".

        A `batch_size` of None is Keras's way to ask for the default.
        """
        batch_size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
        self.world.refuse_alone(purpose)
        size = self.world.size
        adapter = adapter_for(self.recipe, purpose, self.seed, class_weight, size)
        source = adapter.source(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle)
        return source.shard(self.world.rank, size)

    def check_outputs(self, batch: Batch) -> None:
        """Warn if the outputs of the first batch contradict their losses."""
        if batch.rows:
            inputs = batch.only(self.recipe.input_names)
            self.output_check.check(self.backend.predict(inputs))

    # ------------------------------------------------------------------ state

    def set_state(self, state: TrainerState) -> None:
        """Restore a state; see `Trainer.set_state`."""
        with self.guard, self.guard.advancing, self.backend.lock:
            require_same_form(state, self.state.get(copy=False))
            same = require_same_weights(
                self.world, "set_state", state["weights"], may_differ=self.averages_weights
            )
            self.lineage.mark(self, "set_state")
            self.state.set(state)
            self.state.averaged_step = self.state.global_step if same else -1

    def revert_step(self) -> None:
        """Undo the last update; see `Trainer.revert_step`."""
        with self.guard, self.guard.advancing, self.backend.lock:
            self.world.barrier("revert_step")
            self.state.revert()
            self.lineage.revert(self)

    # ------------------------------------------------------------------ steps

    def step(self, batch: Batch, learning_rate: float, tracker: Tracker) -> float:
        """Train on a batch, add its results to `tracker` and return its loss.

        Call it in the context `self.guard.advancing`. After an exception nothing has changed,
        except weights that `in_place` cannot restore.
        """
        backend, guard = self.backend, self.guard
        guard.in_step = True
        try:
            with backend.lock:
                loss = self._run_step(batch, learning_rate, tracker)
        finally:
            guard.in_step = False
        every = self.world.average_every
        if every is not None and self.state.global_step % every == 0:
            self.average()
        return backend.shared_loss if backend.reduction is not None else loss

    def _run_step(self, batch: Batch, learning_rate: float, tracker: Tracker) -> float:
        """Update weights, tracker and counters, and return the loss, or change nothing."""
        backend, has_metrics = self.backend, self.recipe.metrics
        batch = self.state.carried.add_to(batch)
        sums = tracker.savepoint() if has_metrics or backend.has_deferred_update else None
        _, changes = backend.begin_step()
        try:
            result = self._train(batch, learning_rate)
            tracker.gradient_norms = backend.norms()
            if self.state.frozen.all:
                self.state.frozen.restore((changes, {}))
            if result is None:
                loss = 0.0
            elif has_metrics:
                loss = self._add_metrics(result, batch, tracker)
            else:
                loss = tracker.update(result, batch)
            states = result.prediction() if self.recipe.state_outputs and result else {}
            if backend.has_deferred_update:
                self._finish_step(tracker)
        except BaseException:  # a second Ctrl-C, too
            backend.undo_step()
            if sums is not None:
                tracker.restore(sums)
            raise
        if states:
            self.state.carried.take(states)
        state = self.state
        state.global_batch += 1
        state.samples_seen += batch.rows_of_all
        state.global_step += not backend.accumulator.count
        return loss

    def _add_metrics(self, result: StepResult, batch: Batch, tracker: Tracker) -> float:
        """Add a result to `tracker`, and return its loss.

        Metrics may be user code, which may wait for another thread, but not for another rank.
        """
        self.backend.unlock()
        self.guard.in_metrics = True
        try:
            alone = self.world.size == 1
            with nullcontext() if alone else self.world.forbid_collectives_in_step("A metric"):
                return tracker.update(result, batch)
        finally:
            self.guard.in_metrics = False
            self.backend.relock()

    def _finish_step(self, tracker: Tracker) -> None:
        with self.state.frozen.kept():
            is_updated = self.backend.finish_step()
        if is_updated:
            tracker.gradient_norms = self.backend.norms()

    def _train(self, batch: Batch, learning_rate: float) -> StepResult | None:
        """Train on a batch; return None if this rank has no row of the batch."""
        if not batch.rows and self.backend.reduction is None:
            return None
        return self.backend.train(batch, learning_rate, self.state.updates, self.random_seed)

    def flush(self, learning_rate: float) -> None:
        """Update with the gradients of an incomplete accumulation window, at an epoch's end."""
        backend = self.backend
        with backend.lock:
            backend.begin_step()
            try:
                with self.state.frozen.kept():
                    is_updated = backend.flush(learning_rate, self.state.updates)
                if is_updated:
                    self.tracker.gradient_norms = backend.norms()
                    self.state.global_step += 1
            except BaseException:
                backend.undo_step()
                raise
        if (
            self.world.average_every is not None
            and self.state.averaged_step != self.state.global_step
        ):
            self.average()

    # ------------------------------------------------------------------ ranks

    @property
    def averages_weights(self) -> bool:
        """Whether each rank trains its own weights, which are averaged every few updates."""
        return self.world.size > 1 and self.world.average_every is not None

    def average(self) -> None:
        """Average weights, slots and statistics over all ranks."""
        with self.backend.lock:
            average_state(self.world, self.backend.state)
        self.state.averaged_step = self.state.global_step

    def trial_loss(self, batch: Batch, loss: float) -> float:
        """Return the loss of a trial step, which is the same on all ranks."""
        if not self.averages_weights:
            return loss
        if self.state.averaged_step != self.state.global_step:
            self.average()
        return self.mean_loss(batch, loss)

    def mean_loss(self, batch: Batch, loss: float) -> float:
        """Return the mean of the ranks' losses, each weighted by its rows of the batch."""
        parts = self.world.gather("the loss of a batch", [loss * batch.rows, batch.rows])
        return float(sum(total for total, _ in parts) / max(sum(rows for _, rows in parts), 1))

    def require_equal_ranks(self, what: str) -> None:
        """Raise SettingError if the weights of this rank may differ from those of other ranks.

        - `what`: the call that needs the same weights everywhere.
        """
        every, step = self.world.average_every, self.state.global_step
        if self.averages_weights and self.state.averaged_step != step:
            raise SettingError(
                f"{what} at step {step} would use the weights of rank {self.world.rank} alone,"
                f" because average_every={every}. Call it after a multiple of {every} updates, or"
                " at the end of an epoch."
            )

    def require_whole_window(self, what: str) -> None:
        """Raise SettingError if each rank has only a part of the accumulated gradients.

        - `what`: the call that saves the gradients.
        """
        accumulator = self.backend.accumulator
        if not accumulator.is_reduced:
            raise SettingError(
                f"{what} after {accumulator.count} of {accumulator.size} batches of an update"
                " would save the gradients of one rank only. Save after an update, at the end of an"
                " epoch, or with ModelCheckpoint or BackupAndRestore(save_freq=...)."
            )

    # ------------------------------------------------------------------ the running fit

    @property
    def is_fitting(self) -> bool:
        """Whether a fit is running."""
        return self.fit_state is not None and self.fit_state.running and self.guard.fit_runs

    def begin_fit(self, state: FitState, history: History) -> None:
        """Install the state, the callbacks and the history of a new fit."""
        self.history = history
        self.stop_training = state.position.stop
        self.stop_reason = state.position.stop_reason
        self.last_losses.clear()
        self.fit_state = state
        self.pending_fit = PendingFit()
        self.thread.callbacks = state.callbacks
        listeners = state.callbacks.gradients
        self.backend.on_gradients = self._call_on_gradients if listeners else None

    def _call_on_gradients(self, gradients: dict[str, Array]) -> None:
        """Let callbacks change the gradients of a step, which may still be undone."""
        if self.fit_state is not None:
            with self.guard.advancing.paused():
                self.fit_state.callbacks.on_gradients(gradients)

    def end_fit(self) -> None:
        """Remove the callbacks; the state stays for `snapshot`."""
        self.thread.callbacks = None
        self.backend.on_gradients = None
        self.backend.report_norms("none")
        if self.fit_state is not None:
            self.fit_state.running = False
            self.fit_state.data_for_trials = None


def training_of(trainer: Any) -> Training:
    """Return the model in training behind a Trainer, for the entry points of other libraries."""
    training: Training = trainer._training
    return training


def scalar_logs(figures: Figures) -> Logs:
    """Return the figures that are numbers as logs."""
    scalars = {k: v for k, v in figures.items() if not isinstance(v, np.ndarray)}
    return Logs(scalars)
