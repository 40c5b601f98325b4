"""onnxruntime's quantizer: its import, its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxfit import InstallationError, ModelError, StepError
from onnxfit.runtime import quantizer
from tests.models import linear

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import numpy as np
import onnxfit
from tests.models import linear
assert "onnxruntime.quantization" not in sys.modules
for options in ({"calibration": np.ones((2, 1), np.float32)}, {"activations": None}):
    onnxfit.quantize(linear(), **options)
print([name for name in ("torch", "onnxruntime.training") if name in sys.modules])
import importlib.util
assert importlib.util.find_spec("torch") is None or __import__("torch")
"""


def test_neither_pytorch_nor_onnxruntimes_training_is_imported() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_quantizer_that_cannot_be_imported_is_an_installation_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantizer.quantizable_operators()
    monkeypatch.setitem(sys.modules, "onnxruntime.quantization", None)
    with pytest.raises(InstallationError, match=r"cannot be imported.*pip install sympy"):
        quantizer.quantizable_operators()


def test_a_model_that_onnxruntime_does_not_run_is_a_model_error() -> None:
    model = linear()
    model.graph.node[0].op_type = "Unheard"
    with pytest.raises(ModelError, match=r"onnxruntime cannot run the model: .*Unheard"):
        quantizer.optimize(model)


def test_an_error_of_a_calibration_is_a_step_error() -> None:
    with quantizer.Calibrator(quantizer.optimize(linear()), "minmax", ()) as calibrator:
        folder = calibrator._folder.name
        assert os.path.isdir(folder)
        with pytest.raises(StepError, match="The calibration failed"):
            calibrator.collect({"x": np.ones((2, 7), np.float32)})
    assert not os.path.exists(folder)


def test_an_error_of_the_quantizer_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxruntime.quantization import QDQQuantizer

    def fail(self: QDQQuantizer) -> None:
        raise ValueError("of no use\nto anyone")

    monkeypatch.setattr(QDQQuantizer, "quantize_model", fail)
    with quantizer.Calibrator(quantizer.optimize(linear()), "minmax", ()) as calibrator:
        calibrator.collect({"x": np.ones((2, 1), np.float32)})
        ranges = calibrator.ranges()
    with pytest.raises(ModelError, match="cannot quantize the model: of no use to anyone"):
        quantizer.quantize_layers(
            quantizer.optimize(linear()), ranges, "int8", "int8", True, (), {}
        )
