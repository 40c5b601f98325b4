"""What is measured, in which order: contenders take turns, so that a busy minute of the machine
meets all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from contenders import BRIEF, DECIDING, ENTRIES, RIVALS
from processes import Process, alone, surroundings
from workloads import WORKLOADS, Job

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}  # relative, between losses
MORE = 3  # times as many turns for those who decide
MEMORY_OF_ALL = "mlp"  # the workload on which every contender's memory is measured


@dataclass
class Timing:
    """Seconds, of several rounds."""

    samples: list[float] = field(default_factory=list)
    spent: float = 0.0  # on all of them

    @property
    def quartiles(self) -> tuple[float, float, float]:
        return quartiles(self.samples)

    @property
    def median(self) -> float:
        return self.quartiles[1]

    def ratios(self, other: Timing) -> tuple[float, float, float]:
        """To another, the quartiles of the ratios within each round: a busy minute slows both."""
        return quartiles([ours / theirs for ours, theirs in zip(self.samples, other.samples)])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = np.percentile(values, [25, 50, 75])
    return float(low), float(median), float(high)


@dataclass
class Row:
    """One contender with as many threads on one workload."""

    workload: str
    optimizer: str
    contender: str
    threads: int
    step: Timing = field(default_factory=Timing)
    fit: Timing = field(default_factory=Timing)
    losses: list[float] = field(default_factory=list)
    build_seconds: float = float("nan")
    remark: str = ""  # why it does not take part, or cannot be compared
    comparable: bool = False
    steps: bool = False  # whether it has a bare step

    @property
    def title(self) -> str:
        return ENTRIES[self.contender].title

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Row:
        return cls(**{**given, "step": Timing(**given["step"]), "fit": Timing(**given["fit"])})


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    contenders: Sequence[str]
    rounds: int
    seconds: float  # of one sample
    # of all samples of a contender's steps, or fits, on a workload; three are taken in any case
    budget: float
    threads: Sequence[int]  # fewest first
    folder: Path
    pythons: Mapping[str, str]
    everywhere: bool = False  # all contenders on the brief workloads, too

    @property
    def log(self) -> Path:
        return self.folder / "workers.log"

    @property
    def lanes(self) -> list[tuple[str, int]]:
        """Contenders with their numbers of threads."""
        return [(name, threads) for name in self.contenders for threads in self.threads]

    def lanes_of(self, workload: str) -> list[tuple[str, int]]:
        """On larger networks, contenders outside the headline have all threads only. On the brief
        ones all contenders have: compiling for one thread would take as long again.
        """
        if WORKLOADS[workload].brief:
            return [
                (name, threads)
                for name, threads in self.lanes
                if threads == self.threads[-1] and (self.everywhere or name in BRIEF)
            ]
        small = WORKLOADS[workload].small
        return [
            (name, threads)
            for name, threads in self.lanes
            if small or name in DECIDING or threads == self.threads[-1]
        ]

    def environment(self, threads: int) -> dict[str, str]:
        return surroundings(threads, self.folder)

    def job(self, workload: str, optimizer: str, threads: int) -> str:
        return Job(WORKLOADS[workload], optimizer, self.folder, threads).to_json()


class Field:
    """The contenders' processes, one for each number of threads.

    They begin anew for each race, as a user's do: PyTorch would keep memory that it took for another
    network, and so need not take it from the system in each step. `absent` has the reason of those
    that cannot take part.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.absent: dict[str, str] = {}
        self._processes: dict[tuple[str, int], Process] = {}

    def race(self, workload: str, optimizer: str) -> list[Row]:
        """All of them on one workload."""
        lanes = self.plan.lanes_of(workload)
        rows = [Row(workload, optimizer, name, threads) for name, threads in lanes]
        with ExitStack() as stack:
            self._processes = {}
            for lane in lanes:
                self._start(stack, *lane)
            for row in rows:
                self._ready(row)
            compare(rows)
            for kind in ("step", "fit"):
                self._rounds([row for row in rows if row.losses], kind)
        return rows

    def python_of(self, name: str) -> str | None:
        """The Python of a contender; None, and a reason in `absent`, where there is none."""
        environment = ENTRIES[name].environment
        python = self.plan.pythons.get(environment)
        if python is None:
            self.absent[name] = f"not installed: no environment {environment}"
        return None if name in self.absent else str(python)

    def _start(self, stack: ExitStack, name: str, threads: int) -> None:
        python = self.python_of(name)
        if python is None:
            return
        process = stack.enter_context(
            Process(python, name, self.plan.environment(threads), self.plan.log)
        )
        answer = process.ask("load")
        if "import_seconds" in answer:
            self._processes[name, threads] = process
        elif "refused" in answer:
            self.absent[name] = answer["refused"]
        elif "absent" in answer:
            self.absent[name] = f"not installed: {answer['absent']}"
        else:
            self.absent[name] = f"failed: {answer['failed']}"

    def _ready(self, row: Row) -> None:
        process = self._processes.get((row.contender, row.threads))
        if process is None:
            row.remark = self.absent[row.contender]
            return
        job = self.plan.job(row.workload, row.optimizer, row.threads)
        built = process.ask("build", job=job)
        answer = built if "build_seconds" not in built else process.ask("losses")
        if "losses" in answer:
            row.build_seconds, row.losses = built["build_seconds"], answer["losses"]
            row.remark, row.steps = answer["remark"], answer["steps"]
            return
        row.remark = answer.get("refused") or f"failed: {answer['failed']}"

    def _rounds(self, rows: list[Row], kind: str) -> None:
        """A contender has samples of the first rounds without a gap, so that the same place in two
        lists is the same round.
        """
        for number in range(MORE * self.plan.rounds):
            for row in rows:
                if kind == "fit" or row.steps:
                    self._turn(row, kind, number)

    def _turn(self, row: Row, kind: str, number: int) -> None:
        timing: Timing = getattr(row, kind)
        more = MORE if row.contender in DECIDING else 1
        enough = number >= 3 and timing.spent > more * self.plan.budget
        if enough or number != len(timing.samples):
            return
        if number >= more * self.plan.rounds:
            return
        process = self._processes[row.contender, row.threads]
        answer = process.ask(kind, seconds=self.plan.seconds)
        if "seconds" in answer:
            timing.samples.append(answer["seconds"])
            timing.spent += answer["took"]
            return
        row.remark = f"{kind} failed: {answer.get('failed') or answer.get('refused')}"


def compare(rows: list[Row]) -> None:
    """Whose losses are those of PyTorch, or of the first where PyTorch is not there."""
    trained = [row for row in rows if row.losses]
    reference = next(
        (row for name in RIVALS for row in trained if row.contender == name),
        trained[0] if trained else None,
    )
    for row in trained:
        assert reference is not None
        tolerance = TOLERANCE[ENTRIES[row.contender].precision]
        row.comparable = bool(np.allclose(row.losses, reference.losses, rtol=tolerance, atol=0))
        if not row.comparable:
            row.remark = (
                f"not comparable: its loss is {row.losses[-1]:.5g}, not {reference.losses[-1]:.5g}"
            )


def once(plan: Plan, field: Field, workload: str, optimizer: str) -> list[dict[str, Any]]:
    """Import, first step, memory: each in a process that does nothing else, with all threads."""
    found = []
    threads = plan.threads[-1]
    for name in plan.contenders:
        python = field.python_of(name)
        if python is None or not (ENTRIES[name].measures_memory or workload == MEMORY_OF_ALL):
            continue
        job = plan.job(workload, optimizer, threads)
        answer = alone(python, name, job, plan.environment(threads), plan.log)
        if "peak_memory" in answer:
            found.append(
                {"workload": workload, "optimizer": optimizer, "contender": name, **answer}
            )
    return found
