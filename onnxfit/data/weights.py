"""Sample weights of rows or of single labels, and class weights looked up for each row."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxfit.data.batch import Array, Target
from onnxfit.data.convert import as_array, is_float
from onnxfit.errors import DataError, SettingError

SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
LARGEST = float(np.finfo(np.float32).max)
EXPECTED = (
    f"0 or a finite number that float32 can represent, of magnitude {SMALLEST:.2g} to"
    f" {LARGEST:.2g}. Divide all weights by the same number"
)


def checked_weights(sample_weight: Any, name: str = "sample_weight") -> Array:
    """Return sample weights as float32 of shape `(rows,)` or `(rows, ...)`, trailing 1s removed.

    - `name`: the name of the weights, for messages.

    DataError: a single number, or weights that are NaN or infinite, or become 0 in float32.
    Negative weights are allowed, as in Keras.
    """
    array = as_array(sample_weight, name)
    while array.ndim > 1 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim == 0:
        raise DataError(
            f"{name} is a single number. Expected one weight for each row, shape (n,), or"
            " one for each label."
        )
    with np.errstate(over="ignore", under="ignore"):
        weights = array.astype(np.float32, copy=False)
    wrong = ~np.isfinite(weights) | ((weights == 0) & (array != 0))
    if wrong.any():
        place = np.unravel_index(int(wrong.argmax()), wrong.shape)
        given = "NaN" if np.isnan(array[place]) else f"{array[place].item():g}"
        raise DataError(f"{name} is {given} in row {place[0]}. Expected {EXPECTED}.")
    return weights


def check_shape_of_weights(weights: Array, labels: Mapping[str, Array], name: str) -> None:
    """Raise DataError if the shape of the weights differs from the first axes of the labels.

    - `name`: the name of the weights, for messages.
    - `labels`: name -> array. Labels with an axis of classes may have weights without this axis.
    """
    for label, array in labels.items():
        shape = array.shape
        without_classes = [shape[:axis] + shape[axis + 1 :] for axis in range(1, array.ndim)]
        if weights.shape not in (shape[: weights.ndim], *without_classes):
            raise DataError(
                f"{name} has shape {weights.shape}, but {label} has shape {shape}. Pass one"
                f" weight for each row, shape ({len(weights)},), or one for each label."
            )


def without_weightless_rows(arrays: Sequence[Array], weights: Array) -> list[Array]:
    """Return the arrays with non-finite rows of weight 0 replaced by another row.

    0 times infinity is NaN, so a non-finite row of weight 0 would influence the result. It is
    replaced in all arrays by the first row with a nonzero weight, or by zeros if all weights are 0.
    Arrays without rows are not changed. If each label has its own weight, a row has weight 0 only
    if all its labels have weight 0.
    """
    counts = (weights != 0).any(axis=tuple(range(1, weights.ndim)))
    weightless = np.flatnonzero(~counts)
    replaced = np.zeros(len(weightless), np.bool_)
    for array in arrays if weightless.size else ():
        if array.ndim and not _all_finite(array):
            finite = np.isfinite(array[weightless]).reshape(len(weightless), -1)
            replaced |= ~finite.all(axis=1)
    rows = weightless[replaced]
    if not rows.size:
        return list(arrays)
    return [_with_other_rows(array, rows, np.flatnonzero(counts)[:1]) for array in arrays]


def without_weightless_labels(labels: Array, weights: Array) -> Array:
    """Return the labels with non-finite labels of weight 0 replaced by a finite label.

    - `labels`: the labels.
    - `weights`: the weight of each label. The replacement is the first finite label, or 0.
    """
    if weights.ndim == 1 or weights.shape != labels.shape[: weights.ndim] or _all_finite(labels):
        return labels
    counts = weights.reshape(weights.shape + (1,) * (labels.ndim - weights.ndim)) != 0
    finite = np.isfinite(labels)
    stand_in = labels.flat[finite.argmax()] if finite.any() else 0
    return np.where(counts | finite, labels, stand_in).astype(labels.dtype, copy=False)


def _all_finite(array: Array) -> bool:
    if not is_float(array.dtype) or not array.size:
        return True
    # The extremes are finite if all elements are, and computing them needs no array of booleans.
    return bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _with_other_rows(array: Array, rows: Array, stand_in: Array) -> Array:
    """Return a copy with `rows` replaced by the row `stand_in`, or by zeros if that is empty."""
    if not array.ndim:
        return array
    array = array.copy()
    array[rows] = array[stand_in] if stand_in.size else 0
    return array


def checked_class_weight(
    class_weight: Mapping[int, float] | None, targets: Mapping[str, Target]
) -> dict[int, float] | None:
    """Return class weights as a dict of ints and floats.

    SettingError: they are not class weights, or the model does not have exactly one output with
    labels.
    """
    if class_weight is None:
        return None
    if len(targets) != 1:
        raise SettingError(
            "class_weight needs a model with exactly one output with labels, but the model has"
            f" {len(targets)}. Pass sample_weight instead."
        )
    try:
        weights = {operator.index(label): float(weight) for label, weight in class_weight.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise SettingError(
            f"class_weight must be a dict class number -> weight, got {class_weight!r}."
        ) from None
    for label, weight in weights.items():
        size = abs(weight)
        if not (size == 0 or SMALLEST <= size <= LARGEST):
            raise SettingError(
                f"class_weight is {weight:g} for class {label} in {class_weight!r}. Expected"
                f" {EXPECTED}."
            )
    return weights


def balanced_class_weight(word: str, labels: Any) -> dict[int, float]:
    """Return a weight for each class that gives all classes the same total weight.

    It is `rows / (classes * rows of the class)`, as in scikit-learn. SettingError: `word` is not
    "balanced", or `labels` is not an array. DataError: the labels are not classes.
    """
    if word != "balanced":
        raise SettingError(
            f"class_weight must be a dict class number -> weight, or 'balanced', got {word!r}."
        )
    if isinstance(labels, Mapping) and len(labels) == 1:
        labels = next(iter(labels.values()))
    if labels is None or isinstance(labels, (Mapping, tuple)):
        raise SettingError(
            "class_weight='balanced' counts the classes in y and needs y to be an array. Pass y as"
            " an array, or class_weight as a dict class number -> weight."
        )
    classes, counts = np.unique(class_numbers(as_array(labels, "y")), return_counts=True)
    weights = counts.sum() / (len(classes) * counts)
    return {int(label): float(weight) for label, weight in zip(classes, weights)}


def weights_by_class(labels: Array, class_weight: Mapping[int, float]) -> Array:
    """Return a float32 weight for each row by its class, 1 for classes without a weight."""
    classes, inverse = np.unique(class_numbers(labels), return_inverse=True)
    return np.array([class_weight.get(int(c), 1.0) for c in classes], np.float32)[inverse]


def class_numbers(labels: Array) -> Array:
    """Return the class of each row: its integer label, or the position of the 1 in a one-hot row.

    DataError: the labels are of another kind.
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2 and labels.size and _is_one_hot(labels):
        labels = labels.argmax(axis=1)
    whole = np.isfinite(labels) & (labels == np.rint(labels))
    if labels.ndim != 1 or not whole.all():
        raise DataError(
            "class_weight needs integer classes (n,) or one-hot rows (n, classes), got"
            f" {labels.dtype} of shape {labels.shape}."
        )
    return labels


def _is_one_hot(labels: Array) -> bool:
    ones_and_zeros = np.all((labels == 0) | (labels == 1))
    return bool(ones_and_zeros and np.all(labels.sum(axis=1) == 1))
