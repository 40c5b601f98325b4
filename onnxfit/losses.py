r"""Losses: the cost of a prediction, for each sample or element. The base class `Loss` applies the
mean, weights and masks.

In the formulas $y$ is the label, $\hat y$ the model's output, $d = y - \hat y$. Every loss and its
gradient are finite for outputs and labels of moderate size ($10^4$ and far beyond), at kinks and at
the ends of ranges; the class documents any bound that this needs.

Several losses have a setting `from_logits`. True reads the output as logits (raw scores, any
number), False as probabilities. None, the default, lets the graph decide: a Softmax or Sigmoid at
its end, also before operators that only move or scale numbers, means probabilities; an Add, Gemm,
MatMul, Conv or LogSoftmax means logits. The activation may be spelled in other operators, such as
Exp, ReduceSum and Div, or 1 / (1 + Exp). A HardSigmoid, or a Clip to numbers from 0 to 1, means
probabilities, too. For any other graph, CrossEntropy, CTC and Focal expect logits;
BinaryCrossEntropy, KLDivergence, Dice and Tversky expect probabilities, as in Keras.
`Trainer.summary()` shows the decision, and the nodes. A setting that contradicts the graph is
followed, with a UserWarning. Where the graph does not show what the output is, `fit` and `evaluate`
compare the numbers of the first batch with the setting, and warn once: of scores that are all from
0 to 1 and sum to 1 in each row of classes, and of probabilities outside of 0 to 1.

If the graph shows the Sigmoid or Softmax that computes probabilities, the loss computes from its
input, as in Keras. So a probability that is rounded to 0 or 1 has the same loss and gradient as its
logits. Operators that move, join or cast probabilities may follow. A Clip may follow, too: the
model then has no gradient beyond the bounds of the Clip. Without such an activation, a probability
is raised to 1e-30, and has no gradient there.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Union, final

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.errors import (
    DataError,
    SettingError,
    UnknownNameError,
    UnsupportedError,
    listed_names,
    nearest_name,
    warn_user,
)
from onnxfit.graph import names
from onnxfit.graph.labels import (
    AllowedLabels,
    adopt_sizes,
    align,
    check_range,
    declared_labels,
    fit_shape,
    has_shape_of,
    label_numbers,
    parse_labels,
    refuse_where,
)
from onnxfit.graph.logarithms import (
    Source,
    log_probabilities_of,
    log_softmax,
    log_softmax_of,
    logits_of,
    softplus,
)
from onnxfit.graph.probabilities import (
    any_number_operator,
    decide_logits,
    probability_operator,
    without_mask,
)
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.steps import Stepped, Tensors, scan_steps
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.load.opset import OPSET
from onnxfit.registry import (
    ChecksArguments,
    check_number,
    is_finite,
    is_number,
    lookup,
    name_list,
    registry,
    shortened,
    snake_case,
)

__all__ = [
    "CTC",
    "NLL",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "CausalLM",
    "CosineSimilarity",
    "CrossEntropy",
    "Dice",
    "Elastic",
    "Focal",
    "Function",
    "GaussianNLL",
    "Hinge",
    "Huber",
    "InfoNCE",
    "Joint",
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
    "TripletMargin",
    "Tversky",
    "get_loss",
]

Array = npt.NDArray[Any]
LossFunction = Callable[[GraphBuilder, Any, Value], Value]


@dataclass(frozen=True)
class SoftTargets:
    """The output of another model, the teacher, that a loss uses in addition to the labels.

    - `y_teacher`: the teacher's output, with the shape and element type of the output.
    - `temperature`: $T > 0$ of `Loss.distillation_loss`.
    - `weight`: $a$ in (0, 1], the share of the teacher in each entry of the loss.
    """

    y_teacher: Value
    temperature: float
    weight: float


# Smaller probabilities are raised to this before the logarithm. log is then -69, and its slope
# still fits float32.
LEAST_PROBABILITY = 1e-30
# Logarithms that are computed without the probability are raised to this. Models mask with it.
LEAST_LOGARITHM = -1e4
LEAST_RATE = 1e-7
GREATEST_EXPONENT = 40.0
TRIPLET_EPSILON = 1e-6  # as in PyTorch, added to differences: the norm of 0 has no gradient
# Losses of these libraries compute with their own tensors and cannot be used here.
OTHER_LIBRARIES = ("jax", "keras", "numpy", "optax", "sklearn", "tensorflow", "tf_keras", "torch")
CLASS_LIMIT = 2**63  # class indices are int64 in the graph
IMPOSSIBLE = -1e30  # stands for log 0: sums and differences of it are no NaN
MAX = np.iinfo(np.int64).max  # the end of an axis
MASK = "onnxfit: outputs that count"  # note of the node that masks outputs
SIGNS = AllowedLabels(-1, 1, values=(-1, 1))


@dataclass(frozen=True)
class Loss(ChecksArguments, ABC):
    r"""Base class of every loss.

    A subclass returns $\ell$, one value per sample or per element, shape `(batch, ...)`. With
    sample weights $s$ and element weights $e$ (`element_weights`, 1 unless overridden) the loss of
    a batch is a scalar. `reduction` selects its formula:

    - "mean": $\sum s e \ell / \sum e$; a weighted row counts as a row, as in Keras;
    - "weighted_mean": $\sum s e \ell / \sum s e$;
    - "sum": $\sum s e \ell$. For an epoch or an evaluation it is the sum over all rows, for any
      batch size.

    A sample weight belongs to a row, or to an entry of $\ell$; $\sum e$ runs over all entries, so
    sample weights of entries do not change the divisor: without a mask it is the number of entries.
    A row or entry of weight 0 has no influence, even if its loss is NaN or infinite. Raises
    SettingError for another `reduction`.

    To write a loss, subclass with a frozen dataclass whose `__call__` is the formula; the gradient
    follows from it. Settings are fields; a `__post_init__` that checks them calls
    `super().__post_init__()`. `label_range` bounds the labels. Override `target` and `prepare` for
    labels of another shape or type than the output, and `element_weights` for a mask. For a loss
    without settings, a plain function `(op, y_true, y_pred) -> Value` is enough.

    >>> @dataclass(frozen=True)
    ... class Linex(Loss):
    ...     a: float = -1.0
    ...
    ...     def __call__(self, op, y_true, y_pred):
    ...         scaled = self.a * (y_pred - y_true)
    ...         return op.Exp(scaled) - scaled - 1
    >>> graph = Linex(a=-2.0).build_onnx_function(gradient=True).graph
    >>> [v.name for v in graph.output]
    ['loss', 'y_pred_grad']
    """

    label_range: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    # For a loss with a field `from_logits`: the meaning of None if the graph does not decide.
    assumes_logits: ClassVar[bool] = True
    # What labels are to a metric: "classes" (one of several), "binary" (yes or no) or "values".
    task: ClassVar[str] = "values"

    reduction: str = field(default="mean", kw_only=True)

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "weighted_mean", "sum"):
            raise SettingError(
                f"{type(self).__name__} needs reduction 'mean', 'weighted_mean' or 'sum', got"
                f" {self.reduction!r}."
            )

    @abstractmethod
    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        """Return the loss per sample or element, shape `(batch, ...)`.

        `op` builds the graph, `y_true` are the labels as `prepare` returns them, `y_pred` is the
        model's output.
        """

    def element_weights(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value | None:
        """Return the weight of each entry of the loss (class weights, a mask), in a shape that
        broadcasts to the loss's; None if all count 1.

        `op`, `y_true` and `y_pred` are those of the call.
        """
        return None

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        r"""Return the distance between the output and a teacher's, with the entries of the loss.

        By default it is the squared difference. Losses whose output is probabilities or logits
        return $T^2\,\mathrm{KL}(q \Vert p)$ instead, where $q$ and $p$ are the predictions of the
        teacher and the model at the temperature $T$: logits are divided by $T$ before the softmax
        or sigmoid (Hinton, Vinyals, Dean 2015, arXiv:1503.02531). Entries of more axes than the
        loss has are averaged over the last axes.

        `op`, `y_true` and `y_pred` are those of the call; `y_teacher` is the teacher's output,
        `temperature` is $T$.
        """
        difference = y_pred - y_teacher
        return difference * difference

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        """Return the type and shape of the labels for the output `y_pred`: by default the same."""
        return TensorSpec("y_true", y_pred.dtype, y_pred.shape)

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        """Return the labels that the graph expects for the output `y_pred`, for other hosts.

        By default, labels lie in `label_range`. `prepare` checks them in Python.
        """
        return AllowedLabels(*self.label_range)

    @property
    def declared(self) -> Mapping[str, TensorSpec] | None:
        """The labels that the loss itself declares, by name, "" for a single array; {} for a loss
        without labels; None if `target` derives the labels from the output.
        """
        return None

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        """Return the labels `y` in the form that the graph expects for the output `y_pred`.

        They get the output's element type. Labels `(n,)` become `(n, 1)` if the output has a last
        axis of 1, and `(n, 1)` becomes `(n,)` if it has no such axis.

        Raises DataError if labels and output do not fit, or a label is NaN, infinite or out of
        range. The error names the first wrong row.

        >>> spec = TensorSpec("y", np.dtype("float32"), ("batch", 1))
        >>> MeanSquaredError().prepare([1, 2], spec).tolist()
        [[1.0], [2.0]]
        """
        expected = self.target(y_pred)
        labels = _align(self, label_numbers(loss_name(self), y), expected, y_pred)
        low, high = self.label_range
        check_range(loss_name(self), labels, low, high, expected.dtype, y_pred)
        return labels.astype(expected.dtype, copy=False)

    def metric_labels(
        self, y_true: Array, sample_weight: Array | None
    ) -> tuple[Array, Array | None]:
        """Return labels and sample weights in the form that metrics compare with the outputs.

        `y_true` is what `prepare` returned; `sample_weight` has a weight for each row or label, or
        is None. By default both are returned unchanged. A loss that omits or moves labels overrides
        this method. A negative class counts in no metric.
        """
        return y_true, sample_weight

    def metric_labels_in_graph(
        self, op: GraphBuilder, y_true: Value, sample_weight: Value | None
    ) -> tuple[Value, Value | None]:
        """Return what `metric_labels` returns, as values of a graph.

        It is for metrics that a graph adds up, which see a loss that overrides `metric_labels`
        alone on the host. `op` builds the graph, `y_true` and `sample_weight` are its inputs.
        """
        return y_true, sample_weight

    @property
    def cause_of_infinity(self) -> str:
        """A sentence about labels for which the loss is infinite, for a warning; "" without any."""
        return ""

    @final
    def reduce(
        self,
        op: GraphBuilder,
        y_true: Value,
        y_pred: Value,
        sample_weight: Value | None,
        soft_targets: SoftTargets | None = None,
    ) -> tuple[Value, Value | None]:
        r"""Return the scalar loss of a batch, and its divisor: None if that is the number of
        entries.

        `op`, `y_true` and `y_pred` are those of the call; `sample_weight` has shape `(batch,)`, or
        the first axes of the loss: `(batch, tokens)` for a loss of that shape. An input of labels
        or weights whose sizes are unknown gets the output's. With `soft_targets` an entry of the
        loss is $(1 - a) \ell + a d$, where $d$ is the result of `distillation_loss`; all weights
        apply to it as to $\ell$.
        """
        return self._reduced(op, *self._costs(op, y_true, y_pred, sample_weight, soft_targets))

    def _costs(
        self,
        op: GraphBuilder,
        y_true: Value,
        y_pred: Value,
        sample_weight: Value | None,
        soft_targets: SoftTargets | None = None,
    ) -> tuple[Value, Value | None, Value | None]:
        """The cost of each entry, all weights applied; the element weights; and the element weights
        times the sample weights.
        """
        self._adopt_sizes(y_true, y_pred)
        if sample_weight is None:
            loss = self._entries(op, y_true, y_pred, soft_targets)
            if loss.rank == 0:
                return loss, None, None
            elements = self.element_weights(op, y_true, y_pred)
            return loss if elements is None else loss * elements, elements, elements
        self._adopt_rows(sample_weight, y_pred)
        # 0 times infinity is NaN. An entry of weight 0 is masked at both ends, so neither its cost
        # nor its gradient reaches other entries, even if they are not finite.
        counts = op.cast(sample_weight, np.bool_)
        y_pred = self._without_weightless(op, counts, y_true, y_pred)
        loss = self._entries(op, y_true, y_pred, soft_targets)
        if loss.rank == 0:
            raise SettingError(
                f"{loss_name(self)} returns one number per batch, which sample weights cannot scale"
                " by row. Return one value per sample."
            )
        self._fit_weights(sample_weight, loss)
        elements = self.element_weights(op, y_true, y_pred)
        weights = _per_row(op, op.cast(sample_weight, loss.dtype), loss.rank)
        if elements is not None:
            weights = weights * elements
        costs = op.Where(_per_row(op, counts, loss.rank), loss * weights, 0)
        return costs, elements, weights

    def _entries(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, soft_targets: SoftTargets | None
    ) -> Value:
        """The loss per sample or element, combined with `soft_targets`."""
        loss = self(op, y_true, y_pred)
        if soft_targets is None:
            return loss
        share = soft_targets.weight
        distance = self.distillation_loss(
            op, y_true, y_pred, soft_targets.y_teacher, soft_targets.temperature
        )
        if distance.rank > loss.rank:
            distance = op.ReduceMean(distance, list(range(loss.rank, distance.rank)), keepdims=0)
        # A share of 1 omits the labels' loss: it may be infinite, and must not be multiplied by 0.
        return distance if share == 1 else (1 - share) * loss + share * distance

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        """Whether any counted cost depends on an output, as booleans that broadcast to the outputs.
        `counts` has a boolean for each row, or for each entry of the loss.
        """
        if counts.rank > 1 and not isinstance(self, ELEMENTWISE):
            # An entry may depend on all outputs of its row.
            numbers = op.cast(counts, y_pred.dtype)
            rows = op.ReduceMax(numbers, list(range(1, counts.rank)), keepdims=0)
            counts = op.cast(rows, np.bool_)
        return _per_row(op, counts, y_pred.rank)

    def _adopt_rows(self, sample_weight: Value, y_pred: Value) -> None:
        """Give weights of rows the number of rows of the output."""
        if y_pred.shape and sample_weight.rank == 1:
            adopt_sizes(sample_weight, y_pred.shape[:1])

    def _without_weightless(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        """The output, with 0 where no counted cost depends on it."""
        if not y_pred.rank:
            return y_pred
        return _masked(op, self._counted_outputs(op, counts, y_true, y_pred), y_pred)

    def _fit_weights(self, sample_weight: Value, loss: Value) -> None:
        """Give weights of entries the sizes of the loss. Raises SettingError if they do not fit."""
        rank = sample_weight.rank
        sizes = None if loss.shape is None else loss.shape[:rank]
        known = zip(sample_weight.shape or (), sizes or ())
        if rank > loss.rank or any(
            isinstance(w, int) and isinstance(size, int) and w != size for w, size in known
        ):
            raise SettingError(
                f"{loss_name(self)} returns a loss of shape {_shape(loss)}, but sample_weight has"
                f" shape {_shape(sample_weight)}. Pass one weight for each row, or for each entry"
                " of the loss."
            )
        if rank > 1:
            adopt_sizes(sample_weight, sizes)

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
        if count.shape != costs.shape:  # a weight counts once for each of its entries
            count = op.Expand(count, op.Shape(costs))
        total = op.ReduceSum(count, keepdims=0)
        # A batch without counted entries costs 0, not 0/0. Sample weights may be negative.
        if count is elements:
            divisor = op.Max(total, np.finfo(costs.dtype).tiny)
        else:
            divisor = op.Where(total == 0, 1, total)
        return op.ReduceSum(costs, keepdims=0) / divisor, total

    def _by_row(self, op: GraphBuilder, costs: Value) -> Value:
        if costs.rank == 0:
            raise SettingError(
                f"{loss_name(self)} returns one number per batch, which cannot be split by row."
                " Return one value per sample."
            )
        if costs.rank == 1:
            return costs
        reduce = op.ReduceSum if self.reduction == "sum" else op.ReduceMean
        return reduce(costs, list(range(1, costs.rank)), keepdims=0)

    def build_onnx_function(
        self,
        shape: Sequence[Dim] = ("batch", "outputs"),
        dtype: npt.DTypeLike = np.float32,
        *,
        gradient: bool = False,
        by_row: bool = False,
        sample_weight: bool = False,
    ) -> onnx.ModelProto:
        """Build the loss of a batch as a model, `y_true`, `y_pred` -> `loss`, that runs in any
        onnxruntime.

        - `shape`, `dtype`: shape and element type of the output `y_pred`; a size may be a name.
          `y_true` has the form that `prepare` returns, `loss` has shape `()`.
        - `gradient`: add the output `y_pred_grad`.
        - `by_row`: add the output `losses`, shape `(batch,)`: the cost of each row, weights
          applied, as the mean over its entries (their sum for `reduction="sum"`).
        - `sample_weight`: add an input of that name, float32 of shape `(batch,)`.

        >>> graph = MeanSquaredError().build_onnx_function(gradient=True).graph
        >>> [v.name for v in graph.input], [v.name for v in graph.output]
        (['y_true', 'y_pred'], ['loss', 'y_pred_grad'])
        """
        # Imported late: a loss is a formula, and does not need the differentiator.
        from onnxfit.gradients import functions

        op = functions.new_function(self)
        spec = TensorSpec("y_pred", np.dtype(dtype), tuple(shape))
        y_true = self._label_inputs(op, spec)
        y_pred = op.input("y_pred", spec.dtype, shape)
        weights = None
        if sample_weight and spec.shape:
            weights = op.input(names.SAMPLE_WEIGHT, np.float32, spec.shape[:1])
        costs = self._costs(op, y_true, y_pred, weights)
        op.output(names.LOSS, self._reduced(op, *costs)[0])
        if by_row:
            op.output("losses", self._by_row(op, costs[0]))
        return functions.to_model_proto(op, (names.LOSS, "y_pred") if gradient else None)

    def _label_inputs(self, op: GraphBuilder, y_pred: TensorSpec) -> Value:
        """Add the input of the labels to the graph of `build_onnx_function`."""
        labels = self.target(y_pred)
        return op.input("y_true", labels.dtype, labels.shape or ())

    def _adopt_sizes(self, y_true: Value, y_pred: Value) -> None:
        """Give the input of the labels the sizes that the output determines."""
        adopt_sizes(y_true, self._label_sizes(y_true, y_pred))

    def _label_sizes(self, y_true: Value, y_pred: Value) -> tuple[Dim, ...] | None:
        """The sizes of the labels that are known from the output's sizes."""
        expected = self.target(TensorSpec(y_pred.name, y_pred.dtype, y_pred.shape)).shape
        if expected is None or len(expected) != y_true.rank:
            return y_pred.shape
        return expected


LossLike = Union[str, Loss, type[Loss], LossFunction]


def get_loss(spec: LossLike) -> Loss:
    """Return the loss that `spec` specifies.

    `spec` is a name, a Loss, which is returned itself, a Loss class, or a function `(op, y_true,
    y_pred) -> Value` that returns one value per sample or a scalar. Raises UnknownNameError (a
    SettingError), with the nearest name, for an unknown name, and SettingError for anything else.

    >>> get_loss("huber"), get_loss("MSE")
    (Huber(reduction='mean', delta=1.0), MeanSquaredError(reduction='mean'))
    >>> get_loss("cross_entrpy")
    Traceback (most recent call last):
        ...
    onnxfit.errors.UnknownNameError: No loss is called 'cross_entrpy'. Did you mean ...
    """
    if isinstance(spec, str):
        return lookup("loss", spec, registry(__name__, Loss))  # type: ignore[type-abstract]
    if isinstance(spec, Loss):
        return spec
    if isinstance(spec, type) and issubclass(spec, Loss):
        return spec()
    _refuse_other_library(spec)
    if callable(spec) and not isinstance(spec, type):
        try:
            inspect.signature(spec).bind(None, None, None)
        except TypeError:
            raise SettingError(
                f"A loss function must accept (op, y_true, y_pred), but {spec!r} does not. op"
                " builds the graph, as in lambda op, y_true, y_pred: op.Abs(y_true - y_pred)."
            ) from None
        except ValueError:  # a callable without a signature
            pass
        return Function(spec)
    raise SettingError(
        f"loss must be a name, a Loss or a function (op, y_true, y_pred) -> Value, got {spec!r}."
    )


def _refuse_other_library(spec: Any) -> None:
    """Raise SettingError for a loss of PyTorch, Keras or scikit-learn; name onnxfit's own."""
    module = str(getattr(spec, "__module__", None) or "")
    library = module.split(".")[0]
    is_module = hasattr(spec, "forward") and hasattr(spec, "parameters")
    if library not in OTHER_LIBRARIES and not is_module:
        return
    name = getattr(spec, "__name__", None) or type(spec).__name__
    try:
        ours = snake_case(type(get_loss(name)).__name__)
    except UnknownNameError:
        known = registry(__name__, Loss)  # type: ignore[type-abstract]
        ours = nearest_name(name, known) or "mean_squared_error"
    raise SettingError(
        f"{name} computes with arrays or tensors, but a loss must build ONNX nodes. Use"
        f" loss={ours!r}, or write a function: lambda op, y_true, y_pred: op.Abs(y_true - y_pred)."
    )


@dataclass(frozen=True)
class Function(Loss):
    """A function `(op, y_true, y_pred) -> Value` as a loss, with labels of any shape and type.

    `loss=function` is the same as `loss=Function(function)`.

    - `function`: returns one value per sample or element, or a scalar, which is not reduced.
    - `labels`: element type and shape of the labels as in ONNX's text syntax, such as "int64[b]" or
      "float[b, 7, 4]": the first size is the batch, under any name, a number is checked, and any
      other name or "?" is free. A dict name -> text declares several arrays; `y_true` is then a
      dict name -> Value, and `fit` takes `y={"class": ..., "boxes": ...}`. None takes labels of the
      output's shape, which get its element type, or of another shape, such as class indices, which
      are passed unchanged.
    - `reduction` is as in `Loss`.

    SettingError: the text is no element type and shape. DataError: labels do not fit it.

    >>> def box_error(op, y_true, y_pred):
    ...     distance = op.ReduceSum(op.Abs(y_pred - y_true["box"]), [1], keepdims=0)
    ...     return op.Where(y_true["has_box"], distance, 0)
    >>> loss = Function(box_error, labels={"has_box": "bool[b]", "box": "float[b, 4]"})
    >>> [v.name for v in loss.build_onnx_function(("b", 4)).graph.input]
    ['y_true/has_box', 'y_true/box', 'y_pred']
    """

    named = False

    function: LossFunction
    labels: str | Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise SettingError(f"Function needs a function, got {shortened(self.function)}.")
        _ = self.declared  # reports a wrong text here

    @cached_property
    def declared(self) -> Mapping[str, TensorSpec] | None:
        """The labels that `labels` declares, by name."""
        return None if self.labels is None else parse_labels(self.labels)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return _built(self, lambda: self.function(op, y_true, y_pred))

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        same = super().target(y_pred)
        if self.declared is not None:
            return self.declared.get("", same)
        if y_pred.shape is None or len(y_pred.shape) < 2 or _takes(self, same, y_pred):
            return same
        axis = _class_axis(self, None, len(y_pred.shape))
        sizes = y_pred.shape[:axis] + y_pred.shape[axis + 1 :]
        if y_pred.shape[axis] == 1:
            return same
        indices = TensorSpec("y_true", np.dtype(np.int64), sizes)
        return indices if _takes(self, indices, y_pred) else same

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        if self.declared is not None:
            return declared_labels(loss_name(self), np.asarray(y), self.target(y_pred))
        labels = label_numbers(loss_name(self), y)
        expected = self.target(y_pred)
        if expected.dtype.kind in "iu" or fit_shape(labels, expected) is None:
            return labels
        return super().prepare(labels, y_pred)

    def _label_inputs(self, op: GraphBuilder, y_pred: TensorSpec) -> Any:
        if self.declared is None or "" in self.declared:
            return super()._label_inputs(op, y_pred)
        return {
            name: op.input(f"y_true/{name}", spec.dtype, spec.shape or ())
            for name, spec in self.declared.items()
        }

    def _adopt_sizes(self, y_true: Any, y_pred: Value) -> None:
        for labels in y_true.values() if isinstance(y_true, Mapping) else [y_true]:
            super()._adopt_sizes(labels, y_pred)

    def _label_sizes(self, y_true: Value, y_pred: Value) -> tuple[Dim, ...] | None:
        # Labels may have another shape than the output.
        return y_pred.shape[:1] + (None,) * (y_true.rank - 1) if y_pred.shape else None


@dataclass(frozen=True)
class Joint(Loss):
    """A function of several outputs, inputs and values of the model as one loss.

    - `function`: `(op, *read)`, or `(op, y_true, *read)` with labels; returns one value per sample
      or element, or a scalar, which is not reduced. `read` has the values of `outputs`, `inputs`
      and `values`, in this order.
    - `outputs`, `inputs`: names of the model's outputs and inputs, one or several.
    - `values`: names of other values of the file: results of nodes, or initializers.
    - `labels`: as in `Function`; None for a loss without labels.
    - `reduction` is as in `Loss`. A sample weight multiplies the value of its row; the function
      sees rows of weight 0 like all others. Several processes compute the function on their own
      rows each, and average.

    `loss=Joint(...)` is the only loss of a model; `loss={"name": Joint(...), "output": "mse"}`
    trains several losses. The name is free, and is the one of the labels.

    SettingError: the function does not take as many arguments as the loss reads.

    >>> def pull(op, image, text):
    ...     return op.ReduceSum((image - text) ** 2, [1], keepdims=0)
    >>> Joint(pull, outputs=["image", "text"]).read
    ('image', 'text')
    """

    named = False

    function: Callable[..., Value]
    outputs: Sequence[str] | str = ()
    inputs: Sequence[str] | str = field(default=(), kw_only=True)
    values: Sequence[str] | str = field(default=(), kw_only=True)
    labels: str | Mapping[str, str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in ("outputs", "inputs", "values"):
            object.__setattr__(self, kind, tuple(name_list(kind, getattr(self, kind))))
        if not self.read:
            raise SettingError("Joint needs the name of an output, an input or a value to read.")
        self._check_function()

    def _check_function(self) -> None:
        """Raise SettingError unless the function takes what the loss reads."""
        arguments = ["op", *(["y_true"] if self.declared else []), *self.read]
        try:
            inspect.signature(self.function).bind(*arguments)
        except TypeError:
            raise SettingError(
                f"The function of Joint must accept ({', '.join(arguments)}), but"
                f" {shortened(self.function)} does not."
            ) from None
        except ValueError:  # a callable without a signature
            pass

    @property
    def read(self) -> tuple[str, ...]:
        """The names of all that the function reads, in the order of its arguments."""
        return (*self.outputs, *self.inputs, *self.values)

    @cached_property
    def declared(self) -> Mapping[str, TensorSpec]:
        """The labels that `labels` declares, by name."""
        return {} if self.labels is None else parse_labels(self.labels)

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any) -> Value:
        labels = [y_true] if self.declared else []
        return _built(self, lambda: self.function(op, *labels, *y_pred))

    def build_onnx_function(self, *arguments: Any, **settings: Any) -> onnx.ModelProto:
        """Raise UnsupportedError: the shapes of what a Joint reads are those of a model.

        - `arguments`, `settings`: those of `Loss.build_onnx_function`.
        """
        raise UnsupportedError(
            "A Joint loss reads values of a model. Use onnxfit.add_loss(model, loss), which returns"
            " the model with its loss as one more output."
        )

    def _adopt_sizes(self, y_true: Any, y_pred: Any) -> None:
        rows = _rows_of(y_pred)
        for labels in y_true.values() if isinstance(y_true, Mapping) else [y_true]:
            if labels is not None:
                adopt_sizes(labels, (rows,) + (None,) * (labels.rank - 1))

    def _adopt_rows(self, sample_weight: Value, y_pred: Any) -> None:
        if sample_weight.rank == 1:
            adopt_sizes(sample_weight, (_rows_of(y_pred),))

    def _without_weightless(self, op: GraphBuilder, counts: Value, y_true: Any, y_pred: Any) -> Any:
        # The loss of a row may depend on all rows, and zeros would not be neutral there.
        return y_pred


@dataclass(frozen=True)
class TripletMargin(Joint):
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

    function: Any = field(default=None, init=False, repr=False)
    labels: None = field(default=None, init=False, repr=False)
    margin: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "margin", above=0)

    def _check_function(self) -> None:
        _require_names(self, len(self.read) == 3, "an anchor, a positive and a negative")

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any) -> Value:
        anchor, positive, negative = y_pred

        def distance(a: Value, b: Value) -> Value:
            difference = a - b + TRIPLET_EPSILON
            return op.Sqrt(op.ReduceSum(difference * difference, [-1], keepdims=0))

        return op.Relu(distance(anchor, positive) - distance(anchor, negative) + self.margin)


@dataclass(frozen=True)
class InfoNCE(Joint):
    r"""The contrastive loss of CLIP and SimCLR: the mean of the cross entropies of the rows and the
    columns of $e^s\,\hat a \hat b^\top$, whose classes are on the diagonal (van den Oord et al.
    2018, arXiv:1807.03748; Radford et al. 2021, arXiv:2103.00020).

    Row $i$ of $a$ belongs to row $i$ of $b$; all other rows of the batch are its negatives.
    $\hat a$ and $\hat b$ are the rows divided by their norms, which are at least $10^{-12}$.

    - `outputs`: the names of the outputs with $a$ and $b$, each of shape `(batch, features)`.
    - `values`: the name of a scalar $s$ in the file, such as CLIP's `logit_scale`, instead of
      `temperature`; `inputs` as in `Joint`, for $a$ and $b$.
    - `temperature`: $e^{-s} > 0$.
    - `symmetric`: False for the cross entropy of the rows alone.
    - `reduction` is as in `Loss`.

    SettingError: there are not two names, or three with $s$.

    >>> InfoNCE(["image", "text"]).read
    ('image', 'text')
    """

    named = False

    function: Any = field(default=None, init=False, repr=False)
    labels: None = field(default=None, init=False, repr=False)
    temperature: float = field(default=0.07, kw_only=True)
    symmetric: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "temperature", above=0)

    def _check_function(self) -> None:
        fits = len(self.outputs) + len(self.inputs) == 2 and len(self.values) <= 1
        _require_names(self, fits, "two outputs of vectors, and of at most one scale in values")

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any) -> Value:
        first, second, *scale = y_pred

        def unit(a: Value) -> Value:
            return a / op.Sqrt(op.Max(op.ReduceSum(a * a, [-1], keepdims=1), 1e-24))

        logits = op.MatMul(unit(first), op.Transpose(unit(second), perm=[1, 0]))
        logits = logits * op.Exp(scale[0]) if scale else logits / self.temperature
        rows = _diagonal_cross_entropy(op, logits)
        if not self.symmetric:
            return rows
        return (rows + _diagonal_cross_entropy(op, op.Transpose(logits, perm=[1, 0]))) / 2


def _diagonal_cross_entropy(op: GraphBuilder, logits: Value) -> Value:
    """The cross entropy of each row of scores, whose class is on the diagonal."""
    return -op.ReduceSum(log_softmax(op, logits, 1) * op.EyeLike(logits), [1], keepdims=0)


def _require_names(loss: Joint, fits: bool, what: str) -> None:
    if not fits:
        raise SettingError(
            f"{type(loss).__name__} needs the names of {what}, got {listed_names(loss.read)}."
        )


def _rows_of(values: Sequence[Value]) -> Dim:
    """The rows of a batch, which the first value with axes has."""
    return next((value.shape[0] for value in values if value.shape), None)


def _built(loss: Loss, build: Callable[[], Any]) -> Value:
    """Return the value that a function of the user builds, or raise an error that names it."""
    try:
        value = build()
    except (AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"{loss_name(loss)} failed on the values of the graph: {error}\nBuild the loss from"
            " op's ONNX operators and + - * / ** abs, as in lambda op, y_true, y_pred:"
            " op.Abs(y_true - y_pred). Functions of NumPy and PyTorch do not accept these values."
        ) from error
    if not isinstance(value, Value) or value.dtype.kind != "f":
        raise SettingError(f"{loss_name(loss)} must return a Value of floats, got {value!r}.")
    return value


@lru_cache(maxsize=128)
def _takes(loss: Function, labels: TensorSpec, y_pred: TensorSpec) -> bool:
    """Whether the function builds its graph for these labels and this output."""
    op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="trial"))
    inputs = (op.input(spec.name, spec.dtype, spec.shape or ()) for spec in (labels, y_pred))
    try:
        loss(op, *inputs)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------- regression


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    r"""Squared error $d^2$; the gradient is $-2 d$ before the reduction.

    Labels have the output's shape; the loss has the unit of $y^2$. `reduction` is as in `Loss`.

    >>> get_loss("mse")
    MeanSquaredError(reduction='mean')
    """

    aliases = ("mse", "mse_loss", "l2", "l2_loss", "squared_error")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = y_pred - y_true  # -d: the same square, and a gradient without a Neg
        return distance * distance


@dataclass(frozen=True)
class MeanAbsoluteError(Loss):
    r"""Absolute error $|d|$; the gradient is $-\mathrm{sign}(d)$, and 0 where $d = 0$.

    Labels have the output's shape; the loss has the unit of $y$. `reduction` is as in `Loss`.

    >>> get_loss("mae")
    MeanAbsoluteError(reduction='mean')
    """

    aliases = ("mae", "mae_loss", "l1", "l1_loss", "absolute_error")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return abs(y_pred - y_true)


@dataclass(frozen=True)
class Elastic(Loss):
    r"""Elastic error $l_1 |d| + l_2 d^2$; the gradient is $-l_1\,\mathrm{sign}(d) - 2 l_2 d$.

    Labels have the output's shape.

    - `l1_weight` $l_1 \ge 0$, `l2_weight` $l_2 \ge 0$.
    - `reduction` is as in `Loss`.

    >>> Elastic(l1_weight=0.1, l2_weight=0.9)
    Elastic(reduction='mean', l1_weight=0.1, l2_weight=0.9)
    """

    l1_weight: float = 0.5
    l2_weight: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "l1_weight", at_least=0)
        check_number(self, "l2_weight", at_least=0)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = y_true - y_pred
        return self.l1_weight * abs(distance) + self.l2_weight * (distance * distance)


@dataclass(frozen=True)
class Huber(Loss):
    r"""Huber loss: $\tfrac12 d^2$ where $|d| \le \delta$, else $\delta (|d| - \tfrac12 \delta)$
    (Huber 1964; `torch.nn.HuberLoss`).

    Labels have the output's shape.

    - `delta` $\delta > 0$, in the unit of $y$.
    - `reduction` is as in `Loss`.

    >>> Huber(delta=2.0)
    Huber(reduction='mean', delta=2.0)
    """

    aliases = ("huber_loss", "smooth_l1")

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "delta", above=0)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = abs(y_pred - y_true)
        near = op.Min(distance, self.delta)
        return near * (distance - 0.5 * near)


@dataclass(frozen=True)
class LogCosh(Loss):
    r"""Logarithm of the hyperbolic cosine, $\log\cosh d = |d| + \log(1 + e^{-2|d|}) - \log 2$; the
    gradient is $-\tanh d$ (`keras.losses.LogCosh`).

    Labels have the output's shape. `reduction` is as in `Loss`.

    >>> get_loss("log_cosh")
    LogCosh(reduction='mean')
    """

    aliases = ("logcosh",)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = abs(y_pred - y_true)
        return distance + op.Log(1 + op.Exp(-2 * distance)) - math.log(2)


@dataclass(frozen=True)
class MeanSquaredLogarithmicError(Loss):
    r"""Squared error of the logarithms, $(\log(1 + y) - \log(1 + \hat y))^2$, for labels $y \ge 0$.

    For outputs below 0 the logarithm continues as a straight line, $\log(1 + \hat y) := \hat y$, so
    a model that starts there has a gradient (Keras clips, which has no gradient). Labels have the
    output's shape. `reduction` is as in `Loss`.

    >>> get_loss("msle")
    MeanSquaredLogarithmicError(reduction='mean')
    """

    aliases = ("msle",)
    label_range = (0.0, math.inf)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        distance = op.Log(1 + y_true) - (op.Log(1 + op.Max(y_pred, 0)) + op.Min(y_pred, 0))
        return distance * distance


@dataclass(frozen=True)
class MeanAbsolutePercentageError(Loss):
    r"""Relative error $100\,|d| / \max(|y|, 10^{-7})$, in percent
    (`keras.losses.MeanAbsolutePercentageError`).

    A label of 0 makes the loss very large. Labels have the output's shape. `reduction` is as in
    `Loss`.

    >>> get_loss("mape")
    MeanAbsolutePercentageError(reduction='mean')
    """

    aliases = ("mape",)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return abs(y_pred - y_true) * (100 / op.Max(abs(y_true), 1e-7))


@dataclass(frozen=True)
class Quantile(Loss):
    r"""Pinball loss $\max(q d, (q - 1) d)$: smallest where the output is the quantile $q$ of the
    labels (Koenker and Bassett 1978).

    Labels have the output's shape; the loss has the unit of $y$.

    - `quantile` $q$ in (0, 1).
    - `reduction` is as in `Loss`.

    >>> Quantile(0.9)
    Quantile(reduction='mean', quantile=0.9)
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
    r"""Negative log-likelihood of counts $y \ge 0$, without the term that depends on $y$ alone.

    Labels have the output's shape.

    - `log_input=True`: the output is the logarithm of the rate, any number: $e^{\hat y} - y \hat
      y$ (`torch.nn.PoissonNLLLoss`). Above 40 the exponential continues as its tangent.
    - `log_input=False`: the output is the rate: $\hat y - y \log \hat y$ (`keras.losses.Poisson`).
      A rate below 1e-7 counts as 1e-7, and its logarithm continues as its tangent.
    - `reduction` is as in `Loss`.

    >>> Poisson(log_input=False)
    Poisson(reduction='mean', log_input=False)
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
    r"""Negative log-likelihood of a normal distribution, without its constant:
    $\tfrac12 (\log v + (y - \mu)^2 / v)$ (Nix and Weigend 1994; `torch.nn.GaussianNLLLoss`).

    The output's last axis holds the means $\mu$, then as many values for the variances $v$: output
    `(batch, ..., 2k)`, labels and loss `(batch, ..., k)`. Raises SettingError for an output with an
    odd last axis.

    - `log_variance=True`: the values are $\log v$, any number; below -40, $1/v$ continues as its
      tangent.
    - `log_variance=False`: the values are $v$; a variance below 1e-6 counts as 1e-6.
    - `reduction` is as in `Loss`.

    >>> GaussianNLL().target(TensorSpec("y", np.dtype("float32"), ("batch", 6))).shape
    ('batch', 3)
    """

    aliases = ("gaussian_nll", "gaussian_nll_loss")

    log_variance: bool = True

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if y_pred.shape is None:
            return TensorSpec("y_true", y_pred.dtype, None)
        last = y_pred.shape[-1] if len(y_pred.shape) > 1 else 1
        if isinstance(last, int) and last % 2:
            raise SettingError(
                "GaussianNLL needs an output whose last axis has an even size, means followed by"
                f" variances, got {y_pred}."
            )
        half = last // 2 if isinstance(last, int) else None
        return TensorSpec("y_true", y_pred.dtype, (*y_pred.shape[:-1], half))

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        mean, spread = op.Split(y_pred, _outputs=2, axis=-1, num_outputs=2)
        distance = y_true - mean
        if self.log_variance:
            return 0.5 * (spread + distance * distance * _exp(op, -spread))
        variance = op.Max(spread, 1e-6)
        return 0.5 * (op.Log(variance) + distance * distance / variance)

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        """Return the mean of the squared differences of a mean and of its variance."""
        squares = super().distillation_loss(op, y_true, y_pred, y_teacher, temperature)
        of_mean, of_spread = op.Split(squares, _outputs=2, axis=-1, num_outputs=2)
        return 0.5 * (of_mean + of_spread)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        counted = _per_row(op, counts, y_pred.rank)
        # Weights of single means also apply to their variances.
        return op.Concat(counted, counted, axis=-1) if counts.rank == y_pred.rank else counted


# ---------------------------------------------------------------------- two classes, one output


@dataclass(frozen=True)
class Hinge(Loss):
    r"""Hinge loss $\max(0, 1 - y \hat y)$ for labels -1 and 1 (Cortes and Vapnik 1995).

    Labels have the output's shape; `prepare` makes -1 and 1 of 0 and 1. `reduction` is as in
    `Loss`.

    >>> Hinge().prepare([0, 1], TensorSpec("y", np.dtype("float32"), ("batch",))).tolist()
    [-1.0, 1.0]
    """

    aliases = ("hinge_loss",)

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

    >>> get_loss("squared_hinge")
    SquaredHinge(reduction='mean')
    """

    aliases = ("squared_hinge_loss",)

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

    >>> get_loss("bce")
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

    from_logits: bool | None = None
    label_smoothing: float = 0.0
    pos_weight: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "0 <= label_smoothing < 1", self.label_smoothing, lambda v: 0 <= v < 1)
        if is_number(self.pos_weight):
            _require(self, "pos_weight > 0", self.pos_weight, lambda v: v > 0)
        elif self.pos_weight is not None:
            _set_numbers(self, "pos_weight", self.pos_weight, "pos_weight > 0", lambda v: v > 0)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if isinstance(self.pos_weight, tuple) and y_pred.shape is not None:
            _check_length(self, "pos_weight", self.pos_weight, y_pred, len(y_pred.shape) - 1)
        return super().target(y_pred)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        scores = _scores(self, op, y_pred)
        if self.label_smoothing:
            y_true = (1 - self.label_smoothing) * y_true + self.label_smoothing / 2
        positive = y_true
        if self.pos_weight is not None:
            positive = y_true * op.constant(self.pos_weight, y_true.dtype)
        negative = 1 - y_true
        if scores is not None:
            return (positive + negative) * softplus(op, -scores) + negative * scores
        return -(positive * _log(op, y_pred) + negative * _log(op, 1 - y_pred))

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        return _binary_divergence(self, op, y_pred, y_teacher, temperature)


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

    >>> get_loss("tversky")
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
        q = op.Sigmoid(y_pred) if _takes_logits(self, y_pred) else y_pred

        def total(x: Value) -> Value:
            return op.ReduceSum(x, list(range(1, x.rank)), keepdims=0) if x.rank > 1 else x

        both = total(y_true * q) + self.smooth
        wrong = self.alpha * total((1 - y_true) * q) + self.beta * total(y_true * (1 - q))
        return wrong / (both + wrong)  # 1 - both / (both + wrong), without its cancellation

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        return _binary_divergence(self, op, y_pred, y_teacher, temperature)


@dataclass(frozen=True)
class Dice(Tversky):
    r"""One minus the Dice coefficient $\frac{2 \sum y q + 2 s}{\sum y + \sum q + 2 s}$ of a mask
    and probabilities: `Tversky` with $\alpha = \beta = 1/2$.

    `from_logits`, `smooth`, labels and `reduction` are as in `Tversky`.

    >>> get_loss("dice").smooth
    1e-05
    """

    aliases: ClassVar[tuple[str, ...]] = ("dice_loss",)

    alpha: float = field(default=0.5, init=False, repr=False)
    beta: float = field(default=0.5, init=False, repr=False)


@dataclass(frozen=True)
class BinaryCrossEntropyWithLogits(BinaryCrossEntropy):
    r"""Binary cross entropy of raw scores, for any graph: `from_logits` is True.

    The gradient of a score is $q - y$ before the reduction. `label_smoothing`, `pos_weight` and
    `reduction` are as in `BinaryCrossEntropy`.

    >>> get_loss("bce_with_logits").from_logits
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


# ---------------------------------------------------------------------- several classes


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
            _set_numbers(
                self, "class_weights", self.class_weights, "class_weights >= 0", lambda v: v >= 0
            )
        if self.ignore_index is not None:
            check_number(
                self, "ignore_index", at_least=-CLASS_LIMIT, at_most=CLASS_LIMIT - 1, whole=True
            )

    def class_axis(self, rank: int) -> int:
        """Return the axis of the classes, from 1 on, in an output of rank `rank`."""
        return _class_axis(self, self.axis, rank)

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
            _check_length(self, "class_weights", self.class_weights, y_pred, axis)
        return TensorSpec(
            "y_true", np.dtype(np.int64), y_pred.shape[:axis] + y_pred.shape[axis + 1 :]
        )

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        classes: Dim = None
        if y_pred.shape is not None:
            classes = y_pred.shape[self.class_axis(len(y_pred.shape))]
        greatest = classes - 1 if isinstance(classes, int) else math.inf
        return AllowedLabels(0, greatest, ignored=self.ignore_index)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = label_numbers(loss_name(self), y)
        expected = self.target(y_pred)
        if y_pred.shape is not None:
            axis = self.class_axis(len(y_pred.shape))
            if labels.ndim == len(y_pred.shape) and labels.shape[axis] == 1:
                labels = labels.squeeze(axis)
            labels = _align(self, labels, expected, y_pred)
        greatest = self.allowed_labels(y_pred).greatest
        last = None if math.isinf(greatest) else int(greatest)
        expected_labels = "class indices from 0 " + ("on (int64)" if last is None else f"to {last}")
        labels = _whole_numbers(self, labels, expected_labels, y_pred)
        self._refuse_outside(labels, last, expected_labels, y_pred)
        return labels.astype(np.int64, copy=False)

    def _refuse_outside(
        self, labels: Array, last: int | None, expected: str, y_pred: TensorSpec
    ) -> None:
        limit = CLASS_LIMIT if last is None else last + 1
        if not labels.size or (labels.min() >= 0 and labels.max() < limit):
            return
        wrong = (labels < 0) | (labels >= limit)
        if self.ignore_index is not None:
            wrong &= labels != self.ignore_index
        hint = ""
        if wrong.any() and labels[wrong][0] < 0:
            hint = f" To ignore these labels, set ignore_index={labels[wrong][0]}."
        refuse_where(loss_name(self), labels, wrong, expected, y_pred, hint)

    def metric_labels(
        self, y_true: Array, sample_weight: Array | None
    ) -> tuple[Array, Array | None]:
        if self.ignore_index is not None and self.ignore_index >= 0 and y_true.dtype.kind == "i":
            y_true = np.where(y_true == self.ignore_index, -1, y_true)
        return y_true, sample_weight

    def metric_labels_in_graph(
        self, op: GraphBuilder, y_true: Value, sample_weight: Value | None
    ) -> tuple[Value, Value | None]:
        if self.ignore_index is not None and self.ignore_index >= 0 and _is_index(y_true):
            y_true = op.Where(op.Equal(y_true, self.ignore_index), -1, y_true)
        return y_true, sample_weight

    def element_weights(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value | None:
        if not _is_index(y_true):
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
        return _class_divergence(self, op, y_pred, y_teacher, temperature, axis)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        return _per_vector(op, counts, y_pred.rank, self.class_axis(y_pred.rank))

    def pick(self, op: GraphBuilder, values: Value, y_true: Value) -> Value:
        """Return the entries of `values` at the labels `y_true`, along the axis of classes; any
        number for an ignored label. `op` builds the graph.
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
    )

    from_logits: bool | None = field(default=None, kw_only=True)
    label_smoothing: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "0 <= label_smoothing < 1", self.label_smoothing, lambda v: 0 <= v < 1)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = label_numbers(loss_name(self), y)
        if has_shape_of(labels, y_pred):
            kind = "class indices, or probabilities"
            check_range(loss_name(self), labels, 0.0, 1.0, y_pred.dtype, y_pred, kind)
            return labels.astype(y_pred.dtype, copy=False)
        return super().prepare(labels, y_pred)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        axis = self.class_axis(y_pred.rank)
        log_p = _log_probabilities(self, op, y_pred, axis)
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
            # `element_weights` multiplies by the label's weight, and this term has its weights
            # already.
            inverse = [1 / w if w else 0.0 for w in self.class_weights]
            uniform = uniform * self._of_label(op, y_true, inverse, uniform.dtype)
        return (1 - self.label_smoothing) * loss + self.label_smoothing * uniform


@dataclass(frozen=True)
class CausalLM(CrossEntropy):
    r"""Cross entropy of the next token, $-\log p_t(y_{t+1})$: the loss of a causal language model
    (`transformers`' ForCausalLM, `torch.nn.functional.cross_entropy(logits[:, :-1], labels[:,
    1:])`).

    Labels are token ids of shape `(batch, tokens)`, at the positions of the input ids: usually the
    same array. The loss shifts them itself. The last output of a row has no next token and does not
    count. Outputs have shape `(batch, tokens, vocabulary)`. Raises SettingError for another rank.

    - `ignore_index`: labels equal to this, such as padding, do not count. "mean" divides by the
      number of the other labels.
    - `from_logits`, `label_smoothing`, `class_weights`, `axis`, `reduction`: those of
      `CrossEntropy`. The sample weight of a token applies to that token as a label.

    Metrics of the output get the shifted labels: `"accuracy"` is the accuracy of the next tokens.

    >>> loss = CausalLM()
    >>> loss.metric_labels(np.array([[5, 6, -100]]), None)[0].tolist()
    [[6, -100, -100]]
    """

    aliases: ClassVar[tuple[str, ...]] = ("causal_lm", "causal_lm_loss")

    ignore_index: int | None = field(default=-100, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "an ignore_index", self.ignore_index, lambda v: v is not None)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if y_pred.shape is not None and len(y_pred.shape) != 3:
            raise SettingError(
                f"CausalLM needs an output of shape (batch, tokens, vocabulary), got {y_pred}. For"
                " one class per row, use CrossEntropy."
            )
        return super().target(y_pred)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        return ClassLoss.prepare(self, y, y_pred)

    def metric_labels(
        self, y_true: Array, sample_weight: Array | None
    ) -> tuple[Array, Array | None]:
        if sample_weight is not None and sample_weight.ndim > 1:
            weights = sample_weight.reshape(sample_weight.shape[:2])
            sample_weight = np.pad(weights[:, 1:], ((0, 0), (0, 1)))
        fill = self.ignore_index
        assert fill is not None
        moved = np.pad(y_true[:, 1:], ((0, 0), (0, 1)), constant_values=fill)
        return super().metric_labels(moved, sample_weight)

    def metric_labels_in_graph(
        self, op: GraphBuilder, y_true: Value, sample_weight: Value | None
    ) -> tuple[Value, Value | None]:
        if sample_weight is not None and sample_weight.rank == 2:
            sample_weight = self._next(op, sample_weight, 0)
        return super().metric_labels_in_graph(op, self._moved(op, y_true), sample_weight)

    def element_weights(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value | None:
        return super().element_weights(op, self._moved(op, y_true), y_pred)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return super().__call__(op, self._moved(op, y_true), y_pred)

    def _costs(
        self,
        op: GraphBuilder,
        y_true: Value,
        y_pred: Value,
        sample_weight: Value | None,
        soft_targets: SoftTargets | None = None,
    ) -> tuple[Value, Value | None, Value | None]:
        if sample_weight is not None and sample_weight.rank == 2 and y_pred.shape is not None:
            adopt_sizes(sample_weight, y_pred.shape[:2])
            sample_weight = self._next(op, sample_weight, 0)
        return super()._costs(op, y_true, y_pred, sample_weight, soft_targets)

    def _moved(self, op: GraphBuilder, y_true: Value) -> Value:
        assert self.ignore_index is not None
        return self._next(op, y_true, self.ignore_index)

    def _next(self, op: GraphBuilder, of_tokens: Value, fill: float) -> Value:
        """Return the next token's value at each token, and `fill` at the last token.

        Shifting the labels copies less than slicing the outputs.
        """
        later = op.Slice(of_tokens, [1], [MAX], [1])
        last = op.Slice(of_tokens, [0], [1], [1]) * 0 + fill
        moved = op.Concat(later, last, axis=1)
        moved.ir.shape = of_tokens.ir.shape  # inference cannot know this
        return moved


@dataclass(frozen=True)
class CTC(Loss):
    r"""Connectionist temporal classification $-\log \sum_\pi \prod_t p_t(\pi_t)$, the loss of texts
    whose places in the output are unknown (Graves et al. 2006; `torch.nn.CTCLoss`).

    A path $\pi$ has one class for each time step. The sum runs over all paths that read as the
    label: equal neighbors are merged, then blanks are removed. The loss is computed in the log
    domain by one loop over time.

    The output has shape `(batch, time, classes)`, the loss `(batch,)`. Labels are class indices of
    shape `(batch, labels)`. Shorter rows end with padding, and a row of padding is the empty label.

    - `blank`: the class between labels; -1 is the last class. No label may be the blank.
    - `ignore_index`: the padding of labels. It may be the blank, as in Keras.
    - `input_lengths`: True if the first column of the labels is the number of time steps that count
      in the row, and the labels follow; False if all time steps count.
    - `zero_infinity`: True makes the loss of a row without a path 0 instead of infinite. The label
      of this row is too long for its time steps: it needs one for each label, and one more between
      two equal labels. The gradient of the row is 0 in both cases. With False, `prepare` raises
      DataError for this row if it knows the number of time steps.
    - `divide_by_length`: True divides the loss of each row by the number of its labels, or by 1 if
      the label is empty, as the reduction "mean" of `torch.nn.CTCLoss` does.
    - `from_logits`, `reduction`: as in `CrossEntropy`.

    Models whose outputs are `(time, batch, classes)` need a Transpose at the end. Functions of
    `onnxfit.ctc` decode outputs; the metrics `CharacterErrorRate` and `WordErrorRate` count errors.
    If another host runs the graph, which does not call `prepare`, the loss of a row is NaN if a
    label is the blank, if padding comes before a label, or if the input length exceeds the time
    steps.

    >>> spec = TensorSpec("y", np.dtype("float32"), ("batch", 4, 3))
    >>> CTC().prepare([[1, 2], [2, -1]], spec).tolist()
    [[1, 2], [2, -1]]
    """

    aliases: ClassVar[tuple[str, ...]] = ("ctc_loss", "connectionist_temporal_classification")

    blank: int = 0
    ignore_index: int = field(default=-1, kw_only=True)
    input_lengths: bool = field(default=False, kw_only=True)
    zero_infinity: bool = field(default=False, kw_only=True)
    divide_by_length: bool = field(default=False, kw_only=True)
    from_logits: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("blank", -1), ("ignore_index", -CLASS_LIMIT)):
            check_number(self, name, at_least=least, at_most=CLASS_LIMIT - 1, whole=True)

    @property
    def cause_of_infinity(self) -> str:
        if self.zero_infinity:
            return ""
        return (
            "A label may be too long for its time steps: CTC(zero_infinity=True) ignores its row."
        )

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        if y_pred.shape is None:
            return TensorSpec("y_true", np.dtype(np.int64), (None, None))
        if len(y_pred.shape) != 3:
            raise SettingError(
                f"CTC needs an output of shape (batch, time, classes), got {y_pred}. For one class"
                " per row, use CrossEntropy."
            )
        classes = y_pred.shape[2]
        if isinstance(classes, int) and not max(1, self.blank) < classes:
            raise SettingError(
                f"CTC needs the blank and another class, got blank={self.blank} for the {classes}"
                f" classes of output {y_pred}."
            )
        return TensorSpec("y_true", np.dtype(np.int64), (y_pred.shape[0], None))

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        steps, last, blank = self._limits(y_pred)
        if self.input_lengths:
            greatest = math.inf if steps is None or last is None else max(steps, last)
            return AllowedLabels(0, greatest, ignored=self.ignore_index)
        if last is None:
            return AllowedLabels(int(blank == 0), ignored=self.ignore_index)
        classes = [label for label in range(last + 1) if label != blank]
        gap = tuple(map(float, classes)) if classes[-1] - classes[0] == last else None
        return AllowedLabels(classes[0], classes[-1], gap, self.ignore_index)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = _align(self, label_numbers(loss_name(self), y), self.target(y_pred), y_pred)
        steps, last, blank = self._limits(y_pred)
        kind = "class indices from 0 " + ("on (int64)" if last is None else f"to {last}")
        kind += "" if blank is None else f" except the blank {blank}"
        labels = _whole_numbers(self, labels, kind, y_pred).astype(np.int64, copy=False)
        targets: Array = labels
        lengths: Array | int | None = steps
        if self.input_lengths:
            targets, lengths = labels[:, 1:], self._read_lengths(labels[:, :1], steps, y_pred)
        limit = CLASS_LIMIT if last is None else last + 1
        is_label = targets != self.ignore_index
        wrong = is_label & ((targets < 0) | (targets >= limit) | (targets == blank))
        hint = ""
        if wrong.any() and (first := targets[wrong][0]) < limit:
            hint = f" To pad labels with {first}, set ignore_index={first}."
        refuse_where(loss_name(self), targets, wrong, kind, y_pred, hint)
        ended = np.logical_or.accumulate(~is_label, axis=1)
        padding = f"only padding ({self.ignore_index}) after the padding of a row"
        refuse_where(loss_name(self), targets, is_label & ended, padding, y_pred)
        if lengths is not None and not self.zero_infinity:
            self._refuse_without_path(targets, is_label, lengths, y_pred)
        return labels

    def _limits(self, y_pred: TensorSpec) -> tuple[int | None, int | None, int | None]:
        """Return the number of time steps, the last class and the blank; None if unknown."""
        sizes = (None, None) if y_pred.shape is None else y_pred.shape[1:]
        steps, classes = (size if isinstance(size, int) else None for size in sizes)
        last = None if classes is None else classes - 1
        return steps, last, last if self.blank < 0 else self.blank

    def _read_lengths(self, lengths: Array, steps: int | None, y_pred: TensorSpec) -> Array:
        if not lengths.shape[1]:
            raise DataError(
                "CTC(input_lengths=True) needs the number of time steps as the first column of the"
                f" labels for output {y_pred}, got labels without columns."
            )
        most = CLASS_LIMIT - 1 if steps is None else steps
        kind = "input lengths from 0 " + ("on" if steps is None else f"to {steps}")
        refuse_where(loss_name(self), lengths, (lengths < 0) | (lengths > most), kind, y_pred)
        return lengths[:, 0]

    def _refuse_without_path(
        self, targets: Array, is_label: Array, lengths: Array | int, y_pred: TensorSpec
    ) -> None:
        repeats = is_label[:, 1:] & (targets[:, 1:] == targets[:, :-1])
        counts, equal = is_label.sum(axis=1), repeats.sum(axis=1)
        steps = np.broadcast_to(lengths, counts.shape)
        without = counts + equal > steps
        if without.any():
            row = int(without.argmax())
            raise DataError(
                f"CTC needs {counts[row] + equal[row]} time steps for the {counts[row]} labels of"
                f" row {row}, {equal[row]} of which equal the label before, but has {steps[row]} of"
                f" output {y_pred}. Leave out such rows, or set zero_infinity=True to ignore them."
            )

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        lengths, labels = None, y_true
        if self.input_lengths:
            lengths, labels = op.Slice(y_true, [0], [1], [1]), op.Slice(y_true, [1], [MAX], [1])
        is_padding = op.Equal(labels, self.ignore_index)
        counts = op.ReduceSum(op.cast(~is_padding, np.int64), [1], keepdims=1)
        # The first column is the blank, so that column i is the i-th label.
        targets = op.Pad(op.Where(is_padding, self.blank, labels), [0, 1, 0, 0], self.blank)
        log_p = _log_probabilities(self, op, y_pred, 2)
        loss = -self._log_likelihood(op, targets, counts, log_p, lengths)
        has_no_path = loss > -IMPOSSIBLE / 2  # false for NaN
        loss = op.Where(has_no_path, 0 if self.zero_infinity else math.inf, loss)
        if self.divide_by_length:
            loss = loss / op.cast(op.Max(counts, 1), loss.dtype)
        loss = op.Where(self._is_wrong(op, labels, is_padding, log_p, lengths), math.nan, loss)
        return op.cast(op.Squeeze(loss, [1]), y_pred.dtype)

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        """Return the distance of the classes at each time step."""
        return _class_divergence(self, op, y_pred, y_teacher, temperature, 2)

    def _is_wrong(
        self,
        op: GraphBuilder,
        labels: Value,
        is_padding: Value,
        log_p: Value,
        lengths: Value | None,
    ) -> Value:
        """Return whether a row has labels that `prepare` refuses, shape `(batch, 1)`.

        A host that runs the graph without Python checks only the range of labels.
        """
        blank = op.shape(log_p, 2, 3) - 1 if self.blank < 0 else self.blank
        late = op.Slice(is_padding, [0], [-1], [1]) & ~op.Slice(is_padding, [1], [MAX], [1])
        marks = [op.Equal(labels, blank) & ~is_padding, late]
        if lengths is not None:
            marks += [lengths < 0, lengths > op.shape(log_p, 1, 2)]
        return op.ReduceSum(op.cast(op.Concat(*marks, axis=1), np.int64), [1], keepdims=1) > 0

    def _log_likelihood(
        self, op: GraphBuilder, targets: Value, counts: Value, log_p: Value, lengths: Value | None
    ) -> Value:
        """Return the log-probability of each row's label, shape `(batch, 1)`.

        After a step, column i of `blanks` is the log-probability to have read i labels and to stand
        at the blank after them; column i of `labels`, to stand at the i-th label.
        """
        dtype = np.float64 if log_p.dtype == np.float64 else np.float32
        time, columns = op.shape(log_p, 1, 2), op.shape(targets, 1, 2)
        index = op.Expand(op.Unsqueeze(targets, [1]), op.Concat([1], time, [1], axis=0))
        own = op.cast(op.GatherElements(log_p, index, axis=2), dtype)
        own = op.Transpose(op.Max(own, IMPOSSIBLE), perm=[1, 0, 2])
        labels = op.Expand(op.constant(IMPOSSIBLE, dtype), op.Shape(targets))
        never = op.Slice(labels, [0], [1], [1])
        blanks = op.Concat(0 * never, op.Slice(labels, [1], [MAX], [1]), axis=1)
        if lengths is not None:
            # Certain blanks after the last step do not change the probability of the label.
            counted = op.Unsqueeze(op.Range(0, op.Squeeze(time), 1), [1, 2]) < lengths
            own = op.Where(counted, own, blanks)
        # A label follows an equal one only after a blank.
        differs = op.Slice(targets, [1], [MAX], [1]) != op.Slice(targets, [0], [-1], [1])
        differs = op.Pad(differs, [0, 0, 0, 1])
        sizes = op.Concat(columns - 1, [1], axis=0)

        def step(body: GraphBuilder, states: Tensors, slices: Tensors) -> Stepped:
            (blanks, labels), (own, own_blank) = states, slices
            both = _log_add_exp(body, blanks, labels)
            before, _ = body.Split(body.Where(differs, both, blanks), sizes, _outputs=2, axis=1)
            before = body.Concat(never, before, axis=1)
            return (both + own_blank, _log_add_exp(body, labels, before) + own), ()

        slices = [own, op.Slice(own, [0], [1], [2])]
        (blanks, labels), _ = scan_steps(op, step, [blanks, labels], slices)
        blanks, labels = (op.GatherElements(x, counts, axis=1) for x in (blanks, labels))
        return _log_add_exp(op, blanks, labels)


@dataclass(frozen=True)
class NLL(ClassLoss):
    r"""Negative log-likelihood $-\hat y_c$ for class index $c$: the output is log-probabilities, as
    from LogSoftmax (`torch.nn.NLLLoss`).

    `axis`, `class_weights`, `ignore_index` and `reduction` are as in `ClassLoss`.

    >>> get_loss("nll_loss")
    NLL(reduction='mean', axis=None, class_weights=None, ignore_index=None)
    """

    aliases = ("nll_loss", "negative_log_likelihood")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        output = without_mask(y_pred.ir)
        operator = probability_operator(output) or any_number_operator(output)
        if operator not in (None, "LogSoftmax"):
            _warn_once(
                self,
                f"needs log-probabilities, but the model's output comes from a {operator}. Use"
                " CrossEntropy, or end the model with LogSoftmax.",
            )
        return -self.pick(op, _log_scores(op, y_pred), y_true)


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

    Raises SettingError for settings that do not fit the labels.

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
            _require(self, "0 < alpha < 1", self.alpha, lambda v: 0 < v < 1)
        elif self.alpha is not None:
            _set_numbers(self, "alpha", self.alpha, "alpha >= 0", lambda v: v >= 0)

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        # Labels of other outputs may be of either kind. The data decides, unless alpha does.
        if is_number(self.alpha) or (
            y_pred.shape is not None
            and (len(y_pred.shape) < 2 or y_pred.shape[self.class_axis(len(y_pred.shape))] == 1)
        ):
            return TensorSpec("y_true", y_pred.dtype, y_pred.shape)
        if isinstance(self.alpha, tuple) and y_pred.shape is not None:
            _check_length(self, "alpha", self.alpha, y_pred, self.class_axis(len(y_pred.shape)))
        return super().target(y_pred)

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        if self.target(y_pred).dtype.kind == "f":
            return AllowedLabels(0, 1, values=(0, 1))
        return super().allowed_labels(y_pred)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = label_numbers(loss_name(self), y)
        if self.target(y_pred).dtype.kind != "f" and not has_shape_of(labels, y_pred):
            return super().prepare(labels, y_pred)
        labels = _align(self, labels, TensorSpec("y_true", y_pred.dtype, y_pred.shape), y_pred)
        expected = "class indices, or labels 0 and 1 of the output's shape,"
        refuse_where(loss_name(self), labels, (labels != 0) & (labels != 1), expected, y_pred)
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
                "Focal with labels 0 and 1 needs a single number as alpha, without class_weights"
                " and ignore_index."
            )
        scores = _scores(self, op, y_pred)
        if scores is not None:
            s = (2 * y_true - 1) * scores
            loss = softplus(op, -s)  # -log p, and -log(1 - p) is s more
            loss = op.Exp(-self.gamma * (loss + s)) * loss
        else:
            p = y_true * y_pred + (1 - y_true) * (1 - y_pred)
            other = y_true * (1 - y_pred) + (1 - y_true) * y_pred
            loss = -op.Exp(self.gamma * _log(op, other)) * _log(op, p)
        if self.alpha is None:
            return loss
        return loss * (self.alpha * y_true + (1 - self.alpha) * (1 - y_true))

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        if _is_index(y_true):
            return super().distillation_loss(op, y_true, y_pred, y_teacher, temperature)
        return _binary_divergence(self, op, y_pred, y_teacher, temperature)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        if _is_index(y_true):
            return super()._counted_outputs(op, counts, y_true, y_pred)
        return _per_row(op, counts, y_pred.rank)

    def _of_classes(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        if self.alpha is not None and not isinstance(self.alpha, tuple):
            raise SettingError(
                f"Focal with class indices needs one alpha per class, got {self.alpha}."
            )
        log_p = _log_probabilities(self, op, y_pred, self.class_axis(y_pred.rank))
        log_p = self.pick(op, log_p, y_true)
        loss = -op.Exp(self.gamma * _log(op, 1 - op.Exp(log_p))) * log_p
        if self.alpha is None:
            return loss
        return loss * self._of_label(op, y_true, self.alpha, loss.dtype)


@dataclass(frozen=True)
class KLDivergence(Loss):
    r"""Kullback-Leibler divergence $\sum_c y_c (\log y_c - \log p_c)$ over the classes, for labels
    that are probabilities of the output's shape.

    - `from_logits`: False for an output $p$; True for numbers whose softmax is $p$, such as
      log-probabilities (`torch.nn.KLDivLoss`, reduction "batchmean"); None for what the graph
      shows, as the module describes.
    - `axis`: of the classes, as in `CrossEntropy`.
    - `reduction` is as in `Loss`.

    >>> get_loss("kl_div")
    KLDivergence(reduction='mean', from_logits=None, axis=None)
    """

    aliases = ("kl_divergence", "kld", "kl_div", "kullback_leibler_divergence")
    label_range = (0.0, 1.0)
    assumes_logits: ClassVar[bool] = False

    from_logits: bool | None = None
    axis: int | None = None

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        axis = _class_axis(self, self.axis, y_pred.rank)
        log_p = _log_probabilities(self, op, y_pred, axis)
        return op.ReduceSum(y_true * (_log(op, y_true) - log_p), [axis], keepdims=0)

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        axis = _class_axis(self, self.axis, y_pred.rank)
        return _class_divergence(self, op, y_pred, y_teacher, temperature, axis)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        axis = _class_axis(self, self.axis, y_pred.rank)
        return _per_vector(op, counts, y_pred.rank, axis)


@dataclass(frozen=True)
class CosineSimilarity(Loss):
    r"""Negative cosine $-\frac{y \cdot \hat y}{\lVert y \rVert \lVert \hat y \rVert}$, from -1 (the
    same direction) to 1 (`keras.losses.CosineSimilarity`).

    Labels have the output's shape. A norm below 1e-6 counts as 1e-6, so a vector of zeros costs 0.

    - `axis`: the axis of the vectors' components.
    - `reduction` is as in `Loss`.

    >>> get_loss("cosine")
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
        return _per_vector(op, counts, y_pred.rank, self.axis % y_pred.rank)


# losses whose entries depend only on the output at the same position
ELEMENTWISE = (
    MeanSquaredError,
    MeanAbsoluteError,
    Elastic,
    Huber,
    LogCosh,
    MeanSquaredLogarithmicError,
    MeanAbsolutePercentageError,
    Quantile,
    Poisson,
    Hinge,
    SquaredHinge,
    BinaryCrossEntropy,
)


# ---------------------------------------------------------------------- stable formulas


def _per_row(op: GraphBuilder, rows: Value, rank: int) -> Value:
    """Reshape values of rows, or of the first axes, to broadcast to a tensor of this rank."""
    return op.Unsqueeze(rows, list(range(rows.rank, rank))) if rank > rows.rank else rows


def _per_vector(op: GraphBuilder, entries: Value, rank: int, axis: int) -> Value:
    """Reshape values of a tensor's first axes, without `axis`, to broadcast to a tensor of this
    rank that has `axis`.
    """
    if entries.rank == 1:
        return _per_row(op, entries, rank)
    return op.Unsqueeze(_per_row(op, entries, rank - 1), [axis])


def _shape(value: Value) -> str:
    sizes = ["?" if size is None else str(size) for size in value.shape or ()]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def _exp(op: GraphBuilder, x: Value) -> Value:
    """e^x, and its tangent beyond `GREATEST_EXPONENT`."""
    near = op.Min(x, GREATEST_EXPONENT)
    return op.Exp(near) * (1 + (x - near))


def _log(op: GraphBuilder, p: Value) -> Value:
    """The logarithm of a probability, at least log(`LEAST_PROBABILITY`)."""
    return op.Log(op.Clip(p, LEAST_PROBABILITY, 1))


def _log_add_exp(op: GraphBuilder, a: Value, b: Value) -> Value:
    """log(e^a + e^b). The result does not depend on the larger exponent that is taken out."""
    larger = op.stop_gradient(op.Max(a, b))
    return larger + op.Log(op.Exp(a - larger) + op.Exp(b - larger))


def _masked(op: GraphBuilder, counts: Value, y_pred: Value) -> Value:
    """The output, with 0 where `counts` is false; `_of_source` finds the output again."""
    masked = op.Where(counts, y_pred, 0)
    node = masked.ir.producer()
    assert node is not None
    node.meta[MASK] = True
    return masked


def _of_source(op: GraphBuilder, y_pred: Value, find: Source) -> Value | None:
    """Return the result of `find` for the output of the model, masked as the output is."""
    node = y_pred.ir.producer()
    if node is None or MASK not in node.meta:
        return find(op, y_pred.ir)
    counts, output = node.inputs[:2]
    found = find(op, output)
    if found is None or counts is None:
        return found
    return op.Where(op.wrap(counts), found, 0)


def _scores(loss: Any, op: GraphBuilder, y_pred: Value) -> Value | None:
    """The scores whose sigmoid is a probability: the output itself, or the input of the Sigmoid
    that computes it; None for probabilities of another origin.
    """
    return y_pred if _takes_logits(loss, y_pred) else _of_source(op, y_pred, logits_of)


def _log_scores(op: GraphBuilder, y_pred: Value) -> Value:
    """An output of scores. A log-softmax that the graph spells is computed from its own scores: the
    logarithm of a Softmax is infinite where the Softmax is rounded to 0.
    """
    found = _of_source(op, y_pred, log_softmax_of)
    return y_pred if found is None else found


def _logs(op: GraphBuilder, p: Value) -> Value:
    """The logarithms of probabilities, from the input of the Softmax or Sigmoid if there is one."""
    logs = _of_source(op, p, log_probabilities_of)
    # A masked class has the logarithm -inf, and 0 times infinity is NaN.
    return _log(op, p) if logs is None else op.Max(logs, LEAST_LOGARITHM)


def _log_probabilities(loss: Any, op: GraphBuilder, y_pred: Value, axis: int) -> Value:
    """The log-probabilities of an output, for a loss with `from_logits`."""
    if _takes_logits(loss, y_pred):
        return log_softmax(op, _log_scores(op, y_pred), axis)
    return _logs(op, y_pred)


def _class_divergence(
    loss: Loss,
    op: GraphBuilder,
    y_pred: Value,
    y_teacher: Value,
    temperature: float,
    axis: int,
) -> Value:
    """T^2 KL(q || p) over the classes of `axis`, as `Loss.distillation_loss` says."""
    of_output, of_teacher = _take_logits(loss, y_pred, y_teacher)
    scores = y_pred if of_output else _logs(op, y_pred)
    teacher_scores = y_teacher if of_teacher else _logs(op, y_teacher)
    log_p = log_softmax(op, scores / temperature, axis)
    log_q = log_softmax(op, teacher_scores / temperature, axis)
    # A class that the teacher masks has the logarithm -inf, and 0 times infinity is NaN.
    distance = op.Max(log_q, math.log(LEAST_PROBABILITY)) - log_p
    return temperature**2 * op.ReduceSum(op.Exp(log_q) * distance, [axis], keepdims=0)


def _binary_divergence(
    loss: Loss, op: GraphBuilder, y_pred: Value, y_teacher: Value, temperature: float
) -> Value:
    """T^2 KL(q || p) of each element, as `Loss.distillation_loss` says."""
    of_output, of_teacher = _take_logits(loss, y_pred, y_teacher)

    def score(y: Value, is_logit: bool) -> Value:
        logits = y if is_logit else _of_source(op, y, logits_of)
        return (_log(op, y) - _log(op, 1 - y) if logits is None else logits) / temperature

    s, t = score(y_pred, of_output), score(y_teacher, of_teacher)
    # -log p is softplus(-s), and -log(1 - p) is -log p + s; the same holds for t and q
    distance = softplus(op, -s) - softplus(op, -t) + op.Sigmoid(-t) * (s - t)
    return temperature**2 * distance


def _take_logits(loss: Loss, y_pred: Value, y_teacher: Value) -> tuple[bool, bool]:
    """Whether the output and the teacher's output are logits.

    A loss without `from_logits` reads logits or log-probabilities, which are also logits. For the
    teacher's output, the teacher's graph decides; if it cannot, the decision for the output holds.
    """
    setting = getattr(loss, "from_logits", True)
    logits = decide_logits(setting, without_mask(y_pred.ir), loss.assumes_logits).logits
    return logits, decide_logits(None, y_teacher.ir, logits).logits


def _takes_logits(loss: Any, y_pred: Value) -> bool:
    """Whether a loss with `from_logits` reads the output as logits; warn if the node that computes
    the output contradicts that.
    """
    output = without_mask(y_pred.ir)
    logits = decide_logits(loss.from_logits, output, loss.assumes_logits).logits
    producer = output.producer()
    op_type = None if producer is None or producer.domain else producer.op_type
    operator = probability_operator(output)
    if logits and operator:
        text = (
            f"expects logits, but the model's output comes from a {operator}. Set"
            f" from_logits=False, or train the model without the {operator}."
        )
    elif not (logits or operator) and op_type in ("Add", "Conv", "Gemm", "MatMul"):
        text = (
            f"expects probabilities, but the model's output comes from a {op_type}, whose result"
            " may be any number. Set from_logits=True."
        )
    else:
        return logits
    _warn_once(loss, text, f"(from_logits={logits})")
    return logits


def _warn_once(loss: Loss, text: str, setting: str = "") -> None:
    """Warn of an output that does not suit its loss.

    One object warns once: a Trainer builds several graphs, but has its own object.
    """
    if not vars(loss).get("_has_warned"):
        object.__setattr__(loss, "_has_warned", True)
        warn_user(f"{type(loss).__name__}{setting} {text}")


# ---------------------------------------------------------------------- labels and settings


def loss_name(loss: Loss) -> str:
    """Return the name of a loss for messages: that of its class, or of its function."""
    if isinstance(loss, (Function, Joint)) and loss.function is not None:
        return getattr(loss.function, "__name__", repr(loss.function))
    return type(loss).__name__


def _is_index(y_true: Value) -> bool:
    return y_true.dtype.kind in "iu"


def _align(loss: Loss, labels: Array, expected: TensorSpec, y_pred: TensorSpec) -> Array:
    return align(loss_name(loss), labels, expected, y_pred, _shape_hint(loss, labels, y_pred))


def _shape_hint(loss: Loss, labels: Array, y_pred: TensorSpec) -> str:
    shape = y_pred.shape or ()
    if (
        isinstance(loss, ClassLoss)
        and loss.axis is None
        and len(shape) == 3
        and labels.shape[1:] == shape[2:]
    ):
        return " If the classes are on axis 1, set axis=1."
    if isinstance(loss, Focal) and is_number(loss.alpha) and labels.ndim == len(shape) - 1:
        return f" With class indices, alpha is one number per class, got {loss.alpha}."
    if isinstance(loss, BinaryCrossEntropy) and len(shape) == 2 and labels.ndim == 1:
        return " If each row has one of several classes, use CrossEntropy."
    return ""


def _whole_numbers(loss: Loss, labels: Array, expected: str, y_pred: TensorSpec) -> Array:
    """Return labels as integers. Raises DataError for floats that are not whole numbers."""
    if labels.dtype.kind != "f":
        return labels
    labels = labels.astype(np.float64, copy=False)  # the limit is infinite in float16
    with np.errstate(invalid="ignore"):  # NaN and infinity are rejected below
        whole = labels.astype(np.int64)
    # A float beyond the range becomes another integer on each kind of processor.
    wrong = (whole != labels) | (labels >= CLASS_LIMIT)
    refuse_where(loss_name(loss), labels, wrong, expected, y_pred)
    return whole


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


def _class_axis(loss: Loss, axis: int | None, rank: int) -> int:
    chosen = axis
    if chosen is None:
        chosen = 1 if rank >= 4 else -1
    if isinstance(chosen, bool) or not isinstance(chosen, (int, np.integer)):
        raise SettingError(
            f"{type(loss).__name__} needs a whole number as axis, got {shortened(axis)}."
        )
    if rank < 2 or not -rank < chosen < rank or chosen == 0:
        setting = "" if axis is None else f" and axis={axis}"
        raise SettingError(
            f"{type(loss).__name__} needs an output with a batch axis and a class axis, got rank"
            f" {rank}{setting}."
        )
    return chosen % rank


def _require(loss: Loss, expected: str, value: Any, holds: Callable[[Any], bool]) -> None:
    if not (is_number(value) and is_finite(value) and holds(value)):
        raise SettingError(f"{type(loss).__name__} needs {expected}, got {shortened(value)}.")


def _set_numbers(
    loss: Loss, name: str, values: Any, expected: str, holds: Callable[[Any], bool]
) -> None:
    """Convert a setting with one number per class to a tuple of floats, which can be compared and
    stored as JSON.
    """
    try:
        numbers = tuple(float(v) for v in values)
    except (TypeError, ValueError, OverflowError):
        raise SettingError(
            f"{type(loss).__name__} needs a sequence of numbers as {name}, got {shortened(values)}."
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
            f"{type(loss).__name__} needs {size} numbers as {name}, one for each entry of axis"
            f" {axis} of {y_pred}, got {len(values)}."
        )
