"""Plant errors into the loop, callbacks, data, checkpoints and metrics: a test must fail each time.

    python scripts/mutate_loop.py [--processes N] [--check] [--skip-baseline] [word ...]

The errors are listed in scripts/mutations/*.txt, in blocks that blank lines separate. A block that
begins with `file:` sets the file and, with `tests:`, the arguments of pytest for the blocks after
it. Every other block is one mutation:

    The sentence that says what is wrong then.
    - the old text, which the file has exactly once
    + the new text
    tests: arguments of pytest, if others than those of the file
    equivalent: why no test can notice it

Several lines of `-` or `+` are one text of several lines, and the spaces after the sign and one
space count. Lines that begin with `#` are comments. The old text may be a part of a line: as little
as is needed, so that changes of the code around it leave it alone.

Each mutation is applied to a copy of the package and the tests. Exit code 1: an error went
unnoticed, one called equivalent was noticed, a text is not found once, or the tests fail without
any error. `word ...` chooses the mutations whose file or sentence has one of the words, and
`--check` only looks for the texts.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import gc
import importlib
import importlib.util
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "scripts" / "mutations"
COPIED = ("onnxfit", "tests", "scripts", "docs", "pyproject.toml")
PYTEST = (
    "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",  # of plugins imported before the fork
)  # fmt: skip
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "ONNXFIT_HYPOTHESIS": "mutated",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}  # fmt: skip
LIMIT = 300  # seconds; a loop without an end is noticed, too
FIELDS = ("file", "tests", "equivalent")
NOTICED, UNNOTICED, BROKEN = "noticed", "unnoticed", "broken"
# exit codes of pytest: a test failed; all passed
OUTCOMES = {1: NOTICED, 0: UNNOTICED}
BROKEN_EXIT = 3  # pytest's own for an internal error
LIBRARIES = (
    "numpy", "onnx", "onnx.inliner", "onnx.parser", "onnx.reference", "onnx_ir",
    "onnx_ir.passes.common", "onnxruntime", "hypothesis", "safetensors", "tqdm", "tensorboardX",
    "click", "pyarrow.parquet", "PIL.Image", "sklearn.utils", "sklearn.model_selection", "doctest",
    "pdb", "_pytest.junitxml", "_pytest.skipping", "_pytest.unittest", "_pytest.warnings",
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """An error to plant, and the tests that should notice it."""

    file: str
    reason: str
    old: str
    new: str
    tests: str
    equivalent: str = ""

    def applied(self, text: str) -> str:
        """Return the text of the file with the error. ValueError where the list is out of date."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"the old text is found {count} times in {self.file}")
        mutated = text.replace(self.old, self.new)
        try:
            tree = ast.dump(ast.parse(mutated))
        except SyntaxError as error:
            raise ValueError(f"the new text cannot be planted in {self.file}: {error}") from None
        if tree == ast.dump(ast.parse(text)):
            raise ValueError(f"the new text means the same in {self.file}")
        return mutated

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


def read_table(paths: Sequence[Path]) -> list[Mutation]:
    """Return the mutations of some files of the table."""
    mutations = []
    for path in paths:
        file = tests = ""
        for number, block in _blocks(path.read_text(encoding="utf-8")):
            fields, reason, old, new = _parse(block)
            if "file" in fields:
                file, tests = fields["file"], fields["tests"]
                continue
            if not (file and reason and old):
                raise ValueError(f"{path.name}:{number}: a mutation has a sentence and a text")
            mutations.append(
                Mutation(
                    file,
                    reason,
                    old,
                    new,
                    fields.get("tests", tests),
                    fields.get("equivalent", ""),
                )
            )
    return mutations


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the blocks of a table, each with the number of its first line."""
    block: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.startswith("#"):
            continue
        if line.strip():
            block.append(line)
        elif block:
            yield number - len(block), block
            block = []


def _parse(block: list[str]) -> tuple[dict[str, str], str, str, str]:
    """Return the fields of a block, its sentence, and the old and the new text."""
    fields: dict[str, str] = {}
    texts: dict[str, list[str]] = {"-": [], "+": []}
    reason = []
    for line in block:
        name, colon, value = line.partition(":")
        if line[:2] in ("- ", "+ ", "-", "+"):
            texts[line[0]].append(line[2:])
        elif colon and name in FIELDS:
            fields[name] = value.strip()
        else:
            reason.append(line.strip())
    return fields, " ".join(reason), "\n".join(texts["-"]), "\n".join(texts["+"])


def out_of_date(mutations: Sequence[Mutation]) -> list[str]:
    """Return what is wrong with the list: texts that are not found once, or mean the same."""
    problems = []
    for mutation in mutations:
        try:
            mutation.applied((ROOT / mutation.file).read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            problems.append(f"{mutation.reason}\n  {error}\n  - {mutation.old}")
    return problems


def copy_to(folder: Path) -> Path:
    """Copy what the tests need, compiled, so that only a mutated file is compiled in each run."""
    folder.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, folder / name)
    compileall.compile_dir(folder / "onnxfit", quiet=2)
    return folder


def import_libraries() -> None:
    """Import what every test imports besides onnxfit, once for all mutations.

    A child process gets them with the fork. onnxfit itself is imported there, from its copy.
    """
    for name in LIBRARIES:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    gc.freeze()  # so that a child collects only what is its own


def start_tests(copy: Path, tests: str) -> int:
    """Run pytest in a child process, in a copy; return the number of the process."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = BROKEN_EXIT
    try:
        signal.alarm(LIMIT)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silence, stream)
        # Other runs of pytest delete the temporary folders of their shared place.
        own = f"--basetemp={copy / 'temporary'}"
        code = int(pytest.main([*PYTEST, own, *shlex.split(tests)]))
    finally:
        os._exit(code)


def outcome(status: int) -> str:
    """Return what the exit status of a child process says about its mutation."""
    if os.WIFSIGNALED(status):
        return NOTICED if os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGKILL) else BROKEN
    return OUTCOMES.get(os.WEXITSTATUS(status), BROKEN)


def run(mutations: Sequence[Mutation], processes: int) -> Iterator[tuple[Mutation, str]]:
    """Yield each mutation with its outcome, in the order in which they are done."""
    waiting = list(reversed(mutations))
    running: dict[int, tuple[Mutation, Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy_to(Path(folder) / str(number)) for number in range(processes)]
        while waiting or running:
            while waiting and copies:
                mutation, copy = waiting.pop(), copies.pop()
                if mutation.file:
                    original = (ROOT / mutation.file).read_text(encoding="utf-8")
                    (copy / mutation.file).write_text(mutation.applied(original), encoding="utf-8")
                running[start_tests(copy, mutation.tests)] = mutation, copy
            process, status = os.wait()
            mutation, copy = running.pop(process)
            if mutation.file:
                shutil.copy2(ROOT / mutation.file, copy / mutation.file)
            copies.append(copy)
            yield mutation, outcome(status)


def without_errors(mutations: Sequence[Mutation]) -> list[Mutation]:
    """Return a mutation that changes nothing for each file of tests: it must pass in the copy."""
    words = [word for mutation in mutations for word in shlex.split(mutation.tests)]
    files = dict.fromkeys(word for word in words if (ROOT / word.partition("::")[0]).exists())
    return [Mutation("", f"{file} as it is", "", "", file, "there is no error") for file in files]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--skip-baseline", action="store_true")
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    mutations = [
        mutation
        for mutation in read_table(sorted(TABLE.glob("*.txt")))
        if not arguments.words or any(word in str(mutation) for word in arguments.words)
    ]
    problems = out_of_date(mutations)
    if problems:
        print("\n".join(problems))
        print(f"{len(problems)} of {len(mutations)} mutations are out of date: mend the list.")
        return 1
    if arguments.check:
        print(f"The texts of {len(mutations)} mutations are found.")
        return 0
    if not arguments.skip_baseline:
        mutations = [*without_errors(mutations), *mutations]
    os.environ |= ENVIRONMENT
    sys.dont_write_bytecode = True  # a bytecode file of a mutated source could outlive it
    import_libraries()
    return report(run(mutations, arguments.processes), len(mutations))


def report(results: Iterator[tuple[Mutation, str]], count: int) -> int:
    """Print the outcomes as they come, and return the exit code."""
    began = monotonic()
    counts = {NOTICED: 0, UNNOTICED: 0, BROKEN: 0}
    wrong = []
    for mutation, result in results:
        counts[result] += 1
        if result != (UNNOTICED if mutation.equivalent else NOTICED):
            wrong.append(f"{result}: {mutation}")
            print(f"\n{wrong[-1]}", flush=True)
        done = sum(counts.values())
        print(f"\r{done} of {count}, {monotonic() - began:.0f} s", end="", flush=True)
    print(f"\n{counts[NOTICED]} planted errors noticed, {len(wrong)} results unexpected.")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
