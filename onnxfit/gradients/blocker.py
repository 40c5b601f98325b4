"""Nodes that cannot be differentiated, and the error that lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxfit.errors import GradientError
from onnxfit.gradients.paths import (
    PathNode,
    differentiable_path,
    leaves_of,
    outputs_of,
    values_read,
)
from onnxfit.gradients.table import NOT_DIFFERENTIABLE, Key, NoGradientError

# Fixes that code looks for: see `Blocker.needs_sizes` and `without_consequences`.
STATIC = "use static shapes, with fixed sizes of the model's inputs"
TYPED = "use a model whose types can be inferred"
FITTING = "use inputs that the operator accepts"
# What a user can do about a loss in float16 or bfloat16.
HALF_PRECISION = "Convert the model to float32 with onnxfit.to_float32(model)."


@dataclass(frozen=True)
class Blocker:
    """A node on the gradient path that cannot be differentiated correctly.

    `node` is its name, `op_type` its operator, `reason` the reason, `fix` what the user can do.
    """

    node: str
    op_type: str
    reason: str
    fix: str

    @property
    def needs_sizes(self) -> bool:
        """Whether the node can be differentiated once every size is known."""
        return self.fix == STATIC

    def __str__(self) -> str:
        return f"{self.op_type} {self.node!r}: {self.reason}. Fix: {self.fix}."


class BlockedError(GradientError):
    """Nodes block the gradient of one source; another source may differentiate them.

    `blockers` lists all of them. A caller that builds the gradient reads them here; asking for the
    blockers first would build the gradient twice.
    """

    def __init__(self, blockers: Sequence[Blocker]) -> None:
        title = "These nodes between the weights and the loss cannot be differentiated:"
        super().__init__("\n  ".join([title, *map(str, blockers)]))
        self.blockers = tuple(blockers)

    def __reduce__(self) -> tuple[type[BlockedError], tuple[tuple[Blocker, ...]]]:
        return BlockedError, (self.blockers,)  # by default, the message would be the argument


def refuse(blockers: Sequence[Blocker]) -> None:
    """Raise a BlockedError that lists `blockers`, if there are any."""
    if blockers:
        raise BlockedError(blockers)


def without_consequences(blockers: Sequence[Blocker]) -> list[Blocker]:
    """Return the blockers that are not mere consequences of another one.

    The outputs of an unknown operator have no type, so every node after it is a blocker as well.
    """
    causes = [blocker for blocker in blockers if blocker.fix != TYPED]
    return causes or list(blockers)


def check_ends(model: ir.Model, loss: str, weights: Sequence[str]) -> list[PathNode]:
    """Check that the loss is a scalar float output, and that each weight is an input on its path.

    Returns the path. GradientError: a check fails.
    """
    outputs = {v.name: v for v in model.graph.outputs}
    inputs = {v.name: v for v in model.graph.inputs}
    if loss not in outputs or loss in inputs:
        raise GradientError(
            f"The model has no output {loss!r} to differentiate. Its outputs are"
            f" {', '.join(map(str, outputs))}."
        )
    shape = outputs[loss].shape
    dtype = outputs[loss].dtype
    if shape is None or len(shape) != 0 or dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise GradientError(
            f"The loss must be a scalar in float32 or float64, but {loss!r} is"
            f" {dtype}{'[?]' if shape is None else list(shape)}. {HALF_PRECISION}"
        )
    missing = [name for name in weights if name not in inputs]
    if missing:
        subject = "it is not a graph input" if len(missing) == 1 else "they are not graph inputs"
        raise GradientError(
            f"Cannot differentiate with respect to {', '.join(map(repr, missing))}: {subject}. The"
            f" graph's inputs are {', '.join(map(str, inputs))}."
        )
    graph = model.graph
    path = differentiable_path(graph, outputs_of(graph, loss), leaves_of(graph, weights))
    connected = values_read(path)
    disconnected = [name for name in weights if inputs[name] not in connected]
    if disconnected:
        raise GradientError(
            f"The loss {loss!r} does not depend on {', '.join(disconnected)} in a differentiable"
            " way."
        )
    return path


def missing_rule(key: Key, schema: Any) -> NoGradientError:
    """Return the error about an operator that has neither a rule nor a definition.

    `schema` is ONNX's, or None.
    """
    domain, op_type = key
    if key in NOT_DIFFERENTIABLE:
        return NoGradientError(NOT_DIFFERENTIABLE[key])
    if schema is not None and schema.has_context_dependent_function:
        return NoGradientError("its ONNX definition needs sizes of its inputs", STATIC)
    name = f"{domain}::{op_type}" if domain else op_type
    return NoGradientError(f"there is no rule for {name} (onnxfit.gradients.register adds one)")
