"""Measured parts in a file, so that a run that was cut off goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import Plan, Row
from processes import HERE, ROOT, versions
from workloads import OPTIMIZERS, WORKLOADS

REPORTING = ("__main__.py", "report.py", "guard.py", "scale.py")  # these do not change a figure


class Results:
    """One part for each workload and optimizer, in the order of their lists.

    Parts of another plan, of other versions or of other sources are discarded: figures side by
    side must come from one state of everything.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self._path = path
        self.versions = {name: versions(python) for name, python in plan.pythons.items()}
        self._state = state_of(plan, self.versions)
        self._parts: dict[str, Any] = {}
        if path.exists():
            stored = json.loads(path.read_text())
            if stored["state"] == self._state:
                self._parts = stored["parts"]
                print(f"going on from {path}: {', '.join(self._parts)}")
            else:
                print(f"beginning anew: {path} has other settings, versions or sources")

    def has(self, workload: str, optimizer: str) -> bool:
        return f"{workload} {optimizer}" in self._parts

    def add(self, rows: Sequence[Row], seconds: float, load: float) -> None:
        self._parts[f"{rows[0].workload} {rows[0].optimizer}"] = {
            "rows": [row.to_json() for row in rows], "seconds": seconds, "load": load,
        }  # fmt: skip
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps({"state": self._state, "parts": self._parts}))
        beside.replace(self._path)

    def _ordered(self) -> list[Any]:
        keys = (f"{workload} {optimizer}" for workload in WORKLOADS for optimizer in OPTIMIZERS)
        return [self._parts[key] for key in keys if key in self._parts]

    @property
    def races(self) -> list[list[Row]]:
        return [[Row(**row) for row in part["rows"]] for part in self._ordered()]

    @property
    def seconds(self) -> float:
        return float(sum(part["seconds"] for part in self._ordered()))

    @property
    def load(self) -> float:
        return float(max((part["load"] for part in self._ordered()), default=0.0))


def state_of(plan: Plan, found: Mapping[str, Mapping[str, str]]) -> str:
    """A hash of whatever a figure depends on, but for the machine."""
    settings = [list(plan.contenders), plan.repetitions, plan.seconds, plan.threads]
    state = hashlib.sha256(json.dumps([settings, found], sort_keys=True).encode())
    package = ROOT / "onnxfit"
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.so"), *HERE.rglob("*.py")]):
        if path.parent != HERE or path.name not in REPORTING:
            state.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return state.hexdigest()
