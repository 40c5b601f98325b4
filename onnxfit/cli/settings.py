"""Losses, metrics, penalties, optimizers and schedules as they are typed:

NAME, or NAME:SETTING=VALUE,SETTING=VALUE.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from onnxfit import losses, metrics, optimizers, penalties, schedules
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.registry import registry


def loss_of(texts: Sequence[str]) -> Any:
    """What `Trainer(loss=)` takes, from `NAME` or, for several outputs, `OUTPUT=NAME` each."""
    found: dict[str | None, Any] = {}
    for text in texts:
        output, name = _keyed(text)
        if output in found:
            raise SettingError(
                f"--loss is given twice for {output or 'the output'}; several outputs are --loss"
                " OUTPUT=NAME each."
            )
        found[output] = _made("loss", name, losses.Loss) if ":" in name else name
    if len(found) > 1 and None in found:
        raise SettingError(
            "--loss is one NAME for the only output, or OUTPUT=NAME for each of several; got"
            f" {' and '.join(texts)}."
        )
    return found.get(None, found or None)


def metrics_of(texts: Sequence[str], loss: Any) -> Any:
    """What `Trainer(metrics=)` takes; with settings or without, a metric takes outputs as logits
    where their loss does.
    """
    found: dict[str | None, list[Any]] = {}
    for text in texts:
        output, name = _keyed(text)
        metric: Any = name
        if ":" in name:
            metric = _made("metric", name, metrics.Metric)
            its_loss = loss.get(output) if isinstance(loss, Mapping) else loss
            logits = its_loss is not None and getattr(
                losses.get_loss(its_loss), "from_logits", False
            )
            if logits and hasattr(metric, "from_logits") and "from_logits=" not in name:
                metric = dataclasses.replace(metric, from_logits=True)
        found.setdefault(output, []).append(metric)
    if len(found) > 1 and None in found:
        raise SettingError(
            "--metrics is NAME for the only output, or OUTPUT=NAME for each of several; got"
            f" {' and '.join(texts)}."
        )
    return found.get(None, found)


def penalty_of(texts: Sequence[str]) -> Any:
    """What `Trainer(penalty=)` takes:

    `NUMBER` (L2) or `l1:NUMBER` for every weight, `PATTERN=...` for those that match.
    """
    found: dict[str, Any] = {}
    for text in texts:
        pattern, value = _keyed(text, r".+")
        factor = re.fullmatch(r"(?:(l1|l2):)?([^:]+)", value)
        try:
            number = float(factor[2]) if factor else None
        except ValueError:
            number = None
        if number is None or factor is None:
            raise SettingError(
                "--penalty is [PATTERN=]NUMBER, [PATTERN=]l1:NUMBER or [PATTERN=]l2:NUMBER, got"
                f" {text!r}."
            )
        terms = found.setdefault(pattern or "*", {})
        kind = factor[1] or "l2"
        if kind in terms:
            raise SettingError(
                f"--penalty is given twice for {pattern or 'every weight'}: {text!r}."
            )
        terms[kind] = number
    # the first pattern that matches a weight counts, so that "every weight" comes last
    ordered = {key: found[key] for key in sorted(found, key=lambda key: key == "*")}
    return {key: penalties.get_penalty(terms) for key, terms in ordered.items()} or None


def optimizer_of(text: str, learning_rate: str | None) -> optimizers.Optimizer:
    """The optimizer called so, with this learning rate: a number, or a schedule with its settings."""
    made: optimizers.Optimizer = _made("optimizer", text, optimizers.Optimizer)
    if learning_rate is None:
        return made
    try:
        rate: Any = float(learning_rate)
    except ValueError:
        rate = _made("schedule, and no number,", learning_rate, schedules.Schedule)
    return dataclasses.replace(made, learning_rate=rate)


def _keyed(text: str, key: str = r"[^=:]+") -> tuple[str | None, str]:
    match = re.fullmatch(rf"(?:({key})=)?(.+)", text, re.DOTALL)
    if match is None:
        raise SettingError("A name is missing: the text is empty.")
    return match[1], match[2]


def _made(kind: str, text: str, base: Any) -> Any:
    """An instance of the class that `text` names, with its settings.

    UnknownNameError for names and settings that do not exist.
    """
    name, _, rest = text.partition(":")
    known = registry(base.__module__, base)
    found = known.get(name) or known.get(name.lower())
    if found is None:
        raise UnknownNameError(kind, name, known)
    allowed = [field.name for field in dataclasses.fields(found) if field.init]
    settings = {}
    for entry in re.split(r",(?![^\[]*\])", rest) if rest else []:
        setting, equals, value = entry.partition("=")
        if setting not in allowed:
            raise UnknownNameError(f"setting of {name}", setting, allowed)
        if not equals:
            raise SettingError(f"{text!r} gives {setting} no value: {name}:{setting}=VALUE.")
        settings[setting] = _value(value)
    try:
        return found(**settings)
    except (
        TypeError
    ) as error:  # a setting that has no default is missing, or has a value of another type
        raise SettingError(
            f"{text!r} does not make a {kind}: {error}. Settings: {', '.join(allowed)}."
        ) from None


def _value(text: str) -> Any:
    """Numbers, true, false, null and [lists] as in JSON; anything else is text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value
