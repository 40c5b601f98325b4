"""Losses of rankings."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from onnxfit.checks import check_number
from onnxfit.errors import SettingError
from onnxfit.graph.labels import AllowedLabels
from onnxfit.graph.logarithms import log_softmax
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss
from onnxfit.losses.outputs import (
    class_divergence,
    per_row,
)

__all__ = ["ListNet"]


@dataclass(frozen=True)
class ListNet(Loss):
    r"""Cross entropy of the distributions that relevances $y$ and scores $\hat y$ give to the first
    place, $-\sum_i \mathrm{softmax}(y)_i \log \mathrm{softmax}(\hat y)_i$ over the items of a list
    (Cao et al. 2007).

    The last axis of outputs and labels has the items; the loss lacks this axis.

    - `ignore_index`: the label of places without an item, for shorter lists; None for none. A list
      without items does not count.
    - `reduction` is as in `Loss`.

    >>> ListNet(ignore_index=-1).ignore_index
    -1
    """

    aliases = ("listwise_softmax", "softmax_ranking")

    ignore_index: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ignore_index is not None:
            check_number(self, "ignore_index", whole=True)

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        return AllowedLabels(ignored=self.ignore_index)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if y_pred.shape is not None and len(y_pred.shape) < 2:
            raise SettingError(
                f"ListNet needs an output with a batch axis and an axis of items, got {y_pred}."
            )
        return super().target(y_pred)

    def element_weights(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value | None:
        if self.ignore_index is None:
            return None
        counts = op.cast(~op.Equal(y_true, self.ignore_index), y_pred.dtype)
        return op.ReduceMax(counts, [-1], keepdims=0)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        axis = y_pred.rank - 1
        if self.ignore_index is not None:
            ignored = op.Equal(y_true, self.ignore_index)
            minimum = float(np.finfo(y_pred.dtype).min) / 4
            y_true, y_pred = (op.Where(ignored, minimum, x) for x in (y_true, y_pred))
        relevance = op.Softmax(y_true, axis=axis)
        return -op.ReduceSum(relevance * log_softmax(op, y_pred, axis), [axis], keepdims=0)

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        """Return the distance of the distributions over the items."""
        return class_divergence(self, op, y_pred, y_teacher, temperature, y_pred.rank - 1)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        return per_row(op, counts, y_pred.rank)
