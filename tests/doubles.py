"""Models in float64, whose rounding hides no error of a gradient."""

from __future__ import annotations

import numpy as np
import onnx

FLOAT, DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
SETTINGS = {"scales", "roi"}  # of Resize: they have no gradient, and must stay float32


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float64."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _to_double(copy.graph)
    return copy


def _to_double(graph: onnx.GraphProto) -> None:
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == FLOAT and value.name not in SETTINGS:
            value.type.tensor_type.elem_type = DOUBLE
    for tensor in graph.initializer:
        if tensor.data_type == FLOAT and tensor.name not in SETTINGS:
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(
                    onnx.numpy_helper.to_array(tensor).astype(np.float64), tensor.name
                )
            )
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            zero = onnx.helper.make_tensor("zero", DOUBLE, [1], [0.0])
            node.attribute.append(onnx.helper.make_attribute("value", zero))
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i == FLOAT:
                attribute.i = DOUBLE
            if attribute.HasField("t") and attribute.t.data_type == FLOAT:
                attribute.t.CopyFrom(
                    onnx.numpy_helper.from_array(
                        onnx.numpy_helper.to_array(attribute.t).astype(np.float64)
                    )
                )
            if attribute.HasField("g"):
                _to_double(attribute.g)
