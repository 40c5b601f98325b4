"""Outputs as logits or probabilities, by the graph that computes them."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxfit.graph.probabilities import decide_logits, probability_operator

HEAD = """<ir_version: 10, opset_import: ["": 21]> g (float[N, 4] x) => (float[N, M] y)
    <float[4, 3] w = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, float[4, 1] v = {1, 1, 1, 1}, float[1] half = {0.5}, float[1] one = {1}, float zero = {0},
     int64[2] shape = {-1, 3}, int64[1] axis = {1}>"""

PROBABILITIES = {
    "Softmax": "h = MatMul(x, w) y = Softmax(h)",
    "Sigmoid": "h = MatMul(x, w) y = Sigmoid(h)",
    "Identity": "h = MatMul(x, w) p = Softmax(h) y = Identity(p)",
    "Reshape": "h = MatMul(x, w) p = Softmax(h) y = Reshape(p, shape)",
    "Cast": "h = MatMul(x, w) p = Sigmoid(h) q = Cast<to=11>(p) y = Cast<to=1>(q)",
    "Squeeze": "h = MatMul(x, v) p = Sigmoid(h) y = Squeeze(p, axis)",
    "Transpose": "h = MatMul(x, w) t = Transpose<perm=[1, 0]>(h) p = Softmax<axis=0>(t) y = Transpose<perm=[1, 0]>(p)",
    "the first of two classes": "h = MatMul(x, v) p = Sigmoid(h) q = Sub(one, p) y = Concat<axis=1>(q, p)",
    "a mixture": "h = MatMul(x, w) p = Softmax(h) a = Mul(p, half) q = Sigmoid(h) b = Mul(q, half) y = Add(a, b)",
    "label smoothing": "h = MatMul(x, v) p = Sigmoid(h) a = Mul(p, half) b = Mul(a, half) y = Add(half, b)",
    "a mixture of experts": "p = Softmax(x) s = Sigmoid(w) y = MatMul(p, s)",
    "a mean of models": "h = MatMul(x, w) p = Softmax(h) q = Sigmoid(h) y = Mean(p, q)",
    "half of a sum": "h = MatMul(x, w) p = Softmax(h) q = Sigmoid(h) s = Sum(p, q) y = Mul(s, half)",
    "a product": "h = MatMul(x, w) p = Softmax(h) q = Sigmoid(h) y = Mul(p, q)",
    "a part": "h = MatMul(x, w) p = Softmax(h) y = Mul(half, p)",
    "a mask": "h = MatMul(x, w) p = Softmax(h) m = Greater(h, half) y = Where(m, p, half)",
    "a bound": "h = MatMul(x, w) p = Softmax(h) y = Clip(p, half, one)",
    "a quantized model": "h = MatMul(x, w) p = Softmax(h) q = QuantizeLinear(p, half) y = DequantizeLinear(q, half)",
    "e to the LogSoftmax": "h = MatMul(x, w) l = LogSoftmax(h) y = Exp(l)",
    "a softmax spelled out": "h = MatMul(x, w) e = Exp(h) s = ReduceSum(e, axis) y = Div(e, s)",
    "an average over positions": "h = MatMul(x, w) p = Softmax(h) y = ReduceMean<keepdims=0>(p)",
    "two branches": "h = MatMul(x, v) p = Sigmoid(h) c = Constant<value = bool {1}>()"
    " y = If(c) <then_branch = t () => (a) { a = Squeeze(p, axis) },"
    " else_branch = e () => (b) { b = Identity(p) }>",
    "HardSigmoid": "h = MatMul(x, w) y = HardSigmoid(h)",
    "a clip": "h = MatMul(x, w) y = Clip(h, zero, one)",
    "a clip as Min and Max": "h = MatMul(x, w) a = Max(h, zero) y = Min(one, a)",
    "a part of relu6": "h = MatMul(x, w) six = Constant<value = float {6}>()"
    " a = Clip(h, zero, six) y = Div(a, six)",
    "a sigmoid spelled out": "h = MatMul(x, v) n = Neg(h) e = Exp(n) s = Add(e, one) y = Reciprocal(s)",
}
LOGITS = {
    "MatMul": "y = MatMul(x, w)",
    "Gemm": "y = Gemm(x, w)",
    "Add": "h = MatMul(x, w) y = Add(h, one)",
    "Reshape": "h = MatMul(x, w) y = Reshape(h, shape)",
    "LogSoftmax": "h = MatMul(x, w) y = LogSoftmax(h)",
    "a mask": "h = MatMul(x, w) m = Greater(h, half) y = Where(m, h, half)",
    "a quantized model": "h = MatMul(x, w) q = QuantizeLinear(h, half) y = DequantizeLinear(q, half)",
    "after attention": "p = Softmax(x) y = MatMul(p, w)",
}
UNDECIDED = {
    "two branches, one of another value": "h = MatMul(x, v) p = Sigmoid(h)"
    " c = Constant<value = bool {1}>()"
    " y = If(c) <then_branch = t () => (a) { a = Squeeze(h, axis) },"
    " else_branch = e () => (b) { b = Identity(p) }>",
    "a hard swish": "h = MatMul(x, w) s = HardSigmoid(h) y = Mul(h, s)",
    "relu6": "h = MatMul(x, w) six = Constant<value = float {6}>() y = Clip(h, zero, six)",
    "a quotient of two bounded numbers": "h = MatMul(x, w) g = Clip(h, zero, one) e = Exp(h) y = Div(g, e)",
    "Relu": "h = MatMul(x, w) y = Relu(h)",
    "Mul": "h = MatMul(x, w) y = Mul(h, half)",
    "the input": "y = Identity(x)",
    "a sum of probabilities": "h = MatMul(x, w) p = Softmax(h) q = Sigmoid(h) y = Add(p, q)",
    "a difference": "h = MatMul(x, w) p = Softmax(h) q = Sigmoid(h) y = Sub(p, q)",
    "a gate": "h = MatMul(x, w) p = Sigmoid(h) y = Mul(h, p)",
    "a temperature": "h = MatMul(x, w) p = Softmax(h) s = Add(one, one) y = Mul(p, s)",
    "an exponential": "h = MatMul(x, w) y = Exp(h)",
}
CASES = [
    (text, logits)
    for texts, logits in ((PROBABILITIES, False), (LOGITS, True), (UNDECIDED, None))
    for text in texts.values()
]


@pytest.mark.parametrize(("text", "logits"), CASES)
def test_the_end_of_the_graph_decides(text: str, logits: bool | None) -> None:
    (output,) = ir.from_onnx_text(f"{HEAD} {{ {text} }}").graph.outputs
    for default in (True, False):
        decision = decide_logits(None, output, default)
        assert decision.logits == (default if logits is None else logits)
        assert ("the graph does not show what" in decision.reason) == (logits is None)
    assert (probability_operator(output) is not None) == (logits is False)


@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("text", [PROBABILITIES["Softmax"], LOGITS["MatMul"], UNDECIDED["Relu"]])
def test_a_setting_wins(text: str, setting: bool) -> None:
    (output,) = ir.from_onnx_text(f"{HEAD} {{ {text} }}").graph.outputs
    decision = decide_logits(setting, output, not setting)
    assert (decision.logits, decision.reason) == (setting, f"from_logits={setting} was given")


def test_the_reason_names_the_node() -> None:
    model = ir.from_onnx_text(f"{HEAD} {{ {PROBABILITIES['Identity']} }}")
    model.graph.node(1).name = "classes"
    decision = decide_logits(None, model.graph.outputs[0], True)
    assert decision.reason == (
        "Softmax node 'classes' computes the output through an Identity node"
    )
