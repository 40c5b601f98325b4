"""Everybody's training step and `fit`, side by side:

`python benchmarks/suite [--quick] [--workloads mlp cnn] [--contenders onnxfit torch]`.

Each contender has a process of its own for one thread and for all, and in every round each takes
its turn on the same weights, rows, batches and optimizer. Import, first step and peak memory are
taken in processes that do nothing else. Contenders whose library is not there are named as absent.

Every finished part is kept in results.json in the folder. A run that was cut off goes on from there, and
a run of other workloads adds to it; other settings, versions or sources begin it anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report
from contenders import ENTRIES
from measure import MORE, Field, Plan, Row, once
from processes import HERE, ROOT, export, find_pythons, run_json
from results import Results
from workloads import OPTIMIZERS, WORKLOADS

README, PAGE = ROOT / "README.md", ROOT / "docs/benchmarks.md"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=ENTRIES,
        help="all, but on the brief workloads onnxfit and PyTorch; those named train everything",
    )
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="ENVIRONMENT=PATH",
        help="of bench or training",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a trial: three short rounds, no memory, no limits"
    )
    parser.add_argument("--rounds", type=int, help="how often each takes its turn (3; quick: 1)")
    parser.add_argument("--seconds", type=float, help="that one turn lasts (0.1; quick: 0.03)")
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds for a contender's turns on a workload, after three (1; quick: 0.3)",
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, report.cores()], help="1 and all cores"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the results in the folder")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build/benchmarks",
        help="for exported models, the log, results.json, tables and pictures",
    )
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="write docs/benchmarks.md, docs/benchmarks/ and the README's sentence too, which takes"
        " every network with one batch size at least",
    )
    return parser.parse_args()


def plan_of(options: argparse.Namespace) -> Plan:
    quick = options.quick
    options.folder.mkdir(parents=True, exist_ok=True)
    return Plan(
        options.contenders or list(ENTRIES),
        rounds=options.rounds or (1 if quick else 3),
        seconds=options.seconds or (0.03 if quick else 0.1),
        budget=options.budget or (0.3 if quick else 1.0),
        threads=sorted(set(options.threads)),
        folder=options.folder.resolve(),
        pythons=find_pythons(dict(item.split("=", 1) for item in options.python)),
        everywhere=bool(options.contenders),
    )


def limits_of(plan: Plan, rows: Sequence[Row]) -> dict[str, Any] | None:
    """What arithmetic allows with all threads, for a workload whose products are listed."""
    name, optimizer = rows[0].workload, rows[0].optimizer
    us, them = report.ours(rows, "step"), report.rival(rows, "step")
    if not (WORKLOADS[name].products and us and them):
        return None
    with np.load(plan.folder / f"{WORKLOADS[name].network}.npz") as file:
        weights = sum(file[key].size for key in file.files)
    threads = plan.threads[-1]
    command = [plan.pythons["bench"], str(HERE / "limits.py"), name, optimizer]
    command += [str(weights), str(threads)]
    limit = run_json(command, plan.environment(threads), plan.log)
    if "limit" not in limit:
        return None
    times = {"ours": us.step.median, "rival": them.step.median}
    return {"workload": name, "optimizer": optimizer, **times, **limit}


def measure(plan: Plan, options: argparse.Namespace, results: Results) -> None:
    """Everything that was asked for and is not in the results."""
    # Memory and first step are those of Adam. It comes first: PyTorch would find kernels compiled.
    optimizers = sorted(options.optimizers)
    parts = [(work, by) for work in options.workloads for by in optimizers]
    missing = [part for part in parts if not results.has(*part)]
    if not missing:
        return
    names = list(dict.fromkeys(WORKLOADS[name].network for name, _ in missing))
    threads = plan.threads[-1]
    export(plan.pythons["bench"], plan.folder, names, plan.environment(threads), plan.log)
    if not options.quick:
        # code that PyTorch compiled in an earlier run would make the first step look short
        shutil.rmtree(plan.folder / "inductor", ignore_errors=True)
    field = Field(plan)
    for workload, optimizer in missing:
        began = time.perf_counter()
        memory: list[dict[str, Any]] = []
        brief = WORKLOADS[workload].brief
        if not (options.quick or brief) and optimizer == "adam":
            memory = once(plan, field, workload, optimizer)
        rows = field.race(workload, optimizer)
        limit = None if options.quick else limits_of(plan, rows)
        seconds = time.perf_counter() - began
        results.add(rows, memory, limit, seconds, os.getloadavg()[0], field.absent)
        title = f"{WORKLOADS[workload].title}: {optimizer}"
        print(f"\n{title}   [{seconds:.0f} s]\n\n{report.race_table(rows)}", flush=True)
    for name, reason in field.absent.items():
        print(f"absent: {name} ({reason})")


def conditions(plan: Plan, results: Results) -> list[str]:
    lines = [
        f"{report.machine()}; {' and '.join(map(str, plan.threads))} threads;"
        f" load at most {results.load:.1f}; {results.seconds / 60:.0f} minutes"
    ]
    for environment, versions in results.versions.items():
        used = (p for p in report.PACKAGES if p in versions)
        lines.append(f"{environment}: " + ", ".join(f"{p} {versions[p]}" for p in used))
    lines += [f"absent: {ENTRIES[n].title} ({reason})" for n, reason in results.absent.items()]
    missing = not_measured(results)
    lines += [f"not measured: {', '.join(missing)}"] if missing else []
    return [
        *lines,
        f"median (quartiles) of {plan.rounds} rounds of {plan.seconds:g} s; fewer, but three at"
        f" least, where they took more than {plan.budget:g} s; {MORE} times as many for onnxfit"
        " with and without the C++ operators, PyTorch eager and PyTorch compiled",
    ]


def not_measured(results: Results) -> list[str]:
    """Workloads of which an optimizer is missing."""
    return [n for n in WORKLOADS if not all(results.has(n, o) for o in OPTIMIZERS)]


def main() -> None:
    options = arguments()
    plan = plan_of(options)
    plan.log.write_text("")
    path = plan.folder / "results.json"
    if options.fresh:
        path.unlink(missing_ok=True)
    results = Results(path, plan)
    measure(plan, options, results)
    figures = report.Figures(
        conditions(plan, results), results.races, results.once, results.limits, results.absent
    )
    print("\n" + report.overall(figures.headline))
    print(report.half_sentence(figures.headline, figures.absent))
    print("\n" + report.network_table(figures.headline, figures.once))
    print("\n".join(report.without_ratio(figures.races, figures.absent)))
    print("\n" + report.summary(figures.headline, figures.once))
    print("\n" + "\n".join(figures.conditions))
    report.write(plan.folder / "results/benchmarks.md", figures)
    if options.write_docs:
        measured = {WORKLOADS[n].network for n in WORKLOADS.keys() - set(not_measured(results))}
        missing = {work.network for work in WORKLOADS.values()} - measured
        if missing:
            sys.exit(f"The docs are not written: {', '.join(sorted(missing))} not measured.")
        report.write(PAGE, figures)
        report.write_sentence(README, figures)


if __name__ == "__main__":
    main()
