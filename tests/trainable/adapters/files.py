"""Files with a weight in every place that an adapter can stand beside."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
from onnx.numpy_helper import from_array

from onnxfit.gradients.rules.packed_weights import FP4, NF4

WIDTH = 6
ROWS = 12
HEADER = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>'
FLOATS = "(float[N, 6] x) => (float[N, 6] y)"
TOKENS = "(int64[N, 3] x) => (float[N, 3, 6] y)"
IMAGES = "(float[N, 6, 5, 5] x) => (float[N, 4, 3, 3] y)"
# kind -> graph, shapes of the weights; each graph has a frozen bias `b`
GRAPHS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "matmul": (f"g {FLOATS} {{ h = MatMul(x, w) y = Add(h, b) }}", {"w": (6, 6)}),
    "gemm": (f"g {FLOATS} {{ y = Gemm(x, w, b) }}", {"w": (6, 6)}),
    "gemm_transposed": (
        f"g {FLOATS} {{ h = Gemm<transB = 1, alpha = 0.5>(x, w) y = Gemm<transB = 1>(h, v, b) }}",
        {"w": (4, 6), "v": (6, 4)},
    ),
    "behind_transpose": (
        f"g {FLOATS} {{ i = Identity(w) t = Transpose<perm = [1, 0]>(i) h = MatMul(x, t)"
        " s = Tanh(h) k = MatMul(s, w) y = Add(k, b) }",
        {"w": (4, 6)},
    ),
    "embedding": (f"g {TOKENS} {{ h = Gather(w, x) y = Add(h, b) }}", {"w": (9, 6)}),
    "tied": (
        "g (int64[N, 3] x) => (float[N, 3, 9] y)"
        " { e = Gather(w, x) h = Add(e, b) s = Tanh(h) t = Transpose<perm = [1, 0]>(w)"
        " y = MatMul(s, t) }",
        {"w": (9, 6)},
    ),
    "conv": (
        f"g {IMAGES} {{ y = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, w) }}",
        {"w": (4, 6, 3, 3)},
    ),
    "pointwise_conv": (
        "g (float[N, 6, 5, 5] x) => (float[N, 4, 5, 5] y) { y = Conv(x, w) }",
        {"w": (4, 6, 1, 1)},
    ),
}
KINDS = tuple(GRAPHS)


def file_of(kind: str, dtype: type[np.floating] = np.float32, opset: int = 17) -> onnx.ModelProto:
    """A file of a kind, with random weights."""
    text, shapes = GRAPHS[kind]
    rng = np.random.default_rng(3)
    model = onnx.parser.parse_model(f"{HEADER.replace('17', str(opset))} {text}")
    arrays = {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}
    arrays["b"] = rng.normal(size=WIDTH)
    for name, array in arrays.items():
        model.graph.initializer.append(from_array(array.astype(dtype), name))
    if dtype != np.float32:
        element_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        for value in (*model.graph.input, *model.graph.output):
            if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
                value.type.tensor_type.elem_type = element_type
    return model


def rows_of(kind: str, dtype: type[np.floating] = np.float32) -> np.ndarray:
    """Inputs of a file of a kind."""
    rng = np.random.default_rng(4)
    text = GRAPHS[kind][0] if kind in GRAPHS else FLOATS
    if "int64" in text:
        return rng.integers(0, 9, (ROWS, 3))
    shape = (ROWS, 6, 5, 5) if "6, 5, 5" in text else (ROWS, WIDTH)
    return rng.normal(size=shape).astype(dtype)


def packed_file() -> onnx.ModelProto:
    """Two layers whose weights are packed in 4 bits, and a float layer behind them."""
    model = onnx.parser.parse_model(
        f"""{HEADER} g (float[N, 32] x) => (float[N, 6] y) {{
        h = com.microsoft.MatMulNBits<K = 32, N = 16, bits = 4, block_size = 16>(x, fc1_Q4, s1)
        a = Tanh(h)
        k = com.microsoft.MatMulNBits<K = 16, N = 32, bits = 4, block_size = 16>(a, fc2_Q4, s2)
        c = Tanh(k)
        y = MatMul(c, head) }}"""
    )
    rng = np.random.default_rng(5)
    arrays = {
        "fc1_Q4": rng.integers(0, 256, (16, 2, 8), dtype=np.uint8),
        "s1": rng.uniform(0.01, 0.05, 32).astype(np.float32),
        "fc2_Q4": rng.integers(0, 256, (32, 1, 8), dtype=np.uint8),
        "s2": rng.uniform(0.01, 0.05, 32).astype(np.float32),
        "head": rng.normal(size=(32, 6)).astype(np.float32),
    }
    model.graph.initializer.extend(from_array(array, name) for name, array in arrays.items())
    return model


def bnb4_file(quant_type: int) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A file whose layers have 4-bit floats, and the same file with their weights as floats."""
    graph = "g (float[N, 6] x) => (float[N, 6] y)"
    call = f"com.microsoft.MatMulBnb4<block_size = 16, quant_type = {quant_type}, "
    packed = onnx.parser.parse_model(
        f"""{HEADER} {graph} {{ h = {call} K = 6, N = 8>(x, fc1_Bnb4, s1) a = Tanh(h)
        k = {call} K = 8, N = 6>(a, fc2_Bnb4, s2) y = Add(k, b) }}"""
    )
    plain = onnx.parser.parse_model(
        f"{HEADER} {graph} {{ h = MatMul(x, fc1) a = Tanh(h) k = MatMul(a, fc2) y = Add(k, b) }}"
    )
    rng = np.random.default_rng(7)
    for name, scales in (("fc1", "s1"), ("fc2", "s2")):
        data = rng.integers(0, 256, 24, dtype=np.uint8)
        absmax = rng.uniform(0.3, 1.0, 3).astype(np.float32)
        packed.graph.initializer.extend(
            [from_array(data, f"{name}_Bnb4"), from_array(absmax, scales)]
        )
        levels = (NF4 if quant_type else FP4)[np.stack([data >> 4, data & 15], axis=-1)].reshape(-1)
        weight = (levels * np.repeat(absmax, 16)).reshape((8, 6) if name == "fc1" else (6, 8))
        plain.graph.initializer.append(from_array(weight.T.astype(np.float32), name))
    bias = from_array(rng.normal(size=WIDTH).astype(np.float32), "b")
    for model in (packed, plain):
        model.graph.initializer.append(bias)
    return packed, plain


def packed_table() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A file with a table of 4-bit integers, and the same file with the table as floats."""
    nodes = "h = com.microsoft.GatherBlockQuantized<block_size = 16>(w, x, s) y = Add(h, b)"
    packed = onnx.parser.parse_model(
        f"{HEADER} g (int64[N, 3] x) => (float[N, 3, 32] y) {{ {nodes} }}".replace("17", "21")
    )
    plain = onnx.parser.parse_model(
        f"{HEADER} g (int64[N, 3] x) => (float[N, 3, 32] y) {{ h = Gather(w, x) y = Add(h, b) }}"
    )
    rng = np.random.default_rng(8)
    levels = rng.integers(-8, 8, (9, 32))
    scales = rng.uniform(0.05, 0.2, (9, 2)).astype(np.float32)
    table = onnx.helper.make_tensor("w", onnx.TensorProto.INT4, levels.shape, levels.ravel())
    packed.graph.initializer.extend([table, from_array(scales, "s")])
    floats = (levels * np.repeat(scales, 16, axis=1)).astype(np.float32)
    plain.graph.initializer.append(from_array(floats, "w"))
    bias = from_array(rng.normal(size=32).astype(np.float32), "b")
    for model in (packed, plain):
        model.graph.initializer.append(bias)
    return packed, plain


def initializers(model: onnx.ModelProto) -> dict[str, bytes]:
    return {t.name: t.SerializeToString(deterministic=True) for t in model.graph.initializer}


def run(model: onnx.ModelProto) -> Callable[[np.ndarray], np.ndarray]:
    """The model in bare onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return lambda x: session.run(None, {"x": x})[0]
