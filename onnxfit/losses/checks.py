"""Checks of settings and labels that several losses share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.checks import is_finite, is_number, set_field, shortened
from onnxfit.errors import SettingError
from onnxfit.graph.labels import refuse_where
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import Value
from onnxfit.losses.base import Loss, loss_name

Array = npt.NDArray[Any]
CLASS_LIMIT = 2**63  # class indices are int64 in the graph


def is_index(y_true: Value) -> bool:
    return y_true.dtype.kind in "iu"


def whole_numbers(loss: Loss, labels: Array, expected: str, y_pred: TensorSpec) -> Array:
    """Return labels as integers. DataError: a float is not a whole number."""
    if labels.dtype.kind != "f":
        return labels
    labels = labels.astype(np.float64, copy=False)  # the limit is infinite in float16
    with np.errstate(invalid="ignore"):  # NaN and infinity are rejected below
        whole = labels.astype(np.int64)
    # A float beyond the range becomes another integer on each kind of processor.
    wrong = (whole != labels) | (labels >= CLASS_LIMIT)
    refuse_where(loss_name(loss), labels, wrong, expected, y_pred)
    return whole


def refuse_outside(
    loss: Loss,
    labels: Array,
    last: int | None,
    expected: str,
    y_pred: TensorSpec,
    ignore_index: int | None,
) -> None:
    """Raise DataError for class indices outside of 0 to `last`, except `ignore_index`."""
    limit = CLASS_LIMIT if last is None else last + 1
    if not labels.size or (labels.min() >= 0 and labels.max() < limit):
        return
    wrong = (labels < 0) | (labels >= limit)
    if ignore_index is not None:
        wrong &= labels != ignore_index
    hint = ""
    if wrong.any() and labels[wrong][0] < 0:
        hint = f" To ignore these labels, set ignore_index={labels[wrong][0]}."
    refuse_where(loss_name(loss), labels, wrong, expected, y_pred, hint)


def class_axis(loss: Loss, axis: int | None, rank: int) -> int:
    chosen = axis
    if chosen is None:
        chosen = 1 if rank >= 4 else -1
    if isinstance(chosen, bool) or not isinstance(chosen, (int, np.integer)):
        raise SettingError(
            f"{type(loss).__name__} needs a whole number as axis, got {shortened(axis)}."
        )
    if rank < 2 or not -rank < chosen < rank or chosen == 0:
        setting = "" if axis is None else f" and axis={axis}"
        raise SettingError(
            f"{type(loss).__name__} needs an output with a batch axis and a class axis, got rank"
            f" {rank}{setting}."
        )
    return chosen % rank


def require(loss: Loss, expected: str, value: Any, holds: Callable[[Any], bool]) -> None:
    if not (is_number(value) and is_finite(value) and holds(value)):
        raise SettingError(f"{type(loss).__name__} needs {expected}, got {shortened(value)}.")


def set_numbers(
    loss: Loss, name: str, values: Any, expected: str, holds: Callable[[Any], bool]
) -> None:
    """Convert a setting with one number per class to a tuple of floats, which can be compared and
    stored as JSON.
    """
    try:
        numbers = tuple(float(v) for v in values)
    except (TypeError, ValueError, OverflowError):
        raise SettingError(
            f"{type(loss).__name__} needs a sequence of numbers as {name}, got {shortened(values)}."
        ) from None
    for number in numbers:
        require(loss, expected, number, holds)
    set_field(loss, name, numbers)


def check_length(
    loss: Loss, name: str, values: Sequence[float], y_pred: TensorSpec, axis: int
) -> None:
    size = (y_pred.shape or ())[axis]
    if isinstance(size, int) and size != len(values):
        raise SettingError(
            f"{type(loss).__name__} needs {size} numbers as {name}, one for each entry of axis"
            f" {axis} of {y_pred}, got {len(values)}."
        )
