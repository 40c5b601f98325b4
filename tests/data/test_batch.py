"""Batches: what they show is what they write, and signatures tell shapes apart."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfit.data.batch import Batch
from onnxfit.graph.spec import TensorSpec
from tests.data.kinds import KINDS, kinds, make


@kinds
@pytest.mark.parametrize("shuffle", [False, True])
def test_write_copies_what_arrays_shows(kind: str, shuffle: bool) -> None:
    with make(*KINDS[kind](), shuffle=shuffle) as data:
        for batch in data.batches(1):
            arrays = batch.arrays()
            buffers = {name: np.full_like(array, np.nan) for name, array in arrays.items()}
            buffers["train/step"] = np.array(7)  # what a step has besides stays as it is
            batch.write(buffers)
            assert buffers.pop("train/step") == 7
            for name, array in arrays.items():
                np.testing.assert_array_equal(buffers[name], array, strict=True)


@kinds
def test_the_signature_tells_shapes_apart_and_nothing_else(kind: str) -> None:
    with make(*KINDS[kind](), shuffle=False) as data:
        first, second, last = (batch.signature for batch in data.batches(0))
    assert hash(first) == hash(second)
    assert first == second != last


def test_the_signature_holds_names_types_and_scalars() -> None:
    def signature(**arrays: np.ndarray) -> object:
        inputs = [
            TensorSpec(n, a.dtype, a.shape if a.ndim == 0 else ("N", *a.shape[1:]))
            for n, a in arrays.items()
        ]
        return next(
            make(arrays, inputs=inputs, targets={}, purpose="prediction").batches(0)
        ).signature

    some = {"a": np.zeros((2, 3), np.float32), "b": np.float32(1)}
    assert signature(**some) == signature(**some)
    others = [
        {"a": np.zeros((2, 3), np.int32), "b": some["b"]},
        {"c": some["a"], "b": some["b"]},
        {"a": np.zeros((2, 4), np.float32), "b": some["b"]},
    ]
    assert len({signature(**arrays) for arrays in (some, *others)}) == 4


def test_a_batch_of_some_arrays_is_as_one_made_of_them() -> None:
    x, y, factor = np.arange(4.0), np.arange(4, 8), np.array(3, np.float32)
    batch = Batch(2, "", (("x", x), ("y", y)), (("factor", factor),), slice(1, 3), whole_rows=4)
    some = batch.only({"y", "factor"})
    assert {name: array.tolist() for name, array in some.arrays().items()} == {
        "y": [5, 6],
        "factor": 3.0,
    }
    assert (some.rows, some.whole_rows) == (2, 4)
    inputs = [TensorSpec("y", y.dtype, ("N",)), TensorSpec("factor", factor.dtype, ())]
    arrays = {"y": y[1:3], "factor": factor}
    made = make(arrays, inputs=inputs, targets={}, purpose="prediction").batches(0)
    assert some.signature == next(made).signature


def test_scalars_are_written_beside_the_rows() -> None:
    x, factor = np.arange(4, dtype=np.float32), np.array(3, np.float32)
    batch = Batch(2, "", (("x", x),), (("factor", factor),), slice(1, 3))
    buffers = {"x": np.zeros(2, np.float32), "factor": np.zeros((), np.float32)}
    batch.write(buffers)
    assert buffers["x"].tolist() == [1, 2]
    assert buffers["factor"] == 3
    assert batch.arrays()["factor"] is factor
