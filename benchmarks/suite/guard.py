"""Does a change make training slow? `python benchmarks/suite/guard.py` ends with 1 where a ratio is
far beyond what it is.

Only ratios within one run are judged, so that a slow machine does not fail: onnxfit's step to that
of eager PyTorch, and `fit` per batch to the bare step. They are those of one new process, and the
bounds leave about twice the room of what a quiet machine gives. What is too slow is measured once
more before it counts, by the best of two new processes. About half a minute; needs PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from measure import Plan, Row, race
from processes import export

# workload -> at most: onnxfit's step to PyTorch's, fit per batch to the bare step
BOUNDS = {
    "linear": (0.2, 4.0),  # calls
    "mlp": (1.3, 3.0),  # dense products
    "cnn": (2.0, 2.0),  # convolutions and pools
    "transformer": (2.0, 2.0),  # attention, norms, an embedding
}


def ratios(workload: str, rows: dict[str, Row]) -> list[tuple[str, float, float]]:
    """What is judged: a title, the figure, its bound."""
    to_torch, to_step = BOUNDS[workload]
    ours, theirs = rows["onnxfit"], rows["torch"]
    return [
        (
            f"{workload}: onnxfit's step / PyTorch's",
            ours.least("step") / theirs.least("step"),
            to_torch,
        ),
        (f"{workload}: fit per batch / bare step", ours.least("fit") / ours.least("step"), to_step),
    ]


def too_slow(plan: Plan, workload: str, room: float) -> bool:
    """Measure and print; whether a ratio is beyond its bound."""
    rows = {row.contender: row for row in race(plan, workload, "sgd")}
    for row in rows.values():
        if row.remark:
            sys.exit(f"{workload}, {row.title}: {row.remark}")
    found = ratios(workload, rows)
    for title, ratio, bound in found:
        print(
            f"{title:40} {ratio:6.2f}   at most {room * bound:.2f}  "
            f" {'TOO SLOW' if ratio > room * bound else 'fine'}",
            flush=True,
        )
    return any(ratio > room * bound for _, ratio, bound in found)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks/suite/guard.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--room", type=float, default=1.0, help="a factor for all bounds")
    room = parser.parse_args().room
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(
            ["onnxfit", "torch"],
            repetitions=2,
            seconds=0.1,
            threads=2,
            folder=Path(folder),
            pythons={"bench": sys.executable},
        )
        export(sys.executable, plan.folder, list(BOUNDS), plan.environment, plan.log)
        first = replace(plan, repetitions=1)
        slow = any(
            too_slow(first, workload, room) and too_slow(plan, workload, room)
            for workload in BOUNDS
        )
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
