"""A picture of horizontal bars, written as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnxfit.drawing.labels import clean

FONT = "Helvetica,Arial,sans-serif"
INK = "#1f2937"
FAINT = "#6b7280"
GRID = "#e5e7eb"
COLOUR = "#2563eb"
OTHER_COLOUR = "#16a34a"  # of bars to the left of zero
FONT_PIXELS = 12
CHARACTER_PIXELS = 6.8  # an upper estimate of the mean width
ROW_PIXELS = 18
BAR_PIXELS = 11
PANEL_PIXELS = 300  # of the bars
VALUE_PIXELS = 70  # of the texts after them
MARGIN = 14
TOP = 62  # above the first row: title, titles of panels, ticks
MAX_DECADES_WITH_EVERY_TICK = 6
MAX_STEPS = 6  # between the ticks of a linear axis


@dataclass(frozen=True)
class BarPanel:
    """Bars of one figure.

    - `title`: the title above them.
    - `values`: one value for each row. On a logarithmic axis they are shares, at least 0.
    - `texts`: the text after each bar.
    - `logarithmic`: whether the axis is.
    """

    title: str
    values: Sequence[float]
    texts: Sequence[str]
    logarithmic: bool = False

    def ticks(self) -> list[tuple[float, str]]:
        """Return places on the axis between 0 and 1, and their labels."""
        return self._decades() if self.logarithmic else self._steps()

    def bar(self, value: float) -> tuple[float, float]:
        """Return the places at which the bar of a value begins and ends."""
        if self.logarithmic:
            low, high = self._exponents()
            place = (math.log10(value) - low) / (high - low) if value > 0 else 0.0
            return 0.0, min(place, 1.0)
        zero, end = self._place(0.0), self._place(value)
        return min(zero, end), max(zero, end)

    def _exponents(self) -> tuple[int, int]:
        finite = [math.log10(value) for value in self.values if 0 < value < math.inf]
        low = math.ceil(min(finite, default=0.0)) - 1  # even the smallest noise has a bar
        return low, max(math.ceil(max(finite, default=0.0)), low + 1)

    def _decades(self) -> list[tuple[float, str]]:
        low, high = self._exponents()
        step = 1 + (high - low) // MAX_DECADES_WITH_EVERY_TICK
        return [
            ((exponent - low) / (high - low), f"{100 * 10.0**exponent:g} %")
            for exponent in range(low, high + 1, step)
        ]

    def _range(self) -> tuple[float, float]:
        low, high = min([0.0, *self.values]), max([0.0, *self.values])
        return (low, high) if high > low else (0.0, 1.0)

    def _place(self, value: float) -> float:
        low, high = self._range()
        return (value - low) / (high - low)

    def _steps(self) -> list[tuple[float, str]]:
        low, high = self._range()
        step = _round_step((high - low) / MAX_STEPS)
        first, last = math.ceil(low / step), math.floor(high / step)
        return [(self._place(i * step), f"{i * step:.6g}") for i in range(first, last + 1)]


def bars_svg(title: str, labels: Sequence[str], panels: Sequence[BarPanel]) -> str:
    """Return an SVG document with a row for each label, and the panels side by side.

    Every text is escaped, because names may come from an untrusted file.
    """
    labels = [clean(label) for label in labels]
    left = MARGIN + max(map(len, labels), default=0) * CHARACTER_PIXELS + 8
    each = PANEL_PIXELS + VALUE_PIXELS
    width = max(left + len(panels) * each + MARGIN, len(title) * CHARACTER_PIXELS * 1.3)
    height = TOP + len(labels) * ROW_PIXELS + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
        f' viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}"'
        f' font-size="{FONT_PIXELS}">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        _text(MARGIN, 20, title, weight="bold", size=14),
    ]
    for row, label in enumerate(labels):
        lines.append(_text(left - 8, _middle(row) + 4, label, anchor="end"))
    for number, panel in enumerate(panels):
        lines += _panel_lines(panel, left + number * each, height - MARGIN)
    return "\n".join([*lines, "</svg>"])


def _panel_lines(panel: BarPanel, left: float, bottom: float) -> Iterator[str]:
    yield _text(left, 40, panel.title, weight="bold")
    for place, label in panel.ticks():
        x = left + place * PANEL_PIXELS
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{bottom:.1f}" stroke="{GRID}"/>'
        )
        yield _text(x, TOP - 8, label, anchor="middle", size=10, colour=FAINT)
    for row, (value, text) in enumerate(zip(panel.values, panel.texts)):
        begin, end = panel.bar(value)
        colour = OTHER_COLOUR if value < 0 else COLOUR
        yield (
            f'<rect x="{left + begin * PANEL_PIXELS:.1f}" y="{_middle(row) - BAR_PIXELS / 2:.1f}"'
            f' width="{(end - begin) * PANEL_PIXELS:.1f}" height="{BAR_PIXELS}" fill="{colour}"/>'
        )
        yield _text(left + end * PANEL_PIXELS + 4, _middle(row) + 4, text, size=10, colour=FAINT)


def _middle(row: int) -> float:
    return TOP + (row + 0.5) * ROW_PIXELS


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    size: int = FONT_PIXELS,
    colour: str = INK,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
        f' font-size="{size}" fill="{colour}">{html.escape(clean(text))}</text>'
    )


def _round_step(step: float) -> float:
    """Return the next larger number of the form 1, 2 or 5 times a power of ten.

    >>> _round_step(0.3), _round_step(7.0)
    (0.5, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(step))
    return next(
        (factor * power for factor in (1.0, 2.0, 5.0) if factor * power >= step), 10 * power
    )
