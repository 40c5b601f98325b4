"""The gradient of Softmax over the last axis as one operator.

The operators of ONNX go through the whole tensor four times, and once more in the attention of
exported models, which replace NaN by 0. The kernel goes through each row twice, while the row is in
the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import helper

from onnxfit.runtime.kernels.library import DOMAIN
from onnxfit.runtime.kernels.order import needed_nodes
from onnxfit.runtime.kernels.search import NodeSearch, with_kernel_nodes
from onnxfit.runtime.kernels.types import ResultType

# From this number of columns, the kernel takes 0.4 to 0.8 of the time of the operators. For 4
# columns it takes 2.0, because it has a small cost per row.
MIN_COLUMNS = 8


def replace_softmax_gradients(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with one node for each y (dy - sum of dy y over the last axis).

    The nodes are returned themselves if there is none.
    """
    search = _SoftmaxSearch(graph, nodes, types)
    kernels = list(search.kernels())
    if not kernels:
        return nodes
    return needed_nodes(with_kernel_nodes(nodes, kernels), search.outputs)


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
                inputs = [y, self._before_mask(dy, y)]
                yield helper.make_node("SoftmaxGradient", inputs, [dx], dx, domain=DOMAIN)

    def _before_mask(self, dy: str, y: str) -> str:
        """Return the value of which `dy` is a copy with 0 where y is NaN, or dy itself.

        The gradient is the same: a row with NaN in y has the sum NaN, and is all NaN.
        """
        condition, zero, other = self.operands(dy, "Where")
        is_mask = self.operands(condition, "IsNaN") == (y,) and self.number(zero) == 0
        return other if is_mask and self.shape(other) == self.shape(dy) else dy
