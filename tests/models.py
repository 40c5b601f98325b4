"""Small models that several tests train."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.helper as oh
import onnx.parser
from onnx.numpy_helper import from_array


def linear(
    features: int = 1, outputs: int = 1, w: float = 0.0, b: float | None = None, *, opset: int = 17
) -> onnx.ModelProto:
    """y = x @ w (+ b)."""
    initializers = [from_array(np.full((features, outputs), w, np.float32), "w")]
    nodes = [oh.make_node("MatMul", ["x", "w"], ["y" if b is None else "s"])]
    if b is not None:
        initializers.append(from_array(np.full(outputs, b, np.float32), "b"))
        nodes.append(oh.make_node("Add", ["s", "b"], ["y"]))
    return _model(nodes, {"x": ("N", features)}, {"y": ("N", outputs)}, initializers, opset)


def mlp(
    sizes: tuple[int, ...] = (4, 8, 3), activation: str = "Tanh", seed: int = 0, opset: int = 17
) -> onnx.ModelProto:
    """Dense layers `fc0`, `fc1`, … with an activation between them; the output is raw."""
    rng = np.random.default_rng(seed)
    nodes, initializers, name = [], [], "x"
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        initializers.append(
            from_array(
                (rng.normal(size=(fan_in, fan_out)) / np.sqrt(fan_in)).astype(np.float32),
                f"fc{i}.weight",
            )
        )
        initializers.append(from_array(np.zeros(fan_out, np.float32), f"fc{i}.bias"))
        last = i == len(sizes) - 2
        nodes.append(
            oh.make_node(
                "Gemm",
                [name, f"fc{i}.weight", f"fc{i}.bias"],
                ["y" if last else f"h{i}"],
                name=f"fc{i}",
            )
        )
        if not last:
            nodes.append(oh.make_node(activation, [f"h{i}"], [f"a{i}"], name=f"act{i}"))
        name = f"a{i}"
    return _model(nodes, {"x": ("N", sizes[0])}, {"y": ("N", sizes[-1])}, initializers, opset)


def two_outputs() -> onnx.ModelProto:
    """a = x·u, b = x·v, and z = x·t that nobody needs to train."""
    return onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        two (float[N, 1] x) => (float[N, 1] a, float[N, 1] b, float[N, 1] z)
        <float[1, 1] u = {1}, float[1, 1] v = {2}, float[1, 1] t = {3}> { a = MatMul(x, u)  b = MatMul(x, v)  z = MatMul(x, t) }"""
    )


def two_inputs() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        two (float[N, 1] left, float[N, 1] right) => (float[N, 1] y)
        <float[1, 1] u = {0}, float[1, 1] v = {0}> { a = MatMul(left, u)  b = MatMul(right, v)  y = Add(a, b) }"""
    )


def convolutional(batch_norm: bool = True, dropout: float = 0.0, seed: int = 0) -> onnx.ModelProto:
    """Conv - BatchNormalization - Relu - MaxPool - Dropout - Gemm on 1×8×8 images, 3 classes."""
    rng = np.random.default_rng(seed)
    initializers = [
        from_array(rng.normal(size=(4, 1, 3, 3)).astype(np.float32) / 3, "conv.weight"),
        from_array(np.zeros(4, np.float32), "conv.bias"),
        from_array(rng.normal(size=(64, 3)).astype(np.float32) / 8, "fc.weight"),
        from_array(np.zeros(3, np.float32), "fc.bias"),
    ]
    nodes = [oh.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["c"], pads=[1, 1, 1, 1])]
    name = "c"
    if batch_norm:
        for part, value in (("scale", 1), ("bias", 0), ("mean", 0), ("var", 1)):
            initializers.append(from_array(np.full(4, value, np.float32), f"bn.{part}"))
        nodes.append(
            oh.make_node(
                "BatchNormalization", ["c", "bn.scale", "bn.bias", "bn.mean", "bn.var"], ["n"]
            )
        )
        name = "n"
    nodes += [
        oh.make_node("Relu", [name], ["r"]),
        oh.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    name = "p"
    if dropout:
        initializers.append(from_array(np.float32(dropout), "ratio"))
        nodes.append(oh.make_node("Dropout", ["p", "ratio"], ["d"]))
        name = "d"
    nodes += [
        oh.make_node("Flatten", [name], ["f"]),
        oh.make_node("Gemm", ["f", "fc.weight", "fc.bias"], ["logits"]),
    ]
    return _model(nodes, {"x": ("N", 1, 8, 8)}, {"logits": ("N", 3)}, initializers, 17)


def _model(nodes, inputs, outputs, initializers, opset: int) -> onnx.ModelProto:
    def info(name: str, shape: tuple[int | str, ...]) -> onnx.ValueInfoProto:
        return oh.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    graph = oh.make_graph(
        nodes,
        "model",
        [info(*i) for i in inputs.items()],
        [info(*o) for o in outputs.items()],
        initializers,
    )
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model
