"""Multiply by the slope of a Relu before the gradient of a pool is spread, not after it.

A pool often reads a Relu. The gradient of the pool is zero except at the maxima, where the Relu's
result is the pool's result. So the slope of the Relu is needed only at the maxima, a quarter of the
elements.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from onnxfit.graph import scopes
from onnxfit.step.rewrites.replacement import new_node, nodes_of_type, producer_of

__all__ = ["mask_before_unpool"]


class MaskedGradient(NamedTuple):
    """The gradient of a pool, times the slope of the Relu before it."""

    product: ir.Node
    slope: ir.Node
    pool: ir.Node
    reader: ir.Node  # its first input is the gradient before it is spread


def mask_before_unpool(graph: ir.Graph) -> None:
    """Turn Mul(MaxUnpool(dy), slope(x)) into MaxUnpool(Mul(dy, slope(y))), in place."""
    if not nodes_of_type(graph, "MaxUnpool"):
        return
    for node in nodes_of_type(graph, "Mul"):
        masked = _masked_gradient(node)
        if masked is None:
            continue
        product, slope, pool, reader = masked
        (dy, *_), y = reader.inputs, pool.outputs[0]
        assert dy is not None  # the gradient is a required input
        name, slope_of = product.name, slope.attributes
        small = new_node("HardSigmoid", [y], f"{name}/slope", dy, y.shape, slope_of)
        few = new_node("Mul", [dy, small.outputs[0]], f"{name}/maxima", dy, y.shape)
        graph.insert_before(reader, [small, few])
        reader.replace_input_with(0, few.outputs[0])
        spread = next(value for value in product.inputs if value is not slope.outputs[0])
        assert spread is not None
        product.outputs[0].replace_all_uses_with(spread)
        graph.remove(product, safe=True)


def _masked_gradient(product: ir.Node) -> MaskedGradient | None:
    if product.outputs[0].is_graph_output():
        return None
    a, b = product.inputs
    for spread, factor in ((a, b), (b, a)):
        slope = producer_of(factor, "HardSigmoid")
        reader = _unpool_reader(spread)
        pool = None if slope is None or reader is None else _pool_of(spread, slope.inputs[0])
        if slope is not None and reader is not None and pool is not None:
            return MaskedGradient(product, slope, pool, reader)
    return None


def _unpool_reader(spread: ir.Value | None) -> ir.Node | None:
    """Return the node that reads the gradient of a pool's result, to spread it."""
    flat = producer_of(spread, "Reshape")  # also the result of a MaxUnpool of one row
    unpool = producer_of(flat.inputs[0] if flat is not None else spread, "MaxUnpool")
    if unpool is None:
        return None
    row = producer_of(unpool.inputs[0], "Reshape") if flat is not None else None
    links = [spread, *(node.outputs[0] for node in (unpool, row) if node is not None)]
    if any(v is None or len(v.uses()) != 1 or v.is_graph_output() for v in links):
        return None
    return row or unpool


def _pool_of(spread: ir.Value | None, x: ir.Value | None) -> ir.Node | None:
    """Return the MaxPool of x whose gradient is `spread`, by the scope of that gradient."""
    producer = spread.producer() if spread is not None else None
    if producer is None or x is None:
        return None
    pools = (node for node, _ in x.uses() if node.op_type == "MaxPool" and node.domain == "")
    scope = (producer.name or "").rpartition("/")[0]
    return next((pool for pool in pools if scope == f"{scopes.GRADIENT}/{pool.name}"), None)
