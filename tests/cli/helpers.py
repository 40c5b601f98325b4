"""The command line called in this process, and options that several tests use."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from onnxfit.cli import job, main

ROOT = Path(__file__).resolve().parents[2]
# click before 8.2 mixes both outputs unless it is told not to
SEPARATE = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}


ROWS = 70  # not a multiple of the batch size


def write_csv(path: str, header: str, table: Any) -> None:
    np.savetxt(path, table, delimiter=",", header=header, comments="", fmt="%.9g")


def call(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner(**SEPARATE).invoke(main, [str(a) for a in arguments], input=stdin)


def done(*arguments: object, stdin: str | bytes | None = None) -> str:
    """The standard output of a command that succeeds."""
    result = call(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object, code: int = 1, stdin: str | bytes | None = None) -> str:
    """The one message of a command that fails: a line (of any length), and nothing else."""
    result = call(*arguments, stdin=stdin)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.stdout == ""
    if code == 1:
        assert re.fullmatch(r"Error: [^\n]+\n", result.stderr)
    return result.stderr


FIT = ("fit", "m.onnx", "-d", "d.npz", "--loss", "cross_entropy", "-q")


ADAM = (*FIT, "--optimizer", "adam", "--lr", "0.01")


LONG = (*ADAM, "-e", 6, "-b", 16, "-m", "accuracy", "--validation-split", "0.2", "--accumulate", 2)


def stop_at(
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    epoch: int,
    batch: int,
    number: int = signal.SIGINT,
) -> None:
    """A signal right before the hook is called there."""
    original = getattr(job.Interruption, hook)
    seen = []

    def with_signal(self: job.Interruption, index: int, logs: Any) -> None:
        seen.append(index)
        at_epoch = index if hook == "on_epoch_end" else seen.count(0) - 1
        if at_epoch == epoch and (hook == "on_epoch_end" or index == batch):
            signal.raise_signal(number)
        original(self, index, logs)

    monkeypatch.setattr(job.Interruption, hook, with_signal)


def start_process(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-m", "onnxfit", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
