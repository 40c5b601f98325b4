"""Shares of right predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxfit.checks import shortened
from onnxfit.errors import SettingError
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.metrics.alignment import (
    aligned,
    check_threshold,
    classes_and_scores,
    cut_at,
    is_binary,
    misfit,
    right_class,
    right_side,
)
from onnxfit.metrics.base import Array
from onnxfit.metrics.in_graph import right_class_in_graph
from onnxfit.metrics.means import MeanMetric

__all__ = [
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "SparseCategoricalAccuracy",
    "TopKAccuracy",
]


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

    SettingError: the threshold is invalid. DataError: labels and outputs have other shapes.

    >>> metric = BinaryAccuracy(threshold=0.3)
    >>> metric.update(np.array([0, 1, 1]), np.array([0.2, 0.4, 0.1]))
    >>> round(metric.result(), 3)
    0.667
    """

    mode = "max"

    threshold: float = 0.5
    from_logits: bool | None = None

    def __post_init__(self) -> None:
        check_threshold(self, self.threshold, self.from_logits)
        super().__post_init__()

    def values(self, y_true: Array, y_pred: Array) -> Array:
        true, pred = aligned(self, y_true, y_pred)
        return right_side(true, pred, cut_at(self, self.threshold, self.from_logits, pred))


@dataclass
class CategoricalAccuracy(MeanMetric):
    r"""Share of one-hot labels whose class has the highest score,
    $\frac1n \sum_i [\arg\max_c \hat y_{ic} = \arg\max_c y_{ic}]$, in [0, 1].

    Labels and outputs have shape `(batch, classes, ...)` or `(batch, ..., classes)`. Of several
    highest scores the first counts. A row with NaN, or with scores that are infinite in both
    directions, is wrong. `weighted` and `name` are as in `Metric`. DataError: the labels do not add
    up to 1 over the classes.

    >>> metric = CategoricalAccuracy()
    >>> metric.update(np.array([[1, 0], [0, 1]]), np.array([[0.9, 0.1], [0.6, 0.4]]))
    >>> metric.result()
    0.5
    """

    mode = "max"

    def values(self, y_true: Array, y_pred: Array) -> Array:
        if y_true.shape != y_pred.shape:
            raise misfit(self, "one-hot labels of the outputs' shape", y_true, y_pred)
        return right_class(self, *classes_and_scores(self, y_true, y_pred))


@dataclass
class SparseCategoricalAccuracy(MeanMetric):
    r"""Share of integer labels whose class has the highest score,
    $\frac1n \sum_i [\arg\max_c \hat y_{ic} = y_i]$, in [0, 1].

    Outputs have shape `(batch, classes, ...)` or `(batch, ..., classes)`, labels the same without
    the axis of classes. Of several highest scores the first counts. A row with NaN, or with scores
    that are infinite in both directions, is wrong. `weighted` and `name` are as in `Metric`.
    DataError: labels and outputs have other shapes.

    >>> metric = SparseCategoricalAccuracy()
    >>> metric.update(np.array([0, 1]), np.array([[0.9, 0.1], [0.6, 0.4]]))
    >>> metric.result()
    0.5
    """

    mode = "max"
    aliases = ("token_accuracy",)

    def values(self, y_true: Array, y_pred: Array) -> Array:
        if y_true.shape == y_pred.shape:
            raise misfit(self, "integer labels without the class axis", y_true, y_pred)
        return right_class(self, *classes_and_scores(self, y_true, y_pred))

    def values_in_graph(
        self, op: GraphBuilder, y_true: Value, y_pred: Value
    ) -> tuple[Value, Value | None] | None:
        return right_class_in_graph(op, y_true, y_pred)


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
    aliases = ("acc", "accuracy_score")

    threshold: float = 0.5
    from_logits: bool | None = None

    def __post_init__(self) -> None:
        check_threshold(self, self.threshold, self.from_logits)
        super().__post_init__()

    def values(self, y_true: Array, y_pred: Array) -> Array:
        if is_binary(y_true, y_pred):
            cut = cut_at(self, self.threshold, self.from_logits, y_pred)
            return right_side(y_true.reshape(y_pred.shape), y_pred, cut)
        return right_class(self, *classes_and_scores(self, y_true, y_pred))

    def values_in_graph(
        self, op: GraphBuilder, y_true: Value, y_pred: Value
    ) -> tuple[Value, Value | None] | None:
        return right_class_in_graph(op, y_true, y_pred)


@dataclass
class TopKAccuracy(MeanMetric):
    r"""Share of labels whose class is among the $k$ highest scores,
    $\frac1n \sum_i [\mathrm{rank}(\hat y_{i, y_i}) \le k]$, in [0, 1]; labels are integers or
    one-hot.

    Equal scores rank in the order of the classes, so `k=1` is the accuracy. A row with NaN counts
    as wrong.

    - `k`: a whole number of at least 1. SettingError: `k` is anything else.
    - `weighted`, `name`: as in `Metric`.

    >>> metric = TopKAccuracy(k=2)
    >>> metric.update(np.array([0, 2]), np.array([[0.2, 0.7, 0.1], [0.6, 0.3, 0.1]]))
    >>> metric.name, metric.result()
    ('top_2_accuracy', 0.5)
    """

    mode = "max"
    aliases = (
        "top_k_accuracy",
        "top_k",
        "top_k_categorical_accuracy",
        "sparse_top_k_categorical_accuracy",
        "top_k_accuracy_score",
    )

    k: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.k, (int, np.integer)) or self.k < 1:
            raise SettingError(f"TopKAccuracy needs k >= 1, got {shortened(self.k)}.")
        super().__post_init__()

    def _own_name(self) -> str:
        return f"top_{self.k}_accuracy"

    def values(self, y_true: Array, y_pred: Array) -> Array:
        classes, scores = classes_and_scores(self, y_true, y_pred)
        known = np.maximum(classes, 0)[..., None]
        own = np.take_along_axis(scores, known, axis=-1)
        earlier = np.arange(scores.shape[-1]) < known
        rank = ((scores > own) | ((scores == own) & earlier)).sum(axis=-1)
        return np.ma.MaskedArray((rank < self.k) & ~np.isnan(scores).any(axis=-1), classes < 0)
