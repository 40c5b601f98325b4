"""Random models of every operator of integers, for the laws of its conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper as oh
from onnx import TensorProto
from onnx.numpy_helper import from_array

Array = npt.NDArray[Any]
Case = tuple[onnx.ModelProto, dict[str, Array]]
MICROSOFT = "com.microsoft"
UNSIGNED_AND_SIGNED = (np.uint8, np.int8)


def model_of(
    op_type: str,
    inputs: dict[str, Array | None],
    outputs: dict[str, Any],
    feeds: tuple[str, ...] = ("x",),
    domain: str = MICROSOFT,
    **attributes: Any,
) -> Case:
    """A model of one node; inputs that are not fed are initializers, and None is absent."""
    names = [name if array is not None else "" for name, array in inputs.items()]
    node = oh.make_node(op_type, names, list(outputs), "it", domain=domain, **attributes)
    arrays = {name: array for name, array in inputs.items() if array is not None}
    return model_of_nodes([node], arrays, outputs, feeds)


def model_of_nodes(
    nodes: list[onnx.NodeProto],
    arrays: dict[str, Array],
    outputs: dict[str, Any],
    feeds: tuple[str, ...] = ("x",),
    opset: int = 17,
) -> Case:
    def info(name: str, dtype: Any, shape: Any) -> onnx.ValueInfoProto:
        return oh.make_tensor_value_info(name, oh.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    graph = oh.make_graph(
        nodes,
        "g",
        [info(name, arrays[name].dtype, arrays[name].shape) for name in feeds],
        [info(name, dtype, None) for name, dtype in outputs.items()],
        [from_array(array, name) for name, array in arrays.items() if name not in feeds],
    )
    opsets = [oh.make_opsetid("", opset), oh.make_opsetid(MICROSOFT, 1)]
    model = oh.make_model(graph, opset_imports=opsets, ir_version=8)
    return model, {name: arrays[name] for name in feeds}


class Random:
    """Random quantized tensors."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def integers(self, dtype: Any, *shape: int) -> Array:
        limits = np.iinfo(dtype)
        return self.rng.integers(limits.min, limits.max + 1, shape).astype(dtype)

    def scale(self, size: float, *shape: int) -> Array:
        return np.asarray(size * self.rng.uniform(0.5, 1.5, shape), np.float32)

    def zero(self, dtype: Any, *shape: int) -> Array:
        limits = np.iinfo(dtype)
        return np.asarray(self.rng.integers(limits.min // 2, limits.max // 2, shape)).astype(dtype)

    def normal(self, *shape: int) -> Array:
        return self.rng.normal(size=shape).astype(np.float32)


def convolution(r: Random) -> Iterator[Case]:
    for x_type, w_type, channels, domain in (
        (np.uint8, np.uint8, (), ""),
        (np.uint8, np.int8, (4,), ""),
        (np.int8, np.int8, (4,), ""),
        (np.uint8, np.int8, (4,), MICROSOFT),
    ):
        last = {"channels_last": 1} if domain else {}
        yield model_of(
            "QLinearConv",
            {
                "x": r.integers(x_type, 2, 7, 6, 3) if last else r.integers(x_type, 2, 3, 7, 6),
                "x_scale": r.scale(0.02),
                "x_zero": r.zero(x_type),
                "w": r.integers(w_type, 4, 3, 3, 3),
                "w_scale": r.scale(0.01, *channels),
                # int8 weights of onnxruntime's tool have the zero point 0, one for each channel
                "w_zero": np.zeros(channels, w_type) if channels else r.zero(w_type),
                "y_scale": r.scale(0.1),
                "y_zero": r.zero(x_type),
                "bias": r.rng.integers(-5000, 5000, 4).astype(np.int32),
            },
            {"y": x_type},
            domain=domain,
            pads=[1, 1, 1, 1],
            strides=[1, 2],
            **last,
        )

    yield model_of(
        "QLinearConv",
        {
            "x": r.integers(np.uint8, 2, 4, 9),
            "x_scale": r.scale(0.02),
            "x_zero": r.zero(np.uint8),
            "w": r.integers(np.int8, 6, 2, 3),
            "w_scale": r.scale(0.01, 6),
            "w_zero": np.zeros(6, np.int8),
            "y_scale": r.scale(0.1),
            "y_zero": r.zero(np.uint8),
        },
        {"y": np.uint8},
        domain="",
        group=2,
        auto_pad="SAME_UPPER",
    )


def matmul(r: Random) -> Iterator[Case]:
    for x_type, w_type, columns, rows in (
        (np.uint8, np.uint8, (), (5,)),
        (np.uint8, np.int8, (6,), (2, 5)),
        (np.int8, np.int8, (6,), (5,)),
        (np.int8, np.int8, (1,), (5,)),
    ):
        yield model_of(
            "QLinearMatMul",
            {
                "x": r.integers(x_type, *rows, 8),
                "x_scale": r.scale(0.02),
                "x_zero": r.zero(x_type),
                "w": r.integers(w_type, 8, 6),
                "w_scale": r.scale(0.01, *columns),
                "w_zero": r.zero(w_type, *columns),
                "y_scale": r.scale(0.05),
                "y_zero": r.zero(x_type),
            },
            {"y": x_type},
            domain="",
        )


def gemm(r: Random) -> Iterator[Case]:
    for x_type, w_type, columns, transposed, bias, is_float in (
        (np.uint8, np.uint8, (), 0, True, False),
        (np.uint8, np.int8, (6,), 1, True, False),
        (np.int8, np.int8, (6,), 0, False, False),
        (np.uint8, np.int8, (), 1, True, True),
    ):
        yield model_of(
            "QGemm",
            {
                "x": r.integers(x_type, *((8, 5) if transposed else (5, 8))),
                "x_scale": r.scale(0.02),
                "x_zero": r.zero(x_type),
                "w": r.integers(w_type, *((6, 8) if transposed else (8, 6))),
                "w_scale": r.scale(0.01, *columns),
                "w_zero": r.zero(w_type, *columns),
                "bias": r.rng.integers(-5000, 5000, 6).astype(np.int32) if bias else None,
                "y_scale": None if is_float else r.scale(0.05),
                "y_zero": None if is_float else r.zero(x_type),
            },
            {"y": np.float32 if is_float else x_type},
            transA=transposed,
            transB=transposed,
            alpha=0.75,
        )


def arithmetic(op_type: str) -> Callable[[Random], Iterator[Case]]:
    def cases(r: Random) -> Iterator[Case]:
        for dtype in UNSIGNED_AND_SIGNED:
            yield model_of(
                op_type,
                {
                    "x": r.integers(dtype, 2, 5, 8),
                    "x_scale": r.scale(0.02),
                    "x_zero": r.zero(dtype),
                    "other": r.integers(dtype, 5, 8),
                    "other_scale": r.scale(0.03),
                    "other_zero": r.zero(dtype),
                    "y_scale": r.scale(0.05),
                    "y_zero": r.zero(dtype),
                },
                {"y": dtype},
                feeds=("x", "other"),
            )

    return cases


def unary(
    op_type: str, shape: tuple[int, ...], y_scale: float, *settings: dict[str, Any]
) -> Callable[[Random], Iterator[Case]]:
    def cases(r: Random) -> Iterator[Case]:
        for dtype in UNSIGNED_AND_SIGNED:
            for attributes in settings or ({},):
                last = attributes.get("channels_last")
                yield model_of(
                    op_type,
                    {
                        "x": r.integers(
                            dtype, *((shape[0], *shape[2:], shape[1]) if last else shape)
                        ),
                        "x_scale": r.scale(0.02),
                        "x_zero": r.zero(dtype),
                        "y_scale": r.scale(y_scale),
                        "y_zero": r.zero(dtype),
                    },
                    {"y": dtype},
                    **attributes,
                )

    return cases


def softmax(r: Random) -> Iterator[Case]:
    """The scale and the zero point of the output are those of onnxruntime's tool."""
    for dtype in UNSIGNED_AND_SIGNED:
        for opset, axis in ((13, -1), (13, 1), (11, 1)):
            yield model_of(
                "QLinearSoftmax",
                {
                    "x": r.integers(dtype, 4, 3, 6),
                    "x_scale": r.scale(0.02),
                    "x_zero": r.zero(dtype),
                    "y_scale": np.float32(1 / 256),
                    "y_zero": np.asarray(np.iinfo(dtype).min, dtype),
                },
                {"y": dtype},
                opset=opset,
                axis=axis,
            )


def max_pool(r: Random) -> Iterator[Case]:
    for dtype in UNSIGNED_AND_SIGNED:
        x = r.integers(dtype, 2, 6, 6, 3)
        yield model_of("NhwcMaxPool", {"x": x}, {"y": dtype}, kernel_shape=[2, 3], strides=[2, 1])


def concat(r: Random) -> Iterator[Case]:
    for dtype in UNSIGNED_AND_SIGNED:
        inputs = {"y_scale": r.scale(0.03), "y_zero": r.zero(dtype)}
        for name in ("x", "other"):
            inputs[name] = r.integers(dtype, 4, 3)
            inputs[f"{name}_scale"] = r.scale(0.03)
            inputs[f"{name}_zero"] = r.zero(dtype)
        yield model_of("QLinearConcat", inputs, {"y": dtype}, ("x", "other"), axis=1)


def where(r: Random) -> Iterator[Case]:
    for dtype in UNSIGNED_AND_SIGNED:
        yield model_of(
            "QLinearWhere",
            {
                "condition": r.rng.random((4, 3)) > 0.5,
                "x": r.integers(dtype, 4, 3),
                "x_scale": r.scale(0.03),
                "x_zero": r.zero(dtype),
                "other": r.integers(dtype, 4, 3),
                "other_scale": r.scale(0.03),
                "other_zero": r.zero(dtype),
                "y_scale": r.scale(0.03),
                "y_zero": r.zero(dtype),
            },
            {"y": dtype},
            feeds=("condition", "x", "other"),
        )


def embedding(r: Random) -> Iterator[Case]:
    sizes = {"words": (9, 6), "positions": (5, 6), "segments": (2, 6), "gamma": (6,), "beta": (6,)}
    inputs: dict[str, Array | None] = {
        "x": r.rng.integers(0, 9, (2, 4)).astype(np.int32),
        "ids": r.rng.integers(0, 2, (2, 4)).astype(np.int32),
    }
    inputs |= {name: r.integers(np.uint8, *size) for name, size in sizes.items()}
    inputs["mask"] = None
    inputs |= {f"{name}_scale": r.scale(0.02) for name in sizes}
    inputs |= {f"{name}_zero": r.zero(np.uint8) for name in sizes}
    outputs = {"y": np.float32, "mask_index": np.int32}
    yield model_of("QEmbedLayerNormalization", inputs, outputs, ("x", "ids"), epsilon=1e-5)


def attention(r: Random) -> Iterator[Case]:
    for columns in ((), (24,)):
        yield model_of(
            "QAttention",
            {
                "x": r.integers(np.uint8, 2, 5, 8),
                "w": r.integers(np.int8, 8, 24),
                "bias": r.normal(24),
                "x_scale": r.scale(0.01),
                "w_scale": r.scale(0.01, *columns),
                "mask": None,
                "x_zero": r.zero(np.uint8),
                "w_zero": np.zeros(columns, np.int8),
            },
            {"y": np.float32},
            num_heads=2,
        )


def _product(
    r: Random,
    op_type: str,
    x: Array,
    w: Array,
    w_scale: Array,
    w_zero: Array | None,
    **attributes: Any,
) -> Case:
    """The nodes that onnxruntime's dynamic quantization writes for MatMul and Conv."""
    zeros = ["x_zero", "w_zero"] if w_zero is not None else ["x_zero"]
    nodes = [
        oh.make_node("DynamicQuantizeLinear", ["x"], ["q", "x_scale", "x_zero"], "quantize"),
        oh.make_node(op_type, ["q", "w", *zeros], ["y_q"], "it", **attributes),
        oh.make_node("Cast", ["y_q"], ["y_cast"], "cast", to=TensorProto.FLOAT),
        oh.make_node("Mul", ["x_scale", "w_scale"], ["scales"], "scales_mul"),
        oh.make_node("Mul", ["y_cast", "scales"], ["y"], "scale_mul"),
    ]
    arrays = {"x": x, "w": w, "w_scale": w_scale}
    if w_zero is not None:
        arrays["w_zero"] = w_zero
    return model_of_nodes(nodes, arrays, {"y": np.float32})


def matmul_of_integers(r: Random) -> Iterator[Case]:
    for dtype in UNSIGNED_AND_SIGNED:
        for columns in ((), (1,), (6,)):
            w = r.integers(dtype, 8, 6)
            yield _product(
                r,
                "MatMulInteger",
                r.normal(5, 8),
                w,
                r.scale(0.01, *columns),
                r.zero(dtype, *columns),
            )
    yield _product(
        r, "MatMulInteger", r.normal(5, 8), r.integers(np.int8, 8, 6), r.scale(0.01), None
    )


def convolution_of_integers(r: Random) -> Iterator[Case]:
    x, w = r.normal(2, 3, 6, 6), r.integers(np.uint8, 4, 3, 3, 3)
    yield _product(r, "ConvInteger", x, w, r.scale(0.01), r.zero(np.uint8), pads=[1, 1, 1, 1])


def matmul_to_float(r: Random) -> Iterator[Case]:
    for columns, has_bias in (((), True), ((6,), False)):
        zeros = r.zero(np.int8, *columns)
        w, w_scale = r.integers(np.int8, 8, 6), r.scale(0.01, *columns)
        inputs = {
            "x": r.integers(np.uint8, 5, 8),
            "w": w,
            "x_scale": r.scale(0.02),
            "w_scale": w_scale,
            "x_zero": r.zero(np.uint8),
            "w_zero": zeros,
            "bias": r.normal(6) if has_bias else None,
        }
        yield model_of("MatMulIntegerToFloat", inputs, {"y": np.float32})
        nodes = [
            oh.make_node("DynamicQuantizeLinear", ["x"], ["q", "x_scale", "x_zero"]),
            oh.make_node(
                "MatMulIntegerToFloat",
                ["q", "w", "x_scale", "w_scale", "x_zero", "w_zero"],
                ["y"],
                domain=MICROSOFT,
            ),
        ]
        arrays = {"x": r.normal(5, 8), "w": w, "w_scale": w_scale, "w_zero": zeros}
        yield model_of_nodes(nodes, arrays, {"y": np.float32})


def dynamic_matmul(r: Random) -> Iterator[Case]:
    for columns, has_bias in (((), True), ((6,), False)):
        yield model_of(
            "DynamicQuantizeMatMul",
            {
                "x": r.normal(5, 8),
                "w": r.integers(np.int8, 8, 6),
                "w_scale": r.scale(0.01, *columns),
                "w_zero": r.zero(np.int8, *columns),
                "bias": r.normal(6) if has_bias else None,
            },
            {"y": np.float32},
        )


def lstm(r: Random) -> Iterator[Case]:
    for directions, direction, sizes in (
        (1, "forward", (1,)),
        (2, "bidirectional", (2,)),
        (1, "reverse", (1, 16)),  # a scale for each column
    ):
        yield model_of(
            "DynamicQuantizeLSTM",
            {
                "x": r.normal(6, 2, 3),
                "w": r.integers(np.int8, directions, 3, 16),
                "r": r.integers(np.int8, directions, 4, 16),
                "b": r.normal(directions, 32),
                "lengths": None,
                "h": None,
                "c": None,
                "p": None,
                "w_scale": r.scale(0.005, *sizes),
                "w_zero": np.zeros(sizes, np.int8),
                "r_scale": r.scale(0.005, *sizes),
                "r_zero": np.zeros(sizes, np.int8),
            },
            {"y": np.float32, "y_h": np.float32},
            hidden_size=4,
            direction=direction,
        )


IMAGES = (2, 3, 6, 5)
POOL = {"kernel_shape": [3, 2], "pads": [1, 0, 1, 0], "strides": [2, 1]}
CASES: dict[str, Callable[[Random], Iterator[Case]]] = {
    "ConvInteger": convolution_of_integers,
    "DynamicQuantizeLSTM": lstm,
    "DynamicQuantizeMatMul": dynamic_matmul,
    "MatMulInteger": matmul_of_integers,
    "MatMulIntegerToFloat": matmul_to_float,
    "NhwcMaxPool": max_pool,
    "QAttention": attention,
    "QEmbedLayerNormalization": embedding,
    "QGemm": gemm,
    "QLinearAdd": arithmetic("QLinearAdd"),
    "QLinearAveragePool": unary(
        "QLinearAveragePool",
        IMAGES,
        0.02,
        POOL,
        POOL | {"count_include_pad": 1},
        POOL | {"channels_last": 1},
    ),
    "QLinearConcat": concat,
    "QLinearConv": convolution,
    "QLinearGlobalAveragePool": unary(
        "QLinearGlobalAveragePool", IMAGES, 0.02, {}, {"channels_last": 1}
    ),
    "QLinearLeakyRelu": unary("QLinearLeakyRelu", (4, 6), 0.02, {"alpha": 0.2}),
    "QLinearMatMul": matmul,
    "QLinearMul": arithmetic("QLinearMul"),
    "QLinearSigmoid": unary("QLinearSigmoid", (4, 6), 0.004),
    "QLinearSoftmax": softmax,
    "QLinearWhere": where,
}
