"""Find a batch size by trying larger and larger sizes, each for a few steps."""

from __future__ import annotations

import os
from contextlib import closing
from itertools import repeat
from time import perf_counter
from typing import Any, Union

from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.plot import plot_curve
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.callbacks.write_guard import writes_files
from onnxfit.checks import check_arguments, require_at_least, require_below, require_choice
from onnxfit.files import NUMBER, POSITIVE_COUNT, TEXT, ValueType, list_of, optional

__all__ = ["BatchSizeFinder"]


RESULT_TYPES = {"seconds": NUMBER, "samples_per_second": NUMBER, "error": TEXT}


def _is_result(value: Any) -> bool:
    """Return whether a value is an entry of `results`: the result of one batch size."""
    if not isinstance(value, dict) or not POSITIVE_COUNT.accepts(value.get("batch_size")):
        return False
    others = set(value) - {"batch_size"}
    known = others in ({"error"}, {"seconds", "samples_per_second"})
    return known and all(RESULT_TYPES[name].accepts(value[name]) for name in others)


RESULT = ValueType("the result of a batch size", _is_result)


class BatchSizeFinder(StatefulCallback):
    """Find the largest batch size that still raises throughput, by a few trial steps per size.

    - `mode`: "power" doubles the size as long as it succeeds; "binsearch" then searches between the
      last size that succeeded and the first that did not.
    - `steps_per_trial` >= 1: the steps of each size, after a first step that compiles the graphs.
      The fastest step counts.
    - `init_val` >= 1: the first size.
    - `max_trials` >= 1: the maximum number of sizes tried.
    - `min_gain` >= 0: a size succeeds if it trains at least 1 + `min_gain` times as many samples
      per second as the best size before. None: a size succeeds if it runs at all, so that the
      search ends at the limit of the memory or of the data.
    - `set_batch_size`: train with the `suggestion`. False keeps the batch size of `fit`.

    A size fails if memory does not suffice. Sizes above the number of rows are not tried. Weights,
    slots, statistics and counters are restored, and no hook of a callback is called. `fit(...,
    epochs=0)` searches and does not train. A resumed fit does not search again. The validation data
    keep the batch size of `fit`. With several processes, a size counts the rows of all ranks
    together, the first size has at least one row per rank, and the times are measured by rank 0. If
    memory does not suffice, training with several processes fails, because they may fail at
    different sizes. A faster size is not better for the loss: larger batches make fewer updates,
    and usually need a higher learning rate.

    Afterwards `results` has a dict for each size tried, `{"batch_size", "seconds",
    "samples_per_second"}` (seconds of a step) or `{"batch_size", "error"}`. `suggestion` is the
    largest size that succeeded, or None if the first size failed.

    SettingError: a setting is out of its range, or the data already come in batches (pass arrays, a
    DataLoader or a loader of files instead). DataError: the model's batch size is fixed.

    >>> finder = BatchSizeFinder("binsearch", init_val=16)
    """

    state_attributes = {"results": list_of(RESULT), "suggestion": optional(POSITIVE_COUNT)}

    @check_arguments
    def __init__(
        self,
        mode: str = "power",
        *,
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        min_gain: float | None = 0.05,
        set_batch_size: bool = True,
    ) -> None:
        require_choice("BatchSizeFinder needs mode to be", mode, ("power", "binsearch"))
        require_at_least(
            "BatchSizeFinder",
            1,
            steps_per_trial=steps_per_trial,
            init_val=init_val,
            max_trials=max_trials,
        )
        require_at_least("BatchSizeFinder", 0, min_gain=min_gain)
        require_below("BatchSizeFinder", 2**31, steps_per_trial=steps_per_trial)
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
        size = max(self.init_val, self.trainer.world_size)
        while self._succeeds(size):
            size *= 2
        if self.mode == "binsearch" and self.suggestion is not None:
            self._bisect(self.suggestion, size)

    def _bisect(self, largest: int, failed: int) -> None:
        """Search between the largest size that succeeded and one that failed."""
        # Sizes closer than a factor of 1 + min_gain are not tried: they cannot gain that much.
        while (middle := (largest + failed) // 2) > largest * (1 + (self.min_gain or 0)):
            if self._succeeds(middle):
                largest = middle
            else:
                failed = middle

    def _succeeds(self, size: int) -> bool:
        """Return whether a size succeeds, and make it the suggestion if so."""
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
        """Return the speed of a size, or None if it does not run; add the result to `results`.

        Nothing is added if the data have fewer rows than the size.
        """
        seconds: list[float] = []
        rates = repeat(self.trainer.learning_rate, self.steps_per_trial + 1)
        try:
            with closing(self.trainer.trial_steps(rates, epochs=None, batch_size=size)) as steps:
                began = perf_counter()
                for _ in steps:
                    now = perf_counter()
                    seconds.append(now - began)
                    began = now
        except (MemoryError, RuntimeError) as error:
            # A rank that fails alone cannot rejoin the others, which are still in the step.
            is_alone = self.trainer.world_size == 1
            if not is_alone or not (isinstance(error, MemoryError) or "alloc" in str(error)):
                raise
            self.results.append({"batch_size": size, "error": str(error) or type(error).__name__})
            return None
        if not seconds:
            return None
        fastest: float = self.trainer.broadcast("BatchSizeFinder", min(seconds))
        step = max(fastest, 1e-9)  # the clock may be coarse
        self.results.append(
            {"batch_size": size, "seconds": step, "samples_per_second": size / step}
        )
        return size / step

    def plot(self, path: Union[str, os.PathLike[str]]) -> None:
        """Draw samples per second over batch sizes, with the suggestion marked.

        - `path`: the PNG file. With several processes, only rank 0 writes it.

        InstallationError: matplotlib is not installed.
        """
        if not writes_files(self):
            return
        ran = [result for result in self.results if "error" not in result]
        ran.sort(key=lambda result: int(result["batch_size"]))
        sizes = [result["batch_size"] for result in ran]
        speeds = [result["samples_per_second"] for result in ran]
        axes = {"xlabel": "batch size", "ylabel": "samples per second", "xscale": "log"}
        plot_curve(path, "BatchSizeFinder", sizes, speeds, self.suggestion, **axes)
