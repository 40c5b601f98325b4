"""The state of a trainer: weights, slots and counters, as `get_state` returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxfit.errors import SettingError, listed_names
from onnxfit.files import COUNT, RATE, optional
from onnxfit.registry import shortened

# the number of updates before which the optimizer's slots began; absent if it is 0
FIRST_STEP = "first_step"
COUNTERS = ("epoch", "global_step", "global_batch", "samples_seen")
COUNTER_TYPES = {
    **dict.fromkeys((*COUNTERS, "window"), COUNT),
    "learning_rate": optional(RATE),  # None if it follows a schedule
}
TrainerState = Mapping[str, Mapping[str, Any]]


def require_same_form(state: TrainerState, own: TrainerState) -> None:
    """Raise SettingError unless a trainer whose state is `own` can continue from `state`."""
    if set(state) != set(own):
        raise SettingError(
            f"A state must have {', '.join(own)}, got {shortened(sorted(state))}. Pass the result"
            " of get_state."
        )
    for kind, entries in own.items():
        if set(state[kind]) - {FIRST_STEP} != set(entries) - {FIRST_STEP}:
            raise SettingError(
                f"The state belongs to another trainer: its {kind} are"
                f" {listed_names(sorted(state[kind]))}, but expected"
                f" {listed_names(sorted(entries))}."
            )
    counters = state["counters"]
    if (counters["learning_rate"] is None) != (own["counters"]["learning_rate"] is None):
        raise SettingError(
            "The state belongs to another trainer: in one of the two trainers the learning rate"
            " follows a schedule, in the other it does not."
        )
    first = counters.get(FIRST_STEP, 0)
    if not COUNT.accepts(first) or first > counters["global_step"]:
        raise SettingError(
            f"The state's counter {FIRST_STEP} must be a number of updates up to global_step, got"
            f" {first!r} and {counters['global_step']!r}."
        )
    for name, value_type in COUNTER_TYPES.items():
        if not value_type.accepts(counters[name]):
            raise SettingError(
                f"The state's counter {name} must be {value_type.description}, got"
                f" {counters[name]!r}."
            )
