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


def test_a_sum_takes_the_messages_of_the_better_algorithm(ranks: Any) -> None:
    link = ranks.Link(latency=1.0, bandwidth=100.0)
    assert link.sum(1, 800.0) == 0
    assert link.sum(8, 8000.0) == pytest.approx(14 * (1 + 10))  # ring: 14 messages of 1/8
    assert link.sum(8, 8.0) == pytest.approx(3 * (1 + 0.08))  # doubling: 3 whole messages
    # 8 ranks of one machine send nothing; 64 send as 8 machines do.
    assert link.hierarchical(8, 8000.0, memory=1000.0) == 8
    assert link.hierarchical(64, 8000.0, memory=1000.0) == pytest.approx(8 + 14 * 11)


def test_an_overlapped_step_waits_for_its_last_sums(ranks: Any) -> None:
    link = ranks.Link(latency=0.0, bandwidth=1.0)
    assert ranks.overlapped_step(30.0, [4.0], link, 2) == ranks.plain_step(30.0, 4.0, link, 2) == 34
    # Fast sums: only the last bucket is left at the end of the pass.
    assert ranks.overlapped_step(30.0, [2.0, 2.0], link, 2) == 32
    # Slow sums: the link is busy from the first complete bucket, at 20 s, to the end.
    assert ranks.overlapped_step(30.0, [20.0, 20.0], link, 2) == 60


def test_a_link_is_fitted_through_its_sums(ranks: Any) -> None:
    link = ranks.Link(latency=2e-3, bandwidth=1e8)
    found = ranks.link_of({str(size): link.sum(2, size) for size in ranks.SUMS})
    assert found.latency == pytest.approx(2e-3)
    assert found.bandwidth == pytest.approx(1e8)


def test_the_page_has_the_figures(ranks: Any) -> None:
    rows = list(csv.DictReader(ranks.FIGURES.read_text().splitlines()))
    page = ranks.PAGE.read_text(encoding="utf-8")
    assert len(rows) >= 4
    for row in rows:
        cells = [f"{float(row[name]):.0f}" for name in list(row)[3:]]
        assert f"{float(row['rate_gbit']):g} Gb/s | " in page
        assert f"| {' | '.join(cells)} |" in page
        # The page says so.
        assert float(row["after_predicted_ms"]) == pytest.approx(float(row["after_ms"]), rel=0.145)
        part = float(row["during_predicted_ms"]) / float(row["during_ms"])
        assert 0.885 < part < 0.945
        assert float(row["during_ms"]) < float(row["after_ms"])
