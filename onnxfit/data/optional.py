"""Libraries that only some data needs, imported where it is met."""

from __future__ import annotations

import importlib
from typing import Any

from onnxfit.errors import InstallationError


def optional(module: str, extra: str, library: str) -> Any:
    """The module. InstallationError, which says what to install, where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InstallationError(
            f'This data needs {library} ({error}): pip install "onnxfit[{extra}]"'
        ) from error
