"""Sum the gradient of a BatchNormalization once.

Its bias has the gradient sum(dy), over the batch and the positions of a channel. The gradient of
the batch mean is the sum of dy * factor + k * (x - mean) over the same axes. The factor and k are
one number for each channel, and x - mean has the sum 0, so this sum is sum(dy) * factor. The
rewrite saves an operator on the whole batch. It also needs less memory: the gradient of x now
depends on sum(dy), so dy is summed at once and freed, and not kept until the update of the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.graph.match import Equation
from onnxfit.step.rewrites.replacement import (
    Bindings,
    RewriteRule,
    apply_rule,
    new_node,
    replace_node,
)

__all__ = ["sum_before_scaling"]

Axes = npt.NDArray[Any]


def sum_before_scaling(graph: ir.Graph) -> None:
    """Turn sum(dy * factor + k * (x - mean(x))) into sum(dy) * factor if sum(dy) exists, in place.

    The sums and the mean have the same axes, along which the factor and k have size 1.
    """
    apply_rule(SumBeforeScaling(), graph)


class SumBeforeScaling(RewriteRule):
    equations: Sequence[Equation] = (
        ("sum", ("ReduceSum", "total", "axes of sum")),
        ("total", ("Add", "scaled", ("Mul", "centred", "k"))),
        ("scaled", ("Mul", "dy", "factor")),
        ("centred", ("Sub", "x", "mean")),
        ("mean", ("ReduceMean", "x", "axes of mean")),
        ("sum of dy", ("ReduceSum", "dy", "axes of dy")),
    )

    def check(self, graph: ir.Graph, found: Bindings) -> str:
        axes, *others = (_axes_of(found[name]) for name in ("sum", "mean", "sum of dy"))
        if axes is None:
            return "the axes are not known"
        if any(other is None or not np.array_equal(other, axes) for other in others):
            return "the sums and the mean have different axes"
        pairs = (found["dy"], found["factor"]), (found["centred"], found["k"])
        if not all(_is_repeated(factor, large, axes) for large, factor in pairs):
            return "a factor is not one number along the axes"
        if not all(large.shape == found["total"].shape for large, _ in pairs):
            return "a term is repeated in the sum"
        return ""

    def rewrite(self, graph: ir.Graph, found: Bindings) -> Sequence[ir.Node]:
        out = found["sum"]
        factors = [found["sum of dy"], found["factor"]]
        product = new_node("Mul", factors, f"{out.name}/scaled", out)
        node = out.producer()
        assert node is not None
        replace_node(graph, node, [product])
        return []


def _is_repeated(factor: ir.Value, large: ir.Value, axes: Axes) -> bool:
    """Return whether a factor of a large value has size 1 along the axes."""
    if large.shape is None or factor.shape is None or len(factor.shape) != len(large.shape):
        return False
    return all(factor.shape[axis] == 1 for axis in axes)


def _axes_of(result: ir.Value) -> Axes | None:
    """Return the axes of a reduction that keeps them with size 1; None if they are not known."""
    node = result.producer()
    assert node is not None
    attributes = node.attributes
    keeps = attributes.get_int("keepdims", 1) and not attributes.get_int("noop_with_empty_axes", 0)
    axes = node.inputs[1]
    if not keeps or axes is None or axes.const_value is None or axes.is_graph_input():
        return None
    return np.sort(axes.const_value.numpy())
