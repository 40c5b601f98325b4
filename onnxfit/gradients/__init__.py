"""Reverse-mode differentiation of a graph: one signature, several sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxfit.errors import GradientError, SettingError, UnknownNameError
from onnxfit.gradients.paths import reachable

if TYPE_CHECKING:
    from onnxfit.gradients.onnxruntime import Blocker

__all__ = ["SOURCES", "GradientSource", "gradient_source", "reachable", "refuse"]

SOURCES = ("auto", "onnxruntime")


@dataclass(frozen=True)
class GradientSource:
    """Where gradients come from. Both functions take a model, the name of its scalar loss, and the names of its weights, which are inputs.

    `add_gradients` gives a new model with one more value per weight, of its type and shape, and weight -> name of that value; GradientError
    lists what blocks it. `blockers` lists that without running anything.
    """

    add_gradients: Callable[[ir.Model, str, Sequence[str]], tuple[ir.Model, dict[str, str]]]
    blockers: Callable[[ir.Model, str, Sequence[str]], Sequence[Blocker]]


def gradient_source(gradient: str) -> GradientSource:
    """The source that `Trainer(gradient=)` names; "auto" takes the best there is."""
    if gradient == "onnx":
        raise SettingError(
            "gradient='onnx', our own table of rules, is not part of this version: use gradient='auto' or 'onnxruntime'."
        )
    if gradient not in SOURCES:
        raise UnknownNameError("gradient source", gradient, SOURCES)
    from onnxfit.gradients import onnxruntime  # lazily: an inference build of onnxruntime has no gradients to offer

    onnxruntime.require_builder()
    return GradientSource(onnxruntime.add_gradients, onnxruntime.blockers)


def refuse(found: Sequence[Blocker]) -> None:
    """GradientError that lists all blockers, if there are any."""
    if found:
        raise GradientError(
            "\n  ".join(["These nodes between the weights and the loss cannot be differentiated:", *map(str, found)])
        )
