"""What is measured, in which order: each repetition is a new process, and the contenders take
turns, so that a busy minute of the machine meets all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from contenders import ENTRIES, RIVALS
from processes import HERE, Answer, run_json, surroundings
from workloads import WORKLOADS, Job

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}  # relative, between losses
KINDS = ("step", "fit")


@dataclass
class Row:
    """One contender on one workload: an item of each list for each repetition."""

    workload: str
    optimizer: str
    contender: str
    step: list[float] = field(default_factory=list)  # seconds
    fit: list[float] = field(default_factory=list)  # seconds of a batch
    memory: list[float] = field(default_factory=list)  # peak bytes
    losses: list[float] = field(default_factory=list)  # of the first steps
    remark: str = ""  # why it does not take part, or cannot be compared
    comparable: bool = False

    @property
    def title(self) -> str:
        return ENTRIES[self.contender].title

    def add(self, answer: Answer) -> None:
        """Add a repetition, or the reason why there is none."""
        if "fit" not in answer:
            ((what, reason),) = answer.items()
            self.remark = f"{what}: {reason}"
            return
        self.losses, self.remark = answer["losses"], answer["remark"]
        for kind in (*KINDS, "memory"):
            if kind in answer:
                getattr(self, kind).append(answer[kind])

    def middle(self, kind: str) -> float:
        return median(getattr(self, kind))

    def least(self, kind: str) -> float:
        return float(min(getattr(self, kind)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """How much is measured; the first contender is compared with the fastest of the others."""

    contenders: Sequence[str]
    repetitions: int
    seconds: float  # of a step's measurement, and of a fit's
    threads: int
    folder: Path
    pythons: Mapping[str, str]

    @property
    def log(self) -> Path:
        return self.folder / "workers.log"

    @property
    def environment(self) -> dict[str, str]:
        return surroundings(self.threads, self.folder)


def race(plan: Plan, workload: str, optimizer: str) -> list[Row]:
    """All contenders on one workload. Each repetition begins with another contender."""
    rows = [Row(workload, optimizer, name) for name in plan.contenders]
    for number in range(plan.repetitions):
        first = number % len(rows)
        for row in rows[first:] + rows[:first]:
            if not row.remark or row.fit:
                row.add(repetition(plan, row))
    compare(rows)
    return rows


def repetition(plan: Plan, row: Row) -> Answer:
    """The answer of a new process."""
    environment = ENTRIES[row.contender].environment
    python = plan.pythons.get(environment)
    if python is None:
        return {"absent": f"no environment {environment}"}
    job = Job(WORKLOADS[row.workload], row.optimizer, plan.folder, plan.threads).to_json()
    command = [python, str(HERE / "worker.py"), row.contender, job, str(plan.seconds)]
    return run_json(command, plan.environment, plan.log)


def compare(rows: Sequence[Row]) -> None:
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
