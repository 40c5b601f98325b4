"""Floats become the packed weight of a MatMulNBits, as onnxruntime's own quantizer packs them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.numpy_helper import to_array

from onnxfit.errors import SettingError
from onnxfit.trainable.quantized.packing import repacked
from tests.trainable.quantized.packed_files import (
    BLOCK,
    BLOCKS,
    FORMS,
    K,
    N,
    arrays_of,
    packed_file,
    spread,
    unpacked,
    zero_points_of,
)

PACKED = [form for form in FORMS if "float" not in getattr(form, "values", form)]


def packed_again(model: onnx.ModelProto, weight: np.ndarray) -> onnx.ModelProto:
    """The model with another weight."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, tensor in repacked(model.graph.node[0], tensors, lambda _: weight).items():
        tensors[name].CopyFrom(tensor)
    return model


def dequantized(model: onnx.ModelProto, bits: int) -> np.ndarray:
    arrays = arrays_of(model)
    numbers = unpacked(arrays["q"].reshape(N, -1), bits)[:, :K].T
    return spread(arrays["s"]) * (numbers - zero_points_of(model, bits))


def weights() -> np.ndarray:
    """Columns of any sign, of one sign, and a column of zeros."""
    array = np.random.default_rng(1).normal(size=(K, N)).astype(np.float32)
    array[:, 1], array[:, 2], array[:, 3] = np.abs(array[:, 1]), -np.abs(array[:, 2]), 0
    return array


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("bits", "zeros"), PACKED)
def test_the_error_is_at_most_the_rounding(bits: int, zeros: str, flat: bool) -> None:
    weight = weights()
    model = packed_again(packed_file(bits, zeros, flat=flat), weight)
    scale = np.abs(spread(arrays_of(model)["s"]))
    # Without zero points, the largest integer is one step below the range.
    bound = scale if zeros == "absent" else scale / 2
    error = np.abs(dequantized(model, bits) - weight)
    if zeros == "packed":
        bound = bound + scale / 2  # the zero point is rounded, too
    assert (error <= bound * (1 + 1e-5)).all()
    assert np.median(error[:, 0] / scale[:, 0]) < 0.5
    assert not dequantized(model, bits)[:, 3].any()


@pytest.mark.parametrize(("bits", "zeros"), PACKED)
def test_the_dequantized_weight_changes(bits: int, zeros: str) -> None:
    model = packed_file(bits, zeros)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    seen = []
    repacked(model.graph.node[0], tensors, lambda w: seen.append(w) or w)
    np.testing.assert_allclose(seen[0], dequantized(model, bits), rtol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_are_those_of_the_quantizer_of_onnxruntime(bits: int, symmetric: bool) -> None:
    state = onnxruntime.capi._pybind_state
    quantize = getattr(state, f"quantize_matmul_{bits}bits", None)
    if quantize is None:
        pytest.skip("this onnxruntime has no such quantizer")
    weight = weights()
    packed = np.zeros((N, BLOCKS, BLOCK * bits // 8), np.uint8)
    scales = np.zeros((N, BLOCKS), np.float32)
    zeros = np.zeros((N, -(-BLOCKS * bits // 8)), np.uint8)
    padded = np.pad(weight, ((0, BLOCKS * BLOCK - K), (0, 0)))
    quantize(packed, padded, scales, zeros, BLOCK, N, K, symmetric)
    model = packed_again(packed_file(bits, "absent" if symmetric else "packed"), weight)
    found = arrays_of(model)
    np.testing.assert_array_equal(
        unpacked(found["q"].reshape(N, -1), bits)[:, :K],
        unpacked(packed.reshape(N, -1), bits)[:, :K],
    )
    constant = np.arange(N) == 3  # its scale is 0 there
    np.testing.assert_allclose(found["s"][~constant], scales[~constant], rtol=2e-7)
    if not symmetric:
        np.testing.assert_array_equal(
            unpacked(found["z"], bits)[:, :BLOCKS], unpacked(zeros, bits)[:, :BLOCKS]
        )


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (packed_file(4, "float"), "zero points 'z' are floats"),
        (packed_file(2), "4 or 8 bits"),
    ],
    ids=["float zero points", "2 bits"],
)
def test_other_forms_are_refused(model: onnx.ModelProto, reason: str) -> None:
    before = [to_array(tensor).tobytes() for tensor in model.graph.initializer]
    with pytest.raises(SettingError, match=reason):
        packed_again(model, weights())
    assert before == [to_array(tensor).tobytes() for tensor in model.graph.initializer]
