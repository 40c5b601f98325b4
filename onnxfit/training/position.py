"""Where a fit stands, and where the next one resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Position:
    """Where an interrupted `fit` stands: the epoch under way (or next), and how many of its batches
    are done.

    `number` is the number of the pass over the data under way (None where none is), of which
    `in_pass` batches of `batch_size` rows (None where only the data can tell) are taken; `rate` is
    the learning rate of the last step. With `trained`, what is left of the epoch is its validation.
    """

    epoch: int = 0
    batch: int = 0
    number: int | None = None
    in_pass: int = 0
    rate: float | None = None
    trained: bool = False
    batch_size: int | None = None


@dataclass(frozen=True)
class PendingFit:
    """What a checkpoint holds of a fit that has not come to its end, for the next one to go on
    with.
    """

    place: Position = field(default_factory=Position)
    tracker: Mapping[str, Any] = field(default_factory=dict)  # the sums of the epoch under way
    # the hook of which loggers were still to be told
    ended: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # their states

    def from_epoch(self, epoch: int) -> PendingFit:
        """The same for a fit that begins at this epoch or, where this one was further, there."""
        return (
            self
            if epoch <= self.place.epoch
            else PendingFit(Position(epoch), callbacks=self.callbacks)
        )
