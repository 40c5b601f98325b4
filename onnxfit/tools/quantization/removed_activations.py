"""Add the activation functions that onnxruntime's quantizer removes.

It removes a Relu, or a Clip from 0 to 6, wherever the integers that follow it begin at 0: they clip
the same numbers. Without the integers, nothing would clip them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxfit.graph.index import constant_of
from onnxfit.trainable.quantized.operators import CLIPPING, parameters_of
from onnxfit.trainable.quantized.parameters import Array, integer_limits

# Operators whose result is never negative
NON_NEGATIVE = {"Abs", "Exp", "HardSigmoid", "Relu", "Sigmoid", "Softmax", "Softplus", "Sqrt"}
# Operators whose result is not negative if no input is
COMBINING = {"Add", "Concat", "Max", "Mul"}
# Operators whose result is not negative if their first input is not
KEEPING = {
    "AveragePool",
    "Dropout",
    "Expand",
    "Flatten",
    "Gather",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "Identity",
    "MaxPool",
    "ReduceMax",
    "ReduceMean",
    "ReduceSum",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}
SIX = 6.0  # the upper end of ReLU6, the Clip of MobileNets


class NonNegativeValues:
    """The values of a graph that cannot be negative, found node by node in the graph's order.

    `cut` maps a value to the result of the activation that was added after it.
    """

    def __init__(self) -> None:
        self.cut: dict[ir.Value, ir.Value] = {}
        self._values: set[ir.Value | None] = set()

    def __contains__(self, value: ir.Value) -> bool:
        return value in self._values

    def add(self, value: ir.Value) -> None:
        """Add a value."""
        self._values.add(value)

    def add_outputs(self, node: ir.Node) -> None:
        """Add the outputs of a node, if they cannot be negative."""
        kind = node.op_type
        if (
            kind in NON_NEGATIVE
            or (kind in KEEPING and node.inputs[0] in self._values)
            or (kind in COMBINING and self._values.issuperset(node.inputs))
            or (kind == "Clip" and len(node.inputs) > 1 and _is_non_negative(node.inputs[1]))
        ):
            self._values.update(node.outputs)


def _is_non_negative(value: ir.Value | None) -> bool:
    bound = constant_of(value)
    return bound is not None and bool((bound >= 0).all())


def add_removed_activation(
    quantize: ir.Node, dequantize: ir.Node, non_negative: NonNegativeValues
) -> ir.Value | None:
    """Add a Relu or a Clip before the pair of nodes, if the pair took its place.

    - `quantize`, `dequantize`: the two nodes that round a value, still in the graph.
    - `non_negative`: the values before them that cannot be negative. The new value is added.

    Return the value that replaces the pair's output: the new node's output, or the pair's input.
    """
    value = quantize.inputs[0]
    ends = _ends(quantize)
    readers = [usage.node for usage in dequantize.outputs[0].uses()]
    if (
        value is None
        or value.producer() is None  # no layer computes it
        or value in non_negative
        or ends is None
        or ends[0] != 0
        or (readers and all(node.op_type in CLIPPING for node in readers))
    ):
        return value
    if value in non_negative.cut:
        return non_negative.cut[value]
    name = f"{value.name}/Relu"
    bounds: list[ir.Node] = []
    if np.isclose(ends[1], SIX, rtol=1e-5):
        bounds = [_constant(number, f"{name}/{number:g}", ends) for number in (0, SIX)]
    inputs = [value, *(node.outputs[0] for node in bounds)]
    added = ir.node("Clip" if bounds else "Relu", inputs, name=name, outputs=[ir.Value(name=name)])
    added.outputs[0].type, added.outputs[0].shape = value.type, value.shape
    assert quantize.graph is not None
    quantize.graph.insert_before(quantize, [*bounds, added])
    non_negative.add(added.outputs[0])
    non_negative.cut[value] = added.outputs[0]
    return added.outputs[0]


def _constant(number: float, name: str, like: Array) -> ir.Node:
    tensor = ir.tensor(np.array(number, like.dtype), name=name)
    return ir.node("Constant", [], {"value": tensor}, name=name, outputs=[ir.Value(name=name)])


def _ends(quantize: ir.Node) -> Array | None:
    """Return the least and the greatest float that its integers represent, None if unknown."""
    parameters = parameters_of(quantize)
    if parameters is None or parameters.scale.size != 1:
        return None
    return parameters.dequantized(np.array(integer_limits(parameters.element_type)))
