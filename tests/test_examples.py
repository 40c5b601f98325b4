"""Every example runs by itself, in a folder of its own, and arrives where its text says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

# example -> what must stand in its output, and the range the figure found must lie in
FIGURES = {
    "custom_callback": (r"^epochs +(\d+): Settled", 3, 60),
    "custom_loss": (r"^mean\(exp\(a d\)\) +([\d.]+)", 0.999, 1.001),
    "digits": (r"^accuracy +([\d.]+)%", 97.0, 100.0),
    "fine_tune_last_layer": (r"-> ([\d.]+)%", 93.0, 100.0),
    "linear_regression": (r"^largest difference +(\S+)", 0.0, 1e-5),
    "onnx_layer_in_torch": (r"^largest difference +(\S+)", 0.0, 1e-4),
    "several_outputs": (r"^side +([\d.]+)%", 97.0, 100.0),
}
NEEDS = {"digits": ["sklearn", "matplotlib"], "fine_tune_last_layer": ["sklearn"], "onnx_layer_in_torch": ["torch", "matplotlib"]}


def test_every_example_is_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"models"} == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_example(name: str, tmp_path: Path) -> None:
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    result = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    pattern, low, high = FIGURES[name]
    found = re.search(pattern, result.stdout, re.MULTILINE)
    assert found, result.stdout
    assert low <= float(found[1]) <= high
    if name == "digits":
        assert {"digits.onnx", "trained.onnx", "digits.png", "checkpoints", "runs"} <= {path.name for path in tmp_path.iterdir()}
        runs = {path.parent.name for path in tmp_path.glob("runs/**/events.out.tfevents.*")}
        assert {"train", "validation"} <= runs
