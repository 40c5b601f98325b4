"""Losses of masks: the overlap of sets of pixels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from onnxfit.checks import check_number
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss
from onnxfit.losses.outputs import binary_divergence, takes_logits

__all__ = ["Dice", "Tversky"]


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

    >>> Tversky()
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
        q = op.Sigmoid(y_pred) if takes_logits(self, y_pred) else y_pred

        def total(x: Value) -> Value:
            return op.ReduceSum(x, list(range(1, x.rank)), keepdims=0) if x.rank > 1 else x

        both = total(y_true * q) + self.smooth
        wrong = self.alpha * total((1 - y_true) * q) + self.beta * total(y_true * (1 - q))
        return wrong / (both + wrong)  # 1 - both / (both + wrong), without its cancellation

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        return binary_divergence(self, op, y_pred, y_teacher, temperature)


@dataclass(frozen=True)
class Dice(Tversky):
    r"""One minus the Dice coefficient $\frac{2 \sum y q + 2 s}{\sum y + \sum q + 2 s}$ of a mask
    and probabilities: `Tversky` with $\alpha = \beta = 1/2$.

    `from_logits`, `smooth`, labels and `reduction` are as in `Tversky`.

    >>> Dice().smooth
    1e-05
    """

    aliases: ClassVar[tuple[str, ...]] = ("dice_loss",)

    alpha: float = field(default=0.5, init=False, repr=False)
    beta: float = field(default=0.5, init=False, repr=False)
