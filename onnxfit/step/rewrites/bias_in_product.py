"""Add the bias of a dense layer inside its product.

x w + b is one Gemm. onnxruntime makes the same Gemm when it compiles a graph, but it checks and
infers the whole graph again after it has replaced nodes.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxfit.step.rewrites.replacement import nodes_of_type, only_producer

__all__ = ["bias_in_product"]

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def bias_in_product(graph: ir.Graph) -> None:
    """Turn Add(MatMul(x, w), b) of two matrices and a vector into Gemm(x, w, b), in place.

    The product must have no other reader.
    """
    fused: list[ir.Node] = []
    for add in nodes_of_type(graph, "Add"):
        a, b = add.inputs
        for product, bias in ((a, b), (b, a)):
            matmul = only_producer(product, "MatMul")
            if matmul is not None and _is_dense(matmul, bias):
                # The node itself becomes the product: a new node would need a search of all outputs
                # of the graph.
                add.op_type = "Gemm"
                add.resize_inputs(3)
                for i, value in enumerate((*matmul.inputs, bias)):
                    add.replace_input_with(i, value)
                fused.append(matmul)
                break
    graph.remove(fused, safe=True)


def _is_dense(matmul: ir.Node, bias: ir.Value | None) -> bool:
    """Return whether a MatMul multiplies two matrices, and the bias has an entry per column.

    A dequantized matrix is none of them: onnxruntime has integer kernels for its MatMul.
    """
    x, w = matmul.inputs
    if x is None or w is None or bias is None or bias.dtype not in FLOATS:
        return False
    if x.shape is None or w.shape is None or bias.shape is None:
        return False
    if (len(x.shape), len(w.shape), len(bias.shape)) != (2, 2, 1):
        return False
    columns = w.shape[1]
    if not isinstance(columns, int) or bias.shape[0] != columns:
        return False
    producers = (x.producer(), w.producer())
    return all(node is None or node.op_type != "DequantizeLinear" for node in producers)
