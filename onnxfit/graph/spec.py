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

    >>> str(TensorSpec("x", np.dtype("float32"), ("batch", 1, 28, 28)))
    'x: float32[batch, 1, 28, 28]'
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[Dim, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name}: {self.dtype}[?]"
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.dtype}[{sizes}]"

    @property
    def rank(self) -> int | None:
        """The number of dimensions, or None if unknown."""
        return None if self.shape is None else len(self.shape)

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
