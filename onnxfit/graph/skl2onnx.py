"""Adapt graphs that skl2onnx writes to training: finite derivatives, constant preprocessing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from onnxfit.graph.index import NodeIndex

FLOAT = onnx.TensorProto.FLOAT
MIN_EXPONENT = -87  # e^87 and its derivative are finite in float32
LAYERS = {"MatMul", "Gemm"}  # those of skl2onnx
ARITHMETIC = {"Add", "Sub", "Mul", "Div"}


def bound_exponents(graph: onnx.GraphProto) -> None:
    """Bound x from below where a sigmoid is written as 1 / (1 + e^(-x)), in place.

    Then e^(-x) and its derivative stay finite. Below the bound, the sigmoid is nearly 0 in both
    cases.
    """
    producers = NodeIndex(list(graph.node)).producers
    numbers = {
        t.name: onnx.numpy_helper.to_array(t).item()
        for t in graph.initializer
        if t.data_type == FLOAT and np.prod(t.dims) == 1
    }
    for reciprocal in [n for n in graph.node if (n.op_type, n.domain) == ("Reciprocal", "")]:
        negation = _negation_in_sigmoid(reciprocal, producers, numbers)
        if negation is None:
            continue
        i = next(i for i, name in enumerate(negation.input) if name not in numbers)
        bounded = f"{negation.output[0]}/bounded"
        bound = f"{bounded}/least"
        tensor = onnx.numpy_helper.from_array(np.array(MIN_EXPONENT, np.float32), "value")
        nodes = [
            onnx.helper.make_node("Constant", [], [bound], value=tensor),
            onnx.helper.make_node("Max", [negation.input[i], bound], [bounded], name=bounded),
        ]
        position = list(graph.node).index(negation)
        for offset, node in enumerate(nodes):
            graph.node.insert(position + offset, node)
        negation.input[i] = bounded


def _negation_in_sigmoid(
    reciprocal: onnx.NodeProto,
    producers: Mapping[str, onnx.NodeProto],
    numbers: dict[str, float],
) -> onnx.NodeProto | None:
    """Return the node of -x if `reciprocal` is the last one of 1 / (1 + e^(-x)), else None."""
    node = reciprocal
    for op_type, number in (("Add", 1.0), ("Exp", None), ("Mul", -1.0)):
        name = next((name for name in node.input if name not in numbers), None)
        previous = None if name is None else producers.get(name)
        if previous is None or (previous.op_type, previous.domain) != (op_type, ""):
            return None
        others = [n for n in previous.input if number is None or numbers.get(n) != number]
        if len(others) != 1:
            return None
        node = previous
    return node


def fix_preprocessing(graph: onnx.GraphProto) -> None:
    """Make the numbers that scalers computed of their data constants, in place.

    They are the initializers that only arithmetic before the first layer uses.
    """
    after_layer: set[str] = set()  # values that depend on a layer
    # for each initializer: whether all its uses so far are arithmetic before the first layer
    only_before: dict[str, bool] = {}
    for node in graph.node:
        depends = bool(after_layer.intersection(node.input))
        before = node.op_type in ARITHMETIC and node.domain == "" and not depends
        for name in node.input:
            only_before[name] = only_before.get(name, True) and before
        if depends or (node.op_type in LAYERS and node.domain == ""):
            after_layer.update(node.output)
    inputs = {v.name for v in graph.input}
    fixed = [
        t
        for t in graph.initializer
        if t.data_type == FLOAT and only_before.get(t.name) and t.name not in inputs
    ]
    for tensor in fixed:
        graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
        graph.initializer.remove(tensor)
