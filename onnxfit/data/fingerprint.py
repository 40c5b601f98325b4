"""Fingerprints of arrays: a cheap check that several processes have the same data."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

MAX_BYTES_PER_END = 32 * 1024  # a checksum covers this much of the first rows, and of the last


def fingerprint_of(columns: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return each column's name, element type, shape and checksum, as JSON values.

    - `columns`: pairs (name, array), or anything that NumPy reads as an array.
    """
    described = {name: _description_of(value) for name, value in columns}
    return {
        "columns": list(described),
        **{f"column {name}": values for name, values in described.items()},
    }


def checksum(*texts: str) -> int:
    """Return a number that differs if the texts differ."""
    return zlib.crc32("\0".join(texts).encode(errors="surrogatepass"))


def _description_of(value: Any) -> list[Any]:
    array = getattr(value, "stored", value)  # a sparse matrix would become dense
    if not isinstance(array, np.ndarray):
        array = np.asarray(value)
    return [str(array.dtype), [int(size) for size in array.shape], _checksum_of_ends(array)]


def _checksum_of_ends(array: np.ndarray[Any, Any]) -> int:
    """Return the checksum of the first and the last rows, or of parts of them if they are large."""
    if not array.size:
        return 0
    if array.nbytes <= 2 * MAX_BYTES_PER_END:
        return zlib.crc32(array.tobytes())
    row_bytes = array.nbytes // len(array)
    rows = MAX_BYTES_PER_END // row_bytes
    if rows:
        first, last = array[:rows].tobytes(), array[-rows:].tobytes()
    else:  # `flat` reads only these elements of a row
        elements = MAX_BYTES_PER_END // array.itemsize
        first = array[:1].flat[:elements].tobytes()
        last = array[-1:].flat[-elements:].tobytes()
    return zlib.crc32(last, zlib.crc32(first))
