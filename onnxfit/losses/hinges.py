"""Hinge losses of one of several classes."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfit.checks import check_number
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.checks import require
from onnxfit.losses.classification import ClassLoss

__all__ = ["CategoricalHinge", "MultiMargin"]


@dataclass(frozen=True)
class CategoricalHinge(ClassLoss):
    r"""Hinge loss of several classes, $\max(0, 1 + \max_c (1 - q_c) \hat y_c - \hat y_k)$, where
    $k$ is the label and $q$ its one-hot vector (`keras.losses.CategoricalHinge`).

    Labels are class indices. The inner maximum is at least 0, the entry of the label itself, as in
    Keras.

    - `axis`, `class_weights`, `ignore_index` and `reduction` are as in `ClassLoss`.

    >>> CategoricalHinge().reduction
    'mean'
    """

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        axis = self.class_axis(y_pred.rank)
        others = op.Where(self.one_hot(op, y_true, y_pred), 0, y_pred)
        greatest = op.ReduceMax(others, [axis], keepdims=0)
        return op.Max(1 + greatest - self.pick(op, y_pred, y_true), 0)


@dataclass(frozen=True)
class MultiMargin(ClassLoss):
    r"""Mean over the $C$ classes, $\tfrac1C \sum_{c \ne k} \max(0, m - \hat y_k + \hat y_c)^p$,
    where $k$ is the label (`torch.nn.MultiMarginLoss`; Crammer and Singer 2001).

    - `margin` $m > 0$.
    - `p`: 1 or 2.
    - `axis`, `class_weights`, `ignore_index` and `reduction` are as in `ClassLoss`. With class
      weights, "mean" divides by their sum over the labels; torch divides by the number of labels.

    >>> MultiMargin(margin=0.5).p
    1
    """

    aliases = ("multi_margin_loss",)

    margin: float = 1.0
    p: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "margin", above=0)
        require(self, "p 1 or 2", self.p, lambda v: v in (1, 2))

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        axis = self.class_axis(y_pred.rank)
        own = op.Unsqueeze(self.pick(op, y_pred, y_true), [axis])
        short = op.Max(self.margin - own + y_pred, 0)
        short = op.Where(self.one_hot(op, y_true, y_pred), 0, short)
        return op.ReduceMean(short if self.p == 1 else short * short, [axis], keepdims=0)
