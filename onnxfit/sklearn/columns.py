"""Scales of columns, weights of rows, and rows to validate on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Union

import numpy as np
import numpy.typing as npt
import scipy.sparse
from sklearn.utils.class_weight import compute_class_weight

from onnxfit.errors import SettingError
from onnxfit.graph.dense import Scaling

Array = npt.NDArray[Any]
ClassWeight = Union[Mapping[Any, float], str, None]


def standardization(data: Array, weights: Array | None) -> Scaling:
    """Return mean and standard deviation of each column of `data`, shape `(rows, columns)`.

    `data` is an array, or a sparse matrix in the format CSR, which stays sparse. The scale of a
    column that is constant, up to rounding, is 1. A column whose squares are outside the range of
    its type is not scaled. `weights` are the weights of the rows.
    """
    moments = sparse_moments if scipy.sparse.issparse(data) else _dense_moments
    with np.errstate(over="ignore", invalid="ignore"):
        center, scale = moments(data, weights)
    minimum = np.sqrt(float(np.finfo(data.dtype).tiny))  # smallest number whose square is normal
    rounding = data.shape[0] * np.finfo(np.float64).eps * np.abs(center)
    constant = scale <= np.maximum(rounding, minimum)
    in_range = scale < 1 / minimum
    return Scaling(np.where(in_range, center, 0.0), np.where(in_range & ~constant, scale, 1.0))


def _dense_moments(data: Array, weights: Array | None) -> tuple[Array, Array]:
    numbers = data.astype(np.float64)
    center = np.average(numbers, axis=0, weights=weights)
    return center, np.sqrt(np.average((numbers - center) ** 2, axis=0, weights=weights))


def sparse_moments(data: Any, weights: Array | None) -> tuple[Array, Array]:
    """Return mean and standard deviation of each column of a CSR matrix, as float64 arrays."""
    matrix = data.copy()
    matrix.sum_duplicates()
    rows, columns = matrix.shape
    weights = np.ones(rows) if weights is None else weights
    numbers = matrix.data.astype(np.float64)
    of_numbers = np.repeat(weights, np.diff(matrix.indptr))

    def sums(values: Array) -> Array:
        return np.bincount(matrix.indices, values, minlength=columns)

    total = weights.sum()
    center = sums(of_numbers * numbers) / total
    squares = sums(of_numbers * (numbers - center[matrix.indices]) ** 2)
    squares += np.maximum(total - sums(of_numbers), 0) * center**2  # the elements that are 0
    return center, np.sqrt(squares / total)


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


def validation_pair(X_val: Any, y_val: Any, eval_set: Any) -> tuple[Any, Any] | None:
    """Return the validation data of a fit as `(X, y)`, or None if it has no validation data.

    - `X_val`, `y_val`, `eval_set`: as in `fit` of the estimators.

    SettingError: the validation data is incomplete, given twice, or several sets.
    """
    if eval_set is None:
        if (X_val is None) != (y_val is None):
            missing = "X_val" if X_val is None else "y_val"
            raise SettingError(f"X_val and y_val belong together, but {missing} is missing.")
        return None if X_val is None else (X_val, y_val)
    if X_val is not None or y_val is not None:
        raise SettingError("Pass eval_set, or X_val and y_val, not both.")
    pairs = [eval_set] if isinstance(eval_set, tuple) and len(eval_set) == 2 else list(eval_set)
    if len(pairs) != 1 or len(pairs[0]) != 2:
        raise SettingError(
            f"eval_set must have exactly one pair, [(X, y)], got {len(pairs)} sets with"
            f" {', '.join(str(len(pair)) for pair in pairs)} items. train_losses_ already has the"
            " loss on the training data."
        )
    return pairs[0][0], pairs[0][1]
