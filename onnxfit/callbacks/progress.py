"""Show on the terminal how training goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Union

from tqdm import tqdm

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError

__all__ = ["ProgressBar"]


class ProgressBar(Callback):
    """Writes progress to the standard error.

    - `verbose`: 0 silent; 1 a bar for each epoch with batches, rate, time left and running metrics;
      2 one line at the end of each epoch, `epoch 3/20  1.2s  loss 0.123  val_loss 0.2`; "auto" 1 in
      a terminal, else 2. Epochs are shown counted from 1, so that the last is 20/20.
    - `interval` >= 0 seconds: the bar is drawn at most this often; between drawings a batch costs a
      look at the clock and no metric is read.

    With 1 and 2, the reason is written too where a callback stopped training early. SettingError:
    another `verbose`.
    """

    phase: ClassVar[str] = "logger"

    def __init__(self, verbose: Union[int, str] = "auto", interval: float = 0.1) -> None:
        if verbose not in (0, 1, 2, "auto"):
            raise SettingError(f"verbose must be 0, 1, 2 or 'auto', got {verbose!r}.")
        if not interval >= 0:
            raise SettingError(f"ProgressBar needs interval >= 0, got {interval}.")
        self.verbose = int(verbose) if verbose != "auto" else 1 if sys.stderr.isatty() else 2
        self.interval = interval
        self._bar: Any = None
        self._began = time.perf_counter()

    def listens(self, hook: str) -> bool:
        if hook == "on_train_batch_end" and self.verbose != 1:
            return False
        return self.verbose > 0 and super().listens(hook)

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._began = time.perf_counter()
        if self.verbose == 1:
            # this class limits the drawing, for tqdm would want its metrics as text before it knows
            # whether it draws
            self._bar = tqdm(
                total=self.params.get("steps"),
                desc=self._title(epoch),
                unit="batch",
                mininterval=0,
                miniters=1,
                file=sys.stderr,
            )
            self._waiting = 0
            self._next = 0.0

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._waiting += 1
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + self.interval
            self._draw({name: value for name, value in logs.items() if name != "batch_loss"})

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self._bar is not None:
            self._draw(logs)
            self._close()
        elif self.verbose == 2:
            seconds = time.perf_counter() - self._began
            print(
                "  ".join([self._title(epoch), f"{seconds:.1f}s", *_figures(logs)]),
                file=sys.stderr,
                flush=True,
            )

    def on_train_end(self, logs: Logs) -> None:
        if self.verbose > 0 and self.trainer.stop_reason:
            print(self.trainer.stop_reason, file=sys.stderr, flush=True)

    def on_close(self) -> None:
        self._close()

    def _title(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self.params['epochs']}"

    def _draw(self, logs: Mapping[str, float]) -> None:
        self._bar.set_postfix_str("  ".join(_figures(logs)), refresh=False)
        self._bar.update(self._waiting)
        self._waiting = 0

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _figures(logs: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in logs.items()]
