"""Conversion between float32 and float16 by onnxruntime, and who uses it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx.parser

from onnxfit import Trainer
from onnxfit.distributed.mpi import NumpyConverter
from onnxfit.runtime.float16 import CastConverter, convert_by_casts
from tests.distributed.threads import on_ranks


def numbers() -> np.ndarray:
    """Return float32 numbers of all magnitudes, halves between two float16, infinities and NaN."""
    near = np.arange(2**16, dtype=np.uint32) << 16
    offsets = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000], np.uint32)
    return (near[:, None] + offsets).ravel().view(np.float32)


def test_both_converters_give_the_same_bits() -> None:
    cast, reference = CastConverter(1), NumpyConverter()
    wide = numbers()
    wide = wide[~np.isnan(wide)]  # whose other bits nobody reads
    narrow = reference.narrow(wide)
    np.testing.assert_array_equal(cast.narrow(wide).view(np.uint16), narrow.view(np.uint16))
    expected, out = np.empty(narrow.shape, np.float32), np.empty(narrow.shape, np.float32)
    reference.widen(narrow, expected)
    cast.widen(narrow, out)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
    assert np.isnan(cast.narrow(np.full(3, np.nan, np.float32))).all()


def test_shapes_stay_and_empty_arrays_are_converted() -> None:
    cast = CastConverter(1)
    wide = np.arange(6, dtype=np.float32).reshape(2, 3)
    narrow = cast.narrow(wide)
    assert narrow.dtype == np.float16
    assert narrow.tolist() == wide.tolist()
    assert cast.narrow(wide[:0]).shape == (0, 3)
    out = np.empty((3, 2), np.float32)
    cast.widen(narrow, out)
    assert out.ravel().tolist() == wide.ravel().tolist()


def test_a_trainer_converts_by_onnxruntime_for_a_communicator_that_compresses() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> net (float[N, 2] x) => (float[N, 1] y)'
        "<float[2, 1] w = {1, 2}> { y = MatMul(x, w) }"
    )

    def converter(communicator: object, compression: str | None) -> object:
        communicator.compression = compression  # type: ignore[attr-defined]
        communicator.converter = None  # type: ignore[attr-defined]
        Trainer(model, loss="mean_squared_error", optimizer=0.1, distribute=communicator)
        return communicator.converter  # type: ignore[attr-defined]

    assert {type(c) for c in on_ranks(2, lambda c: converter(c, "float16"))} == {CastConverter}
    assert on_ranks(2, lambda c: converter(c, None)) == [None, None]


def test_other_communicators_stay_as_they_are() -> None:
    plain = SimpleNamespace()
    convert_by_casts(plain, 1)
    convert_by_casts(None, 1)
    assert not vars(plain)
