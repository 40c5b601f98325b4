"""Tensors that an update may overwrite while it reads them."""

import onnx.parser
import pytest

from onnxfit.runtime.overwriting import overwritable_tensors


def overwritable(body: str) -> set[str]:
    text = (
        '<ir_version: 8, opset_import: ["": 17]>'
        "update (float[2] w, float[2] m, float[2] g, float s) => (float[2] w_next, float[2] m_next)"
        f" {{ {body} }}"
    )
    graph = onnx.parser.parse_model(text).graph
    return overwritable_tensors(graph, {"w": "w_next", "m": "m_next"})


@pytest.mark.parametrize(
    ("body", "found"),
    [
        # each tensor is read by its own update alone
        ("w_next = Sub(w, g) m_next = Add(m, g)", {"w", "m"}),
        # the next weight is computed from the next slot
        ("m_next = Add(m, g) w_next = Sub(w, m_next)", {"w", "m"}),
        # the next weight is computed from the old slot, perhaps after the next slot was written
        ("m_next = Add(m, g) w_next = Sub(w, m)", {"w"}),
        # a path leads from the other reader to the writer
        ("a = Mul(m, g) w_next = Sub(w, a) m_next = Add(m, w_next)", {"w", "m"}),
        ("n = ReduceSum(w) d = Div(g, n) w_next = Sub(w, d) m_next = Add(m, d)", {"w", "m"}),
        # without a path
        ("n = ReduceSum(w) w_next = Sub(w, g) m_next = Add(m, n)", {"m"}),
        # a view of a tensor is read too late
        ("v = Identity(w) w_next = Sub(w, g) m_next = Add(m, v)", {"m"}),
        # operators that may read an element after they have written it
        ("w_next = MatMul(w, g) m_next = Max(s, g, m)", set()),
        ("w_next = CumSum(w, s) m_next = Max(m, g)", {"m"}),
        # a writer that does not read its own tensor may be any operator
        ("m_next = Tanh(g) a = Add(w, g) w_next = Tanh(a)", {"w", "m"}),
        # onnxruntime joins a product with the nodes around it
        ("p = MatMul(w, g) w_next = Mul(p, s) m_next = Add(m, g)", {"m"}),
        ("p = MatMul(g, w) d = Mul(w, s) w_next = Add(p, d) m_next = Add(m, g)", {"m"}),
        ("t = Transpose(w) p = MatMul(t, g) w_next = Identity(p) m_next = Add(m, g)", {"m"}),
        ("a, b = Split(w) w_next = MatMul(a, g) m_next = Add(m, g)", {"m"}),
        ("p = MatMul(w, g) t = Tanh(p) w_next = Mul(t, s) m_next = Add(m, g)", {"w", "m"}),
        # a view with another order of elements
        ("v = Reshape(w, s) w_next = Sub(v, g) m_next = Add(m, g)", {"m"}),
        # the body of a node reads it
        (
            "w_next = Sub(w, g) m_next = If(s) <then_branch = b () => (float[2] r) {r = Neg(w)},"
            " else_branch = c () => (float[2] q) {q = Neg(m)}>",
            set(),
        ),
    ],
)
def test_a_tensor_is_overwritten_after_its_last_reader(body: str, found: set[str]) -> None:
    assert overwritable(body) == found


def test_an_output_without_a_node_is_not_overwritten() -> None:
    assert overwritable("m_next = Add(m, g)") == {"m"}
