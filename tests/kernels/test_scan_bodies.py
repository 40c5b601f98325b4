"""Nodes around a loop, which it computes in its steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfit.kernels.library import DOMAIN, has_products
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.sessions import differentiated, layer_kernels, parsed, random_feeds, run

BACK = ", scan_input_directions = [1, 1], scan_output_directions = [1, 1]"
BODY = """(float[5,3] h, float[5,4] x, float[5,3] m) => (float[5,3] next, float[5,3] y, float[5,4] z)
    { p = MatMul(x, w) q = Mul(p, m) y = Add(q, h) next = Tanh(y) z = Neg(x) }"""
INPUTS = "float[6,5,4] a, float[6,5,4] b, float[6,5,2] c, float[6,5,3] d, float[6,5,7] e"


@pytest.fixture(autouse=True)
def compiled(kernels: Path) -> Path:
    """The library, on a processor that it is compiled for."""
    if not has_products(str(kernels)):
        pytest.skip("this processor has neither AVX2 nor AVX-512")
    return kernels


def model_of(before: str, attributes: str = "", more: str = "") -> onnx.ModelProto:
    """A loop over xs and ms, which nodes before it compute; `more` are other outputs."""
    text = f"""g (float[5,3] h0, {INPUTS}, float[5,4] row, float[4,3] w, float s)
        => (float[5,3] last, float[6,5,3] ys, float[6,5,4] zs{more})
        <int64[2] parts = {{3, 4}}, int64[3] three = {{3, 4, 4}}, float one = {{1}}> {{
            {before}
            last, ys, zs = Scan<num_scan_inputs = 2{attributes}, body = steps {BODY}>(h0, xs, ms)
        }}"""
    return parsed(text)


def assert_same(plain: onnx.ModelProto, faster: onnx.ModelProto, library: Path) -> None:
    feeds = random_feeds(plain)
    for found, right in zip(run(faster, feeds, library), run(plain, feeds), strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=2e-6)


# (the nodes before the loop, the slices that it reads instead of their results)
MOVED = {
    "a product": ("xs = Mul(a, b) ms = Identity(d)", ["ms", "a", "b"]),
    "several operators": ("n = Sub(one, a) xs = Mul(n, s) ms = Tanh(d)", ["a", "d"]),
    "a part": ("xs = Neg(a) ms, rest = Split<axis = 2>(e, parts)", ["a", "e"]),
    "parts": ("t = Tanh(e) ms, xs = Split<axis = -1>(t, parts)", ["e"]),
    "parts, joined": (
        "xs = Concat<axis = -1>(c, c) n = Concat<axis = 2>(e, a) ms, u, v = Split<axis = 2>(n, three)",
        ["c", "e", "a"],
    ),
    "the same slice twice": ("xs = Mul(a, a) n = Exp(d) ms = Mul(n, d)", ["a", "d"]),
}  # fmt: skip


@pytest.mark.parametrize("attributes", ["", BACK], ids=["forward", "back"])
@pytest.mark.parametrize("name", MOVED)
def test_nodes_before_a_loop_are_moved_into_it(name: str, attributes: str, compiled: Path) -> None:
    before, slices = MOVED[name]
    plain = model_of(before, attributes)
    faster = with_kernels(plain)
    assert_same(plain, faster, compiled)
    (loop,) = layer_kernels(faster)
    assert list(loop.input[1 : 1 + len(slices)]) == slices
    assert {node.op_type for node in faster.graph.node} <= {"Scan", "Identity"}


@pytest.mark.parametrize(
    ("before", "more"),
    [
        ("xs = Mul(a, b) ms = Identity(d) other = Neg(xs)", ", float[6,5,4] other"),
        ("xs = Mul(a, b) ms = Identity(d)", ", float[6,5,4] xs"),
        ("xs = Mul(a, row) ms = Identity(d)", ""),
        ("xs = Relu(a) ms = Identity(d)", ""),
        ("xs = HardSigmoid(a) ms = Identity(d)", ""),
        ("t = Concat<axis = 0>(a, b) xs, u = Split<axis = 0, num_outputs = 2>(t) ms = Identity(d)", ""),
        ("ms, xs = Split<axis = 2>(e, parts)", ", float[6,5,4] xs"),
    ],
    ids=["read elsewhere", "output", "broadcast", "operator", "attributes", "other axis", "a part is an output"],
)  # fmt: skip
def test_other_nodes_stay_outside(before: str, more: str, compiled: Path) -> None:
    plain = model_of(before, more=more)
    faster = with_kernels(plain)
    assert_same(plain, faster, compiled)
    (loop,) = layer_kernels(faster)
    assert loop.input[1] == "xs"


def loop_with_parts(body: str, attributes: str = "") -> onnx.ModelProto:
    """A loop whose results may be parts of each other."""
    return parsed(f"""g (float[5,3] h0, {INPUTS})
        => (float[5,3] last, float[6,5,4] other) <int64[2] parts = {{3, 4}}> {{
            last, ps, qs, es = Scan<num_scan_inputs = 2{attributes}, body = steps
                (float[5,3] h, float[5,7] x, float[5,3] m)
                => (float[5,3] next, float[5,3] p, float[5,4] q, float[5,7] r) {{ {body} }}
            >(h0, e, d)
            other = Neg(qs)
        }}""")


PARTS = "r = Exp(x) p, q = Split<axis = 1>(r, parts) n = Mul(p, m) next = Add(n, h)"


def test_a_part_of_a_result_is_split_off_outside(compiled: Path) -> None:
    plain = loop_with_parts(PARTS)
    faster = with_kernels(plain)
    assert_same(plain, faster, compiled)
    (loop,) = layer_kernels(faster)
    assert list(loop.output) == ["last", "es"]


def test_parts_of_other_values_stay_results(compiled: Path) -> None:
    """Here, the whole is no result itself."""
    body = "t = Exp(x) p, q = Split<axis = 1>(t, parts) r = Neg(t) n = Mul(p, m) next = Add(n, h)"
    plain = loop_with_parts(body)
    faster = with_kernels(plain)
    assert_same(plain, faster, compiled)
    (loop,) = layer_kernels(faster)
    assert list(loop.output) == ["last", "ps", "qs", "es"]


@pytest.mark.parametrize(
    "attributes",
    [
        ", scan_output_directions = [1, 1, 0]",
        ", scan_output_directions = [1, 0, 0]",
        ", scan_output_axes = [1, 0, 0]",
    ],
)
def test_results_of_several_orders_keep_their_operator(attributes: str) -> None:
    plain = loop_with_parts(PARTS, attributes)
    assert with_kernels(plain).graph.node[0] == plain.graph.node[0]


def test_loops_without_a_name_are_told_apart(compiled: Path) -> None:
    """Both have a part that is no result."""
    loop = """Scan<num_scan_inputs = 1, body = steps (float[5,3] h, float[5,7] x)
        => (float[5,3] next, float[5,7] r, float[5,3] p)
        { r = Exp(x) p, q = Split<axis = 1>(r, parts) next = Add(h, p) }>"""
    plain = parsed(f"""g (float[5,3] h0, {INPUTS}) => (float[6,5,3] y, float[6,5,3] z)
        <int64[2] parts = {{3, 4}}> {{
            h1, r1, y = {loop}(h0, e) t = Relu(e) h2, r2, z = {loop}(h1, t) }}""")
    for node in plain.graph.node:
        node.name = ""
    assert_same(plain, with_kernels(plain), compiled)


def test_single_elements_are_joined(compiled: Path) -> None:
    plain = parsed("""g (float[1,2] h0, float[1,1,1] a, float[1,1,1] b) => (float[1,1,2] y) {
        x = Concat<axis = 2>(a, b)
        h, y = Scan<num_scan_inputs = 1, body = steps
            (float[1,2] h, float[1,2] s) => (float[1,2] n, float[1,2] t)
            { t = Tanh(s) n = Add(h, t) }>(h0, x)
    }""")
    faster = with_kernels(plain)
    assert_same(plain, faster, compiled)
    assert [list(loop.input) for loop in layer_kernels(faster)] == [["h0", "a", "b"]]


def test_a_slice_may_be_read_twice(compiled: Path) -> None:
    plain = parsed(f"""g (float[5,4] h0, {INPUTS}) => (float[6,5,4] y) {{
        n = Mul(a, b)
        h, y = Scan<num_scan_inputs = 4, body = steps
            (float[5,4] h, float[5,4] s, float[5,4] t, float[5,4] u, float[5,4] v)
            => (float[5,4] next, float[5,4] r)
            {{ p = Mul(s, t) q = Sub(u, v) r = Add(p, q) next = Add(h, r) }}>(h0, n, a, a, n)
    }}""")
    faster = with_kernels(plain)
    assert_same(plain, faster, compiled)
    (loop,) = layer_kernels(faster)
    assert list(loop.input) == ["h0", "a", "b"]


def test_a_loop_without_states_keeps_its_operator() -> None:
    plain = parsed(f"""g ({INPUTS}) => (float[6,5,4] y) {{
        y = Scan<num_scan_inputs = 1, body = steps (float[5,4] s) => (float[5,4] r)
            {{ r = Tanh(s) }}>(a) }}""")
    assert layer_kernels(with_kernels(plain)) == []


def test_a_loop_without_a_kernel_is_not_changed() -> None:
    for body in (PARTS.replace("Mul(p, m)", "Relu(p)"), PARTS.replace("Exp(x)", "Softplus(x)")):
        plain = loop_with_parts(body)
        assert with_kernels(plain).graph.node[0] == plain.graph.node[0]


def test_a_gradient_of_an_lstm_has_no_elementwise_operators_for_all_steps(compiled: Path) -> None:
    text = """g (float[6,5,4] x, float[1,28,4] w, float[1,28,7] r) => (float[6,1,5,7] y)
        { y, h, c = LSTM<hidden_size = 7>(x, w, r) }"""
    plain = differentiated(text, ["x", "w", "r"])
    assert any(node.op_type == "Mul" for node in plain.graph.node)
    faster = with_kernels(plain)
    assert_same(plain, faster, compiled)
    operators = {"Mul", "Sub", "Concat", "Split", "Elementwise"}
    assert [node.op_type for node in faster.graph.node if node.op_type in operators] == []
    assert [node.op_type for node in faster.graph.node if node.domain == DOMAIN] == ["Scan"] * 2


def fed_by_a_product(gemm: str = "Gemm(flat, w, v)", **changed: str) -> onnx.ModelProto:
    """A Scan whose slices ps are a product of all steps of x with w, of which v is a part."""
    parts = {
        "w": "float[1,3]",
        "outputs": "float[6,5,3] ys",
        "flat": "Flatten<axis = 2>(xs)",
        "slices": "float[6,5,1]",
        "constants": "int64[3] shape = {6, 5, 3}",
        "more": "",
    } | changed
    return parsed(f"""g ({parts["slices"]} xs, {parts["w"]} w, float[3] v, float[5,3] h0) => ({parts["outputs"]})
        <{parts["constants"]}> {{
            flat = {parts["flat"]}
            rows = {gemm}
            ps = Reshape(rows, shape)
            last, ys = Scan<num_scan_inputs = 1, body = steps (float[5,3] h, float[5,3] p)
                => (float[5,3] next, float[5,3] y) {{ q = Add(h, p) next = Tanh(q) y = Sigmoid(q) }}>(h0, ps)
            {parts["more"]}
        }}""")


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"gemm": "Gemm(flat, w)"},
        {"gemm": "Gemm<transB = 1>(flat, w, v)", "w": "float[3,1]"},
        {"gemm": "Gemm<alpha = 1.0, beta = 1.0, transA = 0>(flat, w, v)"},
        {"flat": "Reshape(xs, of_flat)", "constants": "int64[3] shape = {6, 5, 3}, int64[2] of_flat = {30, 1}"},
    ],
)  # fmt: skip
def test_a_product_of_all_steps_moves_into_the_loop(
    changed: dict[str, str], compiled: Path
) -> None:
    plain = fed_by_a_product(**changed)
    assert "Gemm" not in {node.op_type for node in with_kernels(plain).graph.node}
    assert_same(plain, with_kernels(plain), compiled)


@pytest.mark.parametrize(
    "changed",
    [
        {"gemm": "Gemm<alpha = 2.0>(flat, w, v)"},
        {"gemm": "Gemm<beta = 2.0>(flat, w, v)"},
        {"outputs": "float[6,5,3] ys, float[6,5,3] ps"},
        {"outputs": "float[6,5,3] ys, float[30,3] rows"},
        {"outputs": "float[6,5,3] ys, float[6,5,3] again", "more": "again = Neg(ps)"},
        {"slices": "float[6,5,2]", "w": "float[2,3]"},
        {"slices": "float[1,30]", "flat": "Transpose<perm = [1, 0]>(xs)"},
        {"slices": "float[3,5,2]", "flat": "Reshape(xs, of_flat)",
         "constants": "int64[3] shape = {6, 5, 3}, int64[2] of_flat = {30, 1}"},
    ],
)  # fmt: skip
def test_other_products_stay_before_the_loop(changed: dict[str, str], compiled: Path) -> None:
    plain = fed_by_a_product(**changed)
    assert "Gemm" in {node.op_type for node in with_kernels(plain).graph.node}
    assert_same(plain, with_kernels(plain), compiled)


@pytest.mark.parametrize(("columns", "moved"), [(60, True), (70, False), (300, False)])
def test_a_product_with_a_large_matrix_stays_before_the_loop(columns: int, moved: bool) -> None:
    plain = differentiated(
        f"""g (float[2,8,{columns}] x, float[1,512,{columns}] w, float[1,512,128] r)
        => (float[2,1,8,128] y) {{ y, h, c = LSTM<hidden_size = 128>(x, w, r) }}""",
        ["x", "w", "r"],
    )
    forward = next(node for node in with_kernels(plain).graph.node if node.op_type == "Scan")
    (numbers,) = (a.ints for a in forward.attribute if a.name == "counts")
    assert numbers[2] == 1 + moved  # matrices
