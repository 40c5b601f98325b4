"""Losses: what a prediction costs, per sample or element; the mean, weights and mask are applied once, by `Loss`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import numpy.typing as npt

from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import Op, Value

__all__ = ["Loss", "MeanSquaredError"]


@dataclass(frozen=True)
class Loss(ABC):
    r"""The base of every loss.

    A subclass returns $\ell$, one value per sample or per element, shape `(batch, ...)`; with sample weights $s$ and element weights $e$
    (`element_weights`, 1 unless overridden) the loss of a batch is the scalar

    - `reduction="mean"`: $\sum s e \ell / \sum e$; a weighted row counts as a row, as in Keras;
    - `reduction="weighted_mean"`: $\sum s e \ell / \sum s e$;
    - `reduction="sum"`: $\sum s e \ell$.
    """

    reduction: str = field(default="mean", kw_only=True)

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "weighted_mean", "sum"):
            raise SettingError(f"{type(self).__name__} needs reduction 'mean', 'weighted_mean' or 'sum', got {self.reduction!r}.")

    @abstractmethod
    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        """The loss per sample or element, shape `(batch, ...)`."""

    def element_weights(self, op: Op, y_true: Value, y_pred: Value) -> Value | None:
        """What each entry of the result counts (class weights, a mask), in the result's shape; None: all count 1."""
        return None

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        """The type and shape of `y_true` for a model output; by default those of the output itself."""
        return TensorSpec("y_true", y_pred.dtype, y_pred.shape)

    def prepare(self, y: npt.NDArray[Any], y_pred: TensorSpec) -> npt.NDArray[Any]:
        """Labels as the graph wants them: the output's element type, `(n,)` as `(n, 1)` where the output has a last axis of 1. DataError where they cannot meet."""
        y = np.asarray(y)
        if y_pred.shape is not None and y.ndim == len(y_pred.shape) - 1 and y_pred.shape[-1] == 1:
            y = y[..., None]
        elif y_pred.shape is not None and y.ndim == len(y_pred.shape) + 1 and y.shape[-1] == 1:
            y = y[..., 0]
        if y_pred.shape is not None and not TensorSpec("", y_pred.dtype, ("batch", *y_pred.shape[1:])).accepts(y.shape):
            raise DataError(
                f"{type(self).__name__} compares labels with output {y_pred}, element by element: labels of shape {y.shape} "
                f"were given, ({', '.join(map(str, ('batch', *y_pred.shape[1:])))}) is expected."
            )
        return y.astype(y_pred.dtype, copy=False)

    @final
    def reduce(self, op: Op, y_true: Value, y_pred: Value, sample_weight: Value | None) -> tuple[Value, Value | None]:
        """The scalar loss of a batch, and what it counts: the divisor where that is not simply the number of entries, else None."""
        loss = self(op, y_true, y_pred)
        elements = self.element_weights(op, y_true, y_pred)
        weights = elements
        if sample_weight is not None:
            rows = op.cast(sample_weight, loss.dtype)
            if loss.rank > rows.rank:
                rows = op.Unsqueeze(rows, list(range(rows.rank, loss.rank)))
            weights = rows if elements is None else rows * elements
        weighted = loss if weights is None else loss * weights
        if self.reduction == "sum":
            return op.ReduceSum(weighted, keepdims=0), None
        count = elements if self.reduction == "mean" else weights
        if count is None:
            return op.ReduceMean(weighted, keepdims=0), None
        if count.rank < loss.rank or count is not elements:
            count = count * op.Expand(op.constant(1, loss.dtype), op.Shape(loss))  # rows count once for each of their entries
        total = op.ReduceSum(count, keepdims=0)
        # a batch in which nothing counts costs 0, not 0/0
        return op.ReduceSum(weighted, keepdims=0) / op.Max(total, np.finfo(loss.dtype).tiny), total


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    r"""Squared error $(y - \hat y)^2$; its gradient is $2 (\hat y - y)$ before the reduction."""

    aliases = ("mse", "l2", "squared_error")

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        distance = y_true - y_pred
        return distance * distance
