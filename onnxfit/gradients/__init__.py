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

from onnxfit.errors import UnknownNameError
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
from onnxfit.gradients.table import rule as register
from onnxfit.graph.inference import same_type, same_type_and_rank, same_type_and_shape

__all__ = [
    "SOURCES",
    "BlockedError",
    "Blocker",
    "GradientSource",
    "NoGradientError",
    "Pullback",
    "decompose",
    "gradient_source",
    "reachable",
    "refuse",
    "register",
    "same_type",
    "same_type_and_rank",
    "same_type_and_shape",
]

SOURCES = ("auto", "onnx", "onnxruntime")


@dataclass(frozen=True)
class GradientSource:
    """A source of gradients; `name` is "onnx" or "onnxruntime".

    Each function takes a model, the name of its loss, and the names of its weights. The loss is a
    scalar output, the weights are inputs. `add_gradients` returns the model with one more value per
    weight, of the weight's type and shape, and a mapping from weight to the name of that value.
    `add_pullback` takes float outputs instead of the loss, and returns a Pullback. Both raise
    BlockedError, whose `blockers` are the nodes that cannot be differentiated. `blockers` returns
    these nodes. `add_gradients` and `blockers` may change their model.
    """

    name: str
    add_gradients: AddGradients
    add_pullback: AddPullback
    blockers: Callable[[ir.Model, str, Sequence[str]], Sequence[Blocker]]


def gradient_source(gradient: str, device: str = "cpu") -> GradientSource:
    """Return the source that `gradient` names, as in `Trainer`: "auto", "onnx" or "onnxruntime".

    `device` is as for GraphBuilder: rules with several forms choose by it.

    "onnx", or "auto", is the table of rules, which runs on any onnxruntime. "onnxruntime" is the
    gradient builder of onnxruntime's training build.
    """
    if not isinstance(gradient, str) or gradient not in SOURCES:
        raise UnknownNameError("gradient source", gradient, SOURCES)
    if gradient != "onnxruntime":
        by_rules = partial(backward.add_gradients, device=device)
        pullback_by_rules = partial(add_pullback, device=device)
        return GradientSource("onnx", by_rules, pullback_by_rules, backward.blockers)
    # imported late: an inference build of onnxruntime has no gradient builder
    from onnxfit.gradients.onnxruntime import builder

    builder.require_builder()
    by_builder = pullback_from_gradients(builder.add_gradients)
    return GradientSource(gradient, builder.add_gradients, by_builder, builder.blockers)
