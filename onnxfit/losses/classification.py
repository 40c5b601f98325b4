"""Losses of one of several classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from onnxfit.checks import check_number, is_number
from onnxfit.errors import SettingError
from onnxfit.graph.labels import (
    AllowedLabels,
    check_range,
    has_shape_of,
    label_numbers,
    refuse_where,
)
from onnxfit.graph.logarithms import softplus
from onnxfit.graph.probabilities import any_number_operator, probability_operator, without_mask
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss, loss_name
from onnxfit.losses.checks import (
    CLASS_LIMIT,
    check_length,
    class_axis,
    is_index,
    refuse_outside,
    require,
    set_numbers,
    whole_numbers,
)
from onnxfit.losses.outputs import (
    binary_divergence,
    class_divergence,
    log_probabilities,
    log_scores,
    per_row,
    per_vector,
    safe_log,
    scores_of,
    warn_once,
)

__all__ = [
    "NLL",
    "ClassLoss",
    "CrossEntropy",
    "Focal",
    "GeneralizedCrossEntropy",
    "PolyCrossEntropy",
]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ClassLoss(Loss):
    """Base class of losses over class indices: the axis of the classes, weights and a mask.

    Labels are class indices, shaped like the output without its axis of classes: integers of any
    width, or floats that are whole numbers.

    - `axis`: the axis of the classes. None selects axis 1 if the output has rank 4 or more (images,
      `(batch, classes, height, width)`), else the last axis.
    - `class_weights`: None, or one number >= 0 per class; "mean" divides by their sum over the
      labels, as torch does.
    - `ignore_index`: labels equal to this do not count.
    - `reduction` is as in `Loss`.
    """

    task: ClassVar[str] = "classes"

    axis: int | None = field(default=None, kw_only=True)
    class_weights: tuple[float, ...] | None = field(default=None, kw_only=True)
    ignore_index: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_weights is not None:
            set_numbers(
                self, "class_weights", self.class_weights, "class_weights >= 0", lambda v: v >= 0
            )
        if self.ignore_index is not None:
            check_number(
                self, "ignore_index", at_least=-CLASS_LIMIT, at_most=CLASS_LIMIT - 1, whole=True
            )

    def class_axis(self, rank: int) -> int:
        """Return the axis of the classes, from 1 on, in an output of rank `rank`."""
        return class_axis(self, self.axis, rank)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if y_pred.shape is None:
            return TensorSpec("y_true", np.dtype(np.int64), None)
        axis = self.class_axis(len(y_pred.shape))
        if y_pred.shape[axis] == 1:
            raise SettingError(
                f"{type(self).__name__} needs at least 2 classes, got {y_pred}. For one output per"
                " sample, use BinaryCrossEntropy."
            )
        if self.class_weights is not None:
            check_length(self, "class_weights", self.class_weights, y_pred, axis)
        return TensorSpec(
            "y_true", np.dtype(np.int64), y_pred.shape[:axis] + y_pred.shape[axis + 1 :]
        )

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        classes: Dim = None
        if y_pred.shape is not None:
            classes = y_pred.shape[self.class_axis(len(y_pred.shape))]
        maximum = classes - 1 if isinstance(classes, int) else math.inf
        return AllowedLabels(0, maximum, ignored=self.ignore_index)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = label_numbers(loss_name(self), y)
        expected = self.target(y_pred)
        if y_pred.shape is not None:
            axis = self.class_axis(len(y_pred.shape))
            if labels.ndim == len(y_pred.shape) and labels.shape[axis] == 1:
                labels = labels.squeeze(axis)
            labels = self._align(labels, expected, y_pred)
        maximum = self.allowed_labels(y_pred).maximum
        last = None if math.isinf(maximum) else int(maximum)
        expected_labels = "class indices from 0 " + ("on (int64)" if last is None else f"to {last}")
        labels = whole_numbers(self, labels, expected_labels, y_pred)
        refuse_outside(self, labels, last, expected_labels, y_pred, self.ignore_index)
        return labels.astype(np.int64, copy=False)

    def _shape_hint(self, labels: Array, y_pred: TensorSpec) -> str:
        shape = y_pred.shape or ()
        if self.axis is None and len(shape) == 3 and labels.shape[1:] == shape[2:]:
            return " If the classes are on axis 1, set axis=1."
        if has_shape_of(labels, y_pred):
            return " For one-hot labels, pass their argmax over the classes."
        return ""

    def metric_labels(
        self, y_true: Array, sample_weight: Array | None
    ) -> tuple[Array, Array | None]:
        if self.ignore_index is not None and self.ignore_index >= 0 and y_true.dtype.kind == "i":
            y_true = np.where(y_true == self.ignore_index, -1, y_true)
        return y_true, sample_weight

    def metric_labels_in_graph(
        self, op: GraphBuilder, y_true: Value, sample_weight: Value | None
    ) -> tuple[Value, Value | None]:
        if self.ignore_index is not None and self.ignore_index >= 0 and is_index(y_true):
            y_true = op.Where(op.Equal(y_true, self.ignore_index), -1, y_true)
        return y_true, sample_weight

    def element_weights(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value | None:
        if not is_index(y_true):
            return None
        counted = None
        if self.ignore_index is not None:
            counted = op.cast(~op.Equal(y_true, self.ignore_index), y_pred.dtype)
        if self.class_weights is None:
            return counted
        weights = self._of_label(op, y_true, self.class_weights, y_pred.dtype)
        return weights if counted is None else weights * counted

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        axis = self.class_axis(y_pred.rank)
        return class_divergence(self, op, y_pred, y_teacher, temperature, axis)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        return per_vector(op, counts, y_pred.rank, self.class_axis(y_pred.rank))

    def pick(self, op: GraphBuilder, values: Value, y_true: Value) -> Value:
        """Return the entries of `values` at the labels `y_true`, along the axis of classes; any
        number for an ignored label. `op` builds the graph.
        """
        axis = self.class_axis(values.rank)
        return op.Squeeze(
            op.GatherElements(values, op.Unsqueeze(self._index(op, y_true), [axis]), axis=axis),
            [axis],
        )

    def one_hot(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        """Return whether a class is the label, as booleans of the output's shape.

        `op` builds the graph, `y_true` has class indices, `y_pred` is the output. An ignored label
        is any class.
        """
        axis = self.class_axis(y_pred.rank)
        # WebGPU compares no numbers of 64 bits.
        count = op.cast(op.Squeeze(op.shape(y_pred, axis, axis + 1)), np.int32)
        classes = op.Range(0, count, 1)
        if axis < y_pred.rank - 1:
            classes = op.Unsqueeze(classes, list(range(1, y_pred.rank - axis)))
        index = op.cast(self._index(op, y_true), np.int32)
        return op.Equal(op.Unsqueeze(index, [axis]), classes)

    def _of_label(
        self, op: GraphBuilder, y_true: Value, per_class: Sequence[float], dtype: npt.DTypeLike
    ) -> Value:
        return op.Gather(op.constant(np.array(per_class, dtype)), self._index(op, y_true))

    def _index(self, op: GraphBuilder, y_true: Value) -> Value:
        if self.ignore_index is None:
            return y_true
        return op.Where(op.Equal(y_true, self.ignore_index), 0, y_true)


@dataclass(frozen=True)
class CrossEntropy(ClassLoss):
    r"""Cross entropy $-\sum_c q_c \log p_c$ over the classes, where $p$ is the prediction and $q$
    the label (`torch.nn.CrossEntropyLoss`).

    Labels are class indices ($q$ is 1 there), or probabilities of the output's shape.

    - `from_logits`: True for raw scores $s$, with $p = \mathrm{softmax}(s)$; False for
      probabilities $p$; None for what the graph shows, as the module describes.
    - `label_smoothing` $a$ in [0, 1): labels become $(1 - a) q + a / C$, for $C$ classes.
    - `class_weights` $w$: None, or one number $\ge 0$ per class. The sum is over $w_c q_c \log
      p_c$; "mean" divides by the $w$ of the labels if they are indices, by the number of rows if
      they are probabilities. A label of weight 0 does not count.
    - `axis`, `ignore_index` and `reduction` are as in `ClassLoss`: the axis of the classes, a label
      that does not count, and the reduction.

    >>> CrossEntropy(ignore_index=-100).prepare(
    ...     [2, -100], TensorSpec("y", np.dtype("float32"), ("batch", 3))
    ... ).tolist()
    [2, -100]
    """

    aliases: ClassVar[tuple[str, ...]] = (
        "crossentropy",
        "cross_entropy_loss",
        "categorical_crossentropy",
        "categorical_cross_entropy",
        "sparse_categorical_crossentropy",
        "sparse_categorical_cross_entropy",
        "sparse_crossentropy",
        "softmax_cross_entropy",
        "softmax_cross_entropy_with_integer_labels",
        "softmax_cross_entropy_with_logits",
        "soft_target_cross_entropy",
    )

    from_logits: bool | None = field(default=None, kw_only=True)
    label_smoothing: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "0 <= label_smoothing < 1", self.label_smoothing, lambda v: 0 <= v < 1)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = label_numbers(loss_name(self), y)
        if has_shape_of(labels, y_pred):
            kind = "class indices, or probabilities"
            check_range(loss_name(self), labels, 0.0, 1.0, y_pred.dtype, y_pred, kind)
            return labels.astype(y_pred.dtype, copy=False)
        return super().prepare(labels, y_pred)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        log_p = log_probabilities(self, op, y_pred, self.class_axis(y_pred.rank))
        return -self._expected(op, y_true, log_p)

    def _expected(self, op: GraphBuilder, y_true: Value, values: Value) -> Value:
        """Return the mean of the classes' `values`, weighted by the smoothed labels."""
        axis = self.class_axis(values.rank)
        weighted = values
        if self.class_weights is not None:
            shape = [-1] + [1] * (values.rank - axis - 1)
            weights = np.array(self.class_weights, values.dtype).reshape(shape)
            weighted = values * op.constant(weights)
        if is_index(y_true):
            expected = self.pick(op, values, y_true)
        else:
            expected = op.ReduceSum(y_true * weighted, [axis], keepdims=0)
        if not self.label_smoothing:
            return expected
        uniform = op.ReduceMean(weighted, [axis], keepdims=0)
        if self.class_weights is not None and is_index(y_true):
            # `element_weights` multiplies by the label's weight, and this term has its weights
            # already.
            inverse = [1 / w if w else 0.0 for w in self.class_weights]
            uniform = uniform * self._of_label(op, y_true, inverse, uniform.dtype)
        return (1 - self.label_smoothing) * expected + self.label_smoothing * uniform


@dataclass(frozen=True)
class PolyCrossEntropy(CrossEntropy):
    r"""Cross entropy with another weight of its first polynomial term, $-\sum_c q_c (\log p_c -
    \epsilon (1 - p_c))$, the loss Poly-1 (Leng et al. 2022, arXiv:2204.12511).

    - `epsilon` $\epsilon \ge -1$; 0 is `CrossEntropy`.
    - `from_logits`, `label_smoothing`, `class_weights`, `axis`, `ignore_index`, `reduction`: those
      of `CrossEntropy`.

    >>> PolyCrossEntropy(epsilon=2.0).epsilon
    2.0
    """

    aliases: ClassVar[tuple[str, ...]] = (
        "poly",
        "poly_loss",
        "poly1",
        "poly1_cross_entropy",
        "poly_loss_cross_entropy",
    )

    epsilon: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "epsilon", at_least=-1)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        log_p = log_probabilities(self, op, y_pred, self.class_axis(y_pred.rank))
        return -self._expected(op, y_true, log_p - self.epsilon * (1 - op.Exp(log_p)))


@dataclass(frozen=True)
class GeneralizedCrossEntropy(ClassLoss):
    r"""Loss $(1 - p^q) / q$ of the probability $p$ of the label, which wrong labels disturb less
    than the cross entropy: it is the limit for $q \to 0$, and the absolute error for $q = 1$ (Zhang
    and Sabuncu 2018, arXiv:1805.07836).

    - `q` in (0, 1].
    - `from_logits`: as in `CrossEntropy`.
    - `axis`, `class_weights`, `ignore_index` and `reduction` are as in `ClassLoss`.

    >>> GeneralizedCrossEntropy(q=0.5).q
    0.5
    """

    aliases = ("gce", "categorical_generalized_cross_entropy")

    q: float = 0.7
    from_logits: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "q", above=0, at_most=1)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        log_p = log_probabilities(self, op, y_pred, self.class_axis(y_pred.rank))
        return (1 - op.Exp(self.q * self.pick(op, log_p, y_true))) / self.q


@dataclass(frozen=True)
class NLL(ClassLoss):
    r"""Negative log-likelihood $-\hat y_c$ for class index $c$: the output is log-probabilities, as
    from LogSoftmax (`torch.nn.NLLLoss`).

    `axis`, `class_weights`, `ignore_index` and `reduction` are as in `ClassLoss`.

    >>> NLL()
    NLL(reduction='mean', axis=None, class_weights=None, ignore_index=None)
    """

    aliases = ("nll_loss", "negative_log_likelihood")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        output = without_mask(y_pred.ir)
        operator = probability_operator(output) or any_number_operator(output)
        if operator not in (None, "LogSoftmax"):
            warn_once(
                self,
                f"needs log-probabilities, but the model's output comes from a {operator}. Use"
                " CrossEntropy, or end the model with LogSoftmax.",
            )
        return -self.pick(op, log_scores(op, y_pred), y_true)


@dataclass(frozen=True)
class Focal(ClassLoss):
    r"""Focal loss $-\alpha (1 - p)^\gamma \log p$ for the probability $p$ of the label: cross
    entropy that gives easy samples little weight (Lin et al. 2017, arXiv:1708.02002).

    Labels are class indices, and $p$ is the softmax probability of the class. Or labels are 0 and 1
    in the output's shape, and each element is a separate decision with a sigmoid; this is always so
    if the output has one entry on the axis of classes, or `alpha` is one number.

    - `gamma` $\gamma \ge 0$.
    - `alpha` $\alpha$: None weighs all equally. With class indices, one number $\ge 0$ per class;
      with labels 0 and 1, a number in (0, 1), the weight of a label 1; a label 0 has the weight `1
      - alpha`.
    - `from_logits`: True for raw scores; False for probabilities; None for what the graph shows, as
      the module describes.
    - `axis`, `class_weights`, `ignore_index` and `reduction` are as in `ClassLoss`; `alpha` does
      not change the divisor.

    SettingError: the settings do not fit the labels.

    >>> Focal(gamma=1.0, alpha=0.25).alpha
    0.25
    """

    aliases = (
        "focal_loss",
        "binary_focal_crossentropy",
        "categorical_focal_crossentropy",
        "sigmoid_focal_loss",
    )

    gamma: float = 2.0
    alpha: float | tuple[float, ...] | None = None
    from_logits: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "gamma", at_least=0)
        if is_number(self.alpha):
            require(self, "0 < alpha < 1", self.alpha, lambda v: 0 < v < 1)
        elif self.alpha is not None:
            set_numbers(self, "alpha", self.alpha, "alpha >= 0", lambda v: v >= 0)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        # Labels of other outputs may be of either kind. The data decides, unless alpha does.
        if is_number(self.alpha) or (
            y_pred.shape is not None
            and (len(y_pred.shape) < 2 or y_pred.shape[self.class_axis(len(y_pred.shape))] == 1)
        ):
            return TensorSpec("y_true", y_pred.dtype, y_pred.shape)
        if isinstance(self.alpha, tuple) and y_pred.shape is not None:
            check_length(self, "alpha", self.alpha, y_pred, self.class_axis(len(y_pred.shape)))
        return super().target(y_pred)

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        if self.target(y_pred).dtype.kind == "f":
            return AllowedLabels(0, 1, values=(0, 1))
        return super().allowed_labels(y_pred)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = label_numbers(loss_name(self), y)
        if self.target(y_pred).dtype.kind != "f" and not has_shape_of(labels, y_pred):
            return super().prepare(labels, y_pred)
        labels = self._align(labels, TensorSpec("y_true", y_pred.dtype, y_pred.shape), y_pred)
        expected = "class indices, or labels 0 and 1 of the output's shape,"
        refuse_where(loss_name(self), labels, (labels != 0) & (labels != 1), expected, y_pred)
        return labels.astype(y_pred.dtype, copy=False)

    def _shape_hint(self, labels: Array, y_pred: TensorSpec) -> str:
        hint = super()._shape_hint(labels, y_pred)
        if not hint and is_number(self.alpha) and labels.ndim == len(y_pred.shape or ()) - 1:
            return f" With class indices, alpha is one number per class, got {self.alpha}."
        return hint

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        if is_index(y_true):
            return self._of_classes(op, y_true, y_pred)
        if (
            self.class_weights is not None
            or self.ignore_index is not None
            or isinstance(self.alpha, tuple)
        ):
            raise SettingError(
                "Focal with labels 0 and 1 needs a single number as alpha, without class_weights"
                " and ignore_index."
            )
        scores = scores_of(self, op, y_pred)
        if scores is not None:
            s = (2 * y_true - 1) * scores
            loss = softplus(op, -s)  # -log p, and -log(1 - p) is s more
            loss = op.Exp(-self.gamma * (loss + s)) * loss
        else:
            p = y_true * y_pred + (1 - y_true) * (1 - y_pred)
            other = y_true * (1 - y_pred) + (1 - y_true) * y_pred
            loss = -op.Exp(self.gamma * safe_log(op, other)) * safe_log(op, p)
        if self.alpha is None:
            return loss
        return loss * (self.alpha * y_true + (1 - self.alpha) * (1 - y_true))

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        if is_index(y_true):
            return super().distillation_loss(op, y_true, y_pred, y_teacher, temperature)
        return binary_divergence(self, op, y_pred, y_teacher, temperature)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        if is_index(y_true):
            return super()._counted_outputs(op, counts, y_true, y_pred)
        return per_row(op, counts, y_pred.rank)

    def _of_classes(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        if self.alpha is not None and not isinstance(self.alpha, tuple):
            raise SettingError(
                f"Focal with class indices needs one alpha per class, got {self.alpha}."
            )
        log_p = log_probabilities(self, op, y_pred, self.class_axis(y_pred.rank))
        log_p = self.pick(op, log_p, y_true)
        loss = -op.Exp(self.gamma * safe_log(op, 1 - op.Exp(log_p))) * log_p
        if self.alpha is None:
            return loss
        return loss * self._of_label(op, y_true, self.alpha, loss.dtype)
