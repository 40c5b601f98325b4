"""The exceptions of onnxfit.

A message says what happened, what was given, what was expected, and how to fix it.

    OnnxfitError
    ├── ModelError           (ValueError)    the model cannot be read, converted or trained
    │   └── GradientError                    operators on the gradient path have no gradient
    ├── SettingError         (ValueError)    an argument names or sets something impossible
    │   └── UnknownNameError (KeyError)      a name is unknown; the nearest known one is suggested
    ├── UnsupportedError     (TypeError)     an object cannot do what was asked of it
    ├── DataError            (ValueError)    a batch, a label or a shape does not fit the model
    ├── CheckpointError      (ValueError)    a checkpoint cannot be written or read
    ├── InstallationError    (RuntimeError)  the installed onnxruntime cannot do it
    ├── StepError            (RuntimeError)  onnxruntime failed while it compiled or ran a step
    └── DivergenceError      (RuntimeError)  the loss became NaN or infinite

The class in brackets is a base class, too, so that `except ValueError` works as expected.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "DataError",
    "DivergenceError",
    "GradientError",
    "InstallationError",
    "ModelError",
    "OnnxfitError",
    "SettingError",
    "StepError",
    "UnknownNameError",
    "UnsupportedError",
]

MAX_NAMES_LISTED = 100  # names that an error lists in full


class OnnxfitError(Exception):
    """The base of every exception below."""


class ModelError(OnnxfitError, ValueError):
    """The model cannot be read, converted or trained."""


class GradientError(ModelError):
    """Operators between the loss and the weights have no gradient; lists all of them."""


class SettingError(OnnxfitError, ValueError):
    """An argument names or sets something impossible."""


class UnknownNameError(SettingError, KeyError):
    """A name is unknown.

    - `kind`: the thing it should name, such as "loss".
    - `given`: the unknown name.
    - `known`: the names that exist; the message suggests the nearest one.

    >>> print(UnknownNameError("loss", "huver", ["mse", "huber"]))
    No loss is called 'huver'. Did you mean 'huber'? Known: huber, mse.
    """

    def __init__(self, kind: str, given: object, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(str(given), known, n=5, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if len(known) > MAX_NAMES_LISTED:
            known = [*(near or known[:5]), f"… ({len(known)} in all)"]
        self.message = f"No {kind} is called {given!r}.{hint} Known: {', '.join(known) or 'none'}."
        super().__init__(self.message)

    def __str__(self) -> str:  # KeyError would print the repr
        return self.message


class UnsupportedError(OnnxfitError, TypeError):
    """An object cannot do what was asked: a Trainer cannot be pickled, logs cannot be changed."""


class DataError(OnnxfitError, ValueError):
    """A batch, a label or a shape does not fit the model."""


class CheckpointError(OnnxfitError, ValueError):
    """A checkpoint cannot be written or read."""


class InstallationError(OnnxfitError, RuntimeError):
    """The installed onnxruntime cannot do what was asked."""


class StepError(OnnxfitError, RuntimeError):
    """onnxruntime failed while it compiled or ran a step."""


class DivergenceError(OnnxfitError, RuntimeError):
    """The loss became NaN or infinite."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the line of the user's code that led here, outside of onnxfit."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("onnxfit"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
