"""Distances of distributions over classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from onnxfit.checks import check_number
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss
from onnxfit.losses.checks import class_axis
from onnxfit.losses.outputs import (
    LEAST_LOGARITHM,
    class_divergence,
    log_probabilities,
    per_vector,
    safe_log,
    takes_logits,
)

__all__ = ["DistillationKL", "JensenShannon", "KLDivergence"]


@dataclass(frozen=True)
class KLDivergence(Loss):
    r"""Kullback-Leibler divergence $\sum_c y_c (\log y_c - \log p_c)$ over the classes, for labels
    that are probabilities of the output's shape.

    - `from_logits`: False for an output $p$; True for numbers whose softmax is $p$, such as
      log-probabilities (`torch.nn.KLDivLoss`, reduction "batchmean"); None for what the graph
      shows, as the module describes.
    - `axis`: of the classes, as in `CrossEntropy`.
    - `reduction` is as in `Loss`.

    >>> KLDivergence()
    KLDivergence(reduction='mean', from_logits=None, axis=None)
    """

    aliases: ClassVar[tuple[str, ...]] = (
        "kl_divergence",
        "kld",
        "kl_div",
        "kullback_leibler_divergence",
    )
    label_range = (0.0, 1.0)
    assumes_logits: ClassVar[bool] = False

    from_logits: bool | None = None
    axis: int | None = None

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        axis = class_axis(self, self.axis, y_pred.rank)
        log_p = log_probabilities(self, op, y_pred, axis)
        return op.ReduceSum(y_true * (safe_log(op, y_true) - log_p), [axis], keepdims=0)

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        axis = class_axis(self, self.axis, y_pred.rank)
        return class_divergence(self, op, y_pred, y_teacher, temperature, axis)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        axis = class_axis(self, self.axis, y_pred.rank)
        return per_vector(op, counts, y_pred.rank, axis)


@dataclass(frozen=True)
class JensenShannon(KLDivergence):
    r"""Jensen-Shannon divergence $\tfrac12 \mathrm{KL}(y \Vert m) + \tfrac12 \mathrm{KL}(p \Vert
    m)$ with $m = (y + p) / 2$ over the classes, at most $\log 2$ (Lin 1991).

    Labels, `from_logits`, `axis` and `reduction` are as in `KLDivergence`.

    >>> JensenShannon()
    JensenShannon(reduction='mean', from_logits=None, axis=None)
    """

    aliases: ClassVar[tuple[str, ...]] = ("jensen_shannon_divergence", "js_divergence", "jsd")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        axis = class_axis(self, self.axis, y_pred.rank)
        log_p = op.Max(log_probabilities(self, op, y_pred, axis), LEAST_LOGARITHM)
        p = op.Exp(log_p)
        log_mean = safe_log(op, (y_true + p) / 2)
        of_label = y_true * (safe_log(op, y_true) - log_mean)
        return op.ReduceSum(of_label + p * (log_p - log_mean), [axis], keepdims=0) / 2


@dataclass(frozen=True)
class DistillationKL(Loss):
    r"""Divergence $T^2\,\mathrm{KL}(q \Vert p)$ from the outputs of a teacher, which are the
    labels: $q$ and $p$ are the predictions of the teacher and the model at the temperature $T$
    (Hinton, Vinyals, Dean 2015, arXiv:1503.02531).

    Labels have the output's shape and are of its kind: logits, which are divided by $T$ before the
    softmax, or probabilities, whose logarithms are.

    - `temperature` $T > 0$.
    - `from_logits`, `axis`: as in `CrossEntropy`.
    - `reduction` is as in `Loss`.

    >>> DistillationKL(temperature=4.0).temperature
    4.0
    """

    aliases = ("distillation", "kd_loss", "knowledge_distillation")

    temperature: float = 2.0
    from_logits: bool | None = field(default=None, kw_only=True)
    axis: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "temperature", above=0)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        takes_logits(self, y_pred)  # warns of an output that contradicts the setting
        axis = class_axis(self, self.axis, y_pred.rank)
        return class_divergence(self, op, y_pred, y_true, self.temperature, axis)

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        axis = class_axis(self, self.axis, y_pred.rank)
        return class_divergence(self, op, y_pred, y_teacher, temperature, axis)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        axis = class_axis(self, self.axis, y_pred.rank)
        return per_vector(op, counts, y_pred.rank, axis)
