"""Optimizers for weights that are matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod, sqrt

import numpy as np

from onnxfit.checks import check_number, require_choice
from onnxfit.graph.sums import sum_of_squares
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.optimizers.adam import AdamW
from onnxfit.optimizers.base import (
    Array,
    Optimizer,
    Scheduled,
    WeightInfo,
    WeightOptimizer,
    check_betas,
    check_scheduled,
)
from onnxfit.schedules import LearningRate

__all__ = ["Muon"]

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of Jordan et al.: singular values go to 0.7 to 1.2


@dataclass(frozen=True)
class Muon(Optimizer):
    r"""Muon (Jordan et al. 2024; `torch.optim.Muon`) for matrices and filters, AdamW for weights
    with fewer than two axes.

    $$b_t = \mu b_{t-1} + (1-\mu) g, \quad u = (1-\mu) g + \mu b_t, \quad w \leftarrow w -
    \eta\,s\,\mathrm{NS}(u)$$

    NS replaces the singular values of $u$ by numbers near 1: after a division by the Frobenius
    norm, it applies $X \leftarrow a X + b X X^T X + c (X X^T)^2 X$ a few times. Filters are taken
    as a matrix with one row for each filter. Embeddings and the last layer of a network do better
    with AdamW: `Groups({"embed*": AdamW(0.001), "head*": AdamW(0.001)}, default=Muon(0.001))`.

    - `momentum` $\mu \ge 0$; `nesterov`: without it, $u = b_t$.
    - `ns_steps` $\ge 1$; `eps` > 0 is the smallest norm to divide by.
    - `adjust_lr_fn`: "match_rms_adamw" for $s = 0.2 \sqrt{\max(n, m)}$ of an (n, m) matrix, with
      which learning rate and decay of AdamW fit (Liu et al. 2025); "original" for $s =
      \sqrt{\max(1, n/m)}$.
    - `betas`, `adam_eps`: those of AdamW.

    Slot `velocity` $b$, or those of AdamW. `learning_rate`, `weight_decay`,
    `exclude_from_weight_decay`, `learning_rate_multipliers`, `ema_momentum`, `cautious` and
    `constraints` are as in `Optimizer`.

    >>> list(Muon(0.001).slots(np.ones((2, 3))))
    ['velocity']
    """

    learning_rate: LearningRate = 0.001
    weight_decay: Scheduled = field(default=0.1, kw_only=True)
    momentum: Scheduled = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    eps: float = 1e-7
    adjust_lr_fn: str = "match_rms_adamw"
    betas: tuple[Scheduled, float] = (0.9, 0.999)
    adam_eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scheduled(self, "momentum")
        check_number(self, "ns_steps", at_least=1, whole=True)
        check_number(self, "eps", above=0)
        require_choice(
            "Muon's adjust_lr_fn must be", self.adjust_lr_fn, ("match_rms_adamw", "original")
        )
        check_betas(self)
        check_number(self, "adam_eps", above=0)

    def for_weights(self, weights: Sequence[WeightInfo]) -> dict[str, WeightOptimizer]:
        result = super().for_weights(weights)
        adam: dict[int, WeightOptimizer] = {}
        for w in weights:
            one = result[w.name]
            if w.ndim < 2:
                adam.setdefault(id(one), replace(one, optimizer=self._adam(one.optimizer)))
                result[w.name] = adam[id(one)]
        return result

    def _adam(self, own: Optimizer) -> AdamW:
        """Return AdamW with the settings that it shares with Muon."""
        return AdamW(
            own.learning_rate,
            self.betas,
            self.adam_eps,
            weight_decay=own.weight_decay,
            ema_momentum=own.ema_momentum,
            cautious=own.cautious,
        )

    def slots(self, w: Array) -> dict[str, Array]:
        return {"velocity": np.zeros_like(w)}

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, velocity: Value
    ) -> tuple[Value, ...]:
        velocity = self.momentum * velocity + (1 - self.momentum) * g
        u = (1 - self.momentum) * g + self.momentum * velocity if self.nesterov else velocity
        sizes = [size for size in w.shape or () if isinstance(size, int)]
        is_known = len(sizes) == w.rank
        matrix = [sizes[0], prod(sizes[1:])] if is_known else [0, -1]
        rows = u if w.rank == 2 else op.Reshape(u, matrix)
        direction = self._orthogonal(op, rows)
        if w.rank != 2:
            direction = op.Reshape(direction, np.array(sizes) if is_known else op.Shape(w))
            direction.ir.shape = w.ir.shape  # which inference does not find for sizes with names
        return w - lr * self._scale(op, rows) * direction, velocity

    def _orthogonal(self, op: GraphBuilder, x: Value) -> Value:
        """Return a matrix with the singular vectors of x and singular values near 1."""
        a, b, c = NEWTON_SCHULZ
        n, m = _sizes(x)
        is_tall = n is not None and m is not None and n > m  # products of the smaller size
        x = x / op.Max(op.Sqrt(sum_of_squares(op, x)), self.eps)
        x = op.Transpose(x, perm=[1, 0]) if is_tall else x
        for _ in range(self.ns_steps):
            gram = op.MatMul(x, op.Transpose(x, perm=[1, 0]))
            x = a * x + op.MatMul(b * gram + c * op.MatMul(gram, gram), x)
        return op.Transpose(x, perm=[1, 0]) if is_tall else x

    def _scale(self, op: GraphBuilder, x: Value) -> Value | float:
        n, m = _sizes(x)
        if n is not None and m is not None:
            is_original = self.adjust_lr_fn == "original"
            return sqrt(max(1.0, n / m)) if is_original else 0.2 * sqrt(max(n, m))
        sizes = op.cast(op.Shape(x), x.dtype)
        rows, columns = op.Split(sizes, op.constant([1, 1]), axis=0, _outputs=2)
        if self.adjust_lr_fn == "original":
            return op.Sqrt(op.Max(rows / columns, 1.0))
        return 0.2 * op.Sqrt(op.Max(rows, columns))


def _sizes(x: Value) -> tuple[int | None, int | None]:
    """Return the sizes of a matrix; None for a size that is unknown."""
    n, m = x.shape or (None, None)
    return n if isinstance(n, int) else None, m if isinstance(m, int) else None
