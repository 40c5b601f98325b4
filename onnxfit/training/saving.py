"""The training state as the contents of a checkpoint, and back."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxfit.callbacks.background import require_adapters
from onnxfit.callbacks.history import History
from onnxfit.errors import SettingError, warn_user
from onnxfit.files import as_checkpoint_error
from onnxfit.training import checkpoint
from onnxfit.training.carried import CARRIED
from onnxfit.training.contents import CheckpointContents
from onnxfit.training.lineage import Lineage
from onnxfit.training.passed_settings import with_passed_settings
from onnxfit.training.position import PendingFit, Position
from onnxfit.training.state import TrainerState, require_same_form
from onnxfit.training.training import Training

if TYPE_CHECKING:
    from onnxfit.training.loop import FitState


def save(training: Training, path: str | os.PathLike[str], adapters_only: bool) -> Path:
    """Write a checkpoint from the memory of the training, without a copy; see `Trainer.save`."""
    with training.guard.advancing.lock:  # between two steps
        contents = snapshot(training, "save", adapters_only, copy=False)
        with training.backend.lock:
            return contents.write(path)


def snapshot(
    training: Training, what: str, adapters_only: bool, *, copy: bool = True
) -> checkpoint.Snapshot:
    """Return the training state, for the call `what`; see `Trainer.snapshot`."""
    require_savable(training, what)
    if adapters_only:
        require_adapters(training.settings)
    with training.guard.advancing.lock:  # between two steps
        if training.guard.in_metrics:
            raise SettingError(
                f"{what} cannot be called inside a metric, because the batch is not counted"
                " yet. Call it in a hook, such as on_train_batch_end."
            )
        contents = contents_of(training, adapters_only, copy=copy)
        unchanged = nullcontext if copy else training.state.until_it_changes()
    return checkpoint.Snapshot(contents, writes=training.world.is_main, unchanged=unchanged)


def require_savable(training: Training, what: str) -> None:
    """Raise SettingError if rank 0 does not have the state of all ranks."""
    training.require_equal_ranks(what)
    training.require_whole_window(what)


def restore(training: Training, contents: CheckpointContents, passed: Collection[str] = ()) -> None:
    """Restore the state of a checkpoint, in which settings that were `passed` win."""
    history = History()
    history.load_state_dict(contents.history)
    position = Position.restored(contents.resume)
    # there is nothing to resume after a fit that has ended
    callbacks = {} if position.nothing_to_resume else dict(contents.callbacks)
    tracker, missed_event = dict(contents.tracker), dict(contents.missed_event)
    losses = [float(loss) for loss in contents.train_losses]
    pending = PendingFit(position, tracker, missed_event, callbacks)
    with training.guard, training.guard.advancing, training.backend.lock:
        own = training.state.get(copy=False)
        state: TrainerState = contents.state
        if passed:
            has_numbers = training.trainable.is_file
            state = with_passed_settings(contents, own, passed, has_numbers=has_numbers)
        require_same_form(state, own)
        training.trainable.require_constants(contents.constants)
        training.state.set(state)
        training.backend.accumulator.zero_except_on_rank_0()
        training.state.averaged_step = training.state.global_step
        training.history = history
        training.train_losses = losses
        training.fit_state = None
        training.pending_fit = pending
        training.lineage = Lineage.restored(contents.lineage, "the checkpoint")


def contents_of(training: Training, adapters_only: bool, *, copy: bool) -> CheckpointContents:
    """Return the contents of a checkpoint written now; `copy` is as for `Trainer.get_state`."""
    pending = pending_now(training)
    return CheckpointContents(
        model=None if adapters_only else training.trainable.file,
        base=training.trainable.fingerprint if adapters_only else None,
        settings=training.settings,
        state=training.state.get(copy=copy),
        history=training.history.state_dict(),
        train_losses=[*training.train_losses],
        resume=astuple(pending.position),
        tracker=deepcopy(pending.tracker),
        missed_event=pending.missed_event,
        callbacks=pending.callbacks,
        constants=training.trainable.constants,
        lineage=training.lineage.as_json(training),
    )


def pending_now(training: Training) -> PendingFit:
    """Return the state of the running fit, or of an interrupted or loaded fit."""
    fit = training.fit_state
    if fit is None or not training.pending_fit.position.nothing_to_resume:
        return training.pending_fit
    missed_event = dict(fit.pending.missed_event)
    if fit.current_event is not None:
        hook, index, logs = fit.current_event
        missed_event = {"hook": hook, "index": index, "logs": dict(logs)}
        missed_event |= {"stop": training.stop_training, "reason": training.stop_reason}
        missed_event |= fit.callbacks.told_by_key(hook)
    sums = fit.pending.tracker
    if fit.position.batch and not sums:
        sums = _sums_of_epoch(training, fit)
    callbacks = fit.callbacks.state_dict() if fit.running else fit.callback_states
    position = fit.resume_position(training.stop_training, training.stop_reason)
    return PendingFit(position, sums, missed_event, callbacks)


def _sums_of_epoch(training: Training, fit: FitState) -> Mapping[str, Any]:
    """Return the sums of the running epoch; {}, with a warning, if ranks did not share them."""
    if training.world.size == 1:
        sums = training.tracker.state_dict()
        if training.recipe.state_outputs:
            sums[CARRIED] = training.state.carried.state_dict()
        return sums
    if fit.sums_batch == fit.position.batch:
        return fit.sums
    warn_user(
        "The checkpoint lacks the loss and metrics of the epoch so far, because the ranks did"
        f" not exchange them after batch {fit.position.batch}. After resuming, the loss and"
        " metrics of this epoch will cover only the later batches. Save in on_train_batch_end"
        " or on_epoch_end instead."
    )
    return {}


def checkpoint_errors(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Raise CheckpointError for errors caused by unusable contents of a checkpoint."""
    problem = f"{os.fspath(path)!r} does not fit this version of onnxfit, or is damaged"
    return as_checkpoint_error(problem)
