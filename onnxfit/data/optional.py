"""Libraries that only some data needs, imported when such data is passed."""

from __future__ import annotations

import importlib
from typing import Any

from onnxfit.errors import InstallationError


def import_optional(module: str, extra: str, library: str) -> Any:
    """Import and return `module`, which comes with `library`.

    InstallationError, which names the `extra` of onnxfit to install, where it is missing.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InstallationError(
            f'This data needs {library} ({error}): pip install "onnxfit[{extra}]"'
        ) from error
