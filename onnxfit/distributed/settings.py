"""Checks of the settings that all communicators share."""

from __future__ import annotations

from onnxfit.errors import SettingError

TIMEOUT = 600.0  # seconds


def require_settings(owner: object, timeout: float | None, average_every: int | None) -> None:
    """Raise SettingError unless a communicator's settings are in their ranges.

    - `owner`: the communicator, named in the message.
    - `timeout`: seconds, above 0, or None.
    - `average_every`: a whole number from 1, or None.
    """
    name = type(owner).__name__
    if timeout is not None and not timeout > 0:
        raise SettingError(
            f"{name} needs timeout > 0 seconds, or None for no limit, got {timeout}."
        )
    if average_every is not None and (average_every < 1 or average_every != int(average_every)):
        raise SettingError(
            f"{name} needs average_every to be a whole number >= 1, or None to share every"
            f" gradient, got {average_every}."
        )
