"""Keep weights unchanged for some epochs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Union

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.checks import check_arguments
from onnxfit.errors import SettingError, listed_names, warn_user
from onnxfit.graph.weights import matching
from onnxfit.optimizers import NAdam

__all__ = ["Freeze", "Unfreeze"]

Patterns = Union[str, Sequence[str]]


class _Freezing(Callback):
    """Base class of callbacks that set `trainer.frozen`, together with others of their kind."""

    # `trainer.frozen` before this fit; None outside a fit.
    _frozen_before: tuple[str, ...] | None = None

    @property
    @abstractmethod
    def patterns(self) -> list[str]:
        """All patterns of weights that this callback ever freezes."""

    @abstractmethod
    def frozen_in(self, epoch: int) -> list[str]:
        """Return the patterns of weights to freeze in `epoch`, from 0."""

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}({', '.join(self.patterns)})"

    def on_train_begin(self, logs: Logs) -> None:
        self._frozen_before = self.trainer.frozen
        # Raise the error for a pattern that matches no weight now, not epochs later.
        self.trainer.frozen = self.patterns
        self.trainer.frozen = self._frozen_before

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        freezing = [callback for callback in self.callbacks if isinstance(callback, _Freezing)]
        patterns = [pattern for callback in freezing for pattern in callback.frozen_in(epoch)]
        before = self.trainer.frozen
        self.trainer.frozen = [*(self._frozen_before or ()), *patterns]
        thawed = [name for name in before if name not in self.trainer.frozen]
        if thawed and self.trainer.is_main:
            self._warn_of_first_steps(thawed)

    def _warn_of_first_steps(self, thawed: list[str]) -> None:
        """Warn if the first steps of weights that were frozen are many times too large."""
        members = self.trainer.optimizer.members
        if self.trainer.global_step >= 16 and any(isinstance(one, NAdam) for one in members):
            warn_user(
                "NAdam counts all updates, also those in which a weight was frozen. The first steps"
                f" of {listed_names(thawed)} are therefore 4 to 44 times as large as for a new"
                " optimizer. Use AdamW, where they are at most 3.2 times as large, or train the"
                " exported model with a new Trainer."
            )

    def on_close(self) -> None:
        if self._frozen_before is not None:
            self.trainer.frozen = self._frozen_before
            self._frozen_before = None


class Freeze(_Freezing):
    """Keep the weights that match a pattern, and their slots, unchanged for some epochs.

    - `pattern`: a name or fnmatch pattern of weights, such as "encoder.*", or several. Running
      statistics of BatchNormalization that match are frozen too; batches are normalized as before,
      because `Trainer(batch_norm=)` decides that.
    - `until_epoch`: the first epoch, from 0, in which the weights are trained again. None freezes
      them until the end of this `fit`.
    - `from_epoch`: the first epoch, from 0, in which the weights are frozen.

    Afterwards `trainer.frozen` has its previous value. Freezing saves no time: a step still
    computes all gradients, `clip_norm` counts them, and the old values are copied back. If weights
    are never trained, leave them out of `Trainer(weights=)` instead. The bias correction of Adam
    and its relatives counts all updates, also those in which a weight was frozen: a first step
    after 16 updates has 0.5 of its size, after thousands 3.2 times its size. With `NAdam` it is 4
    to 44 times, which a warning says. SettingError: the epochs are
    out of order. UnknownNameError, before training: a pattern matches no trained weight.

    >>> warm_up = Freeze("encoder.*", until_epoch=3)
    >>> Freeze("encoder.*", until_epoch=0)
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: Freeze needs 0 <= from_epoch < until_epoch, got 0 and 0.
    """

    @check_arguments
    def __init__(
        self, pattern: Patterns, *, until_epoch: int | None = None, from_epoch: int = 0
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
        is_over = self.until_epoch is not None and epoch >= self.until_epoch
        return [] if is_over or epoch < self.from_epoch else self.patterns


class Unfreeze(_Freezing):
    """Train layer after layer: keep the weights that match a pattern unchanged until an epoch.

    - `schedule`: epoch (from 0) -> a name or fnmatch pattern of weights, or several, which are
      trained from that epoch on. A weight that matches two entries is trained from the earlier
      epoch; one that matches none is trained from the beginning.

    The cost of frozen weights and the errors are the same as for `Freeze`.

    >>> gradual = Unfreeze({2: "layer3.*", 4: ["layer1.*", "layer2.*"]})
    """

    @check_arguments
    def __init__(self, schedule: Mapping[int, Patterns]) -> None:
        if any(epoch < 0 for epoch in schedule):
            raise SettingError(f"Unfreeze needs epochs >= 0, got {min(schedule)}.")
        self.schedule = {epoch: schedule[epoch] for epoch in sorted(schedule)}

    @property
    def patterns(self) -> list[str]:
        return [pattern for patterns in self.schedule.values() for pattern in _list(patterns)]

    def frozen_in(self, epoch: int) -> list[str]:
        names = list(self.trainer.get_weights(copy=False))
        trained: set[str] = set()
        frozen: list[str] = []
        for begin, patterns in self.schedule.items():
            if begin <= epoch:
                trained.update(matching(patterns, names))
            else:
                frozen.extend(matching(patterns, names))
        return [name for name in frozen if name not in trained]


def _list(patterns: Patterns) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)
