"""Find a batch size by trying larger and larger ones, each for a few steps."""

from __future__ import annotations

import operator
import os
from contextlib import closing
from itertools import repeat
from time import perf_counter
from typing import Any, Union

from onnxfit.callbacks.callback import StatefulCallback
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.plot import plot_curve
from onnxfit.errors import SettingError

__all__ = ["BatchSizeFinder"]


class BatchSizeFinder(StatefulCallback):
    """Before training, tries batch sizes for a few steps each and trains with the largest that is
    worth it.

    - `mode`: "power" doubles the size as long as it succeeds; "binsearch" then halves the way to
      the size that did not.
    - `init_val` >= 1: the first size.
    - `steps_per_trial` >= 1: steps of each size, besides the first, which compiles. The fastest
      counts.
    - `max_trials` >= 1: sizes that are tried at most.
    - `min_gain` >= 0: a size succeeds if it trains so many times 1 + `min_gain` the samples per
      second of the best before. None: if it runs at all, so that memory or the data end the search;
      the last is then the largest that fits.
    - `set_batch_size`: train with the `suggestion`; otherwise the batch size remains what it was.

    A size fails where memory does not suffice for it, and none is larger than the data. Weights,
    slots, statistics and counters are taken back, and no hook of a callback is called meanwhile;
    `fit(..., epochs=0)` looks for a size and does not train. Afterwards `results` has a dict for
    each size tried, `{"batch_size", "seconds", "samples_per_second"}` (seconds of a step) or
    `{"batch_size", "error"}`; `suggestion` is the largest that succeeded, or None where the first
    did not. The validation data keep the batch size of `fit`. A fit that resumes does not look
    again: it goes on with the size found. The faster size is not the better one for the loss:
    larger batches make fewer updates, and most often want a higher learning rate.

    SettingError: a setting out of its range, or data that come in batches already: give arrays, a
    DataLoader or a loader of files. DataError: a model whose batch size is fixed.
    """

    remembered = ("results", "suggestion")

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        min_gain: float | None = 0.05,
        set_batch_size: bool = True,
    ) -> None:
        if mode not in ("power", "binsearch"):
            raise SettingError(f"BatchSizeFinder needs mode 'power' or 'binsearch', got {mode!r}.")
        for setting, value in (
            ("steps_per_trial", steps_per_trial),
            ("init_val", init_val),
            ("max_trials", max_trials),
        ):
            if not operator.index(value) >= 1:
                raise SettingError(f"BatchSizeFinder needs {setting} >= 1, got {value}.")
        if min_gain is not None and not min_gain >= 0:
            raise SettingError(f"BatchSizeFinder needs min_gain >= 0, got {min_gain}.")
        self.mode = mode
        self.steps_per_trial = steps_per_trial
        self.init_val = init_val
        self.max_trials = max_trials
        self.min_gain = min_gain
        self.set_batch_size = set_batch_size
        self.reset()

    def reset(self) -> None:
        self.results: list[dict[str, Any]] = []
        self.suggestion: int | None = None

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        if not self._resumes:
            self._search()
        if self.set_batch_size and self.suggestion is not None:
            self.trainer.batch_size = self.suggestion

    def _search(self) -> None:
        size = self.init_val
        while self._succeeds(size):
            size *= 2
        if self.mode == "binsearch" and self.suggestion is not None:
            failed = size
            # a batch that is larger by less than min_gain cannot gain so much
            while (middle := (self.suggestion + failed) // 2) > self.suggestion * (
                1 + (self.min_gain or 0)
            ):
                if not self._succeeds(middle):
                    failed = middle

    def _succeeds(self, size: int) -> bool:
        """Whether a size is better than the best so far, which it then is."""
        if len(self.results) == self.max_trials:
            return False
        speed = self._samples_per_second(size)
        if speed is None:
            return False
        best = max(
            (r["samples_per_second"] for r in self.results[:-1] if "error" not in r), default=None
        )
        if best is not None and self.min_gain is not None and speed < best * (1 + self.min_gain):
            return False
        self.suggestion = size
        return True

    def _samples_per_second(self, size: int) -> float | None:
        """What a size reaches, or None where it does not run; adds to `results`, unless the data
        are too few.
        """
        seconds: list[float] = []
        rates = repeat(self.trainer.learning_rate, self.steps_per_trial + 1)
        try:
            with closing(self.trainer.trial_steps(rates, passes=None, batch_size=size)) as steps:
                begun = perf_counter()
                for _ in steps:
                    ended = perf_counter()
                    seconds.append(ended - begun)
                    begun = ended
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "alloc" not in str(error):
                raise
            self.results.append({"batch_size": size, "error": str(error) or type(error).__name__})
            return None
        if not seconds:
            return None
        step = max(min(seconds), 1e-9)  # a clock may be coarse
        self.results.append(
            {"batch_size": size, "seconds": step, "samples_per_second": size / step}
        )
        return size / step

    def plot(self, path: Union[str, os.PathLike[str]]) -> None:
        """Draw samples per second over batch sizes, the suggestion marked, into a PNG file.

        Needs matplotlib (InstallationError).
        """
        ran = sorted(
            (r["batch_size"], r["samples_per_second"]) for r in self.results if "error" not in r
        )
        plot_curve(
            path, "BatchSizeFinder", [size for size, _ in ran], [speed for _, speed in ran], self.suggestion,
            xlabel="batch size", ylabel="samples per second", xscale="log",
        )  # fmt: skip
