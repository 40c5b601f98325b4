"""The base class of metrics that are a mean of one value for each row or element."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.metrics.alignment import counted_rows, per_element, row_count
from onnxfit.metrics.base import Array, Metric, merged_copies, without_warnings
from onnxfit.metrics.in_graph import same_sizes, sum_of
from onnxfit.registry import is_newest

__all__ = ["MeanMetric"]


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

    @without_warnings
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        if not row_count(y_pred):
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
            weights = per_element(weights, values.shape)
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
            count = op.Size(values) if counted is None else sum_of(op, op.cast(counted, np.int64))
        elif weights.rank > 1 and not same_sizes(weights, values, weights.rank):
            return None
        else:
            weights = op.cast(weights, np.float64)
            if values.rank > weights.rank:
                weights = op.Unsqueeze(weights, list(range(weights.rank, values.rank)))
            used = op.cast(weights, np.bool_)
            counted = used if counted is None else op.And(used, counted)
            values = values * weights
            count = sum_of(op, op.Where(counted, op.Expand(weights, op.Shape(values)), 0))
        if counted is not None:
            values = op.Where(counted, values, 0)
        return {"_total": sum_of(op, values), "_count": op.cast(count, np.float64)}

    def result(self) -> float:
        return self._total / self._count if self._count else math.nan

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        for other in merged_copies(self, states):
            self._total += other._total
            self._count += other._count
