"""Integer weights of a file; tests/trainable/quantized/test_parameters.py has the arithmetic."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from onnxfit import DivergenceError
from onnxfit.load.opset import empty_graph
from onnxfit.step.finish import finish
from onnxfit.trainable.quantized.integer_weight import IntegerWeight, with_integers, with_numbers
from onnxfit.trainable.quantized.integer_weights import integer_weights
from onnxfit.trainable.quantized.operators import numbers_of
from tests.trainable.quantized import integer_files as files
from tests.trainable.quantized.integer_files import ALL_GRAINS, ALL_KINDS, LIMITS, SYMMETRIC


def weight_of(model: onnx.ModelProto, name: str = "w") -> IntegerWeight:
    return next(weight for weight in integer_weights(model, [name]))


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
        np.testing.assert_array_equal(weight.rounded(weight.values), weight.integers)
        assert with_numbers(weight.tensor, weight.integers) is weight.tensor


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
    np.testing.assert_array_equal(numbers_of(tensor), old)
    np.testing.assert_array_equal(numbers_of(changed), new)
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
    assert weight.rounded(values)[:3].tolist() == [2**31 - 1, -(2**31), 2**31 - 1]


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
    with pytest.raises(DivergenceError, match="'w' contains NaN, which no integer"):
        weight.rounded(values)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16"])
@ALL_GRAINS
@SYMMETRIC
def test_a_graph_rounds_as_numpy_does(kind: str, grain: str, symmetric: bool) -> None:
    rng = np.random.default_rng(3)
    for name in ("w", "b"):
        weight = weight_of(files.integer_file(kind, grain, symmetric), name)
        same = weight.values
        size = np.abs(same).max()
        moved = np.where(
            rng.random(same.shape) < 0.5, same, 1.5 * rng.normal(size=same.shape) * size
        )
        op = empty_graph("rounding")
        values = op.input("values", same.dtype, same.shape)
        op.output("integers", weight.add_rounded(op, values))
        session = onnxruntime.InferenceSession(finish(op).SerializeToString())
        for floats in (same, moved.astype(same.dtype)):
            (integers,) = session.run(None, {"values": floats})
            assert integers.dtype == numpy_helper.to_array(weight.tensor).dtype
            np.testing.assert_array_equal(integers, weight.rounded(floats))
