"""Sparse matrices of SciPy, whose rows become dense in the batch that reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxfit.data.batch import Array


class SparseRows:
    """A sparse matrix whose selected rows are dense arrays.

    The whole matrix never becomes dense, unless it is passed to `np.asarray`.

    - `matrix`: a sparse matrix or array of SciPy with two axes, in any format.
    """

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix.tocsr()
        self.shape: tuple[int, ...] = matrix.shape
        self.ndim = len(self.shape)
        self.dtype: np.dtype[Any] = matrix.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        dense: Array = self._matrix[rows].toarray()
        return dense

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        dense: Array = self._matrix.toarray()
        return dense if dtype is None else dense.astype(dtype)

    @property
    def stored(self) -> Array:
        """The elements that the matrix stores."""
        stored: Array = self._matrix.data
        return stored


def with_sparse_rows(value: Any) -> Any:
    """Return a sparse matrix of SciPy as SparseRows, and any other value unchanged."""
    is_matrix = hasattr(value, "tocsr") and hasattr(value, "toarray")
    return SparseRows(value) if is_matrix and len(value.shape) == 2 else value
