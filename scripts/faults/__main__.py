"""The command line of `make faults`: a progress bar, a table, and exit code 1 for a broken law."""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # `python scripts/faults`: modules are found from the root of the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tqdm import tqdm

from scripts.faults.points import Result, Room, is_sampled
from scripts.faults.savers import SAVERS
from scripts.faults.training import SUBJECT, TrainingRoom

CHUNKS = 16  # parts of the training's points
SAMPLE = ("export, external data", "export_adapter", "PredictionWriter")  # of `--sample`
Task = tuple[
    str, bool, int, int, int
]  # subject, replaces, part, number of parts, one point in (0 for all)


def tasks(words: list[str], sample: bool) -> Iterator[Task]:
    """Yield what one process does at a time, the longest first.

    - `words`: only functions whose names have one of these words; [] for all.
    - `sample`: a few points of each.
    """
    if not words or any(word in SUBJECT for word in words):
        parts = 1 if sample else CHUNKS
        for resumes in (True,) if sample else (False, True):
            yield from ((SUBJECT, resumes, part, parts, 40 * sample) for part in range(parts))
    for subject in SAVERS:
        if not words or any(word in subject for word in words):
            yield from ((subject, replaces, 0, 1, 12 * sample) for replaces in (True, False))


def results_of(task: Task) -> list[Result]:
    """Return the results of a task, in a new process."""
    os.fsync = lambda handle: None  # flushing would take most of the time
    subject, replaces, part, parts, one_in = task
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        training = subject == SUBJECT
        room = TrainingRoom(replaces, folder) if training else Room(subject, replaces, folder)
        points = [point for point in room.points() if is_sampled(point, one_in or 1)]
        return [room.check(point) for point in points[part::parts]]


def print_table(results: list[Result]) -> None:
    """Print how often each function had each outcome."""
    outcomes = sorted({result.outcome for result in results})
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        over = " (over old files)" if result.point.replaces else ""
        if result.point.subject == SUBJECT and over:
            over = " (resumed)"
        table[result.point.subject + over][result.outcome] += 1
        table["all"][result.outcome] += 1
    width = max(map(len, table))
    print(f"{'':{width}}", *(f"{outcome:>16}" for outcome in outcomes))
    for subject in sorted(table, key=lambda name: (name == "all", name)):
        print(f"{subject:{width}}", *(f"{table[subject][o] or '':>16}" for o in outcomes))


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults", description="Let each call for a file fail.")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sample", action="store_true", help="a few points, in some seconds")
    parser.add_argument("words", nargs="*", help="functions whose names have one of these words")
    arguments = parser.parse_args()
    words = arguments.words or ([*SAMPLE, SUBJECT] if arguments.sample else [])
    todo = list(tasks(words, arguments.sample))
    began = time.monotonic()
    results: list[Result] = []
    context = multiprocessing.get_context("fork")
    with context.Pool(arguments.processes, maxtasksperchild=1) as pool:
        bar = tqdm(pool.imap_unordered(results_of, todo), total=len(todo), unit="task")
        for found in bar:
            results += found
            for result in found:
                if result.problem:
                    tqdm.write(f"{result.point}: {result.outcome}: {result.problem}")
    print_table(results)
    broken = sum(bool(result.problem) for result in results)
    seconds = time.monotonic() - began
    print(f"{len(results)} faults in {seconds:.0f} s; {broken} laws broken")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
