"""The sums of the columns of a matrix, such as the gradient of a bias, as one operator.

The rules multiply a row of ones with the matrix. onnxruntime multiplies rows in one thread. The
kernel adds up the rows in all threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx

from onnxfit.graph.match import Equation
from onnxfit.kernels.search import (
    KernelRule,
    NodeSearch,
    ResultType,
    make_node,
    needed_nodes,
    trains,
    with_kernel_nodes,
)

# The product takes less time for fewer rows, and no more for smaller matrices.
MIN_ROWS = 256
MIN_ELEMENTS = 65536


def replace_column_sums(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with kernels for the sums of columns of large matrices.

    The nodes are returned themselves if there is no such sum.
    """
    if not trains(nodes):
        return nodes
    search = NodeSearch(graph, nodes, types)
    kernels = list(search.rewritten(ColumnSums(), {}))
    if not kernels:
        return nodes
    return needed_nodes(with_kernel_nodes(nodes, kernels), search.outputs)


class ColumnSums(KernelRule):
    """A row of ones times a matrix."""

    result = "sums"
    equations: Sequence[Equation] = (("sums", ("MatMul", "ones", "matrix")),)

    def check(self, graph: NodeSearch, found: Mapping[str, str]) -> str:
        shape = graph.shape(found["matrix"])
        if len(shape) != 2 or not graph.is_row_of_ones(found["ones"]):
            return "the product is no sum of columns"
        is_large = shape[0] >= MIN_ROWS and math.prod(shape) >= MIN_ELEMENTS
        return "" if is_large else "the product takes less time"

    def rewrite(self, graph: NodeSearch, found: Mapping[str, str]) -> onnx.NodeProto:
        matrix = found["matrix"]
        whole = graph.operands(matrix, "Reshape")[0]
        # A Reshape that keeps the columns is not needed.
        has_columns = graph.shape(whole)[-1:] == graph.shape(matrix)[-1:]
        operand = whole if has_columns and not graph.is_state(whole) else matrix
        return make_node("ColumnSums", [operand], [found["sums"]], found["sums"])
