"""The base of Trainer: the state that training changes, and single batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnxfit.callbacks.history import History
from onnxfit.callbacks.logs import Logs
from onnxfit.data import Batch
from onnxfit.data.order import checked_batch_size
from onnxfit.errors import SettingError, UnknownNameError, UnsupportedError
from onnxfit.graph.trainable import TrainableModel
from onnxfit.graph.weights import matching
from onnxfit.metrics import mode_by_name
from onnxfit.optimizers import learning_rate_at
from onnxfit.registry import check_arguments, is_finite, is_number, shortened
from onnxfit.runtime.backends.backend import Backend
from onnxfit.runtime.backends.shape_cache import trial_shapes
from onnxfit.step.objectives import OutputMetric
from onnxfit.step.recipe import Recipe
from onnxfit.step.settings import check_accumulate
from onnxfit.step.tracker import Figures, StepResult, Tracker
from onnxfit.training.adapting import SingleBatches
from onnxfit.training.carried import CarriedStates
from onnxfit.training.frozen import FrozenTensors
from onnxfit.training.guard import TrainingGuard
from onnxfit.training.hints import CheckedAttributes
from onnxfit.training.output_check import OutputCheck
from onnxfit.training.position import PendingFit
from onnxfit.training.ranked import RankedTrainer
from onnxfit.training.ranks import require_rows_for_ranks, require_same_weights
from onnxfit.training.state import COUNTERS, TrainerState, require_same_form
from onnxfit.training.thread_state import ThreadState

if TYPE_CHECKING:
    from onnxfit.training.loop import FitState

Array = npt.NDArray[Any]
# Distance between the seeds of two ranks: a prime number above any seed that users choose.
RANK_STRIDE = 4_294_967_311


class BaseTrainer(CheckedAttributes, RankedTrainer):
    """Weights, counters and learning rate of a training, and single batches.

    Trainer adds the constructor, the loop over data, training by hand and the files. Members with
    an underscore are for the modules of `onnxfit.training`.

    - `settings`: the arguments of the constructor, `weights` as a list of names.
    - `epoch`, `global_step`, `global_batch`, `samples_seen`: epochs, updates, batches and rows
      trained so far, over all fits.
    - `history`: the History of the running fit, or of the last one.
    - `train_losses_`: the mean loss of every epoch so far.
    - `last_losses`: the losses of the last five batches.
    - `stop_training`, `stop_reason`: set them in a hook to end the running fit, and to say why.
      With several processes, rank 0 decides: values set on other ranks are replaced after the hook.
    - `predicted`: output -> array of the current batch, in `on_predict_batch_end`.
    """

    def __init__(
        self, trainable: TrainableModel, settings: dict[str, Any], recipe: Recipe, backend: Backend
    ) -> None:
        super().__init__(backend)
        self.settings = settings
        self.loss = settings["loss"]
        self.backend: str = settings["backend"]
        self.seed: int = settings["seed"]
        self.optimizer = recipe.optimizer
        self.objectives = recipe.objectives
        self.epoch = 0
        self.global_batch = 0
        self.samples_seen = 0
        self._first_step = 0  # the update before which the optimizer's slots began
        self.history = History()
        self.train_losses_: list[float] = []
        self.last_losses: deque[float] = deque(maxlen=5)
        self.stop_training = False
        self.stop_reason: str | None = None
        self._trainable = trainable
        self._recipe = recipe
        # Every rank draws its own random numbers.
        self._random_seed = (self.seed + RANK_STRIDE * self.rank) % 2**63
        self._tracker = Tracker(recipe.objectives, recipe.metrics)  # of `fit`
        # Tracker of `train_on_batch`, which a callback may call while an epoch runs.
        self._batch_tracker = self._new_tracker()
        self._single_batches = SingleBatches(recipe, self.seed, self.rank, self.world_size)
        rate = recipe.optimizer.learning_rate
        self._learning_rate: float | None = None if callable(rate) else float(rate)
        self._check_learning_rate(self._learning_rate or 0.0)
        self._frozen_tensors = FrozenTensors(backend.state)
        self._output_check = OutputCheck(recipe.objectives if self.is_main else {})
        self._fit_state: FitState | None = None  # of the running fit, or of the last one
        self._pending_fit = PendingFit()  # from which the next fit resumes
        fixed = settings["fixed_inputs"] or {}
        self._carried = CarriedStates(recipe, fixed)  # of training
        # those of the methods for single batches
        self._carried_in = {n: CarriedStates(recipe, fixed) for n in ("evaluation", "prediction")}
        self._training = TrainingGuard()
        self._thread = ThreadState()
        self._is_complete = True

    # ------------------------------------------------------------------ settings that may change

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update, a finite number >= 0.

        A value set here applies until another value is set. UnsupportedError (a TypeError): the
        optimizer follows a schedule.
        """
        if self._learning_rate is None:
            rate = learning_rate_at(self.optimizer, self.global_step)
            self._check_learning_rate(rate)
            return rate
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self._learning_rate is None:
            raise UnsupportedError(
                "The learning rate cannot be set, because it follows the schedule"
                f" {self.optimizer.learning_rate!r}. To set it, give the optimizer a number as its"
                " learning_rate."
            )
        if not (is_number(value) and is_finite(value) and value >= 0):
            raise SettingError(
                f"learning_rate must be a finite number >= 0, got {shortened(value)}."
            )
        self._check_learning_rate(float(value))
        self._learning_rate = float(value)

    def _check_learning_rate(self, rate: float) -> None:
        """Raise SettingError for a rate that the element type of a weight cannot represent."""
        limit = self._recipe.max_learning_rate
        if rate > limit:
            raise SettingError(
                f"The learning rate is {rate:g}, but the weights' element types and"
                f" learning_rate_multipliers allow at most {limit:.2g}."
            )

    @property
    def accumulate(self) -> int:
        """Number of batches whose gradients are averaged for one update.

        It can be set at any time if the Trainer was created with 2 or more.
        """
        return self._backend.accumulate

    @accumulate.setter
    def accumulate(self, value: int) -> None:
        check_accumulate(value)
        if value > 1 and not self._backend.can_accumulate:
            raise SettingError(
                f"accumulate={value} needs a Trainer that was created with accumulate=2 or more."
                " Create it with Trainer(..., accumulate=2); accumulate can then be set to any"
                " number."
            )
        self._backend.accumulate = value

    @property
    def frozen(self) -> tuple[str, ...]:
        """Weights and running statistics that no step changes; their slots do not change either.

        Set it to names or fnmatch patterns (UnknownNameError: a pattern matches nothing), or to
        `()`. The gradients are still computed, and `clip_norm` counts them; after a step the old
        values are copied back. To freeze weights permanently, leave them out of `weights=`.
        """
        return self._frozen_tensors.weights

    @frozen.setter
    def frozen(self, patterns: Sequence[str] | str) -> None:
        weights = matching(patterns, self._recipe.state)
        self._frozen_tensors = FrozenTensors(self._backend.state, weights, self._recipe.slots)

    @property
    def metrics(self) -> list[OutputMetric]:
        """Metrics of training: each with its name in logs, its output, and its `mode`."""
        return list(self._recipe.metrics)

    @check_arguments
    def monitor_mode(self, monitor: str) -> str:
        """Return "min" if smaller values of the figure `monitor` are better, otherwise "max".

        The mode of the metric of that name is used. For other figures, the name determines it.
        """
        name = monitor.removeprefix("val_")
        for metric in self._recipe.metrics:
            if metric.name == name:
                return metric.mode
        return mode_by_name(name)

    def log(self, name: str, value: float) -> None:
        """Add the figure `value` as `name` to the logs of the current hook, for later callbacks.

        SettingError: no hook is running.
        """
        callbacks = self._thread.callbacks
        if callbacks is None:
            raise SettingError(
                f"trainer.log({name!r}, ...) adds to the logs of the running hook, and no hook is"
                " running. Call it inside a hook of a callback."
            )
        callbacks.log(name, value)

    @property
    def predicted(self) -> dict[str, Array]:
        """Output -> array of the batch that was just predicted, in `on_predict_batch_end`."""
        return self._thread.predicted

    def reset_states(self, rows: Sequence[int] | None = None) -> None:
        """Begin new sequences: return the states of `state_outputs` to their first values.

        States begin anew in each epoch, evaluation and prediction. Call this method in a hook, such
        as `on_train_batch_end`, where sequences begin in between, and before a single batch of
        another sequence. In a hook of an evaluation or prediction, it resets the states of that
        one, and otherwise those of training and of all methods for single batches.

        - `rows`: the rows of the next batch in which a sequence begins, as numbers or as a mask;
          None for all rows.

        SettingError: the trainer has no states, or there are no such rows.
        """
        if not self._recipe.state_outputs:
            raise SettingError(
                "reset_states needs a trainer with states: Trainer(..., state_outputs={'output':"
                " 'input'})."
            )
        running = self._thread.carried
        for states in [*self._carried_in.values(), self._carried] if running is None else [running]:
            states.reset(rows)

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch in the running fit, or in the last fit; None if the data determines it.

        A callback can set it in `on_train_begin`. SettingError: the data comes in batches.
        DataError: the model's batch size is fixed.
        """
        return self._fit_state.batches.data.batch_size if self._fit_state is not None else None

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        state = self._fit_state
        if state is None or state.idle_data is None or state.position.nothing_to_resume:
            raise SettingError(
                "batch_size can be set only before the first epoch of a fit. Set it in"
                " on_train_begin, or pass fit(batch_size=...)."
            )
        batch_size = checked_batch_size(value)
        require_rows_for_ranks(batch_size, self._world)
        state.batches.with_batch_size(batch_size)
        state.idle_data = state.batches.data
        for callback in state.callbacks:
            callback.params["steps"] = state.batches.steps

    @check_arguments
    def trial_steps(
        self, rates: Iterable[float], epochs: int | None = 1, batch_size: int | None = None
    ) -> Generator[float, None, None]:
        """Take one step at each learning rate of `rates`, and undo all steps at the end.

        Use it in `on_train_begin` and `on_train_end` of a callback. No hook is called. It yields
        the loss of each step. The data is iterated at most `epochs` times (None: as often as
        needed). With a `batch_size`, only full batches of that many rows are used; data with fewer
        rows gives no step. SettingError: it is called at another time. DataError: the data cannot
        be iterated again.
        """
        data = self._fit_state.idle_data if self._fit_state is not None else None
        if data is None:
            raise SettingError(
                "trial_steps can be called only in on_train_begin and on_train_end of a callback."
            )
        if batch_size is not None and data.rows is not None and batch_size > data.rows:
            return
        with ExitStack() as stack:
            if batch_size is not None:
                data = stack.enter_context(data.with_batch_size(batch_size, drop_last=True))
                stack.enter_context(trial_shapes(self._backend.caches.values()))
            data.require_re_iterable(2)
            numbers = count() if epochs is None else range(epochs)
            batches = stack.enter_context(closing(b for n in numbers for b in data.batches(n)))
            state, on_gradients = self.get_state(), self._backend.on_gradients
            averaged_step = self._averaged_step
            carried = self._carried.state_dict()
            self._carried.reset()
            self._backend.window = 0  # no gradients wait for an update
            self._backend.on_gradients = None
            try:
                for rate, batch in zip(rates, batches):
                    if not (is_number(rate) and is_finite(rate)):
                        raise SettingError(
                            f"A learning rate must be a finite number, got {shortened(rate)}."
                        )
                    with self._training.advancing:
                        loss = self._step(batch, rate, self._tracker)
                    yield self._trial_loss(batch, loss)
            finally:
                with self._training, self._training.advancing, self._backend.lock:
                    self._set_state(state)
                self._carried.load_state_dict(carried)
                self._averaged_step = averaged_step
                self._backend.on_gradients = on_gradients

    def report_gradient_norms(self, *, per_weight: bool = False) -> None:
        """Make the updates of this fit report norms in `gradient_norms`; call in `on_train_begin`.

        `gradient_norm` is the global L2 norm of all gradients, before clipping. With
        `per_weight=True`, `gradient_norm/<weight>` is the norm of one weight's gradient. A batch
        without an update has no norms.
        """
        with self._training, self._backend.lock:
            self._backend.report_norms("per_weight" if per_weight else "global")
            self._tracker.gradient_norms = {}

    @property
    def gradient_norms(self) -> dict[str, float]:
        """Name -> norm of the gradients of the last update of `fit`, if norms are reported."""
        return self._tracker.gradient_norms

    # ------------------------------------------------------------------ state

    def get_weights(self) -> dict[str, Array]:
        """Return copies of the trained weights and of the running statistics, by name."""
        with self._backend.lock:
            return {name: self._backend.state.get(name) for name in self._recipe.state}

    @check_arguments
    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Replace some of the weights; `weights` maps names to arrays.

        All arrays are checked before any weight changes. UnknownNameError: a weight does not exist.
        DataError: a shape or type is wrong, or a number is outside the range of the weight's type.
        NaN and infinities in the arrays are accepted.
        """
        known = self._recipe.state
        for name in weights:
            if name not in known:
                raise UnknownNameError("trained weight", name, known)
        require_same_weights(self._world, "set_weights", weights)
        with self._backend.lock:
            self._backend.state.set(weights)

    def get_state(self) -> dict[str, dict[str, Any]]:
        """Return copies of weights, slots and counters: the whole state of the training."""
        with self._backend.lock:
            return self._copied_state()

    def _copied_state(self) -> dict[str, dict[str, Any]]:
        state = self._backend.state
        slots = [name for name in state if name not in self._recipe.state]
        counters = {name: getattr(self, name) for name in COUNTERS}
        counters |= {"window": self._backend.window, "learning_rate": self._learning_rate}
        counters |= {"first_step": self._first_step} if self._first_step else {}
        return {
            "weights": self.get_weights(),
            "slots": {name: state.get(name) for name in slots},
            "counters": counters,
        }

    @check_arguments
    def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore `state`, which `get_state` returned.

        DataError or SettingError, before anything changes: the state belongs to another trainer.
        """
        with self._training, self._training.advancing, self._backend.lock:
            require_same_form(state, self.get_state())
            same = require_same_weights(
                self._world, "set_state", state["weights"], may_differ=self._averages_weights
            )
            self._set_state(state)
            self._averaged_step = self.global_step if same else -1

    def _set_state(self, state: TrainerState) -> None:
        counters = state["counters"]
        self._backend.state.set({**state["weights"], **state["slots"]})
        for name in COUNTERS:
            setattr(self, name, counters[name])
        self._backend.window = counters["window"]
        self._learning_rate = counters["learning_rate"]
        self._first_step = counters.get("first_step", 0)

    def revert_step(self) -> None:
        """Undo the last update of weights, slots and statistics. Only one update can be undone.

        SettingError: the trainer has `backend="in_place"`, which cannot undo an update.
        """
        with self._training, self._training.advancing, self._backend.lock:
            self._world.meet("revert_step")
            self._backend.revert()
            self._carried.revert()
            self._averaged_step = -1  # each rank has its own weights again

    # ------------------------------------------------------------------ single batches

    def _new_tracker(self) -> Tracker:
        return Tracker(self.objectives, [metric.copy() for metric in self._recipe.metrics])

    def _step(self, batch: Batch, learning_rate: float, tracker: Tracker) -> float:
        """Train on a batch, add its results to `tracker` and return its loss.

        Call it in the context `self._training.advancing`. After an exception nothing has changed,
        except weights that `in_place` cannot restore.
        """
        backend, training = self._backend, self._training
        training.in_step = True
        try:
            with backend.lock:
                loss = self._run_step(batch, learning_rate, tracker)
        finally:
            training.in_step = False
        every = self._world.average_every
        if every is not None and self.global_step % every == 0:
            self._average()
        return backend.shared_loss if backend.reduction is not None else loss

    def _run_step(self, batch: Batch, learning_rate: float, tracker: Tracker) -> float:
        """Update weights, tracker and counters, and return the loss, or change nothing."""
        backend, has_metrics = self._backend, self._recipe.metrics
        batch = self._carried.add_to(batch)
        sums = tracker.savepoint() if has_metrics or backend.updates_late else None
        _, changes = backend.begin_step()
        try:
            result = self._train(batch, learning_rate)
            tracker.gradient_norms = backend.norms()
            if self._frozen_tensors.all:
                self._frozen_tensors.restore((changes, {}))
            if result is None:
                loss = 0.0
            elif has_metrics:
                loss = self._add_metrics(result, batch, tracker)
            else:
                loss = tracker.update(result, batch)
            states = result.prediction() if self._recipe.state_outputs and result else {}
            if backend.updates_late:
                self._finish_step(tracker)
        except BaseException:  # a second Ctrl-C, too
            backend.undo_step()
            if sums is not None:
                tracker.restore(sums)
            raise
        if states:
            self._carried.take(states)
        counters = self.__dict__  # three calls of `__setattr__` take 2 µs longer
        counters["global_batch"] += 1
        counters["samples_seen"] += batch.rows if batch.whole_rows is None else batch.whole_rows
        counters["global_step"] += not backend.window
        return loss

    def _add_metrics(self, result: StepResult, batch: Batch, tracker: Tracker) -> float:
        """Add a result to `tracker`, and return its loss.

        Metrics may be user code, which may wait for another thread, but not for another rank.
        """
        self._backend.unlock()
        self._training.in_metrics = True
        try:
            with self._world.in_step("A metric") if self._world.size > 1 else nullcontext():
                return tracker.update(result, batch)
        finally:
            self._training.in_metrics = False
            self._backend.relock()

    def _finish_step(self, tracker: Tracker) -> None:
        with self._frozen_tensors.kept():
            is_updated = self._backend.finish_step()
        if is_updated:
            tracker.gradient_norms = self._backend.norms()

    def _train(self, batch: Batch, learning_rate: float) -> StepResult | None:
        """Train on a batch; return None if this rank has no row of the batch."""
        if not batch.rows and self._backend.reduction is None:
            return None
        done = self.global_step - self._first_step
        return self._backend.train(batch, learning_rate, done, self._random_seed)

    def _flush(self, learning_rate: float) -> None:
        """Update with the gradients of an incomplete accumulation window, at an epoch's end."""
        backend, done = self._backend, self.global_step - self._first_step
        with backend.lock:
            backend.begin_step()
            try:
                with self._frozen_tensors.kept():
                    is_updated = backend.flush(learning_rate, done)
                if is_updated:
                    self._tracker.gradient_norms = backend.norms()
                    self.global_step += 1
            except BaseException:
                backend.undo_step()
                raise
        if self._world.average_every is not None and self._averaged_step != self.global_step:
            self._average()

    # ------------------------------------------------------------------ the running fit

    @property
    def _is_fitting(self) -> bool:
        state = self._fit_state
        return state is not None and state.running and self._training.fit_runs

    def _begin_fit(self, state: FitState, history: History) -> None:
        """Install the state, the callbacks and the history of a new fit."""
        self.history = history
        self.stop_training = state.position.stop
        self.stop_reason = state.position.stop_reason
        self.last_losses.clear()
        self._fit_state = state
        self._pending_fit = PendingFit()
        self._thread.callbacks = state.callbacks
        listeners = state.callbacks.gradients
        self._backend.on_gradients = self._call_on_gradients if listeners else None

    def _call_on_gradients(self, gradients: dict[str, Array]) -> None:
        """Let callbacks change the gradients of a step, which may still be undone."""
        if self._fit_state is not None:
            with self._training.advancing.paused():
                self._fit_state.callbacks.on_gradients(gradients)

    def _end_fit(self) -> None:
        """Remove the callbacks; the state stays for `snapshot`."""
        self._thread.callbacks = None
        self._backend.on_gradients = None
        self._backend.report_norms("none")
        if self._fit_state is not None:
            self._fit_state.running = False
            self._fit_state.idle_data = None


def scalar_logs(figures: Figures) -> Logs:
    """Return the figures that are numbers as logs."""
    scalars = {k: v for k, v in figures.items() if not isinstance(v, np.ndarray)}
    return Logs(scalars)
