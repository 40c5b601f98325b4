from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnxfit.errors import ModelError
from onnxfit.graph.model import with_references
from onnxfit.graph.shared_tensors import (
    MIN_BYTES,
    TYPES,
    ComputedArray,
    array_of,
    ir_tensor,
    is_sharable,
    refer_to,
    shared_bytes,
    whole_model,
)
from onnxfit.load.reading import read_model


@pytest.mark.parametrize("element_type", sorted(TYPES))
def test_an_array_has_the_values_of_the_tensor(element_type: int) -> None:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(element_type)
    expected = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = onnx.numpy_helper.from_array(expected, "w")
    data = np.frombuffer(tensor.raw_data, np.uint8)
    refer_to(tensor, data)
    assert not tensor.HasField("raw_data")
    for array in (array_of(tensor), ir_tensor(tensor).numpy()):
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, expected)
        assert np.shares_memory(array, data)


def test_small_tensors_and_parts_of_bytes_are_not_shared() -> None:
    assert is_sharable(onnx.TensorProto.FLOAT, 2**20)
    assert not is_sharable(onnx.TensorProto.FLOAT, 2**10)
    assert not is_sharable(onnx.TensorProto.INT4, 2**20)


def model_of(tensor: onnx.TensorProto) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Add(x, w) }'
    )
    model.graph.initializer.append(tensor)
    return model


def test_a_whole_model_refers_to_nothing() -> None:
    tensor = onnx.numpy_helper.from_array(np.array([1, 2], np.float32), "w")
    model = model_of(tensor)
    assert whole_model(model) is model
    data = np.frombuffer(tensor.raw_data, np.uint8)
    refer_to(model.graph.initializer[0], data)
    whole = whole_model(model)
    assert whole.SerializeToString() == model_of(tensor).SerializeToString()
    assert shared_bytes(model.graph.initializer[0]) is data  # the argument is as it was


def test_the_array_lives_as_long_as_its_owner() -> None:
    tensor = onnx.numpy_helper.from_array(np.zeros(2, ml_dtypes.bfloat16), "w")
    data = np.zeros(4, np.uint8)
    refer_to(tensor, data)
    del data
    gc.collect()
    with pytest.raises(KeyError):
        shared_bytes(tensor)


def test_a_file_cannot_refer_to_an_array() -> None:
    tensor = onnx.numpy_helper.from_array(np.array([1, 2], np.float32), "w")
    own = onnx.TensorProto()
    own.CopyFrom(tensor)
    data = np.frombuffer(tensor.raw_data, np.uint8)
    refer_to(own, data)
    forged = onnx.TensorProto()
    forged.CopyFrom(own)
    forged.external_data[0].value = "onnxfit-memory-" + "0" * 32
    assert shared_bytes(forged) is None
    with pytest.raises(ModelError, match="in other files"):
        read_model(model_of(forged))


def test_a_computed_tensor_is_computed_at_each_access_and_not_before() -> None:
    calls: list[str] = []
    new = np.arange(MIN_BYTES, dtype=np.float32)

    def compute() -> np.ndarray:
        calls.append("w")
        return new

    tensor = onnx.numpy_helper.from_array(np.zeros_like(new), "w")
    data = np.frombuffer(tensor.raw_data, np.uint8)
    model = model_of(tensor)
    refer_to(model.graph.initializer[0], data)
    changed = with_references(model, {"w": ComputedArray(compute, new.nbytes)})
    assert calls == []
    assert any(one is data for one in changed.arrays), (
        "the computation may need the array in its place"
    )
    for count in (1, 2):
        np.testing.assert_array_equal(array_of(changed.graph.initializer[0]), new)
        assert len(calls) == count


def test_a_larger_array_is_not_copied_into_a_model() -> None:
    new = np.arange(MIN_BYTES, dtype=np.float32).reshape(2, -1)
    model = model_of(onnx.numpy_helper.from_array(np.zeros_like(new), "w"))
    changed = with_references(model, {"w": new})
    assert np.shares_memory(array_of(changed.graph.initializer[0]), new)
    np.testing.assert_array_equal(array_of(changed.graph.initializer[0]), new)
    assert len(changed.arrays) == 1
    compiled = with_references(model, {"w": new}, compiled=True)
    assert compiled.arrays == []
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(compiled.graph.initializer[0]), new)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int8])
def test_arrays_of_any_type_and_order_are_written(dtype: type) -> None:
    new = np.arange(2 * MIN_BYTES).reshape(2, -1).astype(dtype).T
    model = model_of(onnx.numpy_helper.from_array(np.zeros_like(new, order="C"), "w"))
    changed = with_references(model, {"w": new})
    np.testing.assert_array_equal(array_of(changed.graph.initializer[0]), new)
    assert len(changed.arrays) == (dtype is not np.int8)


def test_a_computed_array_of_another_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="12 bytes, expected 8"):
        ComputedArray(lambda: np.zeros(3, np.float32), 8).bytes()
