"""A working folder for the tests of the command line, and Ctrl-C as in a terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.helpers import ROWS, write_csv
from tests.models import mlp


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Handle Ctrl-C as a process in the foreground does.

    A shell lets the jobs that it starts with `&` ignore Ctrl-C, and so their children. onnxfit
    respects that, and a test that sends the signal would wait for the end of the training.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model, and the same data in every format."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((ROWS, 4)).astype(np.float32).round(3)
    y = (X @ rng.standard_normal((4, 3))).argmax(axis=1)
    onnx.save(mlp(), "m.onnx")
    np.savez("d.npz", X=X, y=y)
    np.save("X.npy", X)
    np.save("labels.npy", y)
    write_csv("d.csv", "a,b,c,d,kind", np.column_stack([X, y]))
    return tmp_path
