"""Losses, metrics, penalties, optimizers and schedules, parsed from the text of an option.

The text is NAME, or NAME:SETTING=VALUE,SETTING=VALUE.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from onnxfit import losses, metrics, optimizers, penalties, schedules
from onnxfit.data.npy import READ_ERRORS
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.registry import registry
from onnxfit.step.distillation import Distillation
from onnxfit.trainable.adapters.lora import LoRA
from onnxfit.trainable.quantized.settings import Quantization


def parse_loss(texts: Sequence[str]) -> Any:
    """Return the argument `loss` of Trainer, from NAME, or OUTPUT=NAME for several outputs."""
    by_output: dict[str | None, Any] = {}
    for text in texts:
        output, name = _split_key(text)
        if output in by_output:
            raise SettingError(
                f"--loss was given twice for {output or 'the output'}. For several outputs, pass"
                " --loss OUTPUT=NAME once for each."
            )
        by_output[output] = _instance("loss", name, losses, losses.Loss) if ":" in name else name
    if len(by_output) > 1 and None in by_output:
        raise SettingError(
            "--loss must be one NAME for the only output, or OUTPUT=NAME for each of several"
            f" outputs, got {' and '.join(texts)}."
        )
    return by_output.get(None, by_output or None)


def parse_metrics(texts: Sequence[str]) -> Any:
    """Return the argument `metrics` of Trainer, from NAME, or OUTPUT=NAME for several outputs."""
    by_output: dict[str | None, list[Any]] = {}
    for text in texts:
        output, name = _split_key(text)
        metric = _instance("metric", name, metrics, metrics.Metric) if ":" in name else name
        by_output.setdefault(output, []).append(metric)
    if len(by_output) > 1 and None in by_output:
        raise SettingError(
            "--metrics must be NAME for the only output, or OUTPUT=NAME for each of several"
            f" outputs, got {' and '.join(texts)}."
        )
    return by_output.get(None, by_output)


def parse_penalty(texts: Sequence[str]) -> Any:
    """Return the argument `penalty` of Trainer.

    A text is NUMBER (L2) or l1:NUMBER for every weight, or PATTERN=... for weights that match.
    """
    by_pattern: dict[str, Any] = {}
    for text in texts:
        pattern, value = _split_key(text, r".+")
        factor = re.fullmatch(r"(?:(l1|l2):)?([^:]+)", value)
        try:
            number = float(factor[2]) if factor else None
        except ValueError:
            number = None
        if number is None or factor is None:
            raise SettingError(
                "--penalty must be [PATTERN=]NUMBER, [PATTERN=]l1:NUMBER or [PATTERN=]l2:NUMBER,"
                f" got {text!r}."
            )
        terms = by_pattern.setdefault(pattern or "*", {})
        kind = factor[1] or "l2"
        if kind in terms:
            raise SettingError(
                f"--penalty was given twice for {pattern or 'every weight'}: {text!r}."
            )
        terms[kind] = number
    # The first pattern that matches a weight applies, so "*" comes last.
    ordered = {key: by_pattern[key] for key in sorted(by_pattern, key=lambda key: key == "*")}
    return {key: penalties.get_penalty(terms) for key, terms in ordered.items()} or None


def parse_freeze_rows(texts: Sequence[str]) -> dict[str, list[int]] | None:
    """Return the argument `freeze_rows` of Trainer, from WEIGHT=ROW,ROW of each text."""
    rows: dict[str, list[int]] = {}
    for text in texts:
        pattern, numbers = _split_key(text, r".+")
        if pattern is None or not re.fullmatch(r"-?[0-9]{1,18}(,-?[0-9]{1,18})*", numbers):
            raise SettingError(
                f"--freeze-rows must be WEIGHT=ROW,ROW, such as emb.weight=0,1, got {text!r}."
            )
        rows.setdefault(pattern, []).extend(map(int, numbers.split(",")))
    return rows or None


def parse_optimizer(text: str, learning_rate: str | None) -> optimizers.Optimizer:
    """Return the optimizer. Its learning rate is a number, or a schedule with its settings."""
    optimizer: optimizers.Optimizer = _instance("optimizer", text, optimizers, optimizers.Optimizer)
    if learning_rate is None:
        return optimizer
    try:
        rate: Any = float(learning_rate)
    except ValueError:
        rate = _instance("schedule or number", learning_rate, schedules, schedules.Schedule)
    return optimizer.with_learning_rate(rate)


QUANTIZATION = ("scales", "observe", "weights")
DISTILLATION = ("temperature", "weight", "feature_weight")


def parse_quantization(text: str | None, float_model: str | None = None) -> Quantization | None:
    """Return the argument `quantization` of Trainer; None if nothing is given.

    - `text`: SETTING=VALUE,SETTING=VALUE.
    - `float_model`: a path.
    """
    if text is None and float_model is None:
        return None
    chosen = _settings(text or "", "--quantization", QUANTIZATION)
    return Quantization(**chosen, float_model=float_model)


def parse_distillation(text: str | None, teacher: str | None) -> Distillation | str | None:
    """Return the argument `teacher` of Trainer: the path without settings; None without a teacher.

    - `text`: SETTING=VALUE,SETTING=VALUE.
    """
    if text is None:
        return teacher
    if teacher is None:
        raise SettingError("--distillation has settings of a teacher. Pass --teacher, too.")
    return Distillation(teacher, **_settings(text, "--distillation", DISTILLATION))


def parse_lora(texts: Sequence[str]) -> list[LoRA] | None:
    """Return the argument `adapters` of Trainer, from SETTING=VALUE,SETTING=VALUE of each."""
    known = [field.name for field in dataclasses.fields(LoRA) if field.name != "matrices"]
    adapters = []
    for text in texts:
        settings = _settings(text, "--lora", known)
        if "target" in settings and not isinstance(settings["target"], tuple):
            settings["target"] = str(settings["target"])  # a name may look like a number
        adapters.append(LoRA(**settings))
    return adapters or None


def parse_fixed_inputs(texts: Sequence[str]) -> dict[str, Any] | None:
    """Return the argument `fixed_inputs` of Trainer, from NAME=VALUE of each input.

    A value is a number, true, false, a list in JSON, or the path of a .npy file. SettingError: it
    is something else, or an input has two values.
    """
    fixed: dict[str, Any] = {}
    for text in texts:
        name, _, given = text.rpartition("=")
        value = _array_of(given) if given.endswith(".npy") else _number_or_list(given)
        if not name or value is None:
            raise SettingError(
                "--fixed-input must be NAME=VALUE with a number, a [list] or a .npy file, such as"
                f" sr=16000, got {text!r}."
            )
        if name in fixed:
            raise SettingError(f"--fixed-input was given twice for {name!r}: {text!r}.")
        fixed[name] = value
    return fixed or None


def parse_batch_axes(texts: Sequence[str]) -> dict[str, int | None] | None:
    """Return the argument `batch_axes` of Trainer, from NAME=AXIS of each value.

    SettingError: an axis is neither a whole number nor none, or a value has two axes.
    """
    axes: dict[str, int | None] = {}
    for text in texts:
        name, _, given = text.rpartition("=")
        if not name or not (given.lower() == "none" or given.lstrip("-").isdecimal()):
            raise SettingError(
                "--batch-axis must be NAME=AXIS with a whole number, or none for a value without"
                f" a batch, such as y=1, got {text!r}."
            )
        if name in axes:
            raise SettingError(f"--batch-axis was given twice for {name!r}: {text!r}.")
        axes[name] = None if given.lower() == "none" else int(given)
    return axes or None


def _array_of(path: str) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except READ_ERRORS as error:
        raise SettingError(f"--fixed-input cannot read {path!r}: {error}") from None


def _number_or_list(text: str) -> Any:
    """Return the value of a JSON text, or None if it is neither a number nor a list."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (bool, int, float, list)) else None


def _split_key(text: str, key: str = r"[^=:]+") -> tuple[str | None, str]:
    """Return the KEY of [KEY=]VALUE, or None, and the VALUE."""
    match = re.fullmatch(rf"(?:({key})=)?(.+)", text, re.DOTALL)
    if match is None:
        raise SettingError("The value of the option is empty. Expected a name.")
    return match[1], match[2]


def _instance(kind: str, text: str, module: ModuleType, base: Any) -> Any:
    """Return an instance of the class that `text` names, with its settings.

    UnknownNameError: a name or setting does not exist.
    """
    name, _, entries = text.partition(":")
    known = registry(module.__name__, base)
    cls = known.get(name) or known.get(name.lower())
    if cls is None:
        raise UnknownNameError(kind, name, known)
    allowed = [field.name for field in dataclasses.fields(cls) if field.init]
    settings = _settings(entries, name, allowed, f"{name}:")
    try:
        return cls(**settings)
    except TypeError as error:
        # a setting without a default is missing, or a value is of another type
        raise SettingError(
            f"{text!r} is not a valid {kind}: {error}. Its settings are {', '.join(allowed)}."
        ) from None


def _settings(text: str, name: str, allowed: Sequence[str], before: str = "") -> dict[str, Any]:
    """Return the settings in a text SETTING=VALUE,SETTING=VALUE.

    - `text`: the text of the settings.
    - `name`: the name of the object with these settings.
    - `allowed`: the names of its settings.
    - `before`: the text before the settings in the option.
    """
    settings = {}
    for entry in re.split(r",(?![^\[]*\])", text) if text else []:
        setting, equals, value = entry.partition("=")
        if setting not in allowed:
            raise UnknownNameError(f"setting of {name}", setting, allowed)
        if not equals:
            raise SettingError(
                f"{before + text!r} has no value for the setting {setting}. Pass"
                f" {before}{setting}=VALUE."
            )
        settings[setting] = _value(value)
    return settings


def _value(text: str) -> Any:
    """Return the value of a text: a number, true, false, null or [list] of JSON, or else text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value
