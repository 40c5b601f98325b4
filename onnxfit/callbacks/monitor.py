"""Read a monitored metric and compare its values, for all callbacks that monitor a metric."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from onnxfit.callbacks.callback import HOOKS
from onnxfit.callbacks.logs import Logs
from onnxfit.checks import require_at_least, require_choice
from onnxfit.errors import SettingError, listed_names, nearest_name, warn_user

if TYPE_CHECKING:
    from onnxfit.callbacks.callback import Callback
    from onnxfit.callbacks.callback_list import CallbackList
    from onnxfit.trainer import Trainer

__all__: list[str] = []  # no class of the public package


class Monitor:
    """Read the metric `name` from logs and compare its values.

    - `owner`: the callback's class, named in messages.
    - `name`: the metric's name in the logs.
    - `mode`: "min" (smaller is better), "max", or "auto", which `start` resolves through
      `trainer.monitor_mode(name)`: the metric's own mode, "min" for a loss.
    - `min_delta` >= 0: a value must be better by more than this.

    NaN is never better than anything, and any other value is better than None.
    SettingError: the mode is unknown, or `min_delta` is negative or NaN.

    >>> monitor = Monitor("EarlyStopping", "val_loss", "min", min_delta=0.5)
    >>> monitor.better(3.5, 4.0), monitor.better(3.4, 4.0), monitor.better(float("nan"), None)
    (False, True, False)
    """

    def __init__(self, owner: str, name: str, mode: str = "auto", min_delta: float = 0.0) -> None:
        require_choice(f"{owner} needs mode to be", mode, ("auto", "min", "max"))
        require_at_least(owner, 0, min_delta=min_delta)
        self.owner = owner
        self.name = name
        self.mode = mode
        self.min_delta = min_delta
        self.direction = mode
        self._warned = False

    def start(self, trainer: Trainer) -> None:
        """Resolve mode "auto" for this trainer's metrics, and allow a new warning."""
        self.direction = trainer.monitor_mode(self.name) if self.mode == "auto" else self.mode
        self._warned = not trainer.is_main

    def require(self, callbacks: CallbackList, *, at_batches: bool = False) -> None:
        """Raise SettingError if the running `fit` can never compute the metric.

        No error is raised if another callback may log the metric, or if the metric is computed
        after some epochs only.

        - `callbacks`: the callbacks of the `fit`.
        - `at_batches`: whether the metric is read at the ends of batches instead of epochs.
        """
        figures = callbacks.batch_figures if at_batches else callbacks.figures
        if figures is None or self.name in figures or any(map(may_log, callbacks)):
            return
        own = self.name.removeprefix("val_")
        if own != self.name and own in figures:
            problem = "this fit has no validation data"
            fix = "Pass validation_data or validation_split"
            if at_batches:
                problem = "validation runs after epochs, not after batches"
                fix = "Save after epochs"
            raise SettingError(
                f"{self.owner} monitors {self.name!r}, but {problem}. {fix}, or monitor {own!r}."
            )
        near = nearest_name(self.name, figures)
        hint = f" Did you mean {near!r}?" if near else ""
        raise SettingError(
            f"{self.owner} monitors {self.name!r}, which this fit never computes.{hint} It computes"
            f" {listed_names(figures, self.name)}. Add metrics with Trainer(..., metrics=[...])."
        )

    def read(self, logs: Logs) -> float | None:
        """Return the metric's value. If `logs` lack it, return None, with one warning per `fit`."""
        if self.name in logs:
            return logs[self.name]
        if not self._warned:
            self._warned = True
            warn_user(
                f"{self.owner} monitors {self.name!r}, which this epoch did not compute. Available:"
                f" {', '.join(logs) or 'nothing'}. Epochs without the metric are skipped."
            )
        return None

    def better(self, value: float, reference: float | None) -> bool:
        """Return whether `value` is better than `reference` by more than `min_delta`."""
        if reference is None or math.isnan(reference):
            return not math.isnan(value)
        if self.direction == "min":
            return value < reference - self.min_delta
        return value > reference + self.min_delta

    def beyond(self, value: float, threshold: float) -> bool:
        """Return whether `value` is strictly better than `threshold`, ignoring `min_delta`."""
        return value < threshold if self.direction == "min" else value > threshold

    def worse(self, value: float, threshold: float) -> bool:
        """Return whether `value` is strictly worse than `threshold`, ignoring `min_delta`."""
        return value > threshold if self.direction == "min" else value < threshold


def may_log(callback: Callback) -> bool:
    """Return whether a callback may add figures to the logs.

    Callbacks of onnxfit declare it; any other callback with an overridden hook may.
    """
    if callback.logs_figures:
        return True
    hooks = [getattr(callback, hook) for hook in HOOKS if callback.overrides(hook)]
    modules = [getattr(hook, "__module__", None) or "" for hook in hooks]
    return not all(module.startswith("onnxfit.") for module in modules)
