"""Checks of settings that several callbacks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnxfit.errors import CheckpointError, SettingError, UnsupportedError
from onnxfit.registry import shortened

if TYPE_CHECKING:
    from onnxfit.callbacks.callback import Callback
    from onnxfit.trainer import Trainer

__all__ = [
    "require_adapters",
    "require_at_least",
    "require_below",
    "require_constant_rate",
    "require_save_freq",
    "require_update_freq",
    "require_weights",
    "writes_files",
]


def writes_files(callback: Callback) -> bool:
    """Return whether this process writes files: rank 0, where several train together.

    - `callback`: a callback, which has no trainer before its first `fit`.
    """
    trainer = getattr(callback, "trainer", None)
    return trainer is None or trainer.is_main


def require_adapters(settings: Mapping[str, Any]) -> None:
    """Raise SettingError for the settings of a Trainer without adapters.

    - `settings`: the arguments of its constructor.
    """
    if settings["adapters"] is None:
        raise SettingError(
            "adapters_only=True saves adapters without the frozen model, but this trainer has no"
            " adapters. Remove adapters_only, or train adapters with Trainer(...,"
            " adapters=onnxfit.LoRA(rank=8))."
        )


def require_at_least(owner: str, minimum: float, **settings: float | None) -> None:
    """Raise SettingError for the first setting below `minimum`, or NaN.

    - `owner`: the callback's class, named in the message.
    - `settings`: name -> value; None passes.
    """
    for name, value in settings.items():
        if value is not None and not value >= minimum:
            raise SettingError(f"{owner} needs {name} >= {minimum}, got {value}.")


def require_below(owner: str, bound: int, **settings: int) -> None:
    """Raise SettingError for the first setting that is not below `bound`.

    - `owner`: the callback's class, named in the message.
    - `settings`: name -> value.
    """
    for name, value in settings.items():
        if value >= bound:
            raise SettingError(f"{owner} needs {name} < {bound}, got {shortened(value)}.")


def require_constant_rate(trainer: Trainer, owner: str, fix: str) -> None:
    """Raise UnsupportedError if a Schedule sets the learning rate, so that a callback cannot.

    - `trainer`: the Trainer whose optimizer is checked.
    - `owner`: the callback's class, named in the message.
    - `fix`: a sentence that says how to change the settings.
    """
    rate = trainer.optimizer.settings.learning_rate
    if callable(rate):
        raise UnsupportedError(
            f"{owner} cannot change the learning rate, because {rate!r} sets it at every update."
            f" {fix}"
        )


def require_save_freq(owner: str, save_freq: object) -> None:
    """Raise SettingError unless `save_freq` is "epoch" or a number of batches >= 1.

    - `owner`: the callback's class, named in the message.
    - `save_freq`: the setting of that name.
    """
    is_count = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq >= 1
    if save_freq != "epoch" and not is_count:
        raise SettingError(
            f"{owner} needs save_freq to be 'epoch' or a number of batches >= 1, got {save_freq!r}."
        )


def require_update_freq(owner: str, update_freq: object) -> None:
    """Raise SettingError unless `update_freq` is "epoch", "batch" or a number of batches >= 1.

    - `owner`: the callback's class, named in the message.
    - `update_freq`: the setting of that name.
    """
    if isinstance(update_freq, int) and not isinstance(update_freq, bool):
        valid = update_freq >= 1
    else:
        valid = update_freq in ("epoch", "batch")
    if not valid:
        raise SettingError(
            f"{owner} needs update_freq to be 'epoch', 'batch' or a number >= 1, got"
            f" {update_freq!r}."
        )


def require_weights(
    callback: Callback,
    name: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    dtype: npt.DTypeLike | None = None,
) -> None:
    """Raise CheckpointError unless loaded arrays can take the place of the trainer's weights.

    - `callback`: the callback with the loaded state.
    - `name`: the arrays' name in that state.
    - `arrays`: weight -> array.
    - `dtype`: the type of all arrays; None for each weight's own type.
    """
    weights = callback.trainer.get_weights() if arrays else {}
    for key, array in arrays.items():
        weight = weights.get(key)
        if weight is None:
            problem = "but the trainer has no weight of this name"
        elif (array.shape, array.dtype) != (weight.shape, np.dtype(dtype or weight.dtype)):
            problem = (
                f"as {array.dtype}{list(array.shape)}, but expected"
                f" {np.dtype(dtype or weight.dtype)}{list(weight.shape)}"
            )
        else:
            continue
        raise CheckpointError(
            f"The saved state of {callback.state_key} has {name} of {key!r}, {problem}. The state"
            " belongs to another model. Resume from a checkpoint of this model."
        )
