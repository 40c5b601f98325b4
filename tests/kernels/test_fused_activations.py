"""A Gemm computes the activation behind it: the same bits from fewer nodes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from onnxfit.kernels import fused_activations
from onnxfit.kernels.fused_activations import ACTIVATIONS, with_fused_activations

TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[5,4] x, float[4,3] w, float[3] b) => (float[5,3] y)
    { p = Gemm(x, w, b) a = ACTIVATION(p) y = Neg(a) }"""


def fused(text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(fused_activations, "MIN_NODES_TO_FUSE", 0)
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    return [node.op_type for node in with_fused_activations(model, "cpu").graph.node]


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_a_fused_activation_has_the_bits_of_its_operator(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_activations, "MIN_NODES_TO_FUSE", 0)
    text = TEXT.replace("ACTIVATION", activation)
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    before = model.SerializeToString()
    faster = with_fused_activations(model, "cpu")
    assert model.SerializeToString() == before
    assert [node.op_type for node in faster.graph.node] == ["FusedGemm", "Neg"]
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.normal(size=size).astype(np.float32)
        for name, size in (("x", (5, 4)), ("w", (4, 3)), ("b", 3))
    }
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    results = [
        onnxruntime.InferenceSession(
            m.SerializeToString(), options, providers=["CPUExecutionProvider"]
        ).run(None, feeds)[0]
        for m in (model, faster)
    ]
    np.testing.assert_array_equal(results[1], results[0])


@pytest.mark.parametrize(
    "body",
    [
        "p = Gemm(x, w, b) a = Relu(p) y = Add(a, p)",  # another reader
        "p = Gemm(x, w, b) a = Elu(p) y = Neg(a)",
        "p = MatMul(x, w) a = Relu(p) y = Neg(a)",
        "f = Cast<to=11>(x) v = Cast<to=11>(w) p = Gemm(f, v) a = Relu(p) y = Cast<to=1>(a)",
    ],
)
def test_other_nodes_stay(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXT[: TEXT.index("{")] + f"{{ {body} }}"
    assert "FusedGemm" not in fused(text, monkeypatch)


def test_a_small_graph_stays() -> None:
    model = onnx.parser.parse_model(TEXT.replace("ACTIVATION", "Relu"))
    assert with_fused_activations(model, "cpu") is model
