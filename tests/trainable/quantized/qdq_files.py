"""Integer models made by hand, without a quantization tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
from onnx.numpy_helper import from_array

from tests.trainable.quantized.graphs import tensors_of

RANGES = {np.int8: (-128, 127), np.uint8: (0, 255), np.int16: (-32768, 32767)}


def symmetric_scale(values: np.ndarray, bits: int = 8) -> float:
    """The scale at which the largest absolute value becomes the largest integer."""
    return float(np.abs(values).max() / (2 ** (bits - 1) - 1))


def with_integers(
    model: onnx.ModelProto,
    weights: Mapping[str, float] = {},
    activations: Mapping[str, float] = {},
    *,
    dtype: Any = np.int8,
    nodes: Mapping[str, str] = {},
) -> onnx.ModelProto:
    """A copy whose `weights` are integers behind DequantizeLinear, and whose `activations` pass
    QuantizeLinear and DequantizeLinear: name -> scale, all of zero point 0.

    - `dtype`: the type of the integers.
    - `nodes`: weight -> the only node that reads its integers; other nodes go on reading the floats.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    tensors = tensors_of(model)
    low, high = RANGES[dtype]
    new = []
    for name, scale in {**weights, **activations}.items():
        graph.initializer.append(from_array(np.float32(scale), f"{name}.scale"))
        graph.initializer.append(from_array(dtype(0), f"{name}.zero"))
    for name in weights:
        scale = np.float32(weights[name])
        integers = np.clip(np.rint(tensors[name] / scale), low, high).astype(dtype)
        graph.initializer.append(from_array(integers, f"{name}.integers"))
        inputs = [f"{name}.integers", f"{name}.scale", f"{name}.zero"]
        new.append(oh.make_node("DequantizeLinear", inputs, [f"{name}.float"], f"{name}.dq"))
        rename_inputs(graph, name, f"{name}.float", nodes.get(name))
    outputs = {value.name for value in graph.output}
    for name in activations:
        raw, rounded = name, f"{name}.rounded"
        if name in outputs:  # the output keeps its name, as with onnxruntime's tool
            raw, rounded = f"{name}.raw", name
            for node in graph.node:
                node.output[:] = [raw if n == name else n for n in node.output]
        rename_inputs(graph, name, rounded)
        parameters = [f"{name}.scale", f"{name}.zero"]
        new += [
            oh.make_node("QuantizeLinear", [raw, *parameters], [f"{name}.q"], f"{name}.q"),
            oh.make_node("DequantizeLinear", [f"{name}.q", *parameters], [rounded], f"{name}.dq"),
        ]
    graph.node.extend(new)
    sort(graph)
    return copy


def rename_inputs(graph: onnx.GraphProto, old: str, new: str, only: str | None = None) -> None:
    for node in graph.node:
        if only in (None, node.name):
            node.input[:] = [new if name == old else name for name in node.input]


def sort(graph: onnx.GraphProto) -> None:
    """Put every node behind those that it reads, in place."""
    known = {t.name for t in graph.initializer} | {v.name for v in graph.input} | {""}
    waiting = [onnx.NodeProto.FromString(n.SerializeToString()) for n in graph.node]
    del graph.node[:]
    while waiting:
        node = next(n for n in waiting if known.issuperset(n.input))
        waiting.remove(node)
        known.update(node.output)
        graph.node.append(node)


def decibels(x: np.ndarray, rounded: np.ndarray) -> float:
    x, rounded = x.astype(np.float64), rounded.astype(np.float64)
    return float(10 * np.log10((x**2).sum() / ((x - rounded) ** 2).sum()))
