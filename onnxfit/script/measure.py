"""Measure seconds and memory of training steps, each batch size in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onnxfit.script.placeholders import Placeholder, drawn
from onnxfit.script.plan import Plan, trainer_of
from onnxfit.training.setting_values import decode_setting, encode_setting

SIZES = (1, 8, 32)
LIMIT = 20.0  # seconds for a batch size; the start of Python and the compilation count
TIMED_SECONDS, TIMED_STEPS = 1.0, 5  # of the steps that are timed, whichever ends first
# The child takes the module path of this process: the working folder may hold a stranger's modules.
CHILD = "import sys; sys.path[:] = sys.argv[1:]; from onnxfit.script.measure import main; main()"


@dataclass(frozen=True)
class Measurement:
    """A training step with a batch size.

    - `rows`: the batch size.
    - `seconds`: the time of a step, the median; None if it could not be measured.
    - `memory`: the peak of the process in bytes; None if the system does not tell.
    - `problem`: why it could not be measured.
    """

    rows: int
    seconds: float | None = None
    memory: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.seconds is None:
            return f"batch {self.rows:>3}: {self.problem}"
        memory = "" if self.memory is None else f", {self.memory / 2**20:,.0f} MiB at the peak"
        return f"batch {self.rows:>3}: {self.seconds * 1000:,.3g} ms per step{memory}"


def measure(plan: Plan, progress: Callable[[str], None]) -> tuple[Measurement, ...]:
    """Return the time and memory of a training step at three batch sizes, or at the file's own.

    A larger batch is left out after a smaller one that could not be measured.

    - `plan`: how the file is trained.
    - `progress`: called with the name of each stage.
    """
    found: list[Measurement] = []
    for rows in sizes_of(plan):
        progress(f"measuring batches of {rows}")
        found.append(_measured(plan, rows))
        if found[-1].problem:
            break
    return tuple(found)


def sizes_of(plan: Plan) -> Sequence[int]:
    """Return the batch sizes that are measured."""
    if plan.is_whole:
        return (1,)
    return SIZES if plan.batch is None else (plan.batch,)


def _measured(plan: Plan, rows: int) -> Measurement:
    command = [sys.executable, "-c", CHILD, *sys.path]
    try:
        done = subprocess.run(
            command, input=_request(plan, rows).encode(), capture_output=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return Measurement(rows, problem=f"not measured within {LIMIT:.0f} s")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return Measurement(rows, problem=f"failed: {lines[-1] if lines else done.returncode}")
    seconds, memory = json.loads(done.stdout)
    return Measurement(rows, seconds, memory)


def _request(plan: Plan, rows: int) -> str:
    """Return what `main` reads: how to make the trainer and its data, as JSON."""
    request = {
        "path": plan.path,
        "converts": plan.converts,
        "settings": {name: encode_setting(value) for name, value in plan.settings.items()},
        "inputs": [asdict(one) for one in plan.inputs],
        "labels": [asdict(one) for one in plan.labels],
        "rows": rows,
    }
    return json.dumps(request)


def main() -> None:
    """Measure the training and the batch size that standard input has; print JSON."""
    request: dict[str, Any] = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    path = request["path"]
    settings = {n: decode_setting(n, value, path) for n, value in request["settings"].items()}
    trainer = trainer_of(path, settings, converts=request["converts"])
    inputs, labels = (
        [Placeholder(**{**one, "shape": tuple(one["shape"])}) for one in request[kind]]
        for kind in ("inputs", "labels")
    )
    x, y = drawn(inputs, labels, request["rows"])
    times = []
    end = None
    while end is None or (time.perf_counter() < end and len(times) <= TIMED_STEPS):
        began = time.perf_counter()
        trainer.train_on_batch(x, y or None)
        times.append(time.perf_counter() - began)
        end = end or time.perf_counter() + TIMED_SECONDS
    later = sorted(times[1:] or times)  # the first step compiles
    print(json.dumps([later[len(later) // 2], _peak()]))


def _peak() -> int | None:
    """Return the greatest memory of this process in bytes.

    Linux counts in `ru_maxrss` what the parent had when it started this process, so that its own
    mark is read there.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None
    try:
        import resource  # Windows has none
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
