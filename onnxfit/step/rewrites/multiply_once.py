"""Multiply by one number instead of several.

The gradient of a mean of squares begins with 1, times the learning rate, times 1/n, times 2: four
scalars in four operators. In a small step, each costs as much as an operator on the whole batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxfit.step.rewrites.replacement import nodes_of_type

__all__ = ["multiply_once"]

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)


def multiply_once(graph: ir.Graph) -> None:
    """Turn a (b x) into (a b) x for numbers a and b, and 1 x into x, in place."""
    for node in nodes_of_type(graph, "Mul"):
        outer = _factor(node)
        if outer is None:
            continue
        number, x = outer
        before = x.producer()
        inner = _factor(before) if before is not None and _used_once(x) else None
        if inner is not None and inner[1].shape == x.shape:
            product, limits = float(number) * float(inner[0]), np.finfo(number.dtype)
            if not float(limits.tiny) <= abs(product) <= float(limits.max):
                continue
            number, x = number.dtype.type(product), inner[1]
            tensor = ir.tensor(number)
            constant = ir.Value(
                name=f"{node.outputs[0].name}/number",
                shape=ir.Shape(()),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            graph.register_initializer(constant)
            node.replace_input_with(0, constant)
            node.replace_input_with(1, x)
        (out,) = node.outputs
        if (
            number == 1
            and out.shape is not None
            and out.shape == x.shape
            and not out.is_graph_output()
        ):
            out.replace_all_uses_with(x)
            graph.remove(node, safe=True)


def _used_once(value: ir.Value) -> bool:
    """Whether one node reads a value, apart from nodes that are about to be removed."""
    needing = [
        node
        for node, _ in value.uses()
        if any(out.uses() or out.is_graph_output() for out in node.outputs)
    ]
    return len(needing) == 1 and not value.is_graph_output()


def _factor(node: ir.Node) -> tuple[Any, ir.Value] | None:
    """Return the number by which a node multiplies, a NumPy scalar, and its other factor."""
    if node.op_type != "Mul" or node.domain != "":
        return None
    a, b = node.inputs
    for constant, x in ((a, b), (b, a)):
        tensor = (
            constant.const_value if constant is not None and not constant.is_graph_input() else None
        )
        if (
            tensor is not None
            and not tensor.shape.rank()
            and tensor.dtype in FLOATS
            and x is not None
        ):
            return tensor.numpy()[()], x
    return None
