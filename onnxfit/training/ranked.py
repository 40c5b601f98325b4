"""The ranks of a trainer: the processes that train together, and calls that need all of them."""

from __future__ import annotations

from typing import Any

from onnxfit.data import Batch
from onnxfit.errors import SettingError
from onnxfit.runtime.backends.backend import Backend
from onnxfit.runtime.reduction import average_state


class RankedTrainer:
    """Part of a trainer that knows the other ranks, and whether all have the same weights."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._world = backend.world
        self.global_step = 0
        self._averaged_step = 0  # the update after which the ranks last had the same weights

    @property
    def rank(self) -> int:
        """Number of this process, from 0, among the processes that train together."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self._world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files; True if one process trains alone."""
        return self._world.is_main

    def from_main(self, name: str, value: Any) -> Any:
        """Return the `value` of rank 0 on every rank, for decisions that depend on a clock or file.

        All ranks must call it at the same point with the same `name`; otherwise SettingError is
        raised on all ranks. The value is a number, a string, None, an array, or lists and dicts of
        these. A single process gets its own value back.
        """
        return self._world.from_main(name, value)

    @property
    def _averages_weights(self) -> bool:
        """Whether each rank trains its own weights, which are averaged every few updates."""
        return self._world.size > 1 and self._world.average_every is not None

    def _average(self) -> None:
        """Average weights, slots and statistics over all ranks."""
        with self._backend.lock:
            average_state(self._world, self._backend.state)
        self._averaged_step = self.global_step

    def _trial_loss(self, batch: Batch, loss: float) -> float:
        """Return the loss of a trial step, which is the same on all ranks."""
        if not self._averages_weights:
            return loss
        if self._averaged_step != self.global_step:
            self._average()
        return self._mean_loss(batch, loss)

    def _mean_loss(self, batch: Batch, loss: float) -> float:
        """Return the mean of the ranks' losses, each weighted by its rows of the batch."""
        parts = self._world.gather("the loss of a batch", [loss * batch.rows, batch.rows])
        return float(sum(total for total, _ in parts) / max(sum(rows for _, rows in parts), 1))

    def _require_equal_ranks(self, what: str) -> None:
        """Raise SettingError if the weights of this rank may differ from those of other ranks.

        - `what`: the call that needs the same weights everywhere.
        """
        every = self._world.average_every
        if self._averages_weights and self._averaged_step != self.global_step:
            raise SettingError(
                f"{what} at step {self.global_step} would use the weights of rank {self.rank}"
                f" alone, because average_every={every}. Call it after a multiple of {every}"
                " updates, or at the end of an epoch."
            )

    def _require_whole_window(self, what: str) -> None:
        """Raise SettingError if each rank has only a part of the accumulated gradients.

        - `what`: the call that saves the gradients.
        """
        if not self._backend.window_is_whole:
            raise SettingError(
                f"{what} after {self._backend.window} of {self._backend.accumulate} batches of an"
                " update would save the gradients of one rank only. Save after an update, at the"
                " end of an epoch, or with ModelCheckpoint or BackupAndRestore(save_freq=...)."
            )
