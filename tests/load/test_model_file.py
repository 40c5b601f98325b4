"""Models that are written with their tensors in a second file."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from onnxfit.errors import CheckpointError
from onnxfit.graph import tensors
from onnxfit.load import model_file
from onnxfit.load.model_file import write_model
from tests.models import linear


@pytest.fixture(autouse=True)
def every_model_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MAX_MODEL_BYTES", 0)


def write(path: Path, w: float) -> None:
    write_model(path, linear(w=w), "w")


def weight(path: Path) -> float:
    """The weight as onnx reads it, in one file, by a number or with its data."""
    (tensor,) = onnx.load(path).graph.initializer
    return float(onnx.numpy_helper.to_array(tensor).item())


def test_each_model_is_written_beside_the_data_of_the_last(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for w, name in ((1.0, "m.onnx.data"), (2.0, "m.onnx.onnxfit-1.data"), (3.0, "m.onnx.data")):
        write(path, w)
        assert sorted(os.listdir(tmp_path)) == ["m.onnx", name]
        assert weight(path) == w


def test_data_without_a_model_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "m.onnx.data").write_bytes(b"of a call that was killed")
    write(tmp_path / "m.onnx", 1.0)
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    assert weight(tmp_path / "m.onnx") == 1.0


def test_a_model_keeps_its_data_if_the_next_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnx"
    write(path, 1.0)

    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(model_file, "write_message", fails)
            with pytest.raises(CheckpointError, match="the disk is full"):
                write(path, 2.0)
        assert weight(path) == 1.0
    write(path, 3.0)
    assert weight(path) == 3.0
    assert len(os.listdir(tmp_path)) == 2


def test_files_of_other_models_stay(tmp_path: Path) -> None:
    others = ["m.onnx.data2", "m_onnx.data", "m.onnx.1.data", "n.m.onnx.data", "m.onnx.data.data"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    for w in (1.0, 2.0, 3.0):
        write(tmp_path / "m.onnx", w)
    assert set(others) < set(os.listdir(tmp_path))
    assert all((tmp_path / name).read_bytes() == b"mine" for name in others)


@pytest.mark.skipif(sys.platform == "win32", reason="files have no mode")
def test_private_data_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write(path, 1.0)
    (tmp_path / "m.onnx.data").chmod(0o600)
    write(path, 2.0)
    assert stat.S_IMODE((tmp_path / "m.onnx.onnxfit-1.data").stat().st_mode) == 0o600
    write(path, 3.0)
    assert stat.S_IMODE((tmp_path / "m.onnx.data").stat().st_mode) == 0o600
    assert np.isfinite(weight(path))
