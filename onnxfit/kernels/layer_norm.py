"""LayerNormalization and its gradient as one operator each.

onnxruntime 1.19 adds up the numbers of a row one by one. For the gradient, the operators of ONNX go
through the whole batch eleven times: seven elementwise operators and four sums. The kernels go
through each row two or three times, while the row is in the cache.

The nodes are found by what they compute: those of the rule in `gradients/rules/normalization.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper, numpy_helper

from onnxfit.graph.index import attributes_of
from onnxfit.kernels.library import DOMAIN
from onnxfit.kernels.search import NodeSearch, ResultType, needed_nodes, trains, with_kernel_nodes


def replace_layer_norms(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with kernels for LayerNormalizations and their gradients.

    The nodes are returned themselves if there is no normalization with a kernel.
    """
    # Graphs for inference are left to onnxruntime, which joins normalizations with sums.
    if not trains(nodes):
        return nodes
    search = _LayerNormSearch(graph, nodes, types)
    forward = [search.forward(node) for node in search.nodes_of_norms()]
    if not forward:
        return nodes
    kernels = [kernel for norm in search.norms() for kernel in search.gradients(norm)]
    return needed_nodes(with_kernel_nodes(nodes, [*kernels, *forward]), search.outputs)


@dataclass(frozen=True)
class _LayerNorm:
    """The names of a normalization's values. `inverse` is 1 / deviation."""

    x: str
    scale: str
    mean: str
    inverse: str


@dataclass(frozen=True)
class _Products:
    """The names of products in a gradient, where `centred` is x - mean."""

    dy: str
    centred: str
    dn: str  # dy scale


class _LayerNormSearch(NodeSearch):
    """A search for gradients of LayerNormalization over the last axis, of float32 rows."""

    def nodes_of_norms(self) -> Iterator[onnx.NodeProto]:
        """Yield each normalization of rows of known sizes."""
        for node in self.nodes:
            is_norm = node.op_type == "LayerNormalization" and not node.domain
            if not is_norm or len(node.output) not in (1, 3):
                continue
            shape, *others = map(self.shape, filter(None, node.input))
            axis = attributes_of(node).get("axis", -1)
            fits = shape and all(node.output) and axis in (-1, len(shape) - 1)
            if fits and all(other == shape[-1:] for other in others):
                yield node

    def norms(self) -> Iterator[_LayerNorm]:
        """Yield each normalization of rows of known sizes whose statistics are results."""
        for node in self.nodes_of_norms():
            if len(node.output) == 3:
                yield _LayerNorm(*node.input[:2], *node.output[1:])

    def forward(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """Return the kernel of a normalization."""
        epsilon = attributes_of(node).get("epsilon", 1e-5)
        inputs = [name for name in node.input if name]
        return helper.make_node(
            "LayerNorm", inputs, node.output, node.name, domain=DOMAIN, epsilon=epsilon
        )

    def gradients(self, norm: _LayerNorm) -> Iterator[onnx.NodeProto]:
        """Yield the node of each gradient of a normalization."""
        for products in self._products(norm):
            for dx in self._input_gradients(norm, products):
                yield self._kernel(norm, products, dx)

    def _products(self, norm: _LayerNorm) -> Iterator[_Products]:
        differences = self.results(norm.x, "Sub", norm.mean)
        centred = [v for v in differences if self.operands(v, "Sub") == (norm.x, norm.mean)]
        for dn in self.results(norm.scale, "Mul"):
            others = {*self.operands(dn, "Mul")} - {norm.scale}
            dy = others.pop() if others else ""
            if self.shape(dy) == self.shape(norm.x):
                yield from (_Products(dy, name, dn) for name in centred)

    def _input_gradients(self, norm: _LayerNorm, products: _Products) -> Iterator[str]:
        """Yield the gradient of x: (dn - mean_dn - centred mean_product inverse^2) inverse."""
        for difference in self.results(products.dn, "Sub"):
            minuend, mean_dn = self.operands(difference, "Sub")
            is_centred = self._is_mean(mean_dn, norm, [products.dy], [products.dn])
            if minuend != products.dn or not is_centred:
                continue
            for total in self.results(difference, "Sub"):
                minuend, correction = self.operands(total, "Sub")
                if minuend == difference and self._is_correction(correction, norm, products):
                    yield from self.results(total, "Mul", norm.inverse)

    def _is_correction(self, value: str, norm: _LayerNorm, products: _Products) -> bool:
        """Return whether a value is centred mean_product inverse^2."""
        slopes = {*self.operands(value, "Mul")} - {products.centred}
        factors = self.operands(slopes.pop(), "Mul") if len(slopes) == 1 else ("", "")
        for mean_product, square in (factors, factors[::-1]):
            if self.operands(square, "Mul") == (norm.inverse, norm.inverse):
                unscaled = self.results(products.dy, "Mul", products.centred)
                scaled = self.results(products.dn, "Mul", products.centred)
                return self._is_mean(mean_product, norm, unscaled, scaled)
        return False

    def _is_mean(
        self, mean: str, norm: _LayerNorm, unscaled: Sequence[str], scaled: Sequence[str]
    ) -> bool:
        """Return whether a value is the mean over each row of one of the values `scaled`.

        The mean is a ReduceMean, or the product of one of the values `unscaled` with scale /
        columns.
        """
        if self.row_reduced(mean, "ReduceMean") in scaled:
            return True
        left, column = self.operands(mean, "MatMul")
        weights, axes = self.operands(column, "Unsqueeze")
        scale, columns = self.operands(weights, "Div")
        is_column = self.number(axes) in (1, -1) and self.number(columns) == self.shape(norm.x)[-1]
        return left in unscaled and scale == norm.scale and is_column

    def _kernel(self, norm: _LayerNorm, products: _Products, dx: str) -> onnx.NodeProto:
        inputs = [norm.x, products.dy, norm.scale, norm.mean, norm.inverse]
        results = [dx]
        dscale = next(self._scale_gradients(norm, products), "")
        dbias = next(self._bias_gradients(norm, products), "")
        if dscale or dbias:
            results += [dscale or f"{dx}/scale", dbias or f"{dx}/bias"]
        return helper.make_node("LayerNormGradient", inputs, results, dx, domain=DOMAIN)

    def _scale_gradients(self, norm: _LayerNorm, products: _Products) -> Iterator[str]:
        """Yield the sum of dy centred inverse over all rows, as a product of row and matrix."""
        for product in self.results(products.dy, "Mul", products.centred):
            for left, result in self._sums_of_rows(product, "Flatten"):
                row, _ = self.operands(left, "Reshape")
                if row == norm.inverse and len(self.shape(left)) == 1:
                    yield result

    def _bias_gradients(self, norm: _LayerNorm, products: _Products) -> Iterator[str]:
        """Yield the sum of dy over all rows."""
        for left, result in self._sums_of_rows(products.dy, "Reshape"):
            if self._is_row_of_ones(left):
                yield result
        for result in self.results(products.dy, "ReduceSum"):
            operand, axes = self.axes(result, "ReduceSum")
            leading = [*range(len(self.shape(norm.x)) - 1)]
            is_row = self.shape(result) == self.shape(norm.scale)
            if operand == products.dy and axes == leading and is_row:
                yield result

    def _sums_of_rows(self, value: str, op_type: str) -> Iterator[tuple[str, str]]:
        """Yield the left operand and the result of each product with the matrix of all rows.

        The matrix is the value itself, or the result of a node of this type.
        """
        shape = self.shape(value)
        for matrix in (value, *self.results(value, op_type)):
            if self.shape(matrix) == (math.prod(shape[:-1]), shape[-1]):
                for result in self.results(matrix, "MatMul"):
                    left, right = self.operands(result, "MatMul")
                    if right == matrix:
                        yield left, result

    def _is_row_of_ones(self, name: str) -> bool:
        tensor = self.tensors.get(name)
        if tensor is None or len(tensor.dims) != 1:
            return False
        return bool((numpy_helper.to_array(tensor) == 1).all())
