"""Show the progress of training on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Union

from tqdm import tqdm

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.checks import require_at_least
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError
from onnxfit.registry import check_arguments

__all__ = ["ProgressBar"]


def print_line(text: str) -> None:
    """Print a line to the standard error, above a progress bar that is being drawn."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


class ProgressBar(Callback):
    """Write the progress of training to the standard error.

    - `verbose`: 0 is silent. 1 draws a bar for each epoch with its batches, rate, time left and
      running metrics. 2 prints one line at the end of each epoch, such as
      `epoch 3/20  1.2s  loss 0.123  val_loss 0.2`. "auto" is 1 in a terminal, else 2. Epochs are
      counted from 1, so that the last is 20/20.
    - `interval` >= 0 seconds: the bar is drawn at most this often. Between drawings a batch costs a
      look at the clock, and no metric is computed.

    With 1 and 2, the reason is printed too where a callback stopped training early. `fit` adds a
    ProgressBar unless its `verbose` is 0. SettingError: a setting is out of its range.

    >>> bar = ProgressBar(1, interval=1.0)
    """

    phase: ClassVar[str] = "logger"

    @check_arguments
    def __init__(self, verbose: Union[int, str] = "auto", *, interval: float = 0.1) -> None:
        if verbose not in (0, 1, 2, "auto"):
            raise SettingError(f"verbose must be 0, 1, 2 or 'auto', got {verbose!r}.")
        require_at_least("ProgressBar", 0, interval=interval)
        if verbose == "auto":
            verbose = 1 if sys.stderr.isatty() else 2
        self.verbose = int(verbose)
        self.interval = interval
        self._bar: Any = None
        self._epoch_began = time.perf_counter()
        self._pending_batches = 0
        self._next_drawing = 0.0

    def listens(self, hook: str) -> bool:
        if hook == "on_train_batch_end" and self.verbose != 1:
            return False
        return self.verbose > 0 and super().listens(hook)

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._epoch_began = time.perf_counter()
        if self.verbose == 1:
            # `interval` limits the drawing instead of tqdm's own: tqdm wants the metrics as text
            # before it knows whether it draws.
            self._bar = tqdm(
                total=self.params.get("steps"),
                desc=self._title(epoch),
                unit="batch",
                mininterval=0,
                miniters=1,
                file=sys.stderr,
            )
            self._pending_batches = 0
            self._next_drawing = 0.0

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._pending_batches += 1
        now = time.perf_counter()
        if now >= self._next_drawing:
            self._next_drawing = now + self.interval
            self._draw({name: value for name, value in logs.items() if name != "batch_loss"})

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self._bar is not None:
            self._draw(logs)
            self._close()
        elif self.verbose == 2:
            seconds = time.perf_counter() - self._epoch_began
            print_line("  ".join([self._title(epoch), f"{seconds:.1f}s", *_texts(logs)]))

    def on_train_end(self, logs: Logs) -> None:
        if self.verbose > 0 and self.trainer.stop_reason:
            print_line(self.trainer.stop_reason)

    def on_close(self) -> None:
        self._close()

    def _title(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self.params['epochs']}"

    def _draw(self, logs: Mapping[str, float]) -> None:
        self._bar.set_postfix_str("  ".join(_texts(logs)), refresh=False)
        self._bar.update(self._pending_batches)
        self._pending_batches = 0

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _texts(logs: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in logs.items()]
