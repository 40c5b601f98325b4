"""The arguments of `Trainer` as JSON: numbers, strings, and objects of the registries by name."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.errors import CheckpointError, SettingError
from onnxfit.registry import from_config, is_exported, to_config
from onnxfit.step.distillation import Distillation
from onnxfit.trainable.quantized.settings import Quantization

REGISTRIES = tuple(
    f"onnxfit.{name}"
    for name in (
        "losses", "penalties", "metrics", "optimizers", "schedules", "trainable.quantized.settings",
        "trainable.adapters.lora", "step.distillation",
    )
)  # fmt: skip

# the keys of an array: its bytes in base64, its element type and its shape
ARRAY_KEYS = {"onnxfit:bytes", "type", "shape"}


def encode_setting(value: Any) -> Any:
    """Return a constructor's argument as JSON; a custom object is stored by its name only."""
    if isinstance(value, Mapping):
        return {str(k): encode_setting(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_setting(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _encoded_array(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_dataclass(value) and any(is_exported(type(value), name) for name in REGISTRIES):
        try:
            config = to_config(value)
            json.dumps(config)
            return {"onnxfit:class": config}
        except TypeError:
            pass  # one of its settings is a function
    return {"onnxfit:custom": getattr(value, "__name__", type(value).__name__)}


def custom_settings(encoded: Mapping[str, Any]) -> list[str]:
    """Return the names of encoded settings in which a custom object is stored by its name."""

    def is_custom(value: Any) -> bool:
        if isinstance(value, Mapping):
            return "onnxfit:custom" in value or any(map(is_custom, value.values()))
        return isinstance(value, list) and any(map(is_custom, value))

    return [name for name, value in encoded.items() if is_custom(value)]


def decode_setting(setting: str, value: Any, path: str) -> Any:
    """Return the argument that `encode_setting` wrote as `value`.

    - `setting`: the name of the argument.
    - `value`: the JSON value.
    - `path`: the file that has the value, for messages.

    CheckpointError: the value is a custom object, an object that this version does not know, or a
    damaged array.
    """
    if setting == "teacher" and isinstance(value, str):
        raise CheckpointError(
            f"{path!r} was not written by onnxfit: its settings name a file to read."
        )
    if isinstance(value, list):
        return [decode_setting(setting, v, path) for v in value]
    if isinstance(value, dict):
        if set(value) == {"onnxfit:custom"}:
            raise CheckpointError(
                f"{path!r} was trained with a custom {setting} {value['onnxfit:custom']!r}, but a"
                f" checkpoint contains no code. Pass it again: Trainer.load(path, {setting}=...)."
            )
        if set(value) == {"onnxfit:class"}:
            try:
                found = from_config(value["onnxfit:class"], *_registries_of(setting))
            except (SettingError, TypeError) as error:
                raise CheckpointError(
                    f"{path!r} has a {setting} that this version of onnxfit does not know: {error}"
                ) from None
            if isinstance(found, (Distillation, Quantization)) and found != found.without_files():
                raise CheckpointError(
                    f"{path!r} was not written by onnxfit: its settings name a file to read."
                )
            return found
        if set(value) == ARRAY_KEYS:
            return _decoded_array(setting, value, path)
        return {k: decode_setting(setting, v, path) for k, v in value.items()}
    return value


def _registries_of(setting: str) -> tuple[str, ...]:
    """Return the registries of an argument: a loss and a metric may have the same name."""
    return ("onnxfit.metrics",) if setting == "metrics" else REGISTRIES


def _encoded_array(array: npt.NDArray[Any]) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"onnxfit:bytes": data, "type": array.dtype.name, "shape": [*array.shape]}


def _decoded_array(setting: str, value: Mapping[str, Any], path: str) -> npt.NDArray[Any]:
    """Return the array that `_encoded_array` described. CheckpointError: it is damaged."""
    try:
        data = base64.b64decode(value["onnxfit:bytes"], validate=True)
        dtype = np.dtype(value["type"])
        shape = [int(size) for size in value["shape"]]
        fits = dtype.kind in "biuf" or dtype.name == "bfloat16"
        if fits and min(shape, default=0) >= 0 and len(data) == math.prod(shape) * dtype.itemsize:
            return np.frombuffer(data, dtype).reshape(shape).copy()
    except (TypeError, ValueError):
        pass
    raise CheckpointError(f"{path!r} is damaged: its {setting} has an array that is not complete.")
