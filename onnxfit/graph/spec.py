"""What a tensor is called and what it looks like, for messages and for fitting data to a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

import numpy as np

Dim = Union[int, str, None]  # a size, the name of a size, or unknown


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, element type and shape; `shape` None means an unknown rank.

    >>> str(TensorSpec("x", np.dtype("float32"), ("batch", 1, 28, 28)))
    'x: float32[batch, 1, 28, 28]'
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[Dim, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name}: {self.dtype}[?]"
        return (
            f"{self.name}:"
            f" {self.dtype}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"
        )

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape fits: the same rank, and the same size wherever the spec
        has a number.
        """
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            not isinstance(d, int) or d == s for d, s in zip(self.shape, shape)
        )
