"""Metrics: figures about predictions, exact over the data set, not averaged over batches."""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Union

import numpy as np
import numpy.typing as npt

from onnxfit.errors import DataError, SettingError, UnknownNameError
from onnxfit.registry import registry, snake_case

__all__ = [
    "AUC",
    "F1",
    "R2",
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "ConfusionMatrix",
    "CosineSimilarity",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "TopKAccuracy",
    "get_metric",
]

Array = npt.NDArray[Any]
# infinite outputs make NaN figures, and the loss says so already
_quiet = np.errstate(invalid="ignore", over="ignore")
MetricLike = Union[str, "Metric", Callable[[Array, Array], Any]]


@dataclass
class Metric(ABC):
    """The base of every metric: `reset`, then `update` per batch, then `result`.

    Fields are settings; what is remembered between batches is set by `reset`, always as new
    objects. `weighted=True` counts every row by its sample weight (and puts `weighted_` before the
    name), else weights are passed over; `name` overrides the name under which it is logged. `mode`
    says which way is better, and `scalar` whether the result is a float.

    `y_true` is what the loss was given: of the shape of `y_pred`, or integer classes without the
    class axis. Classes that the outputs do not have count nowhere: a loss refuses all but its
    `ignore_index`. The class axis is the one that fits the labels; where several do, 1 for outputs
    of rank 4 and more, else the last. `y_pred` is the model's output. Both may be overwritten after
    `update`, so that a metric keeps copies. Without any row the result is NaN.
    """

    mode: ClassVar[str] = "min"
    scalar: ClassVar[bool] = True

    weighted: bool = field(default=False, kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        self.name = self.name or ("weighted_" if self.weighted else "") + self._own_name()
        self.reset()

    def _own_name(self) -> str:
        return snake_case(type(self).__name__)

    @abstractmethod
    def reset(self) -> None:
        """Forget every batch."""

    def state_dict(self) -> dict[str, Any]:
        """What is remembered of the batches so far, for a checkpoint in mid-epoch: numbers, arrays
        and lists of them, by attribute.

        A metric of your own that remembers anything else in attributes that begin with an
        underscore overrides this.
        """
        return {name: value for name, value in vars(self).items() if name.startswith("_")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.reset()
        vars(self).update(state)

    @abstractmethod
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        """Take in a batch."""

    @abstractmethod
    def result(self) -> Any:
        """The figure over all batches since `reset`: a float (an array for a confusion matrix)."""


def get_metric(spec: MetricLike | type[Metric]) -> Metric:
    """A new Metric from a name, a Metric (whose settings are taken), or a function `(y_true,
    y_pred) -> value, or one value per row`.

    A name is logged as it was typed, a function by its own name. UnknownNameError, or SettingError
    for anything else.

    >>> get_metric("acc").name, get_metric(Precision(weighted=True)).name
    ('acc', 'weighted_precision')
    """
    if isinstance(spec, str):
        known = registry(__name__, Metric)  # type: ignore[type-abstract]
        metric_class = known.get(spec) or known.get(snake_case(spec))
        if metric_class is None:
            raise UnknownNameError("metric", spec, known)
        return metric_class(name=spec)
    if isinstance(spec, Metric):
        metric = copy.copy(spec)  # one object given for two outputs must not add up both
        metric.reset()
        return metric
    if isinstance(spec, type) and issubclass(spec, Metric):
        return spec()
    if callable(spec):
        return FunctionMetric(spec)
    raise SettingError(
        f"A metric is a name, a Metric or a function (y_true, y_pred), got {spec!r}."
    )


# ---------------------------------------------------------------------- means of a value per
# element


@dataclass
class MeanMetric(Metric):
    r"""A mean over elements, $\sum w v / \sum w$ with the weight of each element's row ($w = 1$
    unless `weighted`).
    """

    def reset(self) -> None:
        self._total = self._count = 0.0

    @abstractmethod
    def values(self, y_true: Array, y_pred: Array) -> Array:
        """One value per row or element, shape `(batch, ...)`; in a masked array, masked ones count
        nowhere.
        """

    @_quiet
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        values = self.values(np.asarray(y_true), np.asarray(y_pred))
        counted = ~np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
        values = np.asarray(values)
        if self.weighted and sample_weight is not None:
            weights = _per_element(sample_weight, values.shape)
            # 0 times NaN would be NaN
            counted = weights != 0 if counted is None else counted & (weights != 0)
            self._total += float((values[counted] * weights[counted]).sum(dtype=np.float64))
            self._count += float(weights[counted].sum(dtype=np.float64))
        else:
            values = values if counted is None else values[counted]
            self._total += float(values.sum(dtype=np.float64))
            self._count += values.size

    def result(self) -> float:
        return self._total / self._count if self._count else math.nan


@dataclass
class MeanSquaredError(MeanMetric):
    r"""$(y - \hat y)^2$, the mean over rows and outputs."""

    aliases = ("mse",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        return np.square(np.subtract(*_elementwise(self, y_true, y_pred)))


@dataclass
class RootMeanSquaredError(MeanSquaredError):
    r"""$\sqrt{\mathrm{mean} (y - \hat y)^2}$: the root of the mean over the whole data set, in the
    unit of y.
    """

    aliases = ("rmse",)

    def result(self) -> float:
        return math.sqrt(super().result())


@dataclass
class MeanAbsoluteError(MeanMetric):
    r"""$|y - \hat y|$, the mean over rows and outputs, in the unit of y."""

    aliases = ("mae",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        return np.abs(np.subtract(*_elementwise(self, y_true, y_pred)))


@dataclass
class CosineSimilarity(MeanMetric):
    r"""$y \cdot \hat y / (\|y\| \|\hat y\|)$ along the last axis, in -1..1; 0 where a vector is
    zero.
    """

    mode = "max"
    aliases = ("cosine",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        true, pred = _elementwise(self, y_true, y_pred)
        if true.ndim == 1:
            true, pred = true[:, None], pred[:, None]
        norms = np.linalg.norm(true, axis=-1) * np.linalg.norm(pred, axis=-1)
        return np.asarray((true * pred).sum(axis=-1) / np.where(norms == 0, 1.0, norms))


def mode_by_name(name: str) -> str:
    """Whether less ("min") or more ("max") of a figure is better, as far as its name tells."""
    return (
        "max"
        if any(
            word in name
            for word in ("acc", "auc", "f1", "precision", "recall", "r2", "score", "similarity")
        )
        else "min"
    )


@dataclass
class FunctionMetric(MeanMetric):
    """The mean of a function's values: one per row, or one per batch, which counts as often as the
    batch has rows.
    """

    function: Callable[[Array, Array], Any]

    def __post_init__(self) -> None:
        # all that can be known of a function is its name
        self.mode = mode_by_name(self._own_name())  # type: ignore[misc]
        super().__post_init__()

    def _own_name(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return "function" if name == "<lambda>" else str(name)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        values = np.asarray(self.function(y_true, y_pred), dtype=np.float64)
        if values.ndim == 0:
            return np.full(len(y_pred), values)
        if len(values) != len(y_pred):
            raise DataError(
                f"Metric {self.name!r} returned shape {values.shape} for {len(y_pred)} rows: return"
                " one value, or one per row."
            )
        return values


# ---------------------------------------------------------------------- accuracies


@dataclass
class BinaryAccuracy(MeanMetric):
    """How many elements are on the right side of `threshold`, in 0..1.

    Labels are 0 and 1 (above 0.5 is positive), of the outputs' shape. `from_logits`: outputs are
    logits, and the threshold is for their sigmoid. NaN is wrong.
    """

    mode = "max"

    threshold: float = 0.5
    from_logits: bool = False

    def __post_init__(self) -> None:
        _check_threshold(self, self.threshold, self.from_logits)
        super().__post_init__()

    def values(self, y_true: Array, y_pred: Array) -> Array:
        true, pred = _aligned(self, y_true, y_pred)
        return _right_side(true, pred, _cut(self, self.threshold, self.from_logits, pred))


@dataclass
class CategoricalAccuracy(MeanMetric):
    """How often the highest score is the class of a one-hot label, in 0..1; shapes `(batch,
    classes, ...)` or `(batch, ..., classes)`.

    Of several highest scores the first counts; a row with NaN is wrong. DataError where labels do
    not add up to 1 over the classes.
    """

    mode = "max"

    def values(self, y_true: Array, y_pred: Array) -> Array:
        if y_true.shape != y_pred.shape:
            raise _misfit(self, "one-hot labels of the outputs' shape", y_true, y_pred)
        return _right_class(self, *_classes(self, y_true, y_pred))


@dataclass
class SparseCategoricalAccuracy(MeanMetric):
    """How often the highest score is the class, in 0..1; outputs `(batch, classes, ...)` or
    `(batch, ..., classes)`, labels without that axis.

    Of several highest scores the first counts; a row with NaN is wrong.
    """

    mode = "max"

    def values(self, y_true: Array, y_pred: Array) -> Array:
        if y_true.shape == y_pred.shape:
            raise _misfit(self, "integer labels without the class axis", y_true, y_pred)
        return _right_class(self, *_classes(self, y_true, y_pred))


@dataclass
class Accuracy(MeanMetric):
    """How many predictions are right, in 0..1, by whichever accuracy the shapes ask for.

    One output per row (or a class axis of size 1): BinaryAccuracy with `threshold` and
    `from_logits`. Integer labels without the class axis: SparseCategoricalAccuracy. Labels of the
    outputs' shape: CategoricalAccuracy.

    >>> accuracy = Accuracy()
    >>> accuracy.update(np.array([0, 2]), np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]))
    >>> accuracy.result()
    0.5
    """

    mode = "max"
    aliases = ("acc",)

    threshold: float = 0.5
    from_logits: bool = False

    def __post_init__(self) -> None:
        _check_threshold(self, self.threshold, self.from_logits)
        super().__post_init__()

    def values(self, y_true: Array, y_pred: Array) -> Array:
        if _is_binary(y_true, y_pred):
            true, pred = y_true.reshape(y_pred.shape), y_pred
            return _right_side(true, pred, _cut(self, self.threshold, self.from_logits, pred))
        return _right_class(self, *_classes(self, y_true, y_pred))


@dataclass
class TopKAccuracy(MeanMetric):
    """How often the class is among the `k` >= 1 highest scores, in 0..1; labels as integers or
    one-hot.

    Equal scores rank in the order of the classes, so that k=1 is the accuracy. A row with NaN is
    wrong.
    """

    mode = "max"
    aliases = ("top_k_accuracy", "top_k")

    k: int = 5

    def __post_init__(self) -> None:
        if self.k < 1:
            raise SettingError(f"TopKAccuracy needs k >= 1, got {self.k}.")
        super().__post_init__()

    def _own_name(self) -> str:
        return f"top_{self.k}_accuracy"

    def values(self, y_true: Array, y_pred: Array) -> Array:
        classes, scores = _classes(self, y_true, y_pred)
        known = np.maximum(classes, 0)[..., None]
        own = np.take_along_axis(scores, known, axis=-1)
        earlier = np.arange(scores.shape[-1]) < known
        rank = ((scores > own) | ((scores == own) & earlier)).sum(axis=-1)
        return np.ma.MaskedArray((rank < self.k) & ~np.isnan(scores).any(axis=-1), classes < 0)


# ---------------------------------------------------------------------- precision, recall, F1


@dataclass
class DecisionMetric(Metric):
    """What precision, recall and F1 share: for each class, how often it was found, predicted and
    true.

    - One output per row: the positive class alone counts. `threshold`, and `from_logits` as in
      BinaryAccuracy.
    - `(batch, classes)` with integer or one-hot labels: the highest score is the prediction, a row
      with NaN predicts nothing. `average`: "macro", the mean over the classes that occur or are
      predicted; "weighted", counted by how often each is true; "micro", over all decisions at once.
    - `multi_label=True`: any number of the columns of `(batch, labels)` may be true; each is
      decided by the threshold.

    0/0 is 0, as in scikit-learn.
    """

    mode = "max"

    threshold: float = 0.5
    from_logits: bool = False
    average: str = "macro"
    multi_label: bool = False

    def __post_init__(self) -> None:
        _check_threshold(self, self.threshold, self.from_logits)
        if self.average not in ("macro", "micro", "weighted"):
            raise SettingError(
                f"{type(self).__name__} needs average 'macro', 'micro' or 'weighted', got"
                f" {self.average!r}."
            )
        super().__post_init__()

    @abstractmethod
    def score(self, found: Array, predicted: Array, true: Array) -> Array:
        """The figure of each class, from the weights of rows in which it was rightly predicted,
        predicted, and true.
        """

    def reset(self) -> None:
        self._sums: Array | None = None  # found, predicted, true; a column per class

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred = np.asarray(y_true), np.asarray(y_pred)
        weights = sample_weight if self.weighted else None
        if self.multi_label or _is_binary(y_true, y_pred):
            true, pred = _aligned(self, y_true, y_pred)
            positive, predicted = (
                true > 0.5,
                pred > _cut(self, self.threshold, self.from_logits, pred),
            )
            per_element = _per_element(weights, pred.shape)
            axes = tuple(i for i in range(pred.ndim) if not (self.multi_label and i == 1))
            sums = np.stack(
                [
                    np.atleast_1d((per_element * which).sum(axis=axes))
                    for which in (positive & predicted, predicted, positive)
                ]
            )
        else:
            true, guess, per_row, count = _decisions(self, y_true, y_pred, weights)
            sums = np.stack(
                [
                    np.bincount(classes, chosen, minlength=count + 1)[:count]
                    for classes, chosen in (
                        (true, per_row * (true == guess)),
                        (guess, per_row),
                        (true, per_row),
                    )
                ]
            )
        self._sums = sums if self._sums is None else self._sums + sums

    def result(self) -> float:
        if self._sums is None:
            return math.nan
        found, predicted, true = self._sums
        if self.average == "micro":
            return float(self.score(found.sum(), predicted.sum(), true.sum()))
        scores = self.score(found, predicted, true)
        if len(scores) == 1:
            return float(scores[0])
        if self.average == "weighted":
            return float((scores * true).sum() / true.sum()) if true.sum() else math.nan
        counted = (predicted + true > 0) | self.multi_label
        return float(scores[counted].mean()) if counted.any() else math.nan


@dataclass
class Precision(DecisionMetric):
    """Of what was predicted, how much is true: TP / (TP + FP), in 0..1."""

    def score(self, found: Array, predicted: Array, true: Array) -> Array:
        return _ratio(found, predicted)


@dataclass
class Recall(DecisionMetric):
    """Of what is true, how much was predicted: TP / (TP + FN), in 0..1."""

    aliases = ("sensitivity",)

    def score(self, found: Array, predicted: Array, true: Array) -> Array:
        return _ratio(found, true)


@dataclass
class F1(DecisionMetric):
    """The harmonic mean of precision and recall: 2 TP / (2 TP + FP + FN), in 0..1."""

    aliases = ("f1_score",)

    def score(self, found: Array, predicted: Array, true: Array) -> Array:
        return _ratio(2 * found, predicted + true)


@dataclass
class ConfusionMatrix(Metric):
    """How often each class (row) was predicted as each class (column), shape `(classes, classes)`;
    float64 if `weighted`, else int64.

    One output per row counts as two classes, decided by `threshold` and `from_logits` as in
    BinaryAccuracy. A row with NaN is in no cell.

    >>> matrix = ConfusionMatrix()
    >>> matrix.update(np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]))
    >>> matrix.result().tolist()
    [[1, 0], [1, 1]]
    """

    mode = "max"
    scalar = False

    threshold: float = 0.5
    from_logits: bool = False

    def __post_init__(self) -> None:
        _check_threshold(self, self.threshold, self.from_logits)
        super().__post_init__()

    def reset(self) -> None:
        self._cells: Array = np.zeros((0, 0))

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred = np.asarray(y_true), np.asarray(y_pred)
        weights = sample_weight if self.weighted else None
        if _is_binary(y_true, y_pred):
            cut = _cut(self, self.threshold, self.from_logits, y_pred)
            true, count = (y_true > 0.5).ravel().astype(np.int64), 2
            guess = np.where(np.isnan(y_pred), 2, y_pred > cut).ravel().astype(np.int64)
            weighting = _per_element(weights, y_pred.shape).ravel()
        else:
            true, guess, weighting, count = _decisions(self, y_true, y_pred, weights)
        cells = np.bincount(
            true * (count + 1) + guess, weighting, minlength=count * (count + 1)
        ).reshape(count, count + 1)[:, :count]
        self._cells = cells if not self._cells.size else self._cells + cells

    def result(self) -> Array:
        return self._cells.copy() if self.weighted else self._cells.astype(np.int64)


# ---------------------------------------------------------------------- figures that need every row


@dataclass
class AUC(Metric):
    r"""The area under the ROC curve, exact: $P(s_+ > s_-) + \frac12 P(s_+ = s_-)$ for scores of a
    positive and a negative row, in 0..1.

    Of several classes (integer or one-hot labels) or labels: the mean over the columns of each
    against the rest, without columns that are always or never true; NaN where none is left, or a
    score is NaN. `from_logits`: the softmax over several classes is taken first; one output per row
    needs none, since only the order counts. Keeps all scores in memory.
    """

    mode = "max"
    aliases = ("roc_auc",)

    from_logits: bool = False

    def reset(self) -> None:
        # positive, score: a column per class; weight
        self._batches: list[tuple[Array, Array, Array]] = []

    @_quiet
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred = np.asarray(y_true), np.asarray(y_pred)
        weights = sample_weight if self.weighted else None
        if _is_binary(y_true, y_pred):
            rows = _per_element(weights, y_pred.shape).reshape(-1)
            positive, score = (y_true > 0.5).reshape(-1, 1), y_pred.reshape(-1, 1)
        elif y_true.shape == y_pred.shape and y_true.ndim == 2:
            rows, positive, score = _per_element(weights, y_pred.shape[:1]), y_true > 0.5, y_pred
        else:
            classes, score = _classes(self, y_true, y_pred)
            rows = _per_element(weights, classes.shape)[classes >= 0]
            score, classes = score[classes >= 0], classes[classes >= 0]
            positive = classes[:, None] == np.arange(score.shape[-1])
        if self.from_logits and score.shape[1] > 1:
            odds = np.exp(score.astype(np.float64) - score.max(axis=1, keepdims=True))
            score = odds / odds.sum(axis=1, keepdims=True)
        self._batches.append((positive.copy(), score.copy(), rows.copy()))

    def result(self) -> float:
        if not self._batches:
            return math.nan
        positive, score, weight = (np.concatenate(parts) for parts in zip(*self._batches))
        if np.isnan(score).any():
            return math.nan
        areas = np.array([_area(p, s, weight) for p, s in zip(positive.T, score.T)])
        return float(areas[~np.isnan(areas)].mean()) if not np.isnan(areas).all() else math.nan


def _area(positive: Array, score: Array, weight: Array) -> float:
    """Each positive row beats the negative ones below it, and half of those level with it."""
    levels, level = np.unique(score, return_inverse=True)
    up = np.bincount(level, weight * positive, minlength=len(levels))
    down = np.bincount(level, weight * ~positive, minlength=len(levels))
    pairs = up.sum() * down.sum()
    return float((up * (np.cumsum(down) - down / 2)).sum() / pairs) if pairs else math.nan


@dataclass
class R2(Metric):
    r"""The coefficient of determination $1 - \sum w (y - \hat y)^2 / \sum w (y - \bar y)^2$, at
    most 1; the mean over outputs.

    Where y is constant: 1 if every prediction is right, else 0, as in scikit-learn. Fewer than two
    rows: NaN. The spread about the mean is put together from those of the batches by the update of
    Chan, Golub and LeVeque (1979), which does not cancel.
    """

    mode = "max"
    aliases = ("r2_score",)

    def reset(self) -> None:
        self._rows = 0
        self._weight = 0.0
        # what y is counted from, so that a constant y spreads by exactly 0
        self._first: Array | None = None
        self._mean = self._spread = self._residual = np.zeros(1)

    @_quiet
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        true, pred = _elementwise(self, np.asarray(y_true), np.asarray(y_pred))
        outputs = math.prod(pred.shape[1:])
        true, pred = true.reshape(-1, outputs), pred.reshape(-1, outputs)
        w = _per_element(sample_weight if self.weighted else None, (len(true), 1))
        used = w[:, 0] != 0
        true, pred, w = true[used], pred[used], w[used]
        weight = float(w.sum())
        if not weight:
            return
        if self._first is None:
            self._first = true[0].copy()
        y = true - self._first
        mean = (w * y).sum(axis=0) / weight
        total = self._weight + weight
        step = mean - self._mean
        self._spread = (
            self._spread
            + (w * (y - mean) ** 2).sum(axis=0)
            + step**2 * (self._weight * weight / total)
        )
        self._mean = self._mean + step * (weight / total)
        self._residual = self._residual + (w * (true - pred) ** 2).sum(axis=0)
        self._weight, self._rows = total, self._rows + len(true)

    def result(self) -> float:
        if self._rows < 2:
            return math.nan
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.where(
                self._spread == 0,
                np.where(self._residual == 0, 1.0, 0.0),
                1 - self._residual / self._spread,
            )
        return float(np.where(np.isnan(self._residual), np.nan, scores).mean())


# ---------------------------------------------------------------------- shapes and decisions


def _per_element(sample_weight: Array | None, shape: tuple[int, ...]) -> Array:
    """Each row's weight, for every element of the row; float64."""
    if sample_weight is None:
        return np.ones(shape)
    rows = np.asarray(sample_weight, np.float64).reshape(-1, *[1] * (len(shape) - 1))
    return np.broadcast_to(rows, shape)


def _ratio(part: Array, whole: Array) -> Array:
    return np.asarray(part / np.where(whole == 0, 1.0, whole))


def _misfit(metric: Metric, expected: str, y_true: Array, y_pred: Array) -> DataError:
    return DataError(
        f"{type(metric).__name__} needs {expected}: labels {y_true.shape}, outputs {y_pred.shape}"
        " were given."
    )


def _aligned(metric: Metric, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
    """Both in the shape of the outputs; axes of size 1 do not matter."""
    if y_true.shape == y_pred.shape:
        return y_true, y_pred
    if [d for d in y_true.shape if d != 1] != [d for d in y_pred.shape if d != 1]:
        raise _misfit(metric, "labels of the outputs' shape", y_true, y_pred)
    return y_true.reshape(y_pred.shape), y_pred


def _elementwise(metric: Metric, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
    """Both in the shape of the outputs and in float64."""
    true, pred = _aligned(metric, y_true, y_pred)
    return true.astype(np.float64), pred.astype(np.float64)


def _is_binary(y_true: Array, y_pred: Array) -> bool:
    """One output where there could be one per class."""
    if y_pred.ndim == 1 or y_true.shape == y_pred.shape:
        return y_pred.ndim == 1 or 1 in (y_pred.shape[1], y_pred.shape[-1])
    axis = _class_axis(y_true, y_pred)
    return axis is not None and y_pred.shape[axis] == 1


def _class_axes(rank: int) -> list[int]:
    """Where the classes may be, the likeliest first: axis 1 of images, else the last axis, as for
    the losses.
    """
    return list(range(1, rank)) if rank >= 4 else list(range(rank - 1, 0, -1))


def _class_axis(y_true: Array, y_pred: Array) -> int | None:
    """The axis of the outputs that integer labels lack."""
    shape = y_pred.shape
    return next(
        (i for i in _class_axes(len(shape)) if shape[:i] + shape[i + 1 :] == y_true.shape), None
    )


def _classes(metric: Metric, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
    """The class of every row, -1 where it counts nowhere, and its scores, their class axis last."""
    if y_true.shape == y_pred.shape and y_pred.ndim > 1:
        for axis in _class_axes(y_pred.ndim):
            if np.allclose(y_true.sum(axis=axis), 1, atol=1e-3):
                return y_true.argmax(axis=axis), np.moveaxis(y_pred, axis, -1)
        raise DataError(
            f"{type(metric).__name__} needs labels that add up to 1 over the classes, and those of"
            f" shape {y_true.shape} do not. If several may be true at once, use BinaryAccuracy, or"
            " Precision, Recall or F1 with multi_label=True."
        )
    if y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    axis_or_none = _class_axis(y_true, y_pred)
    if axis_or_none is None:
        raise _misfit(
            metric, "integer labels without the class axis, or one-hot labels", y_true, y_pred
        )
    scores, classes = np.moveaxis(y_pred, axis_or_none, -1), y_true.astype(np.int64)
    return np.where(classes < scores.shape[-1], classes, -1), scores


def _decisions(
    metric: Metric, y_true: Array, y_pred: Array, sample_weight: Array | None
) -> tuple[Array, Array, Array, int]:
    """Per row: its class, the class predicted (their number where a score is NaN), its weight; and
    the number of classes.
    """
    classes, scores = _classes(metric, y_true, y_pred)
    count = scores.shape[-1]
    guess = np.where(np.isnan(scores).any(axis=-1), count, scores.argmax(axis=-1))
    counted = classes >= 0
    return (
        classes[counted],
        guess[counted],
        _per_element(sample_weight, classes.shape)[counted],
        count,
    )


def _right_class(metric: Metric, classes: Array, scores: Array) -> Array:
    right = (scores.argmax(axis=-1) == classes) & ~np.isnan(scores).any(axis=-1)
    return np.ma.MaskedArray(right, classes < 0) if (classes < 0).any() else right


def _right_side(y_true: Array, y_pred: Array, cut: float) -> Array:
    return np.asarray(((y_pred > cut) == (y_true > 0.5)) & ~np.isnan(y_pred))


def _check_threshold(metric: Metric, threshold: float, from_logits: bool) -> None:
    if not math.isfinite(threshold) or (from_logits and not 0 < threshold < 1):
        wanted = "0 < threshold < 1 for logits" if from_logits else "a finite threshold"
        raise SettingError(f"{type(metric).__name__} needs {wanted}, got {threshold}.")


def _cut(metric: Metric, threshold: float, from_logits: bool, y_pred: Array) -> float:
    """Where outputs become positive.

    A warning, once a metric, where they cannot be probabilities.
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
        warnings.warn(
            f"{metric.name} compares outputs with threshold {threshold}, and they leave 0..1: if"
            f" they are logits, use {type(metric).__name__}(from_logits=True).",
            UserWarning,
            stacklevel=2,
        )
    return threshold
