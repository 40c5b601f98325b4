"""Reverse-mode differentiation of a graph, by one of two sources with the same signature.

`register` and `decompose` add an operator, with `NoGradientError` and `same_type`,
`same_type_and_rank`, `same_type_and_shape` as their helpers; `gradients/table.py` explains how.
Everything else here is used by onnxfit itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from onnxfit.errors import GradientError, InstallationError, UnknownNameError
from onnxfit.gradients import backward
from onnxfit.gradients.blocker import BlockedError, Blocker, refuse
from onnxfit.gradients.paths import reachable
from onnxfit.gradients.pullback import (
    AddGradients,
    AddPullback,
    Pullback,
    add_pullback,
    pullback_from_gradients,
)
from onnxfit.gradients.table import NoGradientError, decompose
from onnxfit.gradients.table import gradient as register
from onnxfit.graph.inference import same_type, same_type_and_rank, same_type_and_shape

__all__ = [
    "SOURCES",
    "BlockedError",
    "Blocker",
    "GradientSource",
    "NoGradientError",
    "Pullback",
    "choose_source",
    "decompose",
    "differentiate",
    "gradient_source",
    "reachable",
    "refuse",
    "register",
    "same_type",
    "same_type_and_rank",
    "same_type_and_shape",
]

SOURCES = ("auto", "onnx", "onnxruntime")
BuildModel = Callable[[], ir.Model]


@dataclass(frozen=True)
class GradientSource:
    """A source of gradients; `name` is the user's choice, one of SOURCES.

    Each function takes a model, the name of its loss, and the names of its weights. The loss is a
    scalar output, the weights are inputs. `add_gradients` returns the model with one more value per
    weight, of the weight's type and shape, and a mapping from weight to the name of that value.
    `add_pullback` takes float outputs instead of the loss, and returns a Pullback. Both raise
    BlockedError, whose `blockers` are the nodes that cannot be differentiated. `blockers` returns
    these nodes. `add_gradients` and `blockers` may change their model. `device` is the kind of
    device that the gradients are for, as for GraphBuilder.
    """

    name: str
    add_gradients: AddGradients
    add_pullback: AddPullback
    blockers: Callable[[ir.Model, str, Sequence[str]], Sequence[Blocker]]
    device: str = "cpu"


def gradient_source(gradient: str, device: str = "cpu") -> GradientSource:
    """Return the source that `gradient` names, as in `Trainer`: "auto", "onnx" or "onnxruntime".

    `device` is as for GraphBuilder: rules with several forms choose by it.

    "onnx" is the table of rules, which runs on any onnxruntime. "onnxruntime" is the gradient
    builder of onnxruntime's training build. "auto" is the table. If nodes block the table, and the
    installed builder differentiates all of them correctly, "auto" is the builder.
    """
    if not isinstance(gradient, str) or gradient not in SOURCES:
        raise UnknownNameError("gradient source", gradient, SOURCES)
    if gradient == "onnx":
        by_rules = partial(backward.add_gradients, device=device)
        pullback_by_rules = partial(add_pullback, device=device)
        return GradientSource(gradient, by_rules, pullback_by_rules, backward.blockers, device)
    if gradient == "auto":
        best_gradients = partial(_add_best_gradients, device=device)
        best_pullback = partial(_add_best_pullback, device=device)
        return GradientSource(gradient, best_gradients, best_pullback, _best_blockers, device)
    # imported late: an inference build of onnxruntime has no gradient builder
    from onnxfit.gradients.onnxruntime import builder

    builder.require_builder()
    by_builder = pullback_from_gradients(builder.add_gradients)
    return GradientSource(gradient, builder.add_gradients, by_builder, builder.blockers)


def choose_source(
    gradient: str, build: BuildModel, loss: str, weights: Sequence[str]
) -> tuple[str, Sequence[Blocker]]:
    """Return the source that differentiates a model, "onnx" or "onnxruntime", and its blockers.

    `gradient` is the user's choice. `build` returns a new copy of the model with each call. The
    scalar output `loss` and the inputs `weights` are those of a GradientSource.
    """
    if gradient != "auto":
        return gradient, gradient_source(gradient).blockers(build(), loss, weights)
    blocking = backward.blockers(build(), loss, weights)
    builder = _installed_builder() if blocking else None
    if builder is None or builder.blockers(build(), loss, weights):
        return "onnx", blocking
    return "onnxruntime", ()


def differentiate(
    source: GradientSource, build: BuildModel, loss: str, weights: Sequence[str]
) -> tuple[ir.Model, dict[str, str]]:
    """Return a model with its gradients, as `GradientSource.add_gradients` does.

    - `source`: the source of gradients.
    - `build`: a function that returns a new copy of the model with each call. "auto" calls it again
      only if the first source is blocked.
    - `loss`, `weights`: the scalar output and the inputs, as for a GradientSource.

    Raises BlockedError if nodes cannot be differentiated.
    """
    if source.name != "auto":
        return source.add_gradients(build(), loss, weights)
    try:
        return backward.add_gradients(build(), loss, weights, device=source.device)
    except BlockedError:
        builder = _installed_builder()
        if builder is None:
            raise
        try:
            return builder.add_gradients(build(), loss, weights)
        except BlockedError:
            pass  # the error of the table says more
        raise


def _best_blockers(model: ir.Model, loss: str, weights: Sequence[str]) -> Sequence[Blocker]:
    return choose_source("auto", model.clone, loss, weights)[1]


def _add_best_gradients(
    model: ir.Model, loss: str, weights: Sequence[str], *, device: str
) -> tuple[ir.Model, dict[str, str]]:
    return differentiate(gradient_source("auto", device), model.clone, loss, weights)


def _add_best_pullback(
    model: ir.Model, outputs: Sequence[str], wrt: Sequence[str], *, device: str
) -> Pullback:
    try:
        return add_pullback(model, outputs, wrt, device=device)
    except BlockedError:
        builder = _installed_builder()
        if builder is None:
            raise
        try:
            return builder.add_pullback(model, outputs, wrt)
        except GradientError:
            pass  # the error of the table says more
        raise


def _installed_builder() -> GradientSource | None:
    """Return the gradient builder of onnxruntime; None if it is not installed."""
    try:
        return gradient_source("onnxruntime")
    except InstallationError:
        return None
