"""Functions of labels and outputs as metrics: means over rows, and figures of all rows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfit.checks import shortened
from onnxfit.errors import DataError, SettingError, listed_names, warn_user
from onnxfit.metrics.alignment import (
    aligned,
    class_axes,
    class_axis,
    classes_and_scores,
    counted_rows,
    decided,
    each_array,
    per_element,
    row_count,
    sigmoid,
    softmax,
)
from onnxfit.metrics.base import Array, Metric, merged_copies
from onnxfit.metrics.means import MeanMetric

__all__ = ["EpochMetric"]

MEAN_TOLERANCE = 1e-3  # of a mean over rows, relative; rounding of float32 is far below
PREDICTIONS = ("classes", "probabilities", "outputs")
TASKS = ("classes", "binary", "values")


def mode_by_name(name: str) -> str:
    """Return "max" if more of a figure is better, else "min", judged by its `name`."""
    words = ("acc", "auc", "f1", "precision", "recall", "r2", "score", "similarity")
    return "max" if any(word in name for word in words) else "min"


def _some_rows(rows: slice, *several: Any) -> list[Any]:
    """Return some rows of arrays, or of dicts of arrays."""
    return [each_array(lambda array: array[rows], arrays) for arrays in several]


class MeanCheck:
    """Find out whether a function that returns one number for a batch is a mean over its rows.

    The copies of a metric share it, so that there is one warning.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.is_mean = True  # until a batch shows that it is not
        self.has_warned = False

    def look(
        self, function: Callable[[Array, Array], Any], y_true: Array, y_pred: Array, value: float
    ) -> None:
        """Compare the number of a batch with those of its halves, in batches 1, 2, 4, 8, ..."""
        self.batches += 1
        rows = row_count(y_pred)
        half = rows // 2
        if not (self.is_mean and half) or self.batches & (self.batches - 1):
            return
        try:
            first = float(function(*_some_rows(slice(half), y_true, y_pred)))
            second = float(function(*_some_rows(slice(half, None), y_true, y_pred)))
        except Exception:  # the function may need rows that a half does not have
            return
        mean = (half * first + (rows - half) * second) / rows
        if math.isfinite(mean) and math.isfinite(value):
            size = max(abs(first), abs(second), abs(value))
            self.is_mean = abs(mean - value) <= MEAN_TOLERANCE * size

    def warn(self, name: str) -> None:
        """Warn, once, that the mean over batches is not the figure of all rows."""
        if self.is_mean or self.has_warned:
            return
        self.has_warned = True
        warn_user(
            f"The metric {name!r} returns one number for a batch, and is no mean over rows. The"
            " number of an epoch is the mean over its batches, which is not the figure of all rows."
            " For that figure, use metrics=[onnxfit.metrics.EpochMetric(function)]."
        )


@dataclass
class FunctionMetric(MeanMetric):
    """The mean of a function's values: one per row, or one per batch, which counts as often as the
    batch has rows.

    `function` is called with `(y_true, y_pred)`; `weighted` and `name` are as in `Metric`. Warn if
    there are several batches and the number of a batch is no mean over its rows.
    """

    takes_dicts = True

    function: Callable[[Array, Array], Any]

    def __post_init__(self) -> None:
        # the name of a function is the only information about it
        self.mode = mode_by_name(self._own_name())  # type: ignore[misc]
        self.check = MeanCheck()
        super().__post_init__()

    def _own_name(self) -> str:
        return _function_name(self.function)

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        is_second = self._count > 0
        super().update(y_true, y_pred, sample_weight)
        if is_second:
            self.check.warn(self.name)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        result = self.function(y_true, y_pred)
        try:
            is_masked = isinstance(result, np.ma.MaskedArray)
            values: Array = (np.ma.asarray if is_masked else np.asarray)(result, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise DataError(
                f"Metric {self.name!r} returned {shortened(result)}. Return one number, or one per"
                " row."
            ) from None
        if values.ndim == 0:
            self.check.look(self.function, y_true, y_pred, values.item())
            return np.full(row_count(y_pred), values)
        if len(values) != row_count(y_pred):
            raise DataError(
                f"Metric {self.name!r} returned shape {values.shape} for {row_count(y_pred)} rows."
                " Return one value, or one per row."
            )
        return values


def _function_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "function" if name == "<lambda>" else str(name)


def takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function takes labels and outputs; True if its signature is unknown."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


@dataclass
class EpochMetric(Metric):
    """A function of all rows, called once at the end of an epoch or an evaluation.

    - `function`: a function `(y_true, y_pred) -> number`, such as those of `sklearn.metrics`. With
      `weighted`, it also gets `sample_weight=`.
    - `predictions`: the form of `y_pred`. "classes" are the predicted classes, for figures such as
      `f1_score`; "probabilities" are for `roc_auc_score`, `log_loss` and
      `average_precision_score`; "outputs" are labels and outputs as other metrics get them. None,
      the default, means classes for a loss of classes (cross entropies, `NLL`, `Focal`), else
      outputs.
    - `task`: "classes" if each label is one of several classes, "binary" if each output is a yes
      or no of its own, "values" for numbers. None, the default, takes the task of the loss.
    - `from_logits`: as in `Metric`.
    - `weighted`, `name`: as in `Metric`; the name is that of the function.

    With several arrays of labels or several outputs, the function gets dicts of them.

    With classes or probabilities, `y_true` and `y_pred` have the shapes of scikit-learn: classes
    `(n,)`, probabilities `(n, classes)`, for two classes those of the second, `(n,)`. Several
    binary outputs are a matrix, `(n, outputs)`. An output of probability above 0.5 is a yes. Tokens
    and pixels count as rows, and labels that the loss ignores are left out. If an output is NaN,
    the row has a class that no label has.

    The metric keeps copies of the labels and predictions of all rows until the next epoch begins:
    16 MB per million rows for classes, otherwise the size of the outputs. The logs of batches lack
    it. SettingError: a setting has an unknown value. DataError: the function returns no number.

    >>> def f1_macro(y_true, y_pred):
    ...     from sklearn.metrics import f1_score
    ...
    ...     return f1_score(y_true, y_pred, average="macro")
    >>> metric = EpochMetric(f1_macro)
    >>> metric.update(np.array([0, 1]), np.array([[0.9, 0.1], [0.6, 0.4]]))
    >>> metric.update(np.array([1, 1]), np.array([[0.2, 0.8], [0.3, 0.7]]))
    >>> metric.name, round(metric.result(), 3)
    ('f1_macro', 0.733)
    """

    running = False
    named = False
    takes_dicts = True

    function: Callable[..., Any]
    predictions: str | None = None
    task: str | None = field(default=None, kw_only=True)
    from_logits: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SettingError(
                "EpochMetric needs a function (y_true, y_pred) -> number, got"
                f" {shortened(self.function)}."
            )
        for setting, known in (("predictions", PREDICTIONS), ("task", TASKS)):
            if getattr(self, setting) not in (None, *known):
                raise SettingError(
                    f"EpochMetric needs {setting} to be one of {', '.join(map(repr, known))} or"
                    f" None, got {shortened(getattr(self, setting))}."
                )
        self.mode = mode_by_name(self._own_name())  # type: ignore[misc]
        super().__post_init__()

    def _own_name(self) -> str:
        return _function_name(self.function)

    def reset(self) -> None:
        self._batches: list[tuple[Any, ...]] = []  # labels, predictions, and weights if counted

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        if not row_count(y_pred):
            return
        if isinstance(y_true, Mapping) or isinstance(y_pred, Mapping):
            if self.predictions not in (None, "outputs"):
                raise DataError(
                    f"EpochMetric needs one array of labels and one output for predictions="
                    f"{self.predictions!r}, got dicts. Pass predictions='outputs', and let the"
                    " function decide."
                )
            several = [y_true, y_pred] if weights is None else [y_true, y_pred, weights]
            self._batches.append(tuple(each_array(np.array, arrays) for arrays in several))
            return
        task = self.task or ("classes" if _has_class_indices(y_true, y_pred) else "values")
        wanted = self.predictions or ("outputs" if task == "values" else "classes")
        if wanted == "outputs":
            arrays = [y_true, y_pred] if weights is None else [y_true, y_pred, weights]
            arrays = [np.array(array) for array in arrays]
        elif task == "classes":
            arrays = self._classes(y_true, y_pred, weights, wanted)
        else:
            arrays = self._answers(y_true, y_pred, weights, wanted)
        self._batches.append(tuple(arrays))

    def _classes(
        self, y_true: Array, y_pred: Array, weights: Array | None, wanted: str
    ) -> list[Array]:
        """Return labels of one class each, predictions, and weights, an entry for each label."""
        if wanted == "classes":
            classes, guess, each, _ = decided(self, y_true, y_pred, weights)
            return [classes, guess] if weights is None else [classes, guess, each]
        classes, scores = classes_and_scores(self, y_true, y_pred)
        counted = classes >= 0
        shares = softmax(scores[counted]) if self.from_logits else scores[counted]
        arrays = [classes[counted], np.array(shares[:, 1] if shares.shape[1] == 2 else shares)]
        each = per_element(weights, classes.shape)[counted]
        return arrays if weights is None else [*arrays, each]

    def _answers(
        self, y_true: Array, y_pred: Array, weights: Array | None, wanted: str
    ) -> list[Array]:
        """Return labels of 0 and 1, predictions, and weights, a column for each binary output."""
        true, pred = aligned(self, y_true, y_pred)
        if pred.ndim > 1:
            axis = class_axes(pred.ndim)[0]
            true, pred = np.moveaxis(true, axis, -1), np.moveaxis(pred, axis, -1)
            each = per_element(weights, pred.shape[:-1]).reshape(-1)
        else:
            each = per_element(weights, pred.shape)
        shape = (-1,) if pred.ndim == 1 or pred.shape[-1] == 1 else (-1, pred.shape[-1])
        true, pred = (true > 0.5).reshape(shape), pred.reshape(shape)
        if wanted == "classes":
            pred = pred > (0.0 if self.from_logits else 0.5)
        elif self.from_logits:
            pred = sigmoid(pred)
        arrays = [true.astype(np.int64), np.array(pred, np.int64 if pred.dtype == bool else None)]
        return arrays if weights is None else [*arrays, each]

    def result(self) -> float:
        if not self._batches:
            return math.nan
        y_true, y_pred, *weights = map(_concatenated_rows, zip(*self._batches))
        named = {"sample_weight": weights[0]} if weights else {}
        return one_number(self.name, self.function(y_true, y_pred, **named))

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        added = [batch for other in merged_copies(self, states) for batch in other._batches]
        self._batches = [*self._batches, *added]  # a new list, because a state may be the old list


def _concatenated_rows(parts: Sequence[Any]) -> Any:
    """Return the rows of arrays, or of dicts of arrays, one after another."""
    if isinstance(parts[0], Mapping):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return np.concatenate(parts)


def _has_class_indices(y_true: Array, y_pred: Array) -> bool:
    return y_true.dtype.kind in "iu" and class_axis(y_true, y_pred) is not None


def one_number(name: str, figure: Any) -> float:
    """Return the figure of a metric as a float. DataError: the figure is not one number."""
    figure = figure.detach().cpu().numpy() if hasattr(figure, "detach") else figure
    try:
        number = np.asarray(figure, np.float64)
    except (TypeError, ValueError, OverflowError):
        number = np.zeros(0)
    if number.size == 1:
        return float(number.reshape(()))
    fix = "Let it return one number, such as a mean over the classes"
    if isinstance(figure, Mapping):
        fix = f"Pass a metric for each of {listed_names(figure)}"
    raise DataError(f"Metric {name!r} returned {shortened(figure)}, not one number. {fix}.")
