"""Metrics: measures of predictions, exact over the data set instead of averaged over batches."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, Union

import numpy as np
import numpy.typing as npt

from onnxfit.ctc import greedy_decode
from onnxfit.errors import (
    CheckpointError,
    DataError,
    OnnxfitError,
    SettingError,
    UnsupportedError,
    listed_names,
    warn_user,
)
from onnxfit.graph.logarithms import log_softmax
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.registry import (
    ChecksArguments,
    is_finite,
    is_newest,
    is_number,
    lookup,
    registry,
    shortened,
    snake_case,
)

__all__ = [
    "AUC",
    "F1",
    "R2",
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "CharacterErrorRate",
    "ConfusionMatrix",
    "CosineSimilarity",
    "EpochMetric",
    "ExternalMetric",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "Perplexity",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "TopKAccuracy",
    "WordErrorRate",
    "get_metric",
]

Array = npt.NDArray[Any]
LEAST_PROBABILITY = 1e-30  # as in the losses
# infinite outputs make NaN figures, and the loss already reports them
MEAN_TOLERANCE = 1e-3  # of a mean over rows, relative; rounding of float32 is far below
PREDICTIONS = ("classes", "probabilities", "outputs")
TASKS = ("classes", "binary", "values")
KERAS_METHODS = ("update_state", "result", "reset_state")
TORCHMETRICS_METHODS = ("update", "compute", "reset")
MIN_BLOCKS = 8  # of classes, of which the one with the highest score is found first
_quiet = np.errstate(invalid="ignore", over="ignore")
MetricLike = Union[str, "Metric", Callable[[Array, Array], Any], Any]


@dataclass
class Metric(ChecksArguments, ABC):
    """Base class of every metric: `reset`, then `update` for each batch, then `result`.

    - `weighted`: count every row, or every label, by its sample weight, and put `weighted_` before
      the name; otherwise sample weights are ignored. A row or label of weight 0 has no influence,
      even if it contains NaN.
    - `name`: the name under which the metric is logged; by default the class's name in snake case.

    `mode` is "max" if more is better, else "min"; `scalar` tells whether the result is a float;
    `running` whether the logs of batches have it, too. Without rows the result is NaN.

    To write a metric, subclass with a dataclass. Its fields are settings. `reset` sets attributes
    that begin with an underscore, always as new objects; `update` changes them and `result` reads
    them. A metric for training in several processes also needs `merge`. For the mean of a value per
    row or element, a function `(y_true, y_pred) -> values` is enough, and for a function of all
    rows there is `EpochMetric`. `sums` is optional: it saves copies of large outputs.

    `update` gets the loss's labels `y_true`: of the shape of `y_pred`, or integer classes without
    the class axis. `y_pred` is the model's output. All arguments are read-only, and may be
    overwritten after `update`, so a metric stores copies. Classes that the outputs do not have are
    ignored. The class axis is the one that fits the labels; if several fit, 1 for outputs of rank 4
    or more, else the last.

    Several metrics have a setting `from_logits`: True for outputs that are raw scores, False to
    compare the outputs unchanged, None (the default) for the decision of the output's loss, which
    `Trainer.summary()` shows; outside a Trainer, None means False.

    >>> @dataclass
    ... class LargestError(Metric):
    ...     def reset(self):
    ...         self._largest = math.nan
    ...
    ...     def update(self, y_true, y_pred, sample_weight=None):
    ...         self._largest = float(np.fmax(self._largest, np.abs(y_true - y_pred).max()))
    ...
    ...     def result(self):
    ...         return self._largest
    ...
    ...     def merge(self, states):
    ...         for state in states:
    ...             self._largest = float(np.fmax(self._largest, state["_largest"]))
    >>> metric = LargestError()
    >>> metric.update(np.array([1.0, 2.0]), np.array([1.5, 5.0]))
    >>> metric.name, metric.result()
    ('largest_error', 3.0)
    >>> other = LargestError()
    >>> other.update(np.array([1.0]), np.array([8.0]))
    >>> metric.merge([other.state_dict()])
    >>> metric.result()
    7.0
    """

    mode: ClassVar[str] = "min"
    scalar: ClassVar[bool] = True
    running: ClassVar[bool] = True
    # Fields that, if None, take the value that the output's loss has in a field of this name.
    settings_of_loss: ClassVar[tuple[str, ...]] = ()

    weighted: bool = field(default=False, kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if self.name is not None and not isinstance(self.name, str):
            raise SettingError(
                f"{type(self).__name__} needs a string as name, got {shortened(self.name)}."
            )
        self.name = self.name or ("weighted_" if self.weighted else "") + self._own_name()
        self.reset()

    def _own_name(self) -> str:
        return snake_case(type(self).__name__)

    @abstractmethod
    def reset(self) -> None:
        """Forget every batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batches so far, for a checkpoint within an epoch: numbers,
        arrays and lists of them, by attribute.

        A metric with anything else in attributes that begin with an underscore overrides this
        method.
        """
        return _with_own_lists({n: value for n, value in vars(self).items() if n.startswith("_")})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` that `state_dict` returned.

        Only attributes that begin with an underscore are set. Raises CheckpointError for a state of
        another form.
        """
        self.reset()
        own = {name for name in vars(self) if name.startswith("_")}
        foreign = [n for n in state if not n.startswith("_") or hasattr(type(self), n)]
        if not own <= set(state) or foreign:
            raise CheckpointError(
                f"The metric {self.name!r} stores {listed_names(sorted(own)) or 'nothing'}, but the"
                f" checkpoint has {listed_names(sorted(state)) or 'nothing'}. Use the metric with"
                " which the checkpoint was saved."
            )
        vars(self).update(_with_own_lists(state))

    @abstractmethod
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        """Add a batch: labels `y_true`, outputs `y_pred`, and `sample_weight`: None, one for each
        row, shape `(batch,)`, or one for each label. Raises DataError if labels and outputs do not
        fit.
        """

    def sums(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, sample_weight: Value | None
    ) -> Mapping[str, Value] | None:
        """Return attribute -> what a batch adds to it, a scalar that the graph of a step computes.

        With it the outputs of a batch need not be copied from onnxruntime, and `add_sums` takes the
        place of `update`. None, the default, means that `update` gets every batch. So it does where
        a subclass overrides `update` or `reset`, and not this method.

        - `op`: builds the graph.
        - `y_true`, `y_pred`, `sample_weight`: the arguments of `update`, as values of the graph.
        """
        return None

    def add_sums(self, sums: Mapping[str, float]) -> None:
        """Add a batch by its `sums`, which a graph has computed."""
        for name, value in sums.items():
            setattr(self, name, getattr(self, name) + value)

    @abstractmethod
    def result(self) -> Any:
        """Return the figure over all batches since `reset`: a float, or an array if `scalar` is
        False.
        """

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Add the batches of other metrics: `result` is then that of one metric, updated with all
        batches in any order.

        - `states`: the `state_dict` of each other metric. They have the settings of this metric. A
          metric without a batch adds nothing.

        With `merge`, several processes compute a metric: each updates its own metric with its rows,
        and merges the states of all. Every metric of onnxfit implements it. Raises UnsupportedError
        for a custom metric without `merge`, or with an inherited `merge` and its own `reset`.
        Raises CheckpointError for states of another metric.
        """
        raise _no_merge(self)


def get_metric(spec: MetricLike | type[Metric]) -> Metric:
    """Return a new Metric that `spec` specifies.

    `spec` is a name, a Metric, whose settings are copied, a Metric class, a metric object of Keras
    or torchmetrics (`ExternalMetric`), or a function `(y_true, y_pred) -> value`: one value per row
    or element, whose mean is the metric, or one for the batch. The number of an epoch is then the
    mean over the batches, weighted by their rows. For a function that is no mean over rows, such as
    an F1 score, this is another figure than that of all rows, and a warning says so; `EpochMetric`
    computes the figure of all rows. To find this out, the function is also called with halves of
    some batches. A name is logged as typed, a function under its own name. Raises UnknownNameError
    (a SettingError) for an unknown name, and SettingError for anything else.

    >>> get_metric("acc").name, get_metric(Precision(weighted=True)).name
    ('acc', 'weighted_precision')
    """
    if isinstance(spec, str):
        known = registry(__name__, Metric)  # type: ignore[type-abstract]
        return lookup("metric", spec, known, name=spec)
    if isinstance(spec, Metric):
        metric = copy.copy(spec)  # one object passed for two outputs must not add up both
        metric.reset()
        return metric
    if isinstance(spec, type):
        if issubclass(spec, Metric):
            return spec()
        raise SettingError(
            f"A metric must be an object, got the class {spec.__name__}. Create an object:"
            f" {spec.__name__}(...)."
        )
    if _has_state(spec):
        return ExternalMetric(spec)
    if callable(spec):
        if not _takes_two(spec):
            raise SettingError(
                "A metric function must take the two arguments (y_true, y_pred), got"
                f" {shortened(spec)}. Pass a function of labels and outputs."
            )
        return FunctionMetric(spec)
    raise SettingError(
        "A metric must be a name, a Metric, a metric object of Keras or torchmetrics, or a function"
        f" (y_true, y_pred), got {shortened(spec)}."
    )


M = TypeVar("M", bound=Metric)


def _with_own_lists(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with copies of its lists, because a metric appends its batches to them."""
    return {name: value[:] if isinstance(value, list) else value for name, value in state.items()}


def _others(metric: M, states: Sequence[Mapping[str, Any]]) -> list[M]:
    """Return copies of a metric, each with one of the states to merge.

    Raises UnsupportedError for a metric whose `merge` belongs to another class's `reset`.
    """
    if not is_newest(type(metric), "merge", "reset"):
        raise _no_merge(metric)
    others = []
    for state in states:
        other = copy.copy(metric)
        other.load_state_dict(state)
        others.append(other)
    return others


def _no_merge(metric: Metric) -> UnsupportedError:
    name = type(metric).__name__
    return UnsupportedError(
        f"The metric {metric.name!r} cannot be merged from several processes, because {name} does"
        f" not support it. Implement {name}.merge(self, states), which adds the batches in the"
        " state_dict of other metrics."
    )


# ---------------------------------------------------------------------- means of values


@dataclass
class MeanMetric(Metric):
    r"""Base class of means over elements, $\sum w v / \sum w$ with the sample weight of each
    element or of its row ($w = 1$ unless `weighted`). `weighted` and `name` are as in `Metric`.
    """

    def reset(self) -> None:
        self._total = self._count = 0.0

    @abstractmethod
    def values(self, y_true: Array, y_pred: Array) -> Array:
        """Return one value per row or element, shape `(batch, ...)`, for labels `y_true` and
        outputs `y_pred`; in a masked array, masked values do not count.
        """

    @_quiet
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = _counted_rows(self, y_true, y_pred, sample_weight)
        if not len(y_pred):
            return
        values = self.values(y_true, y_pred)
        counted = None
        if isinstance(values, np.ma.MaskedArray):
            counted = ~np.ma.getmaskarray(values)
        values = np.asarray(values)
        if weights is None:
            values = values if counted is None else values[counted]
            self._total += float(values.sum(dtype=np.float64))
            self._count += values.size
        else:
            weights = _per_element(weights, values.shape)
            counted = weights != 0 if counted is None else counted & (weights != 0)
            values, weights = values[counted], weights[counted]
            self._total += float((values * weights).sum(dtype=np.float64))
            self._count += float(weights.sum(dtype=np.float64))

    def values_in_graph(
        self, op: GraphBuilder, y_true: Value, y_pred: Value
    ) -> tuple[Value, Value | None] | None:
        """Return what `values` returns for `y_true` and `y_pred`, as a value of the graph that `op`
        builds, and booleans that say which values count, or None if all do.

        Return None, as by default, where the graph does not tell how labels and outputs fit.
        """
        return None

    def sums(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, sample_weight: Value | None
    ) -> Mapping[str, Value] | None:
        found = None
        if is_newest(type(self), "values_in_graph", "values"):
            found = self.values_in_graph(op, y_true, y_pred)
        if found is None:
            return None
        values, counted = op.cast(found[0], np.float64), found[1]
        weights = sample_weight if self.weighted else None
        if weights is None:
            count = op.Size(values) if counted is None else _sum(op, op.cast(counted, np.int64))
        elif weights.rank > 1 and not _same_sizes(weights, values, weights.rank):
            return None
        else:
            weights = op.cast(weights, np.float64)
            if values.rank > weights.rank:
                weights = op.Unsqueeze(weights, list(range(weights.rank, values.rank)))
            used = op.cast(weights, np.bool_)
            counted = used if counted is None else op.And(used, counted)
            values = values * weights
            count = _sum(op, op.Where(counted, op.Expand(weights, op.Shape(values)), 0))
        if counted is not None:
            values = op.Where(counted, values, 0)
        return {"_total": _sum(op, values), "_count": op.cast(count, np.float64)}

    def result(self) -> float:
        return self._total / self._count if self._count else math.nan

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        for other in _others(self, states):
            self._total += other._total
            self._count += other._count


@dataclass
class MeanSquaredError(MeanMetric):
    r"""Mean squared error $(y - \hat y)^2$ over rows and outputs, in the square of y's unit.

    Labels have the outputs' shape; axes of size 1 do not matter. `weighted` and `name` are as in
    `Metric`. Raises DataError for other shapes.

    >>> metric = MeanSquaredError()
    >>> metric.update(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    >>> metric.result()
    2.0
    """

    aliases = ("mse",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        return np.square(np.subtract(*_elementwise(self, y_true, y_pred)))

    def values_in_graph(
        self, op: GraphBuilder, y_true: Value, y_pred: Value
    ) -> tuple[Value, Value | None] | None:
        difference = _difference(op, y_true, y_pred)
        return None if difference is None else (difference * difference, None)


@dataclass
class RootMeanSquaredError(MeanSquaredError):
    r"""Root of the mean squared error, $\sqrt{\mathrm{mean} (y - \hat y)^2}$, over the whole data
    set, in the unit of y.

    Labels have the outputs' shape. `weighted` and `name` are as in `Metric`.

    >>> metric = RootMeanSquaredError()
    >>> metric.update(np.array([1.0, 2.0]), np.array([4.0, 5.0]))
    >>> metric.result()
    3.0
    """

    aliases = ("rmse",)

    def result(self) -> float:
        return math.sqrt(super().result())


@dataclass
class MeanAbsoluteError(MeanMetric):
    r"""Mean absolute error $|y - \hat y|$ over rows and outputs, in the unit of y.

    Labels have the outputs' shape. `weighted` and `name` are as in `Metric`.

    >>> metric = MeanAbsoluteError()
    >>> metric.update(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    >>> metric.result()
    1.0
    """

    aliases = ("mae",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        return np.abs(np.subtract(*_elementwise(self, y_true, y_pred)))

    def values_in_graph(
        self, op: GraphBuilder, y_true: Value, y_pred: Value
    ) -> tuple[Value, Value | None] | None:
        difference = _difference(op, y_true, y_pred)
        return None if difference is None else (op.Abs(difference), None)


@dataclass
class CosineSimilarity(MeanMetric):
    r"""Mean cosine $y \cdot \hat y / (\|y\| \|\hat y\|)$ along the last axis, in [-1, 1]; 0 where a
    vector is zero.

    Labels have the outputs' shape. `weighted` and `name` are as in `Metric`.

    >>> metric = CosineSimilarity()
    >>> metric.update(np.array([[3.0, 4.0]]), np.array([[4.0, 3.0]]))
    >>> metric.result()
    0.96
    """

    mode = "max"
    aliases = ("cosine",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        true, pred = _elementwise(self, y_true, y_pred)
        if true.ndim == 1:
            true = true[:, None]
            pred = pred[:, None]
        norms = np.linalg.norm(true, axis=-1) * np.linalg.norm(pred, axis=-1)
        return np.asarray((true * pred).sum(axis=-1) / np.where(norms == 0, 1.0, norms))


def mode_by_name(name: str) -> str:
    """Return "max" if more of a figure is better, else "min", judged by its `name`."""
    words = ("acc", "auc", "f1", "precision", "recall", "r2", "score", "similarity")
    return "max" if any(word in name for word in words) else "min"


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
        half, rows = len(y_pred) // 2, len(y_pred)
        if not (self.is_mean and half) or self.batches & (self.batches - 1):
            return
        try:
            first = float(function(y_true[:half], y_pred[:half]))
            second = float(function(y_true[half:], y_pred[half:]))
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
            values = np.asarray(result, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise DataError(
                f"Metric {self.name!r} returned {shortened(result)}. Return one number, or one per"
                " row."
            ) from None
        if values.ndim == 0:
            self.check.look(self.function, y_true, y_pred, values.item())
            return np.full(len(y_pred), values)
        if len(values) != len(y_pred):
            raise DataError(
                f"Metric {self.name!r} returned shape {values.shape} for {len(y_pred)} rows."
                " Return one value, or one per row."
            )
        return values


def _function_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "function" if name == "<lambda>" else str(name)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function takes labels and outputs; True if its signature is unknown."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


# ---------------------------------------------------------------------- accuracies


@dataclass
class BinaryAccuracy(MeanMetric):
    r"""Share of elements on the right side of a threshold,
    $\frac1n \sum_i [(\hat y_i > \theta) = (y_i > \frac12)]$, in [0, 1].

    Labels are 0 and 1 (above 0.5 is positive), in the outputs' shape. An output of NaN counts as
    wrong.

    - `threshold` $\theta$: a finite number; for logits a probability in (0, 1), which their sigmoid
      is compared with.
    - `from_logits`: True, False or None, as in `Metric`. With None, a threshold outside (0, 1) is
      compared with the outputs themselves.
    - `weighted`, `name`: as in `Metric`.

    Raises SettingError for an invalid threshold, and DataError for other shapes.

    >>> metric = BinaryAccuracy(threshold=0.3)
    >>> metric.update(np.array([0, 1, 1]), np.array([0.2, 0.4, 0.1]))
    >>> round(metric.result(), 3)
    0.667
    """

    mode = "max"

    threshold: float = 0.5
    from_logits: bool | None = None

    def __post_init__(self) -> None:
        _check_threshold(self, self.threshold, self.from_logits)
        super().__post_init__()

    def values(self, y_true: Array, y_pred: Array) -> Array:
        true, pred = _aligned(self, y_true, y_pred)
        return _right_side(true, pred, _cut(self, self.threshold, self.from_logits, pred))


@dataclass
class CategoricalAccuracy(MeanMetric):
    r"""Share of one-hot labels whose class has the highest score,
    $\frac1n \sum_i [\arg\max_c \hat y_{ic} = \arg\max_c y_{ic}]$, in [0, 1].

    Labels and outputs have shape `(batch, classes, ...)` or `(batch, ..., classes)`. Of several
    highest scores the first counts. A row with NaN, or with scores that are infinite in both
    directions, is wrong. `weighted` and `name` are as in `Metric`. Raises DataError if labels do
    not add up to 1 over the classes.

    >>> metric = CategoricalAccuracy()
    >>> metric.update(np.array([[1, 0], [0, 1]]), np.array([[0.9, 0.1], [0.6, 0.4]]))
    >>> metric.result()
    0.5
    """

    mode = "max"

    def values(self, y_true: Array, y_pred: Array) -> Array:
        if y_true.shape != y_pred.shape:
            raise _misfit(self, "one-hot labels of the outputs' shape", y_true, y_pred)
        return _right_class(self, *_classes(self, y_true, y_pred))


@dataclass
class SparseCategoricalAccuracy(MeanMetric):
    r"""Share of integer labels whose class has the highest score,
    $\frac1n \sum_i [\arg\max_c \hat y_{ic} = y_i]$, in [0, 1].

    Outputs have shape `(batch, classes, ...)` or `(batch, ..., classes)`, labels the same without
    the axis of classes. Of several highest scores the first counts. A row with NaN, or with scores
    that are infinite in both directions, is wrong. `weighted` and `name` are as in `Metric`. Raises
    DataError for other shapes.

    >>> metric = SparseCategoricalAccuracy()
    >>> metric.update(np.array([0, 1]), np.array([[0.9, 0.1], [0.6, 0.4]]))
    >>> metric.result()
    0.5
    """

    mode = "max"
    aliases = ("token_accuracy",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        if y_true.shape == y_pred.shape:
            raise _misfit(self, "integer labels without the class axis", y_true, y_pred)
        return _right_class(self, *_classes(self, y_true, y_pred))

    def values_in_graph(
        self, op: GraphBuilder, y_true: Value, y_pred: Value
    ) -> tuple[Value, Value | None] | None:
        return _right_class_in_graph(op, y_true, y_pred)


@dataclass
class Accuracy(MeanMetric):
    r"""Share of right predictions, $\frac1n \sum_i [\hat c_i = c_i]$, in [0, 1], by the accuracy
    that fits the shapes.

    One output per row (or a class axis of size 1): BinaryAccuracy. Integer labels without the class
    axis: SparseCategoricalAccuracy. Labels of the outputs' shape: CategoricalAccuracy.

    - `threshold`, `from_logits`: as in `BinaryAccuracy`.
    - `weighted`, `name`: as in `Metric`.

    >>> accuracy = Accuracy()
    >>> accuracy.update(np.array([0, 2]), np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]))
    >>> accuracy.result()
    0.5
    """

    mode = "max"
    aliases = ("acc",)

    threshold: float = 0.5
    from_logits: bool | None = None

    def __post_init__(self) -> None:
        _check_threshold(self, self.threshold, self.from_logits)
        super().__post_init__()

    def values(self, y_true: Array, y_pred: Array) -> Array:
        if _is_binary(y_true, y_pred):
            cut = _cut(self, self.threshold, self.from_logits, y_pred)
            return _right_side(y_true.reshape(y_pred.shape), y_pred, cut)
        return _right_class(self, *_classes(self, y_true, y_pred))

    def values_in_graph(
        self, op: GraphBuilder, y_true: Value, y_pred: Value
    ) -> tuple[Value, Value | None] | None:
        return _right_class_in_graph(op, y_true, y_pred)


@dataclass
class TopKAccuracy(MeanMetric):
    r"""Share of labels whose class is among the $k$ highest scores,
    $\frac1n \sum_i [\mathrm{rank}(\hat y_{i, y_i}) \le k]$, in [0, 1]; labels are integers or
    one-hot.

    Equal scores rank in the order of the classes, so `k=1` is the accuracy. A row with NaN counts
    as wrong.

    - `k`: a whole number of at least 1. Raises SettingError for less.
    - `weighted`, `name`: as in `Metric`.

    >>> metric = TopKAccuracy(k=2)
    >>> metric.update(np.array([0, 2]), np.array([[0.2, 0.7, 0.1], [0.6, 0.3, 0.1]]))
    >>> metric.name, metric.result()
    ('top_2_accuracy', 0.5)
    """

    mode = "max"
    aliases = ("top_k_accuracy", "top_k")

    k: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.k, (int, np.integer)) or self.k < 1:
            raise SettingError(f"TopKAccuracy needs k >= 1, got {shortened(self.k)}.")
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


@dataclass
class Perplexity(MeanMetric):
    r"""Perplexity $\exp(-\frac1n \sum_i \log p_i)$, where $p_i$ is the predicted probability of the
    label: 1 for certain and right predictions, the number of classes for uniform guesses.

    The mean is over all labels of the data set that count, not over batches. With the loss
    CausalLM, and CrossEntropy without label smoothing or weights, it is the exponential of the
    loss. Labels are integers without the class axis, or one-hot. If the outputs are probabilities,
    a probability below 1e-30 counts as 1e-30.

    - `from_logits`: True if $p$ is the softmax of the outputs, False if the outputs are $p$, or
      None as in `Metric`.
    - `weighted`, `name`: as in `Metric`.

    >>> metric = Perplexity()
    >>> metric.update(np.array([0, 1]), np.array([[0.5, 0.5], [0.875, 0.125]]))
    >>> metric.result()
    4.0
    """

    from_logits: bool | None = None

    def values(self, y_true: Array, y_pred: Array) -> Array:
        classes, scores = _classes(self, y_true, y_pred)
        own = np.take_along_axis(scores, np.maximum(classes, 0)[..., None], axis=-1)[..., 0]
        own = own.astype(np.float64)
        if self.from_logits:
            largest = scores.max(axis=-1, keepdims=True)
            odds = np.exp(scores - largest).sum(axis=-1, dtype=np.float64)
            costs = np.log(odds) + (largest[..., 0] - own)
        else:
            costs = -np.log(np.maximum(own, LEAST_PROBABILITY))
        return np.ma.MaskedArray(costs, classes < 0)

    def values_in_graph(
        self, op: GraphBuilder, y_true: Value, y_pred: Value
    ) -> tuple[Value, Value | None] | None:
        axis = _class_axis_in_graph(y_true, y_pred)
        if axis is None:
            return None
        counted = _known_classes(op, y_true, y_pred, axis)
        index = op.Unsqueeze(op.Where(counted, y_true, 0), [axis])
        # The operators of the loss CrossEntropy: onnxruntime computes them once for both.
        scores = log_softmax(op, y_pred, axis) if self.from_logits else y_pred
        own = op.Squeeze(op.GatherElements(scores, index, axis=axis), [axis])
        own = op.cast(own, np.float64)
        return -(own if self.from_logits else op.Log(op.Max(own, LEAST_PROBABILITY))), counted

    def result(self) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(super().result()))


# ---------------------------------------------------------------------- precision, recall, F1


@dataclass
class DecisionMetric(Metric):
    """Base class of precision, recall and F1: for each class the weight of the rows in which it
    was rightly predicted, predicted, and true.

    - One output per row: the positive class alone counts.
    - `(batch, classes)` with integer or one-hot labels: the highest score is the prediction; a row
      with NaN predicts nothing.
    - `threshold`, `from_logits`: as in `BinaryAccuracy`.
    - `average`, for several classes: "macro", the mean over the classes that occur or are
      predicted; "weighted", counted by how often each class is true; "micro", over all decisions at
      once.
    - `multi_label`: any number of the columns of `(batch, labels)` may be true; each is decided by
      the threshold.
    - `weighted`, `name`: as in `Metric`.

    0/0 is 0, as in scikit-learn. Raises SettingError for an invalid setting.
    """

    mode = "max"

    threshold: float = 0.5
    from_logits: bool | None = None
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
    def score(self, hits: Array, predicted: Array, true: Array) -> Array:
        """Return the figure of each class, from the weights of the rows in which it was rightly
        predicted (`hits`), `predicted`, and `true`.
        """

    def reset(self) -> None:
        self._sums: Array | None = None  # hits, predicted, true; a column per class

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = _counted_rows(self, y_true, y_pred, sample_weight)
        if self.multi_label or _is_binary(y_true, y_pred):
            sums = self._of_elements(y_true, y_pred, weights)
        else:
            sums = self._of_classes(y_true, y_pred, weights)
        self._sums = _summed(self._sums, sums)

    def _of_elements(self, y_true: Array, y_pred: Array, weights: Array | None) -> Array:
        true, pred = _aligned(self, y_true, y_pred)
        positive = true > 0.5
        predicted = pred > _cut(self, self.threshold, self.from_logits, pred)
        per_element = _per_element(weights, pred.shape)
        axes = tuple(i for i in range(pred.ndim) if not (self.multi_label and i == 1))
        counted = (positive & predicted, predicted, positive)
        return np.stack([np.atleast_1d((per_element * mask).sum(axis=axes)) for mask in counted])

    def _of_classes(self, y_true: Array, y_pred: Array, weights: Array | None) -> Array:
        true, guess, per_row, count = _decisions(self, y_true, y_pred, weights)
        counted = ((true, per_row * (true == guess)), (guess, per_row), (true, per_row))
        return np.stack(
            [np.bincount(classes, w, minlength=count + 1)[:count] for classes, w in counted]
        )

    def result(self) -> float:
        if self._sums is None:
            return math.nan
        hits, predicted, true = self._sums
        if self.average == "micro":
            return float(self.score(hits.sum(), predicted.sum(), true.sum()))
        scores = self.score(hits, predicted, true)
        if len(scores) == 1:
            return float(scores[0])
        if self.average == "weighted":
            return float((scores * true).sum() / true.sum()) if true.sum() else math.nan
        counted = (predicted + true > 0) | self.multi_label
        return float(scores[counted].mean()) if counted.any() else math.nan

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._sums = _summed(self._sums, *(other._sums for other in _others(self, states)))


@dataclass
class Precision(DecisionMetric):
    r"""Share of the positive predictions that are right, $TP / (TP + FP)$, in [0, 1]
    (`sklearn.metrics.precision_score`).

    - `threshold`, `from_logits`: as in `BinaryAccuracy`.
    - `average`: of several classes, "macro" (the mean over classes), "weighted" (by how often each
      is true) or "micro" (over all decisions at once).
    - `multi_label`: several columns of `(batch, labels)` may be true at once.
    - `weighted`, `name`: as in `Metric`.

    0/0 is 0. Raises SettingError for an invalid setting.

    >>> metric = Precision()
    >>> metric.update(np.array([0, 1, 1]), np.array([0.6, 0.9, 0.2]))
    >>> metric.result()
    0.5
    """

    def score(self, hits: Array, predicted: Array, true: Array) -> Array:
        return _ratio(hits, predicted)


@dataclass
class Recall(DecisionMetric):
    r"""Share of the positive labels that were predicted, $TP / (TP + FN)$, in [0, 1]
    (`sklearn.metrics.recall_score`).

    `threshold`, `from_logits`, `average`, `multi_label`, `weighted` and `name` are as in
    `Precision`. 0/0 is 0.

    >>> metric = Recall()
    >>> metric.update(np.array([1, 1, 1, 0]), np.array([0.6, 0.9, 0.2, 0.1]))
    >>> round(metric.result(), 3)
    0.667
    """

    aliases = ("sensitivity",)

    def score(self, hits: Array, predicted: Array, true: Array) -> Array:
        return _ratio(hits, true)


@dataclass
class F1(DecisionMetric):
    r"""Harmonic mean of precision and recall, $2 TP / (2 TP + FP + FN)$, in [0, 1]
    (`sklearn.metrics.f1_score`).

    `threshold`, `from_logits`, `average`, `multi_label`, `weighted` and `name` are as in
    `Precision`. 0/0 is 0.

    >>> metric = F1(average="micro")
    >>> metric.update(np.array([0, 1, 2]), np.eye(3)[[0, 1, 1]])
    >>> round(metric.result(), 3)
    0.667
    """

    aliases = ("f1_score",)

    def score(self, hits: Array, predicted: Array, true: Array) -> Array:
        return _ratio(2 * hits, predicted + true)


@dataclass
class ConfusionMatrix(Metric):
    r"""Count of how often each class (row) was predicted as each class (column),
    $C_{ij} = \sum_n [c_n = i][\hat c_n = j]$, shape `(classes, classes)`; float64 if `weighted`,
    else int64.

    One output per row counts as two classes. A row with NaN is in no cell.

    - `threshold`, `from_logits`: for one output per row, those of `BinaryAccuracy`.
    - `weighted`, `name`: as in `Metric`.

    >>> matrix = ConfusionMatrix()
    >>> matrix.update(np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]))
    >>> matrix.result().tolist()
    [[1, 0], [1, 1]]
    """

    mode = "max"
    scalar = False

    threshold: float = 0.5
    from_logits: bool | None = None

    def __post_init__(self) -> None:
        _check_threshold(self, self.threshold, self.from_logits)
        super().__post_init__()

    def reset(self) -> None:
        self._cells: Array = np.zeros((0, 0))

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = _counted_rows(self, y_true, y_pred, sample_weight)
        if _is_binary(y_true, y_pred):
            cut = _cut(self, self.threshold, self.from_logits, y_pred)
            count = 2
            true = (y_true > 0.5).ravel().astype(np.int64)
            guess = np.where(np.isnan(y_pred), count, y_pred > cut).ravel().astype(np.int64)
            weighting = _per_element(weights, y_pred.shape).ravel()
        else:
            true, guess, weighting, count = _decisions(self, y_true, y_pred, weights)
        cells = np.bincount(
            true * (count + 1) + guess, weighting, minlength=count * (count + 1)
        ).reshape(count, count + 1)[:, :count]
        self._cells = _summed(self._cells, cells)

    def result(self) -> Array:
        return self._cells.copy() if self.weighted else self._cells.astype(np.int64)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._cells = _summed(self._cells, *(other._cells for other in _others(self, states)))


# ---------------------------------------------------------------------- figures that need every row


@dataclass
class AUC(Metric):
    r"""Area under the ROC curve, exact: $P(s_+ > s_-) + \frac12 P(s_+ = s_-)$ for scores of a
    positive and a negative row, in [0, 1] (`sklearn.metrics.roc_auc_score`).

    For several classes (integer or one-hot labels), or several labels, it is the mean over the
    columns, each against the rest. Columns that are always or never true are left out. NaN if no
    column remains, or a score is NaN. Stores all scores in memory.

    - `from_logits`: take the softmax over several classes first. One output per row needs no
      softmax, because only the order counts. None is as in `Metric`.
    - `weighted`, `name`: as in `Metric`.

    >>> metric = AUC()
    >>> metric.update(np.array([0, 1, 1]), np.array([0.1, 0.4, 0.1]))
    >>> metric.result()
    0.75
    """

    mode = "max"
    aliases = ("roc_auc",)

    from_logits: bool | None = None

    def reset(self) -> None:
        # positive, score: a column per class; weight
        self._batches: list[tuple[Array, Array, Array]] = []

    @_quiet
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = _counted_rows(self, y_true, y_pred, sample_weight)
        if _is_binary(y_true, y_pred):
            rows = _per_element(weights, y_pred.shape).reshape(-1)
            positive = (y_true > 0.5).reshape(-1, 1)
            score = y_pred.reshape(-1, 1)
        elif y_true.shape == y_pred.shape and y_true.ndim == 2:
            rows = _per_element(weights, y_pred.shape[:1])
            positive = y_true > 0.5
            score = y_pred
        else:
            classes, score = _classes(self, y_true, y_pred)
            counted = classes >= 0
            rows = _per_element(weights, classes.shape)[counted]
            score = score[counted]
            positive = classes[counted][:, None] == np.arange(score.shape[-1])
        if self.from_logits and score.shape[1] > 1:
            odds = np.exp(score.astype(np.float64) - score.max(axis=1, keepdims=True))
            score = odds / odds.sum(axis=1, keepdims=True)
        used = rows != 0  # the score of a single label of weight 0 may be NaN
        if used.any():  # an empty batch does not determine the class axis
            self._batches.append((positive[used], score[used], rows[used]))

    def result(self) -> float:
        if not self._batches:
            return math.nan
        positive, score, weight = (np.concatenate(arrays) for arrays in zip(*self._batches))
        if np.isnan(score).any():
            return math.nan
        areas = np.array([_area(p, s, weight) for p, s in zip(positive.T, score.T)])
        defined = areas[~np.isnan(areas)]
        return float(defined.mean()) if defined.size else math.nan

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        added = [batch for other in _others(self, states) for batch in other._batches]
        self._batches = [*self._batches, *added]  # a new list, because a state may be the old list


def _area(positive: Array, score: Array, weight: Array) -> float:
    """Return the area of one column: each positive row counts the negative rows below it, and half
    of the negative rows with the same score.
    """
    levels, level = np.unique(score, return_inverse=True)
    up = np.bincount(level, weight * positive, minlength=len(levels))
    down = np.bincount(level, weight * ~positive, minlength=len(levels))
    pairs = up.sum() * down.sum()
    return float((up * (np.cumsum(down) - down / 2)).sum() / pairs) if pairs else math.nan


@dataclass
class R2(Metric):
    r"""Coefficient of determination $1 - \sum w (y - \hat y)^2 / \sum w (y - \bar y)^2$, at most 1;
    the mean over outputs (`sklearn.metrics.r2_score`).

    Labels have the outputs' shape. If y is constant: 1 if every prediction is right, else 0, as in
    scikit-learn. With fewer than two rows: NaN. The spread about the mean is merged from the
    batches' spreads by the update of Chan, Golub and LeVeque (1979), which avoids cancellation.
    `weighted` and `name` are as in `Metric`.

    >>> metric = R2()
    >>> metric.update(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0]))
    >>> metric.result()
    0.5
    """

    mode = "max"
    aliases = ("r2_score",)

    def reset(self) -> None:
        self._rows = 0
        self._weight: Any = 0.0  # an array if outputs have separate weights
        # This number is subtracted from y, so that the variance of a constant y is exactly 0.
        self._first: Array | None = None
        self._mean = self._spread = self._residual = np.zeros(1)

    @_quiet
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = _counted_rows(self, y_true, y_pred, sample_weight)
        true, pred = _elementwise(self, y_true, y_pred)
        shape = pred.shape
        outputs = math.prod(shape[1:])
        true = true.reshape(len(true), outputs)
        pred = pred.reshape(len(pred), outputs)
        weight: Any
        if weights is None or weights.ndim == 1:
            w = _per_element(weights, (len(true), 1))
            weight = float(w.sum())
        else:  # each output has its own weight
            w = _per_element(weights, shape).reshape(true.shape)
            true = np.where(w == 0, 0.0, true)
            pred = np.where(w == 0, 0.0, pred)
            weight = w.sum(axis=0)
        if not np.any(weight):
            return
        # the first counted label of each output
        first = true[(w != 0).argmax(axis=0), np.arange(outputs)]
        y = true - first
        mean = (w * y).sum(axis=0) / np.where(weight == 0, 1.0, weight)
        spread = (w * (y - mean) ** 2).sum(axis=0)
        self._add(first, weight, mean, spread)
        self._residual = self._residual + (w * (true - pred) ** 2).sum(axis=0)
        self._rows += len(true)

    def _add(self, first: Array, weight: Any, mean: Array, spread: Array) -> None:
        """Add rows of this `weight`, with the `mean` of y counted from `first` and the `spread`
        about that mean.
        """
        if self._first is None:
            self._first = first
        total = self._weight + weight
        share = weight / np.where(total == 0, 1.0, total)
        step = (first - self._first) + (mean - self._mean)
        self._spread = self._spread + spread + step**2 * (self._weight * share)
        self._mean = self._mean + step * share
        self._weight = total

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

    @_quiet
    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        for other in _others(self, states):
            if other._first is not None:
                self._add(other._first, other._weight, other._mean, other._spread)
                self._residual = self._residual + other._residual
                self._rows += other._rows


# ---------------------------------------------------------------------- sequences


@dataclass
class CharacterErrorRate(Metric):
    r"""Share of wrong characters $\sum_i d(y_i, \hat y_i) / \sum_i |y_i|$, for outputs of the loss
    CTC with one class for each character.

    $\hat y_i$ is what the output of row $i$ reads as, by `onnxfit.ctc.greedy_decode`. $d$ is the
    smallest number of insertions, deletions and replacements that turn one sequence into the other
    (Levenshtein 1966). Outputs are `(batch, time, classes)`, labels `(batch, labels)`. The rate is
    0 if every row is right, and may exceed 1. It is NaN if an output is NaN, or all labels are
    empty.

    - `blank`, `ignore_index`, `input_lengths`: as in the loss CTC. None takes the setting of the
      output's loss; outside a Trainer, it means CTC's default.
    - `weighted`, `name`: as in `Metric`. Weights belong to rows, and count in both sums.

    Raises DataError if labels and outputs do not fit, or a label is the blank.

    >>> metric = CharacterErrorRate()
    >>> metric.update(np.array([[1, 2, -1], [2, 1, 1]]), np.eye(3)[[[1, 1, 0], [2, 1, 1]]])
    >>> metric.result()  # the second 2 and the second 1 are missing
    0.4
    """

    aliases = ("cer",)
    settings_of_loss = ("blank", "ignore_index", "input_lengths")

    blank: int | None = field(default=None, kw_only=True)
    ignore_index: int | None = field(default=None, kw_only=True)
    input_lengths: bool | None = field(default=None, kw_only=True)

    def reset(self) -> None:
        self._edits = self._length = 0.0

    def units(self, labels: list[int]) -> Sequence[Any]:
        """Return the sequence to compare, for the class indices `labels`: by default themselves."""
        return labels

    @_quiet
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = _counted_rows(self, y_true, y_pred, sample_weight)
        if y_true.ndim != 2 or y_pred.ndim != 3 or y_true.dtype.kind not in "iu":
            expected = "labels (batch, labels) of class indices, and outputs (batch, time, classes)"
            raise _misfit(self, expected, y_true, y_pred)
        classes = y_pred.shape[2]
        blank = (self.blank or 0) % classes
        targets, lengths = y_true, None
        if self.input_lengths:
            targets, lengths = y_true[:, 1:], y_true[:, 0]
        counted = targets != (-1 if self.ignore_index is None else self.ignore_index)
        wrong = counted & ((targets == blank) | (targets < 0) | (targets >= classes))
        if wrong.any():
            raise DataError(
                f"{type(self).__name__} needs class indices from 0 to {classes - 1} except the"
                f" blank {blank} as labels, got {targets[wrong][0]}. Set blank and ignore_index as"
                " in the loss CTC."
            )
        is_nan = np.asarray(np.isnan(y_pred).any(axis=(1, 2)))
        outputs = np.where(is_nan[:, None, None], 0, y_pred)
        readings = greedy_decode(outputs, blank=blank, input_lengths=lengths)
        weights = _per_element(weights, (len(y_pred),))
        for weight, row, mask, reading, broken in zip(weights, targets, counted, readings, is_nan):
            units = self.units(row[mask].tolist())
            edits = math.nan if broken else _edit_distance(units, self.units(reading))
            self._edits += float(weight * edits)
            self._length += float(weight * len(units))

    def result(self) -> float:
        return self._edits / self._length if self._length else math.nan

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        for other in _others(self, states):
            self._edits += other._edits
            self._length += other._length


@dataclass
class WordErrorRate(CharacterErrorRate):
    """Share of wrong words: `CharacterErrorRate` of sequences of words.

    - `alphabet`: the text of each class, in the order of the classes: a string, or a list of
      strings. The entry of the blank is not used. White space separates words.
    - `blank`, `ignore_index`, `input_lengths`, `weighted`, `name`: as in `CharacterErrorRate`.

    Raises SettingError for an `alphabet` that has other entries than strings, and DataError if it
    has another size than the outputs have classes.

    >>> metric = WordErrorRate("_ab ")
    >>> metric.update(np.array([[1, 3, 2, 2]]), np.eye(4)[[[1, 3, 3, 2]]])
    >>> metric.result()  # "a b" for "a bb"
    0.5
    """

    named = False

    alphabet: Sequence[str]

    def __post_init__(self) -> None:
        if not isinstance(self.alphabet, (str, list, tuple)) or not all(
            isinstance(entry, str) for entry in self.alphabet
        ):
            raise SettingError(
                "WordErrorRate needs a string for each class as alphabet, got"
                f" {shortened(self.alphabet)}."
            )
        self.alphabet = tuple(self.alphabet)
        super().__post_init__()

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        if np.ndim(y_pred) == 3 and np.shape(y_pred)[2] != len(self.alphabet):
            raise DataError(
                "WordErrorRate needs a string for each class, that of the blank included, got"
                f" {len(self.alphabet)} strings and outputs of {np.shape(y_pred)[2]} classes."
            )
        super().update(y_true, y_pred, sample_weight)

    def units(self, labels: list[int]) -> Sequence[Any]:
        return "".join(self.alphabet[label] for label in labels).split()


def _edit_distance(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the smallest number of insertions, deletions and replacements that make a into b.

    `row[j]` is the distance between the beginning of a so far and the first j entries of b.
    """
    codes = {unit: code for code, unit in enumerate({*a, *b})}
    others, places = np.array([codes[unit] for unit in b], int), np.arange(len(b) + 1)
    row = places
    for i, unit in enumerate(a, 1):
        without_insertions = np.minimum(row[1:] + 1, row[:-1] + (others != codes[unit]))
        row = np.concatenate([[i], without_insertions])
        row = np.minimum.accumulate(row - places) + places
    return int(row[-1])


# ---------------------------------------------------------------------- functions of all rows


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

    With classes or probabilities, `y_true` and `y_pred` have the shapes of scikit-learn: classes
    `(n,)`, probabilities `(n, classes)`, for two classes those of the second, `(n,)`. Several
    binary outputs are a matrix, `(n, outputs)`. An output of probability above 0.5 is a yes. Tokens
    and pixels count as rows, and labels that the loss ignores are left out. If an output is NaN,
    the row has a class that no label has.

    The metric keeps copies of the labels and predictions of all rows until the next epoch begins:
    16 MB per million rows for classes, otherwise the size of the outputs. The logs of batches lack
    it. Raises SettingError for an unknown setting, and DataError if the function returns no number.

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
        self._batches: list[tuple[Array, ...]] = []  # labels, predictions, and weights if counted

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = _counted_rows(self, y_true, y_pred, sample_weight)
        if not len(y_pred):
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
            classes, guess, each, _ = _decisions(self, y_true, y_pred, weights)
            return [classes, guess] if weights is None else [classes, guess, each]
        classes, scores = _classes(self, y_true, y_pred)
        counted = classes >= 0
        shares = _softmax(scores[counted]) if self.from_logits else scores[counted]
        arrays = [classes[counted], np.array(shares[:, 1] if shares.shape[1] == 2 else shares)]
        each = _per_element(weights, classes.shape)[counted]
        return arrays if weights is None else [*arrays, each]

    def _answers(
        self, y_true: Array, y_pred: Array, weights: Array | None, wanted: str
    ) -> list[Array]:
        """Return labels of 0 and 1, predictions, and weights, a column for each binary output."""
        true, pred = _aligned(self, y_true, y_pred)
        if pred.ndim > 1:
            axis = _class_axes(pred.ndim)[0]
            true, pred = np.moveaxis(true, axis, -1), np.moveaxis(pred, axis, -1)
            each = _per_element(weights, pred.shape[:-1]).reshape(-1)
        else:
            each = _per_element(weights, pred.shape)
        shape = (-1,) if pred.ndim == 1 or pred.shape[-1] == 1 else (-1, pred.shape[-1])
        true, pred = (true > 0.5).reshape(shape), pred.reshape(shape)
        if wanted == "classes":
            pred = pred > (0.0 if self.from_logits else 0.5)
        elif self.from_logits:
            pred = _sigmoid(pred)
        arrays = [true.astype(np.int64), np.array(pred, np.int64 if pred.dtype == bool else None)]
        return arrays if weights is None else [*arrays, each]

    def result(self) -> float:
        if not self._batches:
            return math.nan
        y_true, y_pred, *weights = (np.concatenate(arrays) for arrays in zip(*self._batches))
        named = {"sample_weight": weights[0]} if weights else {}
        return _one_number(self.name, self.function(y_true, y_pred, **named))

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        added = [batch for other in _others(self, states) for batch in other._batches]
        self._batches = [*self._batches, *added]  # a new list, because a state may be the old list


def _has_class_indices(y_true: Array, y_pred: Array) -> bool:
    return y_true.dtype.kind in "iu" and _class_axis(y_true, y_pred) is not None


def _softmax(scores: Array) -> Array:
    odds = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return np.asarray(odds / odds.sum(axis=1, keepdims=True))


def _sigmoid(scores: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * scores.astype(np.float64))))


def _one_number(name: str, figure: Any) -> float:
    """Return the figure of a metric as a float. Raises DataError for anything else."""
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


# ---------------------------------------------------------------------- other libraries


@dataclass
class ExternalMetric(Metric):
    """A metric object of Keras or torchmetrics, or one with the same methods.

    - `metric`: an object with Keras's `update_state(y_true, y_pred, sample_weight=None)`, `result`
      and `reset_state`, or torchmetrics's `update(preds, target)`, `compute` and `reset`. It is
      copied, so the object itself does not change.
    - `weighted`: as in `Metric`, for objects that take `sample_weight`.
    - `name`: as in `Metric`; by default the name that the object has, or that of its class.

    The object gets labels and outputs as other metrics do, without the labels that the loss
    ignores, and with the class axis that its library expects: the last for Keras, 1 for
    torchmetrics's classification. Outputs may be logits: torchmetrics turns them into
    probabilities, objects of Keras do not. An object of torchmetrics gets tensors, and whole
    numbers as labels of a classification; one of Keras that needs one-hot labels gets them.
    `Trainer(metrics=)` and `get_metric` wrap such objects.

    A checkpoint within an epoch contains the object's state: Keras's `variables`, torchmetrics's
    states, or attributes that are numbers, arrays or lists of arrays. If it has others, a warning
    says, after resuming, that the epoch's figure lacks the earlier batches. In several processes,
    torchmetrics's states are merged if they are sums, extremes or lists.

    Raises SettingError for an object that lacks a method, or with `weighted` does not take weights;
    DataError if it returns more than one number, or cannot use labels and outputs;
    UnsupportedError for an object that cannot be merged.

    >>> class Largest:
    ...     def reset_state(self):
    ...         self.largest = 0.0
    ...
    ...     def update_state(self, y_true, y_pred):
    ...         self.largest = max(self.largest, float(abs(y_true - y_pred).max()))
    ...
    ...     def result(self):
    ...         return self.largest
    >>> metric = ExternalMetric(Largest())
    >>> metric.update(np.array([1.0, 2.0]), np.array([1.5, 5.0]))
    >>> metric.name, metric.result()
    ('largest', 3.0)
    """

    named = False

    metric: Any

    def __post_init__(self) -> None:
        self.is_keras = hasattr(self.metric, "update_state")
        self.external = self._copied(self.metric)
        self._require_methods()
        better = getattr(self.metric, "higher_is_better", None)
        if better is None:
            better = mode_by_name(f"{self._own_name()} {self._class_name()}") == "max"
        self.mode = "max" if better else "min"  # type: ignore[misc]
        super().__post_init__()

    def __copy__(self) -> ExternalMetric:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.external = self._copied(self.external)
        return other

    def _copied(self, metric: Any) -> Any:
        try:
            return copy.deepcopy(metric)
        except Exception as error:
            raise SettingError(
                f"The metric object {shortened(metric)} cannot be copied: {error}. Each output and"
                " each evaluation needs its own copy."
            ) from error

    def _own_name(self) -> str:
        name = getattr(self.metric, "name", None)
        return name if isinstance(name, str) and name else self._class_name()

    def _class_name(self) -> str:
        words = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
        return re.sub(words, "_", type(self.metric).__name__).lower()

    def _require_methods(self) -> None:
        methods = KERAS_METHODS if self.is_keras else TORCHMETRICS_METHODS
        kind = type(self.metric).__name__
        lacking = [name for name in methods if not callable(getattr(self.metric, name, None))]
        if lacking:
            raise SettingError(
                f"The metric object {kind} lacks {', '.join(lacking)}. Expected Keras's methods"
                f" {', '.join(KERAS_METHODS)}, or torchmetrics's"
                f" {', '.join(TORCHMETRICS_METHODS)}."
            )
        update = getattr(self.metric, methods[0])
        names = _parameters(update)
        if not _takes_two(update) or names[1:2] in (["sample_weight"], ["weight"]):
            raise SettingError(
                f"{kind}.{methods[0]} does not take labels and outputs: its parameters are"
                f" ({', '.join(names)}). Pass a metric that compares them."
            )
        self.labels_first = self.is_keras or names[:1] in (["y_true"], ["target"], ["labels"])
        if self.weighted and not {"sample_weight", "**"} & set(names):
            raise SettingError(
                f"weighted=True needs a metric with sample weights, but {kind}.{methods[0]} takes"
                f" ({', '.join(names)}). Leave weighted out."
            )

    def reset(self) -> None:
        self._rows = 0
        if self.is_keras:
            self.external.reset_state()
        else:
            self.external.reset()

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = _counted_rows(self, y_true, y_pred, sample_weight)
        if not len(y_pred):
            return
        labels, outputs, weights = self._arranged(y_true, y_pred, weights)
        arrays = [self._tensor(np.array(labels)), self._tensor(np.array(outputs))]
        named = {} if weights is None else {"sample_weight": self._tensor(weights)}
        update = self.external.update_state if self.is_keras else self.external.update
        try:
            update(*(arrays if self.labels_first else reversed(arrays)), **named)
        except OnnxfitError:
            raise
        except Exception as error:
            raise DataError(
                f"{type(self.metric).__name__} cannot use labels {y_true.dtype}"
                f"{list(y_true.shape)} and outputs {y_pred.dtype}{list(y_pred.shape)}: {error}"
            ) from error
        is_first = not self._rows
        self._rows += len(y_pred)
        if is_first:
            self.result()  # refuses an object that returns several numbers, before an update

    def _arranged(
        self, y_true: Array, y_pred: Array, weights: Array | None
    ) -> tuple[Array, Array, Array | None]:
        """Return labels, outputs and weights as the object expects them, without ignored labels."""
        bases = type(self.metric).__mro__
        classifies = any(b.__module__.startswith("torchmetrics.classification") for b in bases)
        axis = _class_axis(y_true, y_pred)
        if axis is not None and (y_true < 0).any():
            counted, scores = y_true >= 0, np.moveaxis(y_pred, axis, -1)
            if weights is not None:
                weights = _per_element(weights, y_true.shape)[counted]
            y_true, y_pred, axis = y_true[counted], scores[counted], 1
        if axis is not None and (self.is_keras or classifies):
            y_pred = np.moveaxis(y_pred, axis, -1 if self.is_keras else 1)
        if axis is not None and any(_wants_one_hot(base) for base in bases):
            y_true = np.eye(y_pred.shape[-1], dtype=np.float32)[y_true.astype(np.int64)]
        if classifies and y_true.dtype.kind == "f" and not (y_true % 1).any():
            y_true = y_true.astype(np.int64)
        return y_true, y_pred, weights

    def _tensor(self, array: Array) -> Any:
        """Return an array as the object takes it: as a tensor if it is a module of torch."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(self.external, torch.nn.Module):
            return array
        return torch.from_numpy(np.array(array)).to(getattr(self.external, "device", "cpu"))

    def result(self) -> float:
        if not self._rows:
            return math.nan
        with warnings.catch_warnings():  # torchmetrics does not know of a restored state
            warnings.filterwarnings("ignore", message=".*was called before the ``update`` method")
            figure = self.external.result() if self.is_keras else self.external.compute()
        return _one_number(self.name, figure)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        values = {n: _as_numbers(v) for n, v in self._values().items() if _is_counted(v)}
        if any(value is None for value in values.values()):
            return {"_rows": self._rows}
        return {"_rows": self._rows, "_values": values}

    def _values(self) -> dict[str, Any]:
        """Return the values that make up the state of the object."""
        if hasattr(self.external, "variables"):
            return {str(number): v for number, v in enumerate(self.external.variables)}
        if hasattr(self.external, "metric_state"):
            return dict(self.external.metric_state)
        return dict(vars(self.external))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        rows, values = state.get("_rows"), state.get("_values")
        if isinstance(rows, int) and rows and values is None:
            warn_user(
                f"The checkpoint lacks the state of the metric {self.name!r}, because it consists"
                " of more than numbers and arrays. The figure of this epoch will cover only the"
                " batches after the checkpoint."
            )
            return
        own = self._values()
        needed = {name for name, value in own.items() if _is_counted(value)}
        if not isinstance(rows, int) or (rows and not needed <= set(values or ()) <= set(own)):
            raise CheckpointError(
                f"The metric {self.name!r} stores {listed_names(own) or 'nothing'}, but the"
                f" checkpoint has {listed_names(values or ()) or 'nothing'}. Use the metric with"
                " which the checkpoint was saved."
            )
        self._rows = rows
        for name, value in (values or {}).items():
            self._restore(name, own[name], value)

    def _restore(self, name: str, own: Any, value: Any) -> None:
        if hasattr(own, "assign"):
            own.assign(np.asarray(value))
        elif isinstance(value, list):
            setattr(self.external, name, [self._tensor(np.asarray(entry)) for entry in value])
        else:
            is_number = isinstance(own, (bool, int, float))
            setattr(self.external, name, value if is_number else self._tensor(np.asarray(value)))

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        reductions = getattr(self.external, "_reductions", None)
        found = {getattr(r, "__name__", None) for r in (reductions or {}).values()}
        if reductions is None or not found <= set(MERGED_BY):
            raise UnsupportedError(
                f"The metric {self.name!r} cannot be merged from several processes, because"
                f" {type(self.metric).__name__} does not say how to add up its state. Use a metric"
                " of onnxfit, or EpochMetric."
            )
        for state in states:
            if not state["_rows"]:
                continue
            if not self._rows:
                self.load_state_dict(state)
                continue
            for name, value in self._values().items():
                merge = MERGED_BY[reductions[name].__name__]
                self._restore(name, value, merge(_as_numbers(value), state["_values"][name]))
            self._rows += state["_rows"]


def _wants_one_hot(cls: type) -> bool:
    """Whether a class of Keras reads labels as one-hot, without an error for indices."""
    names = r"(TopK)?Categorical\w+|F1Score|FBetaScore|Precision|Recall|AUC|OneHot\w+"
    is_own = cls.__module__.split(".")[0] in ("keras", "tf_keras")
    return is_own and re.fullmatch(names, cls.__name__) is not None


def _concatenated(one: Any, other: Any) -> Any:
    if isinstance(one, list) and isinstance(other, list):
        return [*one, *other]
    return np.concatenate([np.atleast_1d(one), np.atleast_1d(other)])


# name of a reduction of torchmetrics -> how the states of two processes become one
MERGED_BY: dict[str | None, Callable[[Any, Any], Any]] = {
    "dim_zero_sum": np.add,
    "dim_zero_max": np.maximum,
    "dim_zero_min": np.minimum,
    "dim_zero_cat": _concatenated,
}


def _has_state(metric: Any) -> bool:
    """Whether an object adds up batches by itself, as those of Keras and torchmetrics do."""
    if isinstance(metric, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return False
    has = {name for name in ("update", "reset", "update_state", "compute") if hasattr(metric, name)}
    return bool(has & {"update_state", "compute"}) or has == {"update", "reset"}


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that a call may fill, `**` for any keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    return ["**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters]


def _is_counted(value: Any) -> bool:
    """Whether an attribute may be the state of a metric, and no setting."""
    return not isinstance(value, (str, type(None), type, types.FunctionType))


def _as_numbers(value: Any) -> Any:
    """Return a value of a state as a number, an array, or a list of arrays; None for others."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        entries = [_as_numbers(entry) for entry in value]
        return None if any(entry is None for entry in entries) else entries
    value = value.detach().cpu() if hasattr(value, "detach") else value
    try:
        array = np.array(value)
    except Exception:
        return None
    return array if array.dtype.kind in "biuf" else None


# ---------------------------------------------------------------------- shapes and decisions


def _counted_rows(
    metric: Metric, y_true: Array, y_pred: Array, sample_weight: Array | None
) -> tuple[Array, Array, Array | None]:
    """Return labels, outputs and weights of the rows that count; no weights for a metric without
    them.

    Rows of weight 0 are omitted: 0 times NaN would be NaN. Weights of single labels keep their
    shape, in rows with any counted label.
    """
    y_true = np.asarray(y_true)
    y_pred = np.asarray(y_pred)
    if not metric.weighted or sample_weight is None:
        return y_true, y_pred, None
    weights = np.asarray(sample_weight)
    while weights.ndim > 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    used = (weights != 0).any(axis=tuple(range(1, weights.ndim)))
    if used.all():
        return y_true, y_pred, weights
    return y_true[used], y_pred[used], weights[used]


def _per_element(sample_weight: Array | None, shape: tuple[int, ...]) -> Array:
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


def _summed(first: Array | None, *others: Array | None) -> Any:
    """The sum of tables of counts, None for none.

    A table without counts is skipped: the labels of an empty batch do not determine the class axis,
    so its size may be wrong.
    """
    tables = [table for table in (first, *others) if table is not None]
    counting = [table for table in tables if table.any()]
    if counting:
        return sum(counting[1:], counting[0])
    return max(tables, key=np.size, default=None)


def _ratio(count: Array, whole: Array) -> Array:
    return np.asarray(count / np.where(whole == 0, 1.0, whole))


def _misfit(metric: Metric, expected: str, y_true: Array, y_pred: Array) -> DataError:
    return DataError(
        f"{type(metric).__name__} needs {expected}, got labels of shape {y_true.shape} and outputs"
        f" of shape {y_pred.shape}."
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
    """Whether there is one output instead of one per class."""
    if y_pred.ndim == 1 or y_true.shape == y_pred.shape:
        return y_pred.ndim == 1 or 1 in (y_pred.shape[1], y_pred.shape[-1])
    axis = _class_axis(y_true, y_pred)
    return axis is not None and y_pred.shape[axis] == 1


def _class_axes(rank: int) -> list[int]:
    """The axes that may hold the classes, the likeliest first: axis 1 of images, else the last
    axis, as for the losses.
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
            f"{type(metric).__name__} needs labels that add up to 1 over the classes, but labels"
            f" of shape {y_true.shape} do not. If several classes may be true at once, use"
            " BinaryAccuracy, or Precision, Recall or F1 with multi_label=True."
        )
    if y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    axis_or_none = _class_axis(y_true, y_pred)
    if axis_or_none is None:
        raise _misfit(
            metric, "integer labels without the class axis, or one-hot labels", y_true, y_pred
        )
    if y_true.dtype.kind == "f" and (y_true % 1 != 0).any():
        given = y_true[y_true % 1 != 0].flat[0]
        raise DataError(f"{type(metric).__name__} needs integer classes as labels, got {given:g}.")
    scores = np.moveaxis(y_pred, axis_or_none, -1)
    classes = y_true.astype(np.int64)
    return np.where(classes < scores.shape[-1], classes, -1), scores


def _decisions(
    metric: Metric, y_true: Array, y_pred: Array, sample_weight: Array | None
) -> tuple[Array, Array, Array, int]:
    """Per row: its class, the class predicted (the number of classes where a score is NaN), and
    its weight; and the number of classes.
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
    right = (scores.argmax(axis=-1) == classes) & ~np.isnan(scores.sum(axis=-1))
    return np.ma.MaskedArray(right, classes < 0) if (classes < 0).any() else right


def _right_side(y_true: Array, y_pred: Array, cut: float) -> Array:
    return np.asarray(((y_pred > cut) == (y_true > 0.5)) & ~np.isnan(y_pred))


def _check_threshold(metric: Metric, threshold: float, from_logits: bool | None) -> None:
    usable = is_number(threshold) and is_finite(threshold)
    if not usable or (from_logits and not 0 < threshold < 1):
        wanted = "0 < threshold < 1 for logits" if from_logits else "a finite threshold"
        raise SettingError(f"{type(metric).__name__} needs {wanted}, got {shortened(threshold)}.")


def _cut(metric: Metric, threshold: float, from_logits: bool | None, y_pred: Array) -> float:
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


# ---------------------------------------------------------------------- the same in a graph


def _sum(op: GraphBuilder, values: Value) -> Value:
    return op.ReduceSum(values, keepdims=0)


def _same_sizes(a: Value, b: Value, axes: int) -> bool:
    """Whether two values surely have the same sizes on their first axes."""
    if a.shape is None or b.shape is None or None in a.shape[:axes]:
        return False
    return a.shape[:axes] == b.shape[:axes]


def _difference(op: GraphBuilder, y_true: Value, y_pred: Value) -> Value | None:
    """Labels minus outputs in float64; None where their shapes may differ."""
    if y_pred.shape is None or not _same_sizes(y_true, y_pred, len(y_pred.shape)):
        return None
    return op.cast(y_true, np.float64) - op.cast(y_pred, np.float64)


def _class_axis_in_graph(y_true: Value, y_pred: Value) -> int | None:
    """The axis of the outputs that integer labels lack; None where the graph does not tell."""
    true, pred = y_true.shape, y_pred.shape
    if y_true.dtype.kind not in "iu" or true is None or pred is None or len(true) != len(pred) - 1:
        return None
    if None in true or None in pred:
        return None
    for axis in _class_axes(len(pred)):
        others = pred[:axis] + pred[axis + 1 :]
        if others == true:
            classes = pred[axis]
            return axis if isinstance(classes, int) and classes > 1 else None
        pairs = zip(others, true)
        if not any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
            return None  # the sizes of a batch may turn out to be the same
    return None


def _known_classes(op: GraphBuilder, y_true: Value, y_pred: Value, axis: int) -> Value:
    """Whether each label is a class of the outputs."""
    assert y_pred.shape is not None
    classes = y_pred.shape[axis]
    assert isinstance(classes, int)
    return op.And(y_true >= 0, y_true < classes)


def _right_class_in_graph(
    op: GraphBuilder, y_true: Value, y_pred: Value
) -> tuple[Value, Value] | None:
    axis = _class_axis_in_graph(y_true, y_pred)
    if axis is None:
        return None
    right = op.Equal(_highest_in_graph(op, y_pred, axis), op.cast(y_true, np.int64))
    defined = ~op.IsNaN(op.ReduceSum(y_pred, [axis], keepdims=0))
    return op.And(right, defined), _known_classes(op, y_true, y_pred, axis)


def _highest_in_graph(op: GraphBuilder, scores: Value, axis: int) -> Value:
    """The class of the highest score, the first of several.

    Of many classes on the last axis, first the block with the highest score is found: onnxruntime's
    ReduceMax is six times as fast as its ArgMax (32,000 classes, one thread).
    """
    assert scores.shape is not None
    classes = scores.shape[axis]
    assert isinstance(classes, int)
    block = next(size for size in range(math.isqrt(classes), classes + 1) if not classes % size)
    if axis != scores.rank - 1 or block * MIN_BLOCKS > classes:
        return op.ArgMax(scores, axis=axis, keepdims=0)
    blocks = op.Reshape(scores, [0] * axis + [classes // block, block])
    first = op.ArgMax(op.ReduceMax(blocks, [axis + 1], keepdims=0), axis=axis, keepdims=1)
    inside = op.ArgMax(op.GatherND(blocks, first, batch_dims=axis), axis=axis, keepdims=0)
    return op.Squeeze(first, [axis]) * block + inside
