"""The base class of losses: the mean, weights, masks and labels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.checks import ChecksArguments
from onnxfit.errors import SettingError
from onnxfit.graph import names
from onnxfit.graph.labels import AllowedLabels, adopt_sizes, align, check_range, label_numbers
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.outputs import masked, per_row, shape_text

__all__ = ["Loss"]

Array = npt.NDArray[Any]
NO_WEIGHTS: Mapping[str, Value] = {}


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
    A row or entry of weight 0 has no influence, even if its loss is NaN or infinite. SettingError:
    `reduction` has another value.

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
    # Whether the output predicts the labels, so that a metric can compare the two.
    predicts_labels: ClassVar[bool] = True
    # Whether an entry of the loss depends only on the output at the same position.
    elementwise: ClassVar[bool] = False

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
        model's output. The tensors of `initial_weights` are further parameters, by name.
        """

    def initial_weights(self, y_pred: Any, random: np.random.Generator) -> Mapping[str, Any]:
        """Return the first values of the tensors that the loss trains, by name: by default none.

        They train like the weights of the model, as `loss/NAME`, or `loss/OUTPUT/NAME` beside
        other losses. No exported model contains them.

        - `y_pred`: the output; for a Joint, the list of all that it reads.
        - `random`: draws random values, which the trainer's seed decides.
        """
        return {}

    @property
    def has_weights(self) -> bool:
        """Whether the loss trains tensors of its own."""
        return type(self).initial_weights is not Loss.initial_weights

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

        DataError: labels and output do not fit, or a label is NaN, infinite or out of range. The
        error names the first wrong row.

        >>> from onnxfit.losses import MeanSquaredError
        >>> spec = TensorSpec("y", np.dtype("float32"), ("batch", 1))
        >>> MeanSquaredError().prepare([1, 2], spec).tolist()
        [[1.0], [2.0]]
        """
        expected = self.target(y_pred)
        labels = self._align(label_numbers(loss_name(self), y), expected, y_pred)
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

    def _align(self, labels: Array, expected: TensorSpec, y_pred: TensorSpec) -> Array:
        return align(loss_name(self), labels, expected, y_pred, self._shape_hint(labels, y_pred))

    def _shape_hint(self, labels: Array, y_pred: TensorSpec) -> str:
        """Advice for the error about labels whose shape does not fit; "" without any."""
        return ""

    def _name_in_messages(self) -> str:
        return type(self).__name__

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
        weights: Mapping[str, Value] = NO_WEIGHTS,
    ) -> tuple[Value, Value | None]:
        r"""Return the scalar loss of a batch, and its divisor: None if that is the number of
        entries.

        `op`, `y_true` and `y_pred` are those of the call; `sample_weight` has shape `(batch,)`, or
        the first axes of the loss: `(batch, tokens)` for a loss of that shape. An input of labels
        or weights whose sizes are unknown gets the output's. With `soft_targets` an entry of the
        loss is $(1 - a) \ell + a d$, where $d$ is the result of `distillation_loss`; all weights
        apply to it as to $\ell$. `weights` are the tensors of `initial_weights`.
        """
        costs = self._costs(op, y_true, y_pred, sample_weight, soft_targets, weights)
        return self._reduced(op, *costs)

    def _costs(
        self,
        op: GraphBuilder,
        y_true: Value,
        y_pred: Value,
        sample_weight: Value | None,
        soft_targets: SoftTargets | None = None,
        own: Mapping[str, Value] = NO_WEIGHTS,
    ) -> tuple[Value, Value | None, Value | None]:
        """The cost of each entry, all weights applied; the element weights; and the element weights
        times the sample weights. `own` are the tensors that the loss trains.
        """
        self._adopt_sizes(y_true, y_pred)
        if sample_weight is None:
            loss = self._entries(op, y_true, y_pred, soft_targets, own)
            if loss.rank == 0:
                return loss, None, None
            elements = self.element_weights(op, y_true, y_pred)
            return loss if elements is None else loss * elements, elements, elements
        self._adopt_rows(sample_weight, y_pred)
        # 0 times infinity is NaN. An entry of weight 0 is masked at both ends, so neither its cost
        # nor its gradient reaches other entries, even if they are not finite.
        counts = op.cast(sample_weight, np.bool_)
        y_pred = self._without_weightless(op, counts, y_true, y_pred)
        loss = self._entries(op, y_true, y_pred, soft_targets, own)
        if loss.rank == 0:
            raise SettingError(
                f"{loss_name(self)} returns one number per batch, which sample weights cannot scale"
                " by row. Return one value per sample."
            )
        self._fit_weights(sample_weight, loss)
        elements = self.element_weights(op, y_true, y_pred)
        weights = per_row(op, op.cast(sample_weight, loss.dtype), loss.rank)
        if elements is not None:
            weights = weights * elements
        costs = op.Where(per_row(op, counts, loss.rank), loss * weights, 0)
        return costs, elements, weights

    def _entries(
        self,
        op: GraphBuilder,
        y_true: Value,
        y_pred: Value,
        soft_targets: SoftTargets | None,
        own: Mapping[str, Any],
    ) -> Value:
        """The loss per sample or element, combined with `soft_targets`."""
        loss = self(op, y_true, y_pred, **own)
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
        if counts.rank > 1 and not self.elementwise:
            # An entry may depend on all outputs of its row.
            numbers = op.cast(counts, y_pred.dtype)
            rows = op.ReduceMax(numbers, list(range(1, counts.rank)), keepdims=0)
            counts = op.cast(rows, np.bool_)
        return per_row(op, counts, y_pred.rank)

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
        return masked(op, self._counted_outputs(op, counts, y_true, y_pred), y_pred)

    def _fit_weights(self, sample_weight: Value, loss: Value) -> None:
        """Give weights of entries the sizes of the loss. SettingError: the weights do not fit."""
        rank = sample_weight.rank
        sizes = None if loss.shape is None else loss.shape[:rank]
        known = zip(sample_weight.shape or (), sizes or ())
        if rank > loss.rank or any(
            isinstance(w, int) and isinstance(size, int) and w != size for w, size in known
        ):
            raise SettingError(
                f"{loss_name(self)} returns a loss of shape {shape_text(loss)}, but sample_weight"
                f" has shape {shape_text(sample_weight)}. Pass one weight for each row, or for each"
                " entry of the loss."
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

        >>> from onnxfit.losses import MeanSquaredError
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
        first = self.initial_weights(spec, np.random.default_rng(0))
        own = {name: op.input(name, dtype, np.shape(array)) for name, array in first.items()}
        costs = self._costs(op, y_true, y_pred, weights, own=own)
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


def loss_name(loss: Loss) -> str:
    """Return the name of a loss for messages: that of its class, or of its function."""
    return loss._name_in_messages()
