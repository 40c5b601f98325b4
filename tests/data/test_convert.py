"""Arrays in the shapes and types of the graph: nothing is lost silently."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfit.errors import DataError
from onnxfit.graph.spec import TensorSpec
from tests.data.kinds import ROWS, X, Y, make, spec, whole


def test_an_unknown_rank_takes_any_shape() -> None:
    anything = [TensorSpec("x", np.dtype("float32"), None)]
    for x in (X, X[:, 0], X.reshape(ROWS, 1, 2, 1)):
        assert whole(make(x, Y, inputs=anything))["x"].shape == x.shape


@pytest.mark.parametrize(
    ("given_dtype", "wanted"),
    [("int64", "float32"), ("uint8", "float32"), ("bool", "float32"), ("float32", "float64"), ("int64", "int32"), ("int32", "int64"),
     ("uint8", "int64"), ("float64", "int64"), ("float32", "int32"), ("bool", "int64"), ("int64", "bool"), ("float16", "float32"), (">f4", "float32"),
     ("int8", "float16")],
)  # fmt: skip
def test_types_that_lose_nothing_convert_silently(given_dtype: str, wanted: str) -> None:
    x = np.array([[0, 1], [1, 0]]).astype(given_dtype)
    arrays = whole(make(x, Y[:2], inputs=[spec("x", "N", 2, dtype=wanted)]))
    np.testing.assert_array_equal(arrays["x"], np.array([[0, 1], [1, 0]], wanted), strict=True)


@pytest.mark.parametrize(
    ("x", "wanted", "message"),
    [
        (
            np.array([[0.5, 1]], np.float32),
            "int64",
            r"float32 values that int64 cannot represent, such as 0.5",
        ),
        (np.array([[np.nan, 1]]), "int64", "cannot represent, such as nan"),
        (
            np.array([[2**40, 1]]),
            "int32",
            f"int64 values that int32 cannot represent, such as {2**40}",
        ),
        (np.array([[-1, 1]]), "uint8", "cannot represent, such as -1"),
        (np.array([[2**64 - 1, 1]], np.uint64), "int64", "cannot represent"),
        (np.array([[1e300, 1]]), "float32", "outside the range of float32"),
        (np.array([[70000, 1]]), "float16", "outside the range of float16"),
        (np.array([[2, 1]]), "bool", "bool cannot represent, such as 2"),
    ],
)
def test_types_that_lose_values_do_not_convert(x: np.ndarray, wanted: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"^x: {wanted}\[N, 2\] got .*{message}"):
        make(x, Y[:1], inputs=[spec("x", "N", 2, dtype=wanted)])
