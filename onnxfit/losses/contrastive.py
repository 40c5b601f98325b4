"""Contrastive losses: vectors of a batch beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfit.checks import check_number
from onnxfit.graph.logarithms import log_softmax, softplus
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.functions import JointFormula, require_names
from onnxfit.losses.outputs import length, log_sum_exp, unit

__all__ = ["Circle", "NTXent", "SigLIP", "SupCon", "TripletSemiHard"]


@dataclass(frozen=True)
class SigLIP(JointFormula):
    r"""Sigmoid loss of pairs, $\sum_j \log(1 + e^{-z_{ij} (e^s \hat a_i \cdot \hat b_j + c)})$ for
    row $i$, where $z$ is 1 on the diagonal and -1 elsewhere (Zhai et al. 2023, arXiv:2303.15343).

    Row $i$ of $a$ belongs to row $i$ of $b$. $\hat a$ and $\hat b$ are the rows divided by their
    norms.

    - `outputs`: the names of the outputs with $a$ and $b$, each of shape `(batch, features)`.
    - `values`: the names of the scalars $s$ and $c$ in the file, instead of `temperature` and
      `bias`; `inputs` as in `Joint`, for $a$ and $b$.
    - `temperature`: $e^{-s} > 0$.
    - `bias`: $c$.
    - `learn_temperature`: whether $s$ and $c$ train with the model, from `temperature` and `bias`
      on, as `loss/scale` and `loss/bias`; instead of `values`.
    - `reduction` is as in `Loss`.

    SettingError: there are not two names, or four with $s$ and $c$.

    >>> SigLIP(["image", "text"]).bias
    -10.0
    """

    named = False

    temperature: float = field(default=0.1, kw_only=True)
    bias: float = field(default=-10.0, kw_only=True)
    learn_temperature: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "temperature", above=0)
        check_number(self, "bias")

    def initial_weights(self, y_pred: Any, random: np.random.Generator) -> Mapping[str, Any]:
        if not self.learn_temperature:
            return {}
        return {"scale": -math.log(self.temperature), "bias": self.bias}

    @property
    def has_weights(self) -> bool:
        return self.learn_temperature

    def _check_function(self) -> None:
        allowed = (0,) if self.learn_temperature else (0, 2)
        fits = len(self.outputs) + len(self.inputs) == 2 and len(self.values) in allowed
        require_names(self, fits, "two outputs of vectors, and none or both of scale and bias")

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        read: list[Value] = [*y_pred, *weights.values()]
        first, second, *scale = read
        cosines = _products(op, unit(op, first), unit(op, second))
        if scale:
            logits = cosines * op.Exp(scale[0]) + scale[1]
        else:
            logits = cosines / self.temperature + self.bias
        signs = 2 * op.EyeLike(logits) - 1
        return op.ReduceSum(softplus(op, -signs * logits), [1], keepdims=0)


@dataclass(frozen=True)
class NTXent(JointFormula):
    r"""The contrastive loss of SimCLR: the cross entropy of each vector's partner among all vectors
    but itself, with the scores $\hat z_i \cdot \hat z_j / T$ (Chen et al. 2020, arXiv:2002.05709).

    The rows $a_i$ and $b_i$ of two outputs are partners, two views of one sample; all other rows of
    both outputs are negatives. The loss of a row is the mean of its two views.

    - `outputs`: the names of the outputs with $a$ and $b$, each of shape `(batch, features)`;
      `inputs` and `values` as in `Joint`, two names in all.
    - `temperature`: $T > 0$.
    - `reduction` is as in `Loss`.

    SettingError: there are not two names.

    >>> NTXent(["first", "second"], temperature=0.1).temperature
    0.1
    """

    named = False

    temperature: float = field(default=0.5, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "temperature", above=0)

    def _check_function(self) -> None:
        require_names(self, len(self.read) == 2, "two outputs of vectors")

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        rows = op.cast(op.Squeeze(op.shape(y_pred[0], 0, 1)), np.int32)
        return _contrast(op, y_pred, op.Range(0, rows, 1), self.temperature)


@dataclass(frozen=True)
class SupCon(JointFormula):
    r"""Supervised contrastive loss, $-\frac{1}{|P_i|} \sum_{p \in P_i} \log \frac{e^{\hat z_i \cdot
    \hat z_p / T}}{\sum_{j \ne i} e^{\hat z_i \cdot \hat z_j / T}}$, where $P_i$ are the other
    vectors of the class of $i$ (Khosla et al. 2020, arXiv:2004.11362).

    Labels are the class of each row, shape `(batch,)`. A row that is alone in its class costs 0.

    - `outputs`: the name of the output with the vectors, of shape `(batch, features)`, or the names
      of several views of each row; the loss of a row is the mean of its views. `inputs` and
      `values` as in `Joint`.
    - `temperature`: $T > 0$.
    - `reduction` is as in `Loss`.

    >>> SupCon("embedding").read
    ('embedding',)
    """

    named = False

    labels: Any = field(default="int32[b]", init=False, repr=False)
    temperature: float = field(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "temperature", above=0)

    def _check_function(self) -> None:
        pass  # any number of views

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        return _contrast(op, y_pred, y_true, self.temperature)


@dataclass(frozen=True)
class LabeledVectors(JointFormula):
    """Base class of losses of one output of vectors and of the class of each row."""

    labels: Any = field(default="int32[b]", init=False, repr=False)

    def _check_function(self) -> None:
        require_names(self, len(self.read) == 1, "one output of vectors")


@dataclass(frozen=True)
class Circle(LabeledVectors):
    r"""Circle loss $\log(1 + \sum_n e^{\gamma [s_n + m]_+ (s_n - m)} \sum_p e^{-\gamma [1 + m -
    s_p]_+ (s_p - 1 + m)})$ of a row, whose cosines with the other rows of its class are $s_p$ and
    with all other rows $s_n$; $[\cdot]_+$ is $\max(0, \cdot)$ without a gradient (Sun et al. 2020,
    arXiv:2002.10857).

    Labels are the class of each row, shape `(batch,)`. A row without positives or without negatives
    costs 0.

    - `outputs`: the name of the output with the vectors, of shape `(batch, features)`; `inputs` and
      `values` as in `Joint`, one name in all.
    - `margin`: $m$ in [0, 1).
    - `scale`: $\gamma > 0$.
    - `reduction` is as in `Loss`.

    SettingError: there is not one name.

    >>> Circle("embedding", scale=80.0).margin
    0.25
    """

    named = False

    margin: float = field(default=0.25, kw_only=True)
    scale: float = field(default=256.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "margin", at_least=0, below=1)
        check_number(self, "scale", above=0)

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        vectors, m = unit(op, y_pred[0]), self.margin
        cosines = _products(op, vectors, vectors)
        positive, negative = _pairs(op, y_true, cosines)

        def total(pairs: Value, scores: Value) -> Value:
            return log_sum_exp(
                op, op.Where(pairs, self.scale * scores, _negligible_logit(cosines)), 1
            )

        near = op.stop_gradient(op.Relu(cosines + m)) * (cosines - m)
        far = op.stop_gradient(op.Relu(1 + m - cosines)) * (1 - m - cosines)
        return softplus(op, op.Squeeze(total(negative, near) + total(positive, far), [1]))


@dataclass(frozen=True)
class TripletSemiHard(LabeledVectors):
    r"""Triplet loss $\max(0, d_{ip} - d_{in} + m)$ of each pair $i$, $p$ of one class, with the
    negative $n$ that is the nearest of those farther away than $p$, or the farthest if there is
    none (Schroff, Kalenichenko, Philbin 2015, arXiv:1503.03832;
    `tensorflow_addons.losses.TripletSemiHardLoss`).

    $d$ are Euclidean distances; models usually end with a division by the norm. Labels are the
    class of each row, shape `(batch,)`. The loss of a batch is the mean over its pairs: that of a
    row is the sum of its pairs, times the rows, divided by all pairs. The graph compares all
    triplets: its memory grows with the cube of the batch.

    - `outputs`: the name of the output with the vectors, of shape `(batch, features)`; `inputs` and
      `values` as in `Joint`, one name in all.
    - `margin`: $m > 0$.
    - `reduction` is as in `Loss`.

    SettingError: there is not one name.

    >>> TripletSemiHard("embedding").margin
    1.0
    """

    named = False

    margin: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "margin", above=0)

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        vectors = y_pred[0]
        differences = op.Unsqueeze(vectors, [1]) - op.Unsqueeze(vectors, [0])
        distances = length(op, differences)
        positive, negative = _pairs(op, y_true, distances)
        numbers = op.cast(negative, distances.dtype)
        # A pair counts if its row has a negative.
        counts = op.cast(positive, distances.dtype) * op.ReduceMax(numbers, [1], keepdims=1)
        farthest = op.ReduceMax(distances * numbers, [1], keepdims=1)
        of_third = op.Unsqueeze(distances, [1])
        is_farther = op.Unsqueeze(negative, [1]) & (of_third > op.Unsqueeze(distances, [2]))
        nearest = op.ReduceMin(
            op.Where(is_farther, of_third, -_negligible_logit(distances)), [2], keepdims=0
        )
        chosen = op.Where(nearest < -_negligible_logit(distances), nearest, farthest)
        costs = op.Relu(distances - chosen + self.margin) * counts
        rows = op.cast(op.Squeeze(op.shape(distances, 0, 1)), distances.dtype)
        pairs = op.Max(op.ReduceSum(counts, keepdims=0), 1)
        return op.ReduceSum(costs, [1], keepdims=0) * (rows / pairs)


def _products(op: GraphBuilder, a: Value, b: Value) -> Value:
    """The products of each row of a with each row of b."""
    return op.MatMul(a, op.Transpose(b, perm=[1, 0]))


def _negligible_logit(like: Value) -> float:
    """A finite number whose exponential is 0 beside that of any other number."""
    return float(np.finfo(like.dtype).min) / 4


def _pairs(op: GraphBuilder, classes: Value, square: Value) -> tuple[Value, Value]:
    """Return which other rows have the class of a row, and which have another class."""
    same = op.Equal(op.Unsqueeze(classes, [1]), op.Unsqueeze(classes, [0]))
    return same & ~op.cast(op.EyeLike(square), np.bool_), ~same


def _contrast(op: GraphBuilder, views: Any, classes: Value, temperature: float) -> Value:
    """The mean cross entropy of the other vectors of a row's class, over the views of the row."""
    vectors = unit(op, op.Concat(*views, axis=0))
    logits = _products(op, vectors, vectors) / temperature
    positive, _ = _pairs(op, op.Concat(*[classes] * len(views), axis=0), logits)
    itself = op.cast(op.EyeLike(logits), np.bool_)
    log_p = log_softmax(op, op.Where(itself, _negligible_logit(logits), logits), 1)
    numbers = op.cast(positive, logits.dtype)
    count = op.Max(op.ReduceSum(numbers, [1], keepdims=0), 1)
    costs = -op.ReduceSum(op.Where(positive, log_p, 0), [1], keepdims=0) / count
    return op.ReduceMean(op.Reshape(costs, [len(views), -1]), [0], keepdims=0)
