"""Everybody's training step and `fit`, side by side:

`python benchmarks/suite [--quick] [--workloads mlp cnn] [--contenders full-onnx torch]`.

Each contender has a process of its own, and in every round each takes its turn on the same weights,
rows, batches and optimizer, with as many threads. First come, each in a process that does nothing
else, import, first step and peak memory. Contenders whose library is not there are named as absent.
Other environments are found in .venv-plain and .venv-bench, or given: `--python
bench=/path/to/python`.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import report
from contenders import ENTRIES, RIVALS
from measure import MORE, Field, Plan, Row, once
from processes import HERE, ROOT, export, find_pythons, run_json, surroundings
from workloads import OPTIMIZERS, WORKLOADS


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="ENVIRONMENT=PATH",
        help="of training, plain or bench",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a trial: three short rounds, no memory, no limits"
    )
    parser.add_argument(
        "--no-once", action="store_true", help="leave out memory, import and first step"
    )
    parser.add_argument("--rounds", type=int, help="how often each takes its turn (7; quick: 3)")
    parser.add_argument("--seconds", type=float, help="that one turn lasts (0.1; quick: 0.03)")
    parser.add_argument(
        "--budget",
        type=float,
        help=(
            "seconds for the turns of a contender on a workload, after three of them (2; quick:"
            " 0.3)"
        ),
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build/benchmarks",
        help="for exported models and the log",
    )
    parser.add_argument(
        "--output", type=Path, help="for tables and pictures (default: results in the folder)"
    )
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="write docs/benchmarks.md and docs/benchmarks/ instead",
    )
    return parser.parse_args()


def plan_of(options: argparse.Namespace) -> Plan:
    quick = options.quick
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.resolve()
    return Plan(
        options.workloads,
        options.optimizers,
        options.contenders,
        rounds=options.rounds or (3 if quick else 7),
        seconds=options.seconds or (0.03 if quick else 0.1),
        budget=options.budget or (0.3 if quick else 2.0),
        threads=options.threads,
        folder=folder,
        pythons=find_pythons(dict(item.split("=", 1) for item in options.python)),
        environment=surroundings(options.threads, folder),
    )


def limits_of(plan: Plan, python: str, races: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
    """For the workloads whose products are listed."""
    found = []
    for rows in races:
        name, optimizer = rows[0].workload, rows[0].optimizer
        if not WORKLOADS[name].products:
            continue
        with np.load(plan.folder / f"{name}.npz") as file:
            weights = sum(file[key].size for key in file.files)
        command = [
            python,
            str(HERE / "limits.py"),
            name,
            optimizer,
            str(weights),
            str(plan.threads),
        ]
        limit = run_json(command, plan.environment, plan.log)
        if "limit" not in limit:
            continue
        us, them = report.fastest(rows, "step", ours=True), report.fastest(rows, "step", RIVALS)
        ours, rival = (row.step.median if row else math.nan for row in (us, them))
        found.append(
            {
                "workload": name,
                "optimizer": optimizer,
                "title": us.title if us else "",
                "ours": ours,
                "rival": rival,
                **limit,
            }
        )
    return found


def conditions(plan: Plan, field: Field, seconds: float) -> list[str]:
    versions: dict[str, dict[str, str]] = {}
    for name, loaded in field.loaded.items():
        versions.setdefault(field.pythons[name], {}).update(
            {"Python": loaded["python"], **loaded["versions"]}
        )
    lines = [
        f"{report.machine()}; {plan.threads} threads; load {os.getloadavg()[0]:.1f} at the end;"
        f" {seconds / 60:.0f} minutes"
    ]
    lines += [
        ", ".join(f"{package} {version}" for package, version in found.items())
        for found in versions.values()
    ]
    lines += [f"absent: {ENTRIES[name].title} ({reason})" for name, reason in field.absent.items()]
    times = (
        f"{plan.rounds} rounds of {plan.seconds:g} s; fewer, but three at least, where they took"
        f" more than {plan.budget:g} s"
    )
    times += f"; {MORE} times as many of those whom the bars compare"
    return [*lines, f"median (quartiles) of {times}"]


def main() -> None:
    options = arguments()
    began = time.perf_counter()
    plan = plan_of(options)
    plan.log.write_text("")
    # what PyTorch compiled in an earlier run would make the first step look short
    if not options.quick:
        shutil.rmtree(plan.folder / "inductor", ignore_errors=True)
    exporter = next(
        (
            plan.pythons[e]
            for e in ("training", "bench")
            if e in plan.pythons and _has_torch(plan.pythons[e], plan)
        ),
        None,
    )
    export(exporter or sys.executable, plan.folder, plan.workloads, plan.environment, plan.log)
    records: list[dict[str, Any]] = []
    races: list[list[Row]] = []
    with ExitStack() as stack:
        field = Field(plan, stack)
        for name, reason in field.absent.items():
            print(f"absent: {name} ({reason})")
        if not (options.quick or options.no_once):
            for workload in plan.workloads:
                records += once(plan, field, workload, plan.optimizers[-1])
            print("\n" + report.once_table(records), flush=True)
        for workload in plan.workloads:
            for optimizer in plan.optimizers:
                rows = field.race(workload, optimizer)
                races.append(rows)
                print(
                    f"\n{WORKLOADS[workload].title}: {optimizer}  "
                    f" [{time.perf_counter() - began:.0f} s]\n\n{report.race_table(rows)}",
                    flush=True,
                )
    limits = [] if options.quick else limits_of(plan, exporter or sys.executable, races)
    if limits:
        print("\n" + report.limits_table(limits))
    print("\n" + report.bars_table(report.bars(races, records, limits)))
    lines = conditions(plan, field, time.perf_counter() - began)
    print("\n" + "\n".join(lines))
    page = (
        ROOT / "docs/benchmarks.md"
        if options.write_docs
        else (options.output or plan.folder / "results") / "benchmarks.md"
    )
    write(page, lines, races, records, limits)


def write(
    page: Path,
    lines: list[str],
    races: list[list[Row]],
    records: list[dict[str, Any]],
    limits: list[dict[str, Any]],
) -> None:
    folder = page.parent / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    report.write_csv(folder / "steps.csv", races)
    report.write_records(folder / "once.csv", records)
    report.write_records(folder / "limits.csv", limits)
    try:
        for kind in ("step", "fit"):
            report.draw_races(folder / f"{kind}.png", races, kind)
    except ImportError:
        print("no pictures: matplotlib is not installed")
    report.write_page(page, report.generated(lines, races, records, limits))
    print(f"written: {page} and {folder}")


def _has_torch(python: str, plan: Plan) -> bool:
    code = (
        "import importlib.util, json; print(json.dumps({'found': all(map(importlib.util.find_spec,"
        " ['torch', 'onnxscript']))}))"
    )
    return bool(run_json([python, "-c", code], plan.environment, plan.log).get("found"))


if __name__ == "__main__":
    main()
