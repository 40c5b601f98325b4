"""Conversion between float32 and float16, for messages of half the size."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__: list[str] = []


class Float16Converter(Protocol):
    """Converter of arrays in C order. It rounds to nearest, and ties to even."""

    def narrow(self, numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
        """Return the numbers as float16; numbers outside its range become infinite."""
        ...

    def widen(self, numbers: npt.NDArray[np.float16], out: npt.NDArray[np.float32]) -> None:
        """Write the numbers to `out`, which has the same number of elements."""
        ...


class NumpyConverter:
    """Converter that uses NumPy, in software: about 6 ns per number to float16, and 2 ns back."""

    def narrow(self, numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
        with np.errstate(over="ignore"):  # numbers outside the range of float16 become infinite
            return numbers.astype(np.float16)

    def widen(self, numbers: npt.NDArray[np.float16], out: npt.NDArray[np.float32]) -> None:
        out[...] = numbers
