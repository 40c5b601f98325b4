"""Read-only arrays, for the arguments of metrics and losses."""

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
    """Raise SettingError if the block writes to a read-only array.

    `subject` is the beginning of the message: who changes which array.
    """
    try:
        yield
    except ValueError as error:
        if "read-only" not in str(error):  # NumPy has no class for this error
            raise
        raise SettingError(
            f"{subject} in place, but other code reads the same arrays ({error}). Change a copy:"
            " array.copy()."
        ) from error
