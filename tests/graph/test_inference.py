"""Types and shapes of outputs: the registry, and what it adds to ONNX's inference."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import onnx_ir as ir
import pytest

from onnxfit.graph import inference
from onnxfit.graph.inference import (
    INFERENCES,
    InputsError,
    infer_outputs,
    register_inference,
    same_type,
    same_type_and_rank,
    same_type_and_shape,
)

HEADER = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "ai.onnx.ml": 3, "test": 1]>'


def outputs(text: str) -> list[tuple[ir.DataType | None, list | None]]:
    """Type and sizes of the outputs of a graph's last node."""
    model = ir.from_onnx_text(f"{HEADER} g {text}")
    node: ir.Node | None = None
    for node in model.graph:
        infer_outputs(model.graph, node)
    assert node is not None
    return [
        (v.dtype, None if v.shape is None else [getattr(d, "value", d) for d in v.shape])
        for v in node.outputs
    ]


def test_threads_share_the_cache_of_inferences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads removed the same oldest entry."""
    monkeypatch.setattr(inference, "MAX_CACHED_INFERENCES", 0)
    monkeypatch.setattr(inference, "_INFERRED", {})
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def infer(thread: int) -> None:
        for i in range(150):
            outputs(f"(float[{thread + 1},{i + 1}] x) => (y) {{ y = Neg(x) }}")

    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(infer, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert not inference._INFERRED


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setattr(inference, "INFERENCES", dict(INFERENCES))
    return inference.INFERENCES


def test_an_unknown_operator_leaves_its_outputs_open():
    assert outputs("(float16[N, 2] x) => (y) { y = test.Op(x) }") == [(None, None)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (same_type, [(ir.DataType.FLOAT16, None), (ir.DataType.FLOAT16, None)]),
        (same_type_and_rank, [(ir.DataType.FLOAT16, ["N", None]), (ir.DataType.FLOAT16, None)]),
        (same_type_and_shape, [(ir.DataType.FLOAT16, ["N", 2]), (ir.DataType.FLOAT16, None)]),
    ],
)
def test_a_registered_function_infers(registry, function, expected):
    assert register_inference("Op", "test")(function) is function
    assert outputs("(float16[N, 2] x) => (y, z) { y, z = test.Op(x) }") == expected


def test_register_inference_decorates(registry):
    @register_inference("Op", "test")
    def infer(node: ir.Node) -> None:
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        node.outputs[0].shape = ir.Shape([7])

    assert registry["test", "Op"] is infer
    assert outputs("(float[N, 2] x) => (y) { y = test.Op(x) }") == [(ir.DataType.INT64, [7])]


def test_a_later_registration_replaces_an_earlier_one(registry):
    register_inference("Op", "test")(same_type)
    register_inference("Op", "test")(same_type_and_shape)
    assert outputs("(float[3] x) => (y) { y = test.Op(x) }") == [(ir.DataType.FLOAT, [3])]


def test_statistics_of_a_normalization_have_no_shape():
    found = outputs(
        "(float[N, 4] x, float[N, 4] skip, float[4] scale) => (y, mean, deviation, sum)"
        " { y, mean, deviation, sum = com.microsoft.SkipLayerNormalization(x, skip, scale) }"
    )
    assert [shape for _, shape in found] == [["N", 4], None, None, ["N", 4]]


def test_packed_heads_are_not_the_shape_of_an_attention():
    text = (
        "(float[2, 3, 4, 3, 5] x) => (y) { y = com.microsoft.MultiHeadAttention<num_heads=4>(x) }"
    )
    assert outputs(text) == [(ir.DataType.FLOAT, None)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(float[N, 3] x, int64[4] s) => (y) { y = Reshape(x, s) }", [None] * 4),
        ("(int64[2] s) => (y) { y = ConstantOfShape(s) }", [None] * 2),
        ("(float[N, 3] x, int64[2] s) => (y, z) { y, z = Split<axis=-1>(x, s) }", ["N", None]),
        (
            "(float[N, 3] x) => (y) { y = ai.onnx.ml.Scaler<offset=[1.0], scale=[1.0]>(x) }",
            ["N", 3],
        ),
        ("(float[N, 3] x) => (y) { y = ai.onnx.ml.LinearRegressor<targets=2>(x) }", [None, 2]),
        ("(float[N, 3] x) => (l, y) { l, y = ai.onnx.ml.SVMClassifier(x) }", [None, None]),
    ],
)
def test_ranks_that_onnx_overlooks(text, expected):
    assert outputs(text)[-1] == (ir.DataType.FLOAT, expected)


@pytest.mark.parametrize(("length", "rank"), [(1, 2), (4, 4)])
def test_expand_has_at_least_the_rank_of_its_input(length, rank):
    # newer releases of ONNX tell the rank themselves
    text = f"(float[N, 3] x, int64[{length}] s) => (y) {{ y = Expand(x, s) }}"
    model = ir.from_onnx_text(f"{HEADER} g {text}")
    INFERENCES["", "Expand"](model.graph[0])
    assert len(model.graph.outputs[0].shape) == rank


def test_embeddings_have_three_outputs_of_their_own_shapes():
    found = outputs(
        "(int32[N, L] ids, int32[N, L] segments, float[100, 8] words) => (y, mask, sum)"
        " { y, mask, sum = com.microsoft.EmbedLayerNormalization(ids, segments, words) }"
    )
    assert found == [
        (ir.DataType.FLOAT, ["N", "L", 8]),
        (ir.DataType.INT32, ["N"]),
        (ir.DataType.FLOAT, ["N", "L", 8]),
    ]


def test_branches_share_the_sizes_that_agree():
    text = (
        "(bool c, float[2, N] a, float[3, N] b) => (y) { y = If (c)"
        " <then_branch = t () => (p) { p = Neg(a) }, else_branch = e () => (q) { q = Abs(b) }> }"
    )
    model = ir.from_onnx_text(f"{HEADER} g {text}")
    node = model.graph[0]
    for name in ("then_branch", "else_branch"):
        branch = node.attributes[name].as_graph()
        branch.opset_imports.update(model.graph.opset_imports)
        infer_outputs(branch, branch[0])
    infer_outputs(model.graph, node)
    assert node.outputs[0].dtype == ir.DataType.FLOAT
    assert [getattr(d, "value", d) for d in node.outputs[0].shape] == [None, "N"]


def test_inputs_that_do_not_meet_are_refused():
    with pytest.raises(
        InputsError, match=r"MatMul does not accept \['FLOAT\[2,3\]', 'FLOAT\[2,3\]'\]"
    ):
        outputs("(float[2, 3] x, float[2, 3] z) => (y) { y = MatMul(x, z) }")


def test_equal_calls_are_inferred_once(monkeypatch):
    monkeypatch.setattr(inference, "_INFERRED", {})
    calls = []
    ask = inference._run_onnx_inference
    monkeypatch.setattr(
        inference, "_run_onnx_inference", lambda *args: calls.append(args) or ask(*args)
    )
    text = "(float[2, 3] x, float[3, 2] w) => (z) { y = MatMul(x, w) z = MatMul(x, w) }"
    assert outputs(text) == [(ir.DataType.FLOAT, [2, 2])]
    assert len(calls) == 1
