"""Headers of .npy files, checked before memory is allocated for the array that they declare."""

from __future__ import annotations

import lzma
import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# The errors of NumPy and zipfile for damaged files. A false size in an archive gives MemoryError.
READ_ERRORS = (
    EOFError, KeyError, MemoryError, NotImplementedError, OSError, OverflowError, RuntimeError,
    TypeError, ValueError, lzma.LZMAError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class Header:
    """The header of an array in a file."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]


def read_header(file: BinaryIO, size: int) -> Header:
    """Read the header at the current position of a file, and stop at the array's bytes.

    - `file`: the file.
    - `size`: bytes of the .npy file from this position on.

    ValueError: the header is damaged, the array contains Python objects, or the file is too small
    for the array.
    """
    start = file.tell()
    version = np.lib.format.read_magic(file)
    if version not in HEADER_READERS:
        raise ValueError(f"version {version} of the .npy format is not supported.")
    try:
        shape, fortran_order, dtype = HEADER_READERS[version](file)
    except Exception as error:  # NumPy parses Python's syntax, which can fail in many ways
        raise ValueError(f"its header is damaged: {error}") from None
    if dtype.hasobject:
        raise ValueError("it contains Python objects, which could run code when read.")
    available = size - (file.tell() - start)
    needed = math.prod(shape) * dtype.itemsize
    if not dtype.itemsize or any(n < 0 for n in shape) or needed > available:
        raise ValueError(
            f"it declares an array of shape {shape} and type {dtype}, which needs"
            f" {needed} bytes, but the file has {available} bytes."
        )
    return Header(tuple(map(int, shape)), bool(fortran_order), dtype)
