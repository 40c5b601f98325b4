"""The model of the time of a step on many ranks, and the page that compares it with measurements."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def ranks() -> Any:
    """The module benchmarks/ranks.py."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        spec = importlib.util.spec_from_file_location("ranks", ROOT / "benchmarks/ranks.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["ranks"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(folder)


def test_a_sum_takes_the_time_of_its_messages(ranks: Any) -> None:
    link = ranks.Link(latency=1.0, bandwidth=100.0, overhead=0.5)
    assert link.sum(1, 800.0) == 0
    # Twice 7 messages of 1/8 of the bytes, whose latencies overlap.
    assert link.sum(8, 8000.0) == pytest.approx(2 * (1 + 7 * (0.5 + 10)))
    assert link.tree(8, 800.0) == pytest.approx(6 * (1 + 8))  # 3 whole messages up, and 3 down
    assert link.hierarchical(8, 8000.0, memory=1000.0) == pytest.approx(8 + link.sum(8, 8000.0))


def test_an_overlapped_step_waits_for_its_last_sums(ranks: Any) -> None:
    link = ranks.Link(latency=0.0, bandwidth=1.0)
    assert ranks.overlapped_step(30.0, [4.0], link, 2) == ranks.plain_step(30.0, 4.0, link, 2) == 34
    # Fast sums: only the last bucket is left at the end of the pass.
    assert ranks.overlapped_step(30.0, [2.0, 2.0], link, 2) == 32
    # The first sum takes the processor for 3 s, so the last bucket is late.
    link_with_work = ranks.Link(latency=0.0, bandwidth=1.0, processor=1.5)
    assert ranks.overlapped_step(30.0, [2.0, 2.0], link_with_work, 2) == 35
    # Slow sums: the link is busy from the first complete bucket, at 20 s, to the end.
    assert ranks.overlapped_step(30.0, [20.0, 20.0], link, 2) == 60


def test_a_link_is_fitted_through_its_sums(ranks: Any) -> None:
    link = ranks.Link(latency=2e-3, bandwidth=1e8)
    took = {str(size): link.sum(2, size) for size in ranks.SUMS}
    found = ranks.link_of({**took, "overhead": 1e-6, "processor": 1e-9})
    assert found.latency == pytest.approx(2e-3)
    assert found.bandwidth == pytest.approx(1e8)
    assert (found.overhead, found.processor) == (1e-6, 1e-9)


def test_the_page_has_the_figures(ranks: Any) -> None:
    rows = list(csv.DictReader(ranks.FIGURES.read_text().splitlines()))
    page = ranks.PAGE.read_text(encoding="utf-8")
    assert len(rows) >= 8
    for row in rows:
        cells = [f"{float(row[name]):.0f}" for name in list(row)[5:]]
        assert f"| {row['ranks']} | {float(row['rate_gbit']):g} Gb/s | " in page
        assert f"| {' | '.join(cells)} |" in page
        # The page says so.
        numbers = {name: float(text) for name, text in row.items()}
        if numbers["rate_gbit"] <= 4 or numbers["ranks"] == 2:
            limit = 0.065 if numbers["ranks"] == 2 else 0.085
            after = numbers["after_predicted_ms"]
            assert after == pytest.approx(numbers["after_ms"], rel=limit)
        if numbers["ranks"] == 2:
            limit = 0.015 if numbers["rate_gbit"] <= 2 else 0.125
            during = numbers["during_predicted_ms"]
            assert during == pytest.approx(numbers["during_ms"], rel=limit)
