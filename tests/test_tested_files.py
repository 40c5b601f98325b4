"""`make files`, on a wheel that is made here, and what the docs say of the public files."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

from scripts.files import __main__ as command
from scripts.files import laws, page
from scripts.files.attempt import FIXED, REFUSED, STOPPED, TRAINS, WRONG, attempt, quietly
from scripts.files.catalogue import PublicFile, read_catalogue
from scripts.files.data import inputs_of, labels_of, loss_of, scores_of
from scripts.files.processes import run_in_child
from scripts.files.wheels import WheelError, fetch, read_file

ROOT = Path(__file__).resolve().parent.parent
GRAPHS = {
    "any_rows": "g (float[N, 3] x) => (float[N, 2] y) { h = MatMul(x, w)  t = Tanh(h)  y = MatMul(t, v) }",
    "two_rows": "g (float[2, 3] x) => (float[2, 2] y) { h = MatMul(x, w)  t = Tanh(h)  y = MatMul(t, v) }",
    # CDist has no rule
    "blocked": 'g (float[N, 3] x) => (float[N, 2] y) <int64[2] s = {-1, 4}> { h = MatMul(x, w)  d = com.microsoft.CDist<metric = "sqeuclidean">(h, w4)  f = Cast<to = 1>(d)  t = Reshape(f, s)  y = MatMul(t, v) }',
    "integer": "g (float[N, 3] x) => (int64[N, 1] y) { h = MatMul(x, w)  y = ArgMax<axis = 1>(h) }",
}


def model_of(name: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> {GRAPHS[name]}'
    )
    rng = np.random.default_rng(0)
    for weight, shape in {"w": (3, 4), "w4": (4, 4), "v": (4, 2)}.items():
        if any(weight in node.input for node in model.graph.node):
            array = rng.standard_normal(shape).astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, weight))
    return model


def row_of(name: str, rows: int = 2, **more: Any) -> PublicFile:
    data = model_of(name).SerializeToString()
    given: dict[str, Any] = {
        "package": "small-nets",
        "version": "1.0",
        "licence": "MIT",
        "path": f"small_nets/{name}.onnx",
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "task": "a test",
        "losses": {"y": "mse"},
        "inputs": {"x": {"shape": [rows, 3], "low": -1, "high": 1}},
    }
    return PublicFile.from_row({**given, **more})


def write_wheel(folder: Path) -> Path:
    """Write a wheel that pip accepts, with the files of GRAPHS."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small_nets-1.0-py3-none-any.whl"
    info = "small_nets-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name in GRAPHS:
            archive.writestr(f"small_nets/{name}.onnx", model_of(name).SerializeToString())
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-nets\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def write_catalogue(path: Path, *rows: PublicFile) -> None:
    shared = {"package": "small-nets", "version": "1.0", "licence": "MIT"}
    files = [
        {k: v for k, v in json.loads(row.to_json()).items() if k not in shared} for row in rows
    ]
    path.write_text(yaml.safe_dump([{**shared, "files": files}]), encoding="utf-8")


class TestAttempt:
    def test_a_file_trains_as_it_comes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        result = quietly(lambda: attempt(row_of("any_rows"), model_of("any_rows")))
        assert result["outcome"] == TRAINS, result
        assert result["gradient"] == "2 of 2 in float64"
        assert result["weights"] == 2
        assert result["lowest"] < result["loss"]

    def test_a_fix_counts_only_if_the_error_names_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        model = model_of("blocked")
        without = quietly(lambda: attempt(row_of("blocked"), model))
        assert without["outcome"] == REFUSED
        assert "CDist" in without["message"]
        fix = {"weights": ["v"]}
        fixed = quietly(lambda: attempt(row_of("blocked", fix=fix), model))
        assert (fixed["outcome"], fixed["fix"], fixed["weights"]) == (FIXED, fix, 1)
        assert fixed["message"] == without["message"]
        other = {"weights": ["v"], "dynamic_batch": True}
        unnamed = quietly(lambda: attempt(row_of("blocked", fix=other), model))
        assert unnamed == without

    def test_a_file_without_a_float_output_is_refused(self) -> None:
        row = row_of("integer", losses={"y": "cross_entropy"})
        assert attempt(row, model_of("integer"))["outcome"] == REFUSED

    def test_inputs_that_the_file_does_not_take_are_no_fault_of_onnxfit(self) -> None:
        row = row_of("any_rows", inputs={"x": {"shape": [2, 5], "value": 0}})
        result = attempt(row, model_of("any_rows"))
        assert result["outcome"] == STOPPED
        assert result["message"].startswith("onnxruntime does not run the file")

    def test_another_exception_is_wrong(self) -> None:
        result = quietly(lambda: {}["missing"])
        assert result["outcome"] == WRONG
        assert "KeyError" in result["broken"]["errors"][0]

    def test_a_child_that_hangs_costs_one_file(self) -> None:
        data = model_of("any_rows").SerializeToString()
        result = run_in_child(row_of("any_rows"), data, seconds=0.01, gigabytes=8)
        assert result["outcome"] == STOPPED
        assert result["message"] == "not finished after 0.01 s"


class TestLaws:
    def gradients(self, factor: float) -> laws.Comparison:
        """Compare the gradients of two products, each `factor` of the right one."""
        row, model = row_of("any_rows"), model_of("any_rows")
        x = inputs_of(model, row)
        y = laws.run(model, x)
        labels = labels_of(y, row)
        w, v = (onnx.numpy_helper.to_array(t).astype(float) for t in model.graph.initializer)
        t = np.tanh(x["x"] @ w)
        dy = 2 * (t @ v - labels["y"]) / labels["y"].size
        right = {"w": x["x"].T @ ((dy @ v.T) * (1 - t**2)), "v": t.T @ dy}
        gradients = {name: factor * g for name, g in right.items()}
        return laws.compare_gradients(
            model, x, gradients, lambda out: loss_of(out, labels, row, {})
        )

    def test_right_gradients_agree_with_central_differences(self) -> None:
        found = self.gradients(1.0)
        assert (found.right, found.wrong, found.precision) == (2, {}, "float64")

    @pytest.mark.parametrize("factor", [0.0, 0.5, 1.02, -1.0])
    def test_wrong_gradients_are_found(self, factor: float) -> None:
        assert set(self.gradients(factor).wrong) == {"w", "v"}

    def test_weights_in_constants_and_in_branches_can_be_moved(self) -> None:
        model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
            g (bool c, float[2] x) => (float[2] y) {
              y = If(c) <then_branch = a () => (float[2] p)
                  { k = Constant<value = float[1] {3}>()  p = Mul(x, k) },
                else_branch = b () => (float[2] q) { q = Identity(x) }>
            }""")
        changed, values = laws.exposed(model, ["k", "absent"])
        assert values["k"].tolist() == [3]
        x = {"c": np.array(True), "x": np.array([1, 2], np.float32)}
        assert laws.run(model, x)["y"].tolist() == [3, 6]
        assert laws.run(changed, {**x, "k": np.array([5], np.float32)})["y"].tolist() == [5, 10]
        assert set(values) == {"k"}

    def test_changed_nodes_and_constants_are_found(self) -> None:
        model, other = model_of("any_rows"), model_of("any_rows")
        assert not laws.differing_nodes(other, model)
        other.graph.node[1].op_type = "Sin"
        assert "nodes" in laws.differing_nodes(other, model)[0]
        changed = np.zeros((4, 2), np.float32)
        other.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(changed, "v"))
        assert laws.differing_constants(other, model, ["w"]) == ["v"]
        assert not laws.differing_constants(other, model, ["w", "v"])

    def test_outputs_are_compared_by_value_and_shape(self) -> None:
        y = {"y": np.array([1.0, 2.0], np.float32), "n": np.array([1, 2])}
        assert not laws.differing_outputs({"y": y["y"] + 1e-5, "n": y["n"]}, y)
        assert laws.differing_outputs({"y": y["y"] + 1e-2}, y)
        assert laws.differing_outputs({"y": y["y"][:1]}, y)
        assert laws.differing_outputs({"n": y["n"] + 1}, y)
        scalar = {"s": np.array(2, np.float32)}
        assert not laws.differing_outputs({"s": np.array([2], np.float32)}, scalar)
        assert laws.differing_outputs({"s": np.array([3], np.float32)}, scalar)
        assert laws.differing_outputs({"s": np.array([2, 2], np.float32)}, scalar)

    @pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy"])
    def test_losses_of_scores_are_those_of_their_probabilities(self, loss: str) -> None:
        scores = np.random.default_rng(0).standard_normal((5, 3))
        if loss == "cross_entropy":
            probabilities = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        else:
            probabilities = 1 / (1 + np.exp(-scores))
        plain = row_of("any_rows", losses={"y": loss})
        labels = labels_of({"y": scores}, plain)
        expected = loss_of({"y": probabilities}, labels, plain, {})
        found = loss_of(
            {"y": scores}, labels, row_of("any_rows", losses={"y": loss}, logits=["y"]), {}
        )
        assert found == pytest.approx(expected)

    @pytest.mark.parametrize("final", ["Sigmoid", "Softmax"])
    def test_losses_of_saturated_probabilities_are_those_of_their_scores(self, final: str) -> None:
        loss = {"Sigmoid": "binary_cross_entropy", "Softmax": "cross_entropy"}[final]
        model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
            g (float[N, 2] x) => (float[N, 2] y) {{ s = Identity(x)  y = {final}(s) }}""")
        row = row_of("any_rows", losses={"y": loss})
        scores = scores_of(model, row, {"y": 2})
        x = np.array([[500, -500], [-500, 500]], np.float32)
        y = laws.run(laws.with_outputs(model, scores.values()), {"x": x})
        labels = {"y": np.array([1, 0]) if final == "Softmax" else np.array([[0.0, 1], [1, 0]])}
        expected = {"Sigmoid": 500, "Softmax": 1000}[final]
        assert loss_of(y, labels, row, scores) == pytest.approx(expected)
        assert not scores_of(model, row_of("any_rows"), {"y": 2})


class TestWheels:
    def test_pip_fetches_a_wheel_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = write_wheel(tmp_path / "index")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(source.parent))
        found = fetch("small-nets", "1.0", tmp_path / "wheels")
        assert found.read_bytes() == source.read_bytes()
        source.unlink()
        assert fetch("small-nets", "1.0", tmp_path / "wheels") == found
        with pytest.raises(WheelError, match=r"no wheel of small-nets 2\.0"):
            fetch("small-nets", "2.0", tmp_path / "wheels")

    def test_another_file_is_not_read(self, tmp_path: Path) -> None:
        wheel = write_wheel(tmp_path)
        row = row_of("any_rows")
        assert read_file(wheel, row) == model_of("any_rows").SerializeToString()
        for change in ({"size": row.size - 1}, {"sha256": "0" * 64}):
            with pytest.raises(WheelError, match="is not the file of the catalogue"):
                read_file(wheel, row_of("any_rows", **change))
        with pytest.raises(WheelError, match="no readable file"):
            read_file(wheel, row_of("any_rows", path="absent.onnx"))


def test_the_command_stores_results_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(tmp_path / "wheels")
    catalogue = tmp_path / "catalogue.yaml"
    write_catalogue(catalogue, row_of("any_rows"), row_of("two_rows", sha256="0" * 64))
    arguments = ["--catalogue", str(catalogue), "--folder", str(tmp_path)]
    assert command.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "of 2 files in 1 package on PyPI, 1 trains as it comes and 1 did not finish"
    )
    first = (tmp_path / "results.csv").read_text()
    assert [row["outcome"] for row in csv.DictReader(first.splitlines())] == [TRAINS, STOPPED]
    # a finished file is not run again
    monkeypatch.setattr(command, "examine", lambda *_: pytest.fail("run again"))
    assert command.main(arguments) == 0
    assert (tmp_path / "results.csv").read_text() == first
    # unless it is asked for, or its row has changed
    again: list[PublicFile] = []

    def record(row: PublicFile, _: Any) -> dict[str, Any]:
        again.append(row)
        return {"outcome": WRONG, "broken": {"gradient": ["w"]}, "seconds": 1.0}

    monkeypatch.setattr(command, "examine", record)
    write_catalogue(catalogue, row_of("any_rows"), row_of("two_rows"))
    assert command.main(arguments) == 1
    assert [row.path for row in again] == ["small_nets/two_rows.onnx"]
    assert command.main([*arguments, "--fresh"]) == 1
    assert len(again) == 3


def test_the_page_and_the_sentence_count_every_outcome(tmp_path: Path) -> None:
    outcomes = [TRAINS, TRAINS, FIXED, REFUSED, WRONG, STOPPED]
    rows = [
        page.row_of(row_of("any_rows"), {"outcome": o, "seconds": 1.0, "message": "Reason <a|b>"})
        for o in outcomes
    ]
    assert page.sentence(rows) == (
        "of 6 files in 1 package on PyPI, 2 train as they come, 1 trains after the fix that the error"
        " names, 1 is refused with a reason, 1 trains wrongly and 1 did not finish"
    )
    assert page.short_sentence(rows) == "3 of 6 train"
    target = tmp_path / "page.md"
    target.write_text(f"# Title\n\n{page.BEGIN}old{page.END}\nrest\n")
    page.write(target, rows, "Measured.")
    text = target.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\nrest\n")
    assert "old" not in text
    assert text.count("| small-nets 1.0 |") == 6
    assert page.read_rows(tmp_path / "page.csv") == rows
    with pytest.raises(ValueError, match="are missing"):
        page.replaced("no marks", page.BEGIN, "x", page.END)


def test_the_catalogue_has_everything_for_each_file() -> None:
    rows = read_catalogue()
    assert len({row.sha256 for row in rows}) == len(rows)
    for row in rows:
        assert row.path.endswith(".onnx")
        assert re.fullmatch(r"[0-9a-f]{64}", row.sha256)
        assert row.size > 0
        assert row.licence
        assert set(row.losses.values()) <= {"mse", "binary_cross_entropy", "cross_entropy"}
        assert set(row.logits) <= set(row.losses)
        for recipe in row.inputs.values():
            assert "value" in recipe or recipe["low"] < recipe["high"]
    assert [PublicFile.from_json(row.to_json()) for row in rows] == rows


def test_page_and_readme_say_what_the_csv_file_says() -> None:
    rows = page.read_rows(ROOT / "docs/tested-files.csv")
    found = page.short_sentence(rows)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{page.README_BEGIN}{found}{page.README_END}" in readme
    text = (ROOT / "docs/tested-files.md").read_text(encoding="utf-8")
    assert "\n".join(page.table(rows)) in text
    listed = {(row.package, row.path, row.sha256) for row in read_catalogue()}
    assert {(row["package"], row["file"], row["sha256"]) for row in rows} == listed
