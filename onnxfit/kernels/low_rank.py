"""The gradients of both factors of a LoRA adapter as one operator.

The operators of ONNX multiply four times: the input x and the gradient dy of a layer by the
factors, u = s x A and v = s dy B', and then the transposed results by dy and x again, dA' = v' x
and dB = u' dy. They read x and dy twice from memory, and onnxruntime's product is slow if one
factor has few rows. The kernel reads each block of rows once.

It is used where nothing else reads u and v: where `step.rewrites.add_before_product` computes the
layer with x (W + s A B). A layer that keeps the branch of its adapter needs u and v anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import onnx

from onnxfit.graph.index import attributes_of
from onnxfit.kernels.search import (
    NodeSearch,
    ResultType,
    make_node,
    needed_nodes,
    with_kernel_nodes,
)

# Measured on one thread (onnxruntime 1.19.2, AVX2), with 128 to 3,072 columns on each side: the
# kernel takes 0.4 to 0.8 of the time of the operators for ranks up to 8, 0.76 to 1.26 for 16, and
# 0.95 to 1.27 for 24 to 64. For rank 8, it takes 1.1 with 64 columns and 1.9 with 16, because of
# the totals of each row, and 0.9 for 64 and 128 rows.
MAX_RANK = 8
MIN_COLUMNS = 128
MIN_ROWS = 64
COLUMNS = 16  # as in kernels/src/low_rank.h: x and dy have a multiple of these


def replace_low_rank_gradients(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with one node for both gradients of each pair of factors.

    The nodes are returned themselves if there is no such pair.
    """
    search = _LowRankSearch(graph, nodes, types)
    kernels = list(search.kernels())
    if not kernels:
        return nodes
    return needed_nodes(with_kernel_nodes(nodes, kernels), search.outputs)


class _Product(NamedTuple):
    """s x A, which has few columns."""

    x: str  # (sizes ..., columns)
    matrix: str  # A, (columns, rank), or its transpose
    is_transposed: bool  # whether it is (rank, columns)
    scale: float


class _Half(NamedTuple):
    """One gradient, u' dy, or its transpose. For the other factor, x and dy change places."""

    gemm: onnx.NodeProto
    u: _Product
    dy: str
    rank: int
    is_transposed: bool  # whether the Gemm computes dy' u


class _LowRankSearch(NodeSearch):
    """A search for gradients of factors of low rank, of float32 rows."""

    def kernels(self) -> Iterator[onnx.NodeProto]:
        """Yield the nodes of each pair of gradients."""
        halves: dict[tuple[str, str, int, float], _Half] = {}
        for node in self.nodes:
            half = self._half(node) if node.op_type == "Gemm" and not node.domain else None
            if half is None:
                continue
            other = halves.pop((half.dy, half.u.x, half.rank, half.u.scale), None)
            if other is None:
                halves[half.u.x, half.dy, half.rank, half.u.scale] = half
            else:
                yield from self._kernel(half, other)

    def _half(self, gemm: onnx.NodeProto) -> _Half | None:
        """Return the gradient of a factor that a node computes."""
        is_update = len(gemm.input) == 3  # w - gradient
        scales = {"alpha": -1.0, "beta": 1.0} if is_update else {}
        if _needed_attributes(gemm) != {"transA": 1, **scales}:
            return None
        left, right = gemm.input[:2]
        for value, dy in ((left, right), (right, left)):
            product, rank = self._product(value), self.shape(value)[-1:]
            if product is not None and self._fits(product.x, self.shape(dy), rank):
                return _Half(gemm, product, self._unflattened(dy), rank[0], value == right)
        return None

    def _fits(self, x: str, dy: tuple[int, ...], rank: tuple[int, ...]) -> bool:
        """Return whether the kernel takes these sizes, and is faster; () is an unknown size."""
        if not dy or not rank or rank[0] > MAX_RANK:
            return False
        *sizes, columns = self.shape(x)
        has_columns = all(n >= MIN_COLUMNS and n % COLUMNS == 0 for n in (columns, dy[-1]))
        return has_columns and dy[0] == math.prod(sizes) >= MIN_ROWS

    def _product(self, value: str) -> _Product | None:
        """Return the product that a matrix is, if nothing else reads it."""
        inside = [value, self._unflattened(value)]
        number, operand = self.scaled(inside[-1])
        if operand:
            inside += [operand, self._unflattened(operand)]
        is_read = any(len(self.readers[v]) != 1 or v in self.outputs for v in inside)
        x, matrix, is_transposed = self._factors(inside[-1])
        if is_read or not self.shape(x) or len(self.shape(matrix)) != 2:
            return None
        return _Product(self._unflattened(x), matrix, is_transposed, number if operand else 1.0)

    def _factors(self, product: str) -> tuple[str, str, bool]:
        """Return x, A and whether A is transposed, if a value is x A or x A'."""
        node = self.producers.get(product)
        if node is None or node.domain or len(node.input) != 2:
            return "", "", False
        x, matrix = node.input
        if node.op_type == "Gemm" and _needed_attributes(node) == {"transB": 1}:
            return x, matrix, True
        if node.op_type != "MatMul":
            return "", "", False
        transpose = self.producers.get(matrix)
        if transpose is None or transpose.domain or transpose.op_type != "Transpose":
            return x, matrix, False
        return x, transpose.input[0], True

    def _unflattened(self, value: str) -> str:
        """Return the value whose rows a Flatten puts into a matrix, or else the value itself."""
        (source,) = self.operands(value, "Flatten")
        shape = self.shape(source)
        keeps_rows = shape and self.shape(value) == (math.prod(shape[:-1]), shape[-1])
        return source if keeps_rows else value

    def _kernel(self, half: _Half, other: _Half) -> Iterator[onnx.NodeProto]:
        """Yield the nodes that compute two gradients."""
        matrices, results = [], []
        after: list[onnx.NodeProto] = []
        for (_, product, *_), opposite in ((half, other), (other, half)):
            matrix = product.matrix
            if not product.is_transposed:
                rows = f"{opposite.gemm.output[0]}/factor"
                yield make_node("Transpose", [matrix], [rows], rows, perm=[1, 0], domain="")
                matrix = rows
            matrices.append(matrix)
            result, nodes = _result(opposite)
            results.append(result)
            after += nodes
        inputs = [half.u.x, other.u.x, *matrices]
        name = f"{half.gemm.name}/LowRankGradient"
        yield make_node("LowRankGradient", inputs, results, name, scale=half.u.scale)
        yield from after


def _needed_attributes(gemm: onnx.NodeProto) -> dict[str, float]:
    """Return the attributes of a Gemm that are not the default, or matter for a third input."""
    defaults = {"transA": 0, "transB": 0, "alpha": 1.0}
    values = attributes_of(gemm)
    if len(gemm.input) < 3:
        values.pop("beta", None)
    return {name: value for name, value in values.items() if value != defaults.get(name)}


def _result(half: _Half) -> tuple[str, list[onnx.NodeProto]]:
    """Return a name for a gradient, (rank, columns), and nodes that compute the Gemm's result."""
    gemm, (result,) = half.gemm, half.gemm.output
    nodes = []
    if len(gemm.input) == 3:  # the update of a weight: w - gradient
        gradient = f"{result}/gradient"
        nodes.append(make_node("Sub", [gemm.input[2], gradient], [result], gemm.name, domain=""))
        result = gradient
    if half.is_transposed:
        rows = f"{result}/rows"
        nodes.append(make_node("Transpose", [rows], [result], result, perm=[1, 0], domain=""))
        result = rows
    return result, nodes
