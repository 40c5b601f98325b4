"""Give each file to a child process: one that dies, hangs or takes too much memory costs one file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.files.attempt import STOPPED
from scripts.files.catalogue import PublicFile

ROOT = Path(__file__).resolve().parents[2]
Result = dict[str, Any]


def run_in_child(row: PublicFile, data: bytes, seconds: float, gigabytes: float) -> Result:
    """Return what `scripts.files.attempt` prints of the file, or how the child ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model, job, log = (Path(folder) / name for name in ("model.onnx", "row.json", "log"))
        model.write_bytes(data)
        job.write_text(row.to_json(), encoding="utf-8")
        command = [sys.executable, "-m", "scripts.files.attempt", str(job), str(model)]
        command += [str(gigabytes)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with log.open("w+", encoding="utf-8", errors="replace") as errors:
            try:
                done = subprocess.run(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    timeout=seconds,
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": path},
                    check=False,
                )
                result = _result_of(done, log)
            except subprocess.TimeoutExpired:
                result = {"outcome": STOPPED, "message": f"not finished after {seconds:g} s"}
    return {**result, "seconds": time.monotonic() - began}


def _result_of(done: subprocess.CompletedProcess[str], log: Path) -> Result:
    lines = done.stdout.splitlines()
    if not done.returncode and lines:
        result: Result = json.loads(lines[-1])
        return result
    if done.returncode < 0:
        end = signal.Signals(-done.returncode).name
    else:
        end = f"exit code {done.returncode}"
    last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    return {"outcome": STOPPED, "message": f"the process ended with {end}: {last[:300]}"}
