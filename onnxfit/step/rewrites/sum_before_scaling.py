"""Sum the gradient of a BatchNormalization once.

Its bias has the gradient sum(dy), over the batch and the positions of a channel. The gradient of
the batch mean is the sum of dy * factor + k * (x - mean) over the same axes. The factor and k are
one number for each channel, and x - mean has the sum 0, so this sum is sum(dy) * factor. The
rewrite saves an operator on the whole batch. It also needs less memory: the gradient of x now
depends on sum(dy), so dy is summed at once and freed, and not kept until the update of the bias.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.step.rewrites.replacement import nodes_of_type, producer_of, replace_node

__all__ = ["sum_before_scaling"]

Axes = npt.NDArray[Any]


def sum_before_scaling(graph: ir.Graph) -> None:
    """Turn sum(dy * factor + k * (x - mean(x))) into sum(dy) * factor if sum(dy) exists, in place.

    The sums and the mean have the same axes, along which the factor and k have size 1.
    """
    for node in nodes_of_type(graph, "ReduceSum"):
        axes = _axes_of(node)
        total = producer_of(node.inputs[0], "Add")
        if axes is None or total is None:
            continue
        terms = [_scaled(value, axes) for value in total.inputs]
        for term, other in (terms, terms[::-1]):
            if term is None or other is None or not _is_centred(other[0], axes):
                continue
            large, factor = term
            sums = [use for use, _ in large.uses() if _is_reduction(use, "ReduceSum", axes)]
            if sums:
                (out,) = node.outputs
                product = ir.node("Mul", [sums[0].outputs[0], factor], name=f"{out.name}/scaled")
                (value,) = product.outputs
                value.name, value.type, value.shape = product.name, out.type, out.shape
                replace_node(graph, node, [product])
                break


def _scaled(value: ir.Value | None, axes: Axes) -> tuple[ir.Value, ir.Value] | None:
    """Return the factors of a product if the second one has size 1 along the axes."""
    node = producer_of(value, "Mul")
    if value is None or node is None:
        return None
    a, b = node.inputs
    for large, factor in ((a, b), (b, a)):
        if large is None or factor is None or large.shape is None or factor.shape is None:
            continue
        if large.shape != value.shape or len(factor.shape) != len(large.shape):
            continue
        if all(factor.shape[axis] == 1 for axis in axes):
            return large, factor
    return None


def _is_centred(value: ir.Value, axes: Axes) -> bool:
    """Return whether a value is x - mean(x) over the axes."""
    node = producer_of(value, "Sub")
    if node is None:
        return False
    x, mean = node.inputs
    reduction = mean.producer() if mean is not None else None
    return (
        reduction is not None
        and _is_reduction(reduction, "ReduceMean", axes)
        and reduction.inputs[0] is x
    )


def _is_reduction(node: ir.Node, op_type: str, axes: Axes) -> bool:
    """Return whether a node reduces over these axes."""
    found = _axes_of(node) if node.op_type == op_type and node.domain == "" else None
    return found is not None and np.array_equal(found, axes)


def _axes_of(node: ir.Node) -> Axes | None:
    """Return the axes of a reduction that keeps them with size 1; None if they are not known."""
    keeps = node.attributes.get_int("keepdims", 1) and not node.attributes.get_int(
        "noop_with_empty_axes", 0
    )
    axes = node.inputs[1] if len(node.inputs) == 2 else None
    if not keeps or axes is None or axes.const_value is None or axes.is_graph_input():
        return None
    return np.sort(axes.const_value.numpy())
