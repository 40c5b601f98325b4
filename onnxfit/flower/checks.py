"""Checks of the settings and the weights that a server sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.checks import shortened
from onnxfit.errors import DataError, SettingError, listed_names
from onnxfit.files import POSITIVE_COUNT, RATE, ValueType

Array = npt.NDArray[Any]

# Settings of a server -> our names. Other settings are for the application's own code.
CONFIG_NAMES = {
    "epochs": "epochs",
    "local_epochs": "epochs",
    "batch_size": "batch_size",
    "learning_rate": "learning_rate",
    "lr": "learning_rate",
    "proximal_mu": "proximal_mu",
    "server_round": "round",
}
CONFIG_TYPES: dict[str, ValueType] = {
    "epochs": POSITIVE_COUNT,
    "batch_size": POSITIVE_COUNT,
    "learning_rate": RATE,
    "proximal_mu": RATE,
    "round": POSITIVE_COUNT,
}


def checked_config(config: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the settings of a round in `config`, by onnxfit's names.

    - `config`: the settings of the server.
    - `owner`: the source of the settings, for messages.

    SettingError: a value is impossible, or a setting is given under two names.
    """
    settings: dict[str, Any] = {}
    for key, value in config.items():
        name = CONFIG_NAMES.get(key.replace("-", "_"))
        if name is None:
            continue
        expected = CONFIG_TYPES[name]
        if not expected.accepts(value):
            raise SettingError(
                f"The {owner} set {key}={shortened(value)}. Expected {expected.description}."
            )
        if name in settings:
            raise SettingError(
                f"The {owner} set {name} twice, the second time as {key!r}. Remove one of them."
            )
        settings[name] = value
    return settings


def checked_weights(weights: Mapping[str, Any], own: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of a server in the element types of a trainer's `own` weights.

    DataError: the names, shapes or types differ from those of the trainer.
    """
    check_names(weights, own)
    checked = {}
    for name, old in own.items():
        array = np.asarray(weights[name])
        check_form(name, array.dtype, array.shape, old)
        with np.errstate(over="ignore"):
            array = array.astype(old.dtype)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DataError(
                f"The server sent {name!r} with NaN, infinity, or numbers outside the range of"
                f" {old.dtype}. A client may have diverged. Try a smaller learning rate."
            )
        checked[name] = array
    return checked


def check_names(given: Mapping[str, Any], own: Mapping[str, Array]) -> None:
    """Raise DataError unless `given` has exactly the names of a trainer's `own` weights."""
    missing = [name for name in own if name not in given]
    unknown = [name for name in given if name not in own]
    if missing or unknown:
        raise DataError(
            f"The server sent {len(given)} arrays, but this trainer expects its {len(own)} arrays."
            f" Missing: {listed_names(missing) or 'none'}. Unknown:"
            f" {listed_names(unknown) or 'none'}. Build the server's Trainer from the same model,"
            " with the same weights= and batch_norm=, and start with"
            " onnxfit.flower.get_arrays(trainer)."
        )


def check_form(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], old: Array) -> None:
    """Raise DataError unless the array `name` has the type and shape of the `old` array."""
    widened = old.dtype.kind == "f" and dtype == np.float64  # a server may average in float64
    if shape != old.shape or not (dtype == old.dtype or widened):
        raise DataError(
            f"The server sent {name!r} as {dtype}{list(shape)}. Expected"
            f" {old.dtype}{list(old.shape)}."
        )
