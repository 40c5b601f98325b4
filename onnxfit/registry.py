"""Classes looked up by name: a module's `__all__` is the registry, so that adding a class is one
place.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
from typing import Any, TypeVar

from onnxfit.errors import SettingError, UnknownNameError

T = TypeVar("T")


def snake_case(name: str) -> str:
    """The name users type for a class; acronyms run together, and a class's `aliases` add what
    people type besides.

    >>> [snake_case(n) for n in ("MeanSquaredError", "L1", "SGD", "AdamW", "RMSprop")]
    ['mean_squared_error', 'l1', 'sgd', 'adamw', 'rmsprop']
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower()


def registry(module: str, base: type[T]) -> dict[str, type[T]]:
    """The concrete subclasses of `base` that a module exports, by the name users type (and each
    class's own `aliases`).
    """
    exports = sys.modules[module]
    classes: dict[str, type[T]] = {}
    for name in exports.__all__:
        member = getattr(exports, name)
        if (
            isinstance(member, type)
            and issubclass(member, base)
            and not getattr(member, "__abstractmethods__", None)
        ):
            for key in (snake_case(name), *vars(member).get("aliases", ())):
                classes[key] = member
    return classes


def lookup(kind: str, name: str, known: dict[str, type[T]], **settings: Any) -> T:
    """An instance of the class called `name`, or UnknownNameError with the nearest name."""
    if name not in known:
        raise UnknownNameError(kind, name, known)
    return known[name](**settings)


def to_config(instance: Any) -> dict[str, Any]:
    """A dataclass of a registry as JSON: its class name and the fields that differ from their
    defaults.
    """
    fields = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        default = (
            field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
        )
        if field.init and value != default:
            fields[field.name] = to_config(value) if dataclasses.is_dataclass(value) else value
    return {"name": type(instance).__name__, **({"settings": fields} if fields else {})}


def from_config(config: Any, *modules: str) -> Any:
    """The inverse of `to_config`: only classes that the given onnxfit modules export are made;
    nothing is imported or run.
    """
    if not (isinstance(config, dict) and isinstance(config.get("name"), str)):
        return config
    for module in modules:
        exports = sys.modules[module]
        if config["name"] in exports.__all__:
            settings = {k: from_config(v, *modules) for k, v in config.get("settings", {}).items()}
            return getattr(exports, config["name"])(**settings)
    raise SettingError(f"{config['name']!r} is not one of onnxfit's own; pass the object itself.")


def exported_members(package: str) -> dict[str, Any]:
    """Return what the modules of an imported package list in their `__all__`, by name.

    The modules are imported in alphabetical order. So one file in the package's folder adds a
    member, and nothing else has to be edited.
    """
    members: dict[str, Any] = {}
    for info in pkgutil.iter_modules(sys.modules[package].__path__):
        module = importlib.import_module(f"{package}.{info.name}")
        members |= {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return members
