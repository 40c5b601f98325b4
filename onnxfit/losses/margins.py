"""Losses of embeddings that train a center of each class, and keep a margin between them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfit.checks import check_number
from onnxfit.errors import SettingError
from onnxfit.graph.labels import AllowedLabels
from onnxfit.graph.logarithms import log_softmax
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.classification import ClassLoss

__all__ = ["ArcFace", "CosFace"]

LEAST_SQUARE = 1e-24  # of a norm
LEAST_SINE = 1e-12  # of the square of a sine, whose root has no gradient at 0


@dataclass(frozen=True)
class MarginLoss(ClassLoss):
    """Base class of cross entropies of scaled cosines between embeddings and trained centers.

    The output has shape `(batch, features)`, and the labels are class indices.
    """

    named = False
    predicts_labels = False

    classes: int
    axis: None = field(default=None, init=False, repr=False)
    scale: float = field(default=64.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "classes", at_least=2, whole=True)
        check_number(self, "scale", above=0)
        if self.class_weights is not None and len(self.class_weights) != self.classes:
            raise SettingError(
                f"{type(self).__name__} needs {self.classes} numbers as class_weights, one for each"
                f" class, got {len(self.class_weights)}."
            )

    @abstractmethod
    def with_margin(self, op: GraphBuilder, cosine: Value) -> Value:
        """Return the smaller cosines that embeddings have to the centers of their own classes.

        - `op`: builds the graph.
        - `cosine`: the cosines, of shape `(batch, classes)`.
        """

    def initial_weights(self, y_pred: Any, random: np.random.Generator) -> Mapping[str, Any]:
        """Return random centers, rows whose norm is about 1.

        - `y_pred`: the embeddings, whose last size must be known.
        - `random`: draws the centers.
        """
        size = y_pred.shape[-1] if y_pred.shape and len(y_pred.shape) == 2 else None
        if not isinstance(size, int):
            raise SettingError(
                f"{type(self).__name__} needs an output of shape (batch, features) with a known"
                f" number of features, got {y_pred}."
            )
        return {"centers": random.standard_normal((self.classes, size)) / math.sqrt(size)}

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        rows = None if y_pred.shape is None else y_pred.shape[:1]
        return TensorSpec("y_true", np.dtype(np.int64), rows)

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        return AllowedLabels(0, self.classes - 1, ignored=self.ignore_index)

    def __call__(  # type: ignore[override]  # a loss has its tensors as parameters
        self, op: GraphBuilder, y_true: Value, y_pred: Value, centers: Value
    ) -> Value:
        def unit(x: Value) -> Value:
            return x / op.Sqrt(op.Max(op.ReduceSum(x * x, [1], keepdims=1), LEAST_SQUARE))

        cosine = op.MatMul(unit(y_pred), op.Transpose(unit(centers), perm=[1, 0]))
        index = op.cast(op.Unsqueeze(self._index(op, y_true), [1]), np.int32)
        is_own = op.Equal(index, op.constant(np.arange(self.classes, dtype=np.int32)))
        logits = op.Where(is_own, self.with_margin(op, cosine), cosine) * self.scale
        return -self.pick(op, log_softmax(op, logits, 1), y_true)

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        """Return the squared differences of the embeddings, which the loss averages."""
        return (y_pred - y_teacher) ** 2


@dataclass(frozen=True)
class ArcFace(MarginLoss):
    r"""Additive angular margin, the cross entropy of $s \cos(\theta_c)$ over the classes $c$, with
    $\cos(\theta + m)$ for the class of the label (Deng et al. 2019, arXiv:1801.07698; insightface).

    $\theta_c$ is the angle between the embedding and the center of class $c$. Above $\pi - m$,
    where $\cos(\theta + m)$ would rise again, the term is $\cos\theta - m \sin m$. The centers,
    `loss/centers` of shape `(classes, features)`, train with the model. An exported model has the
    embeddings alone; `Trainer.loss_tensors()` returns the centers.

    - `classes`: the number of classes, at least 2.
    - `margin`: $m$ in $[0, \pi/2]$.
    - `scale`: $s > 0$.
    - `class_weights`, `ignore_index` and `reduction` are as in `ClassLoss`.

    >>> ArcFace(1000).margin
    0.5
    """

    named = False

    margin: float = field(default=0.5, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "margin", at_least=0, at_most=math.pi / 2)

    def with_margin(self, op: GraphBuilder, cosine: Value) -> Value:
        sine = op.Sqrt(op.Max(1 - cosine * cosine, LEAST_SINE))
        moved = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        beyond = cosine - self.margin * math.sin(self.margin)
        return op.Where(cosine > math.cos(math.pi - self.margin), moved, beyond)


@dataclass(frozen=True)
class CosFace(MarginLoss):
    r"""Large margin cosine loss, the cross entropy of $s \cos(\theta_c)$ over the classes $c$, with
    $\cos(\theta) - m$ for the class of the label (Wang et al. 2018, arXiv:1801.09414).

    Centers and labels are as in `ArcFace`.

    - `classes`: the number of classes, at least 2.
    - `margin`: $m \ge 0$.
    - `scale`: $s > 0$.
    - `class_weights`, `ignore_index` and `reduction` are as in `ClassLoss`.

    >>> CosFace(10, scale=30).allowed_labels(TensorSpec("y", np.dtype("float32"), ("n", 64)))
    AllowedLabels(minimum=0, maximum=9, values=None, ignored=None)
    """

    named = False

    margin: float = field(default=0.35, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "margin", at_least=0)

    def with_margin(self, op: GraphBuilder, cosine: Value) -> Value:
        return cosine - self.margin
