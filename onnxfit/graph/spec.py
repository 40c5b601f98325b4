"""Name, element type and shape of a tensor, for messages and for matching data with a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import onnx_ir as ir

Dim = Union[int, str, None]  # a size, the name of a size, or unknown


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type and shape of a tensor.

    - `name`: the name of the tensor in the graph.
    - `dtype`: the element type.
    - `shape`: one entry for each dimension: a size, the name of a size, or None if unknown. The
      whole shape is None if the number of dimensions is unknown.
    - `batch_axis`: the axis that counts the rows of a batch; None for a value without rows, which
      is the same for all rows of a batch.

    >>> str(TensorSpec("x", np.dtype("float32"), ("batch", 1, 28, 28)))
    'x: float32[batch, 1, 28, 28]'
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[Dim, ...] | None
    batch_axis: int | None = 0

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name}: {self.dtype}[?]"
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.dtype}[{sizes}]"

    @property
    def rank(self) -> int | None:
        """The number of dimensions, or None if unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def has_rows(self) -> bool:
        """Whether the tensor has a row for each sample, as far as its shape is known."""
        return self.batch_axis is not None and self.shape != ()

    @property
    def rows(self) -> Dim:
        """The size of the batch axis; None if it is unknown or there is no such axis."""
        return self.shape[self.batch_axis] if self.shape and self.batch_axis is not None else None

    def rows_first(self) -> TensorSpec:
        """Return the spec with the batch on the first axis.

        >>> str(TensorSpec("state", np.dtype("float32"), (2, "batch", 5), 1).rows_first())
        'state: float32[batch, 2, 5]'
        """
        if not self.batch_axis or self.shape is None:
            return self
        others = (size for axis, size in enumerate(self.shape) if axis != self.batch_axis)
        return TensorSpec(self.name, self.dtype, (self.rows, *others))

    def with_rows(self) -> TensorSpec:
        """Return the spec with an axis of rows. A scalar belongs to the only row of a batch.

        >>> str(TensorSpec("score", np.dtype("float32"), ()).with_rows())
        'score: float32[1]'
        """
        return TensorSpec(self.name, self.dtype, (1,)) if self.shape == () else self

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array of this shape fits.

        It fits if it has the same rank, and the same size wherever the spec has a number.

        - `shape`: the shape of the array.
        """
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            not isinstance(size, int) or size == actual for size, actual in zip(self.shape, shape)
        )


def known_sizes(inferred: ir.Shape | None, before: ir.Shape | None) -> ir.Shape | None:
    """Return the sizes that are known from one of two shapes of a value.

    The inference of a whole model keeps names of sizes that the inference of one operator loses.
    """
    if inferred is None or inferred == before:
        return before
    if before is None or len(inferred) != len(before):
        return inferred
    dims = []
    for new, old in zip(inferred, before):
        unnamed = isinstance(old, ir.SymbolicDim) and old.value is None
        dims.append(new if isinstance(new, int) or unnamed else old)
    return ir.Shape(dims)
