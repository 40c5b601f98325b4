"""Training steps as conformance tests of runtimes: `make steps`.

    python scripts/steps write               write the cases into build/steps
    python scripts/steps run [RUNTIME ...]   run them, by default on all that this Python has
    python scripts/steps docs                write the tables of docs/conformance.md

`write --target npu` and `run [RUNTIME ...] --target npu` do the same in build/steps-npu, with the steps of
training folders for compilers that know inference only.

`run` writes build/steps/results/RUNTIME.json, and for each kind of failure the smallest part of a
case that fails, in the same layout, into build/steps/failures/RUNTIME.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

if not __package__:  # `python scripts/steps`
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tqdm import tqdm

import scripts.steps.folders as files
from scripts.steps.attempt import CRASHED, PASSED, Outcome
from scripts.steps.page import grouped, write_page
from scripts.steps.processes import one_process, run_case
from scripts.steps.runtimes import RUNTIMES

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"onnxruntime": ROOT / "build" / "steps", "npu": ROOT / "build" / "steps-npu"}
VERSION = "1"  # of the suite: another number if cases or right outputs change


def write(folder: Path, target: str) -> None:
    """Write the cases that a target has. The right outputs do not depend on onnxruntime."""
    from onnxfit.errors import SettingError, UnsupportedError
    from scripts.steps.cases import cases
    from scripts.steps.float64 import reference_outputs

    shutil.rmtree(folder, ignore_errors=True)
    tolerances, without = {}, {}
    for case in tqdm([*cases()], unit="case"):
        try:
            model, feeds = case.step(target)
        except (SettingError, UnsupportedError) as error:
            without[case.name] = str(error)
            continue
        files.write_case(folder / case.name, model, feeds, reference_outputs(model, feeds))
        tolerances[case.name] = case.tolerance
    files.write_list(folder, tolerances, VERSION)
    for name, reason in without.items():
        print(f"{name}: {reason}")


def run(folder: Path, name: str) -> None:
    """Run all cases on a runtime, in a process of its own, which a crash ends."""
    runtime = RUNTIMES[name]
    tolerances, version = files.read_list(folder)
    results: dict[str, Outcome] = {}
    shutil.rmtree(folder / "failures" / name, ignore_errors=True)
    pool = one_process()
    for case, tolerance in tqdm(tolerances.items(), desc=name, unit="case"):
        try:
            results[case] = pool.submit(run_case, name, folder, case, tolerance).result()
        except BrokenProcessPool:
            results[case] = Outcome(CRASHED, reason="the process ended")
            pool = one_process()
    pool.shutdown()
    path = folder / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    described = {
        "runtime": runtime.name,
        "version": runtime.version(),
        "suite": version,
        "cases": {case: outcome.as_json() for case, outcome in results.items()},
    }
    path.write_text(json.dumps(described, indent=1) + "\n")
    passed = sum(outcome.result == PASSED for outcome in results.values())
    print(f"{runtime.name} {runtime.version()}: {passed} of {len(results)} pass")
    for (result, node), cases in grouped(results).items():
        reason = results[cases[0]].reason
        print(f"  {result} {node}: {len(cases)} cases such as {cases[0]}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=("write", "run", "docs"))
    parser.add_argument("runtimes", nargs="*", choices=(*RUNTIMES, []), metavar="RUNTIME")
    parser.add_argument("--target", choices=FOLDERS, default="onnxruntime")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or FOLDERS[options.target]
    if options.action == "write":
        write(folder, options.target)
    elif options.action == "docs":
        write_page(ROOT / "docs" / "conformance.md", FOLDERS)
    else:
        for name in options.runtimes or [n for n, r in RUNTIMES.items() if r.version()]:
            run(folder, name)


if __name__ == "__main__":
    main()
