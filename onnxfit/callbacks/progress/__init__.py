"""Show the progress of training on the terminal, in a notebook or in a log."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Union

from tqdm import tqdm

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.progress.line import (
    LineFormat,
    epoch_seconds_text,
    fitting,
    step_seconds_text,
    wrapped,
)
from onnxfit.callbacks.progress.output import (
    OutputAboveBar,
    in_notebook,
    progress_stream,
    shows_bars,
)
from onnxfit.checks import check_arguments, require_at_least
from onnxfit.drawing.labels import stream_width
from onnxfit.errors import SettingError

__all__ = ["ProgressBar"]

MIN_STEP_WIDTH = len("0.25 ms/step")
BAR_WIDTH = 10  # columns between the two ends of the bar in a terminal


def print_line(text: str) -> None:
    """Print a line where the progress is shown, above a progress bar that is being drawn."""
    stream = progress_stream()
    tqdm.write(text, file=stream)
    stream.flush()


class ProgressBar(Callback):
    """Write the progress of training to the terminal, to a notebook or to a log.

    - `verbose`: 0 is silent. 1 draws a bar with the batches of the epoch, the running metrics, the
      time left and the time of a step, and prints a line at the end of each epoch. 2 prints that
      line alone. "auto" is 1 in a terminal, and in a notebook with ipywidgets; otherwise 2.
    - `interval` >= 0 seconds: the minimum time between two drawings of the bar. Between drawings, a
      batch only reads the clock, and no metric is computed.

    The line of an epoch has the batches, the seconds of the epoch, the milliseconds of a training
    step, the metrics, and the learning rate if it changed. Epochs are counted from 1:
    `epoch 3/20  45/45  0.12s  2.7 ms/step  loss 0.2309  val_loss 0.2544`. A line that is wider
    than the terminal is wrapped and indented. In a log it stays one line.

    With 1 and 2, if a callback stops training early, the reason is printed too. The output goes to
    standard error, or in a notebook to standard output. While a bar is shown, `sys.stdout` and
    `sys.stderr` remove it before they write, so that the output of callbacks appears above the bar.
    `fit` adds a ProgressBar unless its `verbose` is 0. SettingError: a setting is out of its range.

    >>> bar = ProgressBar(1, interval=1.0)
    """

    phase: ClassVar[str] = "logger"

    @check_arguments
    def __init__(self, verbose: Union[int, str] = "auto", *, interval: float = 0.1) -> None:
        if verbose not in (0, 1, 2, "auto"):
            raise SettingError(f"verbose must be 0, 1, 2 or 'auto', got {verbose!r}.")
        require_at_least("ProgressBar", 0, interval=interval)
        if verbose == "auto":
            verbose = 1 if shows_bars() else 2
        self.verbose = int(verbose)
        self.interval = interval
        self._bar: Any = None
        self._is_widget = False
        self._is_shown = False
        self._output: OutputAboveBar | None = None
        self._begin_fit()

    def _begin_fit(self) -> None:
        self._lines = LineFormat()
        self._learning_rate: float | None = None
        self._epoch_began: float | None = None  # None outside of epochs

    def overrides(self, hook: str) -> bool:
        if hook == "on_train_batch_end" and self.verbose != 1:
            return False
        return self.verbose > 0 and super().overrides(hook)

    def on_train_begin(self, logs: Logs) -> None:
        self._begin_fit()
        self._learning_rate = self.trainer.learning_rate

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._epoch_began = time.perf_counter()
        self._training_ended: float | None = None
        self._batches_before = self.trainer.global_batch
        self._batch = 0
        self._next_drawing = 0.0
        self._figures: Sequence[str] = ()
        if self.verbose == 1:
            self._epoch = epoch
            if self._bar is None:
                self._open_bar()
            self._bar.bar_format = self._bar_format(())
            self._bar.reset(total=self.params.get("steps"))
            self._is_shown = True

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._batch = batch + 1
        now = time.perf_counter()
        # The last batch is drawn in any case, because a validation may take long.
        if now >= self._next_drawing or self._batch == self.params.get("steps"):
            self._next_drawing = now + self.interval
            figures = {name: value for name, value in logs.items() if name != "batch_loss"}
            self._figures = self._lines.figures(figures)
            self._draw(self._rates(now))

    def on_test_begin(self, logs: Logs) -> None:
        if self._epoch_began is not None:  # not an evaluation outside of `fit`
            self._training_ended = time.perf_counter()
            if self._bar is not None:
                self._draw(["validation"])

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        figures = dict(logs)
        learning_rate = figures.pop("learning_rate", None)
        counts = self._counts()
        texts = dict(zip(figures, self._lines.figures(figures)))
        trained = [text for name, text in texts.items() if not name.startswith("val_")]
        others = [text for name, text in texts.items() if name.startswith("val_")]
        if learning_rate != self._learning_rate and learning_rate is not None:
            others.append(f"learning_rate {learning_rate:.4g}")
        self._learning_rate = learning_rate
        self._epoch_began = None
        self._hide()
        width = stream_width(progress_stream())
        print_line(wrapped(self._title(epoch), ([*counts, *trained], others), width))

    def on_train_end(self, logs: Logs) -> None:
        if self._bar is not None:
            self._bar.leave = False
        self._close()
        if self.trainer.stop_reason:
            print_line(self.trainer.stop_reason)

    def on_close(self) -> None:
        self._close()

    def _title(self, epoch: int) -> str:
        epochs = str(self.params["epochs"])
        return f"epoch {epoch + 1}/{epochs}".ljust(len("epoch /") + 2 * len(epochs))

    def _counts(self) -> list[str]:
        """Return the batches of the epoch, its seconds, and the seconds of a training step."""
        if self._epoch_began is None:  # training resumes at the end of an epoch
            return []
        now = time.perf_counter()
        trained = self.trainer.global_batch - self._batches_before
        seconds = (self._training_ended or now) - self._epoch_began
        per_step = step_seconds_text(seconds / max(trained, 1))
        return [
            self._lines.align("batches", self._of_all(self._batch or trained)),
            self._lines.align("epoch", epoch_seconds_text(now - self._epoch_began)),
            self._lines.align("step", f"{per_step}/step", MIN_STEP_WIDTH),
        ]

    def _of_all(self, batch: int) -> str:
        steps = self.params.get("steps")
        return f"{batch:>{len(str(steps))}}/{steps}" if steps else str(batch)

    def _rates(self, now: float) -> list[str]:
        """Return the time that the epoch still takes, and that of a step."""
        trained = max(self.trainer.global_batch - self._batches_before, 1)
        per_step = (now - (self._epoch_began or now)) / trained
        rates = [f"{step_seconds_text(per_step)}/step"]
        steps = self.params.get("steps")
        if steps:
            left = tqdm.format_interval((steps - self._batch) * per_step)
            rates.insert(0, f"{left} left")
        return rates

    # ------------------------------------------------------------------ the bar

    def _open_bar(self) -> None:
        kind: Any = tqdm
        if in_notebook():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # without ipywidgets the bar is text
                from tqdm import auto
            kind = auto.tqdm
        self._bar = kind(
            # `interval` limits the drawing instead of tqdm's own: tqdm wants the metrics as text
            # before it knows whether it draws.
            mininterval=0,
            miniters=1,
            file=progress_stream(),
            dynamic_ncols=not in_notebook(),
            total=self.params.get("steps"),
            bar_format=self._title(self._epoch),
        )
        self._is_widget = hasattr(self._bar, "container")
        if not self._is_widget:
            self._output = OutputAboveBar(self._hide)

    def _draw(self, rates: Sequence[str]) -> None:
        if self._output is not None:
            self._output.end_line()
        self._bar.n = self._batch
        self._bar.bar_format = self._bar_format(rates)
        self._bar.refresh()
        self._is_shown = True

    def _bar_format(self, rates: Sequence[str]) -> str:
        """Return the line of the bar: figures have room first, then the bar, then the rates."""
        title = f"{self._title(self._epoch)}  {self._of_all(self._batch)}"
        width = None if self._is_widget else stream_width(self._bar.fp)
        room = None if width is None else width - 1 - len(title)
        figures = fitting(self._figures, room)
        if room is not None:
            room -= sum(len(figure) + 2 for figure in figures)
        bar = f"|{{bar:{BAR_WIDTH}}}|"
        if self._is_widget:
            bar = "{bar}"
        elif not self.params.get("steps") or (room is not None and room < BAR_WIDTH + 4):
            bar = ""
        if room is not None and bar:
            room -= BAR_WIDTH + 4
        if len(figures) == len(self._figures):
            figures += fitting(rates, room)
        texts = [text.replace("{", "{{").replace("}", "}}") for text in (title, *figures)]
        return "  ".join([texts[0], *filter(None, [bar]), *texts[1:]])

    def _hide(self) -> None:
        """Remove the bar from the terminal; `_draw` shows it again."""
        if self._bar is not None and self._is_shown:
            self._is_shown = False
            self._bar.clear()

    def _close(self) -> None:
        if self._output is not None:
            self._output.close()
            self._output = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None
