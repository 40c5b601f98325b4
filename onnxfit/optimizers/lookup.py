"""Optimizers by name."""

from __future__ import annotations

from typing import Any, Union

from onnxfit.checks import (
    is_finite,
    is_number,
    shortened,
)
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.optimizers.base import Optimizer
from onnxfit.optimizers.momentum import SGD
from onnxfit.optimizers.other_names import advice_for_optimizer, similar_optimizer
from onnxfit.registry import find, registry

__all__ = ["get_optimizer"]

REGISTRY = "onnxfit.optimizers"

OptimizerLike = Union[str, float, Optimizer]


def get_optimizer(spec: OptimizerLike) -> Optimizer:
    """Return the optimizer that `spec` specifies.

    `spec` is a name (such as "adam"; case does not matter), an Optimizer, which is returned itself,
    or a number: SGD with that learning rate. UnknownNameError (a SettingError): the name is
    unknown; the message has the nearest name. SettingError: the name is that of a setting or a
    schedule here, and the message has the object to pass; or `spec` is anything else.

    >>> get_optimizer("rmsprop").eps, get_optimizer(0.5).learning_rate
    (1e-08, 0.5)
    """
    if isinstance(spec, Optimizer):
        return spec
    if isinstance(spec, str):
        return _by_name(spec)
    given: Any = spec
    if is_number(given):
        return SGD(float(given) if is_finite(given) else given)
    hint = ""
    if isinstance(given, type) and issubclass(given, Optimizer):
        hint = f" Pass an instance: {given.__name__}()."
    raise SettingError(
        f"optimizer must be a name, an Optimizer or a number, got {shortened(given)}.{hint}"
    )


def _by_name(name: str) -> Optimizer:
    known = registry(REGISTRY, Optimizer)  # type: ignore[type-abstract]
    found = find(name, known)
    if found is not None:
        return found()
    advice = advice_for_optimizer(name)
    if advice:
        raise SettingError(f"{name!r} is not the name of an optimizer of onnxfit.{advice}")
    raise UnknownNameError("optimizer", name, known, similar_optimizer(name))
