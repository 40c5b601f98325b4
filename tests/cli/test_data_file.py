"""Data from standard input."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.cli.helpers import FIT, ROOT, call, done, refused, stop_at

PREDICT = ("predict", "m.onnx", "-d")


def scores(X: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["csv", "csv with a BOM", "jsonl", "jsonl lists", "npz", "npy"])
def test_standard_input_in_every_format(folder: Path, kind: str) -> None:
    X = np.load("X.npy")
    lines = [",".join(map(str, row)) for row in X.tolist()]
    contents = {
        "csv": "\n".join(["a,b,c,d", *lines]).encode(),
        "csv with a BOM": b"\xef\xbb\xbf" + "\n".join(["a,b,c,d", *lines]).encode(),
        "jsonl": "\n".join(f'{{"a":{a},"b":{b},"c":{c},"d":{d}}}' for a, b, c, d in X.tolist()),
        "jsonl lists": "\n".join(f'{{"x": {row}}}\n' for row in X.tolist()),
        "npz": Path("d.npz").read_bytes(),
        "npy": Path("X.npy").read_bytes(),
    }[kind]
    printed = done(*PREDICT, "-", stdin=contents)
    table = np.loadtxt(io.StringIO(printed), delimiter=",", skiprows=1)
    np.testing.assert_allclose(table, scores(X), rtol=1e-5, atol=1e-6)


def test_fit_and_evaluate_read_it_as_the_same_file(folder: Path) -> None:
    contents = Path("d.csv").read_bytes()
    rest = ("--label", "kind", "-l", "cross_entropy")
    figures = done("fit", "m.onnx", "-d", "-", *rest, "-o", "t.onnx", "-q", stdin=contents)
    assert figures == done("fit", "m.onnx", "-d", "d.csv", *rest, "-o", "u.onnx", "-q")
    assert Path("t.onnx").read_bytes() == Path("u.onnx").read_bytes()
    evaluated = done("evaluate", "t.onnx", "-d", "-", *rest, stdin=contents)
    assert evaluated == done("evaluate", "t.onnx", "-d", "d.csv", *rest)


def test_an_interrupted_fit_resumes_from_the_same_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = Path("d.npz").read_bytes()
    fit = [argument if argument != "d.npz" else "-" for argument in FIT]
    done(*fit, "-e", 3, "-o", "whole.onnx", stdin=contents)
    with monkeypatch.context() as patch:
        stop_at(patch, "on_train_batch_end", 1, 1)
        stopped = call(*fit, "-e", 3, "-o", "t.onnx", "--checkpoint", "c/", stdin=contents)
    assert stopped.exit_code == 130
    assert "onnxfit resume c/last.onnxfit < DATA" in stopped.stderr.replace(str(folder) + "/", "")
    assert "Standard input is empty" in refused("resume", "c", "-q")
    done("resume", "c", "-q", stdin=contents)
    assert Path("t.onnx").read_bytes() == Path("whole.onnx").read_bytes()


@pytest.mark.parametrize("contents", ["", " \n\n", b"\xef\xbb\xbf"])
def test_empty_input_is_refused(folder: Path, contents: str | bytes) -> None:
    assert "Standard input is empty" in refused(*PREDICT, "-", stdin=contents)


def test_standard_input_has_one_reader(folder: Path) -> None:
    contents = Path("d.npz").read_bytes()
    fit = [argument if argument != "d.npz" else "-" for argument in FIT]
    twice = "- stands for standard input, which contains a single file"
    assert twice in refused(*PREDICT, "-", "-d", "-", stdin=contents)
    assert twice in refused(*PREDICT, "X.npy", "-d", "-", stdin=contents)
    options = ("--validation-data", "-", "-o", "t.onnx")
    assert twice in refused(*fit, *options, stdin=contents)
    assert not Path("t.onnx").exists()
    done(*FIT, *options, stdin=contents)
    message = refused(*fit, "--ranks", 2, "-o", "u.onnx", stdin=contents)
    assert "Several processes cannot read the same standard input" in message


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("a,b,c,d\n1,2,3\n", "Standard input (read as CSV) has 4 names in its first line, but 3"),
        ("a,b,c,d\n1,2,3,4\n1,2,3\n", "Standard input (read as CSV) cannot be read: the number"),
        ("PK\x03\x04...", "Standard input (read as a .npz) cannot be read:"),
        (b"\x93NUMPY\x01\x00\x05\x00", "Standard input (read as a .npy) cannot be read:"),
        ('{"a": 1}\n{"b": 2}', "(read as JSON lines) has different names in line 2"),
        ('{"a": 1}\n[3]', "needs an object on each line"),
        ('{"a": 1}\n{"a"', "line 2 is no JSON"),
        ('{"a": [1]}\n{"a": [1, 2]}', "neither numbers nor lists of numbers"),
        ('{"a": 1}\n{"a": null}', "neither numbers nor lists of numbers"),
        ('{"a": 1}\n{"a": "x"}', "1 in row 0 of the column 'a', but 'x' in row 1"),
    ],
)
def test_damaged_input(folder: Path, contents: str | bytes, message: str) -> None:
    assert message in refused(*PREDICT, "-", stdin=contents)


def test_a_terminal_is_refused_instead_of_waiting_for_it(folder: Path) -> None:
    leader, follower = pty.openpty()
    try:
        result = subprocess.run(
            [sys.executable, "-m", "onnxfit", *PREDICT, "-"],
            stdin=follower,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    finally:
        os.close(leader), os.close(follower)
    assert result.returncode == 1
    assert "standard input is a terminal. Pass the data with < FILE" in result.stderr
