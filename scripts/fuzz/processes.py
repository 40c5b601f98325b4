"""Cases in child processes: a child that dies or hangs costs one case, and another goes on."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import resource
import select
import signal
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.fuzz.case import Case
from scripts.fuzz.originals import originals

SECONDS_PER_CASE = 20
MAX_BYTES = 4 << 30  # of the address space of a child
CASES_PER_CHILD = 200
NATIVE_LIBRARIES = ("onnxruntime", "onnx_ir", "onnx", "numpy", "pyarrow", "PIL")

# called with the case's number, its outcome, details of a failure, and the error's message
Report = Callable[[int, str, str, str], None]
MakeCase = Callable[[int], Case]


def run_cases(numbers: Sequence[int], make: MakeCase, folder: Path, report: Report) -> None:
    """Run every case, in children one after another."""
    waiting = list(numbers)
    while waiting:
        child = Child(waiting[:CASES_PER_CHILD], make, folder)
        child.follow(report)
        finished = set(child.finished)
        waiting = [n for n in waiting if n not in finished]


class Child:
    """A child process that runs `numbers`, as its parent sees it."""

    def __init__(self, numbers: Sequence[int], make: MakeCase, folder: Path) -> None:
        self.numbers = numbers
        self.folder = folder
        self.finished: list[int] = []
        self.current = numbers[0]
        self.stage = "start"
        self.began = time.monotonic()
        self._reading, writing = os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(self._reading)
            try:
                _run_in_child(numbers, make, folder, writing)
            finally:
                os._exit(70)
        os.close(writing)

    def follow(self, report: Report) -> None:
        """Report each case as it ends, until the child ends or hangs."""
        hung = not self._read_lines(report)
        if hung:
            os.kill(self._process, signal.SIGKILL)
        os.close(self._reading)
        _, status = os.waitpid(self._process, 0)
        if self.current not in self.finished or hung or status:
            stderr = (self.folder / "stderr").read_text(errors="replace")
            end = "HANG" if hung else _end_of(status)
            report(self.current, _verdict(f"{end} in {self.stage}", stderr), _stack(stderr), "")
            self.finished.append(self.current)

    def _read_lines(self, report: Report) -> bool:
        """Return True at the end of the child's lines, False if a case exceeds its time."""
        rest = b""
        while True:
            timeout = max(0.1, self.began + SECONDS_PER_CASE - time.monotonic())
            ready, _, _ = select.select([self._reading], [], [], timeout)
            if not ready:
                return False
            data = os.read(self._reading, 1 << 16)
            if not data:
                return True
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._read_event(json.loads(line), report)

    def _read_event(self, event: dict[str, Any], report: Report) -> None:
        if "begin" in event:
            self.current = event["begin"]
            self.stage = "mutate"
            self.began = time.monotonic()
        elif "stage" in event:
            self.stage = event["stage"]
        else:
            self.finished.append(event["end"])
            report(event["end"], event["outcome"], event["detail"], event["message"])


def _run_in_child(numbers: Sequence[int], make: MakeCase, folder: Path, pipe: int) -> None:
    """Run cases, and write a line to the parent before each stage and after each case."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    log = (folder / "stderr").open("w+b")
    os.dup2(log.fileno(), 2)
    os.chdir(folder)
    faulthandler.enable(log)

    def send(**event: Any) -> None:
        os.write(pipe, json.dumps(event).encode() + b"\n")

    for number in numbers:
        log.seek(0)
        log.truncate()
        faulthandler.dump_traceback_later(SECONDS_PER_CASE - 2, file=log)
        send(begin=number)
        try:
            case = make(number)
            outcome = case.run(folder, lambda stage: send(stage=stage))
            detail = ""
            message = case.message
        except BaseException as error:
            outcome = f"FORBIDDEN {type(error).__name__}"
            detail = _location(error)
            message = ""
        faulthandler.cancel_dump_traceback_later()
        send(end=number, outcome=outcome, detail=detail, message=message[:400])
        # The next cases need room, so another child runs them.
        if _address_space() > MAX_BYTES // 2:
            break
    os._exit(0)


def _address_space() -> int:
    """Return the bytes of this process's address space; 0 where the system does not say.

    Libraries keep what they have reserved, as pyarrow does for a page of a damaged size.
    """
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def _location(error: BaseException) -> str:
    """Return the last line of onnxfit and the last line of all in the error's traceback, and the
    error's message.
    """
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "scripts/fuzz" not in f.filename
    ]
    ours = [f for f in frames if "onnxfit" in f.filename]
    lines = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in (*ours[-1:], *frames[-1:])]
    return " > ".join(dict.fromkeys(lines)) + f" | {str(error)[:150]!r}"


def _end_of(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"EXIT {os.WEXITSTATUS(status)}"


def _verdict(end: str, stderr: str) -> str:
    """Tell a crash or a hang inside of another library, which onnxfit cannot repair, from others."""
    innermost = re.search(r'File "([^"]*)"', stderr)
    file = innermost[1] if innermost else ""
    for library in NATIVE_LIBRARIES:
        if f"/site-packages/{library}/" in file:
            return f"{end} of {library}"
    return f"FORBIDDEN {end}"


def _stack(stderr: str) -> str:
    """Return the innermost frames that faulthandler wrote, and the first lines beside them."""
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', stderr)
    ours = [f for f in frames if "/onnxfit/" in f[0]][:2]
    lines = [line for line in stderr.splitlines() if line]
    messages = [line for line in lines if "File" not in line and "Thread" not in line][:3]
    stack = " < ".join(f"{Path(file).name}:{n} {name}" for file, n, name in (*frames[:1], *ours))
    return f"{stack} | {' '.join(messages)[:200]}"


def make_originals(folder: Path) -> dict[str, bytes]:
    """Return the undamaged files, made in a child: a parent with sessions would lose their threads
    in a fork.
    """
    path = folder / "originals.zip"
    process = os.fork()
    if not process:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            warnings.simplefilter("ignore")
            with zipfile.ZipFile(path, "w") as archive:
                for name, data in originals(folder).items():
                    archive.writestr(name, data)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(process, 0)[1]:
        raise SystemExit("The files to damage could not be made.")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
