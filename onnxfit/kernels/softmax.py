"""The gradient of Softmax over the last axis as one operator, and a Softmax without NaN as well.

The operators of ONNX go through the whole tensor four times, and once more in the attention of
exported models, which replace NaN by 0 in both passes. A kernel goes through each row two or three
times, while the row is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx

from onnxfit.graph.index import attributes_of
from onnxfit.graph.match import Equation
from onnxfit.kernels.search import (
    KernelRule,
    NodeSearch,
    ResultType,
    make_node,
    needed_nodes,
    with_kernel_nodes,
)

# From this number of columns, the kernel takes 0.4 to 0.8 of the time of the operators. For 4
# columns it takes 2.0, because it has a small cost per row.
MIN_COLUMNS = 8


def replace_softmaxes(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with one node for each y (dy - sum of dy y over the last axis).

    A Softmax whose NaN are replaced by 0 is one node, too. The nodes are returned themselves if
    there is no gradient.
    """
    search = NodeSearch(graph, nodes, types)
    kernels = list(search.rewritten(SoftmaxGradient(), {}))
    if not kernels:
        return nodes
    nodes = needed_nodes(with_kernel_nodes(nodes, kernels), search.outputs)
    masked = list(_masked(NodeSearch(graph, nodes, types)))
    return needed_nodes(with_kernel_nodes(nodes, masked), search.outputs) if masked else nodes


class SoftmaxGradient(KernelRule):
    """y (dy - sum of dy y over the last axis), of float32 rows."""

    result = "dx"
    equations: Sequence[Equation] = (
        ("difference", ("Sub", "dy", "sum")),
        ("sum", ("ReduceSum", ("Mul", "dy", "y"), "axes")),
        ("dx", ("Mul", "difference", "y")),
    )

    def check(self, graph: NodeSearch, found: Mapping[str, str]) -> str:
        shape = graph.shape(found["y"])
        if found["y"] == found["dy"] or graph.shape(found["dy"]) != shape:
            return "the gradient is not one of y"
        if not graph.row_reduced(found["sum"], "ReduceSum"):
            return "the sum is not over the last axis"
        return "" if shape[-1] >= MIN_COLUMNS else "the operators are faster for short rows"

    def rewrite(self, graph: NodeSearch, found: Mapping[str, str]) -> onnx.NodeProto:
        """Return the node of the gradient, which needs no copy of dy with 0 where y is NaN.

        The gradient is the same: a row with NaN in y has the sum NaN, and is all NaN.
        """
        dy, y = found["dy"], found["y"]
        mask: Equation = ("dy", ("Where", ("IsNaN", "y"), "zero", "unmasked"))
        for each in graph.matcher.solutions([mask], {"dy": dy, "y": y}):
            other = each["unmasked"]
            if graph.number(each["zero"]) == 0 and graph.shape(other) == graph.shape(dy):
                dy = other
        return _gradient_kernel(y, dy, found["dx"], is_masked=False)


def _masked(graph: NodeSearch) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of each Softmax whose NaN are replaced by 0, and of its gradients.

    Only these and the replacement read the result of the Softmax.
    """
    for node in graph.nodes:
        if node.op_type != "Where" or node.domain:
            continue
        condition, zero, y = node.input
        (operand,) = graph.operands(condition, "IsNaN")
        softmax = graph.producers.get(y)
        is_mask = operand == y and graph.number(zero) == 0 and len(graph.readers[condition]) == 1
        if softmax is None or not is_mask or not _is_over_rows(graph, softmax):
            continue
        is_nan = graph.producers[condition]
        gradients = [each for each in graph.readers[y] if each not in (node, is_nan)]
        if y in graph.outputs or any(each.op_type != "SoftmaxGradient" for each in gradients):
            continue
        (z,) = node.output
        yield make_node("MaskedSoftmax", softmax.input, [z], softmax.name)
        for each in gradients:
            yield _gradient_kernel(z, each.input[1], each.output[0], is_masked=True)


def _is_over_rows(graph: NodeSearch, node: onnx.NodeProto) -> bool:
    """Return whether a node is a Softmax over the last axis, of float32 rows of known sizes."""
    shape = graph.shape(node.output[0])
    axis = attributes_of(node).get("axis", -1)
    is_softmax = node.op_type == "Softmax" and not node.domain
    return is_softmax and bool(shape) and axis in (-1, len(shape) - 1)


def _gradient_kernel(y: str, dy: str, dx: str, *, is_masked: bool) -> onnx.NodeProto:
    """Return the node of a gradient; `is_masked`: whether y has 0 in the place of NaN."""
    return make_node("SoftmaxGradient", [y, dy], [dx], dx, is_masked=int(is_masked))
