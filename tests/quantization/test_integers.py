"""The arithmetic of quantization, beside onnxruntime's operators."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import pytest

from onnxfit.quantization.integers import QuantizationParameters, limits
from tests.quantization.graphs import outputs_of, rows

KINDS = ("INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4")
# A scale's shape, the axis, the size of blocks
SCALES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "one": ((), 1, 0),
    "one in a vector": ((1,), 1, 0),
    "first axis": ((4,), 0, 0),
    "default axis": ((6,), 1, 0),
    "last axis": ((5,), -1, 0),
    "blocks": ((4, 2, 5), 1, 3),
    "uneven blocks": ((4, 2, 5), 1, 4),
}


def parameters(kind: str, form: str) -> QuantizationParameters:
    shape, axis, block_size = SCALES[form]
    rng = np.random.default_rng(0)
    dtype = ir.DataType[kind].numpy()
    zero_point = rng.integers(*limits(dtype), shape, endpoint=True).astype(dtype)
    scale = rng.uniform(0.01, 0.3, shape).astype(np.float32)
    return QuantizationParameters(scale, np.asarray(zero_point), axis, block_size)


def by_onnxruntime(operator: str, array: np.ndarray, by: QuantizationParameters) -> np.ndarray:
    """What onnxruntime's operator makes of an array, in float32."""
    assert by.zero_point is not None
    settings = {"axis": by.axis} | ({"block_size": by.block_size} if by.block_size else {})
    names = ["array", "scale", "zero_point"]
    tensors = [
        ir.to_proto(ir.tensor(a, name=n))
        for a, n in zip((array, by.scale, by.zero_point), names, strict=True)
    ]
    nodes = [oh.make_node(operator, names, ["y"], **settings)]
    if operator == "QuantizeLinear":  # to floats, since NumPy has no integers of four bits
        tensors.append(onnx.numpy_helper.from_array(np.float32(1), "one"))
        nodes.append(oh.make_node("DequantizeLinear", ["y", "one"], ["z"]))
    last = nodes[-1].output[0]
    output = oh.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None)
    graph = oh.make_graph(nodes, "g", [], [output], tensors)
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 21)], ir_version=10)
    return outputs_of(model, {}, exact=True)[0]


@pytest.mark.parametrize("form", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_is_what_onnxruntime_computes(kind: str, form: str) -> None:
    by = parameters(kind, form)
    dtype = ir.DataType[kind].numpy()
    integers = np.random.default_rng(1).integers(*limits(dtype), (4, 6, 5), endpoint=True)
    array = integers.astype(dtype)
    expected = by_onnxruntime("DequantizeLinear", array, by)
    assert by.dequantized(array).tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", [form for form in SCALES if "block" not in form])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_is_what_onnxruntime_computes(kind: str, form: str) -> None:
    by = parameters(kind, form)
    dtype = ir.DataType[kind].numpy()
    array = 4 * rows(4, 6, 5)
    expected = by_onnxruntime("QuantizeLinear", array, by)
    actual = by.quantized(array, dtype)
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual.astype(np.float32), expected)


def test_float16_scales_give_float16() -> None:
    by = QuantizationParameters(np.float16([0.1]), None)
    assert by.dequantized(np.int8([3])).dtype == np.float16


def test_parameters_are_equal_if_their_numbers_are() -> None:
    one, same, other = (QuantizationParameters(np.float32(s), np.int8(z)) for s, z in ((1, 2), (1, 2), (1, 3)))  # fmt: skip
    assert one.equals(same)
    assert not one.equals(other)
    assert not one.equals(QuantizationParameters(np.float32(1), None))
    assert one.equals(QuantizationParameters(np.float32(1), np.int8(2), axis=0))
    rows, columns = (QuantizationParameters(np.ones(3, np.float32), None, axis) for axis in (0, 1))
    assert not rows.equals(columns)
