"""`onnxfit quantization-report`: a table, names, a picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfit
from tests.cli.helpers import done, refused
from tests.models import mlp
from tests.trainable.quantized.qdq_files import with_integers

COMMAND = ("quantization-report", "float.onnx", "int8.onnx", "-d", "d.npz")
LOSS = ("--loss", "cross_entropy")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)).astype(np.float32), rng.integers(0, 3, 40)
    np.savez("d.npz", X=x, y=y)
    onnx.save(mlp(), "float.onnx")
    onnx.save(with_integers(mlp(), {"fc0.weight": 0.3, "fc1.weight": 0.01}), "int8.onnx")


def expected(**settings: str) -> onnxfit.QuantizationReport:
    with np.load("d.npz") as data:
        return onnxfit.quantization_report(
            "float.onnx", "int8.onnx", (data["X"], data["y"]), **settings
        )


def test_the_table_is_that_of_python() -> None:
    assert done(*COMMAND, *LOSS) == f"{expected(loss='cross_entropy')}\n"
    assert done(*COMMAND) == f"{expected()}\n"


def test_names_for_another_command() -> None:
    assert done(*COMMAND, "--worst", 1) == "fc0\n"
    assert done(*COMMAND, *LOSS, "--worst", 2, "--by", "weight_snr") == "fc0\nfc1\n"
    assert "needs a loss, but the report was made without one" in refused(
        *COMMAND, "--worst", 1, "--by", "loss_increase"
    )


def test_figures_for_machines() -> None:
    figures = json.loads(done(*COMMAND, *LOSS, "--json"))
    made = expected(loss="cross_entropy")
    assert figures["float_loss"] == made.float_loss
    assert [layer["alone_snr"] for layer in figures["layers"]] == [
        layer.alone_snr for layer in made.layers
    ]


def test_a_picture() -> None:
    done(*COMMAND, "-o", "report.svg")
    assert Path("report.svg").read_text(encoding="utf-8").startswith("<svg")


def test_errors_come_before_the_work() -> None:
    assert "must end in" in refused(*COMMAND, "-o", "report.png")
    assert "No loss is called" in refused(*COMMAND, "--loss", "cross_entropi")
    wrong = ("quantization-report", "float.onnx", "float.onnx", "-d", "d.npz")
    assert "has no DequantizeLinear" in refused(*wrong)
