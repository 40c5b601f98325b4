"""The position of a fit, and the state from which the next fit resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxfit.callbacks.callback_list import TOLD_HOOKS
from onnxfit.data.order import ORDER_VERSION
from onnxfit.errors import SettingError, warn_user
from onnxfit.files import (
    COUNT,
    FIGURE,
    FLAG,
    POSITIVE_COUNT,
    RATE,
    TEXT,
    ValueType,
    mapping_of,
    optional,
)

# Types of the fields of Position, in their order.
POSITION_TYPES = {
    "epoch": COUNT,
    "batch": COUNT,
    "data_epoch": optional(COUNT),
    "data_batch": COUNT,
    "learning_rate": optional(RATE),
    "trained": FLAG,
    "batch_size": optional(POSITIVE_COUNT),
    "order": POSITIVE_COUNT,
    "stop": FLAG,
    "stop_reason": optional(TEXT),
}
EVENT_TYPES = {
    "hook": ValueType(
        " or ".join(TOLD_HOOKS),
        lambda value: isinstance(value, str) and value in TOLD_HOOKS,
    ),
    "index": COUNT,
    "logs": mapping_of(FIGURE),
    "stop": FLAG,
    "reason": optional(TEXT),
}
KEYS_OF_EVENT = ("told", "missed")  # of callbacks, see `CallbackList.told_by_key`; may be absent


@dataclass
class Position:
    """Position of a fit: between two epochs, or after some batches of one.

    A *data epoch* is one iteration over the data. It is the same as an epoch of `fit`, unless
    `steps_per_epoch` ends epochs earlier or later than the data.
    """

    epoch: int = 0  # the running epoch, or the next one
    batch: int = 0  # finished batches of this epoch
    data_epoch: int | None = None  # number of the running data epoch, None if none is running
    data_batch: int = 0  # finished batches of this data epoch
    learning_rate: float | None = None  # of the last step
    trained: bool = False  # all batches of the epoch are finished, but not its validation
    batch_size: int | None = None  # rows of a batch, None if the data determines it
    # version of the function that orders shuffled rows
    order: int = field(default=ORDER_VERSION, compare=False)
    stop: bool = False  # a callback has stopped the fit, and its last epoch still runs
    stop_reason: str | None = None

    @classmethod
    def restored(cls, values: Sequence[Any]) -> Position:
        """Return the position of a checkpoint. In older checkpoints the last fields are absent."""
        position = cls(*values)
        if len(values) <= list(POSITION_TYPES).index("order"):
            position.order = 1
        return position

    @property
    def nothing_to_resume(self) -> bool:
        """Whether no fit has begun, or the last fit has ended."""
        return self == Position()

    def require_batch_size(self, batch_size: int | None) -> None:
        """Raise SettingError for another batch size inside a data epoch: it would skip rows."""
        sizes = (self.batch_size, batch_size)
        if self.data_batch and batch_size != self.batch_size and None not in sizes:
            raise SettingError(
                f"The checkpoint was written in the middle of an epoch, after {self.data_batch}"
                f" batches of {self.batch_size} rows, but this fit has batch_size={batch_size}."
                f" Pass batch_size={self.batch_size}, or start the next epoch with"
                f" initial_epoch={self.epoch + 1}."
            )

    def warn_of_other_order(self) -> None:
        """Warn if an older version of onnxfit shuffled the data epoch that is resumed."""
        if self.data_batch and self.order != ORDER_VERSION:
            warn_user(
                f"The checkpoint was written after {self.data_batch} batches of an epoch by a"
                " version of onnxfit that shuffles in another order. If the data is shuffled, some"
                " rows are repeated in this epoch, and as many are skipped. To avoid this, start"
                f" the next epoch with initial_epoch={self.epoch + 1}."
            )


@dataclass(frozen=True)
class PendingFit:
    """State of an unfinished fit, from which the next `fit` resumes."""

    position: Position = field(default_factory=Position)
    tracker: Mapping[str, Any] = field(default_factory=dict)  # running means of the epoch
    missed_event: Mapping[str, Any] = field(default_factory=dict)  # event that the loggers missed
    callbacks: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # state_key -> state

    def from_epoch(self, epoch: int) -> PendingFit:
        """Return the state for a fit that begins at `epoch`, or itself if it is already later."""
        if epoch <= self.position.epoch:
            return self
        return PendingFit(Position(epoch), callbacks=self.callbacks)
