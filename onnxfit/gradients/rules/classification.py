"""Losses of classification: the negative logarithm of the probability of the true class.

For one element with scores s, label t and weight w the loss is -w log p_t, with p = softmax(s). Its
derivatives by log p and by s are

    d(log p) = -w onehot(t)        ds = w (p - onehot(t))

(Bridle 1990). The mean is weighted: sum(w_i loss_i) / sum(w_i). An element whose label is
`ignore_index` has the weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.table import Gradients, rule
from onnxfit.graph.values import GraphBuilder, Value


@rule("SoftmaxCrossEntropyLoss", all_outputs=True)
def softmax_cross_entropy_loss(
    op: GraphBuilder,
    scores: Value,
    labels: Value,
    weights: Value | None,
    y: Value,
    log_p: Value,
    dy: Value | None,
    dlog_p: Value | None,
    *,
    reduction: str,
    ignore_index: int | None,
) -> Gradients:
    loss = (
        None
        if dy is None
        else LabelLoss.of(op, log_p, labels, weights, y, dy, reduction, ignore_index)
    )

    def of_scores() -> Value:
        p = op.Exp(log_p)
        terms = []
        if loss is not None:
            terms.append(loss.subtract_at_labels(p * loss.weighted_dy, loss.weighted_dy))
        if dlog_p is not None:
            terms.append(dlog_p - p * op.ReduceSum(dlog_p, [1]))
        return terms[0] + terms[1] if len(terms) == 2 else terms[0]

    def of_weights() -> Value:
        assert weights is not None
        return zeros_like(op, weights) if loss is None else loss.of_weights()

    return of_scores, None, of_weights


@rule("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(
    op: GraphBuilder,
    log_p: Value,
    labels: Value,
    weights: Value | None,
    y: Value,
    dy: Value,
    *,
    reduction: str,
    ignore_index: int | None,
) -> Gradients:
    loss = LabelLoss.of(op, log_p, labels, weights, y, dy, reduction, ignore_index)

    def of_log_p() -> Value:
        return loss.subtract_at_labels(zeros_like(op, log_p), loss.weighted_dy)

    return of_log_p, None, loss.of_weights


@dataclass(frozen=True)
class LabelLoss:
    """The computation that both losses share.

    Values of each element have the shape `(batch, 1, ...)`, so that they broadcast against
    `(batch, classes, ...)`.

    - `labels` is the class of each element, 0 for an ignored one.
    - `unweighted_dy` is the gradient that arrives at each element's loss, before its weight: dy,
      for a mean divided by the sum of the weights; 0 for an ignored element.
    - `weighted_dy` is the same times the weight of the element's class.
    """

    op: GraphBuilder
    log_p: Value
    labels: Value
    weights: Value | None
    y: Value
    unweighted_dy: Value
    weighted_dy: Value
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
    ) -> LabelLoss:
        labels = op.Unsqueeze(op.cast(labels, np.int64), [1])
        kept = None
        if ignore_index is not None:
            is_kept = labels != ignore_index
            kept = op.cast(is_kept, dy.dtype)
            labels = op.Where(is_kept, labels, 0)
        weight = kept
        if weights is not None:
            by_class = op.Gather(weights, labels)
            weight = by_class if kept is None else by_class * kept
        if reduction == "none":
            dy = op.Unsqueeze(dy, [1])
        elif reduction == "mean" and weight is None:
            dy = dy / op.cast(op.Size(labels), dy.dtype)
        elif reduction == "mean" and weight is not None:
            total = op.ReduceSum(weight, keepdims=0)
            dy = dy / op.Where(total == 0, 1, total)  # all elements may be ignored
        unweighted_dy = dy if kept is None else dy * kept
        weighted_dy = dy if weight is None else dy * weight
        if weight is None and reduction != "none":
            unweighted_dy = weighted_dy = op.Expand(dy, op.shape(labels))
        mean = reduction == "mean"
        return LabelLoss(op, log_p, labels, weights, y, unweighted_dy, weighted_dy, mean)

    def subtract_at_labels(self, x: Value, values: Value) -> Value:
        """Subtract one value per element from x, at the class of the element."""
        return self.op.ScatterElements(x, self.labels, -values, axis=1, reduction="add")

    def of_weights(self) -> Value:
        """The gradient of the class weights: the sum of -log p_t over the elements of each class.

        In a mean, the derivative of the sum of the weights subtracts the mean from each.
        """
        op = self.op
        weights = self.weights
        assert weights is not None
        value = -op.GatherElements(self.log_p, self.labels, axis=1)
        if self.mean:
            value = value - self.y
        values = op.Reshape(self.unweighted_dy * value, [-1])
        return op.ScatterElements(
            zeros_like(op, weights), op.Reshape(self.labels, [-1]), values, axis=0, reduction="add"
        )
