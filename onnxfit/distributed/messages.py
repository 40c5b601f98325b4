"""Values as bytes: JSON followed by arrays. Reading them runs no code."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

ARRAY = "__array__"  # key of a dict that replaces an array by its index in the message


def encode(value: Any) -> bytes:
    """Return numbers, strings, None, arrays, and lists and dicts of them as bytes."""
    arrays: list[np.ndarray[Any, Any]] = []
    text = json.dumps(_without_arrays(value, arrays)).encode()
    stream = io.BytesIO()
    stream.write(len(text).to_bytes(8, "little"))
    stream.write(text)
    for array in arrays:
        np.lib.format.write_array(stream, array, allow_pickle=False)
    return stream.getvalue()


def decode(message: bytes) -> Any:
    """Return the value of a message from `encode`."""
    stream = io.BytesIO(message)
    length = int.from_bytes(stream.read(8), "little")
    value = json.loads(stream.read(length))
    arrays: list[np.ndarray[Any, Any]] = []
    while stream.tell() < len(message):
        arrays.append(np.lib.format.read_array(stream, allow_pickle=False))
    return _with_arrays(value, arrays)


def _without_arrays(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {ARRAY: len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _without_arrays(item, arrays) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(item, arrays) for item in value]
    return value


def _with_arrays(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, dict):
        if set(value) == {ARRAY}:
            return arrays[value[ARRAY]]
        return {key: _with_arrays(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_arrays(item, arrays) for item in value]
    return value
