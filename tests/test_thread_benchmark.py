"""benchmarks/threads.py: Amdahl's law for each type of operator, and the tables of a step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = ["threads.py", "--cores", "4", "64", "--threads", "2"]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch):
    """Import the script as a program would: it looks for modules of the suite."""
    for folder in ("scripts", "benchmarks/suite", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    for name in ("threads", "workloads", "profile_step"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import threads

    return threads


def test_the_prediction_meets_both_measured_times(threads) -> None:
    part = threads.Part("Gemm", 6.0, 3.5, 2)
    assert part.seconds(1) == pytest.approx(6.0)
    assert part.seconds(2) == pytest.approx(3.5)
    assert part.seconds(10**9) == pytest.approx(1.0)  # the serial sixth
    four = threads.Part("Gemm", 6.0, 2.25, 4)  # the same operator, on four threads
    assert four.seconds(8) == pytest.approx(part.seconds(8))


@pytest.mark.parametrize(("together", "parallel"), [(2.0, 1.0), (4.0, 0.0), (5.0, 0.0), (1.0, 1.0)])
def test_noise_makes_no_operator_more_than_parallel(
    threads, together: float, parallel: float
) -> None:
    assert threads.Part("Add", 4.0, together, 2).parallel == parallel


def test_nodes_of_a_type_add_up_and_the_rest_is_serial(threads) -> None:
    one = {("Gemm", "a"): 3.0, ("Gemm", "b"): 5.0, ("Concat", "c"): 1.0}
    two = {("Gemm", "a"): 1.5, ("Gemm", "b"): 2.5, ("Concat", "c"): 1.0}
    parts = threads.parts_of({1: one, 2: two}, {1: 10.0, 2: 6.0}, 2)
    found = {part.op_type: (part.alone, part.together) for part in parts}
    assert found == {"Gemm": (8.0, 4.0), "Concat": (1.0, 1.0), threads.BETWEEN: (1.0, 1.0)}
    step = threads.Step("net", parts, 10.0, 6.0)
    assert step.seconds(2) == pytest.approx(6.0)
    assert step.seconds(8) == pytest.approx(3.0)
    assert step.limit(2).op_type == "Gemm"
    assert step.limit(64).op_type in ("Concat", threads.BETWEEN)


def test_the_table_shows_measured_and_predicted_speed_ups(
    threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", OPTIONS)
    parts = (threads.Part("Gemm", 0.006, 0.003, 2), threads.Part("Concat", 0.002, 0.002, 2))
    lines = threads.step_table(
        [threads.Step("net", parts, 0.008, 0.005)], threads.parse_arguments()
    )
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    # 8 / (2 + 6 / 4) and 8 / (2 + 6 / 64)
    assert lines[2] == "| net | 8 | 1.60 | 25 % | 2.3 | 3.8 | Concat (96 %) |"
