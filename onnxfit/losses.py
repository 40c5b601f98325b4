r"""Losses: what a prediction costs, per sample or element; the mean, weights and mask are applied
once, by `Loss`.

In the formulas $y$ is the label, $\hat y$ the model's output, $d = y - \hat y$. Every loss and its
gradient are finite for outputs and labels of moderate size ($10^4$ and far beyond), at kinks and at
the ends of ranges; where that takes a bound, the class says which.
"""

from __future__ import annotations

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Union, final

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.errors import DataError, SettingError
from onnxfit.graph import names
from onnxfit.graph.probabilities import source_of_probabilities
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.registry import lookup, registry, snake_case

__all__ = [
    "NLL",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
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
    "get_loss",
]

Array = npt.NDArray[Any]
LossFunction = Callable[[GraphBuilder, Value, Value], Value]

# below it a probability counts as this: its logarithm is then -69, and its slope still a float32
LEAST_PROBABILITY = 1e-30
LEAST_RATE = 1e-7
GREATEST_EXPONENT = 40.0


@dataclass(frozen=True)
class Loss(ABC):
    r"""The base of every loss.

    A subclass returns $\ell$, one value per sample or per element, shape `(batch, ...)`; with
    sample weights $s$ and element weights $e$ (`element_weights`, 1 unless overridden) the loss of
    a batch is the scalar

    - `reduction="mean"`: $\sum s e \ell / \sum e$; a weighted row counts as a row, as in Keras;
    - `reduction="weighted_mean"`: $\sum s e \ell / \sum s e$;
    - `reduction="sum"`: $\sum s e \ell$.

    `label_range` says which labels make sense; `prepare` refuses others, and what is not finite in
    the output's element type.
    """

    label_range: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    reduction: str = field(default="mean", kw_only=True)

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "weighted_mean", "sum"):
            raise SettingError(
                f"{type(self).__name__} needs reduction 'mean', 'weighted_mean' or 'sum', got"
                f" {self.reduction!r}."
            )

    @abstractmethod
    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        """The loss per sample or element, shape `(batch, ...)`."""

    def element_weights(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value | None:
        """What each entry of the result counts (class weights, a mask), in a shape that broadcasts
        to the result's; None: all count 1.
        """
        return None

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        """The type and shape of `y_true` for a model output; by default those of the output itself."""
        return TensorSpec("y_true", y_pred.dtype, y_pred.shape)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        """Labels as the graph wants them: the output's element type, `(n,)` as `(n, 1)` where the
        output has a last axis of 1, and back.

        DataError where labels and output cannot meet, or a label is NaN, infinite or out of range;
        it names the first such row.
        """
        wanted = self.target(y_pred)
        labels = _aligned(self, _numbers(self, y), wanted, y_pred)
        low, high = self.label_range
        _check_range(self, labels, low, high, wanted.dtype, y_pred)
        return labels.astype(wanted.dtype, copy=False)

    @final
    def reduce(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, sample_weight: Value | None
    ) -> tuple[Value, Value | None]:
        """The scalar loss of a batch, and what it counts: the divisor where that is not simply the
        number of entries, else None.

        `sample_weight` has shape `(batch,)`. An input of labels or weights with a size of its own
        gets the output's for it.
        """
        return self._reduced(op, *self._costs(op, y_true, y_pred, sample_weight))

    def _costs(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, sample_weight: Value | None
    ) -> tuple[Value, Value | None, Value | None]:
        """What each entry costs, all weights applied; the element weights; and those together with
        the sample weights.
        """
        _adopt_sizes(y_true, self._label_sizes(y_true, y_pred))
        if sample_weight is not None and y_pred.shape:
            _adopt_sizes(sample_weight, y_pred.shape[:1])
        loss = self(op, y_true, y_pred)
        if loss.rank == 0:
            if sample_weight is not None:
                raise SettingError(
                    f"{_name(self)} gives one number a batch, which cannot be weighted by row:"
                    " return one per sample."
                )
            return loss, None, None
        elements = self.element_weights(op, y_true, y_pred)
        weights = elements
        if sample_weight is not None:
            rows = op.cast(sample_weight, loss.dtype)
            if loss.rank > rows.rank:
                rows = op.Unsqueeze(rows, list(range(rows.rank, loss.rank)))
            weights = rows if elements is None else rows * elements
        return loss if weights is None else loss * weights, elements, weights

    def _reduced(
        self, op: GraphBuilder, costs: Value, elements: Value | None, weights: Value | None
    ) -> tuple[Value, Value | None]:
        if costs.rank == 0:
            return costs, None
        if self.reduction == "sum":
            return op.ReduceSum(costs, keepdims=0), None
        count = elements if self.reduction == "mean" else weights
        if count is None:
            return op.ReduceMean(costs, keepdims=0), None
        # a weight that broadcasts counts once for each entry it weighs
        total = op.ReduceSum(
            count if count.shape == costs.shape else op.Expand(count, op.Shape(costs)), keepdims=0
        )
        # a batch in which nothing counts costs 0, not 0/0
        return op.ReduceSum(costs, keepdims=0) / op.Max(total, np.finfo(costs.dtype).tiny), total

    def _by_row(self, op: GraphBuilder, costs: Value) -> Value:
        if costs.rank == 0:
            raise SettingError(
                f"{_name(self)} gives one number a batch, which cannot be told by row: return one"
                " per sample."
            )
        if costs.rank == 1:
            return costs
        return (op.ReduceSum if self.reduction == "sum" else op.ReduceMean)(
            costs, list(range(1, costs.rank)), keepdims=0
        )

    def build_onnx_function(
        self,
        shape: Sequence[Dim] = ("batch", "outputs"),
        dtype: npt.DTypeLike = np.float32,
        *,
        gradient: bool = False,
        by_row: bool = False,
        sample_weight: bool = False,
    ) -> onnx.ModelProto:
        """The loss of a batch as a model of its own, for outputs of this shape and type:

        `y_true`, `y_pred` -> `loss`, shape `()`.

        `y_true` is what `prepare` gives. `sample_weight=True` adds an input of that name, float32
        of shape `(batch,)`; `gradient=True` the output `y_pred_grad`; `by_row=True` the output
        `losses`, shape `(batch,)`: what each row costs, weights applied, as the mean over its
        entries (their sum for `reduction="sum"`). It runs in any onnxruntime.

        >>> graph = MeanSquaredError().build_onnx_function(gradient=True).graph
        >>> [v.name for v in graph.input], [v.name for v in graph.output]
        (['y_true', 'y_pred'], ['loss', 'y_pred_grad'])
        """
        # Imported late: a formula does not need the differentiator.
        from onnxfit.gradients import functions

        op = functions.new_function(self)
        spec = TensorSpec("y_pred", np.dtype(dtype), tuple(shape))
        labels = self.target(spec)
        y_true = op.input("y_true", labels.dtype, labels.shape or ())
        y_pred = op.input("y_pred", spec.dtype, shape)
        weights = (
            op.input(names.SAMPLE_WEIGHT, np.float32, spec.shape[:1])
            if sample_weight and spec.shape
            else None
        )
        costs = self._costs(op, y_true, y_pred, weights)
        op.output(names.LOSS, self._reduced(op, *costs)[0])
        if by_row:
            op.output("losses", self._by_row(op, costs[0]))
        return functions.finished(op, (names.LOSS, "y_pred") if gradient else None)

    def _label_sizes(self, y_true: Value, y_pred: Value) -> tuple[Dim, ...] | None:
        """What the output's sizes say about those of the labels."""
        wanted = self.target(TensorSpec(y_pred.name, y_pred.dtype, y_pred.shape)).shape
        return y_pred.shape if wanted is None or len(wanted) != y_true.rank else wanted


LossLike = Union[str, Loss, type[Loss], LossFunction]


def get_loss(spec: LossLike) -> Loss:
    """A Loss from a name, a Loss, a Loss class, or a function `(op, y_true, y_pred) -> Value`, one
    value per sample or a scalar.

    UnknownNameError with the nearest name, or SettingError for anything else.

    >>> get_loss("huber"), get_loss("MSE"), get_loss("sparse_categorical_crossentropy").from_logits
    (Huber(reduction='mean', delta=1.0), MeanSquaredError(reduction='mean'), True)
    >>> get_loss("cross_entrpy")
    Traceback (most recent call last):
        ...
    onnxfit.errors.UnknownNameError: No loss is called 'cross_entrpy'. Did you mean 'cross_entropy'? Known: ...
    """
    if isinstance(spec, str):
        known = registry(__name__, Loss)  # type: ignore[type-abstract]
        return lookup(
            "loss",
            next((n for n in (spec, snake_case(spec), spec.lower()) if n in known), spec),
            known,
        )
    if isinstance(spec, Loss):
        return spec
    if isinstance(spec, type) and issubclass(spec, Loss):
        return spec()
    if callable(spec) and not isinstance(spec, type):
        try:
            inspect.signature(spec).bind(None, None, None)
        except TypeError:
            raise SettingError(
                f"A loss of your own is called with (op, y_true, y_pred), which {spec!r} does not"
                " take: op builds the graph, as in lambda op, y_true, y_pred: op.Abs(y_true -"
                " y_pred)."
            ) from None
        except ValueError:  # a callable without a signature
            pass
        return FunctionLoss(spec)
    raise SettingError(
        f"A loss is a name, a Loss or a function (op, y_true, y_pred) -> Value, got {spec!r}."
    )


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A function `(op, y_true, y_pred) -> Value` as a Loss: one value per sample or element, or a
    scalar, which stays as it is.

    Labels of the output's shape are cast to its element type; others, such as class indices, go in
    as they are.
    """

    function: LossFunction

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        loss = self.function(op, y_true, y_pred)
        if not isinstance(loss, Value) or loss.dtype.kind != "f":
            raise SettingError(f"{_name(self)} returned {loss!r}: a loss is a Value of floats.")
        return loss

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = _numbers(self, y)
        return (
            labels
            if _fitted(labels, self.target(y_pred)) is None
            else super().prepare(labels, y_pred)
        )

    def _label_sizes(self, y_true: Value, y_pred: Value) -> tuple[Dim, ...] | None:
        # labels may have a shape of their own
        return y_pred.shape[:1] + (None,) * (y_true.rank - 1) if y_pred.shape else None


# ---------------------------------------------------------------------- regression


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    r"""Squared error $d^2$; its gradient is $-2 d$ before the reduction."""

    aliases = ("mse", "mse_loss", "l2", "l2_loss", "squared_error")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = y_pred - y_true  # -d: the same square, and a gradient without a Neg
        return distance * distance


@dataclass(frozen=True)
class MeanAbsoluteError(Loss):
    r"""Absolute error $|d|$; its gradient is $-\mathrm{sign}(d)$, and 0 where $d = 0$."""

    aliases = ("mae", "mae_loss", "l1", "l1_loss", "absolute_error")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return abs(y_pred - y_true)


@dataclass(frozen=True)
class Elastic(Loss):
    r"""$l_1 |d| + l_2 d^2$, with `l1_weight`, `l2_weight` $\ge 0$; its gradient is
    $-l_1\,\mathrm{sign}(d) - 2 l_2 d$.
    """

    l1_weight: float = 0.5
    l2_weight: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "l1_weight >= 0", self.l1_weight, lambda v: v >= 0)
        _require(self, "l2_weight >= 0", self.l2_weight, lambda v: v >= 0)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = y_true - y_pred
        return self.l1_weight * abs(distance) + self.l2_weight * (distance * distance)


@dataclass(frozen=True)
class Huber(Loss):
    r"""$\tfrac12 d^2$ where $|d| \le \delta$, else $\delta (|d| - \tfrac12 \delta)$, with `delta`
    $> 0$ (Huber 1964; `torch.nn.HuberLoss`).
    """

    aliases = ("huber_loss", "smooth_l1")

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "delta > 0", self.delta, lambda v: v > 0)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = abs(y_pred - y_true)
        near = op.Min(distance, self.delta)
        return near * (distance - 0.5 * near)


@dataclass(frozen=True)
class LogCosh(Loss):
    r"""$\log\cosh d = |d| + \log(1 + e^{-2|d|}) - \log 2$; its gradient is $-\tanh d$."""

    aliases = ("logcosh",)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = abs(y_pred - y_true)
        return distance + op.Log(1 + op.Exp(-2 * distance)) - math.log(2)


@dataclass(frozen=True)
class MeanSquaredLogarithmicError(Loss):
    r"""$(\log(1 + y) - \log(1 + \hat y))^2$ for labels $y \ge 0$.

    Below 0 the logarithm of the output goes on as a straight line, $\log(1 + \hat y) := \hat y$: a
    model that starts there is led out (clipping, as Keras does, gives it no gradient).
    """

    aliases = ("msle",)
    label_range = (0.0, math.inf)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = op.Log(1 + y_true) - (op.Log(1 + op.Max(y_pred, 0)) + op.Min(y_pred, 0))
        return distance * distance


@dataclass(frozen=True)
class MeanAbsolutePercentageError(Loss):
    r"""$100\,|d| / \max(|y|, 10^{-7})$, in percent, as in Keras; a label of 0 makes it very large,
    so that one may prefer another loss.
    """

    aliases = ("mape",)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return abs(y_pred - y_true) * (100 / op.Max(abs(y_true), 1e-7))


@dataclass(frozen=True)
class Quantile(Loss):
    r"""$\max(q d, (q - 1) d)$: the least-loss prediction is the `quantile` $q$, $0 < q < 1$, of the
    labels (Koenker and Bassett 1978).
    """

    aliases = ("quantile_loss", "pinball", "pinball_loss")

    quantile: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "0 < quantile < 1", self.quantile, lambda v: 0 < v < 1)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = y_true - y_pred
        return 0.5 * abs(distance) + (self.quantile - 0.5) * distance


@dataclass(frozen=True)
class Poisson(Loss):
    r"""The negative log-likelihood of counts $y \ge 0$, without the term that depends on $y$ alone.

    With `log_input=True` the output is the logarithm of the rate, any number: $e^{\hat y} - y \hat
    y$ (`torch.nn.PoissonNLLLoss`); above 40 the exponential goes on as its tangent. With
    `log_input=False` it is the rate: $\hat y - y \log \hat y$ (Keras); below 1e-7 the rate counts
    as 1e-7 and its logarithm goes on as its tangent.
    """

    aliases = ("poisson_nll", "poisson_nll_loss")
    label_range = (0.0, math.inf)

    log_input: bool = True

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        if self.log_input:
            return _exp(op, y_pred) - y_true * y_pred
        rate = op.Max(y_pred, LEAST_RATE)
        return rate - y_true * (op.Log(rate) + (y_pred - rate) / rate)


@dataclass(frozen=True)
class GaussianNLL(Loss):
    r"""$\tfrac12 (\log v + (y - \mu)^2 / v)$, the negative log-likelihood of a normal distribution
    without its constant.

    The output's last axis holds the means $\mu$, then as many values for the variances $v$: output
    `(batch, ..., 2k)`, labels and loss `(batch, ..., k)`. With `log_variance=True` these are $\log
    v$, any number (below -40, $1/v$ goes on as its tangent); with `log_variance=False` they are
    $v$, of which what is below 1e-6 counts as 1e-6 (`torch.nn.GaussianNLLLoss`). Source: Nix and
    Weigend 1994.
    """

    aliases = ("gaussian_nll", "gaussian_nll_loss")

    log_variance: bool = True

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if y_pred.shape is None:
            return TensorSpec("y_true", y_pred.dtype, None)
        last = y_pred.shape[-1] if len(y_pred.shape) > 1 else 1
        if isinstance(last, int) and last % 2:
            raise SettingError(
                "GaussianNLL needs an output whose last axis holds means, then as many variances;"
                f" got {y_pred}."
            )
        return TensorSpec(
            "y_true",
            y_pred.dtype,
            (*y_pred.shape[:-1], last // 2 if isinstance(last, int) else None),
        )

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        mean, spread = op.Split(y_pred, _outputs=2, axis=-1, num_outputs=2)
        distance = y_true - mean
        if self.log_variance:
            return 0.5 * (spread + distance * distance * _exp(op, -spread))
        variance = op.Max(spread, 1e-6)
        return 0.5 * (op.Log(variance) + distance * distance / variance)


# ---------------------------------------------------------------------- two classes, one output


@dataclass(frozen=True)
class Hinge(Loss):
    r"""$\max(0, 1 - y \hat y)$ for labels -1 and 1, or 0 and 1, of which `prepare` makes -1 and 1."""

    aliases = ("hinge_loss",)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        return _signs(self, super().prepare(y, y_pred), y_pred)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return op.Max(1 - y_true * y_pred, 0)


@dataclass(frozen=True)
class SquaredHinge(Loss):
    r"""$\max(0, 1 - y \hat y)^2$ for labels -1 and 1, or 0 and 1, of which `prepare` makes -1 and
    1.
    """

    aliases = ("squared_hinge_loss",)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        return _signs(self, super().prepare(y, y_pred), y_pred)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        short = op.Max(1 - y_true * y_pred, 0)
        return short * short


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    r"""$-p\,y \log q - (1 - y) \log(1 - q)$ for the probability $q$ that the label is 1; each
    element of the output is a yes or no of its own.

    The output is $q$, in which 0 and 1 count as 1e-30 away from there (with no gradient at the
    wrong end: prefer logits), or, with `from_logits=True`, any number $s$ with $q = 1/(1 +
    e^{-s})$. Labels lie in [0, 1]; `label_smoothing` $a$ in [0, 1) makes $(1 - a) y + a/2$ of them.
    `pos_weight` $p > 0$ is what a label of 1 counts: one number, or one for each entry of the last
    axis (`torch.nn.BCEWithLogitsLoss`).
    """

    aliases: ClassVar[tuple[str, ...]] = (
        "bce", "bce_loss", "binary_crossentropy", "binary_cross_entropy_loss", "log", "log_loss", "logloss",
    )  # fmt: skip
    label_range = (0.0, 1.0)

    from_logits: bool = False
    label_smoothing: float = 0.0
    pos_weight: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "0 <= label_smoothing < 1", self.label_smoothing, lambda v: 0 <= v < 1)
        if _is_number(self.pos_weight):
            _require(self, "pos_weight > 0", self.pos_weight, lambda v: v > 0)
        elif self.pos_weight is not None:
            _set_numbers(self, "pos_weight", self.pos_weight, "pos_weight > 0", lambda v: v > 0)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if isinstance(self.pos_weight, tuple) and y_pred.shape is not None:
            _check_length(self, "pos_weight", self.pos_weight, y_pred, len(y_pred.shape) - 1)
        return super().target(y_pred)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        _warn_of_wrong_scale(self, y_pred, self.from_logits)
        if self.label_smoothing:
            y_true = (1 - self.label_smoothing) * y_true + self.label_smoothing / 2
        positive = (
            y_true
            if self.pos_weight is None
            else y_true * op.constant(self.pos_weight, y_true.dtype)
        )
        negative = 1 - y_true
        if self.from_logits:
            return (positive + negative) * _softplus(op, -y_pred) + negative * y_pred
        return -(positive * _log(op, y_pred) + negative * _log(op, 1 - y_pred))


@dataclass(frozen=True)
class BinaryCrossEntropyWithLogits(BinaryCrossEntropy):
    r"""BinaryCrossEntropy of raw scores, `from_logits=True`, by a name of its own: the gradient of
    a score is $q - y$ before the reduction.
    """

    aliases: ClassVar[tuple[str, ...]] = (
        "bce_with_logits", "bce_with_logits_loss", "binary_crossentropy_with_logits", "neglog", "sigmoid_cross_entropy",
    )  # fmt: skip

    from_logits: bool = True


# ---------------------------------------------------------------------- several classes


@dataclass(frozen=True)
class ClassLoss(Loss):
    """What losses over class indices share: the axis of the classes, what each class counts, and
    which label counts nothing.

    Labels are class indices, shaped like the output without its axis of classes: integers of any
    width, or floats that are whole numbers. `axis` is that of the classes: by default 1 for outputs
    of rank 4 and more (images, `(batch, classes, height, width)`), else the last. `class_weights`
    are one number $\\ge 0$ per class; "mean" divides by their sum over the labels, as torch does.
    Labels equal to `ignore_index` count nothing.
    """

    axis: int | None = field(default=None, kw_only=True)
    class_weights: tuple[float, ...] | None = field(default=None, kw_only=True)
    ignore_index: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_weights is not None:
            _set_numbers(
                self, "class_weights", self.class_weights, "class_weights >= 0", lambda v: v >= 0
            )

    def class_axis(self, rank: int) -> int:
        """The axis of the classes in an output of this rank, from 1 on."""
        return _class_axis(self, self.axis, rank)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if y_pred.shape is None:
            return TensorSpec("y_true", np.dtype(np.int64), None)
        axis = self.class_axis(len(y_pred.shape))
        if y_pred.shape[axis] == 1:
            raise SettingError(
                f"{type(self).__name__} needs at least 2 classes; for one output per sample use"
                f" BinaryCrossEntropy. Got {y_pred}."
            )
        if self.class_weights is not None:
            _check_length(self, "class_weights", self.class_weights, y_pred, axis)
        return TensorSpec(
            "y_true", np.dtype(np.int64), y_pred.shape[:axis] + y_pred.shape[axis + 1 :]
        )

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels, wanted = _numbers(self, y), self.target(y_pred)
        classes: Dim = None
        if y_pred.shape is not None:
            axis = self.class_axis(len(y_pred.shape))
            classes = y_pred.shape[axis]
            if labels.ndim == len(y_pred.shape) and labels.shape[axis] == 1:
                labels = labels.squeeze(axis)
            labels = _aligned(self, labels, wanted, y_pred)
        last = classes - 1 if isinstance(classes, int) else None
        expected = (
            f"class indices from 0 to {last}" if last is not None else "class indices from 0 on"
        )
        if labels.dtype.kind == "f":
            with np.errstate(invalid="ignore"):  # NaN and infinity are refused below
                whole = labels.astype(np.int64)
            _refuse(self, labels, whole != labels, expected, y_pred)
            labels = whole
        if labels.size and (labels.min() < 0 or (last is not None and labels.max() > last)):
            wrong = (labels < 0) | (labels > (np.inf if last is None else last))
            if self.ignore_index is not None:
                wrong &= labels != self.ignore_index
            hint = (
                f" With ignore_index={labels[wrong][0]} such labels count nothing."
                if wrong.any() and labels[wrong][0] < 0
                else ""
            )
            _refuse(self, labels, wrong, expected, y_pred, hint)
        return labels.astype(np.int64, copy=False)

    def element_weights(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value | None:
        if not _is_index(y_true):
            return None
        counted = (
            None
            if self.ignore_index is None
            else op.cast(~op.Equal(y_true, self.ignore_index), y_pred.dtype)
        )
        if self.class_weights is None:
            return counted
        weights = self._of_label(op, y_true, self.class_weights, y_pred.dtype)
        return weights if counted is None else weights * counted

    def pick(self, op: GraphBuilder, values: Value, y_true: Value) -> Value:
        """Of values with an axis of classes, those of the labels; some number where a label is
        ignored.
        """
        axis = self.class_axis(values.rank)
        return op.Squeeze(
            op.GatherElements(values, op.Unsqueeze(self._index(op, y_true), [axis]), axis=axis),
            [axis],
        )

    def _of_label(
        self, op: GraphBuilder, y_true: Value, per_class: Sequence[float], dtype: npt.DTypeLike
    ) -> Value:
        return op.Gather(op.constant(np.array(per_class, dtype)), self._index(op, y_true))

    def _index(self, op: GraphBuilder, y_true: Value) -> Value:
        return (
            y_true
            if self.ignore_index is None
            else op.Where(op.Equal(y_true, self.ignore_index), 0, y_true)
        )


@dataclass(frozen=True)
class CrossEntropy(ClassLoss):
    r"""$-\sum_c q_c \log p_c$ over the classes, where $p$ is what the model predicts and $q$ the
    label.

    With `from_logits=True` the output is any numbers $s$, and $p = \mathrm{softmax}(s)$; else it is
    $p$, of which 0 counts as 1e-30 (with no gradient: prefer logits). Labels are class indices ($q$
    is 1 there), or probabilities of the output's shape. `label_smoothing` $a$ in [0, 1) makes $(1 -
    a) q + a / C$ of them, for $C$ classes. Axis, weights and ignored labels as in `ClassLoss`; with
    `class_weights` $w$ the sum is over $w_c q_c \log p_c$, "mean" divides by the $w$ of the labels
    if they are indices and by the number of rows if they are probabilities, and a label of weight 0
    counts nothing (`torch.nn.CrossEntropyLoss`).
    """

    aliases = (
        "crossentropy", "cross_entropy_loss", "categorical_crossentropy", "categorical_cross_entropy", "sparse_categorical_crossentropy",
        "sparse_categorical_cross_entropy", "sparse_crossentropy", "softmax_cross_entropy",
    )  # fmt: skip

    from_logits: bool = field(default=True, kw_only=True)
    label_smoothing: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "0 <= label_smoothing < 1", self.label_smoothing, lambda v: 0 <= v < 1)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = _numbers(self, y)
        if _same_shape(labels, y_pred):
            _check_range(
                self, labels, 0.0, 1.0, y_pred.dtype, y_pred, "class indices, or probabilities"
            )
            return labels.astype(y_pred.dtype, copy=False)
        return super().prepare(labels, y_pred)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        axis = self.class_axis(y_pred.rank)
        log_p = _log_probabilities(self, op, y_pred, axis, self.from_logits)
        weighted = log_p
        if self.class_weights is not None:
            shape = [-1] + [1] * (log_p.rank - axis - 1)
            weighted = log_p * op.constant(np.array(self.class_weights, log_p.dtype).reshape(shape))
        if _is_index(y_true):
            loss = -self.pick(op, log_p, y_true)
        else:
            loss = -op.ReduceSum(y_true * weighted, [axis], keepdims=0)
        if not self.label_smoothing:
            return loss
        uniform = -op.ReduceMean(weighted, [axis], keepdims=0)
        if self.class_weights is not None and _is_index(y_true):
            # `element_weights` will multiply by the label's weight, and this term has its weights
            # already
            uniform = uniform * self._of_label(
                op, y_true, [1 / w if w else 0.0 for w in self.class_weights], uniform.dtype
            )
        return (1 - self.label_smoothing) * loss + self.label_smoothing * uniform


@dataclass(frozen=True)
class NLL(ClassLoss):
    r"""$-\hat y_c$ for class index $c$: the output is log-probabilities, as LogSoftmax gives them
    (`torch.nn.NLLLoss`).

    Axis, weights and ignored labels as in `ClassLoss`.
    """

    aliases = ("nll_loss", "negative_log_likelihood")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return -self.pick(op, y_pred, y_true)


@dataclass(frozen=True)
class Focal(ClassLoss):
    r"""$-\alpha (1 - p)^\gamma \log p$ for the probability $p$ of what the label says: cross
    entropy in which what is easy counts little.

    Class indices as labels: $p$ is that of the class, by softmax; `alpha` is one number per class.
    Labels 0 and 1 of the output's shape (and always where the output has one entry on the axis of
    classes): each element is a yes or no of its own, by sigmoid; `alpha` in (0, 1) counts for a 1
    and `1 - alpha` for a 0. `gamma` $\ge 0$; None for `alpha` counts all alike. With
    `from_logits=False` the output is probabilities, of which 0 counts as 1e-30. Axis, weights and
    ignored labels as in `ClassLoss`; `alpha` does not change the divisor. Source: Lin et al. 2017,
    arXiv:1708.02002.
    """

    aliases = (
        "focal_loss",
        "binary_focal_crossentropy",
        "categorical_focal_crossentropy",
        "sigmoid_focal_loss",
    )

    gamma: float = 2.0
    alpha: float | tuple[float, ...] | None = None
    from_logits: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "gamma >= 0", self.gamma, lambda v: v >= 0)
        if _is_number(self.alpha):
            _require(self, "0 < alpha < 1", self.alpha, lambda v: 0 < v < 1)
        elif self.alpha is not None:
            _set_numbers(self, "alpha", self.alpha, "alpha >= 0", lambda v: v >= 0)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if y_pred.shape is not None and (
            len(y_pred.shape) < 2 or y_pred.shape[self.class_axis(len(y_pred.shape))] == 1
        ):
            return TensorSpec("y_true", y_pred.dtype, y_pred.shape)
        if isinstance(self.alpha, tuple) and y_pred.shape is not None:
            _check_length(self, "alpha", self.alpha, y_pred, self.class_axis(len(y_pred.shape)))
        return super().target(y_pred)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        wanted = self.target(y_pred)
        labels = _numbers(self, y)
        if wanted.dtype.kind != "f" and not _same_shape(labels, y_pred):
            return super().prepare(labels, y_pred)
        labels = _aligned(self, labels, TensorSpec("y_true", y_pred.dtype, y_pred.shape), y_pred)
        _refuse(
            self,
            labels,
            (labels != 0) & (labels != 1),
            "class indices, or labels 0 and 1 of the output's shape,",
            y_pred,
        )
        return labels.astype(y_pred.dtype, copy=False)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        if _is_index(y_true):
            return self._of_classes(op, y_true, y_pred)
        if (
            self.class_weights is not None
            or self.ignore_index is not None
            or isinstance(self.alpha, tuple)
        ):
            raise SettingError(
                "Focal with labels 0 and 1 takes one number as alpha, and neither class_weights nor"
                " ignore_index."
            )
        _warn_of_wrong_scale(self, y_pred, self.from_logits)
        if self.from_logits:
            s = (2 * y_true - 1) * y_pred
            loss = _softplus(op, -s)  # -log p, and -log(1 - p) is s more
            loss = op.Exp(-self.gamma * (loss + s)) * loss
        else:
            p, other = (
                y_true * y_pred + (1 - y_true) * (1 - y_pred),
                y_true * (1 - y_pred) + (1 - y_true) * y_pred,
            )
            loss = -op.Exp(self.gamma * _log(op, other)) * _log(op, p)
        return (
            loss
            if self.alpha is None
            else loss * (self.alpha * y_true + (1 - self.alpha) * (1 - y_true))
        )

    def _of_classes(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        if self.alpha is not None and not isinstance(self.alpha, tuple):
            raise SettingError(
                f"Focal with class indices takes one alpha per class, got {self.alpha}."
            )
        log_p = self.pick(
            op,
            _log_probabilities(self, op, y_pred, self.class_axis(y_pred.rank), self.from_logits),
            y_true,
        )
        loss = -op.Exp(self.gamma * _log(op, 1 - op.Exp(log_p))) * log_p
        return (
            loss
            if self.alpha is None
            else loss * self._of_label(op, y_true, self.alpha, loss.dtype)
        )


@dataclass(frozen=True)
class KLDivergence(Loss):
    r"""$\sum_c y_c (\log y_c - \log p_c)$ over the classes, for labels that are probabilities.

    The output is $p$, of which 0 counts as 1e-30 (with no gradient), or, with `from_logits=True`,
    numbers whose softmax is $p$, such as log-probabilities (`torch.nn.KLDivLoss`, reduction
    "batchmean"). `axis` is that of the classes, as in `ClassLoss`.
    """

    aliases = ("kl_divergence", "kld", "kl_div", "kullback_leibler_divergence")
    label_range = (0.0, 1.0)

    from_logits: bool = False
    axis: int | None = None

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        axis = _class_axis(self, self.axis, y_pred.rank)
        log_p = _log_probabilities(self, op, y_pred, axis, self.from_logits)
        return op.ReduceSum(y_true * (_log(op, y_true) - log_p), [axis], keepdims=0)


@dataclass(frozen=True)
class CosineSimilarity(Loss):
    r"""$-\frac{y \cdot \hat y}{\lVert y \rVert \lVert \hat y \rVert}$ along `axis`, from -1 (the
    same direction) to 1, as in Keras.

    Norms below 1e-6 count as 1e-6, so that a vector of zeros costs 0.
    """

    aliases = ("cosine", "cosine_similarity_loss", "cosine_proximity")

    axis: int = -1

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        def along(x: Value) -> Value:
            return op.ReduceSum(x, [self.axis], keepdims=0)

        def norm(x: Value) -> Value:
            return op.Sqrt(op.Max(along(x * x), 1e-12))

        return -along(y_true * y_pred) / (norm(y_true) * norm(y_pred))


# ---------------------------------------------------------------------- stable forms


def _softplus(op: GraphBuilder, x: Value) -> Value:
    """log(1 + e^x), with the right gradient, a half, at 0 whatever the gradient of |x| is taken to
    be there.
    """
    size = abs(x)
    return 0.5 * (x + size) + op.Log(1 + op.Exp(-size))


def _exp(op: GraphBuilder, x: Value) -> Value:
    """e^x, and its tangent beyond `GREATEST_EXPONENT`."""
    near = op.Min(x, GREATEST_EXPONENT)
    return op.Exp(near) * (1 + (x - near))


def _log(op: GraphBuilder, p: Value) -> Value:
    """The logarithm of a probability, at least log(`LEAST_PROBABILITY`)."""
    return op.Log(op.Clip(p, LEAST_PROBABILITY, 1))


def _log_probabilities(
    loss: Loss, op: GraphBuilder, y_pred: Value, axis: int, from_logits: bool
) -> Value:
    _warn_of_wrong_scale(loss, y_pred, from_logits)
    if not from_logits:
        return _log(op, y_pred)
    if y_pred.dtype == np.float32:
        return op.LogSoftmax(y_pred, axis=axis)
    # onnxruntime's gradient of LogSoftmax is float32 only
    return y_pred - op.ReduceLogSumExp(y_pred, [axis], keepdims=1)


def _warn_of_wrong_scale(loss: Loss, y_pred: Value, from_logits: bool) -> None:
    """Warn where the node that makes the output shows that it is probabilities instead of logits,
    or the reverse.
    """
    producer = y_pred.ir.producer()
    op_type = None if producer is None or producer.domain else producer.op_type
    if from_logits and (source := source_of_probabilities(y_pred.ir)):
        text = (
            f"takes logits, and the model's output comes from a {source}: set from_logits=False, or"
            " train the model without it."
        )
    elif not from_logits and op_type in ("Add", "Conv", "Gemm", "MatMul"):
        text = (
            f"takes probabilities, and the model's output comes from a {op_type}, which gives any"
            " number: set from_logits=True."
        )
    else:
        return
    warnings.warn(
        f"{type(loss).__name__}(from_logits={from_logits}) {text}", UserWarning, stacklevel=2
    )


def _adopt_sizes(value: Value, sizes: tuple[Dim, ...] | None) -> None:
    """Where an input's sizes are unknown, take these: what is the same at run time must not look as
    if it might broadcast.

    Of no effect for another rank, which a loss may well have asked for.
    """
    if (
        value.ir.producer() is None
        and value.shape is not None
        and sizes is not None
        and len(sizes) == value.rank
    ):
        own = value.shape
        value.ir.shape = ir.Shape(
            [
                mine if isinstance(mine, int) or theirs is None else theirs
                for mine, theirs in zip(own, sizes)
            ]
        )


# ---------------------------------------------------------------------- labels and settings


def _name(loss: Loss) -> str:
    return (
        getattr(loss.function, "__name__", repr(loss.function))
        if isinstance(loss, FunctionLoss)
        else type(loss).__name__
    )


def _is_index(y_true: Value) -> bool:
    return y_true.dtype.kind in "iu"


def _numbers(loss: Loss, y: npt.ArrayLike) -> Array:
    labels = np.asarray(y)
    if labels.dtype.kind == "b":
        return labels.astype(np.uint8)
    if labels.dtype.kind not in "iuf":
        raise DataError(f"{_name(loss)} needs labels that are numbers, got {labels.dtype}.")
    return labels


def _with_batch(spec: TensorSpec) -> TensorSpec:
    """The spec for any number of rows: a model may fix its batch, an array of labels has them all."""
    return spec if not spec.shape else TensorSpec(spec.name, spec.dtype, ("batch", *spec.shape[1:]))


def _same_shape(labels: Array, y_pred: TensorSpec) -> bool:
    return y_pred.shape is not None and _with_batch(y_pred).accepts(labels.shape)


def _fitted(labels: Array, wanted: TensorSpec) -> Array | None:
    """Labels in the shape wanted, where a last axis of 1 may be too few or too many;

    None where they have another shape.
    """
    if wanted.shape is None:
        return labels
    if labels.ndim == len(wanted.shape) - 1 and wanted.shape[-1] == 1:
        labels = labels[..., None]
    elif labels.ndim == len(wanted.shape) + 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    return labels if _with_batch(wanted).accepts(labels.shape) else None


def _aligned(loss: Loss, labels: Array, wanted: TensorSpec, y_pred: TensorSpec) -> Array:
    fitted = _fitted(labels, wanted)
    if fitted is None:
        sizes = ["?" if d is None else str(d) for d in _with_batch(wanted).shape or ()]
        shape = ", ".join(sizes) + "," * (len(sizes) == 1)
        what = "class indices" if wanted.dtype.kind in "iu" else "labels"
        raise DataError(
            f"{_name(loss)} expects {what} of shape ({shape}) for output {y_pred}; got shape"
            f" {labels.shape}.{_shape_hint(loss, labels, y_pred)}"
        )
    return fitted


def _shape_hint(loss: Loss, labels: Array, y_pred: TensorSpec) -> str:
    shape = y_pred.shape or ()
    if (
        isinstance(loss, ClassLoss)
        and loss.axis is None
        and len(shape) == 3
        and labels.shape[1:] == shape[2:]
    ):
        return " Are the classes on axis 1? Then set axis=1."
    if isinstance(loss, BinaryCrossEntropy) and len(shape) == 2 and labels.ndim == 1:
        return " For one of several classes per row use CrossEntropy."
    return ""


def _check_range(
    loss: Loss,
    labels: Array,
    low: float,
    high: float,
    dtype: np.dtype[Any],
    y_pred: TensorSpec,
    what: str = "numbers",
) -> None:
    limit = float(np.finfo(dtype).max)
    least, most = max(low, -limit), min(high, limit)
    # NaN is the least and the greatest of everything, and compares as neither
    if labels.size and not (labels.min() >= least and labels.max() <= most):
        text = {(0.0, 1.0): f"{what} from 0 to 1", (0.0, math.inf): f"finite {what} >= 0"}.get(
            (low, high), f"finite {what}"
        )
        _refuse(loss, labels, ~((labels >= least) & (labels <= most)), text, y_pred)


def _refuse(
    loss: Loss, labels: Array, wrong: Array, expected: str, y_pred: TensorSpec, hint: str = ""
) -> None:
    """DataError that names the first wrong label, if there is one."""
    if wrong.any():
        place = np.unravel_index(int(wrong.argmax()), wrong.shape)
        raise DataError(
            f"{_name(loss)} expects {expected} for output {y_pred}; got {labels[place].item():g} at"
            f" row {place[0]}.{hint}"
        )


def _signs(loss: Loss, labels: Array, y_pred: TensorSpec) -> Array:
    """-1 and 1 of labels 0 and 1; those that are -1 and 1 stay."""
    zero = labels == 0
    _refuse(loss, labels, ~(zero | (abs(labels) == 1)), "labels -1 and 1, or 0 and 1,", y_pred)
    if not zero.any():
        return labels
    _refuse(loss, labels, labels == -1, "labels -1 and 1, or 0 and 1, not a mixture,", y_pred)
    return 2 * labels - 1


def _class_axis(loss: Loss, axis: int | None, rank: int) -> int:
    chosen = axis if axis is not None else 1 if rank >= 4 else -1
    if rank < 2 or not -rank < chosen < rank or chosen == 0:
        given = "" if axis is None else f" and axis={axis}"
        raise SettingError(
            f"{type(loss).__name__} needs an output with a batch axis and an axis of classes; got"
            f" rank {rank}{given}."
        )
    return chosen % rank


def _require(loss: Loss, expected: str, value: Any, holds: Callable[[Any], bool]) -> None:
    if not (_is_number(value) and math.isfinite(value) and holds(value)):
        raise SettingError(f"{type(loss).__name__} needs {expected}, got {value!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _set_numbers(
    loss: Loss, name: str, values: Any, expected: str, holds: Callable[[Any], bool]
) -> None:
    """Make a tuple of floats, which can be compared and written as JSON, of a setting with one
    number per class.
    """
    try:
        numbers = tuple(float(v) for v in values)
    except (TypeError, ValueError):
        raise SettingError(
            f"{type(loss).__name__} needs a sequence of numbers as {name}, got {values!r}."
        ) from None
    for number in numbers:
        _require(loss, expected, number, holds)
    object.__setattr__(loss, name, numbers)


def _check_length(
    loss: Loss, name: str, values: Sequence[float], y_pred: TensorSpec, axis: int
) -> None:
    size = (y_pred.shape or ())[axis]
    if isinstance(size, int) and size != len(values):
        raise SettingError(
            f"{type(loss).__name__} needs one of {name} for each of the {size} entries of axis"
            f" {axis} of {y_pred}, got {len(values)}."
        )
