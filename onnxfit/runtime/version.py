"""The version of the installed onnxruntime."""

from __future__ import annotations

import onnxruntime

__all__ = ["onnxruntime_version"]


def onnxruntime_version() -> tuple[int, ...]:
    """Return the major and minor version of the installed onnxruntime."""
    return tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
