"""Add the bias of a dense layer inside its product.

x w + b is one Gemm. onnxruntime makes the same Gemm when it compiles a graph, but it checks and
infers the whole graph again after it has replaced nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxfit.graph.match import Equation
from onnxfit.step.rewrites.replacement import Bindings, RewriteRule, apply_rule, is_read_once

__all__ = ["bias_in_product"]

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def bias_in_product(graph: ir.Graph) -> None:
    """Turn Add(MatMul(x, w), b) of two matrices and a vector into Gemm(x, w, b), in place.

    The product must have no other reader.
    """
    apply_rule(BiasInProduct(), graph)


class BiasInProduct(RewriteRule):
    equations: Sequence[Equation] = (
        ("sum", ("Add", "product", "bias")),
        ("product", ("MatMul", "x", "w")),
    )

    def check(self, graph: ir.Graph, found: Bindings) -> str:
        if not is_read_once(found["product"]):
            return "the product has another reader"
        x, w, bias = (found[name] for name in ("x", "w", "bias"))
        if bias.dtype not in FLOATS:
            return "Gemm is not used for this element type"
        if x.shape is None or w.shape is None or bias.shape is None:
            return "a shape is not known"
        if (len(x.shape), len(w.shape), len(bias.shape)) != (2, 2, 1):
            return "the factors are not matrices, or the bias is not a vector"
        if not isinstance(w.shape[1], int) or bias.shape[0] != w.shape[1]:
            return "the bias does not have an entry for each column"
        producers = (x.producer(), w.producer())
        if any(node is not None and node.op_type == "DequantizeLinear" for node in producers):
            return "onnxruntime has integer kernels for the product of a dequantized matrix"
        return ""

    def rewrite(self, graph: ir.Graph, found: Bindings) -> Sequence[ir.Node]:
        add, matmul = found["sum"].producer(), found["product"].producer()
        assert add is not None
        assert matmul is not None
        # The node itself becomes the product: a new node would need a search of all outputs of the
        # graph.
        add.op_type = "Gemm"
        add.resize_inputs(3)
        for i, name in enumerate(("x", "w", "bias")):
            add.replace_input_with(i, found[name])
        return [matmul]
