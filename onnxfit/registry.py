"""Classes that are found by name, and their settings.

A module's `__all__` is its registry: a class is added by writing it in one place. The settings of
such a class are the fields of a dataclass.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import numbers
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from operator import ge, gt, le, lt
from typing import Any, TypeGuard, TypeVar

import numpy as np

from onnxfit.errors import OnnxfitError, SettingError, UnknownNameError

T = TypeVar("T")


# ---------------------------------------------------------------------- names


def snake_case(name: str) -> str:
    """Return the name that users type for a class; acronyms run together. A class's `aliases` add
    other names.

    >>> [snake_case(n) for n in ("MeanSquaredError", "L1", "SGD", "AdamW", "RMSprop")]
    ['mean_squared_error', 'l1', 'sgd', 'adamw', 'rmsprop']
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower()


def registry(module: str, base: type[T]) -> dict[str, type[T]]:
    """Return the concrete subclasses of `base` that the module called `module` exports, by the
    names users type: the class's own in snake case, and its `aliases`.
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


def lookup(kind: str, name: str, known: dict[str, type[T]], /, **settings: Any) -> T:
    """Return an instance, with these `settings`, of the class that `known` has under `name`, under
    the name in snake case or in lower case.

    UnknownNameError with the nearest name; `kind` says in the message what was looked for.
    """
    for key in (name, snake_case(name), name.lower()):
        if key in known:
            return known[key](**settings)
    raise UnknownNameError(kind, name, known)


# ---------------------------------------------------------------------- settings


def is_number(value: object) -> bool:
    """Return whether `value` is a real number of Python or NumPy; a bool is not one."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def is_finite(value: float) -> bool:
    """Return whether a float holds `value`, and is neither NaN nor infinite."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of floats
        return False


def check_number(
    owner: object,
    name: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    whole: bool = False,
    sequence: bool = False,
) -> None:
    """Raise SettingError unless the field `name` of `owner`, a frozen dataclass, is a finite
    number within the bounds; with `sequence`, several.

    Numbers of NumPy become numbers of Python and sequences become tuples, in place, so that
    settings are hashable and survive JSON.
    """
    given: Any = getattr(owner, name)
    values: list[Any] = [given]
    if sequence:
        is_sequence = isinstance(given, Iterable) and not isinstance(given, str)
        values = list(given) if is_sequence else [None]
    values = [v.item() if isinstance(v, np.generic) else v for v in values]
    limits = ((">=", at_least, ge), (">", above, gt), ("<=", at_most, le), ("<", below, lt))
    bounds = [(sign, bound, holds) for sign, bound, holds in limits if bound is not None]
    kind = numbers.Integral if whole else numbers.Real
    if not all(_is_within(value, kind, [(b, holds) for _, b, holds in bounds]) for value in values):
        expected = " and ".join(f"{sign} {bound}" for sign, bound, _ in bounds)
        article = {
            (False, False): "",
            (False, True): "a whole number as ",
            (True, False): "numbers as ",
            (True, True): "whole numbers as ",
        }[sequence, whole]
        raise SettingError(
            f"{type(owner).__name__} needs {article}{name} {expected}, got {given!r}."
        )
    object.__setattr__(owner, name, tuple(values) if sequence else values[0])


def _is_within(
    value: Any, kind: type, bounds: list[tuple[float, Callable[[Any, Any], bool]]]
) -> bool:
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    number: Any = value
    return is_finite(number) and all(holds(number, bound) for bound, holds in bounds)


# ---------------------------------------------------------------------- JSON


def to_config(instance: Any) -> dict[str, Any]:
    """Return a dataclass of a registry as JSON: its class name, and the fields that differ from
    their defaults.
    """
    settings = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if field.default_factory is dataclasses.MISSING:
            default = field.default
        else:
            default = field.default_factory()
        if field.init and value != default:
            settings[field.name] = to_config(value) if dataclasses.is_dataclass(value) else value
    config: dict[str, Any] = {"name": type(instance).__name__}
    if settings:
        config["settings"] = settings
    return config


def from_config(config: Any, *modules: str) -> Any:
    """Return the instance that `to_config` wrote as `config`; any other value is returned as it is.

    Only the concrete dataclasses that the onnxfit modules called `modules` export are
    instantiated: nothing is imported, and no function is called. SettingError for another name, and
    for settings that the class does not take.
    """
    if not (isinstance(config, dict) and isinstance(config.get("name"), str)):
        return config
    name, settings = config["name"], config.get("settings", {})
    for module in modules:
        exports = sys.modules[module]
        member = getattr(exports, name) if name in exports.__all__ else None
        if _is_concrete_dataclass(member):
            break
    else:
        raise SettingError(f"{name!r} is not one of onnxfit's own; pass the object itself.")
    if not isinstance(settings, dict):
        raise SettingError(f"The settings of {name} are a dict, got {settings!r}.")
    arguments = {key: from_config(value, *modules) for key, value in settings.items()}
    try:
        return member(**arguments)
    except OnnxfitError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise SettingError(f"{name} does not take the settings {settings!r}: {error}.") from error


def _is_concrete_dataclass(member: object) -> TypeGuard[type[Any]]:
    is_dataclass = isinstance(member, type) and dataclasses.is_dataclass(member)
    return is_dataclass and not getattr(member, "__abstractmethods__", None)


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
