"""Datasets of Hugging Face."""

from __future__ import annotations

import numpy as np

from onnxfit.data import permutation
from tests.data.kinds import NAMED, ROWS, Columns, X, make, whole


def test_columns_are_shuffled_by_rows() -> None:
    np.testing.assert_array_equal(
        whole(make(Columns(NAMED), shuffle=True, seed=3), 2)["x"], X[permutation(3, 2, ROWS)]
    )
