"""The training step and the `fit` of onnxfit beside PyTorch's:

`python benchmarks/suite [--quick] [--workloads mlp cnn] [--contenders onnxfit-plain torch]`.

Prints one chart and one table. Each network is trained three times by every contender, each time in
a new process, and the contenders take turns: on the same weights, rows, batches and optimizer. The
first contender, onnxfit as pip installs it, is compared with the fastest of the others.

Every finished part is kept in results.json in the folder. A run that was cut off goes on from there, and
a run of other workloads adds to it; other settings, versions or sources begin it anew.
"""

from __future__ import annotations

import argparse
import os
import textwrap
import time
from pathlib import Path

import report
from contenders import DEFAULT, ENTRIES
from measure import Plan, race
from processes import ROOT, export, find_pythons, operators
from results import Results
from workloads import OPTIMIZERS, WORKLOADS

PAGE, PICTURE = ROOT / "docs/benchmarks.md", "benchmarks/ratios.png"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", choices=ENTRIES, default=list(DEFAULT))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="ENVIRONMENT=PATH",
        help="of bench or training",
    )
    parser.add_argument("--quick", action="store_true", help="a trial: short measurements")
    parser.add_argument("--repetitions", type=int, default=3, help="in new processes (3)")
    parser.add_argument("--seconds", type=float, help="of a step's and a fit's (0.5; quick: 0.03)")
    parser.add_argument("--threads", type=int, default=report.cores(), help="all cores")
    parser.add_argument("--fresh", action="store_true", help="forget the results in the folder")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build/benchmarks",
        help="for exported models, the log, results.json, the report, its picture and its CSV file",
    )
    parser.add_argument("--write-docs", action="store_true", help="write docs/benchmarks.md, too")
    return parser.parse_args()


def plan_of(options: argparse.Namespace) -> Plan:
    options.folder.mkdir(parents=True, exist_ok=True)
    return Plan(
        options.contenders,
        repetitions=options.repetitions,
        seconds=options.seconds or (0.03 if options.quick else 0.5),
        threads=options.threads,
        folder=options.folder.resolve(),
        pythons=find_pythons(dict(item.split("=", 1) for item in options.python)),
    )


def measure(plan: Plan, options: argparse.Namespace, results: Results) -> None:
    """Everything that was asked for and is not in the results."""
    parts = [(work, by) for work in options.workloads for by in options.optimizers]
    missing = [part for part in parts if not results.has(*part)]
    names = list(dict.fromkeys(WORKLOADS[name].network for name, _ in missing))
    export(plan.pythons["bench"], plan.folder, names, plan.environment, plan.log)
    for workload, optimizer in missing:
        began = time.perf_counter()
        rows = race(plan, workload, optimizer)
        seconds = time.perf_counter() - began
        results.add(rows, seconds, os.getloadavg()[0])
        lines = report.lines_of([rows])
        ratios = ", ".join(f"{line.kind} {line.ratio:.2f}" for line in lines) or "no ratio"
        print(f"{workload}, {optimizer}: {ratios} ({seconds:.0f} s)", flush=True)


def conditions(plan: Plan, results: Results) -> list[str]:
    """The machine, the versions, and how it was measured; each line in 80 columns."""
    first, *others = (ENTRIES[name].title for name in plan.contenders)
    python = plan.pythons["bench"]
    missing = [n for n in WORKLOADS if not all(results.has(n, o) for o in OPTIMIZERS)]
    found = [
        f"{report.machine()}; {plan.threads} threads; load at most {results.load:.1f}",
        *report.used(results.versions).values(),
        f"{first}, compared with the fastest of: {', '.join(others)}",
        f"onnxfit as pip installs it; its C++ operators: {operators(python, plan.environment)}",
        f"medians of {plan.repetitions} repetitions, each in a new process, contenders in turns,"
        f" {plan.seconds:g} s for steps and for fits; a fit's time is that of a batch; ~: the ratio"
        f" of the best repetitions differs by more than {report.DOUBTFUL:g}; mem.: peak memory,"
        f" ratio; {results.seconds / 60:.0f} minutes",
    ]
    found += [f"not measured: {len(missing)} of {len(WORKLOADS)} workloads"] if missing else []
    return [line for item in found for line in textwrap.wrap(item, 80, subsequent_indent="  ")]


def main() -> None:
    options = arguments()
    plan = plan_of(options)
    plan.log.write_text("")
    path = plan.folder / "results.json"
    if options.fresh:
        path.unlink(missing_ok=True)
    results = Results(path, plan)
    measure(plan, options, results)
    races = results.races
    found = conditions(plan, results)
    text = report.text(races, found)
    print("\n" + text)
    (plan.folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    folders = [plan.folder, *([PAGE.parent / "benchmarks"] if options.write_docs else [])]
    for folder in folders:
        report.write_csv(folder / "suite.csv", races)
        try:
            report.draw(folder / Path(PICTURE).name, report.lines_of(races))
        except ImportError:
            print("no picture: matplotlib is not installed")
    if options.write_docs:
        # the page has the picture for a chart
        report.write_page(PAGE, PICTURE, report.text(races, found, has_chart=False))


if __name__ == "__main__":
    main()
