"""Scales of columns, and weights of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Union

import numpy as np
import numpy.typing as npt
from sklearn.utils.class_weight import compute_class_weight

from onnxfit.errors import SettingError
from onnxfit.graph.dense import Scaling

Array = npt.NDArray[Any]
ClassWeight = Union[Mapping[Any, float], str, None]


def standardization(data: Array, weights: Array | None) -> Scaling:
    """Return mean and standard deviation of each column of `data`, shape `(rows, columns)`.

    The scale of a column that is constant, up to rounding, is 1. A column whose squares are outside
    the range of its type is not scaled. `weights` are the weights of the rows.
    """
    numbers = data.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        center = np.average(numbers, axis=0, weights=weights)
        scale = np.sqrt(np.average((numbers - center) ** 2, axis=0, weights=weights))
    least = np.sqrt(float(np.finfo(data.dtype).tiny))  # smallest number whose square is normal
    rounding = len(data) * np.finfo(np.float64).eps * np.abs(center)
    constant = scale <= np.maximum(rounding, least)
    in_range = scale < 1 / least
    return Scaling(np.where(in_range, center, 0.0), np.where(in_range & ~constant, scale, 1.0))


def relative_weights(weights: Array) -> Array:
    """Return sample weights with a mean of 1. SettingError: one is negative, or all are 0."""
    if weights.min() < 0:
        raise SettingError(f"sample_weight must be >= 0, got {weights.min()}.")
    total = weights.sum()
    if not total:
        raise SettingError("sample_weight must be above 0 for at least one row, got only zeros.")
    relative: Array = weights * (len(weights) / total)
    return relative


def weights_of_classes(
    class_weight: ClassWeight, classes: Array, y: Array, weights: Array
) -> Array:
    """Return a weight for each class; `y` has the number of each row's class in `classes`.

    "balanced" gives all classes of `y` the same total weight. Classes that a dict does not name
    have weight 1. SettingError: it is neither "balanced" nor a dict label -> number >= 0.
    """
    if isinstance(class_weight, str) and class_weight == "balanced":
        totals = np.bincount(y, weights, minlength=len(classes))
        present = totals > 0
        balanced = totals.sum() / (present.sum() * np.where(present, totals, 1.0))
        return np.where(present, balanced, 1.0)
    if not isinstance(class_weight, Mapping):
        raise SettingError(
            "class_weight must be 'balanced', a dict label -> weight or None, got"
            f" {class_weight!r}."
        )
    try:
        found = np.asarray(
            compute_class_weight(dict(class_weight), classes=classes, y=classes[y]), np.float64
        )
    except (TypeError, ValueError) as error:
        raise SettingError(f"class_weight does not fit the labels: {error}") from error
    if not (np.isfinite(found).all() and found.min() >= 0):
        raise SettingError(
            f"class_weight must have finite numbers >= 0 as weights, got {class_weight!r}."
        )
    return found
