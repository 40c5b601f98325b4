"""One repetition: a contender trains a network in a process of its own.

    python benchmarks/suite/worker.py CONTENDER JOB SECONDS

prints one line of JSON: the seconds of a batch of `fit` and of a bare step, the peak memory after
`fit`, the first losses and a remark; or "refused", "absent" or "failed" with the reason.
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

from contenders import ENTRIES  # noqa: E402
from contenders.contender import Contender, Refused, nothing  # noqa: E402
from workloads import Job  # noqa: E402


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


def timed(run: Callable[[int], object], seconds: float) -> float:
    """Seconds of one run, from as many as fill `seconds`.

    The trials that find how many these are also warm up.
    """
    run(1)
    count, took = 1, 0.0
    while took <= 0.3 * seconds:
        count *= min(10, math.ceil(seconds / took)) if took else 1
        began = time.perf_counter()
        run(count)
        took = time.perf_counter() - began
    count = max(1, round(count * seconds / took))
    gc.collect()
    began = time.perf_counter()
    run(count)
    return (time.perf_counter() - began) / count


def measure(contender: Contender, job: Job, seconds: float) -> dict[str, Any]:
    """A whole `fit` comes first, so that the memory is that of a program that only fits."""
    contender.load()
    contender.build(job)
    fit = timed(lambda epochs: contender.fit(epochs, nothing), seconds) / job.workload.batches
    memory = peak_memory()
    contender.build(job)
    losses, step = contender.losses(), contender.step()
    found = {"fit": fit, "memory": memory, "losses": losses, "remark": contender.remark}
    if step is not None:

        def steps(count: int) -> None:
            for _ in range(count):
                step()

        found["step"] = timed(steps, seconds)
    return found


def answer(name: str, job: str, seconds: float) -> dict[str, Any]:
    contender = ENTRIES[name].make()
    try:
        return measure(contender, Job.from_json(job), seconds)
    except Refused as error:
        return {"refused": reason(error)}
    except ModuleNotFoundError as error:
        return {"absent": reason(error)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {reason(error)}"}


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    print(json.dumps(answer(sys.argv[1], sys.argv[2], float(sys.argv[3]))), file=output, flush=True)
    os._exit(0)  # no library's farewell takes time or prints
