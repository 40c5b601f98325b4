"""The loop of `fit`: epochs, their validation, and the callbacks between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

from onnxfit.callbacks.callback_list import CallbackList
from onnxfit.callbacks.history import History
from onnxfit.callbacks.logs import Logs
from onnxfit.data import Batch, Source
from onnxfit.data.order import checked_batch_size
from onnxfit.distributed.world import World
from onnxfit.errors import SettingError, warn_user
from onnxfit.graph.spec import TensorSpec
from onnxfit.step.forward import constant_batch_norms
from onnxfit.step.tracker import Figures, Tracker
from onnxfit.training.carried import CARRIED
from onnxfit.training.epoch_iterator import EpochIterator
from onnxfit.training.evaluation import Evaluator
from onnxfit.training.position import PendingFit, Position
from onnxfit.training.ranks import agree, merged_over_ranks, own_sums, require_rows_for_ranks
from onnxfit.training.training import Training, scalar_logs

TOO_LATE_FOR_BATCH_SIZE = (
    "batch_size can be set only before the first epoch of a fit. Set it in on_train_begin, or pass"
    " fit(batch_size=...)."
)


@dataclass
class FitState:
    """State of the running fit, or of the last one."""

    batches: EpochIterator
    callbacks: CallbackList
    position: Position  # its data epoch may be out of date; `batches` has the true one
    pending: PendingFit  # state of an interrupted fit that this fit has not restored yet
    # the data, in hooks outside of epochs, where a callback may try steps
    data_for_trials: Source | None = None
    current_event: tuple[str, int, Logs] | None = None  # event of the running hooks
    running: bool = True
    warned_of_loss: bool = False
    met_single_row: bool = False  # whether there was a batch of one row
    sums: Mapping[str, Any] = field(default_factory=dict)  # sums of all ranks at the last exchange
    sums_batch: int = -1  # number of batches in `sums`
    callback_states: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # after an error
    last_epoch: int = 0  # number of epochs after which the fit has ended

    def reopen(self) -> None:
        """After an error at the end of the fit: the next fit has only the end left to do."""
        if self.position.nothing_to_resume and self.last_epoch:
            self.position = Position(self.last_epoch)
            self.callback_states = self.callbacks.state_dict()

    def set_batch_size(self, value: int, world: World) -> None:
        """Change the number of rows in a batch; see `Trainer.batch_size`."""
        if self.data_for_trials is None or self.position.nothing_to_resume:
            raise SettingError(TOO_LATE_FOR_BATCH_SIZE)
        batch_size = checked_batch_size(value)
        require_rows_for_ranks(batch_size, world)
        self.batches.with_batch_size(batch_size)
        self.data_for_trials = self.batches.data
        for callback in self.callbacks:
            callback.params["steps"] = self.batches.steps

    def resume_position(self, stop: bool, stop_reason: str | None) -> Position:
        """Return the position from which a checkpoint written now resumes.

        - `stop`, `stop_reason`: the trainer's. They are decisions about a running epoch, so a
          position between two fits has neither.
        """
        if self.position.nothing_to_resume:
            return self.position
        data_epoch, data_batch = self.batches.data_position
        return replace(
            self.position,
            data_epoch=data_epoch,
            data_batch=data_batch,
            batch_size=self.batches.data.batch_size,
            stop=stop,
            stop_reason=stop_reason,
        )


@dataclass(frozen=True)
class Validation:
    """The validation data, the epochs after which it is evaluated, and the number of batches."""

    data: Source
    is_due: Callable[[int], bool]
    steps: int | None


class FitLoop:
    """One call of `fit`: `run` goes through the epochs, each `epoch` trains and validates.

    This class is for a single process; `RanksFitLoop` exchanges figures and decisions of ranks.

    `pending` is the state of an interrupted fit, from which the loop resumes.
    """

    def __init__(
        self,
        training: Training,
        evaluator: Evaluator,
        batches: EpochIterator,
        validation: Validation | None,
        callbacks: CallbackList,
        pending: PendingFit,
    ) -> None:
        self.training = training
        self.evaluator = evaluator
        self.validation = validation
        self.callbacks = callbacks
        # `Position()` stands for "no fit runs". The number of the data epoch makes this one differ.
        position = replace(pending.position, data_epoch=batches.data_position[0])
        self.state = FitState(batches, callbacks, position, pending)
        self.loss = float("nan")  # mean loss of the last epoch
        # False while other ranks do not know of a stop that was set on this rank
        self.stop_is_agreed = True
        self._advancing = callbacks.advancing = training.guard.advancing
        figures = training.tracker.figure_names()
        validated = [f"val_{name}" for name in figures] if validation is not None else []
        callbacks.batch_figures = [*training.tracker.figures(), "batch_loss"]
        callbacks.figures = [*figures, *validated, "learning_rate"]

    def run(self, epochs: int, history: History, arguments: Mapping[str, Any]) -> History:
        """Train up to epoch number `epochs`, and return `history`.

        `arguments` are further arguments of the call, for the lineage.

        After an error its state stays available for a checkpoint; if no step ran, the history and
        the pending fit are those before.
        """
        training, signals = self.training, self._advancing.signals
        previous = training.history, training.pending_fit
        steps_before = training.state.global_batch
        training.guard.on_late_signal = self.state.reopen
        try:
            training.begin_fit(self.state, history)
            training.lineage.begin_fit(training, self, {"epochs": epochs, **arguments})
            # A fit that does not resume in an epoch drops the gradients of an interrupted one.
            if not self.state.position.batch:
                training.backend.accumulator.count = 0
            self._train_epochs(epochs)
        except BaseException as error:
            signals.is_busy = True  # callbacks close their files first
            self.state.reopen()
            self.callbacks.on_exception(error)
            self.state.callback_states = self.callbacks.state_dict()
            if training.state.global_batch == steps_before:
                training.history, training.pending_fit = previous
            raise
        finally:
            signals.is_busy = True
            training.lineage.end_fit(training)
            training.end_fit()
            self.callbacks.on_close()
        return history

    def _train_epochs(self, epochs: int) -> None:
        state, logs = self.state, Logs()
        first = state.pending.position.epoch
        state.data_for_trials = state.batches.data
        self.callbacks.on_train_begin(logs)
        self._agree_on_batches()
        state.data_for_trials = None
        state.position.require_batch_size(state.batches.data.batch_size)
        state.position.warn_of_other_order()
        if state.pending.missed_event and not state.pending.position.batch:
            logs = self._replay_missed_event()
        # An epoch in which training was stopped still needs its validation and its end.
        ends_first = state.position.stop and (state.position.batch or state.position.trained)
        for epoch in range(first, epochs):
            if self.training.stop_training and self.stop_is_agreed and not ends_first:
                break
            ends_first = False
            logs = self.epoch(epoch)
        state.last_epoch = state.position.epoch
        state.position = Position()
        state.data_for_trials = state.batches.data
        self.callbacks.on_train_end(logs)

    def epoch(self, epoch: int) -> Logs:
        """Run an epoch, or the rest of an interrupted epoch, and return its logs."""
        training = self.training
        self.callbacks.on_epoch_begin(epoch, Logs())
        self._agree("on_epoch_begin")
        if self.state.pending.missed_event:
            self._replay_missed_event()
        figures, learning_rate = self.train()
        self.state.pending = PendingFit()
        if self.validation is not None and self.validation.is_due(epoch):
            figures |= self.validate(self.validation)
        logs = scalar_logs({**figures, "learning_rate": learning_rate})
        with self._advancing:
            training.state.epoch += 1
            training.train_losses.append(self.loss)
            self.state.position = Position(epoch=epoch + 1)
            self._begin_event("on_epoch_end", epoch, logs)
        self.callbacks.on_epoch_end(epoch, logs)
        self.state.current_event = None
        self._agree("on_epoch_end")
        return logs

    def train(self) -> tuple[Figures, float]:
        """Take the steps of an epoch; return its means, and the learning rate of its last step."""
        training, state, callbacks = self.training, self.state, self.callbacks
        tracker, position, last_losses = training.tracker, state.position, training.last_losses
        learning_rate = position.learning_rate
        if learning_rate is None:
            learning_rate = training.state.learning_rate
        self._begin_sums(tracker, position)
        finished = (training.stop_training and self.stop_is_agreed) or position.trained
        tells_begin = "on_train_batch_begin" in callbacks.subscribed
        tells_end = "on_train_batch_end" in callbacks.subscribed
        logs: Logs | None = None
        for index, batch in () if finished else state.batches:
            self._begin_batch(index)
            if tells_begin:
                callbacks.on_train_batch_begin(index, Logs())
                self._agree("on_train_batch_begin")
            learning_rate = training.state.learning_rate
            if batch.rows == 1 or training.output_check.pending:
                self._check_batch(batch)
            with self._advancing:
                training.lineage.observe(training)
                loss = training.step(batch, learning_rate, tracker)
                state.batches.advance()
                position.batch = index + 1
                position.learning_rate = learning_rate
                last_losses.append(loss)
                if tells_end:
                    logs = self._event_in_step(index, loss)
            logs = self._end_step(index, batch, loss, logs)
            if logs is not None:
                self._tell_batch_end(index, logs)
            if training.stop_training and self.stop_is_agreed:
                break
            if not (math.isfinite(loss) or state.warned_of_loss):
                self._warn_of_loss(loss)
        with self._advancing:
            training.lineage.observe(training)
            training.flush(learning_rate)
            position.trained = True
            state.batches.end_epoch()
        whole = self._merged("the end of an epoch")
        self.loss = whole.loss
        return whole.results(), learning_rate

    def _begin_sums(self, tracker: Tracker, position: Position) -> None:
        """Begin the figures of an epoch, or continue those of an interrupted epoch."""
        state = self.state
        tracker.reset()
        state.sums_batch = -1
        carried = self.training.state.carried
        if CARRIED in state.pending.tracker:
            carried.load_state_dict(state.pending.tracker[CARRIED])
        elif not position.batch:
            carried.reset()
        if state.pending.tracker:
            state.sums, state.sums_batch = state.pending.tracker, position.batch
            sums = own_sums(self.training.world, state.pending.tracker, tracker)
            if sums:
                tracker.load_state_dict(sums)
            state.pending = replace(state.pending, tracker={})

    def _begin_event(self, hook: str, index: int, logs: Logs) -> Logs:
        """Record the event that callbacks are about to receive, and return its logs."""
        self.callbacks.told.clear()
        self.state.current_event = hook, index, logs
        return logs

    def _batch_event(self, index: int, tracker: Tracker, loss: float) -> Logs:
        figures = tracker.figures()  # scalars only
        figures["batch_loss"] = loss
        return self._begin_event("on_train_batch_end", index, Logs(figures))

    def _tell_batch_end(self, index: int, logs: Logs) -> None:
        self.callbacks.on_train_batch_end(index, logs)
        self.state.current_event = None
        self._agree("on_train_batch_end")

    # `RanksFitLoop` overrides these methods: several ranks exchange figures and decisions there.

    def _begin_batch(self, index: int) -> None:
        """Prepare for hooks before and inside a step."""

    def _event_in_step(self, index: int, loss: float) -> Logs | None:
        """Begin the end of a batch as a part of its step, and return its logs; None if that comes
        later.
        """
        return self._batch_event(index, self.training.tracker, loss)

    def _end_step(self, index: int, batch: Batch, loss: float, logs: Logs | None) -> Logs | None:
        """Return the logs of the end of a batch, which may have begun in the step; None if no
        callback is left to read them.
        """
        return logs

    def _agree(self, hook: str) -> None:
        """Apply the decisions of a hook."""

    def _merged(self, where: str) -> Tracker:
        """Return the tracker of the whole batches."""
        return self.training.tracker

    def validate(self, validation: Validation) -> Figures:
        """Return the figures of the validation data, with names that begin with `val_`."""
        figures = self.evaluator.evaluate(validation.data, self.callbacks, validation.steps)
        return {f"val_{name}": value for name, value in figures.items()}

    def _agree_on_batches(self) -> None:
        """Apply on all ranks the decisions that rank 0 made in `on_train_begin`."""
        self._agree("on_train_begin")
        world, own = self.training.world, self.state.batches.data.batch_size
        batch_size = world.broadcast("the batch size", own)
        if batch_size != own:
            self.state.set_batch_size(batch_size, world)

    def _replay_missed_event(self) -> Logs:
        """Tell an event to the callbacks that missed it, and restore the decisions made in it."""
        state, event = self.state, self.state.pending.missed_event
        hook, index, logs = event["hook"], event["index"], Logs({**event["logs"]})
        self.training.stop_training = event["stop"]
        self.training.stop_reason = event["reason"]
        with self._advancing:
            rest = self.callbacks.begin_rest(hook, event)
            state.current_event = hook, index, logs
            state.pending = replace(state.pending, missed_event={})
        self.callbacks.tell_rest(rest, hook, index, logs)
        state.current_event = None
        self._agree(event["hook"])
        return logs

    def _check_batch(self, batch: Batch) -> None:
        """Warn of the first batch of one row, and of outputs that contradict their losses."""
        if batch.rows == 1 and not self.state.met_single_row:
            self._warn_of_single_row(batch)
        if self.training.output_check.pending:
            self.training.check_outputs(self.training.state.carried.add_to(batch))

    def _warn_of_single_row(self, batch: Batch) -> None:
        """Warn if BatchNormalization gets a batch of one row, which has no variance."""
        self.state.met_single_row = True
        shapes = {
            name: TensorSpec(name, array.dtype, array.shape)
            for name, array in batch.arrays().items()
        }
        nodes = constant_batch_norms(self.training.recipe, shapes)
        if nodes:
            others = f" and {len(nodes) - 1} others" if len(nodes) > 1 else ""
            warn_user(
                "A batch of only 1 row has one value per channel for BatchNormalization"
                f" {nodes[0]!r}{others}: the output is constant, and the variance of the batch is"
                " 0. Drop a shorter last batch with DataLoader(..., drop_last=True), or make"
                " batches of at least 2 rows."
            )

    def _warn_of_loss(self, loss: float) -> None:
        self.state.warned_of_loss = True
        training = self.training
        if not training.world.is_main:
            return
        losses = (objective.loss for objective in training.recipe.objectives.values())
        causes = [own.cause_of_infinity for own in losses if math.isinf(loss)]
        advice = " ".join([*filter(None, causes), "Lower the learning rate, or set clip_norm."])
        warn_user(
            f"The loss is {loss} at step {training.state.global_step} with learning rate"
            f" {training.state.learning_rate:g}. Training continues. {advice} To stop here instead,"
            " with the weights from before this step, use the callback TerminateOnNaN.",
            RuntimeWarning,
        )


class RanksFitLoop(FitLoop):
    """One call of `fit` on several ranks, which exchange figures and decisions between steps."""

    def _begin_batch(self, index: int) -> None:
        """Exchange the sums that hooks before and inside a step may read."""
        subscribed = self.callbacks.subscribed
        is_read = "on_train_batch_begin" in subscribed or "on_gradients" in subscribed
        if is_read and index and self.state.sums_batch != index:
            self._merged("the beginning of a batch")

    def _event_in_step(self, index: int, loss: float) -> Logs | None:
        return None

    def _end_step(self, index: int, batch: Batch, loss: float, logs: Logs | None) -> Logs | None:
        if "on_gradients" in self.callbacks.subscribed:
            self._agree("on_gradients")
        if "on_train_batch_end" not in self.callbacks.subscribed:
            return None
        return self._share_batch_end(index, batch, loss)

    def _share_batch_end(self, index: int, batch: Batch, loss: float) -> Logs | None:
        """Return the logs of all ranks at the end of a batch.

        If no callback reads them, call the callbacks with the loss of this rank, and return None.
        If a callback may save a checkpoint, move the accumulated gradients to rank 0.
        """
        training = self.training
        if not self.callbacks.read_batch(index):
            self.callbacks.told.clear()
            self.callbacks.on_train_batch_end(index, Logs({"batch_loss": loss}))
            return None
        if training.averages_weights:
            loss = training.mean_loss(batch, loss)
        if self.callbacks.save_after(training.state.global_batch):
            training.backend.accumulator.reduce()
        return self._batch_event(index, self._merged("the end of a batch"), loss)

    def _agree(self, hook: str) -> None:
        """Apply the decisions of rank 0 on all ranks, and stop together."""
        self.stop_is_agreed = agree(self.training, hook)

    def _merged(self, where: str) -> Tracker:
        """Return the tracker of all ranks, and keep the sums that a checkpoint needs."""
        world, tracker = self.training.world, self.training.tracker
        whole, self.state.sums = merged_over_ranks(world, where, tracker)
        self.state.sums_batch = self.state.position.batch
        return whole


def validation_due(frequency: Union[int, Sequence[int]]) -> Callable[[int], bool]:
    """Return a function that tells whether an epoch, counted from 0, ends with validation.

    `frequency` is n for every n-th epoch, or a list of epochs counted from 1, as in Keras.
    """
    if not isinstance(frequency, Collection):
        if frequency < 1:
            raise SettingError(f"validation_freq must be >= 1, got {frequency}.")
        return lambda epoch: (epoch + 1) % frequency == 0
    listed = set(frequency)
    return lambda epoch: epoch + 1 in listed
