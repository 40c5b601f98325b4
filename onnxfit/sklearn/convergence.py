"""Detection of a training that has not converged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def still_falls(losses: Sequence[float]) -> bool:
    """Return whether the loss was still falling in the last epochs.

    The mean of the last tenth of the epochs is compared with the mean of the tenth before. A fall
    counts if it is at least 1/50 of the whole fall, and at least 1e-4 of the first loss.
    """
    window = max(1, len(losses) // 10)
    if len(losses) < 2 * window:
        return False
    last = float(np.mean(losses[-window:]))
    fall = float(np.mean(losses[-2 * window : -window])) - last
    return fall > max(0.02 * (losses[0] - last), 1e-4 * abs(losses[0]))
