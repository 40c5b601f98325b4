"""A file with a convolution in integers, whose bias has the product of two scales."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CHANNELS = 3


def layer_file(symmetric: bool = False, batch: str = "N, 1, 4, 4") -> onnx.ModelProto:
    """y = MaxPool(Relu(Conv(x, w, b))) @ v, all in integers.

    MaxPool reads and writes numbers of one scale. The weight w has a scale for each channel.
    """
    rng = np.random.default_rng(0)
    kind, zeros = (np.int8, (0, 0)) if symmetric else (np.uint8, (100, 0))
    w_scale = rng.uniform(0.005, 0.02, CHANNELS).astype(np.float32)
    x_scale = np.array(0.02, np.float32)
    arrays = {
        "x_scale": x_scale,
        "x_zero": np.array(zeros[0], kind),
        "h_scale": np.array(0.03, np.float32),
        "h_zero": np.array(zeros[1], kind),
        "w": rng.integers(-128, 128, (CHANNELS, 1, 3, 3)).astype(np.int8),
        "w_scale": w_scale,
        "w_zero": np.zeros(CHANNELS, np.int8),
        "b": rng.integers(-2000, 2000, CHANNELS).astype(np.int32),
        "b_scale": x_scale * w_scale,
        "b_zero": np.zeros(CHANNELS, np.int32),
        "v": rng.integers(-128, 128, (4 * CHANNELS, 2)).astype(np.int8),
        "v_scale": np.array(0.01, np.float32),
    }

    def dequantize(name: str, output: str, zero: str = "", **axis: int) -> onnx.NodeProto:
        inputs = [name, f"{name.split('_')[0]}_scale", *([zero] if zero else [])]
        return helper.make_node("DequantizeLinear", inputs, [output], **axis)

    grid = ["h_scale", "h_zero"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_q"]),
        dequantize("x_q", "x_d", "x_zero"),
        dequantize("w", "w_d", "w_zero", axis=0),
        dequantize("b", "b_d", "b_zero", axis=0),
        helper.make_node("Conv", ["x_d", "w_d", "b_d"], ["c"], name="conv", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("QuantizeLinear", ["r", *grid], ["h_q"]),
        dequantize("h_q", "h_d", "h_zero"),
        helper.make_node("MaxPool", ["h_d"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("QuantizeLinear", ["p", *grid], ["h_p"]),
        dequantize("h_p", "p_d", "h_zero"),
        helper.make_node("Flatten", ["p_d"], ["f"]),
        dequantize("v", "v_d"),
        helper.make_node("MatMul", ["f", "v_d"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, batch.split(", "))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    for value, sizes in ((graph.input[0], batch.split(", ")),):
        for dim, size in zip(value.type.tensor_type.shape.dim, sizes):
            if size.isdigit():
                dim.dim_value = int(size)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def images(count: int = 16, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 1, 4, 4)).astype(np.float32)


def labels(count: int = 16, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)


def arrays_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def operator_file() -> onnx.ModelProto:
    """The convolution as QLinearConv, whose bias has no scale in the file."""
    arrays = {n: a for n, a in arrays_of(layer_file()).items() if n[0] in "xhwb"}
    del arrays["b_scale"], arrays["b_zero"]
    grids = ["x_q", "x_scale", "x_zero", "w", "w_scale", "w_zero", "h_scale", "h_zero", "b"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_q"]),
        helper.make_node("QLinearConv", grids, ["h_q"], name="conv"),
        helper.make_node("DequantizeLinear", ["h_q", "h_scale", "h_zero"], ["h"]),
        helper.make_node("Flatten", ["h"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "operators",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4 * CHANNELS])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return model
