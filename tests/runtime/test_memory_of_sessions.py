"""Graphs whose memory onnxruntime must not plan, or not all of it."""

from __future__ import annotations

import onnx
import onnx.parser
import onnxruntime
import pytest

from onnxfit.runtime import memory
from onnxfit.runtime.compilation import compile_model
from onnxfit.runtime.device import Device
from onnxfit.runtime.memory import MAX_TERMS, plan_memory
from onnxfit.runtime.node_order import bytes_of_values

ROUNDED = """<ir_version: 10, opset_import: ["": 21]>
    g (float[N, 8] x) => (float[N, 8] y) <float scale = {0.5}, TYPE zero = {0}>
    { q = QuantizeLinear(NUMBERS) y = DequantizeLinear(q, scale) }"""


@pytest.mark.parametrize(
    ("numbers", "kind", "reuses"),
    [
        ("x, scale, zero", "int4", False),
        ("x, scale, zero", "uint4", False),
        ("x, scale, zero", "int8", True),
        ("x, scale, zero", "uint8", True),
        ("x, scale", "uint8", True),
    ],
)
def test_memory_of_four_bits_is_not_used_again(numbers: str, kind: str, reuses: bool) -> None:
    """onnxruntime takes it for as large as that of 8 bits (onnxruntime/pull/32611)."""
    model = onnx.parser.parse_model(ROUNDED.replace("NUMBERS", numbers).replace("TYPE", kind))
    session = compile_model(model, Device("cpu", 0), 1, "tried")
    assert session.get_session_options().enable_mem_reuse is reuses


def test_a_type_in_an_attribute_counts() -> None:
    model = onnx.parser.parse_model(ROUNDED.replace("NUMBERS", "x, scale").replace("TYPE", "int8"))
    model.graph.node[0].attribute.append(
        onnx.helper.make_attribute("output_dtype", onnx.TensorProto.UINT4)
    )
    session = compile_model(model, Device("cpu", 0), 1, "tried")
    assert not session.get_session_options().enable_mem_reuse


def test_a_zero_point_that_is_computed_counts() -> None:
    text = ROUNDED.replace("NUMBERS", "x, scale, z").replace("TYPE", "int4")
    model = onnx.parser.parse_model(text.replace("{ q", "{ z = Identity(zero) q"))
    session = compile_model(model, Device("cpu", 0), 1, "tried")
    assert not session.get_session_options().enable_mem_reuse


def test_constants_of_four_bits_let_memory_be_used_again() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[N, 2] x) => (float[N, 2] y) <float scale = {0.5}>
        { floats = DequantizeLinear(w, scale) y = MatMul(x, floats) }""")
    integers = onnx.helper.make_tensor("w", onnx.TensorProto.INT4, [2, 2], [1, 2, 3, 4])
    model.graph.initializer.append(integers)
    session = compile_model(model, Device("cpu", 0), 1, "tried")
    assert session.get_session_options().enable_mem_reuse


@pytest.mark.parametrize(
    ("terms", "reuses"), [(3, True), (MAX_TERMS, True), (MAX_TERMS + 1, False)]
)
def test_large_sums_do_not_search_for_memory(terms: int, reuses: bool) -> None:
    """onnxruntime's plans take time that is quadratic in the values that wait for the sum."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[N, 2] x) => (float[N, 2] y) {{ y = Sum({", ".join(["x"] * terms)}) }}""")
    options = compile_model(model, Device("cpu", 0), 1, "tried").get_session_options()
    assert (options.enable_mem_reuse, options.enable_mem_pattern) == (reuses, reuses)


CHAIN = """<ir_version: 10, opset_import: ["": 21]>
    g (float[8] x) => (float[8] y) { a = Neg(x) b = Tanh(a) c = Neg(b) y = Tanh(c) }"""
BRANCHES = """<ir_version: 10, opset_import: ["": 21]> g (bool c, float[2] x) => (float[2] y) {
    h = Neg(x)  y = If(c) <then_branch = t () => (float[2] p) { p = Neg(h) },
                           else_branch = e () => (float[2] q) { q = Abs(h) }> }"""


@pytest.mark.parametrize(
    ("text", "limit", "reuses"),
    [
        (CHAIN, 3 * 8 * 4 - 1, False),  # three values between x and y
        (CHAIN, 3 * 8 * 4, True),
        (CHAIN.replace("[8]", "[N]"), 1, True),  # onnxruntime plans no memory of unknown size
        (BRANCHES, 1, True),  # nor that of subgraphs
    ],
)
def test_large_values_of_known_size_are_planned(
    text: str, limit: int, reuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MAX_BYTES_IN_MEMORY", limit)
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    options = onnxruntime.SessionOptions()
    plan_memory(model, bytes_of_values(model.graph), options)
    assert options.enable_mem_reuse is reuses
