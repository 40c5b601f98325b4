"""Optimizers by name."""

from __future__ import annotations

from typing import Any, Union

from onnxfit.checks import (
    is_finite,
    is_number,
    shortened,
)
from onnxfit.errors import SettingError
from onnxfit.optimizers.base import Optimizer
from onnxfit.optimizers.momentum import SGD
from onnxfit.registry import lookup, registry

__all__ = ["get_optimizer"]

REGISTRY = "onnxfit.optimizers"

OptimizerLike = Union[str, float, Optimizer]


def get_optimizer(spec: OptimizerLike) -> Optimizer:
    """Return the optimizer that `spec` specifies.

    `spec` is a name (such as "adam"; case does not matter), an Optimizer, which is returned itself,
    or a number: SGD with that learning rate. UnknownNameError (a SettingError): the name is
    unknown; the message has the nearest name. SettingError: `spec` is anything else.

    >>> get_optimizer("rmsprop").eps, get_optimizer(0.5).learning_rate
    (1e-08, 0.5)
    """
    if isinstance(spec, Optimizer):
        return spec
    if isinstance(spec, str):
        known = registry(REGISTRY, Optimizer)  # type: ignore[type-abstract]
        return lookup("optimizer", spec, known)
    given: Any = spec
    if is_number(given):
        return SGD(float(given) if is_finite(given) else given)
    hint = ""
    if isinstance(given, type) and issubclass(given, Optimizer):
        hint = f" Pass an instance: {given.__name__}()."
    raise SettingError(
        f"optimizer must be a name, an Optimizer or a number, got {shortened(given)}.{hint}"
    )
