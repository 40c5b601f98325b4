"""What is measured, in which order: contenders take turns, so that the machine's moods meet all of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from contenders import DECIDING, ENTRIES, RIVALS
from processes import Process, alone
from workloads import WORKLOADS, Job

TOLERANCE = 1e-3  # relative, between losses
MORE = 3  # times as many turns for those who decide
MEMORY_OF_ALL = "mlp"  # the workload on which every contender's memory is measured


@dataclass
class Timing:
    """Seconds, of several rounds."""

    samples: list[float] = field(default_factory=list)
    spent: float = 0.0  # on all of them

    @property
    def quartiles(self) -> tuple[float, float, float]:
        low, median, high = np.percentile(self.samples, [25, 50, 75])
        return float(low), float(median), float(high)

    @property
    def median(self) -> float:
        return self.quartiles[1]

    def ratio(self, other: Timing) -> float:
        """To another, the median of the ratios within each round: what is slow for a minute is slow
        for both.
        """
        return float(
            np.median([ours / theirs for ours, theirs in zip(self.samples, other.samples)])
        )


@dataclass
class Row:
    """One contender on one workload."""

    workload: str
    optimizer: str
    contender: str
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

    @property
    def ours(self) -> bool:
        return ENTRIES[self.contender].ours


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    workloads: Sequence[str]
    optimizers: Sequence[str]
    contenders: Sequence[str]
    rounds: int
    seconds: float  # of one sample
    # of all samples of a contender's steps, or fits, on a workload; three are taken in any case
    budget: float
    threads: int
    folder: Path
    pythons: Mapping[str, str]
    environment: Mapping[str, str]

    @property
    def log(self) -> Path:
        return self.folder / "workers.log"

    def job(self, workload: str, optimizer: str) -> str:
        return Job(WORKLOADS[workload], optimizer, self.folder, self.threads).to_json()


class Field:
    """The contenders' processes, each begun once;

    `absent` has the reason of those that are not there.
    """

    def __init__(self, plan: Plan, stack: ExitStack) -> None:
        self.plan, self._stack = plan, stack
        self.processes: dict[str, Process] = {}
        self.pythons: dict[str, str] = {}
        self.loaded: dict[str, dict[str, Any]] = {}
        self.absent: dict[str, str] = {}
        for name in plan.contenders:
            self._start(name)

    def _start(self, name: str) -> None:
        self.absent[name] = (
            f"not installed: no environment {' or '.join(ENTRIES[name].environments)}"
        )
        for environment in ENTRIES[name].environments:
            python = self.plan.pythons.get(environment)
            if python is None:
                continue
            process = self._stack.enter_context(
                Process(python, name, self.plan.environment, self.plan.log)
            )
            answer = process.ask("load")
            if "import_seconds" in answer:
                del self.absent[name]
                self.processes[name], self.pythons[name], self.loaded[name] = (
                    process,
                    python,
                    answer,
                )
                return
            self.absent[name] = (
                f"not installed: {answer['absent']}"
                if "absent" in answer
                else f"failed: {answer['failed']}"
            )

    def restart(self, name: str) -> None:
        """After its process died."""
        del self.processes[name]
        self._start(name)

    def race(self, workload: str, optimizer: str) -> list[Row]:
        """All of them on one workload."""
        rows = [self._ready(name, workload, optimizer) for name in self.plan.contenders]
        compare(rows)
        for kind in ("step", "fit"):
            self._rounds([row for row in rows if row.losses], kind)
        return rows

    def _ready(self, name: str, workload: str, optimizer: str) -> Row:
        row = Row(workload, optimizer, name)
        if name in self.absent:
            row.remark = self.absent[name]
            return row
        process = self.processes[name]
        built = process.ask("build", job=self.plan.job(workload, optimizer))
        answer = built if "build_seconds" not in built else process.ask("losses")
        if "losses" in answer:
            row.build_seconds, row.losses = built["build_seconds"], answer["losses"]
        else:
            row.remark = answer.get("refused") or f"failed: {answer['failed']}"
            if process.ended:
                self.restart(name)
        row.steps = answer.get("steps", False)
        return row

    def _rounds(self, rows: list[Row], kind: str) -> None:
        """A contender has samples of the first rounds without a gap, so that the same place in two
        lists is the same round.
        """
        for number in range(MORE * self.plan.rounds):
            for row in rows:
                timing: Timing = getattr(row, kind)
                more = MORE if row.contender in DECIDING else 1
                if (
                    row.contender not in self.processes
                    or (kind == "step" and not row.steps)
                    or number >= more * self.plan.rounds
                ):
                    continue
                if len(timing.samples) >= 3 and timing.spent > more * self.plan.budget:
                    continue
                process = self.processes[row.contender]
                answer = process.ask(kind, seconds=self.plan.seconds)
                if "seconds" in answer:
                    timing.samples.append(answer["seconds"])
                    timing.spent += answer["took"]
                else:
                    row.remark = f"{kind} failed: {answer.get('failed') or answer.get('refused')}"
                    row.steps = False
                    if process.ended:
                        self.restart(row.contender)


def compare(rows: list[Row]) -> None:
    """Whose losses are those of PyTorch, or of the first where PyTorch is not there."""
    trained = [row for row in rows if row.losses]
    reference = next(
        (row for name in RIVALS for row in trained if row.contender == name),
        trained[0] if trained else None,
    )
    for row in trained:
        assert reference is not None
        row.comparable = bool(np.allclose(row.losses, reference.losses, rtol=TOLERANCE, atol=0))
        if not row.comparable:
            row.remark = (
                f"not comparable: its loss is {row.losses[-1]:.5g}, not {reference.losses[-1]:.5g}"
            )


def once(plan: Plan, field: Field, workload: str, optimizer: str) -> list[dict[str, Any]]:
    """Import, first step, memory: each in a process that does nothing else."""
    found = []
    for name, python in field.pythons.items():
        if ENTRIES[name].measures_memory or workload == MEMORY_OF_ALL:
            answer = alone(python, name, plan.job(workload, optimizer), plan.environment, plan.log)
            if "peak_memory" in answer:
                found.append(
                    {"workload": workload, "optimizer": optimizer, "contender": name, **answer}
                )
    return found
