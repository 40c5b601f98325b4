"""Losses of classification: the negative logarithm of the probability of the true class.

For one element with scores s, label t and weight w the loss is -w log p_t, with p = softmax(s); so
with log p given

    d(log p) = -w onehot(t)        ds = w (p - onehot(t))

(Bridle 1990). The mean is over weights: sum(w_i loss_i) / sum(w_i). An element whose label is
`ignore_index` has the weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.table import Gradients, gradient
from onnxfit.graph.values import GraphBuilder, Value


@gradient("SoftmaxCrossEntropyLoss", all_outputs=True)
def softmax_cross_entropy_loss(
    op: GraphBuilder, scores: Value, labels: Value, weights: Value | None, y: Value, log_p: Value, dy: Value | None, dlog_p: Value | None,
    *, reduction: str, ignore_index: int | None,
) -> Gradients:  # fmt: skip
    loss = (
        None if dy is None else Loss.of(op, log_p, labels, weights, y, dy, reduction, ignore_index)
    )

    def of_scores() -> Value:
        p = op.Exp(log_p)
        parts = []
        if loss is not None:
            parts.append(loss.scattered(p * loss.arriving, loss.arriving))
        if dlog_p is not None:
            parts.append(dlog_p - p * op.ReduceSum(dlog_p, [1]))
        return parts[0] + parts[1] if len(parts) == 2 else parts[0]

    def of_weights() -> Value:
        assert weights is not None
        return zeros_like(op, weights) if loss is None else loss.of_weights()

    return of_scores, None, of_weights


@gradient("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(
    op: GraphBuilder, log_p: Value, labels: Value, weights: Value | None, y: Value, dy: Value,
    *, reduction: str, ignore_index: int | None,
) -> Gradients:  # fmt: skip
    loss = Loss.of(op, log_p, labels, weights, y, dy, reduction, ignore_index)
    return lambda: loss.scattered(zeros_like(op, log_p), loss.arriving), None, loss.of_weights


@dataclass(frozen=True)
class Loss:
    """What both have in common.

    Elements are `(batch, 1, ...)`, so that they broadcast against `(batch, classes, ...)`.
    """

    op: GraphBuilder
    log_p: Value
    labels: Value  # the class of each element, 0 where it is ignored
    weights: Value | None
    y: Value
    # of each element in what arrives: dy, over the sum of the weights for a mean; 0 where it is
    # ignored
    share: Value
    arriving: Value  # the same times the weight of the element's class
    mean: bool

    @staticmethod
    def of(
        op: GraphBuilder,
        log_p: Value,
        labels: Value,
        weights: Value | None,
        y: Value,
        dy: Value,
        reduction: str,
        ignore_index: int | None,
    ) -> Loss:
        labels = op.Unsqueeze(op.cast(labels, np.int64), [1])
        kept = None
        if ignore_index is not None:
            is_kept = labels != ignore_index
            kept, labels = op.cast(is_kept, dy.dtype), op.Where(is_kept, labels, 0)
        weight = kept
        if weights is not None:
            by_class = op.Gather(weights, labels)
            weight = by_class if kept is None else by_class * kept
        if reduction == "none":
            dy = op.Unsqueeze(dy, [1])
        elif reduction == "mean":
            total = (
                op.cast(op.Size(labels), dy.dtype)
                if weight is None
                else op.ReduceSum(weight, keepdims=0)
            )
            # a batch may be ignored altogether
            dy = dy / (total if weight is None else op.Where(total == 0, 1, total))
        share = dy if kept is None else dy * kept
        arriving = dy if weight is None else dy * weight
        if weight is None and reduction != "none":
            share = arriving = op.Expand(dy, op.shape(labels))
        return Loss(op, log_p, labels, weights, y, share, arriving, reduction == "mean")

    def scattered(self, into: Value, values: Value) -> Value:
        """`into` less one value per element, at its class."""
        return self.op.ScatterElements(into, self.labels, -values, axis=1, reduction="add")

    def of_weights(self) -> Value:
        """Summed by class; more weight on an element also makes less of the others in the mean, as
        much as the mean is.
        """
        op, weights = self.op, self.weights
        assert weights is not None
        value = -op.GatherElements(self.log_p, self.labels, axis=1)
        if self.mean:
            value = value - self.y
        values = op.Reshape(self.share * value, [-1])
        return op.ScatterElements(
            zeros_like(op, weights), op.Reshape(self.labels, [-1]), values, axis=0, reduction="add"
        )
