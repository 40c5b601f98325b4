"""Checks of settings that several callbacks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxfit.errors import SettingError

if TYPE_CHECKING:
    from onnxfit.trainer import Trainer

__all__ = ["require_at_least", "require_constant_rate", "require_save_freq"]


def require_at_least(owner: str, minimum: float, **settings: float | None) -> None:
    """Raise SettingError for the first setting below `minimum`, or NaN.

    - `owner`: the callback's class, named in the message.
    - `settings`: name -> value; None passes.
    """
    for name, value in settings.items():
        if value is not None and not value >= minimum:
            raise SettingError(f"{owner} needs {name} >= {minimum}, got {value}.")


def require_constant_rate(trainer: Trainer, owner: str, fix: str) -> None:
    """Raise TypeError where a Schedule drives the learning rate, so that a callback cannot set it.

    - `trainer`: the Trainer whose optimizer is checked.
    - `owner`: the callback's class, named in the message.
    - `fix`: the end of the message: how to change the settings.
    """
    rate = trainer.optimizer.learning_rate
    if callable(rate):
        raise TypeError(
            f"{owner} cannot change a learning rate that {rate!r} sets at every update: {fix}."
        )


def require_save_freq(owner: str, save_freq: object) -> None:
    """Raise SettingError unless `save_freq` is "epoch" or a number of batches >= 1.

    - `owner`: the callback's class, named in the message.
    """
    is_count = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq >= 1
    if save_freq != "epoch" and not is_count:
        raise SettingError(
            f"{owner} needs save_freq 'epoch' or a number of batches >= 1, got {save_freq!r}."
        )
