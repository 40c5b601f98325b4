"""The example in C++ trains a folder as Python does, and its state comes back."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from onnxfit import DataError, Trainer
from tests.builds import HAS_BUILDER
from tests.models import convolutional, mlp, two_inputs

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "cpp"
RNG = np.random.default_rng(0)
BATCH, EPOCHS = 8, 3

pytestmark = [
    pytest.mark.skipif(
        HAS_BUILDER, reason="a wheel of onnxruntime-training has no shared library for C++"
    ),
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which(os.environ.get("CXX", "g++"))),
        reason="needs make and a compiler for C++; .ci/run says when there is none",
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, compiled against the onnxruntime of this Python."""
    built = tmp_path_factory.mktemp("cpp")
    command = ["make", "-C", str(EXAMPLE), f"PYTHON={sys.executable}", f"OUT={built}"]
    command.append("CXXFLAGS=-O0 -Werror")
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return built / "train"


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def wide_line() -> Trainer:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        line (double[N, 1] x) => (double[N, 1] y) <double[1, 1] w = {0.5}> { y = MatMul(x, w) }""")
    return Trainer(model, loss="mean_absolute_error", optimizer="sgd")


def classifier() -> Trainer:
    model = convolutional(dropout=0.3, batch_norm=False)
    return Trainer(model, loss="cross_entropy", optimizer="adam")


def perceptron() -> Trainer:
    return Trainer(mlp(), loss="mean_squared_error", optimizer="adam", penalty="l2", seed=-3)


def sum_of_two() -> Trainer:
    return Trainer(two_inputs(), loss="mean_squared_error", optimizer="sgd")


@pytest.mark.parametrize(
    ("network", "fixed"),
    [(perceptron, False), (classifier, True), (wide_line, False), (sum_of_two, True)],
)
def test_a_program_in_cpp_trains_as_python_does(
    network: Callable[[], Trainer], fixed: bool, program: Path, tmp_path: Path
) -> None:
    trainer = network()
    rows = 2 * BATCH if fixed else 2 * BATCH + 3  # a host with fixed rows drops the rest
    folder = trainer.export_training(tmp_path / "folder", batch_size=BATCH if fixed else None)
    arrays, files = {}, []
    for name, spec in trainer._training.recipe.declared_batch.items():
        shape = (rows, *spec.shape[1:])
        if spec.dtype.kind == "i":
            arrays[name] = RNG.integers(0, 3, rows).astype(spec.dtype)
        else:
            arrays[name] = RNG.normal(size=shape).astype(spec.dtype)
        files.append(tmp_path / f"{len(files)}.npy")
        np.save(files[-1], arrays[name])
    state = tmp_path / "state.safetensors"
    result = run(program, folder, EPOCHS, BATCH, state, *files)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", result.stdout)]
    x = {name: array for name, array in arrays.items() if not name.startswith("y_true/")}
    (y,) = [array for name, array in arrays.items() if name.startswith("y_true/")]
    expected = trainer.fit(x, y, epochs=EPOCHS, batch_size=BATCH, verbose=0).history["loss"]
    assert len(set(expected)) == EPOCHS  # it trained
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    trained = trainer.get_state()
    trainer.import_state(state)
    assert trainer.get_state()["counters"] == trained["counters"]
    for kind in ("weights", "slots"):
        for name, array in trainer.get_state()[kind].items():
            np.testing.assert_allclose(array, trained[kind][name], rtol=1e-5, atol=1e-6)


def test_the_program_says_what_is_wrong(program: Path, tmp_path: Path) -> None:
    folder = sum_of_two().export_training(tmp_path / "folder")
    good, short, wide = (tmp_path / f"{name}.npy" for name in ("good", "short", "wide"))
    np.save(good, np.zeros((4, 1), np.float32))
    np.save(wide, np.zeros((4, 1)))
    short.write_bytes(good.read_bytes()[:-1])
    for arguments, message in [
        ((folder, 1, 2, tmp_path / "state"), "usage: train FOLDER"),
        ((folder, 1, 2, tmp_path / "state", good), "expected an .npy file for each"),
        ((folder, 1, 2, tmp_path / "state", good, good, wide), "expected float32 in C order"),
        ((folder, 1, 2, tmp_path / "state", good, good, short), "short.npy has another size"),
        ((tmp_path, 1, 2, tmp_path / "state", good, good, good), "cannot read"),
    ]:
        result = run(program, *arguments)
        assert result.returncode == 1
        assert message in result.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            "y",
            -1,
            "CrossEntropy expects class indices from 0 to 2 for output logits, got -1 at row 2",
        ),
        ("y", 3, "got 3 at row 2"),
        ("x", np.nan, "expects numbers, got nan at row 2"),
        ("sample_weight", np.inf, "sample_weight expects finite numbers, got inf at row 2"),
    ],
)
def test_numbers_that_python_refuses_are_refused_before_a_step(
    place: str, value: float, message: str, program: Path, tmp_path: Path
) -> None:
    trainer = classifier()
    folder = trainer.export_training(tmp_path / "folder", sample_weight=True)
    inputs = json.loads((folder / "manifest.json").read_text())["graphs"]["train"]["inputs"]
    files, x, y = [], RNG.normal(size=(4, 1, 8, 8)).astype(np.float32), np.arange(4) % 3
    arrays = {"x": x, "y": y, "sample_weight": np.ones(4, np.float32)}
    arrays[place] = arrays[place].copy()
    arrays[place][2] = value
    for tensor in inputs:
        if tensor["role"] in arrays:
            files.append(tmp_path / f"{len(files)}.npy")
            np.save(files[-1], arrays[tensor["role"]])
    result = run(program, folder, 1, 4, tmp_path / "state", *files)
    assert (result.returncode, result.stdout) == (1, "")
    assert message in result.stderr
    assert not (tmp_path / "state").exists()
    with pytest.raises(DataError):
        trainer.fit(arrays["x"], arrays["y"], arrays["sample_weight"], verbose=0)


def test_the_example_is_short() -> None:
    assert len((EXAMPLE / "train.cpp").read_text().splitlines()) <= 150
