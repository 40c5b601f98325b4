"""Losses of two classes, with one output for each decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy.typing as npt

from onnxfit.checks import check_number, is_number
from onnxfit.graph.labels import AllowedLabels, refuse_where
from onnxfit.graph.logarithms import softplus
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss, loss_name
from onnxfit.losses.checks import check_length, require, set_numbers
from onnxfit.losses.outputs import binary_divergence, safe_log, scores_of

__all__ = [
    "Asymmetric",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "Hinge",
    "HingeEmbedding",
    "SoftMargin",
    "SquaredHinge",
]

Array = npt.NDArray[Any]
SIGNS = AllowedLabels(-1, 1, values=(-1, 1))


@dataclass(frozen=True)
class SignLoss(Loss):
    """Base class of losses whose labels are -1 and 1.

    Labels have the output's shape; `prepare` makes -1 and 1 of 0 and 1. `reduction` is as in
    `Loss`.
    """

    elementwise = True

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        return SIGNS

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        """Return the labels -1 and 1 in the element type and shape of the output.

        - `y`: labels -1 and 1, or 0 and 1.
        - `y_pred`: the output.
        """
        labels = super().prepare(y, y_pred)
        name = loss_name(self)
        zero = labels == 0
        wrong = ~(zero | (abs(labels) == 1))
        refuse_where(name, labels, wrong, "labels -1 and 1, or 0 and 1,", y_pred)
        if not zero.any():
            return labels
        mixture = "labels -1 and 1, or 0 and 1, but not a mixture,"
        refuse_where(name, labels, labels == -1, mixture, y_pred)
        return 2 * labels - 1


@dataclass(frozen=True)
class Hinge(SignLoss):
    r"""Hinge loss $\max(0, 1 - y \hat y)$ for labels -1 and 1 (Cortes and Vapnik 1995).

    Labels and `reduction` are as in `SignLoss`.

    >>> import numpy as np
    >>> Hinge().prepare([0, 1], TensorSpec("y", np.dtype("float32"), ("batch",))).tolist()
    [-1.0, 1.0]
    """

    aliases = ("hinge_loss",)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return op.Max(1 - y_true * y_pred, 0)


@dataclass(frozen=True)
class SquaredHinge(SignLoss):
    r"""Squared hinge loss $\max(0, 1 - y \hat y)^2$ for labels -1 and 1.

    Labels and `reduction` are as in `SignLoss`.

    >>> SquaredHinge()
    SquaredHinge(reduction='mean')
    """

    aliases = ("squared_hinge_loss",)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        short = op.Max(1 - y_true * y_pred, 0)
        return short * short


@dataclass(frozen=True)
class SoftMargin(SignLoss):
    r"""Logistic loss $\log(1 + e^{-y \hat y})$ for labels -1 and 1 (`torch.nn.SoftMarginLoss`): the
    binary cross entropy of a raw score.

    Labels and `reduction` are as in `SignLoss`.

    >>> SoftMargin()
    SoftMargin(reduction='mean')
    """

    aliases = ("soft_margin_loss", "logistic_loss")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return softplus(op, -(y_true * y_pred))


@dataclass(frozen=True)
class HingeEmbedding(SignLoss):
    r"""Loss of a distance $\hat y$: $\hat y$ itself for a label 1, and $\max(0, m - \hat y)$ for a
    label -1 (`torch.nn.HingeEmbeddingLoss`).

    - `margin` $m > 0$.
    - Labels and `reduction` are as in `SignLoss`.

    >>> HingeEmbedding(margin=2.0)
    HingeEmbedding(reduction='mean', margin=2.0)
    """

    aliases = ("hinge_embedding_loss",)

    margin: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "margin", above=0)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return op.Where(y_true > 0, y_pred, op.Max(self.margin - y_pred, 0))


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
        "multi_label_soft_margin",
        "sigmoid_binary_cross_entropy",
        "neglog",
        "sigmoid_cross_entropy",
    )
    assumes_logits: ClassVar[bool] = True

    from_logits: bool | None = True


@dataclass(frozen=True)
class Asymmetric(Loss):
    r"""Asymmetric loss of several labels per sample, $-y (1 - q)^{\gamma_+} \log q - (1 - y)
    q_m^{\gamma_-} \log(1 - q_m)$ with $q_m = \max(q - m, 0)$: a focal loss that gives the many easy
    labels of 0 less weight than those of 1 (Ridnik et al. 2021, arXiv:2009.14119; timm's
    AsymmetricLossMultiLabel, which adds up the entries).

    Labels lie in [0, 1] and have the output's shape; each element is a separate decision with the
    probability $q$.

    - `gamma_neg` $\gamma_- \ge 0$, `gamma_pos` $\gamma_+ \ge 0$.
    - `clip` $m$ in [0, 1): probabilities below it cost nothing if the label is 0.
    - `from_logits`: True for any number $s$ with $q = 1/(1 + e^{-s})$; False for probabilities;
      None for what the graph shows, as the module describes.
    - `reduction` is as in `Loss`.

    >>> Asymmetric(gamma_neg=2.0)
    Asymmetric(reduction='mean', gamma_neg=2.0, gamma_pos=1.0, clip=0.05, from_logits=None)
    """

    aliases = ("asymmetric_loss", "asymmetric_loss_multi_label", "asl")
    label_range = (0.0, 1.0)
    task: ClassVar[str] = "binary"
    elementwise = True

    gamma_neg: float = 4.0
    gamma_pos: float = 1.0
    clip: float = 0.05
    from_logits: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "gamma_neg", at_least=0)
        check_number(self, "gamma_pos", at_least=0)
        check_number(self, "clip", at_least=0, below=1)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        scores = scores_of(self, op, y_pred)
        if scores is None:
            q, log_q, log_other = y_pred, safe_log(op, y_pred), safe_log(op, 1 - y_pred)
        else:
            q, log_q = op.Sigmoid(scores), -softplus(op, -scores)
            log_other = log_q - scores
        of_positive = op.Exp(self.gamma_pos * log_other) * log_q
        shifted = op.Max(q - self.clip, 0)
        # Without a shift, log(1 - q) is exact even where q is rounded to 1.
        log_rest = safe_log(op, 1 - shifted) if self.clip else log_other
        of_negative = op.Exp(self.gamma_neg * safe_log(op, shifted)) * log_rest
        return -(y_true * of_positive + (1 - y_true) * of_negative)

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        return binary_divergence(self, op, y_pred, y_teacher, temperature)
