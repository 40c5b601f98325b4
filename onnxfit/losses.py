r"""Losses: what a prediction costs, per sample or element; the mean, weights and mask are applied once, by `Loss`.

In the formulas $y$ is the label, $\hat y$ the model's output, $d = y - \hat y$.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Union, final

import numpy as np
import numpy.typing as npt

from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.values import Op, Value
from onnxfit.registry import lookup, registry

__all__ = [
    "NLL",
    "BinaryCrossEntropy",
    "CosineSimilarity",
    "CrossEntropy",
    "Elastic",
    "Focal",
    "GaussianNLL",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "Loss",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "Quantile",
    "SquaredHinge",
]

Array = npt.NDArray[Any]
LossFunction = Callable[[Op, Value, Value], Value]
LossLike = Union["Loss", str, LossFunction]
EPS = 1e-7  # probabilities are kept this far from 0 and 1, as in Keras


@dataclass(frozen=True)
class Loss(ABC):
    r"""The base of every loss.

    A subclass returns $\ell$, one value per sample or per element, shape `(batch, ...)`. With sample weights $s$ and element weights $e$
    (`element_weights`, 1 unless overridden) the loss of a batch is the scalar

    - `reduction="mean"`: $\sum s e \ell / \sum e$; a weighted row counts as one row, as in Keras;
    - `reduction="weighted_mean"`: $\sum s e \ell / \sum s e$;
    - `reduction="sum"`: $\sum s e \ell$.
    """

    reduction: str = field(default="mean", kw_only=True)

    def __post_init__(self) -> None:
        self._require(
            self.reduction in ("mean", "weighted_mean", "sum"),
            f"reduction 'mean', 'weighted_mean' or 'sum', got {self.reduction!r}",
        )

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise SettingError(f"{type(self).__name__} needs {what}.")

    @abstractmethod
    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        """The loss per sample or element, shape `(batch, ...)`."""

    def element_weights(self, op: Op, y_true: Value, y_pred: Value) -> Value | None:
        """What each entry of the result counts (class weights, a mask), in the result's shape; None: all count 1."""
        return None

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        """The type and shape of `y_true` for a model output; by default those of the output itself."""
        return TensorSpec("y_true", y_pred.dtype, y_pred.shape)

    def prepare(self, y: Array, y_pred: TensorSpec) -> Array:
        """Labels as the graph wants them: checked, aligned with the output, and of its element type. DataError where they cannot meet."""
        return self._elementwise(np.asarray(y), y_pred)

    def _elementwise(self, y: Array, y_pred: TensorSpec) -> Array:
        """One label per element of the output; `(n,)` and `(n, 1)` stand for each other."""
        if y.dtype.kind not in "biuf":
            raise DataError(f"{type(self).__name__} needs numbers as labels, got {y.dtype}.")
        expected = self.target(y_pred).shape
        if expected is not None:
            if y.ndim == len(expected) - 1 and expected[-1] == 1:
                y = y[..., None]
            elif y.ndim == len(expected) + 1 and y.shape[-1] == 1:
                y = y[..., 0]
            rows: tuple[Dim, ...] = ("batch", *expected[1:])
            if not TensorSpec("y", y.dtype, rows).accepts(y.shape):
                raise DataError(
                    f"{type(self).__name__} compares labels with output {y_pred}, element by element: labels of shape {y.shape} were "
                    f"given, ({', '.join('?' if d is None else str(d) for d in rows)}) is expected."
                )
        if y.dtype.kind == "f":
            self._refuse(y, ~np.isfinite(y), "finite labels")
        return y.astype(y_pred.dtype, copy=False)

    def _refuse(self, y: Array, wrong: Array, expected: str) -> None:
        """DataError that names the first wrong label."""
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0])
            row = f" at row {place[0]}" if place else ""
            raise DataError(f"{type(self).__name__} expects {expected}; got {y[place]}{row}.")

    @final
    def reduce(self, op: Op, y_true: Value, y_pred: Value, sample_weight: Value | None) -> tuple[Value, Value | None]:
        """The scalar loss of a batch, and what it divides by where that is not simply the number of entries (else None)."""
        loss = self(op, y_true, y_pred)
        if loss.rank == 0:
            if sample_weight is not None:
                raise SettingError(
                    f"{type(self).__name__} gives a scalar, so that sample weights cannot count: return a loss per sample."
                )
            return loss, None
        elements = self.element_weights(op, y_true, y_pred)
        weights = elements
        if sample_weight is not None:
            rows = op.cast(sample_weight, loss.dtype)
            if loss.rank > rows.rank:
                rows = op.Unsqueeze(rows, list(range(rows.rank, loss.rank)))
            weights = rows if elements is None else rows * elements
        weighted = loss if weights is None else loss * weights
        if self.reduction == "sum":
            return op.ReduceSum(weighted, keepdims=0), None
        count = elements if self.reduction == "mean" else weights
        if count is None:
            return op.ReduceMean(weighted, keepdims=0), None
        entries = op.ReduceSum(op.Expand(count, op.Shape(loss)), keepdims=0)  # a row counts once for each of its entries
        # a batch in which nothing counts costs 0, not 0/0
        return op.ReduceSum(weighted, keepdims=0) / op.Max(entries, np.finfo(loss.dtype).tiny), entries


def get_loss(spec: LossLike | type[Loss]) -> Loss:
    """A Loss from a name, a Loss, or a function `(op, y_true, y_pred) -> Value`, per sample or already a scalar.

    >>> get_loss("huber"), get_loss("mse")
    (Huber(reduction='mean', delta=1.0), MeanSquaredError(reduction='mean'))
    """
    if isinstance(spec, Loss):
        return spec
    if isinstance(spec, str):
        return lookup("loss", spec, registry(__name__, Loss))  # type: ignore[type-abstract]
    if isinstance(spec, type):
        if issubclass(spec, Loss):
            return spec()
    elif callable(spec):
        return FunctionLoss(spec)
    raise SettingError(f"A loss is a name, a Loss or a function (op, y_true, y_pred) -> Value, got {spec!r}.")


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A function `(op, y_true, y_pred) -> Value` as a Loss; labels have the output's type and shape."""

    function: LossFunction

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        return self.function(op, y_true, y_pred)


# ---------------------------------------------------------------------- regression


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    r"""$d^2$; gradient $-2d$. Finite while $d^2$ is."""

    aliases = ("mse", "l2", "squared_error")

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        distance = y_true - y_pred
        return distance * distance


@dataclass(frozen=True)
class MeanAbsoluteError(Loss):
    r"""$|d|$; gradient $-\mathrm{sign}(d)$, 0 at $d = 0$."""

    aliases = ("mae", "l1", "absolute_error")

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        return op.Abs(y_true - y_pred)


@dataclass(frozen=True)
class Elastic(Loss):
    r"""$a |d| + b d^2$ with `l1_weight` $a \ge 0$ and `l2_weight` $b \ge 0$; gradient $-a\,\mathrm{sign}(d) - 2bd$."""

    l1_weight: float = 0.5
    l2_weight: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.l1_weight >= 0, f"l1_weight >= 0, got {self.l1_weight}")
        self._require(self.l2_weight >= 0, f"l2_weight >= 0, got {self.l2_weight}")

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        distance = y_true - y_pred
        return self.l1_weight * op.Abs(distance) + self.l2_weight * (distance * distance)


@dataclass(frozen=True)
class Huber(Loss):
    r"""$\tfrac12 d^2$ where $|d| \le \delta$, else $\delta(|d| - \tfrac12\delta)$ (Huber 1964; torch.nn.HuberLoss)."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.delta > 0, f"delta > 0, got {self.delta}")

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        distance = op.Abs(y_true - y_pred)
        near = op.Clip(distance, None, op.constant(self.delta, distance.dtype))
        return near * (distance - 0.5 * near)


@dataclass(frozen=True)
class LogCosh(Loss):
    r"""$\log\cosh d$, as $|d| + \log(1 + e^{-2|d|}) - \log 2$, which is finite for every $d$; gradient $-\tanh d$."""

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        distance = op.Abs(y_true - y_pred)
        return distance + op.Log(1 + op.Exp(-2 * distance)) - float(np.log(2))


@dataclass(frozen=True)
class MeanSquaredLogarithmicError(Loss):
    r"""$(\log(1 + y) - \log(1 + \hat y))^2$, both taken as at least 0, as in Keras (whose bound is 1e-7)."""

    aliases = ("msle",)

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        zero = op.constant(0, y_pred.dtype)
        distance = op.Log(1 + op.Clip(y_true, zero)) - op.Log(1 + op.Clip(y_pred, zero))
        return distance * distance


@dataclass(frozen=True)
class MeanAbsolutePercentageError(Loss):
    r"""$100\,|d| / \max(|y|, 10^{-7})$, in percent, as in Keras."""

    aliases = ("mape",)

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        return 100 * op.Abs(y_true - y_pred) / op.Max(op.Abs(y_true), EPS)


@dataclass(frozen=True)
class Quantile(Loss):
    r"""The pinball loss $\max(q d, (q - 1) d)$, whose minimum is the `quantile` $q$ in (0, 1) (Koenker & Bassett 1978)."""

    aliases = ("pinball",)

    quantile: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.quantile < 1, f"quantile in (0, 1), got {self.quantile}")

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        distance = y_true - y_pred
        # |d| and d rather than the maximum of two: one kink, and gradient q - ½ at it
        return 0.5 * op.Abs(distance) + (self.quantile - 0.5) * distance


@dataclass(frozen=True)
class Poisson(Loss):
    r"""The Poisson negative log-likelihood without its constant: $e^{\hat y} - y \hat y$ where the output is the logarithm of the rate.

    With `log_input=False` the output is the rate itself: $\hat y - y \log(\hat y + 10^{-7})$, as in Keras. Labels are counts, at least 0. Finite
    while $e^{\hat y}$ is (up to 88 in float32). torch.nn.PoissonNLLLoss has eps 1e-8.
    """

    log_input: bool = True

    def prepare(self, y: Array, y_pred: TensorSpec) -> Array:
        y = super().prepare(y, y_pred)
        self._refuse(y, y < 0, "counts from 0 on as labels")
        return y

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        if self.log_input:
            return op.Exp(y_pred) - y_true * y_pred
        rate = op.Clip(y_pred, op.constant(0, y_pred.dtype))
        return rate - y_true * op.Log(rate + EPS)


@dataclass(frozen=True)
class GaussianNLL(Loss):
    r"""$\tfrac12 (\log v + d^2 / v)$, the Gaussian negative log-likelihood without its constant (Nix & Weigend 1994; torch.nn.GaussianNLLLoss).

    The model's last axis holds the means and then as many logarithms of variances: output `(batch, 2k)`, labels `(batch, k)`. Logarithms
    are clipped to ±`bound`, so that the loss stays finite.
    """

    aliases = ("gaussian_nll",)

    bound: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.bound <= 80, f"bound in (0, 80], got {self.bound}")

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if y_pred.shape is None:
            return TensorSpec("y_true", y_pred.dtype, None)
        last = y_pred.shape[-1] if y_pred.shape else None
        if (isinstance(last, int) and last % 2) or not y_pred.shape:
            raise SettingError(f"GaussianNLL needs an output whose last axis holds means and as many log-variances, got {y_pred}.")
        return TensorSpec("y_true", y_pred.dtype, (*y_pred.shape[:-1], last // 2 if isinstance(last, int) else None))

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        mean, log_variance = op.many(2, "Split", y_pred, axis=-1, num_outputs=2)
        bound = self.bound
        log_variance = op.Clip(log_variance, op.constant(-bound, y_pred.dtype), op.constant(bound, y_pred.dtype))
        distance = y_true - mean
        return 0.5 * (log_variance + distance * distance * op.Exp(-log_variance))


# ---------------------------------------------------------------------- classification by a margin


@dataclass(frozen=True)
class Hinge(Loss):
    r"""$\max(0, 1 - y \hat y)$ with labels ±1; labels 0 and 1 are taken as −1 and 1, as in Keras."""

    def prepare(self, y: Array, y_pred: TensorSpec) -> Array:
        y = super().prepare(y, y_pred)
        self._refuse(y, ~np.isin(y, (-1, 0, 1)), "labels -1 and 1, or 0 and 1")
        return np.where(y == 0, y.dtype.type(-1), y) if not (y == -1).any() else self._signs(y)

    def _signs(self, y: Array) -> Array:
        self._refuse(y, y == 0, "labels -1 and 1, or 0 and 1, not all three")
        return y

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        return op.Relu(1 - y_true * y_pred)


@dataclass(frozen=True)
class SquaredHinge(Hinge):
    r"""$\max(0, 1 - y \hat y)^2$ with labels as for Hinge."""

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        margin = super().__call__(op, y_true, y_pred)
        return margin * margin


# ---------------------------------------------------------------------- classification by probabilities


def _check_smoothing(loss: Loss, smoothing: float) -> None:
    loss._require(0 <= smoothing < 1, f"label_smoothing in [0, 1), got {smoothing}")


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    r"""$-[c\,y \log p + (1 - y) \log(1 - p)]$, with `pos_weight` $c > 0$ for the positive class.

    The output is $p$, kept in [1e-7, 1 − 1e-7]; with `from_logits=True` it is a raw score $s$ with $p = \sigma(s)$, and the loss is taken as
    $(1 - y) s + (1 + (c - 1) y) \log(1 + e^{-s})$, finite for every $s$, with gradient $p - y$ for $c = 1$. Labels are in [0, 1];
    `label_smoothing` $a$ moves them to $y (1 - a) + a/2$. Source: torch.nn.BCEWithLogitsLoss, keras.losses.BinaryCrossentropy.
    """

    aliases = ("bce", "binary_crossentropy", "log_loss", "log")

    from_logits: bool = False
    label_smoothing: float = 0.0
    pos_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_smoothing(self, self.label_smoothing)
        self._require(self.pos_weight > 0, f"pos_weight > 0, got {self.pos_weight}")

    def prepare(self, y: Array, y_pred: TensorSpec) -> Array:
        y = super().prepare(y, y_pred)
        self._refuse(y, (y < 0) | (y > 1), f"labels from 0 to 1 for output {y_pred}")
        return y

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        y = y_true * (1 - self.label_smoothing) + 0.5 * self.label_smoothing if self.label_smoothing else y_true
        if not self.from_logits:
            p = op.Clip(y_pred, op.constant(EPS, y_pred.dtype), op.constant(1 - EPS, y_pred.dtype))
            positive = y * op.Log(p)
            return -(self.pos_weight * positive + (1 - y) * op.Log(1 - p))
        # log(1 + e^-s) = max(-s, 0) + log(1 + e^-|s|)
        log1p = op.Relu(-y_pred) + op.Log(1 + op.Exp(-op.Abs(y_pred)))
        if self.pos_weight != 1:
            log1p = log1p * (1 + (self.pos_weight - 1) * y)
        return (1 - y) * y_pred + log1p


@dataclass(frozen=True)
class _Classes(Loss):
    """What losses over classes share: labels are class indices, or probabilities in the output's shape.

    `axis` is the axis of the classes; None means 1 for outputs of rank 4 and more (images, `N C H W`) and the last otherwise.
    """

    axis: int | None = field(default=None, kw_only=True)

    def _axis(self, rank: int) -> int:
        if rank < 2:
            raise SettingError(
                f"{type(self).__name__} needs an output with an axis of classes, such as (batch, classes); this one has rank {rank}."
            )
        axis = self.axis if self.axis is not None else 1 if rank >= 4 else rank - 1
        if not -rank < axis < rank or axis == 0:
            raise SettingError(f"{type(self).__name__} needs axis from 1 to {rank - 1} for an output of rank {rank}, got {axis}.")
        return axis % rank

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if y_pred.shape is None:
            return TensorSpec("y_true", np.dtype(np.int64), None)
        axis = self._axis(len(y_pred.shape))
        return TensorSpec("y_true", np.dtype(np.int64), y_pred.shape[:axis] + y_pred.shape[axis + 1 :])

    def _ignored(self) -> int | None:
        """The index that counts nowhere."""
        return None

    def prepare(self, y: Array, y_pred: TensorSpec) -> Array:
        y = np.asarray(y)
        if y_pred.shape is None or y.dtype.kind not in "biuf":
            raise DataError(
                f"{type(self).__name__} needs class indices or probabilities for output {y_pred}, got {y.dtype}{list(y.shape)}."
            )
        axis = self._axis(len(y_pred.shape))
        indices: tuple[Dim, ...] = ("batch", *y_pred.shape[1:axis], *y_pred.shape[axis + 1 :])
        if y.ndim == len(indices) + 1 and y.shape[axis] == 1:
            y = y.squeeze(axis)
        if TensorSpec("y", y.dtype, indices).accepts(y.shape):
            return self._checked_indices(y, y_pred, y_pred.shape[axis])
        if TensorSpec("y", y.dtype, ("batch", *y_pred.shape[1:])).accepts(y.shape):
            y = self._elementwise_probabilities(y, y_pred)
            return y
        wanted = ["?" if d is None else str(d) for d in indices]
        raise DataError(
            f"{type(self).__name__} needs class indices of shape ({', '.join(wanted)}{',' if len(wanted) == 1 else ''}), or probabilities in the "
            f"output's own shape, for output {y_pred} (classes on axis {axis}); got labels of shape {y.shape}."
        )

    def _checked_indices(self, y: Array, y_pred: TensorSpec, classes: Dim) -> Array:
        if y.dtype.kind == "f":
            self._refuse(y, ~np.isfinite(y), "class indices")
            self._refuse(y, y != np.floor(y), "whole class indices")
        y = y.astype(np.int64, copy=False)
        wrong = y < 0
        if isinstance(classes, int):
            wrong = wrong | (y >= classes)
        if self._ignored() is not None:
            wrong = wrong & (y != self._ignored())
        last = classes - 1 if isinstance(classes, int) else "?"
        self._refuse(y, wrong, f"class indices from 0 to {last} for output {y_pred}")
        return y

    def _elementwise_probabilities(self, y: Array, y_pred: TensorSpec) -> Array:
        y = y.astype(y_pred.dtype, copy=False)
        self._refuse(y, ~((y >= 0) & (y <= 1)), f"probabilities from 0 to 1 for output {y_pred}")
        return y

    def _pick(self, op: Op, values: Value, y_true: Value, axis: int) -> Value:
        """The value of each label's class, the axis of classes gone. An ignored label picks class 0."""
        indices = y_true if self._ignored() is None else op.Where(self._counts(op, y_true), y_true, op.constant(0, np.int64))
        return op.Squeeze(op.GatherElements(values, op.Unsqueeze(indices, [axis]), axis=axis), [axis])

    def _counts(self, op: Op, y_true: Value) -> Value:
        return ~op.Equal(y_true, op.constant(self._ignored() or 0, np.int64))


def _is_index(y_true: Value) -> bool:
    return y_true.dtype.kind in "iu"


@dataclass(frozen=True)
class CrossEntropy(_Classes):
    r"""$-\sum_k q_k \log p_k$, with $p = \mathrm{softmax}(\hat y)$ over the classes, by log-softmax: finite for every finite output.

    Labels are class indices, of the output's shape without the axis of classes, or probabilities $q$ of its whole shape.
    `label_smoothing` $a$ mixes $q$ with the uniform distribution, $(1 - a) q + a/K$. `class_weights`, one per class, and `ignore_index` (a
    label that counts nowhere) divide the mean by what counts, as torch.nn.CrossEntropyLoss does. `from_logits=False` takes the output
    as probabilities, kept above 1e-7.
    """

    aliases = (
        "crossentropy", "categorical_crossentropy", "sparse_categorical_crossentropy", "categorical_cross_entropy",
        "sparse_categorical_cross_entropy", "softmax_cross_entropy",
    )  # fmt: skip

    from_logits: bool = True
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_smoothing(self, self.label_smoothing)
        if self.class_weights is not None:
            object.__setattr__(self, "class_weights", tuple(float(w) for w in self.class_weights))
            self._require(all(w >= 0 for w in self.class_weights), f"class_weights >= 0, got {self.class_weights}")

    def _ignored(self) -> int | None:
        return self.ignore_index

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        axis = self._axis(y_pred.rank)
        log_p = op.LogSoftmax(y_pred, axis=axis) if self.from_logits else op.Log(op.Clip(y_pred, op.constant(EPS, y_pred.dtype)))
        smoothing = self.label_smoothing
        if _is_index(y_true):
            loss = -self._pick(op, log_p, y_true, axis)
            if self.class_weights is None:
                return loss if not smoothing else (1 - smoothing) * loss - smoothing * op.ReduceMean(log_p, [axis], keepdims=0)
            # element_weights weigh the label's own class; only the smoothed part weighs every class by its own
            if not smoothing:
                return loss
            weights = self._per_class(op, log_p, axis)
            own = op.Max(self._weight_of(op, y_true), np.finfo(y_pred.dtype).tiny)
            return (1 - smoothing) * loss - smoothing * op.ReduceMean(weights * log_p, [axis], keepdims=0) / own
        q = (1 - smoothing) * y_true + smoothing / op.cast(op.Gather(op.Shape(y_pred), axis), y_pred.dtype) if smoothing else y_true
        terms = q * log_p if self.class_weights is None else q * log_p * self._per_class(op, log_p, axis)
        return -op.ReduceSum(terms, [axis], keepdims=0)

    def element_weights(self, op: Op, y_true: Value, y_pred: Value) -> Value | None:
        if not _is_index(y_true):
            return None
        weights = None if self.class_weights is None else op.cast(self._weight_of(op, y_true), y_pred.dtype)
        if self.ignore_index is None:
            return weights
        counts = op.cast(self._counts(op, y_true), y_pred.dtype)
        return counts if weights is None else counts * weights

    def _weight_of(self, op: Op, y_true: Value) -> Value:
        indices = y_true if self.ignore_index is None else op.Where(self._counts(op, y_true), y_true, op.constant(0, np.int64))
        return op.Gather(op.constant(np.array(self.class_weights, np.float32)), indices)

    def _per_class(self, op: Op, like: Value, axis: int) -> Value:
        """The class weights along the axis of classes."""
        return op.constant(np.array(self.class_weights).reshape(-1, *[1] * (like.rank - axis - 1)), like.dtype)

    def prepare(self, y: Array, y_pred: TensorSpec) -> Array:
        if self.class_weights is not None and y_pred.shape is not None:
            classes = y_pred.shape[self._axis(len(y_pred.shape))]
            if isinstance(classes, int) and classes != len(self.class_weights):
                raise SettingError(
                    f"CrossEntropy has {len(self.class_weights)} class_weights, and output {y_pred} has {classes} classes."
                )
        return super().prepare(y, y_pred)


@dataclass(frozen=True)
class NLL(_Classes):
    r"""$-\hat y_k$ for class index $k$: the output holds log-probabilities, as after LogSoftmax (torch.nn.NLLLoss)."""

    ignore_index: int | None = None

    def _ignored(self) -> int | None:
        return self.ignore_index

    def prepare(self, y: Array, y_pred: TensorSpec) -> Array:
        y = super().prepare(y, y_pred)
        if y.dtype.kind == "f":
            raise DataError(
                f"NLL needs class indices as labels, got probabilities of shape {y.shape}; KLDivergence or CrossEntropy take them."
            )
        return y

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        return -self._pick(op, y_pred, y_true, self._axis(y_pred.rank))

    def element_weights(self, op: Op, y_true: Value, y_pred: Value) -> Value | None:
        return None if self.ignore_index is None else op.cast(self._counts(op, y_true), y_pred.dtype)


@dataclass(frozen=True)
class Focal(_Classes):
    r"""$-a (1 - p_k)^\gamma \log p_k$ for the label's class $k$ (Lin et al. 2017): easy samples count less.

    $\gamma \ge 0$ (`gamma`), $a$ in (0, 1] (`alpha`). The output holds logits over the classes; one raw score per sample, output
    `(batch, 1)`, is binary, with labels 0 and 1 (and then $a$ weighs class 1 and $1 - a$ class 0, unless it is 1).
    """

    gamma: float = 2.0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.gamma >= 0, f"gamma >= 0, got {self.gamma}")
        self._require(0 < self.alpha <= 1, f"alpha in (0, 1], got {self.alpha}")

    def _binary(self, shape: tuple[Dim, ...] | None) -> bool:
        return shape is not None and len(shape) >= 2 and shape[self._axis(len(shape))] == 1

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        return TensorSpec("y_true", y_pred.dtype, y_pred.shape) if self._binary(y_pred.shape) else super().target(y_pred)

    def prepare(self, y: Array, y_pred: TensorSpec) -> Array:
        if not self._binary(y_pred.shape):
            y = super().prepare(y, y_pred)
            if y.dtype.kind == "f":
                raise DataError(f"Focal needs class indices as labels, got labels of shape {y.shape}.")
            return y
        y = self._elementwise(np.asarray(y), y_pred)
        self._refuse(y, ~np.isin(y, (0, 1)), f"labels 0 and 1 for output {y_pred}")
        return y

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        if _is_index(y_true):
            axis = self._axis(y_pred.rank)
            log_p = self._pick(op, op.LogSoftmax(y_pred, axis=axis), y_true, axis)
            # 1 - p as a sum over the other classes would keep more digits; where p is near 1 the loss is 0 either way
            return -self.alpha * self._power(op, 1 - op.Exp(log_p)) * log_p
        s = (2 * y_true - 1) * y_pred  # the score for the label's own class
        minus_log_p = op.Relu(-s) + op.Log(1 + op.Exp(-op.Abs(s)))
        weight = 1.0 if self.alpha == 1 else (1 - self.alpha) + (2 * self.alpha - 1) * y_true
        return weight * (self._power(op, op.Sigmoid(-s)) * minus_log_p)

    def _power(self, op: Op, rest: Value) -> Value:
        # bounded away from 0, where a power below 1 has an infinite slope
        return op.Clip(rest, op.constant(EPS, rest.dtype)) ** self.gamma


@dataclass(frozen=True)
class KLDivergence(_Classes):
    r"""$\sum_k y_k \log(y_k / p_k)$ over the last axis, with the output as probabilities $p$; both kept in [1e-7, 1], as in Keras.

    `from_logits=True` takes $p$ as the softmax of the output.
    """

    aliases = ("kl_divergence", "kld", "kullback_leibler_divergence")

    from_logits: bool = False

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        return TensorSpec("y_true", y_pred.dtype, y_pred.shape)

    def prepare(self, y: Array, y_pred: TensorSpec) -> Array:
        y = self._elementwise(np.asarray(y), y_pred)
        return self._elementwise_probabilities(y, y_pred)

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        axis = self._axis(y_pred.rank)
        low, one = op.constant(EPS, y_pred.dtype), op.constant(1, y_pred.dtype)
        log_p = op.LogSoftmax(y_pred, axis=axis) if self.from_logits else op.Log(op.Clip(y_pred, low, one))
        y = op.Clip(y_true, low, one)
        return op.ReduceSum(y * (op.Log(y) - log_p), [axis], keepdims=0)


@dataclass(frozen=True)
class CosineSimilarity(Loss):
    r"""$-\frac{y \cdot \hat y}{\|y\|\,\|\hat y\|}$ over the last axis, in [−1, 1], −1 for equal directions, as in Keras.

    Norms are at least 1e-6, so that a zero vector has loss 0 and a finite gradient.
    """

    aliases = ("cosine", "cosine_proximity")

    def __call__(self, op: Op, y_true: Value, y_pred: Value) -> Value:
        def inverse_norm(v: Value) -> Value:
            return 1 / op.Sqrt(op.Max(op.ReduceSum(v * v, [-1], keepdims=1), 1e-12))

        return -op.ReduceSum((y_true * inverse_norm(y_true)) * (y_pred * inverse_norm(y_pred)), [-1], keepdims=0)
