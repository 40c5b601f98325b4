"""Ranks as processes that mpiexec starts, each with a script of its own interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from onnxfit.distributed.launcher import find_mpiexec, ranks_environment

ROOT = Path(__file__).resolve().parents[2]
# A rank imports onnxfit.distributed alone: all of onnxfit takes each of them more than a second.
PRELUDE = f"""
import sys, types
sys.modules["onnxfit"] = types.ModuleType("onnxfit")
sys.modules["onnxfit"].__path__ = [{str(ROOT / "onnxfit")!r}]
import os, signal, threading, time
import numpy as np
"""
SECONDS = 120  # after which a job counts as one that hangs


def command(script: str) -> list[str]:
    return [sys.executable, "-W", "error", "-c", PRELUDE + script]


def environment(**more: str) -> dict[str, str]:
    """The environment of this process, without what would change how ranks find each other."""
    paths = [str(ROOT), str(Path(np.__file__).parents[1])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "",  # lines are kept back, as for a user
        # Other tests run meanwhile: a rank that waits leaves them its core.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        **more,
    }


def start(script: str, ranks: int) -> subprocess.Popen[str]:
    """Start a script in several ranks."""
    return subprocess.Popen(
        [find_mpiexec(), "-n", str(ranks), *command(script)],
        env=ranks_environment(environment()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return the status, the output and the errors of a job; an error where it hangs."""
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, errors = process.communicate()
        raise AssertionError(f"the job hangs: {output}\n{errors}") from None
    return process.returncode, output, errors
