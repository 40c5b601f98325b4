"""Losses of two classes, with one output for each decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy.typing as npt

from onnxfit.checks import is_number
from onnxfit.graph.labels import AllowedLabels, refuse_where
from onnxfit.graph.logarithms import softplus
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss, loss_name
from onnxfit.losses.checks import check_length, require, set_numbers
from onnxfit.losses.outputs import binary_divergence, safe_log, scores_of

__all__ = ["BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Hinge", "SquaredHinge"]

Array = npt.NDArray[Any]
SIGNS = AllowedLabels(-1, 1, values=(-1, 1))


@dataclass(frozen=True)
class Hinge(Loss):
    r"""Hinge loss $\max(0, 1 - y \hat y)$ for labels -1 and 1 (Cortes and Vapnik 1995).

    Labels have the output's shape; `prepare` makes -1 and 1 of 0 and 1. `reduction` is as in
    `Loss`.

    >>> import numpy as np
    >>> Hinge().prepare([0, 1], TensorSpec("y", np.dtype("float32"), ("batch",))).tolist()
    [-1.0, 1.0]
    """

    aliases = ("hinge_loss",)
    elementwise = True

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        return SIGNS

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        return _signs(self, super().prepare(y, y_pred), y_pred)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return op.Max(1 - y_true * y_pred, 0)


@dataclass(frozen=True)
class SquaredHinge(Loss):
    r"""Squared hinge loss $\max(0, 1 - y \hat y)^2$ for labels -1 and 1.

    Labels have the output's shape; `prepare` makes -1 and 1 of 0 and 1. `reduction` is as in
    `Loss`.

    >>> SquaredHinge()
    SquaredHinge(reduction='mean')
    """

    aliases = ("squared_hinge_loss",)
    elementwise = True

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        return SIGNS

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        return _signs(self, super().prepare(y, y_pred), y_pred)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        short = op.Max(1 - y_true * y_pred, 0)
        return short * short


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    r"""Binary cross entropy $-p\,y \log q - (1 - y) \log(1 - q)$ for the probability $q$ that the
    label is 1; each element of the output is a separate decision.

    Labels lie in [0, 1] and have the output's shape.

    - `from_logits`: False for an output $q$; True for any number $s$ with $q = 1/(1 + e^{-s})$;
      None for what the graph shows, as the module describes.
    - `label_smoothing` $a$ in [0, 1): labels become $(1 - a) y + a/2$.
    - `pos_weight` $p > 0$, the weight of a label of 1: None for 1, one number, or one for each
      entry of the last axis (`torch.nn.BCEWithLogitsLoss`).
    - `reduction` is as in `Loss`.

    >>> BinaryCrossEntropy()
    BinaryCrossEntropy(reduction='mean', from_logits=None, label_smoothing=0.0, pos_weight=None)
    """

    aliases: ClassVar[tuple[str, ...]] = (
        "bce",
        "bce_loss",
        "binary_crossentropy",
        "binary_cross_entropy_loss",
        "log",
        "log_loss",
        "logloss",
    )
    label_range = (0.0, 1.0)
    task: ClassVar[str] = "binary"
    assumes_logits: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True

    from_logits: bool | None = None
    label_smoothing: float = 0.0
    pos_weight: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "0 <= label_smoothing < 1", self.label_smoothing, lambda v: 0 <= v < 1)
        if is_number(self.pos_weight):
            require(self, "pos_weight > 0", self.pos_weight, lambda v: v > 0)
        elif self.pos_weight is not None:
            set_numbers(self, "pos_weight", self.pos_weight, "pos_weight > 0", lambda v: v > 0)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if isinstance(self.pos_weight, tuple) and y_pred.shape is not None:
            check_length(self, "pos_weight", self.pos_weight, y_pred, len(y_pred.shape) - 1)
        return super().target(y_pred)

    def _shape_hint(self, labels: Array, y_pred: TensorSpec) -> str:
        if len(y_pred.shape or ()) == 2 and labels.ndim == 1:
            return " If each row has one of several classes, use CrossEntropy."
        return ""

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        scores = scores_of(self, op, y_pred)
        if self.label_smoothing:
            y_true = (1 - self.label_smoothing) * y_true + self.label_smoothing / 2
        positive = y_true
        if self.pos_weight is not None:
            positive = y_true * op.constant(self.pos_weight, y_true.dtype)
        negative = 1 - y_true
        if scores is not None:
            return (positive + negative) * softplus(op, -scores) + negative * scores
        return -(positive * safe_log(op, y_pred) + negative * safe_log(op, 1 - y_pred))

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        return binary_divergence(self, op, y_pred, y_teacher, temperature)


@dataclass(frozen=True)
class BinaryCrossEntropyWithLogits(BinaryCrossEntropy):
    r"""Binary cross entropy of raw scores, for any graph: `from_logits` is True.

    The gradient of a score is $q - y$ before the reduction. `label_smoothing`, `pos_weight` and
    `reduction` are as in `BinaryCrossEntropy`.

    >>> BinaryCrossEntropyWithLogits().from_logits
    True
    """

    aliases: ClassVar[tuple[str, ...]] = (
        "bce_with_logits",
        "bce_with_logits_loss",
        "binary_crossentropy_with_logits",
        "neglog",
        "sigmoid_cross_entropy",
    )
    assumes_logits: ClassVar[bool] = True

    from_logits: bool | None = True


def _signs(loss: Loss, labels: Array, y_pred: TensorSpec) -> Array:
    """Convert labels 0 and 1 to -1 and 1; labels -1 and 1 stay."""
    name = loss_name(loss)
    zero = labels == 0
    wrong = ~(zero | (abs(labels) == 1))
    refuse_where(name, labels, wrong, "labels -1 and 1, or 0 and 1,", y_pred)
    if not zero.any():
        return labels
    mixture = "labels -1 and 1, or 0 and 1, but not a mixture,"
    refuse_where(name, labels, labels == -1, mixture, y_pred)
    return 2 * labels - 1
