"""Arrays that a metric or a loss gets and must not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from onnxfit.errors import SettingError


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of an array that cannot be written."""
    view = array.view()
    view.flags.writeable = False
    return view


@contextmanager
def refusing_writes(subject: str) -> Iterator[None]:
    """Raise SettingError where the block writes into a read-only array.

    `subject` says who changes which array.
    """
    try:
        yield
    except ValueError as error:
        if "read-only" not in str(error):  # NumPy has no class of its own for this error
            raise
        raise SettingError(
            f"{subject} in place, which others read as well ({error}). Change a copy: array.copy()."
        ) from error
