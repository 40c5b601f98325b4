"""Labels, outputs and weights of a batch: rows that count, axes of classes, and decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxfit.checks import is_finite, is_number, name_list, require_choice, shortened
from onnxfit.errors import DataError, SettingError, warn_user
from onnxfit.metrics.base import Array, Metric


def softmax(scores: Array) -> Array:
    """The softmax over the last axis, in float64."""
    odds = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    return np.asarray(odds / odds.sum(axis=-1, keepdims=True))


def sigmoid(scores: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * scores.astype(np.float64))))


def each_array(function: Callable[[Any], Any], arrays: Any) -> Any:
    """Apply a function to an array, or to each array of a dict."""
    if isinstance(arrays, Mapping):
        return {name: function(array) for name, array in arrays.items()}
    return function(arrays)


def row_count(arrays: Any) -> int:
    """Return the number of rows of an array, or of the arrays of a dict."""
    return len(next(iter(arrays.values())) if isinstance(arrays, Mapping) else arrays)


def counted_rows(
    metric: Metric, y_true: Any, y_pred: Any, sample_weight: Array | None
) -> tuple[Any, Any, Array | None]:
    """Return labels, outputs and weights of the rows that count; no weights for a metric without
    them.

    Rows of weight 0 are omitted: 0 times NaN would be NaN. Weights of single labels keep their
    shape, in rows with any counted label.
    """
    y_true, y_pred = each_array(np.asarray, y_true), each_array(np.asarray, y_pred)
    if not metric.weighted or sample_weight is None:
        return y_true, y_pred, None
    weights = np.asarray(sample_weight)
    while weights.ndim > 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    used = (weights != 0).any(axis=tuple(range(1, weights.ndim)))
    if used.all():
        return y_true, y_pred, weights
    y_true, y_pred = (each_array(lambda a: a[used], arrays) for arrays in (y_true, y_pred))
    return y_true, y_pred, weights[used]


def per_element(sample_weight: Array | None, shape: tuple[int, ...]) -> Array:
    """The weight of each row, or of each entry of the first axes, for every element; float64."""
    if sample_weight is None:
        return np.ones(shape)
    weights = np.asarray(sample_weight, np.float64)
    if weights.shape != shape[: weights.ndim] and weights.ndim > 1:
        raise DataError(
            f"sample_weight of shape {weights.shape} does not fit values of shape {shape}. Pass"
            " one weight for each row, or for each label."
        )
    return np.broadcast_to(
        weights.reshape(weights.shape + (1,) * (len(shape) - weights.ndim)), shape
    )


def summed_counts(first: Array | None, *others: Array | None) -> Any:
    """The sum of tables of counts, None for none.

    A table without counts is skipped: the labels of an empty batch do not determine the class axis,
    so its size may be wrong.
    """
    tables = [table for table in (first, *others) if table is not None]
    counting = [table for table in tables if table.any()]
    if counting:
        return sum(counting[1:], counting[0])
    return max(tables, key=np.size, default=None)


def ratio(count: Array, whole: Array) -> Array:
    return np.asarray(count / np.where(whole == 0, 1.0, whole))


def misfit(metric: Metric, expected: str, y_true: Array, y_pred: Array) -> DataError:
    return DataError(
        f"{type(metric).__name__} needs {expected}, got labels of shape {y_true.shape} and outputs"
        f" of shape {y_pred.shape}."
    )


def aligned(metric: Metric, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
    """Both in the shape of the outputs; axes of size 1 do not matter."""
    if y_true.shape == y_pred.shape:
        return y_true, y_pred
    if [d for d in y_true.shape if d != 1] != [d for d in y_pred.shape if d != 1]:
        raise misfit(metric, "labels of the outputs' shape", y_true, y_pred)
    return y_true.reshape(y_pred.shape), y_pred


def elementwise(metric: Metric, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
    """Both in the shape of the outputs and in float64."""
    true, pred = aligned(metric, y_true, y_pred)
    return true.astype(np.float64), pred.astype(np.float64)


def is_binary(y_true: Array, y_pred: Array) -> bool:
    """Whether there is one output instead of one per class."""
    if y_pred.ndim == 1 or y_true.shape == y_pred.shape:
        return y_pred.ndim == 1 or 1 in (y_pred.shape[1], y_pred.shape[-1])
    axis = class_axis(y_true, y_pred)
    return axis is not None and y_pred.shape[axis] == 1


def class_axes(rank: int) -> list[int]:
    """The axes that may hold the classes, the likeliest first: axis 1 of images, else the last
    axis, as for the losses.
    """
    return list(range(1, rank)) if rank >= 4 else list(range(rank - 1, 0, -1))


def class_axis(y_true: Array, y_pred: Array) -> int | None:
    """The axis of the outputs that integer labels lack."""
    shape = y_pred.shape
    return next(
        (i for i in class_axes(len(shape)) if shape[:i] + shape[i + 1 :] == y_true.shape), None
    )


def classes_and_scores(metric: Metric, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
    """The class of every row, -1 where it counts nowhere, and its scores, their class axis last."""
    if y_true.shape == y_pred.shape and y_pred.ndim > 1:
        for axis in class_axes(y_pred.ndim):
            if np.allclose(y_true.sum(axis=axis), 1, atol=1e-3):
                return y_true.argmax(axis=axis), np.moveaxis(y_pred, axis, -1)
        raise DataError(
            f"{type(metric).__name__} needs labels that add up to 1 over the classes, but labels"
            f" of shape {y_true.shape} do not. If several classes may be true at once, use"
            " BinaryAccuracy, or Precision, Recall or F1 with multi_label=True."
        )
    if y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    axis_or_none = class_axis(y_true, y_pred)
    if axis_or_none is None:
        raise misfit(
            metric, "integer labels without the class axis, or one-hot labels", y_true, y_pred
        )
    if y_true.dtype.kind == "f" and (y_true % 1 != 0).any():
        given = y_true[y_true % 1 != 0].flat[0]
        raise DataError(f"{type(metric).__name__} needs integer classes as labels, got {given:g}.")
    scores = np.moveaxis(y_pred, axis_or_none, -1)
    classes = y_true.astype(np.int64)
    return np.where(classes < scores.shape[-1], classes, -1), scores


def decided(
    metric: Metric, y_true: Array, y_pred: Array, sample_weight: Array | None
) -> tuple[Array, Array, Array, int]:
    """Per row: its class, the class predicted (the number of classes where a score is NaN), and
    its weight; and the number of classes.
    """
    classes, scores = classes_and_scores(metric, y_true, y_pred)
    count = scores.shape[-1]
    guess = np.where(np.isnan(scores).any(axis=-1), count, scores.argmax(axis=-1))
    counted = classes >= 0
    return (
        classes[counted],
        guess[counted],
        per_element(sample_weight, classes.shape)[counted],
        count,
    )


def right_class(metric: Metric, classes: Array, scores: Array) -> Array:
    right = (scores.argmax(axis=-1) == classes) & ~np.isnan(scores.sum(axis=-1))
    return np.ma.MaskedArray(right, classes < 0) if (classes < 0).any() else right


def right_side(y_true: Array, y_pred: Array, cut: float) -> Array:
    return np.asarray(((y_pred > cut) == (y_true > 0.5)) & ~np.isnan(y_pred))


def check_threshold(metric: Metric, threshold: float, from_logits: bool | None) -> None:
    usable = is_number(threshold) and is_finite(threshold)
    if not usable or (from_logits and not 0 < threshold < 1):
        wanted = "0 < threshold < 1 for logits" if from_logits else "a finite threshold"
        raise SettingError(f"{type(metric).__name__} needs {wanted}, got {shortened(threshold)}.")


def check_average(metric: Any, *averages: str) -> None:
    """Check the fields `average` and `class_names` of a metric that can have a figure for each
    class, which `average=None` means.
    """
    kind, names = type(metric).__name__, metric.class_names
    require_choice(f"{kind} needs average", metric.average, (*averages, None))
    metric.scalar = metric.average is not None
    if names is None:
        return
    metric.class_names = tuple(name_list("class_names", names))
    if metric.average is not None:
        raise SettingError(
            f"{kind} needs average=None for class_names, got average={metric.average!r}."
        )
    if len(set(names)) < len(names):
        raise SettingError(f"{kind} needs another name for each class, got {shortened(names)}.")


def check_class_count(metric: Metric, names: Sequence[str] | None, classes: int) -> None:
    if names is not None and len(names) != classes:
        raise DataError(
            f"{type(metric).__name__} has class_names for {len(names)} classes, but the outputs"
            f" have {classes}: {shortened(names)}. Pass one name for each class."
        )


def cut_at(metric: Metric, threshold: float, from_logits: bool | None, y_pred: Array) -> float:
    """The least output that counts as positive.

    Warn, once for each metric, if the outputs cannot be probabilities.
    """
    if from_logits:
        return math.log(threshold / (1 - threshold))
    if (
        0 < threshold < 1
        and not vars(metric).get("_warned")
        and y_pred.size
        and (y_pred.min() < 0 or y_pred.max() > 1)
    ):
        vars(metric)["_warned"] = True
        warn_user(
            f"{metric.name} compares outputs with threshold {threshold}, but some outputs are"
            f" outside 0..1. If they are logits, use {type(metric).__name__}(from_logits=True)."
        )
    return threshold
