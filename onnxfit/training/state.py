"""The state of a trainer: weights, slots and counters, as `get_state` returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxfit.errors import SettingError
from onnxfit.files import COUNT, RATE, optional
from onnxfit.registry import shortened

COUNTERS = ("epoch", "global_step", "global_batch", "samples_seen")
COUNTER_TYPES = {
    **dict.fromkeys((*COUNTERS, "window"), COUNT),
    "learning_rate": optional(RATE),  # None if it follows a schedule
}
TrainerState = Mapping[str, Mapping[str, Any]]


def require_same_form(state: TrainerState, own: TrainerState) -> None:
    """Raise SettingError unless a trainer whose state is `own` can go on from `state`."""
    if set(state) != set(own):
        raise SettingError(
            f"A state has {', '.join(own)}, got {shortened(sorted(state))}: pass what get_state"
            " returned."
        )
    for kind, entries in own.items():
        if set(state[kind]) != set(entries):
            raise SettingError(
                f"The state is another trainer's: its {kind} are {sorted(state[kind])}, this"
                f" one's {sorted(entries)}."
            )
    counters = state["counters"]
    if (counters["learning_rate"] is None) != (own["counters"]["learning_rate"] is None):
        raise SettingError(
            "The state's learning rate follows a schedule and this trainer's does not, or the"
            " other way round."
        )
    for name, value_type in COUNTER_TYPES.items():
        if not value_type.accepts(counters[name]):
            raise SettingError(
                f"The state has counters with {name} = {counters[name]!r}, expected"
                f" {value_type.description}."
            )
