"""A product of low rank is added to the matrix of a layer, before it multiplies a batch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

import onnxfit
from onnxfit.step.rewrites.add_before_product import add_before_product
from tests.step.test_rewrites import LOW_RANK, graph_of

INPUTS = (
    "float[2,4,3] x, float[2,4,3] u, float[3,5] w, float[3,2] p, float[2,5] q, float[5,3] wt,"
    " float[5,2] qt, float[2,3] pt, float scale, float[3,3] m3, float[3,5] v, float[8,3] rows"
)
CONSTANTS = "<int64[1] zero = {0}, int64[1] one = {1}, float two = {2}, float[5] b = {1,2,0,3,1}>"
MERGED = ["Gemm", "MatMul"]


@pytest.mark.parametrize(
    ("body", "operators"),
    [
        ("h = MatMul(x, w) l = MatMul(x, p) m = MatMul(l, q) y = Add(m, h)", MERGED),
        (
            "h = MatMul(x, w) l = MatMul(x, p) s = Mul(two, l) m = MatMul(s, q) y = Add(h, m)",
            MERGED,
        ),
        (  # the gradient of a layer that reads x, where each matrix is transposed
            "w1 = Transpose(wt) p1 = Transpose(pt) q1 = Transpose(qt)"
            " h = MatMul(x, w1) l = MatMul(x, p1) m = MatMul(l, q1) y = Add(h, m)",
            ["Gemm", "Transpose", "MatMul"],
        ),
        (  # the terms of a layer among others
            "h = MatMul(x, w) l = MatMul(x, p) m = MatMul(l, q) o = MatMul(u, w) y = Sum(m, o, h)",
            ["MatMul", *MERGED, "Sum"],
        ),
        (  # both products have other factors
            "h = MatMul(x, w) l = MatMul(u, p) m = MatMul(l, q) y = Add(h, m)",
            ["MatMul", "MatMul", "MatMul", "Add"],
        ),
        (  # a product that something else reads
            "h = MatMul(x, w) l = MatMul(x, p) m = MatMul(l, q) z = Add(h, m) y = Mul(z, h)",
            ["MatMul", "MatMul", "MatMul", "Add", "Mul"],
        ),
        (  # a scale that is not a constant
            "h = MatMul(x, w) l = MatMul(x, p) s = Mul(scale, l) m = MatMul(s, q) y = Add(h, m)",
            ["MatMul", "MatMul", "Mul", "MatMul", "Add"],
        ),
        (  # few rows: P Q would take longer than (x P) Q
            "c = Slice(x, zero, one) h = MatMul(c, w) l = MatMul(c, p) m = MatMul(l, q)"
            " y = Add(h, m)",
            ["Slice", "MatMul", "MatMul", "MatMul", "Add"],
        ),
        (  # a base that is merged is a product by another one, too
            "t = MatMul(x, m3) h = MatMul(t, w) l = MatMul(t, p) m = MatMul(l, q)"
            " k = MatMul(x, v) y = Sum(m, h, k)",
            None,
        ),
        (  # two adapters of one layer
            "h = MatMul(x, w) l = MatMul(x, p) m = MatMul(l, q)"
            " p2 = Transpose(pt) l2 = MatMul(x, p2) m2 = MatMul(l2, q) y = Sum(h, m, m2)",
            None,
        ),
        (  # a bias in the product, and a matrix that an attribute transposes
            "h = Gemm<transB=1>(rows, wt, b) l = MatMul(rows, p) m = MatMul(l, q) s = Add(h, m)"
            " y = Unsqueeze(s, zero)",
            None,
        ),
    ],
)
def test_a_product_of_low_rank_is_added_to_the_matrix(
    body: str, operators: list[str] | None
) -> None:
    found = operators_after(body)
    assert found.count("Gemm") >= 1 if operators is None else found == operators


def test_forward_and_backward_pass_share_the_sum_of_the_matrices() -> None:
    nodes = graph_of("low rank", known=True).graph.node
    merged = {
        node.output[0]: node for node in nodes if node.op_type == "Gemm" and "v" in node.input
    }
    (name,) = merged
    assert sum(name in node.input for node in nodes) == 2


def test_a_scale_that_gemm_would_round_stays() -> None:
    model = LOW_RANK.replace("batch", "6").replace("float", "double")
    for number, is_merged in (("0.5", True), ("0.1", False)):
        text = model.replace("half = {0.5}", f"half = {{{number}}}")
        trainer = onnxfit.Trainer(onnx.parser.parse_model(text), loss="mse")
        nodes = onnx.load_from_string(trainer.save_onnx_graph(bytes)["train"]).graph.node
        assert any("w" in n.input and n.op_type == "Gemm" for n in nodes) == is_merged


def test_large_matrices_that_are_inputs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sum would be in memory from the forward to the backward pass."""
    body = "h = MatMul(x, w) l = MatMul(x, p) m = MatMul(l, q) y = Add(m, h)"
    monkeypatch.setattr("onnxfit.step.rewrites.add_before_product.MAX_INPUT_BYTES", 4 * 3 * 5 - 1)
    assert operators_after(body) == ["MatMul", "MatMul", "MatMul", "Add"]


def operators_after(body: str) -> list[str]:
    """The operators of a graph after the rewrite, which computes the same."""
    text = (
        f'<ir_version: 8, opset_import: ["": 21]> g ({INPUTS}) => (float[i,j,k] y) {CONSTANTS} {{'
        f" {body} }}"
    )
    plain = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True)
    model = ir.from_proto(plain)
    add_before_product(model.graph)
    ir.passes.common.RemoveUnusedNodesPass()(model)
    changed = ir.to_proto(model)
    onnx.checker.check_model(changed, full_check=True)
    random = np.random.default_rng(0)
    feeds = {
        value.name: random.standard_normal(
            [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in plain.graph.input
    }
    expected, found = (
        onnxruntime.InferenceSession(
            each.SerializeToString(), providers=["CPUExecutionProvider"]
        ).run(None, feeds)
        for each in (plain, changed)
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    return [node.op_type for node in model.graph]
