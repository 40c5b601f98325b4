"""Pictures of bars."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from onnxfit.drawing.bars import BarPanel, bars_svg

LINEAR = [[0.0, 0.0], [1.0, 2.0, 3.0], [-1e-7, 5e-8], [-4.0], [1e30, -1.0], [0.07]]
LOGARITHMIC = [[0.01], [1.0, 0.001], [0.0, 0.0], [0.02, math.inf], [1e-9, 3.0], [50.0]]


@pytest.mark.parametrize("values", LINEAR)
def test_linear_bars_are_proportional_to_their_values(values: list[float]) -> None:
    panel = BarPanel("t", values, [""] * len(values))
    bars = [panel.bar(value) for value in values]
    assert all(0 <= begin <= end <= 1 for begin, end in bars)
    lengths = [end - begin for begin, end in bars]
    whole = (max(0, *values) - min(0, *values)) or 1  # of the axis
    np.testing.assert_allclose(lengths, np.abs(values) / whole, atol=1e-12)
    zero = panel.bar(0.0)[0]
    for value, (begin, end) in zip(values, bars):
        assert (end if value < 0 else begin) == pytest.approx(zero)


@pytest.mark.parametrize("values", LOGARITHMIC)
def test_logarithmic_bars_grow_with_the_exponent(values: list[float]) -> None:
    panel = BarPanel("t", values, [""] * len(values), logarithmic=True)
    ends = [panel.bar(value)[1] for value in values]
    assert all(panel.bar(value)[0] == 0 and 0 <= end <= 1 for value, end in zip(values, ends))
    assert [end == 0 for end in ends] == [value == 0 for value in values]
    ticks = {label: place for place, label in panel.ticks()}
    for value, end in zip(values, ends):
        assert ticks.get(f"{100 * value:g} %", end) == pytest.approx(end)


@pytest.mark.parametrize("logarithmic", [True, False])
@pytest.mark.parametrize("values", LINEAR + LOGARITHMIC)
def test_ticks_are_few_and_evenly_spaced(values: list[float], logarithmic: bool) -> None:
    values = [min(abs(v) if logarithmic else v, 1e300) for v in values]
    ticks = BarPanel("t", values, [""] * len(values), logarithmic=logarithmic).ticks()
    places = [place for place, _ in ticks]
    assert 2 <= len(places) <= 8
    assert 0 <= min(places) <= max(places) <= 1 + 1e-9
    steps = [b - a for a, b in itertools.pairwise(places)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert len({label for _, label in ticks}) == len(ticks)


def test_every_text_is_in_the_picture_and_escaped() -> None:
    panel = BarPanel("a & b", [1.0, 2.0], ["<one>", "two\x07"])
    root = ElementTree.fromstring(bars_svg("title", ["first", "<script>"], [panel, panel]))
    texts = [e.text for e in root if e.tag.endswith("text")]
    for text in ("title", "first", "<script>", "a & b", "<one>", r"two\x07"):
        assert text in texts
    assert {e.tag.rpartition("}")[2] for e in root} == {"rect", "text", "line"}


def test_a_picture_without_rows() -> None:
    assert ElementTree.fromstring(bars_svg("nothing", [], [BarPanel("t", [], [])])) is not None
