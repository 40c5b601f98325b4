"""Reverse-mode differentiation of a graph: one signature, two sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxfit.errors import GradientError, InstallationError, UnknownNameError
from onnxfit.gradients import backward
from onnxfit.gradients.blocker import Blocker, refuse
from onnxfit.gradients.paths import reachable
from onnxfit.gradients.table import Refused, rewrite
from onnxfit.gradients.table import gradient as register

__all__ = ["SOURCES", "Blocker", "GradientSource", "Refused", "gradient_source", "reachable", "refuse", "register", "rewrite"]

SOURCES = ("auto", "onnx", "onnxruntime")


@dataclass(frozen=True)
class GradientSource:
    """Where gradients come from. Both functions take a model, the name of its scalar loss, and the names of its weights, which are inputs.

    `add_gradients` gives a new model with one more value per weight, of its type and shape, and weight -> name of that value; GradientError
    lists what blocks it. `blockers` lists that without running anything.
    """

    add_gradients: Callable[[ir.Model, str, Sequence[str]], tuple[ir.Model, dict[str, str]]]
    blockers: Callable[[ir.Model, str, Sequence[str]], Sequence[Blocker]]


def gradient_source(gradient: str) -> GradientSource:
    """The source that `Trainer(gradient=)` names.

    "onnx" is the table of rules, which runs on any onnxruntime; "onnxruntime" the builder of its training build; "auto" takes the table, and
    the builder where the table does not know an operator, the builder is installed, and all it would do is known to be right.
    """
    if gradient not in SOURCES:
        raise UnknownNameError("gradient source", gradient, SOURCES)
    if gradient == "onnx":
        return GradientSource(backward.add_gradients, backward.blockers)
    if gradient == "auto":
        return GradientSource(_add_best_gradients, _best_blockers)
    from onnxfit.gradients import onnxruntime  # lazily: an inference build of onnxruntime has no gradients to offer

    onnxruntime.require_builder()
    return GradientSource(onnxruntime.add_gradients, onnxruntime.blockers)


def _add_best_gradients(model: ir.Model, loss: str, weights: Sequence[str]) -> tuple[ir.Model, dict[str, str]]:
    try:
        return backward.add_gradients(model, loss, weights)
    except GradientError:
        builder = _builder()
        if builder is None or builder.blockers(model, loss, weights):
            raise  # the table's list of blockers: the builder knows less
        return builder.add_gradients(model, loss, weights)


def _best_blockers(model: ir.Model, loss: str, weights: Sequence[str]) -> Sequence[Blocker]:
    found = backward.blockers(model, loss, weights)
    builder = _builder() if found else None
    return found if builder is None or builder.blockers(model, loss, weights) else []


def _builder() -> GradientSource | None:
    """onnxruntime's builder, where it is installed."""
    try:
        return gradient_source("onnxruntime")
    except InstallationError:
        return None
