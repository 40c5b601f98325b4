"""Sums over many numbers, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

from onnxfit.graph.sums import sum_of_squares
from onnxfit.step.finish import finish
from tests.graph.graphs import empty


def summed(x: np.ndarray[Any, Any]) -> float:
    op, (value,) = empty(("x", x.dtype, x.shape))
    op.output("s", sum_of_squares(op, value))
    session = onnxruntime.InferenceSession(
        finish(op).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (s,) = session.run(None, {"x": x})
    assert s.shape == ()
    return float(s)


@pytest.mark.parametrize("shape", [(2000, 1500), (3 * 10**6,), (64, 3, 7, 7), (3,), (), (0, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_norm_is_right_to_five_digits(shape: tuple[int, ...], dtype: Any) -> None:
    """Of equal numbers, whose rounding does not cancel, and of random ones."""
    rng = np.random.default_rng(0)
    for x in (np.full(shape, 0.1, dtype), np.asarray(np.exp(rng.normal(size=shape)), dtype)):
        expected = np.linalg.norm(x.astype(np.float64))
        assert np.sqrt(summed(x)) == pytest.approx(expected, rel=1e-5)
