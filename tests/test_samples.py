"""The samples of tests that `--quick` and `--sample` run."""

from pathlib import Path

import pytest

from tests.samples import LEFT_OUT_OF_QUICK, in_sample_of_table, quick_sample

ROOT = Path(__file__).resolve().parents[1]
CASES = [f"tests/test_networks.py::test_{i}[case{j}]" for i in range(3) for j in range(40)]
NAMES = [*CASES, "tests/cli/test_fit.py::test_it[case0]", "tests/test_losses.py::test_it"]


def test_a_quick_sample_has_every_test_and_no_slow_file() -> None:
    slow = [f"{LEFT_OUT_OF_QUICK[0]}::test_it"]
    sample = quick_sample([*NAMES, *slow])
    assert {name.partition("[")[0] for name in sample} == {n.partition("[")[0] for n in NAMES}
    assert len(sample) < len(NAMES) / 5


def test_a_sample_has_about_a_third_of_a_table() -> None:
    names = [f"tests/test_tables.py::test_it[case{i}]" for i in range(300)]
    assert 80 < sum(map(in_sample_of_table, names)) < 120


@pytest.mark.parametrize("place", LEFT_OUT_OF_QUICK)
def test_places_exist(place: str) -> None:
    assert (ROOT / place).exists()
