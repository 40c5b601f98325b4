"""Outputs as the formulas read them: scores, probabilities and their logarithms, all finite."""

from __future__ import annotations

import math
from typing import Any

from onnxfit.errors import warn_user
from onnxfit.graph.logarithms import (
    Source,
    log_probabilities_of,
    log_softmax,
    log_softmax_of,
    logits_of,
    softplus,
)
from onnxfit.graph.probabilities import decide_logits, probability_operator, without_mask
from onnxfit.graph.values import GraphBuilder, Value

# Smaller probabilities are raised to this before the logarithm. log is then -69, and its slope
# still fits float32.
LEAST_PROBABILITY = 1e-30
# Logarithms that are computed without the probability are raised to this. Models mask with it.
LEAST_LOGARITHM = -1e4
GREATEST_EXPONENT = 40.0
MASK = "onnxfit: outputs that count"  # note of the node that masks outputs


def per_row(op: GraphBuilder, rows: Value, rank: int) -> Value:
    """Reshape values of rows, or of the first axes, to broadcast to a tensor of this rank."""
    return op.Unsqueeze(rows, list(range(rows.rank, rank))) if rank > rows.rank else rows


def per_vector(op: GraphBuilder, entries: Value, rank: int, axis: int) -> Value:
    """Reshape values of a tensor's first axes, without `axis`, to broadcast to a tensor of this
    rank that has `axis`.
    """
    if entries.rank == 1:
        return per_row(op, entries, rank)
    return op.Unsqueeze(per_row(op, entries, rank - 1), [axis])


def shape_text(value: Value) -> str:
    """Return the shape of a value for a message, with "?" for unknown sizes."""
    sizes = ["?" if size is None else str(size) for size in value.shape or ()]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def bounded_exp(op: GraphBuilder, x: Value) -> Value:
    """e^x, and its tangent beyond `GREATEST_EXPONENT`."""
    near = op.Min(x, GREATEST_EXPONENT)
    return op.Exp(near) * (1 + (x - near))


def safe_log(op: GraphBuilder, p: Value) -> Value:
    """The logarithm of a probability, at least log(`LEAST_PROBABILITY`)."""
    return op.Log(op.Clip(p, LEAST_PROBABILITY, 1))


def dot(op: GraphBuilder, a: Value, b: Value) -> Value:
    """The products of vectors in the last axis."""
    return op.ReduceSum(a * b, [-1], keepdims=0)


def length(op: GraphBuilder, a: Value) -> Value:
    """The norms of vectors in the last axis, at least 1e-6, where they have no slope."""
    return op.Sqrt(op.Max(dot(op, a, a), 1e-12))


def unit(op: GraphBuilder, a: Value) -> Value:
    """Vectors in the last axis divided by their norms, which are at least 1e-12."""
    return a / op.Sqrt(op.Max(op.ReduceSum(a * a, [-1], keepdims=1), 1e-24))


def log_sum_exp(op: GraphBuilder, x: Value, axis: int) -> Value:
    """log of the sum of e^x along an axis, which stays as an axis of size 1."""
    greatest = op.stop_gradient(op.ReduceMax(x, [axis], keepdims=1))
    return greatest + op.Log(op.ReduceSum(op.Exp(x - greatest), [axis], keepdims=1))


def masked(op: GraphBuilder, counts: Value, y_pred: Value) -> Value:
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


def scores_of(loss: Any, op: GraphBuilder, y_pred: Value) -> Value | None:
    """The scores whose sigmoid is a probability: the output itself, or the input of the Sigmoid
    that computes it; None for probabilities of another origin.
    """
    return y_pred if takes_logits(loss, y_pred) else _of_source(op, y_pred, logits_of)


def log_scores(op: GraphBuilder, y_pred: Value) -> Value:
    """An output of scores. A log-softmax that the graph spells is computed from its own scores: the
    logarithm of a Softmax is infinite where the Softmax is rounded to 0.
    """
    found = _of_source(op, y_pred, log_softmax_of)
    return y_pred if found is None else found


def _logs(op: GraphBuilder, p: Value) -> Value:
    """The logarithms of probabilities, from the input of the Softmax or Sigmoid if there is one."""
    logs = _of_source(op, p, log_probabilities_of)
    # A masked class has the logarithm -inf, and 0 times infinity is NaN.
    return safe_log(op, p) if logs is None else op.Max(logs, LEAST_LOGARITHM)


def log_probabilities(loss: Any, op: GraphBuilder, y_pred: Value, axis: int) -> Value:
    """The log-probabilities of an output, for a loss with `from_logits`."""
    if takes_logits(loss, y_pred):
        return log_softmax(op, log_scores(op, y_pred), axis)
    return _logs(op, y_pred)


def class_divergence(
    loss: Any,
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


def binary_divergence(
    loss: Any, op: GraphBuilder, y_pred: Value, y_teacher: Value, temperature: float
) -> Value:
    """T^2 KL(q || p) of each element, as `Loss.distillation_loss` says."""
    of_output, of_teacher = _take_logits(loss, y_pred, y_teacher)

    def score(y: Value, is_logit: bool) -> Value:
        logits = y if is_logit else _of_source(op, y, logits_of)
        return (safe_log(op, y) - safe_log(op, 1 - y) if logits is None else logits) / temperature

    s, t = score(y_pred, of_output), score(y_teacher, of_teacher)
    # -log p is softplus(-s), and -log(1 - p) is -log p + s; the same holds for t and q
    distance = softplus(op, -s) - softplus(op, -t) + op.Sigmoid(-t) * (s - t)
    return temperature**2 * distance


def _take_logits(loss: Any, y_pred: Value, y_teacher: Value) -> tuple[bool, bool]:
    """Whether the output and the teacher's output are logits.

    A loss without `from_logits` reads logits or log-probabilities, which are also logits. For the
    teacher's output, the teacher's graph decides; if it cannot, the decision for the output holds.
    """
    setting = getattr(loss, "from_logits", True)
    logits = decide_logits(setting, without_mask(y_pred.ir), loss.assumes_logits).logits
    return logits, decide_logits(None, y_teacher.ir, logits).logits


def takes_logits(loss: Any, y_pred: Value) -> bool:
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
    warn_once(loss, text, f"(from_logits={logits})")
    return logits


def warn_once(loss: Any, text: str, setting: str = "") -> None:
    """Warn of an output that does not suit its loss.

    One object warns once: a Trainer builds several graphs, but has its own object.
    """
    if not vars(loss).get("_has_warned"):
        vars(loss)["_has_warned"] = True
        warn_user(f"{type(loss).__name__}{setting} {text}")
