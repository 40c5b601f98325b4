"""Memory that the process has freed, and that the C library keeps."""

from __future__ import annotations

import ctypes
import sys

# only glibc has it
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def return_freed_memory() -> None:
    """Give the memory that the process has freed back to the system, if the C library can.

    A session makes several copies of its tensors while it is created. The C library keeps their
    memory: three times the size of a 4-bit base after each session.
    """
    if _trim is not None:
        _trim(0)
