"""Processes that measure: their environment, their answers, and what is installed for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PATIENCE = 900.0  # seconds without an answer
Answer = dict[str, Any]


def find_pythons(given: Mapping[str, str]) -> dict[str, str]:
    """Environment -> Python, of those that are there: this one, and what `make bench` puts beside it."""
    found = {
        "bench": sys.executable,
        "training": str(ROOT / ".venv-training/bin/python"),
    }
    return {name: python for name, python in {**found, **given}.items() if Path(python).is_file()}


def surroundings(threads: int, folder: Path) -> dict[str, str]:
    """Environment variables that hold every library to as many threads (JAX reads NPROC), and
    compiled code to a folder of ours.
    """
    count = str(threads)
    pools = (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "NPROC",
    )
    return {
        **os.environ, **dict.fromkeys(pools, count), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor" / count), "KERAS_HOME": str(folder / "keras"),
        "TORCHINDUCTOR_COMPILE_THREADS": count, "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3",
    }  # fmt: skip


def versions(python: str) -> dict[str, str]:
    """Package -> version, and "Python" for itself, of everything that is installed there."""
    code = (
        "import importlib.metadata as m, json, platform; print(json.dumps({'Python':"
        " platform.python_version(), **{d.name.lower(): d.version for d in m.distributions()}}))"
    )
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def operators(python: str, environment: Mapping[str, str]) -> str:
    """Whether onnxfit, as it is installed there, uses its C++ operators, and if not why."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import onnxfit.kernels.library as library;"
        " status = library.status(); print(status.state, status.detail)"
    )
    command = [python, "-c", code]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=dict(environment), check=True
    )
    return done.stdout.strip()


def run_json(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Answer:
    """The last line that a program prints, as JSON; "failed" where it ends in another way."""
    with log.open("a") as errors:
        try:
            done = subprocess.run(
                list(arguments), stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environment), check=False,
                timeout=PATIENCE,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer in {PATIENCE:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": f"the process ended with {done.returncode}; see {log}"}
    answer: Answer = json.loads(lines[-1])
    return answer


def export(
    python: str, folder: Path, names: Sequence[str], environment: Mapping[str, str], log: Path
) -> None:
    """Write the models that are not in the folder, or are older than the file that makes them."""
    written = (HERE / "networks.py").stat().st_mtime
    missing = [
        n
        for n in names
        for f in [folder / f"{n}.onnx"]
        if not f.exists() or f.stat().st_mtime < written
    ]
    if not missing:
        return
    print(f"exporting {', '.join(missing)} ...", flush=True)
    with log.open("a") as errors:
        command = [python, str(HERE / "networks.py"), str(folder), *missing]
        if subprocess.run(
            command, stdout=errors, stderr=errors, env=dict(environment), check=False
        ).returncode:
            sys.exit(
                f"The models could not be exported, which takes PyTorch in {python}: see {log}."
            )
