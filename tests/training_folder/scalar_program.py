"""The program of a folder's scalars, computed in NumPy as docs/training-folder.md describes it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def divide(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    quotients = [abs(int(x)) // abs(int(y)) for x, y in np.broadcast(a, b)]
    signs = [(-1) ** ((x < 0) != (y < 0)) for x, y in np.broadcast(a, b)]
    return np.array([q * s for q, s in zip(quotients, signs)])


OPERATORS: dict[str, Callable[..., Array]] = {
    "Abs": np.abs, "Add": operator.add, "And": np.logical_and, "Cast": lambda x: x,
    "Ceil": np.ceil, "Div": divide, "Equal": np.equal, "Exp": np.exp, "Floor": np.floor,
    "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Identity": lambda x: x,
    "Less": np.less, "LessOrEqual": np.less_equal, "Log": np.log, "Max": np.maximum,
    "Min": np.minimum, "Mul": operator.mul, "Neg": np.negative, "Not": np.logical_not,
    "Or": np.logical_or, "Pow": operator.pow, "Sqrt": np.sqrt, "Sub": operator.sub,
    "Where": np.where,
}  # fmt: skip


def evaluate(program: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, Array]:
    """Return every value of a program, as vectors."""
    assert program["version"] == 1
    values = {name: np.atleast_1d(value) for name, value in feeds.items()}
    for constant in program["constants"]:
        numbers = map(number, constant["data"])
        values[constant["name"]] = np.array(list(numbers), constant["type"])
    with np.errstate(over="ignore"):
        for node in program["nodes"]:
            result = OPERATORS[node["op"]](*(values[name] for name in node["inputs"]))
            values[node["output"]] = result.astype(node["type"])
    return values


def number(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value["onnxfit:float"])
    return int(value) if isinstance(value, str) else value
