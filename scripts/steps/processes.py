"""Cases in a process of their own, which a crash of a runtime ends."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import scripts.steps.folders as files
from scripts.steps.attempt import PASSED, Outcome, attempt, smallest
from scripts.steps.runtimes import RUNTIMES


def one_process() -> ProcessPoolExecutor:
    """Return a pool of one new process."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def run_case(name: str, folder: Path, case: str, tolerance: float) -> Outcome:
    """Run a case. If it fails, find the operator that fails alone, and write it as a case."""
    runtime = RUNTIMES[name]
    model, feeds, right = files.read_case(folder / case)
    outcome = attempt(runtime, model, feeds, right, tolerance)
    found = None
    if outcome.result != PASSED:
        found = smallest(runtime, model, feeds, tolerance, outcome.result)
    if found is None:
        return outcome
    alone, given, expected, reason = found
    operator = alone.graph.node[0].op_type
    target = folder / "failures" / name / operator
    if not target.exists():
        files.write_case(target, alone, given, expected)
    return replace(outcome, reason=reason, node=operator)
