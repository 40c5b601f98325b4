"""The benchmark suite, on its smallest workload: everybody trains alike, who does not is said to,
and the files are written.
"""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

SUITE = Path(__file__).resolve().parent.parent / "benchmarks/suite"
CONTENDERS = ["full-onnx", "sklearn", "keras-jax"]


def last_loss(weights: dict[str, np.ndarray[Any, Any]]) -> float:
    """Of five steps of plain gradient descent on the mean squared error, by hand."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((64 * 200, 10)), rng.standard_normal((64 * 200, 1))
    w, b, loss = weights["0.weight"].T.astype(float), weights["0.bias"].astype(float), 0.0
    for rows in np.arange(5 * 64).reshape(5, 64):
        error = x[rows] @ w + b - y[rows]
        loss = float((error**2).mean())
        w, b = w - 0.01 * 2 / 64 * x[rows].T @ error, b - 0.01 * 2 * error.mean(0)
    return loss


def test_contenders_train_alike_and_the_files_are_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    weights = {
        "0.weight": rng.standard_normal((1, 10)).astype(np.float32),
        "0.bias": np.full(1, 0.25, np.float32),
    }
    # the model as PyTorch would export it, so that PyTorch need not be there
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
        line (float[batch, 10] x) => (float[batch, 1] y) { y = Gemm<transB = 1>(x, w, b) }""")
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(weights[f"0.{name}"], name[0]) for name in ("weight", "bias")
    )
    onnx.save(model, tmp_path / "linear.onnx")
    np.savez(tmp_path / "linear.npz", **weights)
    command = [
        sys.executable,
        str(SUITE),
        "--quick",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--folder",
        str(tmp_path),
    ]
    # no environments but this
    command += ["--python", "plain=", "bench=", "training=" + sys.executable]
    command += ["--workloads", "linear", "--optimizers", "sgd", "--contenders", *CONTENDERS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    with (tmp_path / "results/benchmarks/steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == CONTENDERS
    for row in rows[:2]:
        assert row["comparable"] == "yes", row
        assert float(row["last_loss"]) == pytest.approx(last_loss(weights), rel=1e-4)
        assert float(row["step_us_median"]) > 0
        assert float(row["fit_us_median"]) > 0
    if importlib.util.find_spec("keras") is None:
        assert rows[2]["remark"].startswith("not installed:")
    page = (tmp_path / "results/benchmarks.md").read_text()
    for title in ("onnxfit full, onnx", "scikit-learn MLP", "Keras on JAX"):
        assert f"| {title} |" in page


def test_other_losses_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUITE))
    measure = importlib.import_module("measure")
    rows = [
        measure.Row("linear", "sgd", name, losses=[2.0, last])
        for name, last in (("sklearn", 1.002), ("torch", 1.0), ("full-onnx", 1.0005))
    ]
    measure.compare(rows)
    assert [row.comparable for row in rows] == [False, True, True]
    assert rows[0].remark == "not comparable: its loss is 1.002, not 1"


def test_a_ratio_is_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was slow in the second and third round, when one of the two was no longer asked."""
    monkeypatch.syspath_prepend(str(SUITE))
    timing = importlib.import_module("measure").Timing
    ours, theirs = timing([1.0, 5.0, 5.5, 1.0, 1.0]), timing([2.0, 10.0, 10.0])
    assert ours.ratio(theirs) == 0.5


def test_the_generated_part_is_replaced_and_the_prose_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(SUITE))
    report = importlib.import_module("report")
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    report.write_page(page, report.generated(["a machine"], [], [], []))
    text = page.read_text()
    assert text.startswith(f"before\n\n{report.BEGIN}\n\n- a machine\n")
    assert text.endswith(f"{report.END}\n\nafter\n")
    assert "old" not in text
