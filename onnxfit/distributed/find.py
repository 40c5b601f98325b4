"""The ranks that `Trainer(distribute=)` means."""

from __future__ import annotations

from typing import Any

from onnxfit.distributed.world import ALONE, World


def world_of(distribute: Any) -> World:
    """Return the ranks that `distribute` means."""
    if distribute is None or distribute == "auto":
        return ALONE
    return World(distribute)
