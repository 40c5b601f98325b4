"""The arithmetic of quantization, beside onnxruntime's operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import pytest

from onnxfit.trainable.quantized.parameters import QuantizationParameters, integer_limits
from tests.trainable.quantized.graphs import outputs_of, rows

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
    element_type = ir.DataType[kind]
    zero_point = np.asarray(rng.integers(*integer_limits(element_type), shape, endpoint=True))
    scale = rng.uniform(0.01, 0.3, shape).astype(np.float32)
    return QuantizationParameters(scale, zero_point, element_type, axis, block_size)


def by_onnxruntime(operator: str, array: np.ndarray, by: QuantizationParameters) -> np.ndarray:
    """What onnxruntime's operator makes of an array, in float32."""
    dtype = ir.DataType(by.element_type).numpy()
    settings = {"axis": by.axis} | ({"block_size": by.block_size} if by.block_size else {})
    names = ["array", "scale", "zero_point"]
    tensors = [
        ir.to_proto(ir.tensor(a, name=n))
        for a, n in zip((array, by.scale, by.zero_point.astype(dtype)), names, strict=True)
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
    low, high = integer_limits(by.element_type)
    integers = np.random.default_rng(1).integers(low, high, (4, 6, 5), endpoint=True)
    expected = by_onnxruntime("DequantizeLinear", integers.astype(dtype), by)
    assert by.dequantized(integers).tobytes() == expected.tobytes()
    assert by.dequantized(integers.astype(dtype)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_is_what_onnxruntime_computes(kind: str, form: str) -> None:
    by = parameters(kind, form)
    for spread in (4, 1e6):
        array = spread * rows(4, 6, 5)
        expected = by_onnxruntime("QuantizeLinear", array, by)
        np.testing.assert_array_equal(by.quantized(array).astype(np.float32), expected)


@pytest.mark.parametrize("form", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_halves_go_to_the_integers_of_onnxruntime(kind: str, form: str) -> None:
    """With scales that are powers of two, x / scale is exactly in the middle."""
    by = replace(parameters(kind, form), scale=np.full(SCALES[form][0], 0.25, np.float32))
    low, high = integer_limits(by.element_type)
    rng = np.random.default_rng(0)
    middle = rng.integers(low, high, (4, 6, 5), endpoint=True) + rng.choice([-0.5, 0.5], (4, 6, 5))
    zero_point = by.dequantized(np.zeros((4, 6, 5))) / -0.25
    floats = ((middle - zero_point) * 0.25).astype(np.float32)
    integers = by.quantized(floats)
    expected = by_onnxruntime("QuantizeLinear", floats, by)
    np.testing.assert_array_equal(integers.astype(np.float32), expected)
    inside = (integers > low) & (integers < high)
    assert inside.any()
    assert not ((integers - zero_point)[inside] % 2).any()


def of(scale: Any, zero_point: Any = None, kind: str = "INT8", **attributes: int) -> Any:
    zeros = None if zero_point is None else np.asarray(zero_point)
    return QuantizationParameters.of(np.asarray(scale), zeros, ir.DataType[kind], attributes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", SCALES)
def test_integers_are_the_nearest_to_their_floats(kind: str, form: str) -> None:
    by = parameters(kind, form)
    low, high = integer_limits(by.element_type)
    integers = np.random.default_rng(2).integers(low, high, (4, 6, 5), endpoint=True)
    floats = by.dequantized(integers)
    np.testing.assert_array_equal(by.quantized(floats), integers)
    assert by.fits(floats.shape)
    assert by.clipped(floats) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_limits_are_those_of_the_type(kind: str) -> None:
    dtype = ir.DataType[kind].numpy()
    low, high = integer_limits(ir.DataType[kind])
    numbers = np.array([low, high])
    np.testing.assert_array_equal(numbers.astype(dtype).astype(np.int64), numbers)
    assert high - low + 1 == 2 ** int(kind.removeprefix("U").removeprefix("INT"))


def test_int32_reaches_its_ends() -> None:
    """2**31 - 1 is no float32, and its nearest float32 is beyond it."""
    by = of(np.float32(1), None, "INT32")
    assert by.quantized(np.float32([1e30, -1e30])).tolist() == [2**31 - 1, -(2**31)]
    assert by.dequantized(np.array([2**31 - 1])).tolist() == [2**31]


def test_a_sum_of_parameters_beyond_float32_is_exact() -> None:
    assert of(np.float32(1), 2**24 + 1, "INT32").quantized(np.float32([0])).tolist() == [2**24 + 1]


def test_float8_is_rounded_to_its_own_numbers() -> None:
    by = of(np.float32(2), None, "FLOAT8E4M3FN")
    rounded = by.quantized(np.float32([1, 2.1, 1e-9]))
    assert rounded.dtype == ir.DataType.FLOAT8E4M3FN.numpy()
    assert by.dequantized(rounded).tolist() == [1, 2, 0]  # 1.05 lies between 1 and 1.125


def test_float16_is_computed_in_float32() -> None:
    by = of(np.float16(0.1), None, "INT32")
    numbers = by.dequantized(np.array([3, 100_001]))  # float16 ends at 65504
    assert numbers.dtype == np.float16
    np.testing.assert_array_equal(
        numbers, (np.float32([3, 100_001]) * np.float32(np.float16(0.1))).astype(np.float16)
    )
    assert of(np.float16(1e-4)).quantized(np.float16([60000])).tolist() == [127]


def test_values_without_an_integer_give_some_integer_in_silence() -> None:
    integers = of(np.float32([0, 1]), axis=0).quantized(np.float32([1, np.nan]))
    assert integers.dtype == np.int64
    assert integers[0] == 127


def test_a_negative_scale_reverses_the_order() -> None:
    by = of(np.float32(-0.5), None, "INT4")
    assert by.quantized(np.float32([4, -3.5, 9])).tolist() == [-8, 7, -8]
    assert by.dequantized(np.array([-8])).tolist() == [4]
    assert by.clipped(np.float32([4.2, 4.3, -3.7, -3.8])) == 2


@pytest.mark.parametrize(
    ("by", "shape"),
    [
        (of(np.ones(3)), (2, 4)),
        (of(np.ones(2), axis=2), (2, 2)),
        (of(np.ones((1, 2))), (2, 2)),
        (of(np.ones(2), [0, 0, 0]), (2, 2)),
        (of(1.0, [0, 0]), (2, 2)),
        (of(np.ones((2, 3)), axis=0, block_size=2), (5, 3)),
        (of(np.ones(2)), ()),
    ],
)
def test_parameters_that_do_not_fit(by: QuantizationParameters, shape: tuple[int, ...]) -> None:
    assert not by.fits(shape)


def test_parameters_are_equal_if_their_numbers_are() -> None:
    one = of(np.float32(1), 2)
    equals = (of(np.float32(1), 2), of(np.float32([1]), np.int8([2])), of(np.float32(1), 2, axis=0))
    others = (of(np.float32(1), 3), of(np.float32(2), 2), of(np.float32(1)), of(np.float64(1), 2))
    assert all(one == other and hash(one) == hash(other) for other in equals)
    assert one not in (*others, of(np.float32(1), 2, "UINT8"), 1)
    assert of(np.float32(1)) == of(np.float32(1), 0)
    assert of(np.ones(3), axis=0) != of(np.ones(3), axis=1)
    assert of(np.ones(3), axis=0) == of(np.ones(3), axis=0)
