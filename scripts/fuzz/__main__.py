"""The command line of the fuzzer.

Exit code 1 for an exception that is not onnxfit's, for a hang, for a file changed that the user did
not name, for code that ran, and for a crash outside of onnxruntime, onnx, NumPy, pyarrow and Pillow;
crashes inside of those are counted apart.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import sys
import tempfile
import time
from pathlib import Path

if not __package__:  # `python scripts/fuzz`: modules are found from the root of the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.fuzz.case import Case, kind_of
from scripts.fuzz.kinds import KINDS
from scripts.fuzz.processes import MakeCase, make_originals, run_cases


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description="Use damaged files.")
    parser.add_argument("--cases", type=int, default=8000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="run this case here, and show its traceback")
    parser.add_argument("--kind", choices=list(KINDS), help="damage nothing else")
    parser.add_argument("--isolated", action="store_true", help="with --case: in a child process")
    parser.add_argument("--out", type=Path, help="with --case: only write the mutated file here")
    parser.add_argument("--log", type=Path, help="append a line for each case to this file")
    return parser.parse_args()


def run_here(case: Case, folder: Path, out: Path | None) -> None:
    """Run one case in this process, or write its file to `out`."""
    print(case)
    if out:
        out.write_bytes(case.data)
        return
    faulthandler.enable()
    print(case.run(folder, lambda stage: print(" ", stage, flush=True)))


def run_many(
    numbers: list[int], make: MakeCase, kind: str | None, folder: Path, log: Path | None
) -> int:
    """Run cases in child processes, print how often each outcome came, and return the exit code."""
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in KINDS}

    def report(number: int, outcome: str, detail: str, message: str) -> None:
        counts[kind or kind_of(number)][outcome] += 1
        if detail:
            print(f"case {number} ({kind or kind_of(number)}): {outcome}: {detail}", flush=True)
        if log:
            with log.open("a") as file:
                file.write(f"{number}\t{outcome}\t{detail or message.replace(chr(10), ' ')}\n")

    began = time.monotonic()
    run_cases(numbers, make, folder, report)
    print(f"\n{len(numbers)} cases in {time.monotonic() - began:.0f} s")
    for name, outcomes in counts.items():
        summary = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
        print(f"  {name:<16}{outcomes.total():>6}: {summary}")
    failures = ("FORBIDDEN", "HANG")
    return int(any(outcome.startswith(failures) for each in counts.values() for outcome in each))


def main() -> int:
    arguments = parse_arguments()
    kind = arguments.kind
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        originals = make_originals(folder)

        def make(number: int) -> Case:
            return Case(number, originals, kind)

        if arguments.case is not None and not arguments.isolated:
            run_here(make(arguments.case), folder, arguments.out)
            return 0
        numbers = list(range(arguments.first, arguments.first + arguments.cases))
        if arguments.case is not None:
            numbers = [arguments.case]
        return run_many(numbers, make, kind, folder, arguments.log)


if __name__ == "__main__":
    sys.exit(main())
