"""Floats that JSON lacks: infinities and NaN."""

from __future__ import annotations

from typing import Any

from onnxfit.files import json_float

FLOAT = "onnxfit:float"


def with_finite_floats(value: Any) -> Any:
    """Return JSON in which an object with a text stands for each infinite number or NaN."""
    if isinstance(value, dict):
        return {key: with_finite_floats(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_finite_floats(entry) for entry in value]
    if isinstance(value, float):
        number = json_float(value)
        return {FLOAT: number} if isinstance(number, str) else number
    return value


def with_all_floats(value: Any) -> Any:
    """Return the JSON that `with_finite_floats` was given."""
    if isinstance(value, list):
        return [with_all_floats(entry) for entry in value]
    if isinstance(value, dict):
        if set(value) == {FLOAT}:
            return float(value[FLOAT])
        return {key: with_all_floats(entry) for key, entry in value.items()}
    return value
