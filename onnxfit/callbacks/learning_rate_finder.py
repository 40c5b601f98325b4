"""Find a learning rate by trying many, each for one step."""

from __future__ import annotations

import math
import os
from contextlib import closing
from typing import Union

import numpy as np

from onnxfit.callbacks.learning_rate import require_constant_rate
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.plot import plot_curve
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.callbacks.write_guard import writes_files
from onnxfit.checks import check_arguments, require_at_least, require_below, require_choice
from onnxfit.errors import SettingError
from onnxfit.files import NUMBER, RATE, list_of, optional

__all__ = ["LearningRateFinder"]

SMOOTHING = 0.9


class LearningRateFinder(StatefulCallback):
    r"""Find a learning rate before training, by trial steps at rising rates (Smith 2015).

    - `min_lr`, `max_lr`: the first and the last rate, 0 < `min_lr` < `max_lr`.
    - `steps` >= 3: the number of steps. If the training data have fewer batches, they are repeated.
    - `mode`: "exponential", rates in a geometric sequence, or "linear".
    - `stop_factor` > 1: the search ends when the loss exceeds `stop_factor` times its minimum, or
      is not finite. None ends it at non-finite losses only.
    - `set_rate`: train with the `suggestion`. False keeps the learning rate.

    Weights, slots, statistics and counters are restored: the search changes nothing but the
    learning rate, and calls no hook of a callback. `fit(..., epochs=0)` searches and does not
    train. A resumed fit does not search again.

    Afterwards `rates` and `losses` are the rates tried and their losses, as moving averages
    $s \leftarrow 0.9 s + 0.1 \ell$ with bias correction. `suggestion` is the rate at which
    $d\,\mathrm{loss}/d\log\mathrm{rate}$ is smallest, or None if the loss never falls.

    SettingError: a setting is out of its range. TypeError, before training: `set_rate=True`
    although a Schedule sets the rate. DataError: the data can be iterated over only once.

    >>> finder = LearningRateFinder(1e-5, max_lr=10.0, steps=200)
    """

    state_attributes = {
        "losses": list_of(NUMBER),
        "rates": list_of(RATE),
        "suggestion": optional(RATE),
    }

    @check_arguments
    def __init__(
        self,
        min_lr: float = 1e-6,
        *,
        max_lr: float = 1.0,
        steps: int = 100,
        mode: str = "exponential",
        stop_factor: float | None = 4.0,
        set_rate: bool = True,
    ) -> None:
        if not 0 < min_lr < max_lr < math.inf:
            raise SettingError(
                f"LearningRateFinder needs 0 < min_lr < max_lr, got {min_lr} and {max_lr}."
            )
        require_at_least("LearningRateFinder", 3, steps=steps)
        require_below("LearningRateFinder", 2**31, steps=steps)
        require_choice("LearningRateFinder needs mode to be", mode, ("exponential", "linear"))
        if stop_factor is not None and not stop_factor > 1:
            raise SettingError(f"LearningRateFinder needs stop_factor > 1, got {stop_factor}.")
        self.min_lr = min_lr
        self.max_lr = max_lr
        self.steps = steps
        self.mode = mode
        self.stop_factor = stop_factor
        self.set_rate = set_rate
        self.reset()

    def reset(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.suggestion: float | None = None

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        if self.set_rate:
            require_constant_rate(
                self,
                "LearningRateFinder",
                "Pass set_rate=False to plot the losses and keep the schedule.",
            )
        if self._resumes:
            return
        space = np.geomspace if self.mode == "exponential" else np.linspace
        self._try([float(rate) for rate in space(self.min_lr, self.max_lr, self.steps)])
        self.suggestion = self._steepest()
        if self.set_rate and self.suggestion is not None:
            self.trainer.learning_rate = self.suggestion

    def _try(self, rates: list[float]) -> None:
        """Take a step at every rate; stop when the loss grows too large."""
        average = 0.0
        with closing(self.trainer.trial_steps(rates, epochs=None)) as losses:
            for step, (rate, loss) in enumerate(zip(rates, losses)):
                average = SMOOTHING * average + (1 - SMOOTHING) * loss
                smooth = average / (1 - SMOOTHING ** (step + 1))
                if not math.isfinite(smooth):
                    break
                self.rates.append(rate)
                self.losses.append(smooth)
                if self._is_too_large(smooth):
                    break

    def _is_too_large(self, loss: float) -> bool:
        smallest = min(self.losses)
        # A multiple of a negative loss is no upper bound.
        return self.stop_factor is not None and smallest > 0 and loss > self.stop_factor * smallest

    def _steepest(self) -> float | None:
        """Return the rate at which the loss falls fastest, or None if it never falls."""
        if len(self.rates) < 3:
            return None
        slopes = np.gradient(self.losses, np.log(self.rates))
        steepest = int(slopes.argmin())
        return self.rates[steepest] if slopes[steepest] < 0 else None

    def plot(self, path: Union[str, os.PathLike[str]]) -> None:
        """Draw the losses over the rates, with the suggestion marked.

        - `path`: the PNG file. With several processes, only rank 0 writes it.

        InstallationError: matplotlib is not installed.
        """
        if not writes_files(self):
            return
        scale = "log" if self.mode == "exponential" else "linear"
        axes = {"xlabel": "learning rate", "ylabel": "loss", "xscale": scale}
        plot_curve(path, "LearningRateFinder", self.rates, self.losses, self.suggestion, **axes)
