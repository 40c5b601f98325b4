"""`onnxfit predict`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.cli.helpers import ROWS, done, refused


@pytest.mark.parametrize("kind", ["npy", "npz", "csv"])
def test_predict(folder: Path, kind: str) -> None:
    session = onnxruntime.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": np.load("X.npy")})
    assert f"float32[{ROWS}, 3] -> p.{kind}" in done(
        "predict", "m.onnx", "-d", "X.npy", "-b", ROWS, "-o", f"p.{kind}"
    )
    if kind == "csv":
        assert Path("p.csv").read_text().splitlines()[0] == "y_0,y_1,y_2"
        assert done("predict", "m.onnx", "-d", "X.npy", "-b", ROWS) == Path("p.csv").read_text()
        found = np.loadtxt("p.csv", delimiter=",", skiprows=1, dtype=np.float32)
    else:
        found = np.load(f"p.{kind}")["y"] if kind == "npz" else np.load("p.npy")
    assert np.array_equal(found, expected)


def test_predict_takes_any_model(folder: Path) -> None:
    """Nothing of this one trains: no weight, an operator without a derivative, integers, two
    outputs.
    """
    text = (
        "g (int64[N,2] x) => (int64[N,1] best, int64[N,2] twice) { f = Cast<to = 1>(x) best ="
        " ArgMax<axis = 1>(f) twice = Add(x, x) }"
    )
    onnx.save(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}'),
        "plain.onnx",
    )
    np.save("i.npy", [[1, 2], [4, 3]])
    assert done("predict", "plain.onnx", "-d", "i.npy") == "best,twice_0,twice_1\n1,2,4\n0,8,6\n"
    assert json.loads(done("predict", "plain.onnx", "-d", "i.npy", "--json"))["twice"] == [
        [2, 4],
        [8, 6],
    ]
    assert "A .npy file can contain only one array" in refused(
        "predict", "plain.onnx", "-d", "i.npy", "-o", "p.npy"
    )
    assert ".npy, .npz or .csv" in refused("predict", "plain.onnx", "-d", "i.npy", "-o", "p.txt")
