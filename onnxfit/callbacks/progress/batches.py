"""Show the progress of an evaluation, a prediction or a calibration."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice

from tqdm import tqdm

from onnxfit.callbacks.progress import print_line
from onnxfit.checks import shortened
from onnxfit.data import Batch, Source
from onnxfit.errors import SettingError

__all__ = ["shown_batches"]


def shown_batches(
    source: Source, steps: int | None, verbose: int | str, title: str, shows: bool = True
) -> Iterator[Batch]:
    """Yield the first `steps` batches of a source, or all, and show the progress.

    - `verbose`: 0 silent, 1 a progress bar, 2 a line at the end, "auto" 1 in a terminal, else 0.
    - `title`: the word before the bar and the line.
    - `shows`: False for a process that shows nothing because another process does.

    SettingError: `verbose` has another value.
    """
    if verbose not in (0, 1, 2, "auto"):
        raise SettingError(f"verbose must be 0, 1, 2 or 'auto', got {shortened(verbose)}.")
    batches = islice(source.batches(0), steps)
    if not shows:
        verbose = 0
    if verbose == 1 or (verbose == "auto" and sys.stderr.isatty()):
        total = source.steps
        if steps is not None:
            total = steps if total is None else min(steps, total)
        yield from tqdm(batches, desc=title, total=total, unit="batch", file=sys.stderr)
        return
    began, count = time.perf_counter(), 0
    for batch in batches:
        count += 1
        yield batch
    if verbose == 2:
        print_line(f"{title}  {time.perf_counter() - began:.1f}s  {count} batches")
