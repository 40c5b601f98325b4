"""Lazy imports of libraries that only some kinds of data need."""

from __future__ import annotations

import importlib
from typing import Any

from onnxfit.errors import InstallationError


def import_optional(module: str, extra: str, library: str) -> Any:
    """Import and return `module`, which is part of `library`.

    InstallationError: the library is missing; the message names the `extra` of onnxfit to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InstallationError(
            f'This kind of data needs {library} ({error}): pip install "onnxfit[{extra}]"'
        ) from error
