"""Files of integers, made by hand: every type, granularity and zero point."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfit.training.lineage import write_lineage

Array = npt.NDArray[Any]
ROWS, COLUMNS, BLOCK = 10, 6, 4  # of a weight; its last block is not full

LIMITS = {
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int16": (-(2**15), 2**15 - 1),
    "uint16": (0, 2**16 - 1),
}
ALL_KINDS = pytest.mark.parametrize("kind", LIMITS)
ALL_GRAINS = pytest.mark.parametrize("grain", ["tensor", "channel", "block"])
SYMMETRIC = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])


def numpy_type(kind: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, kind) if kind.endswith("int4") else kind)


def scale_shape(grain: str) -> tuple[int, ...]:
    shapes = {"tensor": (), "channel": (COLUMNS,), "block": (-(-ROWS // BLOCK), COLUMNS)}
    return shapes[grain]


def axis_settings(grain: str) -> dict[str, int]:
    settings = {"tensor": {}, "channel": {"axis": 1}, "block": {"axis": 0, "block_size": BLOCK}}
    return settings[grain]


def scales(grain: str, kind: str, rng: np.random.Generator) -> Array:
    low, high = LIMITS[kind]
    step = 2.0 / (high - low)
    return (step * rng.uniform(0.5, 2, scale_shape(grain))).astype(np.float32)


def zero_points(grain: str, kind: str, rng: np.random.Generator) -> Array:
    low, high = LIMITS[kind]
    middle = (low + high + 1) // 2
    spread = (high - low) // 4
    return middle + rng.integers(-spread, spread + 1, scale_shape(grain))


def integer_file(
    kind: str = "int8",
    grain: str = "tensor",
    symmetric: bool = True,
    *,
    activations: bool = True,
    raw: bool = True,
    seed: int = 0,
) -> onnx.ModelProto:
    """y = dequantized(b) - dequantized(x) @ dequantized(w), with an integer w and an int32 b."""
    rng = np.random.default_rng(seed)
    low, high = LIMITS[kind]
    scale = scales(grain, kind, rng)
    arrays: dict[str, Array] = {"w_scale": scale, "x_scale": np.array(0.03, np.float32)}
    arrays["b_scale"] = np.array(1e-4, np.float32)
    inputs = ["w", "w_scale"]
    if not symmetric:
        inputs.append("w_zero")
    attributes = axis_settings(grain)
    first = ["x", "x_scale", "x_zero"]
    nodes = [
        helper.make_node("QuantizeLinear", first, ["xq"], name="quantize_x"),
        helper.make_node("DequantizeLinear", ["xq", *first[1:]], ["xd"], name="dequantize_x"),
    ]
    nodes = nodes if activations else [helper.make_node("Identity", ["x"], ["xd"])]
    nodes += [
        helper.make_node("DequantizeLinear", inputs, ["wd"], name="dequantize_w", **attributes),
        helper.make_node("DequantizeLinear", ["b", "b_scale"], ["bd"], name="dequantize_b"),
        helper.make_node("MatMul", ["xd", "wd"], ["product"], name="multiply"),
        # not a Gemm, which onnxruntime 1.19 does not compute with such scales
        helper.make_node("Neg", ["product"], ["negative"], name="negate"),
        helper.make_node("Add", ["negative", "bd"], ["y"], name="add"),
    ]
    w = rng.integers(low, high + 1, (ROWS, COLUMNS))
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    tensors.append(tensor("w", w, kind, raw))
    tensors.append(tensor("b", rng.integers(-5000, 5000, COLUMNS), "int32", raw))
    tensors.append(tensor("x_zero", np.array(128), "uint8", True))
    if not symmetric:
        tensors.append(tensor("w_zero", zero_points(grain, kind, rng), kind, raw))
    read = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "integers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", ROWS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", COLUMNS])],
        [t for t in tensors if t.name in read],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def tensor(name: str, array: Array, kind: str, raw: bool = True) -> onnx.TensorProto:
    """A tensor of integers, stored as bytes or as a list of numbers."""
    if raw:
        return numpy_helper.from_array(array.astype(numpy_type(kind)), name)
    data_type = TensorProto.DataType.Value(kind.upper())
    return helper.make_tensor(name, data_type, array.shape, array.reshape(-1).tolist())


def rows(count: int = 16, seed: int = 1) -> Array:
    return np.random.default_rng(seed).normal(size=(count, ROWS)).astype(np.float32)


def _overflows() -> bool:
    """Whether the sums of onnxruntime's kernels overflow, as on x86 processors without VNNI."""
    left = helper.make_tensor_value_info("left", TensorProto.UINT8, [2, 64])
    right = numpy_helper.from_array(np.full((64, 16), 127, np.int8), "right")
    product = helper.make_tensor_value_info("product", TensorProto.INT32, [2, 16])
    node = helper.make_node("MatMulInteger", ["left", "right"], ["product"])
    graph = helper.make_graph([node], "sums", [left], [product], [right])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bool((run_file(model, np.full((2, 64), 255, np.uint8)) != 64 * 255 * 127).any())


def run_file(model: onnx.ModelProto, x: Array) -> Array:
    """What a bare onnxruntime computes."""
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(None, {session.get_inputs()[0].name: x})
    return np.asarray(y)


def stripped(model: onnx.ModelProto) -> bytes:
    """A model without its initializers, and without what made them."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.initializer[:]
    write_lineage(copy, None)
    return copy.SerializeToString(deterministic=True)


# For tests that compare onnxruntime's kernels for integers with exact sums.
without_overflow = pytest.mark.skipif(
    _overflows(), reason="onnxruntime's sums of integers overflow on this processor (no VNNI)"
)
