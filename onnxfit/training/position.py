"""The position of a fit, and the state that an interrupted one leaves for the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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

# of the fields of Position, in their order
POSITION_TYPES = {
    "epoch": COUNT,
    "batch": COUNT,
    "data_epoch": optional(COUNT),
    "data_batch": COUNT,
    "learning_rate": optional(RATE),
    "trained": FLAG,
    "batch_size": optional(POSITIVE_COUNT),
    "order": POSITIVE_COUNT,
}
# the events of which loggers are told when a fit resumes; their names are those of methods
DELIVERED_HOOKS = ("on_epoch_end", "on_train_batch_end")
EVENT_TYPES = {
    "hook": ValueType(
        " or ".join(DELIVERED_HOOKS),
        lambda value: isinstance(value, str) and value in DELIVERED_HOOKS,
    ),
    "index": COUNT,
    "logs": mapping_of(FIGURE),
    "stop": FLAG,
    "reason": optional(TEXT),
}


@dataclass
class Position:
    """Position of a fit: between two epochs, or after some batches of one.

    A *data epoch* is one iteration over the data. It is the same as an epoch of `fit`, unless
    `steps_per_epoch` ends epochs earlier or later than the data.
    """

    epoch: int = 0  # the running epoch, or the next one
    batch: int = 0  # batches of it that are done
    data_epoch: int | None = None  # number of the running data epoch, None if none is running
    data_batch: int = 0  # batches of that data epoch that are done
    learning_rate: float | None = None  # of the last step
    trained: bool = False  # all batches of the epoch are done, and its validation is not
    batch_size: int | None = None  # rows of a batch, None if only the data can tell
    # version of the function that orders shuffled rows
    order: int = field(default=ORDER_VERSION, compare=False)

    @classmethod
    def restored(cls, values: Sequence[Any]) -> Position:
        """Return the position of a checkpoint, whose last fields are absent in older ones."""
        position = cls(*values)
        if len(values) < len(POSITION_TYPES):
            position.order = 1
        return position

    @property
    def nothing_to_resume(self) -> bool:
        """Whether no fit was begun, or the last one has ended."""
        return self == Position()

    def require_batch_size(self, batch_size: int | None) -> None:
        """Refuse other batches in the middle of a data epoch: rows would be repeated or missed."""
        sizes = (self.batch_size, batch_size)
        if self.data_batch and batch_size != self.batch_size and None not in sizes:
            raise SettingError(
                f"The checkpoint was written after {self.data_batch} batches of {self.batch_size}"
                " rows, in the middle of an epoch: go on with"
                f" batch_size={self.batch_size}, not {batch_size}, or begin the next epoch,"
                f" initial_epoch={self.epoch + 1}."
            )

    def warn_of_other_order(self) -> None:
        """Warn if an older version shuffled the data epoch that goes on in its middle."""
        if self.data_batch and self.order != ORDER_VERSION:
            warn_user(
                f"The checkpoint was written after {self.data_batch} batches of an epoch by a"
                " version of onnxfit that shuffles in another order. If the data is shuffled, some"
                " rows come twice in this epoch, and as many do not come. To train on every row"
                f" once, begin the next epoch: initial_epoch={self.epoch + 1}."
            )


@dataclass(frozen=True)
class PendingFit:
    """State of an unfinished fit, from which the next `fit` resumes."""

    position: Position = field(default_factory=Position)
    tracker: Mapping[str, Any] = field(default_factory=dict)  # running means of the epoch
    undelivered: Mapping[str, Any] = field(default_factory=dict)  # event that loggers have missed
    callbacks: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # state_key -> state

    def from_epoch(self, epoch: int) -> PendingFit:
        """Return the same for a fit that begins at `epoch`, unless this one is further."""
        if epoch <= self.position.epoch:
            return self
        return PendingFit(Position(epoch), callbacks=self.callbacks)
