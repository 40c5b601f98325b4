"""Losses of vectors whose distances and angles matter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfit.checks import check_number
from onnxfit.graph.logarithms import log_softmax
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss
from onnxfit.losses.functions import JointFormula, require_names
from onnxfit.losses.outputs import per_vector, unit

__all__ = ["CosineSimilarity", "InfoNCE", "TripletMargin"]

TRIPLET_EPSILON = 1e-6  # as in PyTorch, added to differences: the norm of 0 has no gradient


@dataclass(frozen=True)
class CosineSimilarity(Loss):
    r"""Negative cosine $-\frac{y \cdot \hat y}{\lVert y \rVert \lVert \hat y \rVert}$, from -1 (the
    same direction) to 1 (`keras.losses.CosineSimilarity`).

    Labels have the output's shape. A norm below 1e-6 counts as 1e-6, so a vector of zeros costs 0.

    - `axis`: the axis of the vectors' components.
    - `reduction` is as in `Loss`.

    >>> CosineSimilarity()
    CosineSimilarity(reduction='mean', axis=-1)
    """

    aliases = ("cosine", "cosine_similarity_loss", "cosine_proximity")

    axis: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "axis", whole=True)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        def along(x: Value) -> Value:
            return op.ReduceSum(x, [self.axis], keepdims=0)

        def norm(x: Value) -> Value:
            return op.Sqrt(op.Max(along(x * x), 1e-12))

        return -along(y_true * y_pred) / (norm(y_true) * norm(y_pred))

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        """Return the mean of the squared differences of a vector's components."""
        squares = super().distillation_loss(op, y_true, y_pred, y_teacher, temperature)
        return op.ReduceMean(squares, [self.axis], keepdims=0)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        return per_vector(op, counts, y_pred.rank, self.axis % y_pred.rank)


@dataclass(frozen=True)
class TripletMargin(JointFormula):
    r"""$\max(0, \lVert a - p + \epsilon \rVert - \lVert a - n + \epsilon \rVert + m)$ of an anchor
    $a$, a positive $p$ and a negative $n$, with $\epsilon = 10^{-6}$
    (`torch.nn.TripletMarginLoss`).

    - `outputs`: the names of the outputs with $a$, $p$ and $n$, each of shape `(batch, ...,
      features)`; `inputs` and `values` as in `Joint`, three names in all.
    - `margin`: $m > 0$.
    - `reduction` is as in `Loss`.

    SettingError: there are not three names.

    >>> TripletMargin(["anchor", "positive", "negative"], margin=0.5).read
    ('anchor', 'positive', 'negative')
    """

    named = False

    margin: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "margin", above=0)

    def _check_function(self) -> None:
        require_names(self, len(self.read) == 3, "an anchor, a positive and a negative")

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        anchor, positive, negative = y_pred

        def distance(a: Value, b: Value) -> Value:
            difference = a - b + TRIPLET_EPSILON
            return op.Sqrt(op.ReduceSum(difference * difference, [-1], keepdims=0))

        return op.Relu(distance(anchor, positive) - distance(anchor, negative) + self.margin)


@dataclass(frozen=True)
class InfoNCE(JointFormula):
    r"""The contrastive loss of CLIP: the mean of the cross entropies of the rows and the
    columns of $e^s\,\hat a \hat b^\top$, whose classes are on the diagonal (van den Oord et al.
    2018, arXiv:1807.03748; Radford et al. 2021, arXiv:2103.00020).

    Row $i$ of $a$ belongs to row $i$ of $b$; all other rows of the batch are its negatives.
    $\hat a$ and $\hat b$ are the rows divided by their norms, which are at least $10^{-12}$.

    - `outputs`: the names of the outputs with $a$ and $b$, each of shape `(batch, features)`.
    - `values`: the name of a scalar $s$ in the file, such as CLIP's `logit_scale`, instead of
      `temperature`; `inputs` as in `Joint`, for $a$ and $b$.
    - `temperature`: $e^{-s} > 0$.
    - `learn_temperature`: whether $s$ trains with the model, from `temperature` on, as
      `loss/scale`; instead of `values`.
    - `symmetric`: False for the cross entropy of the rows alone.
    - `reduction` is as in `Loss`.

    SettingError: there are not two names, or three with $s$.

    >>> InfoNCE(["image", "text"]).read
    ('image', 'text')
    """

    named = False

    temperature: float = field(default=0.07, kw_only=True)
    learn_temperature: bool = field(default=False, kw_only=True)
    symmetric: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "temperature", above=0)

    def initial_weights(self, y_pred: Any, random: np.random.Generator) -> Mapping[str, Any]:
        return {"scale": -math.log(self.temperature)} if self.learn_temperature else {}

    @property
    def has_weights(self) -> bool:
        return self.learn_temperature

    def _check_function(self) -> None:
        max_inputs = 0 if self.learn_temperature else 1
        fits = len(self.outputs) + len(self.inputs) == 2 and len(self.values) <= max_inputs
        require_names(self, fits, "two outputs of vectors, and of at most one scale in values")

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        read: list[Value] = [*y_pred, *weights.values()]
        first, second, *scale = read

        logits = op.MatMul(unit(op, first), op.Transpose(unit(op, second), perm=[1, 0]))
        logits = logits * op.Exp(scale[0]) if scale else logits / self.temperature
        rows = _diagonal_cross_entropy(op, logits)
        if not self.symmetric:
            return rows
        return (rows + _diagonal_cross_entropy(op, op.Transpose(logits, perm=[1, 0]))) / 2


def _diagonal_cross_entropy(op: GraphBuilder, logits: Value) -> Value:
    """The cross entropy of each row of scores, whose class is on the diagonal."""
    return -op.ReduceSum(log_softmax(op, logits, 1) * op.EyeLike(logits), [1], keepdims=0)
