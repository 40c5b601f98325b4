"""Every example runs by itself, in a folder of its own, and arrives where its text says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
GALLERY = ROOT / "docs" / "gallery"

# example -> what must stand in its output, and the range the figure found must lie in
FIGURES = {
    "binary_classification": (r"^largest difference +(\S+)", 0.0, 1e-4),
    "browser_from_nothing": (r"^int8 trained +([\d.]+)%", 97.0, 100.0),
    "custom_callback": (r"^epochs +(\d+): Settled", 3, 60),
    "custom_loss": (r"^mean\(exp\(a d\)\) +([\d.]+)", 0.999, 1.001),
    "digits": (r"^accuracy +([\d.]+)%", 97.0, 100.0),
    "fine_tune_images": (r"^all weights +([\d.]+)%", 90.0, 100.0),
    "fine_tune_last_layer": (r"-> ([\d.]+)%", 93.0, 100.0),
    "influence": (r"^by self-influence +(\d+) of 60 ", 45, 60),
    "language_model": (r"^least +([\d.]+)%", 85.0, 100.0),
    "linear_regression": (r"^largest difference +(\S+)", 0.0, 1e-5),
    "linear_regression_backends": (r"^largest difference +(\S+)", 0.0, 1e-4),
    "loop_in_numpy": (r"^largest difference +(\S+)", 0.0, 1e-5),
    "mlp_regression": (r"^largest difference +(\S+)", 0.0, 1e-3),
    "numpy_against_onnxruntime": (r"^largest difference +(\S+)", 0.0, 1e-4),
    "onnx_layer_in_torch": (r"^largest difference +(\S+)", 0.0, 1e-4),
    "quantization": (r"^int8 trained +([\d.]+)%", 92.0, 100.0),
    "several_outputs": (r"^side +([\d.]+)%", 97.0, 100.0),
    "step_graphs": (r"^pictures +(\d+)", 6, 6),
    "training_benchmark": (r"^largest difference +(\S+)", 0.0, 1e-3),
    "transformers_from_torch": (r"^words continued +([\d.]+)%", 95.0, 100.0),
}
SHARED = {"figures", "models", "voices"}  # what examples import
ELSEWHERE = {"federated"}  # tried by `make federated`, in an environment that has Flower
NEEDS = {
    "binary_classification": ["sklearn", "matplotlib"],
    "browser_from_nothing": ["onnxscript.nn", "sklearn"],
    "digits": ["sklearn", "matplotlib"],
    "fine_tune_images": ["torch", "onnxscript", "PIL"],
    "fine_tune_last_layer": ["sklearn"],
    "influence": ["sklearn", "matplotlib"],
    "language_model": ["matplotlib"],
    "linear_regression_backends": ["sklearn", "matplotlib"],
    "loop_in_numpy": ["sklearn", "matplotlib"],
    "mlp_regression": ["sklearn", "matplotlib"],
    "numpy_against_onnxruntime": ["matplotlib"],
    "onnx_layer_in_torch": ["torch", "matplotlib"],
    "quantization": ["sklearn", "matplotlib"],
    "step_graphs": ["pygraphviz", "matplotlib"],
    "training_benchmark": ["sklearn", "matplotlib"],
    "transformers_from_torch": ["torch", "onnxscript"],
}
QUICK = ("numpy_against_onnxruntime", "quantization", "training_benchmark")  # have the option to be


def test_every_example_is_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - SHARED - ELSEWHERE == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_example(name: str, tmp_path: Path) -> None:
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    command = [
        sys.executable,
        "-W",
        "error",
        str(ROOT / "tests" / "one_thread.py"),
        str(EXAMPLES / f"{name}.py"),
        *(["--quick"] if name in QUICK else []),
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    pattern, low, high = FIGURES[name]
    found = re.search(pattern, result.stdout, re.MULTILINE)
    assert found, result.stdout
    assert low <= float(found[1]) <= high
    if name == "digits":
        assert {"digits.onnx", "trained.onnx", "digits.png", "checkpoints", "runs"} <= {
            path.name for path in tmp_path.iterdir()
        }
        runs = {path.parent.name for path in tmp_path.glob("runs/**/events.out.tfevents.*")}
        assert {"train", "validation"} <= runs
    if (GALLERY / f"{name}.csv").exists():
        assert (tmp_path / f"{name}.csv").exists()
        assert {path.name for path in tmp_path.glob("*.png")} == {
            path.name for path in GALLERY.glob(f"{name}*.png")
        }


def test_the_gallery_shows_every_picture() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    pictures = {f"gallery/{path.name}" for path in GALLERY.glob("*.png")}
    assert pictures == set(re.findall(r"\((gallery/[^)]+\.png)\)", page))
