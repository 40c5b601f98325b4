"""Graphs as exporters write them: equal tensors once, zero biases not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.helper as oh
import onnxruntime
from onnx.numpy_helper import from_array


def model_of(
    nodes: Sequence[onnx.NodeProto],
    tensors: Mapping[str, np.ndarray],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Mapping[str, Sequence[int | str]],
    *,
    opset: int = 17,
    integers: Sequence[str] = (),
) -> onnx.ModelProto:
    def info(name: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
        kind = onnx.TensorProto.INT64 if name in integers else onnx.TensorProto.FLOAT
        return oh.make_tensor_value_info(name, kind, shape)

    graph = oh.make_graph(
        nodes, "g", [info(*i) for i in inputs.items()], [info(*o) for o in outputs.items()],
        [from_array(array, name) for name, array in tensors.items()],
    )  # fmt: skip
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def node(op_type: str, inputs: str, outputs: str, name: str = "", **attributes) -> onnx.NodeProto:
    return oh.make_node(op_type, inputs.split(), outputs.split(), name=name, **attributes)


def noted(proto: onnx.NodeProto, **notes: str) -> onnx.NodeProto:
    """With notes of torch's exporter: `modules`, `classes`, `rule`."""
    keys = {
        "modules": "pkg.torch.onnx.name_scopes",
        "classes": "pkg.torch.onnx.class_hierarchy",
        "rule": "pkg.onnxscript.rewriter.rule_name",
    }
    for name, value in notes.items():
        proto.metadata_props.add(key=keys[name], value=value)
    return proto


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32) / 2


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def fresh_network() -> onnx.ModelProto:
    """Linear `a`, LayerNorm `n1`, Linear `b`, LayerNorm `n2` and Linear `head`, as exported before
    training: one tensor of zeros, one of ones, and no bias of `a`.
    """
    nodes = [
        node("Identity", "n1.weight", "n2.weight"),
        node("Gemm", "x a.weight", "a", transB=1),
        node("LayerNormalization", "a n1.weight b.bias", "n1", name="/n1/LayerNormalization"),
        node("MatMul", "n1 b.weight", "p"),
        node("Add", "p b.bias", "b", name="/b/Add"),
        node("Relu", "b", "r"),
        node("Add", "n1 r", "s"),
        node("LayerNormalization", "s n2.weight b.bias", "n2", name="/n2/LayerNormalization"),
        node("Gemm", "n2 head.weight head.bias", "y", transB=1),
    ]
    tensors = {
        "a.weight": random(8, 6), "n1.weight": ones(8), "b.bias": zeros(8), "b.weight": random(8, 8),
        "head.weight": random(3, 8), "head.bias": random(3),
    }  # fmt: skip
    return model_of(nodes, tensors, {"x": ("N", 6)}, {"y": ("N", 3)})


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def names_of(model: onnx.ModelProto) -> set[str]:
    return {tensor.name for tensor in model.graph.initializer}


def array_of(model: onnx.ModelProto, name: str) -> np.ndarray:
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
    return onnx.numpy_helper.to_array(tensor)
