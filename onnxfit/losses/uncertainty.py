"""Factors of several losses that train with the model."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfit.checks import ChecksArguments, check_number
from onnxfit.losses.base import Loss

__all__ = ["UncertaintyWeights"]


@dataclass(frozen=True)
class UncertaintyWeights(ChecksArguments):
    r"""Learned weights of several losses, $\sum_i c_i e^{-s_i} \ell_i + s_i / 2$ (Kendall, Gal,
    Cipolla 2018, arXiv:1705.07115), for `Trainer(loss_weights=)`.

    $s_i = \log \sigma_i^2$ is a scalar that trains with the model, `loss/NAME/log_variance`. $c_i$
    is 1 for a loss of classes or of yes and no, and 1/2 for any other loss, as in the logarithm of
    a normal distribution. The logs have each $\ell_i$ unweighted; other hosts of
    `Trainer.export_training` log $e^{-s_i} \ell_i$.

    - `initial`: the first $s_i$, a finite number.

    >>> UncertaintyWeights()
    UncertaintyWeights(initial=0.0)
    """

    initial: float = 0.0

    def __post_init__(self) -> None:
        check_number(self, "initial")

    def factor(self, loss: Loss) -> float:
        """Return $c$ for a `loss`."""
        return 0.5 if loss.task == "values" else 1.0
