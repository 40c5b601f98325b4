"""LayerNormalization and its gradient as one operator each.

onnxruntime 1.19 adds up the numbers of a row one by one. For the gradient, the operators of ONNX go
through the whole batch eleven times: seven elementwise operators and four sums. The kernels go
through each row two or three times, while the row is in the cache.

The nodes are found by what they compute: those of the rule in `gradients/rules/normalization.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import onnx

from onnxfit.graph.index import attributes_of
from onnxfit.graph.match import Equation, Pattern
from onnxfit.kernels.search import (
    KernelRule,
    NodeSearch,
    ResultType,
    make_node,
    needed_nodes,
    trains,
    with_kernel_nodes,
)


def replace_layer_norms(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with kernels for LayerNormalizations and their gradients.

    The nodes are returned themselves if there is no normalization with a kernel.
    """
    # Graphs for inference are left to onnxruntime, which joins normalizations with sums.
    if not trains(nodes):
        return nodes
    search = NodeSearch(graph, nodes, types)
    norms = list(_nodes_of_norms(search))
    if not norms:
        return nodes
    kernels: list[onnx.NodeProto] = []
    for node in norms:
        if len(node.output) == 3:  # its statistics are results
            known = dict(
                zip(("x", "scale", "mean", "inverse"), (*node.input[:2], *node.output[1:]))
            )
            kernels += search.rewritten(LayerNormGradient(), known)
    kernels += map(_forward, norms)
    return needed_nodes(with_kernel_nodes(nodes, kernels), search.outputs)


def _nodes_of_norms(graph: NodeSearch) -> Iterator[onnx.NodeProto]:
    """Yield each normalization over the last axis, of float32 rows of known sizes."""
    for node in graph.nodes:
        is_norm = node.op_type == "LayerNormalization" and not node.domain
        if not is_norm or len(node.output) not in (1, 3):
            continue
        shape, *others = map(graph.shape, filter(None, node.input))
        axis = attributes_of(node).get("axis", -1)
        fits = shape and all(node.output) and axis in (-1, len(shape) - 1)
        if fits and all(other == shape[-1:] for other in others):
            yield node


def _forward(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return the kernel of a normalization."""
    epsilon = attributes_of(node).get("epsilon", 1e-5)
    inputs = [name for name in node.input if name]
    return make_node("LayerNorm", inputs, node.output, node.name, epsilon=epsilon)


class LayerNormGradient(KernelRule):
    """The gradient of x: (dn - mean_dn - centred mean_product inverse^2) inverse.

    x, the scale, the mean and inverse = 1 / deviation are known from the normalization.
    """

    result = "dx"
    equations: Sequence[Equation] = (
        ("centred", ("Sub", "x", "mean")),
        ("dn", ("Mul", "dy", "scale")),
        ("difference", ("Sub", "dn", "mean dn")),
        ("dx", ("Mul", ("Sub", "difference", ("Mul", "centred", "slope")), "inverse")),
        ("slope", ("Mul", "mean product", ("Mul", "inverse", "inverse"))),
    )

    def check(self, graph: NodeSearch, found: Mapping[str, str]) -> str:
        if graph.shape(found["dy"]) != graph.shape(found["x"]):
            return "the gradient is repeated along an axis"
        if not _is_mean(graph, found, "mean dn", "dy", "dn"):
            return "another value than the mean of the gradient is subtracted"
        unscaled: Pattern = ("Mul", "dy", "centred")
        if not _is_mean(graph, found, "mean product", unscaled, ("Mul", "dn", "centred")):
            return "the slope is not that of the deviation"
        return ""

    def rewrite(self, graph: NodeSearch, found: Mapping[str, str]) -> onnx.NodeProto:
        inputs = [found[name] for name in ("x", "dy", "scale", "mean", "inverse")]
        dx = found["dx"]
        results = [dx]
        dscale, dbias = _scale_gradient(graph, found), _bias_gradient(graph, found)
        if dscale or dbias:
            results += [dscale or f"{dx}/scale", dbias or f"{dx}/bias"]
        return make_node("LayerNormGradient", inputs, results, dx)


def _is_mean(
    graph: NodeSearch, found: Mapping[str, str], mean: str, unscaled: Pattern, scaled: Pattern
) -> bool:
    """Return whether a value is the mean over each row of `scaled`, which is `unscaled` scale.

    It is a ReduceMean, or the product of `unscaled` with scale / columns.
    """
    reduced: Equation = (mean, ("ReduceMean", scaled, "axes"))
    if any(graph.matcher.solutions([reduced], found)):
        return bool(graph.row_reduced(found[mean], "ReduceMean"))
    weights: Pattern = ("Unsqueeze", ("Div", "scale", "columns"), "axes")
    size = graph.shape(found["x"])[-1]
    return any(
        graph.number(each["axes"]) in (1, -1) and graph.number(each["columns"]) == size
        for each in graph.matcher.solutions([(mean, ("MatMul", unscaled, weights))], found)
    )


def _scale_gradient(graph: NodeSearch, found: Mapping[str, str]) -> str:
    """Return the sum of dy centred inverse over all rows, a product of row and matrix; or ""."""
    product: Pattern = ("Mul", "dy", "centred")
    for matrix in (product, ("Flatten", product)):
        equations: list[Equation] = [
            ("matrix", matrix),
            ("result", ("MatMul", "row", "matrix")),
            ("row", ("Reshape", "inverse", "shape of row")),
        ]
        for each in graph.matcher.solutions(equations, found):
            if _has_all_rows(graph, found, each["matrix"]) and len(graph.shape(each["row"])) == 1:
                return each["result"]
    return ""


def _bias_gradient(graph: NodeSearch, found: Mapping[str, str]) -> str:
    """Return the sum of dy over all rows, or ""."""
    for matrix in ("dy", ("Reshape", "dy", "shape of matrix")):
        equations: list[Equation] = [
            ("matrix", matrix),
            ("result", ("MatMul", "ones", "matrix")),
        ]
        for each in graph.matcher.solutions(equations, found):
            if _has_all_rows(graph, found, each["matrix"]) and graph.is_row_of_ones(each["ones"]):
                return each["result"]
    for result in graph.results(found["dy"], "ReduceSum"):
        operand, axes = graph.axes(result, "ReduceSum")
        leading = [*range(len(graph.shape(found["x"])) - 1)]
        is_row = graph.shape(result) == graph.shape(found["scale"])
        if operand == found["dy"] and axes == leading and is_row:
            return result
    return ""


def _has_all_rows(graph: NodeSearch, found: Mapping[str, str], matrix: str) -> bool:
    """Return whether a matrix has the rows of x."""
    shape = graph.shape(found["x"])
    return graph.shape(matrix) == (math.prod(shape[:-1]), shape[-1])
