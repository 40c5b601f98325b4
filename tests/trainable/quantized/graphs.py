"""Models that the tests quantize, and what onnxruntime computes with them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx.numpy_helper import from_array, to_array

OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {},
    "uint8": {"weights": "uint8", "activations": "uint8"},
    "one scale": {"per_channel": False, "activations": "uint8"},
    "int4": {"weights": "int4"},
    "uint4": {"weights": "uint4", "activations": "uint8"},
    "entropy": {"method": "entropy"},
    "percentile": {"method": "percentile"},
}
WEIGHTS_ONLY: dict[str, dict[str, Any]] = {
    f"{kind}{'' if channels else ' in one scale'}": {
        "activations": None,
        "weights": kind,
        "per_channel": channels,
    }
    for kind in ("int8", "uint8", "int4", "uint4")
    for channels in (True, False)
}


def parsed(body: str, opset: int = 17, **shapes: Any) -> onnx.ModelProto:
    """A model with random weights of these shapes."""
    ir_version = 4 if opset < 10 else 8
    model = onnx.parser.parse_model(
        f'<ir_version: {ir_version}, opset_import: ["": {opset}]> {body}'
    )
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape) / 3 if isinstance(shape, tuple) else shape
        model.graph.initializer.append(from_array(np.asarray(values, np.float32), name))
    return model


def rows(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def network(opset: int = 17) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A convolution, a BatchNormalization, pooling and a dense layer."""
    model = parsed(
        """g (float[N, 2, 6, 6] x) => (float[N, 3] y) {
        c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, kernel)
        n = BatchNormalization(c, scale, shift, mean, variance)  r = Relu(n)
        p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)  f = Flatten(p)
        y = Gemm(f, dense, bias) }""",
        opset,
        kernel=(4, 2, 3, 3),
        scale=[1, 2, 0.5, 1],
        shift=(4,),
        mean=(4,),
        variance=[1, 2, 3, 4],
        dense=(36, 3),
        bias=(3,),
    )
    for node in model.graph.node:
        node.name = f"{node.op_type.lower()}_{node.output[0]}"
    return model, {"x": rows(40, 2, 6, 6)}


def two_inputs() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = parsed(
        """g (float[N, 4] a, float[N, 3] b) => (float[N, 2] y, float[N, 5] h)
        { p = MatMul(a, u)  q = MatMul(b, v)  h = Add(p, q)  r = Relu(h)  y = MatMul(r, w) }""",
        u=(4, 5),
        v=(3, 5),
        w=(5, 2),
    )
    return model, {"a": rows(40, 4), "b": rows(40, 3, seed=2)}


def attention() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = parsed(
        """g (int64[N, T] x) => (float[N, T, 3] y) {
        e = Gather(table, x)  l = LayerNormalization(e, scale, shift)
        q = MatMul(l, wq)  k = MatMul(l, wk)  kt = Transpose<perm = [0, 2, 1]>(k)
        a = MatMul(q, kt)  s = Softmax(a)  o = MatMul(s, l)  y = MatMul(o, wo) }""",
        21,
        table=(9, 8),
        scale=(8,),
        shift=(8,),
        wq=(8, 8),
        wk=(8, 8),
        wo=(8, 3),
    )
    return model, {"x": np.random.default_rng(0).integers(0, 9, (40, 5))}


def transposed_convolution() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = parsed(
        "g (float[N, 4, 3, 3] x) => (float[N, 6, 5, 5] y) { y = ConvTranspose<group = 2>(x, w, b) }",
        w=(4, 3, 3, 3),
        b=(6,),
    )
    return model, {"x": rows(40, 4, 3, 3)}


def branch() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The branches of an If read a value of the main graph, and one of its weights."""
    model = parsed(
        """g (float[N, 4] x, bool c) => (float[N, 4] y) { h = MatMul(x, u)
        y = If(c) <then_branch = t () => (float[N, 4] a) { a = Relu(h) },
        else_branch = e () => (float[N, 4] b) { b = MatMul(h, u) }> }""",
        u=(4, 4),
    )
    return model, {"x": rows(40, 4), "c": np.array(True)}


def call_of_function() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = parsed(
        """g (float[N, 4] x) => (float[N, 5] y) { y = own.f(x, u) }
        <domain: "own", opset_import: ["": 17]> f (a, b) => (c) { d = MatMul(a, b)  c = Relu(d) }""",
        u=(4, 5),
    )
    model.opset_import.append(onnx.helper.make_opsetid("own", 1))
    return model, {"x": rows(40, 4)}


def old_file() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Opset 9, which lists its weights as inputs, too."""
    model = parsed(
        "g (float[N, 4] x) => (float[N, 5] y) { h = Gemm(x, w, b)  y = Relu(h) }",
        9,
        w=(4, 5),
        b=(5,),
    )
    for tensor in model.graph.initializer:
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.input.append(value)
    return model, {"x": rows(40, 4)}


def constant_weight() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The weight is a Constant, transposed."""
    model = parsed(
        """g (float[N, 2] x) => (float[N, 3] y) {
        w = Constant<value = float[3, 2] {1, 2, 3, 4, 5, 6}>()  t = Transpose(w)  y = MatMul(x, t) }"""
    )
    return model, {"x": rows(40, 2)}


MODELS = {
    "network": network,
    "two inputs": two_inputs,
    "attention": attention,
    "transposed convolution": transposed_convolution,
    "branch": branch,
    "function": call_of_function,
    "old file": old_file,
    "constant weight": constant_weight,
}


def outputs_of(
    model: onnx.ModelProto, inputs: dict[str, np.ndarray], *, exact: bool = False
) -> list[np.ndarray]:
    """What onnxruntime computes; `exact`: node by node, as ONNX defines the operators."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if exact:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)


def tensors_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: to_array(tensor) for tensor in model.graph.initializer}


def relative_error(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference, of all outputs, in units of the largest number of the output."""
    return max(
        float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(actual, expected, strict=True)
    )


DENSE = "g (float[N, 6] x) => (float[N, 6] y) {{ h = {}  r = Relu(h)  y = {} }}"
TRANSPOSED = DENSE.format("Gemm<transB = 1>(x, u, c)", "Gemm<transB = 1>(r, v, d)")
# the graph, the shapes of its weights, and the shape of its input
DYNAMIC: dict[str, tuple[str, dict[str, tuple[int, ...]], tuple[int, ...]]] = {
    "square Gemm with transB": (
        TRANSPOSED, {"u": (6, 6), "c": (6,), "v": (6, 6), "d": (6,)}, (5, 6)
    ),
    "Gemm with transB": (
        TRANSPOSED, {"u": (9, 6), "c": (9,), "v": (6, 9), "d": (6,)}, (5, 6)
    ),
    "Gemm": (
        DENSE.format("Gemm(x, u, c)", "Gemm(r, v, d)"),
        {"u": (6, 6), "c": (6,), "v": (6, 6), "d": (6,)},
        (5, 6),
    ),
    "MatMul": (DENSE.format("MatMul(x, u)", "MatMul(r, v)"), {"u": (6, 9), "v": (9, 6)}, (5, 6)),
    "Conv": (
        "g (float[N, 2, 6, 6] x) => (float[N, 3, 4, 4] y) { y = Conv(x, u, b) }",
        {"u": (3, 2, 3, 3), "b": (3,)},
        (5, 2, 6, 6),
    ),
    "LSTM": (
        """g (float[T, N, 4] x) => (float[1, N, 4] y)
        { a, y = LSTM<hidden_size = 4>(x, u, v, b) }""",
        {"u": (1, 16, 4), "v": (1, 16, 4), "b": (1, 32)},
        (3, 5, 4),
    ),
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {},
    "uint8": {"weight_type": "QUInt8"},
    "per channel": {"per_channel": True},
    "7 bits": {"reduce_range": True},
}
# onnxruntime has no kernel for a ConvInteger of int8.
DYNAMIC_FILES = [
    pair for pair in product(DYNAMIC, SETTINGS) if pair[0] != "Conv" or pair[1] == "uint8"
]


def dynamic_file(
    name: str, options: str, folder: Path
) -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, np.ndarray]]:
    """A float network, what `quantize_dynamic` makes of it, and inputs."""
    tool = pytest.importorskip("onnxruntime.quantization")
    body, shapes, shape = DYNAMIC[name]
    model = onnx.shape_inference.infer_shapes(parsed(body, **shapes))
    onnx.save(model, folder / "float.onnx")
    kind = tool.QuantType[SETTINGS[options].get("weight_type", "QInt8")]
    settings = {**SETTINGS[options], "weight_type": kind}
    tool.quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", **settings)
    return model, onnx.load(folder / "int8.onnx"), {"x": rows(*shape)}
