"""Reverse-mode differentiation of a graph: one signature, two sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxfit.errors import GradientError, InstallationError, UnknownNameError
from onnxfit.gradients import backward
from onnxfit.gradients.blocker import BlockedError, Blocker, refuse
from onnxfit.gradients.paths import reachable
from onnxfit.gradients.pullback import AddGradients, AddPullback, Pullback, by_rules, through_a_loss
from onnxfit.gradients.table import NoGradientError, decompose
from onnxfit.gradients.table import gradient as register

__all__ = [
    "SOURCES",
    "Blocker",
    "GradientSource",
    "NoGradientError",
    "Pullback",
    "decompose",
    "gradient_source",
    "reachable",
    "refuse",
    "register",
]

SOURCES = ("auto", "onnx", "onnxruntime")


@dataclass(frozen=True)
class GradientSource:
    """Where gradients come from; `name` is what the user asked for.

    `add_gradients` takes a model, the name of its scalar loss, and the names of its weights, which
    are inputs; it gives a new model with one more value per weight, of its type and shape, and
    weight -> name of that value. `add_pullback` takes float outputs in place of the loss.
    GradientError lists what blocks them; `blockers` lists that without running anything, for a
    loss.
    """

    name: str
    add_gradients: AddGradients
    add_pullback: AddPullback
    blockers: Callable[[ir.Model, str, Sequence[str]], Sequence[Blocker]]


def gradient_source(gradient: str) -> GradientSource:
    """The source that `Trainer(gradient=)` names.

    "onnx" is the table of rules, which runs on any onnxruntime; "onnxruntime" the builder of its
    training build; "auto" takes the table, and the builder where the table does not know an
    operator, the builder is installed, and all it would do is known to be right.
    """
    if gradient not in SOURCES:
        raise UnknownNameError("gradient source", gradient, SOURCES)
    if gradient == "onnx":
        return GradientSource(gradient, backward.add_gradients, by_rules, backward.blockers)
    if gradient == "auto":
        return GradientSource(gradient, _add_best_gradients, _add_best_pullback, _best_blockers)
    # lazily: an inference build of onnxruntime has no gradients to offer
    from onnxfit.gradients.onnxruntime import builder

    builder.require_builder()
    return GradientSource(
        gradient, builder.add_gradients, through_a_loss(builder.add_gradients), builder.blockers
    )


def _add_best_gradients(
    model: ir.Model, loss: str, weights: Sequence[str]
) -> tuple[ir.Model, dict[str, str]]:
    try:
        return backward.add_gradients(model, loss, weights)
    except BlockedError:
        builder = _builder()
        if builder is None or builder.blockers(model, loss, weights):
            raise  # the table's list of blockers: the builder knows less
        return builder.add_gradients(model, loss, weights)


def _add_best_pullback(model: ir.Model, outputs: Sequence[str], wrt: Sequence[str]) -> Pullback:
    try:
        return by_rules(model, outputs, wrt)
    except BlockedError:
        builder = _builder()
        if builder is None:
            raise
        try:
            return builder.add_pullback(model, outputs, wrt)
        except GradientError:
            pass  # the builder knows less: the table's list of blockers stands
        raise


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
