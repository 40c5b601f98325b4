"""Losses of masks: the overlap of sets of pixels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy.typing as npt

from onnxfit.checks import check_number
from onnxfit.graph.labels import AllowedLabels, refuse_where
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss, loss_name
from onnxfit.losses.classification import ClassLoss
from onnxfit.losses.outputs import (
    binary_divergence,
    safe_log,
    scores_of,
    takes_logits,
)

__all__ = ["Dice", "Jaccard", "LovaszHinge", "LovaszSoftmax", "Tversky"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Tversky(Loss):
    r"""One minus the Tversky index, $1 - \frac{I + s}{I + \alpha F + \beta M + s}$, of a mask and
    probabilities: $I = \sum y q$, false positives $F = \sum (1 - y) q$, misses $M = \sum y (1 - q)$
    (Salehi, Erdogmus, Gholipour 2017, arXiv:1706.05721).

    Labels lie in [0, 1] and have the output's shape. The sums run over all axes but the batch.

    - `from_logits`: as in `BinaryCrossEntropy`, with $q = 1/(1 + e^{-s})$ for any number $s$.
    - `alpha` $\alpha \ge 0$, `beta` $\beta \ge 0$, the costs of false positives and of misses.
    - `smooth` $s > 0$: an empty mask without predictions costs 0.
    - `reduction` is as in `Loss`.

    >>> Tversky()
    Tversky(reduction='mean', from_logits=None, alpha=0.5, beta=0.5, smooth=1e-05)
    """

    label_range = (0.0, 1.0)
    task: ClassVar[str] = "binary"
    assumes_logits: ClassVar[bool] = False

    from_logits: bool | None = None
    alpha: float = 0.5
    beta: float = 0.5
    smooth: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "alpha", at_least=0)
        check_number(self, "beta", at_least=0)
        check_number(self, "smooth", above=0)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        q = op.Sigmoid(y_pred) if takes_logits(self, y_pred) else y_pred

        def total(x: Value) -> Value:
            return op.ReduceSum(x, list(range(1, x.rank)), keepdims=0) if x.rank > 1 else x

        both = total(y_true * q) + self.smooth
        wrong = self.alpha * total((1 - y_true) * q) + self.beta * total(y_true * (1 - q))
        return wrong / (both + wrong)  # 1 - both / (both + wrong), without its cancellation

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        return binary_divergence(self, op, y_pred, y_teacher, temperature)


@dataclass(frozen=True)
class Dice(Tversky):
    r"""One minus the Dice coefficient $\frac{2 \sum y q + 2 s}{\sum y + \sum q + 2 s}$ of a mask
    and probabilities: `Tversky` with $\alpha = \beta = 1/2$.

    `from_logits`, `smooth`, labels and `reduction` are as in `Tversky`.

    >>> Dice().smooth
    1e-05
    """

    aliases: ClassVar[tuple[str, ...]] = ("dice_loss",)

    alpha: float = field(default=0.5, init=False, repr=False)
    beta: float = field(default=0.5, init=False, repr=False)


@dataclass(frozen=True)
class Jaccard(Tversky):
    r"""One minus the intersection over union, $1 - \frac{\sum y q + s}{\sum y + \sum q - \sum y q +
    s}$, of a mask and probabilities: `Tversky` with $\alpha = \beta = 1$.

    `from_logits`, `smooth`, labels and `reduction` are as in `Tversky`.

    >>> Jaccard().smooth
    1e-05
    """

    aliases: ClassVar[tuple[str, ...]] = ("jaccard_loss", "soft_iou")

    alpha: float = field(default=1.0, init=False, repr=False)
    beta: float = field(default=1.0, init=False, repr=False)


@dataclass(frozen=True)
class LovaszHinge(Loss):
    r"""Lovasz extension of one minus the intersection over union, of the hinge errors $e = 1 - (2y
    - 1) s$ of a mask's scores $s$ (Berman, Triki, Blaschko 2018, arXiv:1705.08790).

    The loss of a row is $\sum_i \max(0, e_i)\,(J_i - J_{i-1})$: errors are sorted from the greatest
    on, and $J_i$ is the Jaccard loss if the first $i$ entries are wrong. The entries of a row are
    those of all axes but the batch.

    Labels are 0 and 1 in the output's shape; the loss has shape `(batch,)`.

    - `from_logits`: True for scores; False for probabilities, whose logits are the scores; None for
      what the graph shows, as the module describes.
    - `reduction` is as in `Loss`.

    >>> LovaszHinge()
    LovaszHinge(reduction='mean', from_logits=None)
    """

    aliases = ("lovasz", "lovasz_hinge_loss")
    task: ClassVar[str] = "binary"

    from_logits: bool | None = None

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        return AllowedLabels(0, 1, values=(0, 1))

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = super().prepare(y, y_pred)
        wrong = (labels != 0) & (labels != 1)
        refuse_where(loss_name(self), labels, wrong, "labels 0 and 1", y_pred)
        return labels

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        scores = scores_of(self, op, y_pred)
        if scores is None:
            scores = safe_log(op, y_pred) - safe_log(op, 1 - y_pred)
        errors = op.Relu(1 - (2 * y_true - 1) * scores)
        return _lovasz(op, op.Reshape(errors, [0, -1]), op.Reshape(y_true, [0, -1]))

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        return binary_divergence(self, op, y_pred, y_teacher, temperature)


@dataclass(frozen=True)
class LovaszSoftmax(ClassLoss):
    r"""Lovasz extension of one minus the intersection over union, of the errors $|q_c - p_c|$ of
    probabilities: the mean over the classes that a row's labels contain (Berman, Triki, Blaschko
    2018, arXiv:1705.08790).

    Labels are class indices, one for each pixel. The loss of a class is that of `LovaszHinge`, with
    these errors; the loss has shape `(batch,)`.

    - `from_logits`: True for raw scores; False for probabilities; None for what the graph shows, as
      the module describes.
    - `class_weights`: None, or the weights $\ge 0$ of the classes in the mean over classes.
    - `ignore_index`: pixels with this label do not count.
    - `axis`, `reduction` are as in `ClassLoss`.

    >>> LovaszSoftmax(ignore_index=255).ignore_index
    255
    """

    aliases = ("lovasz_softmax_loss",)

    from_logits: bool | None = field(default=None, kw_only=True)

    def element_weights(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value | None:
        return None

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        axis = self.class_axis(y_pred.rank)
        p = op.Softmax(y_pred, axis=axis) if takes_logits(self, y_pred) else y_pred
        labels = op.cast(self.one_hot(op, y_true, y_pred), p.dtype)
        errors = abs(labels - p)
        if self.ignore_index is not None:
            # Errors of 0 are the last of the sorted ones, and change nothing there.
            ignored = op.Unsqueeze(op.Equal(y_true, self.ignore_index), [axis])
            labels, errors = op.Where(ignored, 0, labels), op.Where(ignored, 0, errors)
        order = [0, axis, *(i for i in range(1, p.rank) if i != axis)]
        labels, errors = (
            op.Reshape(op.Transpose(x, perm=order), [0, 0, -1]) for x in (labels, errors)
        )
        counts = op.ReduceMax(labels, [2], keepdims=0)
        if self.class_weights is not None:
            counts = counts * op.constant(self.class_weights, p.dtype)
        total = op.ReduceSum(counts, [1], keepdims=0)
        cost = op.ReduceSum(counts * _lovasz(op, errors, labels), [1], keepdims=0)
        return cost / op.Where(total > 0, total, 1)


def _lovasz(op: GraphBuilder, errors: Value, labels: Value) -> Value:
    """Return the Lovasz extension of the Jaccard loss along the last axis.

    - `errors`: numbers >= 0.
    - `labels`: 0 and 1, of the same shape.
    """
    axis = errors.rank - 1
    size = op.shape(errors, axis, axis + 1)
    _, order = op.TopK(op.stop_gradient(errors), size, _outputs=2, axis=axis)
    errors, labels = (op.GatherElements(x, order, axis=axis) for x in (errors, labels))
    total = op.ReduceSum(labels, [axis], keepdims=1)

    def overlap(exclusive: int) -> Value:
        """The intersection over union if the first entries are wrong; 1 of two empty sets."""
        wrong_labels = op.CumSum(labels, axis, exclusive=exclusive)
        wrong_others = op.CumSum(1 - labels, axis, exclusive=exclusive)
        union = total + wrong_others
        return op.Where(union > 0, (total - wrong_labels) / op.Max(union, 1), 1)

    slopes = op.stop_gradient(overlap(1) - overlap(0))
    return op.ReduceSum(errors * slopes, [axis], keepdims=0)
