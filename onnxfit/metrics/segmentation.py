"""Metrics of the overlap of predicted and true regions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from onnxfit.metrics.alignment import ratio
from onnxfit.metrics.base import Array
from onnxfit.metrics.decisions import F1, CountingMetric, Counts, DecisionMetric

__all__ = ["Dice", "IoU", "MeanIoU"]


def intersection_over_union(counts: Counts) -> Array:
    """Return the intersection over union of each class; 0 for a class without rows."""
    return ratio(counts.hits, counts.predicted + counts.true - counts.hits)


@dataclass
class IoU(DecisionMetric):
    r"""Intersection over union of predicted and true rows or pixels, the Jaccard index
    $TP / (TP + FP + FN)$, in [0, 1] (`sklearn.metrics.jaccard_score`).

    The sums run over the whole data set, not over each image. One output per pixel counts the
    positive class alone; `MeanIoU` counts the background as well. `threshold`, `from_logits`,
    `average`, `multi_label`, `class_names`, `weighted` and `name` are as in `Precision`. 0/0 is 0.

    >>> metric = IoU()
    >>> metric.update(np.array([0, 1, 1, 1]), np.array([0.6, 0.9, 0.7, 0.2]))
    >>> metric.result()
    0.5
    """

    aliases = (
        "iou",
        "jaccard",
        "jaccard_index",
        "jaccard_score",
        "binary_iou",
        "binary_jaccard_index",
    )

    def score(self, counts: Counts) -> Array:
        return intersection_over_union(counts)


@dataclass
class MeanIoU(CountingMetric):
    r"""Mean over classes of the intersection over union,
    $\frac1C \sum_c TP_c / (TP_c + FP_c + FN_c)$, in [0, 1] (`keras.metrics.MeanIoU`).

    The sums run over the whole data set. Classes that neither occur nor are predicted do not count.
    One output per pixel counts as two classes, the background and the object. Pixels that the loss
    ignores do not count. `threshold` and `from_logits` are as in `BinaryAccuracy`, `weighted` and
    `name` as in `Metric`. `IoU(average=None)` has the figure of each class.

    >>> metric = MeanIoU()
    >>> metric.update(np.array([[0, 1, 1, 1]]), np.eye(2)[[[1, 1, 1, 0]]])
    >>> metric.result()
    0.25
    """

    aliases = ("miou", "one_hot_mean_iou")

    def result(self) -> float:
        if self._sums is None:
            return math.nan
        counts = Counts(*self._sums).with_negatives()
        counted = counts.predicted + counts.true > 0
        scores = intersection_over_union(counts)[counted]
        return float(np.mean(scores)) if scores.size else math.nan


@dataclass
class Dice(F1):
    r"""Dice coefficient of predicted and true rows or pixels, $2 |A \cap B| / (|A| + |B|)$, in
    [0, 1]: `F1` under its name in segmentation (Dice 1945).

    The sums run over the whole data set, not over each image. `threshold`, `from_logits`,
    `average`, `multi_label`, `class_names`, `weighted` and `name` are as in `Precision`. 0/0 is 0.

    >>> metric = Dice()
    >>> metric.update(np.array([0, 1, 1, 1]), np.array([0.6, 0.9, 0.7, 0.2]))
    >>> round(metric.result(), 3)
    0.667
    """

    aliases = ("dice_score", "dice_coefficient")
