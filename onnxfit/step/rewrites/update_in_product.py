"""Compute a plain step of gradient descent inside the product that computes the gradient.

w - a b is one Gemm that adds w. So is w - lr (a b), once lr is multiplied into the smaller factor.
The gradient is as large as the weight; this saves writing and reading it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxfit.graph.index import elements_of
from onnxfit.step.rewrites.replacement import new_node, nodes_of_type, only_producer

__all__ = ["update_in_product"]


def update_in_product(graph: ir.Graph) -> None:
    """Turn Sub(w, Gemm(a, b)) into Gemm(a, b, w, alpha=-1), in place.

    The same applies to Sub(w, Mul(lr, Gemm(a, b))), with lr multiplied into the smaller of a and b.
    The gradient must have no other reader.
    """
    fused: list[ir.Node] = []
    for node in nodes_of_type(graph, "Sub"):
        fused += _fuse(graph, node)
    # In one call, because each call searches the outputs of the graph: one for each weight.
    graph.remove(fused, safe=True)


def _fuse(graph: ir.Graph, sub: ir.Node) -> list[ir.Node]:
    """Turn a Sub into a Gemm if possible; return the nodes that become unused."""
    w, gradient = sub.inputs
    mul = only_producer(gradient, "Mul")
    products = [only_producer(v, "Gemm") for v in (mul.inputs if mul is not None else [gradient])]
    gemm = next((product for product in products if product is not None), None)
    if w is None or gemm is None or w.shape != gemm.outputs[0].shape:
        return []
    if any(v is not None for v in gemm.inputs[2:]):
        return []
    factors = list(gemm.inputs[:2])
    new = []
    if mul is not None:
        smaller = int(np.argmin([elements_of(v) for v in factors]))
        rate = next(v for v in mul.inputs if v is not gemm.outputs[0])
        weighted = _weighted(mul, rate, factors[smaller], w)
        if weighted is None:
            return []
        new.append(weighted)
        factors[smaller] = weighted.outputs[0]
    scales = {
        "alpha": ir.AttrFloat32("alpha", -gemm.attributes.get_float("alpha", 1.0)),
        "beta": ir.AttrFloat32("beta", 1.0),
    }
    graph.insert_before(sub, new)
    # The node itself becomes the product: replacing it by another node would search all outputs of
    # the graph.
    sub.op_type = "Gemm"
    sub.name = gemm.name  # a product of the gradient, whose precision it has
    sub.resize_inputs(3)
    for i, value in enumerate([*factors, w]):
        sub.replace_input_with(i, value)
    sub.attributes.update({**gemm.attributes, **scales})
    sub.outputs[0].type = w.type
    sub.outputs[0].shape = w.shape
    return [node for node in (mul, gemm) if node is not None]


def _weighted(
    mul: ir.Node, rate: ir.Value | None, factor: ir.Value | None, w: ir.Value
) -> ir.Node | None:
    """Return the product of the learning rate and a factor that is smaller than the weight."""
    if rate is None or factor is None or rate.shape is None or rate.shape.rank():
        return None
    if elements_of(factor) >= elements_of(w):
        return None
    (before,) = mul.outputs
    weighted = new_node("Mul", [rate, factor], mul.name or "", factor)
    weighted.outputs[0].name, before.name = before.name, None
    return weighted
