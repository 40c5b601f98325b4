"""One contender in a process of its own: answers JSON lines with JSON lines.

    python benchmarks/suite/worker.py CONTENDER [--alone JOB]

Requests have "do": "load", "build" (with the job), "losses", "step" and "fit" (with the seconds to
spend), "quit". Every answer has what was asked for, "refused" with a reason, "absent" or "failed".
`--alone` does one thing and ends: import, build, fit one epoch, and say how long each took and how
much memory the process ever had.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]


def peak_memory() -> int:
    """Bytes.

    Linux counts in ru_maxrss what the parent had when it started this process, so its own
    high-water mark is better.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def reason(error: BaseException) -> str:
    """The first line that says something, short enough for a table."""
    text = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    return text if len(text) < 200 else text[:197] + "..."


class Worker:
    def __init__(self, contender: Any) -> None:
        self.contender = contender
        self.run_step: Callable[[], object] | None = None
        self.counts: dict[str, int] = {}  # how many steps or epochs fill the asked time

    def load(self) -> dict[str, Any]:
        began = time.perf_counter()
        self.contender.load()
        return {
            "import_seconds": time.perf_counter() - began,
        }

    def build(self, job: str) -> dict[str, Any]:
        from workloads import Job

        self.run_step, self.counts = None, {}
        gc.collect()
        self.batches = Job.from_json(job).workload.batches
        began = time.perf_counter()
        self.contender.build(Job.from_json(job))
        return {"build_seconds": time.perf_counter() - began}

    def losses(self) -> dict[str, Any]:
        began = time.perf_counter()
        losses = self.contender.losses()
        self.run_step = self.contender.step()
        return {
            "losses": losses,
            "losses_seconds": time.perf_counter() - began,
            "steps": self.run_step is not None,
            "remark": self.contender.remark,
        }

    def step(self, seconds: float) -> dict[str, Any]:
        run = self.run_step
        assert run is not None

        def steps(count: int) -> None:
            for _ in range(count):
                run()

        return self._timed("step", steps, seconds, 1)

    def fit(self, seconds: float) -> dict[str, Any]:
        from contenders.contender import nothing

        return self._timed(
            "fit", lambda epochs: self.contender.fit(epochs, nothing), seconds, self.batches
        )

    def _timed(
        self, what: str, run: Callable[[int], None], seconds: float, per: int
    ) -> dict[str, Any]:
        """Seconds for each batch.

        The first time finds out how often to run, and warms up with that.
        """
        if what not in self.counts:
            if what == "fit":  # of steps the first were made for their losses
                run(1)
            count = 1
            while True:
                began = time.perf_counter()
                run(count)
                took = time.perf_counter() - began
                if took > 0.3 * seconds:
                    break
                count *= min(10, math.ceil(seconds / max(took, 1e-9)))
            wanted = self.counts[what] = max(1, round(count * seconds / took))
            if wanted == count:  # a slow one: this run will do
                return {"seconds": took / count / per, "took": took}
        gc.collect()
        began = time.perf_counter()
        run(self.counts[what])
        took = time.perf_counter() - began
        return {"seconds": took / self.counts[what] / per, "took": took}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        from contenders.contender import Refused

        do = request.pop("do")
        try:
            result: dict[str, Any] = getattr(self, do)(**request)
            return result
        except Refused as error:
            return {"refused": reason(error)}
        except ImportError as error:
            return {"absent": reason(error)} if do == "load" else {"failed": reason(error)}
        except Exception as error:
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {reason(error)}"}


def alone(worker: Worker, job: str) -> dict[str, Any]:
    first: list[float] = []

    def on_batch() -> None:
        if not first:
            first.append(time.perf_counter())

    loaded = worker.load()
    began = time.perf_counter()
    built = worker.build(job)
    worker.contender.fit(1, on_batch)
    ended = time.perf_counter()
    return {
        "import_seconds": loaded["import_seconds"], **built, "first_step_seconds": (first[0] if first else ended) - began,
        "epoch_seconds": ended - began, "peak_memory": peak_memory(),
    }  # fmt: skip


def main() -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    from contenders import ENTRIES

    worker = Worker(ENTRIES[sys.argv[1]].make())

    def say(answer: dict[str, Any]) -> None:
        output.write(json.dumps(answer) + "\n")
        output.flush()

    if "--alone" in sys.argv:
        from contenders.contender import Refused

        try:
            say(alone(worker, sys.argv[3]))
        except (Refused, ImportError) as error:
            say({"refused": reason(error)})
        return
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "quit":
            break
        say(worker.answer(request))
    output.flush()
    os._exit(0)  # no library's farewell takes time or prints


if __name__ == "__main__":
    main()
