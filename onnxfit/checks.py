"""Checks of settings and arguments: numbers in ranges, choices, names and types."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import ge, gt, le, lt
from typing import Any, TypeVar

import numpy as np

from onnxfit.errors import SettingError, UnknownNameError, argument_error

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

MAX_CHARACTERS_SHOWN = 100  # length of a value in a message


# ---------------------------------------------------------------------- numbers


def is_number(value: object) -> bool:
    """Return whether `value` is a real number of Python or NumPy; a bool is not one."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Return whether a value is an integer of Python or NumPy, but no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_float(value: Any) -> bool:
    """Return whether `value` is a real number that a float can hold, infinities included."""
    return is_number(value) and (is_finite(value) or abs(value) == math.inf)


def is_finite(value: float) -> bool:
    """Return whether `value`, as a float, is neither NaN nor infinite."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number outside the range of floats
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
    number within the bounds, or with `sequence` a sequence of such numbers.

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
            (False, True): " to be a whole number",
            (True, False): " to be numbers",
            (True, True): " to be whole numbers",
        }[sequence, whole]
        wanted = f"{name}{article} {expected}".strip()
        raise SettingError(f"{type(owner).__name__} needs {wanted}, got {shortened(given)}.")
    set_field(owner, name, tuple(values) if sequence else values[0])


def _is_within(
    value: Any, kind: type, bounds: list[tuple[float, Callable[[Any, Any], bool]]]
) -> bool:
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    number: Any = value
    return is_finite(number) and all(holds(number, bound) for bound, holds in bounds)


# ---------------------------------------------------------------------- settings


def set_field(owner: object, name: str, value: Any) -> None:
    """Store the normalized value of a field of a frozen dataclass, in its `__post_init__`."""
    object.__setattr__(owner, name, value)


def require_at_least(owner: str, minimum: float, **settings: float | None) -> None:
    """Raise SettingError for the first setting below `minimum`, or NaN.

    - `owner`: the class with the settings, named in the message.
    - `settings`: name -> value; None passes.
    """
    for name, value in settings.items():
        if value is not None and not value >= minimum:
            raise SettingError(f"{owner} needs {name} >= {minimum}, got {shortened(value)}.")


def require_below(owner: str, bound: int, **settings: int) -> None:
    """Raise SettingError for the first setting that is not below `bound`.

    - `owner`: the class with the settings, named in the message.
    - `settings`: name -> value.
    """
    for name, value in settings.items():
        if value >= bound:
            raise SettingError(f"{owner} needs {name} < {bound}, got {shortened(value)}.")


def require_choice(needed: str, value: object, choices: Iterable[str | None]) -> None:
    """Raise SettingError unless a value is one of several.

    - `needed`: the beginning of the message, such as "mode must be".

    >>> require_choice("mode must be", "average", ("min", "max"))
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: mode must be 'min' or 'max', got 'average'.
    """
    *others, last = choices
    if not (value is None or isinstance(value, str)) or value not in (*others, last):
        listed = f"{', '.join(map(repr, others))} or {last!r}" if others else repr(last)
        raise SettingError(f"{needed} {listed}, got {shortened(value)}.")


def require_frequency(
    needed: str, value: object, words: Collection[str] = ("epoch", "batch")
) -> None:
    """Raise SettingError unless a value is a whole number >= 1 or one of some words.

    - `needed`: the beginning of the message, which lists the words.
    """
    is_count = is_integer(value) and value >= 1  # type: ignore[operator]
    if not is_count and value not in words:
        raise SettingError(f"{needed}, got {value!r}.")


# ---------------------------------------------------------------------- arguments


def check_arguments(function: F) -> F:
    """Check the arguments of a function against its annotations, each time it is called.

    - `function`: a function, method or constructor. It must itself check arguments whose annotation
      cannot be evaluated, such as unions with classes that only type checkers import.

    SettingError: an argument is of another kind. A number may be infinite, but not NaN. A flag may
    be 0 or 1. The elements of mappings and sequences are checked too, but not those of iterables.

    >>> @check_arguments
    ... def wait(seconds: float, times: int = 1) -> None: ...
    >>> wait("long")
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: wait needs seconds to be a number, got 'long'.
    """

    @functools.cache  # at the first call: an import decorates functions that it does not call
    def signature() -> inspect.Signature:
        return inspect.signature(function)

    @functools.cache
    def kinds() -> dict[str, Any]:
        parameters = signature().parameters
        evaluated = {
            name: _evaluated(name, parameter.annotation, function.__globals__)
            for name, parameter in parameters.items()
        }
        for name, parameter in parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                evaluated[name] = types.GenericAlias(dict, (str, evaluated[name]))
        return evaluated

    @functools.wraps(function)
    def checked(*positional: Any, **named: Any) -> Any:
        try:
            given = signature().bind(*positional, **named).arguments
        except TypeError:
            owner = _owner(function, positional)
            raise argument_error(owner, signature(), len(positional), named) from None
        for name, value in given.items():
            kind = kinds()[name]
            if not _fits(value, kind):
                raise SettingError(
                    f"{_owner(function, positional)} needs {name} to be {_describe(kind)}, got"
                    f" {shortened(value)}."
                )
        return function(*positional, **named)

    return typing.cast("F", checked)


class ChecksArguments:
    """Base class whose constructor raises ArgumentError for an argument that it does not take.

    It is for dataclasses, whose constructors are generated and therefore cannot have a decorator.
    """

    def __new__(cls: type[T], *positional: Any, **named: Any) -> T:
        signature = _constructor_signature(cls.__init__)
        try:
            # A copy is made without arguments, and gets its attributes afterwards.
            if positional or named:
                signature.bind(None, *positional, **named)
        except TypeError:
            raise argument_error(cls.__name__, signature, len(positional) + 1, named) from None
        return object.__new__(cls)


@functools.lru_cache(maxsize=256)
def _constructor_signature(constructor: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(constructor)


def checks_names(function: F) -> F:
    """Raise ArgumentError for arguments that a function does not take, without checking values.

    - `function`: a function, method or constructor.

    ArgumentError: an argument has an unknown name, is one too many, or is missing.
    """

    @functools.cache
    def signature() -> inspect.Signature:
        return inspect.signature(function)

    @functools.wraps(function)
    def checked(*positional: Any, **named: Any) -> Any:
        try:
            signature().bind(*positional, **named)
        except TypeError:
            owner = _owner(function, positional)
            raise argument_error(owner, signature(), len(positional), named) from None
        return function(*positional, **named)

    return typing.cast("F", checked)


def name_list(setting: str, names: Any) -> list[str]:
    """Return one name or several as a list.

    SettingError: it is something else; the message names the `setting`.
    """
    listed = [names] if isinstance(names, str) else names
    if not _fits(listed, Sequence[str]):
        raise SettingError(f"{setting} must be a name or a list of names, got {shortened(names)}.")
    return list(listed)


def matching_names(pattern: str, known: Sequence[str], kind: str) -> set[str]:
    """Return the known names that a name or an fnmatch pattern selects.

    - `kind`: the kind of the named things, for the message.

    UnknownNameError: no name matches.
    """
    matches = {pattern} if pattern in known else {n for n in known if fnmatchcase(n, pattern)}
    if not matches:
        raise UnknownNameError(kind, pattern, known)
    return matches


def shortened(value: object) -> str:
    """Return the repr of a value for a message, at most `MAX_CHARACTERS_SHOWN` long."""
    if isinstance(value, int) and abs(value) >= 10**MAX_CHARACTERS_SHOWN:
        return "a whole number of more than 100 digits"  # Python refuses to print one of 5000
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_CHARACTERS_SHOWN else f"{text[: MAX_CHARACTERS_SHOWN - 1]}…"


def _owner(function: Callable[..., Any], positional: tuple[Any, ...]) -> str:
    """Return the name of the class for a constructor, and otherwise the name of the function."""
    if function.__name__ == "__init__":
        return type(positional[0]).__name__
    return function.__name__


def _evaluated(name: str, annotation: Any, names: dict[str, Any]) -> Any:
    """Return the annotation of a parameter as an object.

    The result is Any if a part of the annotation exists for type checkers only. `from __future__
    import annotations` turns annotations into strings, which `typing` turns back into objects.
    """
    if annotation is inspect.Parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    try:
        return typing.get_type_hints(holder, names)[name]
    except NameError:
        return Any


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value fits an annotation."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if kind in _PLAIN_KINDS:
        return _PLAIN_KINDS[kind][0](value)
    if origin is Callable:
        return callable(value)
    if origin in (Mapping, dict):
        key, entry = arguments
        return isinstance(value, Mapping) and all(
            _fits(k, key) and _fits(v, entry) for k, v in value.items()
        )
    if origin in (Sequence, list):
        is_text = isinstance(value, (str, bytes, Mapping))
        return (
            isinstance(value, Collection)
            and not is_text
            and np.ndim(value if isinstance(value, np.ndarray) else ()) == 1
            and all(_fits(entry, arguments[0]) for entry in value)
        )
    kind = origin or kind
    if not isinstance(kind, type) or kind is tuple or getattr(kind, "_is_protocol", False):
        return True  # the function checks the value itself
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    """Return an annotation in words."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        is_path = any(typing.get_origin(a) is os.PathLike for a in arguments)
        return " or ".join(_describe(a) for a in arguments if not (is_path and a is str))
    if kind in _PLAIN_KINDS:
        return _PLAIN_KINDS[kind][1]
    if origin in (Mapping, dict):
        return f"a dict that maps {' to '.join(_describe(a) for a in arguments)}"
    if origin in (Sequence, list, Iterable):
        return f"a list in which every entry is {_describe(arguments[0])}"
    if origin is Callable:
        return "a function"
    if origin is os.PathLike:
        return "a path"
    name = str(getattr(origin or kind, "__name__", kind))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _is_flag(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1))


# annotation -> whether a value fits, and its description
_PLAIN_KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    Any: (lambda value: True, "anything"),
    None: (lambda value: value is None, "None"),
    type(None): (lambda value: value is None, "None"),
    bool: (_is_flag, "True or False"),
    int: (lambda value: isinstance(value, numbers.Integral), "a whole number"),
    float: (is_float, "a number"),
    str: (lambda value: isinstance(value, str), "a string"),
}
