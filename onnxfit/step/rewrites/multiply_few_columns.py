"""Compute the gradient of a matrix with few columns as the transpose of one with few rows.

onnxruntime's product a' b is slow if b has fewer columns than its kernel computes at once. (b' a)'
has the same numbers. The gradient of A of a LoRA adapter is such a product: a has the columns of
the layer's input, and b as many as the rank.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxfit.step.rewrites.replacement import new_node, nodes_of_type, replace_node

__all__ = ["multiply_few_columns"]

COLUMNS_AT_ONCE = 16  # of the kernel
# In a smaller product, the Transpose takes longer than it saves.
MIN_ELEMENTS = 2**14


def multiply_few_columns(graph: ir.Graph) -> None:
    """Turn Gemm(a, b, transA=1) into Transpose(Gemm(b, a, transA=1)), in place."""
    for node in nodes_of_type(graph, "Gemm"):
        (out,) = node.outputs
        if out.shape is not None and _has_few_columns(node):
            a, b = node.inputs[:2]
            rows, columns = out.shape
            sizes = ir.Shape((columns, rows))
            product = new_node("Gemm", [b, a], f"{node.name}/Gemm", out, sizes, node.attributes)
            order = {"perm": [1, 0]}
            name = f"{node.name}/Transpose"
            transposed = new_node("Transpose", product.outputs, name, out, attributes=order)
            replace_node(graph, node, [product, transposed])


def _has_few_columns(node: ir.Node) -> bool:
    """Return whether a Gemm multiplies a large transposed matrix by one of few columns."""
    transposed = [bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB")]
    if transposed != [True, False] or any(value is not None for value in node.inputs[2:]):
        return False
    a, b = (value.shape if value is not None else None for value in node.inputs[:2])
    if a is None or b is None or not (a.is_static() and b.is_static()):
        return False
    rows, left = a.numpy()
    return b.numpy()[1] < COLUMNS_AT_ONCE <= left and rows * left >= MIN_ELEMENTS
