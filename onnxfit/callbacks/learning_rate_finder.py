"""Find a learning rate by trying many, each for one step."""

from __future__ import annotations

import math
import os
from contextlib import closing
from typing import Union

import numpy as np

from onnxfit.callbacks.callback import StatefulCallback
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.plot import plot_curve
from onnxfit.errors import SettingError

__all__ = ["LearningRateFinder"]

SMOOTHING = 0.9


class LearningRateFinder(StatefulCallback):
    r"""Before training, takes `steps` steps at rising learning rates and looks where the loss falls
    fastest (Smith 2015).

    - `min_lr`, `max_lr`: the first and the last rate, 0 < `min_lr` < `max_lr`.
    - `steps` >= 3: batches of the training data, over which it passes again and again if they are
      fewer.
    - `mode`: "exponential", rates in a geometric sequence, or "linear".
    - `stop_factor` > 1: ends when the loss is more than so many times its least value, or is not
      finite; None for going on.
    - `set_rate`: train with the `suggestion`; otherwise the learning rate remains what it was.

    Weights, slots, statistics and counters are taken back; nothing but the learning rate tells that
    it ran, and no hook of a callback is called meanwhile. `fit(..., epochs=0)` looks for a rate and
    does not train. Afterwards `rates` and `losses` are what was seen, the losses being their moving
    averages $s \leftarrow 0.9 s + 0.1 \ell$ without the bias of the beginning; `suggestion` is the
    rate at which $d\,\mathrm{loss}/d\log\mathrm{rate}$ is least, or None where it nowhere falls. A
    fit that resumes does not look again.

    SettingError: a setting out of its range. TypeError, before training: `set_rate=True`, and a
    Schedule drives the rate. DataError: data that can be passed over only once.
    """

    remembered = ("losses", "rates", "suggestion")

    def __init__(
        self,
        min_lr: float = 1e-6,
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
        if not steps >= 3:
            raise SettingError(f"LearningRateFinder needs steps >= 3, got {steps}.")
        if mode not in ("exponential", "linear"):
            raise SettingError(
                f"LearningRateFinder needs mode 'exponential' or 'linear', got {mode!r}."
            )
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
        driven = self.trainer.optimizer.learning_rate
        if self.set_rate and callable(driven):
            raise TypeError(
                f"LearningRateFinder cannot set a learning rate that {driven!r} sets: give"
                " set_rate=False."
            )
        if self._resumes:
            return
        space = np.geomspace if self.mode == "exponential" else np.linspace
        self._try([float(rate) for rate in space(self.min_lr, self.max_lr, self.steps)])
        self.suggestion = self._steepest()
        if self.set_rate and self.suggestion is not None:
            self.trainer.learning_rate = self.suggestion

    def _try(self, rates: list[float]) -> None:
        average = 0.0
        with closing(self.trainer.trial_steps(rates, passes=None)) as losses:
            for step, (rate, loss) in enumerate(zip(rates, losses)):
                average = SMOOTHING * average + (1 - SMOOTHING) * loss
                smooth = average / (1 - SMOOTHING ** (step + 1))
                if not math.isfinite(smooth):
                    break
                self.rates.append(rate)
                self.losses.append(smooth)
                # a loss below 0 has no multiple that were worse
                if (
                    self.stop_factor is not None
                    and min(self.losses) > 0
                    and smooth > self.stop_factor * min(self.losses)
                ):
                    break

    def _steepest(self) -> float | None:
        if len(self.rates) < 3:
            return None
        slopes = np.gradient(self.losses, np.log(self.rates))
        best = int(slopes.argmin())
        return self.rates[best] if slopes[best] < 0 else None

    def plot(self, path: Union[str, os.PathLike[str]]) -> None:
        """Draw losses over rates, the suggestion marked, into a PNG file.

        Needs matplotlib (InstallationError).
        """
        scale = "log" if self.mode == "exponential" else "linear"
        axes = {"xlabel": "learning rate", "ylabel": "loss", "xscale": scale}
        plot_curve(path, "LearningRateFinder", self.rates, self.losses, self.suggestion, **axes)
