"""`onnxfit evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from onnxfit import Trainer
from tests.cli.helpers import ADAM, ROWS, done, refused


def test_evaluate(folder: Path) -> None:
    done(*ADAM, "-m", "accuracy", "-o", "t.onnx", "--checkpoint", "c/")
    with np.load("d.npz") as file:
        expected = Trainer.load("c/last.onnxfit").evaluate(file["X"], file["y"])
    from_checkpoint = done("evaluate", "c/last.onnxfit", "-d", "d.npz", "--json")
    assert json.loads(from_checkpoint) == expected
    assert from_checkpoint == done(
        "evaluate", "t.onnx", "-d", "d.npz", "-l", "cross_entropy", "-m", "accuracy", "--json"
    )
    figures = json.loads(
        done("evaluate", "c/last.onnxfit", "-d", "d.npz", "-m", "confusion_matrix", "--json")
    )
    assert figures["loss"] == expected["loss"]
    other = json.loads(
        done(
            "evaluate",
            "c/last.onnxfit",
            "-d",
            "d.npz",
            "-l",
            "cross_entropy:label_smoothing=0.5",
            "--json",
        )
    )
    assert other["loss"] != expected["loss"]
    assert np.sum(figures["confusion_matrix"]) == ROWS
    assert "Pass a loss" in refused("evaluate", "t.onnx", "-d", "d.npz")
