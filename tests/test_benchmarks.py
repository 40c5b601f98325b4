"""The benchmark suite: on its smallest workload everybody trains alike, and the chart and the table
are right.
"""

from __future__ import annotations

import csv
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

SUITE = Path(__file__).resolve().parent.parent / "benchmarks/suite"
ROOT = SUITE.parent.parent
CONTENDERS = ["onnxfit", "sklearn", "keras-jax"]


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
    command = [sys.executable, str(SUITE), "--quick", "--repetitions", "2", "--threads", "1"]
    # no environments but this
    command += ["--folder", str(tmp_path), "--python", "training="]
    command += ["--workloads", "linear", "--optimizers", "sgd", "--contenders", *CONTENDERS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    figures = (tmp_path / "suite.csv").read_text()
    rows = list(csv.DictReader(figures.splitlines()))
    trained = [row for row in rows if row["step_us"]]
    assert [row["contender"] for row in trained[:4]] == ["onnxfit"] * 2 + ["sklearn"] * 2
    for row in trained[:4]:
        assert not row["remark"]
        assert float(row["last_loss"]) == pytest.approx(last_loss(weights), rel=1e-4)
        assert float(row["step_us"]) > 0
        assert float(row["fit_us_per_batch"]) > 0
        assert float(row["peak_mb"]) > 20
    if importlib.util.find_spec("keras") is None:
        assert rows[-1]["remark"].startswith("absent: No module")
    text = (tmp_path / "report.txt").read_text()
    assert text in done.stdout
    assert max(map(len, text.splitlines())) <= 80
    for part in ("\nlinear          sgd  ", "step, µs", "scikit-learn MLP", "2 repetitions"):
        assert part in text

    # what is in the folder is not measured again, and other settings begin anew
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "going on from" in again.stdout
    assert (tmp_path / "suite.csv").read_text() == figures
    other = [*command, "--seconds", "0.02", "--repetitions", "1", "--contenders", "onnxfit"]
    anew = subprocess.run(other, capture_output=True, text=True, check=False)
    assert "beginning anew" in anew.stdout
    assert (tmp_path / "suite.csv").read_text() != figures


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SUITE))
    return importlib.import_module("measure")


@pytest.fixture
def report(measure: Any) -> Any:
    return importlib.import_module("report")


def test_other_losses_are_not_compared(measure: Any) -> None:
    rows = [
        measure.Row("linear", "sgd", name, losses=[2.0, last])
        for name, last in (
            ("sklearn", 1.002),
            ("torch", 1.0),
            ("onnxfit", 1.0005),
            ("torch-bf16", 1.01),
        )
    ]
    measure.compare(rows)
    assert [row.comparable for row in rows] == [False, True, True, True]  # bf16 may differ more
    assert rows[0].remark == "not comparable: its loss is 1.002, not 1"


def test_each_repetition_is_a_process_and_contenders_take_turns(
    measure: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[str] = []

    def run_json(command: list[str], environment: dict[str, str], log: Path) -> dict[str, Any]:
        started.append(command[2])
        if command[2] == "torch-bf16":
            return {"refused": "no instructions"}
        assert environment["OMP_NUM_THREADS"] == "2"
        seconds = float(len(started))
        return {"step": seconds, "fit": 2 * seconds, "memory": 5, "losses": [1.0], "remark": ""}

    monkeypatch.setattr(measure, "run_json", run_json)
    names = ["onnxfit", "torch", "torch-bf16", "onnxfit-ort"]
    plan = measure.Plan(names, 3, 0.1, 2, tmp_path, {"bench": "python"})
    us, them, refused, absent = measure.race(plan, "gru", "sgd")
    # those that cannot take part are not asked again
    assert started == ["onnxfit", "torch", "torch-bf16", "torch", "onnxfit", "onnxfit", "torch"]
    assert (us.step, them.step) == ([1, 5, 6], [2, 4, 7])
    assert (us.least("step"), us.middle("fit"), us.memory) == (1, 10, [5, 5, 5])
    assert us.comparable
    assert not refused.comparable
    assert refused.remark == "refused: no instructions"
    assert absent.remark == "absent: no environment training"


def row(
    contender: str, seconds: list[float], workload: str = "linear", memory: int = 10, **given: Any
) -> Any:
    measure = importlib.import_module("measure")
    fit = [2 * s for s in seconds]
    what = {"comparable": True, "memory": [memory], **given}
    return measure.Row(workload, "adam", contender, seconds, fit, losses=[1.0], **what)


def test_the_first_is_compared_with_the_fastest_of_the_others(report: Any) -> None:
    races = [
        [
            row("onnxfit", [1e-5, 2e-5, 6e-5], memory=30),
            row("torch", [2e-5, 9e-5, 9e-5], memory=60),
            row("torch-compile", [3e-5, 4e-5, 9e-5], memory=90),
            row("torch-bf16", [1e-6], comparable=False, remark="not comparable"),
        ]
    ]
    step, fit = report.lines_of(races)
    assert (step.kind, step.rival, step.memory) == ("step", "torch-compile", 0.5)
    assert (step.least_ratio, step.ratio) == pytest.approx((0.5, 0.5))
    assert fit.middle == pytest.approx(8e-5)
    head, line = report.table([step, fit]).splitlines()[1:]
    assert " ".join(line.split()) == "linear adam 20.0 40.0 c 0.50 40.0 80.0 c 0.50 0.50"
    assert head.split() == [*["onnxfit", "PyTorch", "ratio"] * 2, "mem."]
    assert report.remarks(races) == [
        "PyTorch eager, bf16 autocast: not comparable (linear, adam)",
    ]
    assert report.lines_of([[races[0][0], races[0][3]]]) == []
    assert report.overall([]) == "Nothing could be compared."


def test_a_ratio_that_the_best_repetitions_contradict_is_marked(report: Any) -> None:
    steady = [row("onnxfit", [1e-5, 1e-5, 9e-5]), row("torch", [2e-5, 2e-5, 2e-5])]
    disturbed = [row("onnxfit", [1e-5, 9e-5, 9e-5], "mlp"), row("torch", [2e-5, 2e-5, 2e-5], "mlp")]
    _, _, first, second = report.table(report.lines_of([steady, disturbed])).splitlines()
    assert "0.50 " in first
    assert "~" not in first
    assert second.count("4.50~") == 2
    assert len(second) <= 80


def test_the_mean_counts_each_network_once(report: Any) -> None:
    """Two batch sizes of a network count as one network: the mean of 4, 4 and 1 is not 4^(2/3)."""
    races = [
        [row("onnxfit", [ratio * 1e-5], name), row("torch", [1e-5], name)]
        for name, ratio in (("gru", 4), ("gru-8", 4.001), ("linear", 1))
    ]
    lines = report.lines_of(races)
    assert report.overall(lines) == "Mean of 2 networks: 2.00; worst: 4.00 (gru-8, adam: step)."


def test_the_chart_has_eighty_columns_and_bars_to_scale(report: Any, tmp_path: Path) -> None:
    worse = row("onnxfit", [1e-5], "mlp")
    worse.fit = [4e-5]  # a ratio of 0.5 for steps, and of 1 for fits
    races = [
        [row("onnxfit", [0.25e-5]), row("torch", [1e-5])],
        [worse, row("torch", [2e-5], "mlp")],
        [row("onnxfit", [7e-5], "cnn"), row("torch", [1e-5], "cnn")],
    ]
    lines = report.lines_of(races)
    chart = report.chart(lines)
    linear, mlp, cnn = chart.splitlines()[-3:]
    assert max(map(len, chart.splitlines())) <= 80
    assert (linear.count("█"), linear.count("░"), linear.index("│")) == (10, 0, 14 + 40)
    assert (mlp.count("█"), mlp.count("░"), mlp.split()[-2:]) == (28, 12, ["0.71", "1.00"])
    assert "→" in cnn
    assert "│" not in cnn
    pytest.importorskip("matplotlib")
    report.draw(tmp_path / "chart.png", [])
    assert not (tmp_path / "chart.png").exists()
    report.draw(tmp_path / "chart.png", lines)
    assert (tmp_path / "chart.png").stat().st_size > 5000


def test_the_generated_part_is_replaced_and_the_prose_stays(report: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    races = [[row("onnxfit", [1e-5]), row("torch", [2e-5])]]
    text = report.text(races, ["a machine"], has_chart=False)
    assert "█" not in text
    assert "█" in report.text(races, ["a machine"])
    report.write_page(page, "chart.png", text)
    written = page.read_text()
    assert written.startswith(f"before\n\n{report.BEGIN}\n\n![")
    assert "(chart.png)\n\n```text\nMean of 1 network: 0.50" in written
    assert "\na machine\n```\n" in written
    assert written.endswith(f"{report.END}\n\nafter\n")
    assert "old" not in written


def test_networks_with_two_batch_sizes_share_a_file(measure: Any, tmp_path: Path) -> None:
    workloads = importlib.import_module("workloads")
    sizes: dict[str, set[int]] = {}
    for work in workloads.WORKLOADS.values():
        sizes.setdefault(work.network, set()).add(work.batch_size)
        assert work.title.endswith(f"batch {work.batch_size}")
    assert sorted(map(len, sizes.values())) == [1] * 10 + [2] * 12
    job = workloads.Job(workloads.WORKLOADS["gru-8"], "sgd", tmp_path, 2)
    assert (job.model.name, job.workload.batch_size) == ("gru.onnx", 8)


def test_the_readme_has_the_mean_of_the_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    mean = re.search(r"training takes (\d\.\d\d) of the", readme)
    assert mean
    assert f" {mean[1]} " in page
