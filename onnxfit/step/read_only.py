"""Arrays that a metric or a loss gets and must not change."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from onnxfit.errors import SettingError


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of an array that cannot be written."""
    view = array.view()
    view.flags.writeable = False
    return view


def explain_write(error: ValueError, subject: str) -> None:
    """Raise SettingError if NumPy's `error` is the refusal to write into a read-only array.

    `subject` says who changes which array.
    """
    if "read-only" in str(error):
        raise SettingError(
            f"{subject} in place, which others read as well ({error}). Change a copy: array.copy()."
        ) from error
