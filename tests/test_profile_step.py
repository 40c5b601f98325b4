"""`make profile`: a table of the operators of a step, by the nodes of the model that cause them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import onnx.parser
import onnxruntime
import pytest

from scripts import profile_step
from tests.models import convolutional, mlp, two_outputs


def printed(
    model: onnx.ModelProto, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> list[str]:
    """The lines that profiling a model prints, after the first."""
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert profile_step.main([str(path), "--steps", "3", "--rows", "100", *options]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("model.onnx: ")
    assert all(len(line) <= 80 for line in (head, *lines))
    return lines


def owners(lines: list[str]) -> set[str]:
    column = lines[0].index("model node")
    return {line[column:] for line in lines[1:]}


@pytest.mark.filterwarnings("ignore")  # random data need not suit the loss
class TestProfile:
    @pytest.mark.parametrize("backend", ["full", "forward_backward"])
    def test_a_step_is_divided_among_nodes_loss_and_optimizer(
        self, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = printed(mlp(), tmp_path, capsys, "--loss", "cross_entropy", "--backend", backend)
        assert {"fc0", "fc1", "the loss", "the optimizer"} <= owners(lines)
        shares = [float(re.match(r" *([\d.]+)%", line)[1]) for line in lines[1:]]
        assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))

    def test_gradients_belong_to_the_node_they_differentiate(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = printed(convolutional(), tmp_path, capsys)
        found = owners(lines)
        assert {"Conv -> c", "MaxPool -> p"} <= found  # nodes without names
        assert not [owner for owner in found if owner.startswith("gradient")]

    def test_every_float_output_gets_a_loss(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = printed(two_outputs(), tmp_path, capsys, "--optimizer", "sgd")
        assert "the loss" in owners(lines)

    def test_a_model_with_its_own_loss_and_whole_numbers(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17]> g (int64[N, T] ids) => (float loss)
            <float[2, 3] table = {1, 2, 3, 4, 5, 6}>
            { rows = Gather(table, ids)  square = Mul(rows, rows)  loss = ReduceMean<keepdims = 0>(square) }"""
        )
        assert "Gather -> rows" in owners(printed(model, tmp_path, capsys))

    def test_the_rest_is_added_up(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lines = printed(mlp(), tmp_path, capsys, "--rows", "2")
        assert len(lines) == 4
        assert "others" in lines[-1]

    def test_errors_are_printed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert profile_step.main([str(tmp_path / "none.onnx")]) == 1
        assert "none.onnx" in capsys.readouterr().err


def test_operators_of_bodies_count_once(tmp_path: Path) -> None:
    events = [
        {"cat": "Node", "name": "loop_kernel_time", "ts": 0, "dur": 100, "args": {"op_name": "Loop"}},
        {"cat": "Node", "name": "add_kernel_time", "ts": 10, "dur": 30, "args": {"op_name": "Add"}},
        {"cat": "Node", "name": "add_kernel_time", "ts": 40, "dur": 50, "args": {"op_name": "Add"}},
        {"cat": "Node", "name": "neg_kernel_time", "ts": 100, "dur": 5, "args": {"op_name": "Neg"}},
        {"cat": "Session", "name": "model_run", "ts": 0, "dur": 200, "args": {}},
    ]  # fmt: skip
    (tmp_path / "profile.json").write_text(json.dumps(events))
    assert profile_step.operator_runs(tmp_path) == {
        ("Loop", "loop"): [pytest.approx(20e-6)],
        ("Add", "add"): [pytest.approx(30e-6), pytest.approx(50e-6)],
        ("Neg", "neg"): [pytest.approx(5e-6)],
    }


def test_session_options_are_as_they_were() -> None:
    before = onnxruntime.SessionOptions
    with profile_step.profiled_sessions(Path()):
        assert onnxruntime.SessionOptions is not before
    assert onnxruntime.SessionOptions is before
