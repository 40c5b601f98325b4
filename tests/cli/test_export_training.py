"""`onnxfit export-training`."""

from __future__ import annotations

import json
from pathlib import Path

from onnxfit import Trainer
from tests.cli.helpers import FIT, done, refused


def test_export_training(folder: Path) -> None:
    done(*FIT, "--checkpoint", "c/", "-o", "t.onnx")
    done("export-training", "c/last.onnxfit", "-o", "web", "--target", "web", "-b", "8")
    manifest = json.loads(Path("web/manifest.json").read_text())
    assert manifest["target"] == "web"
    assert manifest["batch"] == {"rows": 8, "sample_weight": False}
    assert Trainer.load("web").global_step == Trainer.load("c/last.onnxfit").global_step > 0
    done("export-training", "c/last.onnxfit", "-o", "one", "--include", "predict")
    assert not Path("one/train.onnx").exists()
    assert "m.onnx" in refused("export-training", "m.onnx", "-o", "x")
