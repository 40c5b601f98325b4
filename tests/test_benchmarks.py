"""The benchmark suite, on its smallest workload: everybody trains alike, who does not is said to,
and the files are written.
"""

from __future__ import annotations

import csv
import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

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
    command = [sys.executable, str(SUITE), "--quick", "--rounds", "1", "--threads", "1"]
    # no environments but this
    command += ["--folder", str(tmp_path), "--python", "training="]
    command += ["--workloads", "linear", "--optimizers", "sgd", "--contenders", *CONTENDERS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    figures = (tmp_path / "results/benchmarks/steps.csv").read_text()
    rows = list(csv.DictReader(figures.splitlines()))
    assert [row["contender"] for row in rows] == CONTENDERS
    for row in rows[:2]:
        assert row["comparable"] == "yes", row
        assert float(row["last_loss"]) == pytest.approx(last_loss(weights), rel=1e-4)
        assert float(row["step_us_median"]) > 0
        assert float(row["fit_us_median"]) > 0
    if importlib.util.find_spec("keras") is None:
        assert rows[2]["remark"].startswith("not installed:")
    for title in ("onnxfit", "scikit-learn MLP", "Keras on JAX"):
        assert f"| {title} |" in done.stdout
    assert (tmp_path / "results/benchmarks.md").read_text().startswith("# Benchmarks\n")

    # what is in the folder is not measured again, and other settings begin anew
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "going on from" in again.stdout
    assert (tmp_path / "results/benchmarks/steps.csv").read_text() == figures
    other = [*command, "--seconds", "0.02"]
    anew = subprocess.run(other, capture_output=True, text=True, check=False)
    assert "beginning anew" in anew.stdout
    assert (tmp_path / "results/benchmarks/steps.csv").read_text() != figures


def test_other_losses_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUITE))
    measure = importlib.import_module("measure")
    rows = [
        measure.Row("linear", "sgd", name, 1, losses=[2.0, last])
        for name, last in (("sklearn", 1.002), ("torch", 1.0), ("onnxfit", 1.0005))
    ]
    measure.compare(rows)
    assert [row.comparable for row in rows] == [False, True, True]
    assert rows[0].remark == "not comparable: its loss is 1.002, not 1"


def test_a_ratio_is_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was slow in the second and third round, when one of the two was no longer asked."""
    monkeypatch.syspath_prepend(str(SUITE))
    timing = importlib.import_module("measure").Timing
    ours, theirs = timing([1.0, 5.0, 5.5, 1.0, 1.0]), timing([2.0, 10.0, 10.0])
    assert ours.ratios(theirs) == (0.5, 0.5, 0.525)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SUITE))
    return importlib.import_module("report")


def row(
    contender: str,
    threads: int,
    seconds: float,
    comparable: bool = True,
    workload: str = "linear",
    remark: str = "",
) -> Any:
    measure = importlib.import_module("measure")
    timing = measure.Timing([seconds] * 3)
    given = {"step": timing, "fit": timing, "losses": [1.0], "comparable": comparable}
    return measure.Row(workload, "sgd", contender, threads, remark=remark, **given)


def test_the_headline_has_everybody_at_the_better_number_of_threads(report: Any) -> None:
    rows = [
        row("onnxfit", 1, 4e-5),
        row("onnxfit", 2, 2e-5),
        row("onnxfit-in-place", 1, 1e-5),  # another variant, not in the ratio
        row("onnxfit-plain", 1, 1e-5),  # has a ratio of its own
        row("torch", 1, 4e-4),
        row("torch", 2, 6e-4),
        row("torch-compile", 1, 8e-5),
        row("torch-compile", 2, 1e-5, comparable=False),
    ]
    step, fit = report.headline([rows])
    assert [step["kind"], fit["kind"]] == ["step", "fit"]
    assert (step["onnxfit_threads"], step["pytorch"]) == (2, "torch-compile")
    assert step["pytorch_threads"] == 1
    assert step["ratio"] == pytest.approx(0.25)
    assert step["eager_ratio"] == pytest.approx(0.05)
    assert step["plain_ratio"] == pytest.approx(0.125)
    once = [
        {"workload": "linear", "contender": name, "peak_memory": peak}
        for name, peak in (("onnxfit", "30"), ("torch", "60"), ("onnxfit-in-place", "15"))
    ]
    fit["ratio"], fit["plain_ratio"] = 0.5, math.nan
    line = report.network_table([step, fit], once).splitlines()[-1]
    assert line == (
        "| linear regression, 10 features, batch 64 | 20.0 | 80.0 | 0.25 to 0.50 | 0.12 |"
        " 0.50, 0.25 |"
    )
    assert report.network_table([step], []).splitlines()[-1].endswith("| 0.25 | 0.12 |  |")
    assert "| onnxfit | 40.0 (40.0 .. 40.0) | 20.0 (20.0 .. 20.0) | 2.00 |" in report.race_table(
        rows
    )


def test_the_sentence_has_the_whole_range(report: Any) -> None:
    headline = [
        {"workload": name, "ratio": ratio, "eager_ratio": "0.05"}
        for name, ratio in (
            ("linear", "0.1"),
            ("tabular", "0.3"),
            ("cnn", "1.2"),
            ("mobilenet", 2.5),
        )
    ]
    once = [
        {"workload": "cnn", "contender": name, "peak_memory": peak}
        for name, peak in (("onnxfit", "30"), ("torch", "60"), ("torch-compile", "90"))
    ]
    text = report.summary(headline, once)
    times = (
        "is 0.10 to 0.30 on small networks, 1.20 on larger ones, 2.50 on depthwise convolutions;"
    )
    assert times in text
    assert text.endswith("; peak memory is 0.50 of eager PyTorch's")

    once.append({"workload": "cnn", "contender": "onnxfit-in-place", "peak_memory": "15"})
    in_place = '; with `backend="in_place"`, it is 0.25'
    assert report.summary(headline, once).endswith(f"eager PyTorch's{in_place}")

    headline[2]["plain_ratio"] = "1.1"
    headline[3]["plain_ratio"] = "nan"  # not measured
    plain = "without its C++ operators, it is 1.10 on larger ones; peak memory"
    assert plain in report.summary(headline, once)


def test_the_worst_ratio_and_the_mean_over_networks_stand_first(report: Any) -> None:
    """Two batch sizes of a network count as one network: the mean of 4, 4 and 1 is not 4^(2/3)."""
    headline = [
        {"workload": name, "optimizer": "sgd", "kind": kind, "ratio": ratio}
        for name, kind, ratio in (
            ("gru", "step", "4"),
            ("gru-8", "fit", "4.01"),
            ("linear", "step", "1"),
        )
    ]
    text = report.overall(headline)
    assert "is 4.01 (gru-8, sgd: fit per batch), " in text
    assert "geometric mean over 2 networks is 2.00; everything is computed in float32" in text
    headline[0]["plain_ratio"] = headline[1]["plain_ratio"] = "3"
    plain = (
        "; without the C++ operators, the worst is 3.00 (gru, sgd: step), the mean is 3.00; every"
    )
    assert plain in report.overall(headline)
    assert report.short(headline) == (
        "on average over 2 networks, training takes 2.00 of the time of the fastest PyTorch (eager or"
        " compiled)"
    )
    assert report.overall([]) == ""
    assert report.short([]).endswith("was not measured")


def test_bf16_stands_beside_the_ratios_and_counts_for_none(report: Any) -> None:
    rows = [
        row("onnxfit", 2, 4e-5),
        row("torch", 2, 2e-5),
        row("torch-bf16", 2, 1e-5),
        row("torch-compile", 2, 1e-6, comparable=False),
    ]
    step, fit = report.headline([rows])
    assert step["ratio"] == fit["ratio"] == pytest.approx(2)
    assert step["bf16_us"] == pytest.approx(10)
    assert "counts for no ratio" in report.half_sentence([step], {})
    assert "is 4.00 of it, 4.00 in the geometric mean" in report.half_sentence([step], {})
    fastest = report.fastest(rows, "step")
    assert fastest.contender == "torch"  # of everybody, too


def test_what_has_no_ratio_is_listed(report: Any) -> None:
    brief = [
        row("onnxfit", 2, 1e-5, workload="gru"),
        row("torch", 2, 1e-5, comparable=False, workload="gru", remark="not comparable"),
    ]
    assert report.without_ratio([[row("onnxfit", 2, 1e-5), row("torch", 2, 1e-5)]]) == []
    assert report.without_ratio([brief]) == [
        "gru, sgd: no ratio",
        "gru, sgd: PyTorch eager: not comparable",
    ]
    assert report.without_ratio([brief], ["torch"]) == ["gru, sgd: no ratio"]
    assert report.without_ratio([brief, brief], ["torch"]) == ["gru, sgd; gru, sgd: no ratio"]


def test_bars_say_by_how_much_they_are_missed(report: Any) -> None:
    rows = [row("onnxfit", 1, 2e-5), row("torch", 1, 8e-5)]
    once = [
        {"workload": "linear", "contender": name, "peak_memory": peak}
        for name, peak in (("onnxfit", 30), ("torch", 60))
    ]
    limits = [{"workload": "mlp", "optimizer": "sgd", "ours": 3.0, "limit": 1.0}]
    found = [list(bar.values()) for bar in report.bars(report.Figures([], [rows], once, limits))]
    assert [[*bar[:2], bar[4]] for bar in found] == [
        ["linear, sgd: step", "onnxfit / PyTorch", "missed by 150 %"],
        ["linear, sgd: fit per batch", "onnxfit, µs", "met"],
        ["linear: peak memory", "onnxfit / PyTorch eager", "met"],
        ["mlp, sgd: step", "onnxfit / arithmetic limit", "missed by 100 %"],
    ]
    assert [bar[2] for bar in found] == pytest.approx([0.25, 20, 0.5, 3])


def test_bf16_may_differ_more_than_float32(report: Any) -> None:
    measure = importlib.import_module("measure")
    rows = [
        measure.Row("linear", "sgd", name, 2, losses=[last])
        for name, last in (("torch", 1.0), ("torch-bf16", 1.01), ("onnxfit", 1.01))
    ]
    measure.compare(rows)
    assert [row.comparable for row in rows] == [True, True, False]


def test_new_networks_have_two_batch_sizes_and_few_contenders(report: Any, tmp_path: Path) -> None:
    measure, workloads, contenders = map(
        importlib.import_module, ("measure", "workloads", "contenders")
    )
    brief = [work for work in workloads.WORKLOADS.values() if work.brief]
    sizes: dict[str, set[int]] = {}
    for work in brief:
        sizes.setdefault(work.network, set()).add(work.batch_size)
        assert work.title.endswith(f", batch {work.batch_size}")
    assert len(sizes) == 12
    assert {len(found) for found in sizes.values()} == {2}
    job = workloads.Job(workloads.WORKLOADS["gru-8"], "sgd", tmp_path, 2)
    assert (job.model.name, job.workload.batch_size) == ("gru.onnx", 8)

    def lanes(everywhere: bool) -> Any:
        names = list(contenders.ENTRIES)
        plan = measure.Plan(names, 1, 0.1, 1.0, [1, 2], tmp_path, {}, everywhere)
        return plan.lanes_of("gru")

    few = ["onnxfit", "onnxfit-plain", "torch", "torch-compile", "torch-bf16"]
    assert lanes(False) == [(name, 2) for name in few]
    assert lanes(True) == [(name, 2) for name in contenders.ENTRIES]


class Answering:
    """A process that only says how it was started and ended."""

    events: ClassVar[list[str]] = []
    answers: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, python: str, contender: str, *_: object) -> None:
        self.contender = contender

    def __enter__(self) -> Answering:
        self.events.append(f"{self.contender} begins")
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append(f"{self.contender} ends")

    def ask(self, do: str, **_: object) -> dict[str, Any]:
        return self.answers[do]


@pytest.fixture
def answering(report: Any, monkeypatch: pytest.MonkeyPatch) -> type[Answering]:
    monkeypatch.setattr(importlib.import_module("measure"), "Process", Answering)
    monkeypatch.setattr(Answering, "events", [])
    return Answering


def test_a_contender_that_the_machine_cannot_run_is_absent(
    answering: type[Answering], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure = importlib.import_module("measure")
    monkeypatch.setattr(answering, "answers", {"load": {"refused": "no instructions"}})
    names = ["torch-bf16", "onnxfit-ort"]
    plan = measure.Plan(names, 1, 0.1, 1.0, [1], tmp_path, {"bench": "python"}, everywhere=True)
    field = measure.Field(plan)
    rows = field.race("gru", "sgd")
    absent = {
        "torch-bf16": "no instructions",
        "onnxfit-ort": "not installed: no environment training",
    }
    assert field.absent == absent
    assert {row.contender: row.remark for row in rows} == absent
    assert field.race("gru", "sgd")
    assert answering.events == ["torch-bf16 begins", "torch-bf16 ends"]  # it is not tried again


def test_each_network_and_optimizer_has_processes_of_its_own(
    answering: type[Answering], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch would keep the memory of the networks before."""
    measure = importlib.import_module("measure")
    answers = {
        "load": {"import_seconds": 0.1},
        "build": {"build_seconds": 0.1},
        "losses": {"losses": [1.0, 0.5], "remark": "", "steps": True},
        **{kind: {"seconds": 0.01, "took": 0.1} for kind in ("step", "fit")},
    }
    monkeypatch.setattr(answering, "answers", answers)
    names = ["onnxfit", "torch"]
    plan = measure.Plan(names, 2, 0.1, 1.0, [2], tmp_path, {"bench": "python"})
    field = measure.Field(plan)
    for optimizer in ("adam", "sgd"):
        for row in field.race("gru", optimizer):
            assert row.comparable
            assert (row.step.median, row.fit.median) == (0.01, 0.01)
    begun, ended = ([f"{name} {what}" for name in names] for what in ("begins", "ends"))
    assert answering.events == [*begun, *ended[::-1]] * 2


def test_the_sentence_of_the_readme_is_that_of_the_figures(report: Any) -> None:
    headline, once = (
        list(csv.DictReader((ROOT / f"docs/benchmarks/{name}.csv").read_text().splitlines()))
        for name in ("headline", "once")
    )
    sentence = report.summary(headline, once)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{report.README_BEGIN}{report.short(headline)}{report.README_END}" in readme
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert f"In short: {sentence}." in page
    assert f"Overall: {report.overall(headline)}." in page
    assert f"\n{report.network_table(headline, once)}\n" in page


def test_the_generated_part_is_replaced_and_the_prose_stays(report: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    rows = [row("onnxfit", 1, 1e-5), row("onnxfit-plain", 1, 2e-5), row("torch", 1, 4e-5)]
    figures = report.Figures(["a machine"], [rows], [], [], {"torch-bf16": "no instructions"})
    report.write(page, figures)
    text = page.read_text()
    assert text.startswith(f"before\n\n{report.BEGIN}\n\nOverall: the worst ratio")
    assert "PyTorch eager, bf16 autocast is not measured: no instructions." in text
    assert "\n\nIn short: " in text
    assert "\n- a machine\n" in text
    assert (tmp_path / "benchmarks/bars.csv").read_text().startswith("where,what,value,bar,verdict")
    assert text.endswith(f"{report.END}\n\nafter\n")
    assert "old" not in text

    readme = tmp_path / "README.md"
    readme.write_text(f"fast: {report.README_BEGIN}old{report.README_END}, measured\n")
    report.write_sentence(readme, figures)
    assert "training takes 0.25 of the time" in readme.read_text()
    assert readme.read_text().endswith(f"{report.README_END}, measured\n")
