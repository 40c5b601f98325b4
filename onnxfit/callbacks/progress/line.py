"""Text of the lines that a ProgressBar writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tqdm import tqdm

__all__ = [
    "LineFormat",
    "epoch_seconds_text",
    "fitting",
    "number_text",
    "step_seconds_text",
    "wrapped",
]

SEPARATOR = "  "
MIN_FIGURE_WIDTH = len("0.1234")


class LineFormat:
    """Aligns the fields of a line with those of the lines before.

    A field is as wide as its widest text so far.
    """

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}

    def align(self, name: str, text: str, min_width: int = 0) -> str:
        """Return the text of a field, aligned to the right.

        - `name`: the field.
        - `text`: its text in this line.
        - `min_width`: the minimum width of the field.
        """
        width = self._widths[name] = max(self._widths.get(name, min_width), len(text))
        return text.rjust(width)

    def figures(self, logs: Mapping[str, float]) -> list[str]:
        """Return a field such as "loss 0.1234" for each of the `logs`."""
        return [
            f"{name} {self.align(name, number_text(value), MIN_FIGURE_WIDTH)}"
            for name, value in logs.items()
        ]


def number_text(value: float) -> str:
    """Return a number with five digits, or four decimals; "nan" and "inf" for those values.

    - `value`: the number.

    >>> [number_text(value) for value in (0.5, 12.3456, 12345.6, 0.00012345, 1e9)]
    ['0.5000', '12.346', '12346', '1.234e-04', '1.000e+09']
    """
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if 1e-3 <= size < 10 or not value:
        return f"{value:.4f}"
    if 10 <= size < 99_999.5:
        return f"{value:#.5g}".rstrip(".")
    return f"{value:.3e}"


def epoch_seconds_text(seconds: float) -> str:
    """Return the duration of an epoch.

    - `seconds`: the duration.

    >>> [epoch_seconds_text(seconds) for seconds in (0.0512, 12.3, 75.3, 7500)]
    ['0.05s', '12.30s', '01:15', '2:05:00']
    """
    return f"{seconds:.2f}s" if seconds < 60 else str(tqdm.format_interval(seconds))


def step_seconds_text(seconds: float) -> str:
    """Return the duration of a step.

    - `seconds`: the duration.

    >>> [step_seconds_text(seconds) for seconds in (0.0005, 0.0027, 0.031, 1.234)]
    ['0.50 ms', '2.7 ms', '31 ms', '1.23 s']
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = 1000 * seconds
    decimals = 2 if milliseconds < 1 else int(milliseconds < 10)
    return f"{milliseconds:.{decimals}f} ms"


def wrapped(title: str, groups: Iterable[Sequence[str]], width: int | None) -> str:
    """Return a title and fields, wrapped to the width of a line.

    - `title`: the beginning of the first line. The other lines are indented by its width.
    - `groups`: fields after the title, two spaces apart. A group that does not fit into the rest of
      a line begins a new one.
    - `width`: columns of a line; None for a single line.

    >>> print(wrapped("epoch 1/9", [["loss 0.5", "auc 0.75"], ["val_loss 0.6"]], width=40))
    epoch 1/9  loss 0.5  auc 0.75
               val_loss 0.6
    """
    lines = [title]
    for group in groups:
        for i, field in enumerate(group):
            needed = len(SEPARATOR.join(["", *(group if i == 0 else [field])]))
            if width and len(lines[-1]) + needed > width and lines[-1] != title:
                lines.append(" " * len(title))
            lines[-1] += SEPARATOR + field
    return "\n".join(lines)


def fitting(fields: Iterable[str], width: int | None) -> list[str]:
    """Return the first fields that fit, with two spaces before each.

    - `fields`: text, the most important first.
    - `width`: columns that they may take; None for all fields.
    """
    shown: list[str] = []
    for field in fields:
        if width is not None:
            width -= len(SEPARATOR) + len(field)
            if width < 0:
                break
        shown.append(field)
    return shown
