"""Losses of sequences of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from onnxfit.checks import check_number
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.labels import AllowedLabels, adopt_sizes, label_numbers, refuse_where
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.steps import Stepped, Tensors, scan_steps
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import NO_WEIGHTS, Loss, SoftTargets, loss_name
from onnxfit.losses.checks import CLASS_LIMIT, require, whole_numbers
from onnxfit.losses.classification import ClassLoss, CrossEntropy
from onnxfit.losses.outputs import class_divergence, log_probabilities

__all__ = ["CTC", "CausalLM"]

Array = npt.NDArray[Any]
IMPOSSIBLE = -1e30  # stands for log 0: sums and differences of it are no NaN
MAX = np.iinfo(np.int64).max  # the end of an axis


@dataclass(frozen=True)
class CausalLM(CrossEntropy):
    r"""Cross entropy of the next token, $-\log p_t(y_{t+1})$: the loss of a causal language model
    (`transformers`' ForCausalLM, `torch.nn.functional.cross_entropy(logits[:, :-1], labels[:,
    1:])`).

    Labels are token ids of shape `(batch, tokens)`, at the positions of the input ids: usually the
    same array. The loss shifts them itself. The last output of a row has no next token and does not
    count. Outputs have shape `(batch, tokens, vocabulary)`. SettingError: the outputs have another
    rank.

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
        require(self, "an ignore_index", self.ignore_index, lambda v: v is not None)

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
        own: Mapping[str, Value] = NO_WEIGHTS,
    ) -> tuple[Value, Value | None, Value | None]:
        if sample_weight is not None and sample_weight.rank == 2 and y_pred.shape is not None:
            adopt_sizes(sample_weight, y_pred.shape[:2])
            sample_weight = self._next(op, sample_weight, 0)
        return super()._costs(op, y_true, y_pred, sample_weight, soft_targets, own)

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
        for name, minimum in (("blank", -1), ("ignore_index", -CLASS_LIMIT)):
            check_number(self, name, at_least=minimum, at_most=CLASS_LIMIT - 1, whole=True)

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
            maximum = math.inf if steps is None or last is None else max(steps, last)
            return AllowedLabels(0, maximum, ignored=self.ignore_index)
        if last is None:
            return AllowedLabels(int(blank == 0), ignored=self.ignore_index)
        classes = [label for label in range(last + 1) if label != blank]
        gap = tuple(map(float, classes)) if classes[-1] - classes[0] == last else None
        return AllowedLabels(classes[0], classes[-1], gap, self.ignore_index)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = self._align(label_numbers(loss_name(self), y), self.target(y_pred), y_pred)
        steps, last, blank = self._limits(y_pred)
        kind = "class indices from 0 " + ("on (int64)" if last is None else f"to {last}")
        kind += "" if blank is None else f" except the blank {blank}"
        labels = whole_numbers(self, labels, kind, y_pred).astype(np.int64, copy=False)
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
        maximum = CLASS_LIMIT - 1 if steps is None else steps
        kind = "input lengths from 0 " + ("on" if steps is None else f"to {steps}")
        refuse_where(loss_name(self), lengths, (lengths < 0) | (lengths > maximum), kind, y_pred)
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
        log_p = log_probabilities(self, op, y_pred, 2)
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
        return class_divergence(self, op, y_pred, y_teacher, temperature, 2)

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


def _log_add_exp(op: GraphBuilder, a: Value, b: Value) -> Value:
    """log(e^a + e^b). The result does not depend on the larger exponent that is taken out."""
    larger = op.stop_gradient(op.Max(a, b))
    return larger + op.Log(op.Exp(a - larger) + op.Exp(b - larger))
