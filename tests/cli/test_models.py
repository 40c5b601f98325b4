"""Models that commands take."""

from __future__ import annotations

from pathlib import Path

from onnxfit import Trainer
from tests.cli.helpers import done, refused


def test_a_loss_of_ones_own_is_no_obstacle(folder: Path) -> None:
    trainer = Trainer("m.onnx", loss=lambda op, y_true, y_pred: op.Abs(y_true - y_pred))
    trainer.save("own.ckpt")
    done("export", "own.ckpt", "-o", "e.onnx")
    assert Path("e.onnx").read_bytes() == trainer.export(None).SerializeToString()
    assert done("predict", "own.ckpt", "-d", "d.npz") == done("predict", "m.onnx", "-d", "d.npz")
    assert "custom loss" in refused("evaluate", "own.ckpt", "-d", "d.npz")
