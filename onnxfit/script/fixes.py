"""Read the argument that lets a file train out of the error that names it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxfit.trainable.quantized.settings import Quantization

# Arguments of Trainer that an error may name as its fix. A text of a file that appears in an error
# can choose among them, and among nothing else.
FIXING = (
    "batch_axes",
    "batch_norm",
    "dynamic_batch",
    "fixed_inputs",
    "quantization",
    "stop_gradients",
    "weights",
)
MAX_CHARACTERS = 500  # of a value
ARGUMENT = re.compile(rf"\b({'|'.join(FIXING)})=")


@dataclass(frozen=True)
class Fix:
    """An error, and the arguments of Trainer that avoid it.

    - `message`: the error.
    - `settings`: argument -> value.
    - `converts`: whether the file must be converted by `to_float32` instead.
    """

    message: str
    settings: dict[str, Any] = field(default_factory=dict)
    converts: bool = False


def fix_of(message: str) -> Fix | None:
    """Return the fix that an error names; None if it names no argument with its value.

    >>> fix_of("Cannot do it. Use Trainer(..., batch_norm='frozen').").settings
    {'batch_norm': 'frozen'}
    """
    if "onnxfit.to_float32(" in message:
        return Fix(message, converts=True)
    for match in ARGUMENT.finditer(message):
        value = _value(message[match.end() : match.end() + MAX_CHARACTERS])
        if value is not None:
            return Fix(message, {match[1]: value})
    return None


def merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of two fixes: mappings, and patterns of weights, are joined.

    >>> merged({"weights": ["!a"]}, {"weights": "!b"})
    {'weights': ['!a', '!b']}
    """
    found = dict(settings)
    for name, value in more.items():
        old = found.get(name)
        if isinstance(old, Quantization) and isinstance(value, Quantization):
            found[name] = Quantization(weights=[*_patterns(old.weights), *_patterns(value.weights)])
        elif isinstance(old, Mapping) and isinstance(value, Mapping):
            found[name] = {**old, **value}
        elif isinstance(old, (str, list)):
            found[name] = [*_patterns(old), *_patterns(value)]
        else:
            found[name] = value
    return found


def _patterns(patterns: Any) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def _value(text: str) -> Any:
    """Return the value of the shortest Python literal at the beginning of a text, or None.

    It may be the argument of `Quantization`.
    """
    quantization = re.match(r"onnxfit\.Quantization\(weights=", text)
    if quantization is not None:
        weights = _value(text[quantization.end() :])
        return None if weights is None else Quantization(weights=weights)
    for end in range(1, len(text) + 1):
        if end < len(text) and text[end] not in ",). \n":
            continue
        try:
            return ast.literal_eval(text[:end])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None
