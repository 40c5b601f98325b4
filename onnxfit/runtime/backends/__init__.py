"""Backends: the ways to run a training step, as one graph or as several.

A backend is a subclass of `Backend` with a `name`, listed in the `__all__` of a module of this
package. Adding one takes no other change.
"""

from __future__ import annotations

import inspect

from onnxfit.errors import UnknownNameError
from onnxfit.registry import exported_members
from onnxfit.runtime.backends.backend import Backend

__all__ = ["BACKENDS", "Backend", "find_backends", "get_backend"]


def find_backends() -> dict[str, type[Backend]]:
    """Return the backends that the modules of this package list in their `__all__`, by name."""
    members = exported_members(__name__).values()
    classes = [m for m in members if isinstance(m, type) and issubclass(m, Backend)]
    return {cls.name: cls for cls in classes if not inspect.isabstract(cls)}


BACKENDS: dict[str, type[Backend]] = find_backends()


def get_backend(name: str) -> type[Backend]:
    """Return the backend called `name`. An UnknownNameError suggests the nearest name."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise UnknownNameError("backend", name, BACKENDS)
    return BACKENDS[name]
