"""The samples of tests that `--quick` and `--sample` run."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.samples import (
    LARGE_PRODUCT,
    LEFT_OUT_OF_QUICK,
    in_sample_of_product,
    in_sample_of_table,
    quick_sample,
)

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


def test_a_sample_of_a_product_has_every_value_of_each_parameter() -> None:
    values = itertools.product(range(30), ["full", "in_place"], [False, True])
    cases = {f"test_it[{value}]": list(enumerate(value)) for value in values}
    kept = in_sample_of_product(cases)
    for number in range(3):
        assert {cases[name][number] for name in kept} == {v[number] for v in cases.values()}
    assert len(kept) < 36
    few = dict(list(cases.items())[:LARGE_PRODUCT])
    assert in_sample_of_product(few) == set(few)
    table = {f"test_it[{i}]": [("case", i)] for i in range(300)}
    assert in_sample_of_product(table) == set(table)


FOLDER = """
import pytest

CASES = [pytest.param(f"case{i}", i, id=f"case {i}") for i in range(40)]


@pytest.fixture(params=["full", "in_place"])
def backend(request):
    return request.param


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("name", "number"), CASES)
def test_product(name, number, accumulate, backend): ...


@pytest.mark.table
@pytest.mark.parametrize("number", range(300))
def test_table(number): ...
"""


def test_the_option_takes_samples(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FOLDER)
    options = "--collect-only -q --sample -o markers=table -p tests.conftest -p no:cacheprovider"
    command = [sys.executable, "-m", "pytest", *options.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    kept = done.stdout.splitlines()
    assert 80 < sum("test_table" in name for name in kept) < 120
    product = [name for name in kept if "test_product" in name]
    assert 40 <= len(product) < 46
    assert {name.partition("case ")[2].partition("-")[0] for name in product} == set(
        map(str, range(40))
    )
    for value in ("full", "in_place", "-1", "-2"):
        assert any(value in name for name in product)


@pytest.mark.parametrize("place", LEFT_OUT_OF_QUICK)
def test_places_exist(place: str) -> None:
    assert (ROOT / place).exists()
