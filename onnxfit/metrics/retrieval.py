"""Metrics of retrieval and recommendation: each row ranks its own items."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np

from onnxfit.checks import check_number
from onnxfit.metrics.alignment import classes_and_scores, misfit, ratio
from onnxfit.metrics.base import Array
from onnxfit.metrics.means import MeanMetric

__all__ = ["NDCG", "HitRate", "MeanReciprocalRank", "PrecisionAtK", "RecallAtK"]


@dataclass
class RetrievalMetric(MeanMetric):
    """Base class of means over queries: each row of the outputs has the scores of its items.

    Labels of the outputs' shape are the relevance of each item, 0 if it is not relevant; an item of
    a negative relevance does not count. Integer labels without the last axis are the one relevant
    item of each row; the row does not count if the item is negative. `weighted` and `name` are as
    in `Metric`.
    """

    mode = "max"

    @abstractmethod
    def score(self, relevance: Array, scores: Array) -> Array:
        """Return the figure of each query, from the `relevance` of its items, sorted by their
        `scores` from the highest. Shapes: `(queries, items)`. Items that do not count are last.
        """

    def values(self, y_true: Array, y_pred: Array) -> Array:
        counted = None
        if y_true.shape == y_pred.shape and y_pred.ndim > 1:
            relevance, scores = y_true, y_pred
        elif (y_pred.ndim > 1 and y_true.ndim == y_pred.ndim - 1) or y_true.shape[-1:] == (1,):
            classes, scores = classes_and_scores(self, y_true, y_pred)
            relevance = classes[..., None] == np.arange(scores.shape[-1])
            counted = classes >= 0
        else:
            expected = "a relevance for each item, or the index of the relevant item"
            raise misfit(self, expected, y_true, y_pred)
        is_nan = np.isnan(scores).any(axis=-1)
        used = relevance >= 0
        ranked = np.where(used, scores, -np.inf).astype(np.float64)
        relevance = np.where(used, relevance, 0).astype(np.float64)
        # of equal scores the first item first, but items that do not count last of all
        order = np.lexsort((~used, -ranked), axis=-1)
        ranked = np.take_along_axis(ranked, order, axis=-1)
        relevance = np.take_along_axis(relevance, order, axis=-1)
        items = relevance.shape[-1]
        figures = self.score(relevance.reshape(-1, items), ranked.reshape(-1, items))
        figures = np.where(is_nan, 0.0, figures.reshape(is_nan.shape))
        return figures if counted is None else np.ma.MaskedArray(figures, ~counted)


@dataclass
class MetricAtK(RetrievalMetric):
    """Base class of figures of the first `k` items.

    - `k`: a whole number of at least 1.
    - `weighted`, `name`: as in `Metric`; the name has the number.
    """

    k: int = 5

    def __post_init__(self) -> None:
        check_number(self, "k", at_least=1, whole=True)
        super().__post_init__()

    def _own_name(self) -> str:
        return f"{super()._own_name().removesuffix('_atk')}_at_{self.k}"


@dataclass
class RecallAtK(MetricAtK):
    r"""Mean share of the relevant items that are among the $k$ highest scores,
    $\frac1n \sum_i |R_i \cap T_i| / |R_i|$, in [0, 1]; 0 for a row without relevant items.

    Labels are the relevance of each item, in the outputs' shape `(batch, items)`, or the index of
    the one relevant item. Items of a negative relevance do not count. Of equal scores the first
    item ranks first. A row with NaN counts as 0.

    - `k`: a whole number of at least 1.
    - `weighted`, `name`: as in `Metric`; the name is `recall_at_5` for `k=5`.

    SettingError: `k` is out of range. DataError: the labels have another shape.

    >>> metric = RecallAtK(k=2)
    >>> metric.update(np.array([[1, 0, 1, 0]]), np.array([[0.9, 0.8, 0.1, 0.2]]))
    >>> metric.name, metric.result()
    ('recall_at_2', 0.5)
    """

    aliases = ("recall_at_k", "retrieval_recall")

    def score(self, relevance: Array, scores: Array) -> Array:
        is_relevant = relevance > 0
        return ratio(is_relevant[:, : self.k].sum(axis=1), is_relevant.sum(axis=1))


@dataclass
class PrecisionAtK(MetricAtK):
    r"""Mean share of relevant items among the $k$ highest scores,
    $\frac1n \sum_i |R_i \cap T_i| / k$, in [0, 1].

    `k` and labels are as in `RecallAtK`, `weighted` and `name` as in `Metric`.

    >>> metric = PrecisionAtK(k=2)
    >>> metric.update(np.array([[1, 0, 0, 0]]), np.array([[0.9, 0.8, 0.1, 0.2]]))
    >>> metric.name, metric.result()
    ('precision_at_2', 0.5)
    """

    aliases = ("precision_at_k", "retrieval_precision")

    def score(self, relevance: Array, scores: Array) -> Array:
        return np.asarray((relevance[:, : self.k] > 0).sum(axis=1) / self.k)


@dataclass
class HitRate(MetricAtK):
    r"""Share of rows with a relevant item among the $k$ highest scores,
    $\frac1n \sum_i [R_i \cap T_i \ne \emptyset]$, in [0, 1].

    `k` and labels are as in `RecallAtK`, `weighted` and `name` as in `Metric`.

    >>> metric = HitRate(k=1)
    >>> metric.update(np.array([[1, 0], [0, 1]]), np.array([[0.9, 0.8], [0.2, 0.1]]))
    >>> metric.name, metric.result()
    ('hit_rate_at_1', 0.5)
    """

    aliases = ("hit_rate_at_k", "retrieval_hit_rate")

    def score(self, relevance: Array, scores: Array) -> Array:
        return np.asarray((relevance[:, : self.k] > 0).any(axis=1))


@dataclass
class MeanReciprocalRank(RetrievalMetric):
    r"""Mean of one divided by the rank of the first relevant item,
    $\frac1n \sum_i 1 / \mathrm{rank}_i$, in [0, 1]; 0 for a row without relevant items (Voorhees
    1999).

    Labels are as in `RecallAtK`, `weighted` and `name` as in `Metric`.

    >>> metric = MeanReciprocalRank()
    >>> metric.update(np.array([2, 0]), np.array([[0.9, 0.1, 0.5], [0.9, 0.8, 0.1]]))
    >>> metric.result()
    0.75
    """

    aliases = ("mrr", "retrieval_mrr")

    def score(self, relevance: Array, scores: Array) -> Array:
        is_relevant = relevance > 0
        first = is_relevant.argmax(axis=1)
        return np.where(is_relevant.any(axis=1), 1 / (1 + first), 0.0)


@dataclass
class NDCG(RetrievalMetric):
    r"""Normalized discounted cumulative gain, $\frac1n \sum_i \mathrm{DCG}_i / \mathrm{IDCG}_i$
    with $\mathrm{DCG} = \sum_{r=1}^{k} g_r / \log_2(1 + r)$ for the relevance $g_r$ of the item of
    rank $r$, in [0, 1] (`sklearn.metrics.ndcg_score`; Järvelin and Kekäläinen 2002).

    IDCG is the DCG of the best order. Items of equal scores share the mean of their gains, so that
    their order does not matter (McSherry and Najork 2008). A row without relevant items counts as
    0. Labels are as in `RecallAtK`.

    - `k`: the number of items that count, at least 1; None for all.
    - `weighted`, `name`: as in `Metric`; the name has the number.

    SettingError: `k` is out of range.

    >>> metric = NDCG()
    >>> metric.update(np.array([[2.0, 0.0, 1.0]]), np.array([[0.9, 0.8, 0.1]]))
    >>> round(metric.result(), 3)
    0.95
    """

    aliases = ("ndcg_score", "retrieval_normalized_dcg", "normalized_dcg")

    k: int | None = field(default=None)

    def __post_init__(self) -> None:
        if self.k is not None:
            check_number(self, "k", at_least=1, whole=True)
        super().__post_init__()

    def _own_name(self) -> str:
        return "ndcg" if self.k is None else f"ndcg_at_{self.k}"

    def score(self, relevance: Array, scores: Array) -> Array:
        queries, items = relevance.shape
        if not relevance.size:
            return np.zeros(queries)
        discounts = 1 / np.log2(2 + np.arange(items))
        discounts[self.k or items :] = 0
        starts = np.ones(relevance.shape, bool)
        starts[:, 1:] = scores[:, 1:] != scores[:, :-1]
        group = np.cumsum(starts) - 1  # of items with the same score, over all queries
        size = np.bincount(group)
        gain = np.bincount(group, relevance.ravel()) / size
        discount = np.bincount(group, np.tile(discounts, queries))
        query = np.repeat(np.arange(queries), items)[starts.ravel()]
        found = np.bincount(query, gain * discount, minlength=queries)
        best = (-np.sort(-relevance, axis=1) * discounts).sum(axis=1)
        return ratio(found, best)
