"""Integers of real numbers are those of a bare onnxruntime's QuantizeLinear."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfit import DivergenceError
from onnxfit.quantization.reading import integer_weights
from onnxfit.quantization.rounding import IntegerWeight, integers_of, with_integers
from tests.quantization import integer_files as files
from tests.quantization.integer_files import ALL_GRAINS, ALL_KINDS, LIMITS, SYMMETRIC


def weight_of(model: onnx.ModelProto, name: str = "w") -> IntegerWeight:
    return next(weight for weight in integer_weights(model) if weight.name == name)


def quantized_by_onnxruntime(weight: IntegerWeight, kind: str, values: np.ndarray) -> np.ndarray:
    data_type = TensorProto.DataType.Value(kind.upper())
    attributes = {"axis": weight.axis} if weight.scale.size > 1 else {}
    if weight.block_size:
        attributes["block_size"] = weight.block_size
    nodes = [
        helper.make_node("QuantizeLinear", ["v", "s", "z"], ["q"], **attributes),
        # numpy gets no numbers of 4 bits: as real numbers with the scale 1 they are the same
        helper.make_node("DequantizeLinear", ["q", "one"], ["y"]),
    ]
    zero = files.tensor("z", np.broadcast_to(weight.zero_point, weight.scale.shape), kind)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("v", TensorProto.FLOAT, values.shape)],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, values.shape),
            helper.make_tensor_value_info("q", data_type, values.shape),
        ],
        [
            numpy_helper.from_array(weight.scale, "s"),
            numpy_helper.from_array(np.array(1, np.float32), "one"),
            zero,
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(["y"], {"v": values})[0]


@ALL_KINDS
@ALL_GRAINS
@SYMMETRIC
def test_rounding_is_onnxruntimes(kind: str, grain: str, symmetric: bool) -> None:
    weight = weight_of(files.integer_file(kind, grain, symmetric))
    rng = np.random.default_rng(3)
    low, high = LIMITS[kind]
    shape = weight.values.shape
    spread = float(weight.scale.max()) * (high - low)
    for values in (
        rng.normal(size=shape) * spread,  # many out of range
        rng.normal(size=shape) * spread / 8,
        np.full(shape, spread * 1e3),
        np.full(shape, spread * -1e3),
    ):
        values = values.astype(np.float32)
        found = weight.rounded(values)
        assert low <= found.min()
        assert found.max() <= high
        np.testing.assert_array_equal(found, quantized_by_onnxruntime(weight, kind, values))


@ALL_KINDS
@ALL_GRAINS
def test_halves_go_to_the_even_number(kind: str, grain: str) -> None:
    """With a scale that is a power of two, x / scale is exactly in the middle."""
    model = files.integer_file(kind, grain, symmetric=False)
    (scale,) = (t for t in model.graph.initializer if t.name == "w_scale")
    halves = np.full(files.scale_shape(grain), 0.25, np.float32)
    scale.CopyFrom(numpy_helper.from_array(halves, "w_scale"))
    weight = weight_of(model)
    low, high = LIMITS[kind]
    middle = weight.integers + np.random.default_rng(0).choice([-0.5, 0.5], weight.integers.shape)
    zero = np.broadcast_to(weight.values / -0.25 + weight.integers, weight.integers.shape)
    values = ((middle - zero) * 0.25).astype(np.float32)
    found = weight.rounded(values)
    np.testing.assert_array_equal(found, quantized_by_onnxruntime(weight, kind, values))
    inside = (found > low) & (found < high)
    # without the zero point the number is even
    assert not ((found - zero)[inside] % 2).any()
    assert inside.any()


@ALL_KINDS
@ALL_GRAINS
@SYMMETRIC
@pytest.mark.parametrize("raw", [True, False], ids=["bytes", "list"])
def test_the_numbers_of_a_tensor_give_the_tensor(
    kind: str, grain: str, symmetric: bool, raw: bool
) -> None:
    model = files.integer_file(kind, grain, symmetric, raw=raw)
    for name in ("w", "b"):
        weight = weight_of(model, name)
        assert weight.tensor_of(weight.values) == weight.tensor
        np.testing.assert_array_equal(weight.rounded(weight.values), weight.integers)


@pytest.mark.parametrize("kind", [*LIMITS, "int32"])
@pytest.mark.parametrize("raw", [True, False], ids=["bytes", "list"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 5), (3, 3, 3), (0, 2)])
def test_other_numbers_are_stored_alike(kind: str, raw: bool, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    low, high = LIMITS.get(kind, (-(2**31), 2**31 - 1))
    old, new = (rng.integers(low, high + 1, shape) for _ in range(2))
    tensor = files.tensor("w", old, kind, raw)
    tensor.doc_string = "kept"
    changed = with_integers(tensor, new)
    np.testing.assert_array_equal(integers_of(tensor), old)
    np.testing.assert_array_equal(integers_of(changed), new)
    np.testing.assert_array_equal(numpy_helper.to_array(changed).astype(np.int64), new)
    assert changed.data_type == tensor.data_type
    assert changed.dims == tensor.dims
    assert changed.doc_string == "kept"
    assert changed.name == "w"
    if raw:
        assert changed.ByteSize() == tensor.ByteSize()
        assert changed == files.tensor("w", new, kind) or changed.doc_string
    elif not changed.HasField("raw_data"):
        assert changed.ByteSize() <= tensor.ByteSize()


def test_a_bias_is_cut_off_at_the_ends_of_its_type() -> None:
    weight = weight_of(files.integer_file(), "b")
    values = weight.values.copy()
    values[:3] = 1e30, -1e30, np.inf
    assert weight.rounded(values)[:3].tolist() == [2**31 - 128, -(2**31), 2**31 - 128]


def test_large_biases_keep_their_integers() -> None:
    """2**31 is far beyond the whole numbers of float32."""
    model = files.integer_file()
    (tensor,) = (t for t in model.graph.initializer if t.name == "b")
    numbers = np.array([2**31 - 1, -(2**31), 2**30 + 1, 2**24 + 1, -(2**25) - 3, 7])
    tensor.CopyFrom(files.tensor("b", numbers, "int32"))
    weight = weight_of(model, "b")
    assert weight.rounded(weight.values).tolist() == numbers.tolist()


def test_nan_has_no_integer() -> None:
    weight = weight_of(files.integer_file())
    values = weight.values.copy()
    values[0, 0] = np.nan
    with pytest.raises(DivergenceError, match="'w' has NaN, and no integer"):
        weight.rounded(values)
