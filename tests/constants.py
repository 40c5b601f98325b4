"""Networks whose weights are in Constant nodes, and their training."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import onnxfit
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.training.lineage import write_lineage


def with_constants(model: onnx.ModelProto, names: Collection[str] | None = None) -> onnx.ModelProto:
    """The same network with Constant nodes instead of the named initializers, or of all."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    chosen = [t for t in model.graph.initializer if names is None or t.name in names]
    for i, tensor in enumerate(chosen):
        node = helper.make_node("Constant", [], [tensor.name], f"constant_{i}", value=tensor)
        graph.node.insert(i, node)
        graph.initializer.remove(next(t for t in graph.initializer if t.name == tensor.name))
    return copy


def structure(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the numbers of its tensors, and without what made them."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    write_lineage(bare, None)
    tensors = list(bare.graph.initializer)
    for attribute in (a for node in nodes_of(bare.graph) for a in node.attribute):
        tensors += [attribute.t] if attribute.HasField("t") else []
        attribute.ClearField("floats")
    for tensor in tensors:
        for field in ("raw_data", "float_data", "double_data"):
            tensor.ClearField(field)
    return bare


def constants_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The arrays and lists of floats in Constant nodes, by the names of the nodes' outputs."""
    arrays = {}
    for node in nodes_of(model.graph):
        if node.op_type == "Constant":
            attribute = node.attribute[0]
            if attribute.name == "value":
                arrays[node.output[0]] = numpy_helper.to_array(attribute.t)
            elif attribute.name == "value_floats":
                arrays[node.output[0]] = np.array(attribute.floats, np.float32)
    return arrays


def batch_for(model: onnx.ModelProto, rows: int = 6) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def array(value: onnx.ValueInfoProto) -> np.ndarray:
        sizes = [d.dim_value or rows for d in value.type.tensor_type.shape.dim]
        return rng.standard_normal(sizes).astype(np.float32)

    x = {value.name: array(value) for value in model.graph.input}
    y = {value.name: array(value) for value in model.graph.output}
    return x, y


def trained(source: onnx.ModelProto | Path, **settings: Any) -> onnxfit.Trainer:
    model = onnx.load(source) if isinstance(source, Path) else source
    losses = {value.name: "mean_squared_error" for value in model.graph.output}
    trainer = onnxfit.Trainer(source, loss=losses, **{"optimizer": "adam", **settings})
    x, y = batch_for(model)
    trainer.fit(x, y, epochs=3, batch_size=2, verbose=0)
    return trainer
