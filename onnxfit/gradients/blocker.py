"""What stands in the way of a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxfit.errors import GradientError
from onnxfit.gradients.paths import reachable

STATIC = "static shapes: fix the sizes of the model's inputs"
TYPED = "a model whose types can be inferred"
FITTING = "inputs that the operator accepts"


@dataclass(frozen=True)
class Blocker:
    """A node between the weights and the loss that cannot be differentiated correctly."""

    node: str
    op_type: str
    reason: str
    fix: str

    @property
    def needs_sizes(self) -> bool:
        """Whether it would do with every size known."""
        return self.fix == STATIC

    def __str__(self) -> str:
        return f"{self.op_type} {self.node!r}: {self.reason}. Fix: {self.fix}."


class BlockedError(GradientError):
    """Nodes block the gradient; another source may know them."""

    def __init__(self, blockers: Sequence[Blocker]) -> None:
        heading = "These nodes between the weights and the loss cannot be differentiated:"
        super().__init__("\n  ".join([heading, *map(str, blockers)]))
        self.blockers = tuple(blockers)


def refuse(found: Sequence[Blocker]) -> None:
    """GradientError that lists all blockers, if there are any."""
    if found:
        raise BlockedError(found)


def check_ends(model: ir.Model, loss: str, weights: Sequence[str]) -> None:
    """GradientError unless the loss is a scalar output that depends smoothly on every weight, and
    the weights are inputs.
    """
    outputs, inputs = (
        {v.name: v for v in model.graph.outputs},
        {v.name: v for v in model.graph.inputs},
    )
    if loss not in outputs or loss in inputs:
        raise GradientError(
            f"The graph computes no output {loss!r} to differentiate; its outputs are"
            f" {', '.join(map(str, outputs))}."
        )
    shape, dtype = outputs[loss].shape, outputs[loss].dtype
    if shape is None or len(shape) != 0 or dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise GradientError(
            f"A loss is a scalar in float32 or float64; {loss!r} is"
            f" {dtype}{'[?]' if shape is None else list(shape)}. A model in half precision must be"
            " converted to float32 before it is trained."
        )
    missing = [w for w in weights if w not in inputs]
    if missing:
        raise GradientError(f"Gradients are taken of graph inputs; {', '.join(missing)} is none.")
    lost = set(weights) - set(reachable(model, loss, weights))
    if lost:
        raise GradientError(
            f"The loss {loss!r} does not depend on {', '.join(w for w in weights if w in lost)} in"
            " a differentiable way."
        )
