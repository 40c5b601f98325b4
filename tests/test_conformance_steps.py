"""The suite of training steps for runtimes: `make steps`."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import scripts.steps.folders as files
from onnxfit.errors import UnsupportedError
from scripts.steps.attempt import PASSED, REFUSED, WRONG, attempt, difference, smallest
from scripts.steps.cases import Case, cases
from scripts.steps.float64 import reference_outputs
from scripts.steps.page import tables
from scripts.steps.processes import run_case
from scripts.steps.runtimes import RUNTIMES, Runtime

CASES = {case.name: case for case in cases()}
PLAIN = RUNTIMES["onnxruntime-plain"]


def test_there_are_forty_cases_and_more_whose_names_differ():
    assert len(CASES) == len([*cases()]) >= 40


@pytest.mark.table
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_onnxruntime_agrees_with_the_reference_in_float64(case: Case):
    model, feeds = case.step()
    onnx.checker.check_model(model, full_check=True)
    assert not any(dim.dim_param for v in model.graph.input for dim in v.type.tensor_type.shape.dim)
    assert {node.domain for node in model.graph.node} == {""}
    outcome = attempt(PLAIN, model, feeds, reference_outputs(model, feeds), case.tolerance)
    assert outcome.result == PASSED, outcome


def test_a_case_of_a_folder_for_npus_has_no_convolution():
    case = CASES["conv2d_adam"]
    model, feeds = case.step("npu")
    assert not {"Conv", "ConvTranspose"} & {node.op_type for node in model.graph.node}
    assert feeds.keys() == {value.name for value in model.graph.input}
    outcome = attempt(PLAIN, model, feeds, reference_outputs(model, feeds), case.tolerance)
    assert outcome.result == PASSED, outcome
    with pytest.raises(UnsupportedError, match="Scan in the gradient"):
        CASES["lstm_sgd"].step("npu")


def test_a_case_is_the_same_each_time():
    first, second = (CASES["gru_adam"].step() for _ in range(2))
    assert first[0].SerializeToString(deterministic=True) == second[0].SerializeToString(
        deterministic=True
    )
    for name, array in first[1].items():
        np.testing.assert_array_equal(array, second[1][name])


def test_the_folders_have_the_layout_of_onnx(tmp_path):
    model, feeds = CASES["dense_relu_fp16"].step()
    right = reference_outputs(model, feeds)
    files.write_case(tmp_path / "one", model, feeds, right)
    data = tmp_path / "one" / "test_data_set_0"
    assert {file.name for file in data.glob("input_*")} == {
        f"input_{i}.pb" for i in range(len(model.graph.input))
    }
    read, given, expected = files.read_case(tmp_path / "one")
    assert read == model
    for name, array in feeds.items():
        np.testing.assert_array_equal(given[name], array)
    for value in model.graph.output:
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        assert expected[value.name].dtype == kind


def _wrong_in(operator: str) -> Runtime:
    """Return a runtime that is right, except that one operator computes with another sign."""

    def compile_model(model: onnx.ModelProto):
        changed = onnx.ModelProto.FromString(model.SerializeToString())
        for node in list(changed.graph.node):
            if node.op_type == operator:
                made = node.output[0]
                node.output[0] = f"{made}/right"
                index = list(changed.graph.node).index(node)
                negated = onnx.helper.make_node("Neg", [f"{made}/right"], [made])
                changed.graph.node.insert(index + 1, negated)
        return PLAIN.compile(changed)

    return Runtime("wrong", PLAIN.version, compile_model)


def test_the_operator_that_is_wrong_is_found_and_becomes_a_case(tmp_path, monkeypatch):
    model, feeds = CASES["encoder_sgd"].step()
    files.write_case(tmp_path / "encoder", model, feeds, reference_outputs(model, feeds))
    monkeypatch.setitem(RUNTIMES, "wrong", _wrong_in("LayerNormalization"))
    outcome = run_case("wrong", tmp_path, "encoder", 2e-4)
    assert (outcome.result, outcome.node) == (WRONG, "LayerNormalization")
    alone, given, right = files.read_case(tmp_path / "failures" / "wrong" / "LayerNormalization")
    assert [node.op_type for node in alone.graph.node] == ["LayerNormalization"]
    assert attempt(PLAIN, alone, given, right, 2e-4).result == PASSED
    assert smallest(PLAIN, model, feeds, 2e-4, WRONG) is None


def test_a_wrong_node_does_not_explain_why_a_runtime_refuses(tmp_path, monkeypatch):
    def refuse_together(model: onnx.ModelProto):
        if len(model.graph.node) > 1:
            raise RuntimeError("too many nodes")
        return _wrong_in("Gemm").compile(model)

    model, feeds = CASES["linear_sgd"].step()
    files.write_case(tmp_path / "linear", model, feeds, reference_outputs(model, feeds))
    monkeypatch.setitem(RUNTIMES, "wrong", Runtime("wrong", PLAIN.version, refuse_together))
    outcome = run_case("wrong", tmp_path, "linear", 2e-4)
    assert (outcome.result, outcome.node) == (REFUSED, "")
    assert outcome.reason == "RuntimeError: too many nodes"


def test_the_difference_is_relative_and_sees_shapes_and_nan():
    right = np.array([100.0, 1.0])
    assert difference(np.array([100.0, 2.0]), right) == pytest.approx(0.01)
    assert difference(np.array([[100.0, 1.0]]), right) == np.inf
    assert difference(np.array([np.nan, 1.0]), right) == np.inf
    assert difference(np.array([np.inf, np.nan]), np.array([np.inf, np.nan])) == 0


def test_the_page_counts_results_and_names_operators():
    case = {
        "result": "refused",
        "difference": None,
        "reason": "no /usr/lib/x/y.so | here",
        "node": "Scan",
    }
    run = {
        "runtime": "R", "version": "1", "suite": "1",
        "cases": {"a": case, "b": case, "c": {**case, "result": "passed"}},
    }  # fmt: skip
    text = tables({"r": run})
    assert "| R | 1 | 1 of 3 | 2 | 0 | 0 |" in text
    assert "| R | Scan | refused | 2, as `a` |" in text
    assert "/usr" not in text
