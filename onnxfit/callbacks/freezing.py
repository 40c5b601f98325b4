"""Keep weights as they are for some epochs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Union

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError
from onnxfit.graph.weights import matching

__all__ = ["Freeze", "Unfreeze"]

Patterns = Union[str, Sequence[str]]


class _Freezing(Callback):
    """Keeps `trainer.frozen` up to the epoch, together with the others of its kind in the list."""

    _before: tuple[str, ...] | None = None  # what was frozen before this fit; None outside one

    @property
    @abstractmethod
    def patterns(self) -> list[str]:
        """Of all that it ever freezes."""

    @abstractmethod
    def frozen_in(self, epoch: int) -> list[str]:
        """Of what it freezes in an epoch."""

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}({', '.join(self.patterns)})"

    def on_train_begin(self, logs: Logs) -> None:
        self._before = self.trainer.frozen
        # one that matches nothing is refused now, not epochs later
        self.trainer.frozen = self.patterns
        self.trainer.frozen = self._before

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        fellows = [callback for callback in self.callbacks if isinstance(callback, _Freezing)]
        self.trainer.frozen = [
            *(self._before or ()),
            *(pattern for fellow in fellows for pattern in fellow.frozen_in(epoch)),
        ]

    def on_close(self) -> None:
        if self._before is not None:
            self.trainer.frozen, self._before = self._before, None


class Freeze(_Freezing):
    """Keeps the weights that match as they are, byte for byte, and their slots, while `from_epoch`
    <= epoch < `until_epoch`.

    - `pattern`: a name or fnmatch pattern of weights, such as "encoder.*", or several. Running
      statistics of BatchNormalization are frozen where they match; batches are normalised as
      before, for that is `Trainer(batch_norm=)`.
    - `until_epoch`: the first epoch in which they are trained; None: not in this `fit`.

    Afterwards `trainer.frozen` is what it was. A step computes all gradients all the same,
    `clip_norm` counts them, and the old values are copied back: it saves no time. What is to be
    frozen for good is better left out of `Trainer(weights=)`. SettingError: epochs out of order.
    UnknownNameError, before training: a pattern that matches no trained weight.

    >>> Freeze("encoder.*", until_epoch=0)
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: Freeze needs 0 <= from_epoch < until_epoch, got 0 and 0.
    """

    def __init__(
        self, pattern: Patterns, until_epoch: int | None = None, from_epoch: int = 0
    ) -> None:
        if from_epoch < 0 or (until_epoch is not None and until_epoch <= from_epoch):
            raise SettingError(
                f"Freeze needs 0 <= from_epoch < until_epoch, got {from_epoch} and {until_epoch}."
            )
        self.pattern = pattern
        self.until_epoch = until_epoch
        self.from_epoch = from_epoch

    @property
    def patterns(self) -> list[str]:
        return _list(self.pattern)

    def frozen_in(self, epoch: int) -> list[str]:
        over = self.until_epoch is not None and epoch >= self.until_epoch
        return [] if over or epoch < self.from_epoch else self.patterns


class Unfreeze(_Freezing):
    """Trains the weights that match from an epoch on, and keeps them as they are until then:

    `{2: "layer3.*", 4: "layer2.*"}`.

    `schedule` maps an epoch >= 0 to a name, an fnmatch pattern or several; what no pattern matches
    is trained from the beginning, and what two match from the first of the two epochs. Else as
    `Freeze`.
    """

    def __init__(self, schedule: Mapping[int, Patterns]) -> None:
        if any(epoch < 0 for epoch in schedule):
            raise SettingError(f"Unfreeze needs epochs from 0 on, got {min(schedule)}.")
        self.schedule = {epoch: schedule[epoch] for epoch in sorted(schedule)}

    @property
    def patterns(self) -> list[str]:
        return [pattern for patterns in self.schedule.values() for pattern in _list(patterns)]

    def frozen_in(self, epoch: int) -> list[str]:
        known = list(self.trainer.get_weights())
        trained = {
            name
            for begin, p in self.schedule.items()
            if begin <= epoch
            for name in matching(p, known)
        }
        return [
            name
            for begin, p in self.schedule.items()
            if begin > epoch
            for name in matching(p, known)
            if name not in trained
        ]


def _list(patterns: Patterns) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)
