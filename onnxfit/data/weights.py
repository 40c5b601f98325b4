"""Weights of the rows: sample weights, or class weights looked up for each row."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxfit.data.batch import Array, Target
from onnxfit.data.convert import as_array
from onnxfit.errors import DataError, SettingError


def row_weights(sample_weight: Any) -> Array:
    """Return sample weights as float32 of shape `(rows,)`. DataError for another shape."""
    array = as_array(sample_weight, "sample_weight")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(
            f"sample_weight has one number a row, shape (n,) or (n, 1), got {array.shape}."
        )
    return array.astype(np.float32, copy=False)


def checked_class_weight(
    class_weight: Mapping[int, float] | None, targets: Mapping[str, Target]
) -> dict[int, float] | None:
    """Return class weights as a dict of ints and floats.

    SettingError where they are none, or the model has not exactly one output with labels.
    """
    if class_weight is None:
        return None
    if len(targets) != 1:
        raise SettingError(
            f"class_weight needs exactly one output with labels, the model has {len(targets)}: pass"
            " sample_weight."
        )
    try:
        weights = {operator.index(label): float(weight) for label, weight in class_weight.items()}
    except (AttributeError, TypeError, ValueError):
        raise SettingError(
            f"class_weight is a dict class number -> weight, got {class_weight!r}."
        ) from None
    if not all(map(math.isfinite, weights.values())):
        raise SettingError(f"class_weight holds finite numbers, got {class_weight!r}.")
    return weights


def weights_by_class(labels: Array, class_weight: Mapping[int, float]) -> Array:
    """Return a float32 weight for each row by its class, 1 for classes without a weight.

    The class is the integer label, or the position of the 1 in a one-hot row.
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2 and labels.size and _is_one_hot(labels):
        labels = labels.argmax(axis=1)
    if labels.ndim != 1 or not np.array_equal(labels, np.rint(labels)):
        raise DataError(
            "class_weight needs integer classes (n,) or one-hot rows (n, classes), got"
            f" {labels.dtype} of shape {labels.shape}."
        )
    classes, inverse = np.unique(labels, return_inverse=True)
    return np.array([class_weight.get(int(c), 1.0) for c in classes], np.float32)[inverse]


def _is_one_hot(labels: Array) -> bool:
    ones_and_zeros = np.all((labels == 0) | (labels == 1))
    return bool(ones_and_zeros and np.all(labels.sum(axis=1) == 1))
