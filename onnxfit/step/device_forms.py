"""Forms of operators that a kind of device needs, whatever wrote the operators."""

from __future__ import annotations

import onnx_ir as ir

from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.graph.values import GraphBuilder


def use_forms_of_device(op: GraphBuilder) -> None:
    """Replace the nodes of a graph, in place, for which the builder's device has no kernel."""
    if op.device == "webgpu":
        _multiply_matrices_alone(op)


def _multiply_matrices_alone(op: GraphBuilder) -> None:
    """Write products with a vector as products of matrices, also inside of bodies.

    The kernel of onnxruntime's WebGPU provider takes matrices, and some versions fail on vectors.
    """
    for node in list(op.graph):
        for body in subgraphs_of(node):
            _multiply_matrices_alone(GraphBuilder(body, outer=op))
        if node.op_type != "MatMul" or node.domain != "":
            continue
        left, right = (value.shape is not None and len(value.shape) == 1 for value in _read(node))
        if not (left or right):
            continue
        with op.replacing(node) as replace:
            a, b = (op.wrap(value) for value in _read(node))
            product = op.MatMul(
                op.Unsqueeze(a, [0]) if left else a, op.Unsqueeze(b, [1]) if right else b
            )
            replace(op.Squeeze(product, [-2] * left + [-1] * right))


def _read(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node, none of which is optional."""
    return [value for value in node.inputs if value is not None]
