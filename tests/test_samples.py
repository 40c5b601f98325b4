"""The tests that run on each build of onnxruntime in `.ci/run`."""

import re
from pathlib import Path

import pytest

from tests.samples import (
    DIVIDED,
    LEFT_OUT_OF_QUICK,
    ON_TRAINING_BUILD,
    part_of_build,
    quick_sample,
)

ROOT = Path(__file__).resolve().parents[1]
CASES = [f"{DIVIDED[0]}::test_{i}[case{j}]" for i in range(3) for j in range(40)]
WHOLE = [f"tests/test_networks.py::test_it[case{j}]" for j in range(9)]
ON_TRAINING = ["tests/cli/test_fit.py::test_it[case0]", "tests/test_losses.py::test_it"]
NAMES = [*CASES, *WHOLE, *ON_TRAINING]


def test_each_case_runs_on_a_build_and_each_test_on_both() -> None:
    training, plain = (part_of_build(NAMES, is_training=build) for build in (True, False))
    assert training | plain == set(NAMES)
    assert plain.isdisjoint(ON_TRAINING)
    assert training & plain >= set(WHOLE)
    both = training & plain & set(CASES)
    assert {name.partition("[")[0] for name in both} == {n.partition("[")[0] for n in CASES}
    assert len(both) == 3
    for part in (training, plain):
        assert 40 <= len(part & set(CASES)) <= 80


@pytest.mark.parametrize("file", DIVIDED)
def test_no_build_skips_what_is_divided(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not re.search(
        r"importorskip|skipif|HAS_BUILDER|needs_builder|mark\.torch|onnxruntime has no", text
    )


def test_a_quick_sample_has_every_test_and_no_slow_file() -> None:
    slow = [f"{LEFT_OUT_OF_QUICK[0]}::test_it"]
    sample = quick_sample([*NAMES, *slow])
    assert {name.partition("[")[0] for name in sample} == {n.partition("[")[0] for n in NAMES}
    assert len(sample) < len(NAMES) / 5


@pytest.mark.parametrize("place", [*LEFT_OUT_OF_QUICK, *ON_TRAINING_BUILD, *DIVIDED])
def test_places_exist(place: str) -> None:
    assert (ROOT / place).exists()
