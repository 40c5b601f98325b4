"""The command line of the fuzzer.

Exit code 1 for an exception that is not onnxfit's, for a hang, and for a crash outside of
onnxruntime, onnx and NumPy; crashes inside of those are counted apart.
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

from scripts.fuzz.case import Case
from scripts.fuzz.processes import make_checkpoints, run_cases


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description="Train with mutated files.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="run this case here, and show its traceback")
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
    numbers: list[int], checkpoints: dict[str, bytes], folder: Path, log: Path | None
) -> int:
    """Run cases in child processes, print how often each outcome came, and return the exit code."""
    counts: collections.Counter[str] = collections.Counter()

    def report(number: int, outcome: str, detail: str, message: str) -> None:
        counts[outcome] += 1
        if detail:
            print(f"case {number}: {outcome}: {detail}", flush=True)
        if log:
            with log.open("a") as file:
                file.write(f"{number}\t{outcome}\t{detail or message.replace(chr(10), ' ')}\n")

    began = time.monotonic()
    run_cases(numbers, checkpoints, folder, report)
    print(f"\n{len(numbers)} cases in {time.monotonic() - began:.0f} s")
    for outcome, count in counts.most_common():
        print(f"  {count:6d}  {outcome}")
    return int(any(outcome.startswith(("FORBIDDEN", "HANG")) for outcome in counts))


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = make_checkpoints(folder)
        if arguments.case is not None and not arguments.isolated:
            run_here(Case(arguments.case, checkpoints), folder, arguments.out)
            return 0
        numbers = list(range(arguments.first, arguments.first + arguments.cases))
        if arguments.case is not None:
            numbers = [arguments.case]
        return run_many(numbers, checkpoints, folder, arguments.log)


if __name__ == "__main__":
    sys.exit(main())
