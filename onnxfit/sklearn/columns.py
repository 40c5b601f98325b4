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

    The scale of a column that is constant, up to rounding, is 1, and a column whose squares are
    beyond the range of its type stays as it is. `weights` are those of the rows.
    """
    numbers = data.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        center = np.average(numbers, axis=0, weights=weights)
        scale = np.sqrt(np.average((numbers - center) ** 2, axis=0, weights=weights))
    least = np.sqrt(float(np.finfo(data.dtype).tiny))  # whose square is a number of this type
    rounding = len(data) * np.finfo(np.float64).eps * np.abs(center)
    constant = scale <= np.maximum(rounding, least)
    in_range = scale < 1 / least
    return Scaling(np.where(in_range, center, 0.0), np.where(in_range & ~constant, scale, 1.0))


def relative_weights(weights: Array) -> Array:
    """Return sample weights with a mean of 1. SettingError for negative ones, and zeros only."""
    if weights.min() < 0:
        raise SettingError(f"sample_weight is at least 0, got {weights.min()}.")
    total = weights.sum()
    if not total:
        raise SettingError("sample_weight is 0 for all rows.")
    relative: Array = weights * (len(weights) / total)
    return relative


def weights_of_classes(
    class_weight: ClassWeight, classes: Array, y: Array, weights: Array
) -> Array:
    """Return a weight for each class; `y` has the number of each row's class in `classes`.

    "balanced" gives all classes of `y` the same total weight. SettingError for anything else but a
    dict label -> number >= 0; classes that it does not name have 1.
    """
    if isinstance(class_weight, str) and class_weight == "balanced":
        totals = np.bincount(y, weights, minlength=len(classes))
        present = totals > 0
        balanced = totals.sum() / (present.sum() * np.where(present, totals, 1.0))
        return np.where(present, balanced, 1.0)
    if not isinstance(class_weight, Mapping):
        raise SettingError(
            f"class_weight is 'balanced', a dict label -> weight or None, got {class_weight!r}."
        )
    try:
        found = np.asarray(
            compute_class_weight(dict(class_weight), classes=classes, y=classes[y]), np.float64
        )
    except (TypeError, ValueError) as error:
        raise SettingError(f"class_weight does not fit the labels: {error}") from error
    if not (np.isfinite(found).all() and found.min() >= 0):
        raise SettingError(f"class_weight has finite numbers >= 0, got {class_weight!r}.")
    return found
