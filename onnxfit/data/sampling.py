"""The choice of the next token from the logits of a language model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxfit.checks import is_finite, shortened
from onnxfit.data.batch import Array
from onnxfit.errors import SettingError


@dataclass(frozen=True)
class Sampling:
    """Sampling settings: temperature, then top-k, then top-p, applied as in `transformers`.

    - `temperature` >= 0: 0 takes the likeliest token; otherwise a token is drawn from
      softmax(logits / temperature).
    - `top_k` >= 1: draw from the likeliest k tokens only; None draws from all.
    - `top_p` in (0, 1]: draw from the smallest set of likeliest tokens whose probabilities add up
      to `top_p`; None draws from all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self, owner: str) -> None:
        """Raise SettingError for an impossible setting of `owner`."""
        if not (is_finite(self.temperature) and self.temperature >= 0):
            raise SettingError(
                f"{owner} needs a finite temperature >= 0, got {shortened(self.temperature)}."
            )
        if self.top_k is not None and not 1 <= self.top_k < 2**63:
            raise SettingError(f"{owner} needs top_k >= 1, got {shortened(self.top_k)}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SettingError(f"{owner} needs 0 < top_p <= 1, got {shortened(self.top_p)}.")

    def next_token(self, logits: Array, generator: np.random.Generator) -> int:
        """Return the next token; `logits` has one number for each token of the vocabulary."""
        if not self.temperature or not np.isfinite(logits).any():
            return int(np.nan_to_num(logits, nan=-np.inf).argmax())
        scores = np.nan_to_num(logits.astype(np.float64), nan=-1e300, posinf=1e300, neginf=-1e300)
        with np.errstate(over="ignore"):
            odds = np.exp((scores - scores.max()) / self.temperature)
        order = np.argsort(-odds, kind="stable")[: self.top_k]
        odds = odds[order] / odds[order].sum()
        if self.top_p is not None:
            kept = int(np.searchsorted(odds.cumsum(), self.top_p)) + 1
            order, odds = order[:kept], odds[:kept] / odds[:kept].sum()
        place = int(np.searchsorted(odds.cumsum(), generator.random(), side="right"))
        return int(order[min(place, len(order) - 1)])
