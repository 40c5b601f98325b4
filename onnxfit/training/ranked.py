"""The ranks of a trainer: the processes that train together, and what each of them may do alone."""

from __future__ import annotations

from typing import Any

from onnxfit.data import Batch
from onnxfit.errors import SettingError
from onnxfit.runtime.backends.backend import Backend
from onnxfit.runtime.reduction import average_state


class RankedTrainer:
    """Knows the other ranks, and whether all of them have the same weights."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._world = backend.world
        self.global_step = 0
        self._averaged_step = 0  # the update after which the ranks last had the same weights

    @property
    def rank(self) -> int:
        """Number of this process among those that train together, from 0."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self._world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files; True where one process trains alone."""
        return self._world.is_main

    def from_main(self, name: str, value: Any) -> Any:
        """Return the `value` that rank 0 passed, on every rank: for decisions by a clock or a file.

        All ranks call it at the same time; SettingError on all of them where one calls something
        else, or another `name`. The value is a number, a string, None, an array, or lists and dicts
        of them. One process alone gets its own value back.
        """
        return self._world.from_main(name, value)

    @property
    def _averages_weights(self) -> bool:
        """Whether each rank trains weights of its own, which are averaged now and then."""
        return self._world.size > 1 and self._world.average_every is not None

    def _average(self) -> None:
        """Average weights, slots and statistics over all ranks."""
        with self._backend.lock:
            average_state(self._world, self._backend.state)
        self._averaged_step = self.global_step

    def _trial_loss(self, batch: Batch, loss: float) -> float:
        """Return the loss of a trial step, which is the same on all ranks, as the weights are."""
        if not self._averages_weights:
            return loss
        if self._averaged_step != self.global_step:
            self._average()
        return self._mean_loss(batch, loss)

    def _mean_loss(self, batch: Batch, loss: float) -> float:
        """Return the mean of the losses that the ranks have, each on its rows of a batch."""
        parts = self._world.gather("the loss of a batch", [loss * batch.rows, batch.rows])
        return float(sum(total for total, _ in parts) / max(sum(rows for _, rows in parts), 1))

    def _require_equal_ranks(self, what: str) -> None:
        """Raise SettingError where the weights of this rank are not those of the others.

        - `what`: the call that needs the same weights everywhere.
        """
        every = self._world.average_every
        if self._averages_weights and self._averaged_step != self.global_step:
            raise SettingError(
                f"{what} between two averages would use the weights of rank {self.rank} alone: step"
                f" {self.global_step}, and average_every={every}. Call it after a multiple of"
                f" {every} updates, or at the end of an epoch."
            )

    def _require_whole_window(self, what: str) -> None:
        """Raise SettingError where each rank has a part of the gradients that wait for an update.

        - `what`: the call that saves the gradients.
        """
        if not self._backend.window_is_whole:
            raise SettingError(
                f"{what} after {self._backend.window} of {self._backend.accumulate} batches of an"
                " update would keep the gradients of one rank alone. Save after an update, at the"
                " end of an epoch, or by ModelCheckpoint or BackupAndRestore with save_freq."
            )
