"""Backends: the ways to run a training step, as one graph or as several.

A backend is a subclass of `Backend` with a `name`, listed in the `__all__` of a module of this
package. Adding one takes no other change.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

from onnxfit.errors import UnknownNameError
from onnxfit.runtime.backends.backend import Backend

__all__ = ["BACKENDS", "Backend", "find_backends", "get_backend"]


def find_backends() -> dict[str, type[Backend]]:
    """Return the backends that the modules of this package list in their `__all__`, by name."""
    backends: dict[str, type[Backend]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{info.name}")
        for exported in getattr(module, "__all__", ()):
            member = getattr(module, exported)
            is_backend = isinstance(member, type) and issubclass(member, Backend)
            if is_backend and not inspect.isabstract(member):
                backends[member.name] = member
    return backends


BACKENDS: dict[str, type[Backend]] = find_backends()


def get_backend(name: str) -> type[Backend]:
    """Return the backend called `name`; UnknownNameError suggests the nearest name."""
    if name not in BACKENDS:
        raise UnknownNameError("backend", name, BACKENDS)
    return BACKENDS[name]
