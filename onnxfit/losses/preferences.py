"""Losses of preferences between two answers of a language model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from onnxfit.checks import check_number
from onnxfit.graph.logarithms import softplus
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.functions import JointFormula, require_names

__all__ = ["DPO", "ORPO"]

LEAST_REST = 1e-12  # of 1 - p: a certain answer has finite odds


@dataclass(frozen=True)
class DPO(JointFormula):
    r"""Direct preference optimization, $-\log \sigma(\beta ((w - w_0) - (l - l_0)))$ of the
    log-probabilities $w$ and $l$ of a chosen and a rejected answer, and of those of a reference
    model, $w_0$ and $l_0$ (Rafailov et al. 2023, arXiv:2305.18290).

    Labels are $w_0$ and $l_0$, an array of shape `(batch, 2)`; the reference model computes them
    once, before the training.

    - `outputs`: the names of the outputs with $w$ and $l$, each of shape `(batch,)`: the sums of
      the log-probabilities of an answer's tokens. `inputs` and `values` as in `Joint`, two names in
      all.
    - `beta`: $\beta > 0$.
    - `label_smoothing` $a$ in [0, 0.5): the share of preferences that are assumed to be wrong; they
      count with the answers exchanged (Mitchell 2023).
    - `reduction` is as in `Loss`.

    SettingError: there are not two names.

    >>> DPO(["chosen", "rejected"]).beta
    0.1
    """

    named = False

    labels: Any = field(default="double[b, 2]", init=False, repr=False)
    beta: float = field(default=0.1, kw_only=True)
    label_smoothing: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "beta", above=0)
        check_number(self, "label_smoothing", at_least=0, below=0.5)

    def _check_function(self) -> None:
        require_names(self, len(self.read) == 2, "the outputs of a chosen and a rejected answer")

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        chosen, rejected = y_pred
        of_reference = op.Split(y_true, _outputs=2, axis=1, num_outputs=2)
        first, second = (op.cast(op.Squeeze(x, [1]), chosen.dtype) for x in of_reference)
        gap = self.beta * ((chosen - first) - (rejected - second))
        cost = softplus(op, -gap)
        if not self.label_smoothing:
            return cost
        return (1 - self.label_smoothing) * cost + self.label_smoothing * softplus(op, gap)


@dataclass(frozen=True)
class ORPO(JointFormula):
    r"""Odds ratio preference optimization, $-w - \lambda \log \sigma(o(w) - o(l))$ with the
    log-odds $o(x) = x - \log(1 - e^x)$ of the mean log-probabilities $w$ and $l$ of a chosen and a
    rejected answer (Hong, Lee, Thorne 2024, arXiv:2403.07691). It needs no reference model and no
    labels.

    - `outputs`: the names of the outputs with $w$ and $l$, each of shape `(batch,)`: the means of
      the log-probabilities of an answer's tokens. `inputs` and `values` as in `Joint`, two names in
      all.
    - `weight`: $\lambda \ge 0$.
    - `reduction` is as in `Loss`.

    SettingError: there are not two names.

    >>> ORPO(["chosen", "rejected"]).weight
    0.1
    """

    named = False

    weight: float = field(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "weight", at_least=0)

    def _check_function(self) -> None:
        require_names(self, len(self.read) == 2, "the outputs of a chosen and a rejected answer")

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        def odds(x: Value) -> Value:
            return x - op.Log(op.Max(1 - op.Exp(x), LEAST_REST))

        chosen, rejected = y_pred
        of_odds = softplus(op, odds(rejected) - odds(chosen))
        cost: Value = self.weight * of_odds - chosen
        return cost
