"""Losses of two outputs, with a label that says how they belong together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from onnxfit.checks import check_number
from onnxfit.graph.labels import AllowedLabels
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.functions import JointFormula, require_names
from onnxfit.losses.outputs import dot, length, per_row

__all__ = ["Contrastive", "CosineEmbedding", "MarginRanking"]


@dataclass(frozen=True)
class PairFormula(JointFormula):
    """Base class of losses of two outputs with a label for each row: 1, or else -1 or 0."""

    labels: Any = field(default="int32[b]", init=False, repr=False)

    def _check_function(self) -> None:
        require_names(self, len(self.read) == 2, "two outputs")

    def allowed_labels(self, y_pred: TensorSpec) -> AllowedLabels:
        return AllowedLabels(-1, 1, values=(-1, 0, 1))


@dataclass(frozen=True)
class Contrastive(PairFormula):
    r"""Contrastive loss of the distance $d = \lVert a - b \rVert$: $d^2$ for a pair that belongs
    together (label 1), and $\max(0, m - d)^2$ for another (label 0 or -1) (Hadsell, Chopra, LeCun
    2006, without its factor 1/2).

    - `outputs`: the names of the outputs with $a$ and $b$, each of shape `(batch, features)`;
      `inputs` and `values` as in `Joint`, two names in all.
    - `margin`: $m > 0$.
    - `reduction` is as in `Loss`.

    SettingError: there are not two names.

    >>> Contrastive(["left", "right"], margin=0.5).read
    ('left', 'right')
    """

    named = False

    margin: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "margin", above=0)

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        difference = y_pred[0] - y_pred[1]
        short = op.Relu(self.margin - length(op, difference))
        return op.Where(y_true > 0, dot(op, difference, difference), short * short)


@dataclass(frozen=True)
class CosineEmbedding(PairFormula):
    r"""Loss of the cosine $c$ between $a$ and $b$: $1 - c$ for a pair that belongs together (label
    1), and $\max(0, c - m)$ for another (label 0 or -1) (`torch.nn.CosineEmbeddingLoss`).

    - `outputs`: the names of the outputs with $a$ and $b$, each of shape `(batch, features)`;
      `inputs` and `values` as in `Joint`, two names in all.
    - `margin`: $m$ from -1 to 1.
    - `reduction` is as in `Loss`.

    SettingError: there are not two names.

    >>> CosineEmbedding(["left", "right"]).margin
    0.0
    """

    named = False

    margin: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "margin", at_least=-1, at_most=1)

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        a, b = y_pred
        cosine = dot(op, a, b) / (length(op, a) * length(op, b))
        return op.Where(y_true > 0, 1 - cosine, op.Relu(cosine - self.margin))


@dataclass(frozen=True)
class MarginRanking(PairFormula):
    r"""Loss $\max(0, m - y (a - b))$ of two scores: $a$ should be the greater if the label $y$ is
    1, and the smaller if it is -1 or 0 (`torch.nn.MarginRankingLoss`).

    - `outputs`: the names of the outputs with $a$ and $b$, each of shape `(batch,)` or `(batch,
      ...)`; `inputs` and `values` as in `Joint`, two names in all.
    - `margin`: $m \ge 0$.
    - `reduction` is as in `Loss`.

    SettingError: there are not two names.

    >>> MarginRanking(["first", "second"], margin=0.1).margin
    0.1
    """

    named = False

    margin: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "margin", at_least=0)

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        difference = y_pred[0] - y_pred[1]
        is_first = per_row(op, y_true > 0, difference.rank)
        return op.Relu(self.margin - op.Where(is_first, difference, -difference))
