"""Classes that are found by name, and their settings.

A module's `__all__` is its registry: to add a class, write it in one place. The settings of such a
class are the fields of a dataclass.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

from onnxfit.errors import OnnxfitError, SettingError, UnknownNameError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

MAX_CHARACTERS_SHOWN = 100  # length of a value in a message


# ---------------------------------------------------------------------- names


def snake_case(name: str) -> str:
    """Return the name that users type for a class, without separating acronyms. A class's `aliases`
    add other names.

    >>> [snake_case(n) for n in ("MeanSquaredError", "L1", "SGD", "AdamW", "RMSprop")]
    ['mean_squared_error', 'l1', 'sgd', 'adamw', 'rmsprop']
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower()


def registry(module: str, base: type[T]) -> dict[str, type[T]]:
    """Return the concrete subclasses of `base` that the module called `module` exports, by the
    names users type: the class's own in snake case, and its `aliases`. A class with `named = False`
    has no name, because it needs an object as its argument.
    """
    exports = sys.modules[module]
    classes: dict[str, type[T]] = {}
    for name in exports.__all__:
        member = getattr(exports, name)
        if (
            isinstance(member, type)
            and issubclass(member, base)
            and not getattr(member, "__abstractmethods__", None)
            and vars(member).get("named", True)
        ):
            for key in (snake_case(name), *vars(member).get("aliases", ())):
                classes[key] = member
    return classes


def lookup(kind: str, name: str, known: dict[str, type[T]], /, **settings: Any) -> T:
    """Return an instance, with these `settings`, of the class that `known` has under `name`.

    Case, underscores, hyphens, spaces, a module before the name and a "loss" at the end do not
    matter, so that "torch.nn.MSELoss" is "mse". UnknownNameError: the name is unknown; the message
    has `kind`, such as "loss", and the nearest name.
    """
    found = find(name, known)
    if found is None:
        raise UnknownNameError(kind, name, known)
    return found(**settings)


def find(name: str, known: Mapping[str, T]) -> T | None:
    """Return the entry of `known` for a name as `lookup` compares names, or None."""
    name = name.rpartition(".")[2]
    for key in (name, snake_case(name), name.lower()):
        if key in known:
            return known[key]
    return {_bare(key): entry for key, entry in known.items()}.get(_bare(name))


def _bare(name: str) -> str:
    """Return a name in lower case, without the parts that libraries write differently."""
    return re.sub(r"[-_ ]", "", name.lower()).removesuffix("loss")


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
            settings[field.name] = _configured(value)
    config: dict[str, Any] = {"name": type(instance).__name__}
    if settings:
        config["settings"] = settings
    return config


def _configured(value: Any) -> Any:
    """Return a setting with `to_config` of the dataclasses in it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_config(value)
    if isinstance(value, dict):
        return {key: _configured(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_configured, value))
    return value


def from_config(config: Any, *modules: str) -> Any:
    """Return the instance that `to_config` wrote as `config`; other values are returned unchanged,
    but for the instances in lists and dicts.

    Only the concrete dataclasses that the onnxfit modules called `modules` export are
    instantiated: nothing is imported, and no function is called. SettingError: the name is unknown,
    or the class does not take the settings.
    """
    if isinstance(config, (list, tuple)):
        return type(config)(from_config(entry, *modules) for entry in config)
    if not isinstance(config, dict):
        return config
    if not isinstance(config.get("name"), str):
        return {key: from_config(entry, *modules) for key, entry in config.items()}
    name, settings = config["name"], config.get("settings", {})
    for module in modules:
        exports = sys.modules[module]
        member = getattr(exports, name) if name in exports.__all__ else None
        if _is_concrete_dataclass(member):
            break
    else:
        raise SettingError(f"{name!r} is not a class of onnxfit. Pass the object itself.")
    if not isinstance(settings, dict):
        raise SettingError(f"The settings of {name} must be a dict, got {settings!r}.")
    arguments = {key: from_config(value, *modules) for key, value in settings.items()}
    try:
        return member(**arguments)
    except OnnxfitError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise SettingError(f"{name} does not take the settings {settings!r}: {error}.") from error


def is_exported(kind: type, module: str) -> bool:
    """Return whether the imported module called `module` has a class in its `__all__`.

    The class may be defined in another module, such as one of a package.
    """
    exports, name = sys.modules[module], kind.__name__
    return name in exports.__all__ and getattr(exports, name) is kind


def _is_concrete_dataclass(member: object) -> TypeGuard[type[Any]]:
    is_dataclass = isinstance(member, type) and dataclasses.is_dataclass(member)
    return is_dataclass and not getattr(member, "__abstractmethods__", None)


def exported_members(package: str) -> dict[str, Any]:
    """Return what the modules of an imported package list in their `__all__`, by name.

    The modules are imported in alphabetical order. A new file in the package's folder is found
    without an edit; the package's own imports are for type checkers, which do not run this search.
    """
    members: dict[str, Any] = {}
    for info in pkgutil.iter_modules(sys.modules[package].__path__):
        module = importlib.import_module(f"{package}.{info.name}")
        members |= {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return members


def is_newest(cls: type, method: str, *others: str) -> bool:
    """Return whether no subclass of the class that defines `method` has overridden one of `others`.

    So a method that repeats what other methods do is not used with newer versions of those.

    >>> class Base:
    ...     def add(self): ...
    ...     def add_fast(self): ...
    >>> class Changed(Base):
    ...     def add(self): ...
    >>> is_newest(Base, "add_fast", "add"), is_newest(Changed, "add_fast", "add")
    (True, False)
    """
    for base in cls.__mro__:
        if method in vars(base):
            return True
        if not vars(base).keys().isdisjoint(others):
            return False
    return False
