"""`onnxfit export`."""

from __future__ import annotations

from pathlib import Path

from onnxfit import Trainer
from tests.cli.helpers import FIT, done, refused


def test_export(folder: Path) -> None:
    done(*FIT, "--optimizer", "adam:ema_momentum=0.9", "-o", "t.onnx", "--checkpoint", "c/")
    done("export", "c/last.onnxfit", "-o", "e.onnx")
    assert Path("e.onnx").read_bytes() == Path("t.onnx").read_bytes()
    done("export", "c/last.onnxfit", "-o", "a.onnx", "--averaged")
    assert (
        Path("a.onnx").read_bytes()
        == Trainer.load("c/last.onnxfit").export(None, averaged=True).SerializeToString()
    )
    assert "m.onnx" in refused("export", "m.onnx", "-o", "e.onnx")
    assert done("predict", "c/last.onnxfit", "-d", "d.npz") == done(
        "predict", "t.onnx", "-d", "d.npz"
    )
