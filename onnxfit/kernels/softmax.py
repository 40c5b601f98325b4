"""The gradient of Softmax over the last axis as one operator, and a Softmax without NaN as well.

The operators of ONNX go through the whole tensor four times, and once more in the attention of
exported models, which replace NaN by 0 in both passes. A kernel goes through each row two or three
times, while the row is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import helper

from onnxfit.graph.index import attributes_of
from onnxfit.kernels.library import DOMAIN
from onnxfit.kernels.search import NodeSearch, ResultType, needed_nodes, with_kernel_nodes

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
    search = _SoftmaxSearch(graph, nodes, types)
    kernels = list(search.kernels())
    if not kernels:
        return nodes
    nodes = needed_nodes(with_kernel_nodes(nodes, kernels), search.outputs)
    masked = list(_SoftmaxSearch(graph, nodes, types).masked())
    return needed_nodes(with_kernel_nodes(nodes, masked), search.outputs) if masked else nodes


class _SoftmaxSearch(NodeSearch):
    """A search for gradients of Softmax, of float32 rows."""

    def kernels(self) -> Iterator[onnx.NodeProto]:
        """Yield the node of each gradient."""
        for node in self.nodes:
            if node.op_type == "Sub" and not node.domain:
                yield from self._kernels(node)

    def _kernels(self, difference: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield the node of a gradient whose dy - sum is `difference`."""
        dy, sum_ = difference.input
        terms = {*self.operands(self.row_reduced(sum_, "ReduceSum"), "Mul")}
        if dy not in terms or len(terms) != 2:
            return
        (y,) = terms - {dy}
        if self.shape(y) == self.shape(dy) and self.shape(y)[-1] >= MIN_COLUMNS:
            for dx in self.results(difference.output[0], "Mul", y):
                yield _gradient(y, self._before_mask(dy, y), dx, is_masked=False)

    def masked(self) -> Iterator[onnx.NodeProto]:
        """Yield the nodes of each Softmax whose NaN are replaced by 0, and of its gradients.

        Only these and the replacement read the result of the Softmax.
        """
        for node in self.nodes:
            if node.op_type != "Where" or node.domain:
                continue
            condition, zero, y = node.input
            (operand,) = self.operands(condition, "IsNaN")
            softmax = self.producers.get(y)
            is_mask = operand == y and self.number(zero) == 0 and len(self.readers[condition]) == 1
            if softmax is None or not is_mask or not self._is_over_rows(softmax):
                continue
            is_nan = self.producers[condition]
            gradients = [each for each in self.readers[y] if each not in (node, is_nan)]
            if y in self.outputs or any(each.op_type != "SoftmaxGradient" for each in gradients):
                continue
            (z,) = node.output
            yield helper.make_node("MaskedSoftmax", softmax.input, [z], softmax.name, domain=DOMAIN)
            for each in gradients:
                yield _gradient(z, each.input[1], each.output[0], is_masked=True)

    def _is_over_rows(self, node: onnx.NodeProto) -> bool:
        """Return whether a node is a Softmax over the last axis, of float32 rows of known sizes."""
        shape = self.shape(node.output[0])
        axis = attributes_of(node).get("axis", -1)
        is_softmax = node.op_type == "Softmax" and not node.domain
        return is_softmax and bool(shape) and axis in (-1, len(shape) - 1)

    def _before_mask(self, dy: str, y: str) -> str:
        """Return the value of which `dy` is a copy with 0 where y is NaN, or dy itself.

        The gradient is the same: a row with NaN in y has the sum NaN, and is all NaN.
        """
        condition, zero, other = self.operands(dy, "Where")
        is_mask = self.operands(condition, "IsNaN") == (y,) and self.number(zero) == 0
        return other if is_mask and self.shape(other) == self.shape(dy) else dy


def _gradient(y: str, dy: str, dx: str, *, is_masked: bool) -> onnx.NodeProto:
    """Return the node of a gradient; `is_masked`: whether y has 0 in the place of NaN."""
    return helper.make_node(
        "SoftmaxGradient", [y, dy], [dx], dx, domain=DOMAIN, is_masked=int(is_masked)
    )
