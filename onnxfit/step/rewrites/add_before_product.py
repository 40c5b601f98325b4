"""Add two matrices before a product, instead of adding two products with the same factor.

x W + s (x P) Q is x (W + s P Q). With P and Q of low rank, P Q costs less than (x P) Q if x has
more rows than columns. The sum needs no tensor as large as the result. A layer with a LoRA adapter
is such a sum in the forward pass, and again in the backward pass, where the factors are transposed.
The gradients of P and Q still take the products of low rank, and W gets no gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxfit.graph.index import constant_of, elements_of
from onnxfit.step.rewrites.replacement import new_node, nodes_of_type, producer_of, replace_node

__all__ = ["add_before_product"]

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
# Rows of x for each of its columns. With fewer, the sum of the matrices saves little or nothing.
MIN_ROWS = 2
# Bytes of a matrix that is an input of the graph, such as a frozen base that all graphs share. The
# sum would be in memory beside it from the forward to the backward pass.
MAX_INPUT_BYTES = 2**20
MICROSOFT = "com.microsoft"


class Product(NamedTuple):
    """scale * x M, where M is a matrix or its transpose.

    `transposes` says whether a Transpose and an attribute of the node transpose the matrix.
    """

    node: ir.Node
    x: ir.Value
    matrix: ir.Value
    transposes: tuple[bool, bool]
    scale: float

    @property
    def is_transposed(self) -> bool:
        return self.transposes[0] != self.transposes[1]


Sums = dict[tuple[object, ...], ir.Value]


def add_before_product(graph: ir.Graph) -> None:
    """Turn x W + (s x P) Q into x (W + s P Q) if x has many rows, in place.

    Each of the two products must have no other reader; x P may have.
    """
    sums: Sums = {}  # the sums of matrices so far: forward and backward pass share them
    for node in nodes_of_type(graph, "Add", "Sum"):
        terms = list(node.inputs)
        new: list[ir.Node] = []
        unused: list[ir.Node] = []
        for term in node.inputs:
            if term not in terms:  # the base of an earlier merge
                continue
            outer = _only_product(term)
            inner = _product(outer.x) if outer is not None else None
            if outer is None or inner is None:
                continue
            for other in terms:
                base = _only_product(other) if other is not term else None
                if base is None or not _can_merge(base, inner, outer):
                    continue
                new += _merged_nodes(base, inner, outer, sums)
                terms[terms.index(other)] = new[-1].outputs[0]
                terms.remove(term)
                unused += [base.node, outer.node]
                break
        if new:
            (out,) = node.outputs
            if len(terms) > 1:
                new.append(new_node("Sum", terms, f"{node.name}/Sum", out))
            replace_node(graph, node, new)
            graph.remove(unused, safe=True)


def _can_merge(base: Product, inner: Product, outer: Product) -> bool:
    """Return whether two products have the same factor x, and x has many rows."""
    (y,), (z,) = base.node.outputs, outer.node.outputs
    if base.x is not inner.x or base.scale != 1 or y.dtype not in FLOATS:
        return False
    if y.shape is None or y.shape != z.shape or not y.shape.is_static():
        return False
    if any(value is not None for node in (inner.node, outer.node) for value in node.inputs[2:]):
        return False
    scale = inner.scale * outer.scale
    if float(np.float32(scale)) != scale:  # Gemm's alpha has the precision of float32
        return False
    if not _may_be_added_to(base.matrix, y.dtype.itemsize):
        return False
    assert base.matrix.shape is not None
    columns = base.matrix.shape[int(base.is_transposed)]
    rows = math.prod(int(size) for size in y.shape.numpy()[:-1])
    return isinstance(columns, int) and rows >= MIN_ROWS * columns


def _may_be_added_to(matrix: ir.Value, itemsize: float) -> bool:
    """Return whether the sum with a matrix takes little memory and keeps its kernel."""
    producer = matrix.producer()
    if producer is not None and producer.op_type == "DequantizeLinear":
        return False  # onnxruntime has integer kernels for its product
    if not matrix.is_graph_input():
        return True
    return elements_of(matrix) * itemsize <= MAX_INPUT_BYTES


def _merged_nodes(base: Product, inner: Product, outer: Product, sums: Sums) -> list[ir.Node]:
    """Return the nodes that add the matrices and multiply x by their sum."""
    (y,) = base.node.outputs
    new = []
    first, second = inner, outer
    transposes = [inner.is_transposed, outer.is_transposed]
    if base.is_transposed:  # (P Q)' = Q' P'
        first, second = outer, inner
        transposes = [not outer.is_transposed, not inner.is_transposed]
    scale = inner.scale * outer.scale
    key = (base.matrix, first.matrix, second.matrix, *transposes, scale)
    if key not in sums:
        attributes = {"transA": int(transposes[0]), "transB": int(transposes[1]), "alpha": scale}
        matrices = [first.matrix, second.matrix, base.matrix]
        name = f"{y.name}/matrix"
        new.append(new_node("Gemm", matrices, name, base.matrix, attributes=attributes))
        sums[key] = new[-1].outputs[0]
    matrix = sums[key]
    if base.transposes[0]:
        assert matrix.shape is not None
        sizes, order = ir.Shape(matrix.shape.dims[::-1]), {"perm": [1, 0]}
        new.append(new_node("Transpose", [matrix], f"{y.name}/transposed", matrix, sizes, order))
        (matrix,) = new[-1].outputs
    factors = [base.node.inputs[0], matrix, *base.node.inputs[2:]]
    name, of = f"{y.name}/product", base.node
    product = new_node(of.op_type, factors, name, y, None, of.attributes, of.domain)
    return [*new, product]


def _only_product(value: ir.Value | None) -> Product | None:
    """Return the product that computes a value, if the value is used once."""
    if value is None or value.is_graph_output() or len(value.uses()) != 1:
        return None
    return _product(value, unscaled=True)


def _product(value: ir.Value, *, unscaled: bool = False) -> Product | None:
    """Return the product by a matrix that computes a value; None if another node does.

    - `unscaled`: whether the node itself must be a product, rather than a product times a number.
    """
    factor = 1.0
    if not unscaled:
        value, factor = _without_scale(value)
    node = value.producer()
    if node is None or (node.domain, node.op_type) not in (
        ("", "MatMul"), ("", "Gemm"), (MICROSOFT, "FusedMatMul"),
    ):  # fmt: skip
        return None
    if any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB")):
        return None
    x, matrix = node.inputs[:2]
    if x is None or matrix is None:
        return None
    source = _transposed(matrix)
    transposes = (source is not None, bool(node.attributes.get_int("transB", 0)))
    matrix = source if source is not None else matrix
    if matrix.shape is None or len(matrix.shape) != 2:
        return None
    scale = factor * node.attributes.get_float("alpha", 1.0)
    return Product(node, _without_identity(x), matrix, transposes, scale)


def _without_scale(value: ir.Value) -> tuple[ir.Value, float]:
    """Return the value that is multiplied by a constant number, and the number."""
    value = _without_identity(value)
    node = producer_of(value, "Mul")
    for x, number in () if node is None else (node.inputs, node.inputs[::-1]):
        factor = constant_of(number, 1)
        if x is not None and factor is not None and factor.size and x.shape == value.shape:
            return _without_identity(x), float(factor.item())
    return value, 1.0


def _without_identity(value: ir.Value) -> ir.Value:
    """Return the input of the Identity that copies a value, or else the value itself."""
    while (node := producer_of(value, "Identity")) is not None:
        assert node.inputs[0] is not None
        value = node.inputs[0]
    return value


def _transposed(matrix: ir.Value) -> ir.Value | None:
    """Return the matrix that a Transpose turns into this one."""
    node = producer_of(matrix, "Transpose")
    source = None if node is None else node.inputs[0]
    if node is None or source is None or source.shape is None or len(source.shape) != 2:
        return None
    return source if list(node.attributes.get_ints("perm", [1, 0])) == [1, 0] else None
