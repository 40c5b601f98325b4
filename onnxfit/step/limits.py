"""Reject settings that the element types of a model cannot represent.

A Python number becomes a constant in the type of the tensor that it is combined with. Outside the
range of that type it would become infinite or 0, and the weights NaN after one step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from onnxfit.data.convert import is_float
from onnxfit.errors import SettingError

DType = np.dtype[Any]

# A learning rate that is 0 in the type of a weight correctly leaves the weight unchanged.
MAY_BE_ZERO = ("learning_rate",)


def largest(dtype: DType) -> float:
    """Return the largest finite number of a type of floats."""
    return float(_finfo(dtype).max)


def smallest(dtype: DType) -> float:
    """Return the smallest number above 0 of a type of floats."""
    return float(_finfo(dtype).smallest_subnormal)


def check_fits(owner: object, dtype: DType, place: str) -> None:
    """Raise SettingError if a number among the fields of `owner` is infinite or 0 in `dtype`.

    `owner` is an optimizer, a loss or a penalty; `place` names the tensor of this type.
    """
    if not dataclasses.is_dataclass(owner):
        return
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        for number in _numbers(value):
            if not _fits(number, dtype, field.name in MAY_BE_ZERO):
                raise _limit_error(f"{type(owner).__name__}'s {field.name}", value, dtype, place)


def check_loss_weight(weight: Any, dtype: DType, output: str) -> float:
    """Return the factor of an output's loss as a float; SettingError if it does not fit `dtype`."""
    name = f"loss_weights[{output!r}]"
    try:
        number = float(weight)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise SettingError(f"{name} must be a finite number, got {weight!r}.")
    if not _fits(number, dtype, zero=False):
        raise _limit_error(name, weight, dtype, f"output {output!r}")
    return number


def norm_dtype(dtypes: Collection[DType]) -> DType:
    """Return the type in which the common norm of gradients of these types is computed.

    The squares of a float16 overflow beyond 256.
    """
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)


def clip_bound(name: str, bound: float | None, dtypes: Collection[DType]) -> float | None:
    """Return a bound of gradients of these types; None if it can clip nothing.

    SettingError: the bound is 0 in one of the types.
    """
    if bound is None or all(bound > largest(dtype) for dtype in dtypes):
        return None
    for dtype in dtypes:
        if not _fits(min(bound, largest(dtype)), dtype, zero=False):
            raise _limit_error(name, bound, dtype, "a gradient")
    return float(bound)


def _finfo(dtype: DType) -> Any:
    # ml_dtypes has no annotations
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in the value of a field that may become constants of floats.

    Whole numbers in the range of int64 are skipped: most are axes, counts and indices.
    """
    if isinstance(value, (float, np.floating)):
        yield float(value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield math.inf if value > 0 else -math.inf
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)


def _fits(number: float, dtype: DType, zero: bool) -> bool:
    """Return whether a number fits `dtype`; `zero` tells whether it may become 0."""
    if not is_float(dtype):  # the loss itself rejects this output
        return True
    size = abs(number)
    if not size <= largest(dtype):
        return False
    return zero or not size or bool(np.array(number).astype(dtype) != 0)


def _limit_error(name: str, value: object, dtype: DType, place: str) -> SettingError:
    return SettingError(
        f"{name} must be between {smallest(dtype):.2g} and {largest(dtype):.2g} in magnitude, the"
        f" range of {dtype} (the element type of {place}), got {value!r}. Use a number in this"
        " range, or 0 if 0 is allowed."
    )
