"""Compare the outputs of a first batch with what their losses expect.

A loss reads an output as scores or as probabilities. Usually the graph shows which of them it is.
Where it does not, the numbers of the first batch may tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.errors import warn_user
from onnxfit.losses import NLL, BinaryCrossEntropy, ClassLoss, KLDivergence, Loss
from onnxfit.step.objectives import Objective

Array = npt.NDArray[Any]
OUTSIDE = 1e-6  # by which a probability may be outside of 0 to 1, because of rounding
ROW_SUM = 1e-3  # by which the sum of a row of probabilities may differ from 1
ARE_PROBABILITIES = "all its numbers lie between 0 and 1"


class OutputCheck:
    """Check of the outputs of the first batch. It warns of each output at most once.

    - `objectives`: a mapping from output to its loss.

    `pending` has the objectives of the outputs that the graph does not explain; it is empty after
    the check.
    """

    def __init__(self, objectives: Mapping[str, Objective]) -> None:
        self.pending = {
            output: one.loss for output, one in objectives.items() if not one.is_explained
        }

    def check(self, outputs: Mapping[str, Array]) -> None:
        """Warn of outputs that contradict their losses."""
        pending, self.pending = self.pending, {}
        for name, loss in pending.items():
            contradiction = None if name not in outputs else _contradiction(loss, outputs[name])
            if contradiction is not None:
                warn_user(f"{type(loss).__name__} reads output {name!r} as {contradiction}")


def _contradiction(loss: Loss, output: Array) -> str | None:
    """Return how the numbers of an output contradict its loss, and what to do; None if they fit."""
    if not output.size or output.dtype.kind != "f" or not np.isfinite(output).all():
        return None
    low, high = float(output.min()), float(output.max())
    is_between = low >= -OUTSIDE and high <= 1 + OUTSIDE
    found = ARE_PROBABILITIES
    if _axis(loss, output) is not None:
        found += ", and each row sums to 1"
    if isinstance(loss, NLL):
        if not (is_between and _sums_to_one(loss, output)):
            return None
        return (
            f"log-probabilities, but in the first batch {found}. If the output is probabilities,"
            " use CrossEntropy(from_logits=False)."
        )
    own = type(loss).__name__
    if getattr(loss, "from_logits", False):
        if not (is_between and _sums_to_one(loss, output)):
            return None
        return (
            f"scores, but in the first batch {found}. If the output is probabilities, pass"
            f" loss={_probabilities_loss(own)}(from_logits=False)."
        )
    if is_between:
        return None
    return (
        f"probabilities, but the first batch has numbers from {low:.3g} to {high:.3g}. If the"
        f" output is scores, pass loss={own}(from_logits=True)."
    )


def _probabilities_loss(name: str) -> str:
    return "BinaryCrossEntropy" if name == "BinaryCrossEntropyWithLogits" else name


def _axis(loss: Loss, output: Array) -> int | None:
    """Return the axis of the classes; None for an output of separate decisions."""
    if isinstance(loss, BinaryCrossEntropy) or output.ndim < 2:
        return None
    axis = getattr(loss, "axis", None)
    if not isinstance(loss, (ClassLoss, KLDivergence)):
        return None
    if axis is None:
        axis = 1 if output.ndim >= 4 else output.ndim - 1
    return None if output.shape[axis] == 1 else axis


def _sums_to_one(loss: Loss, output: Array) -> bool:
    """Return whether the numbers of each row of classes sum to 1.

    Separate decisions have no such sum; their numbers must differ, because a network that has not
    been trained may give one number.
    """
    axis = _axis(loss, output)
    if axis is None:
        return bool(output.min() < output.max())
    sums = output.sum(axis=axis, dtype=np.float64)
    return bool((abs(sums - 1) <= ROW_SUM).all())
