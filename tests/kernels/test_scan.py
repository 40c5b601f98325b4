"""Loops over time by one operator: LSTM, GRU, RNN, their gradients, and Scans of a user."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from onnxfit.graph import names
from onnxfit.graph.index import attributes_of
from onnxfit.kernels import rounding
from onnxfit.kernels.library import DOMAIN, PairInstructions, has_products
from onnxfit.kernels.program import CODES
from onnxfit.kernels.scan import COPY, NOTHING, PRODUCT
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.sessions import differentiated, layer_types, parsed, random_feeds, run

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# times, batch, columns of x, hidden units
SIZES = {
    "small": (3, 2, 3, 4),
    "one unit": (4, 3, 1, 1),
    "one step": (1, 9, 5, 6),
    "one row": (5, 1, 4, 17),
    "two tasks": (3, 13, 4, 33),
    "large tasks": (2, 205, 3, 20),
    "wide": (4, 8, 6, 130),
}
CELLS = {
    "LSTM": ("LSTM", ""),
    "LSTM, from the end": ("LSTM", "direction='reverse'"),
    "LSTM, both directions": ("LSTM", "direction='bidirectional'"),
    "LSTM, coupled": ("LSTM", "input_forget=1"),
    "GRU": ("GRU", ""),
    "GRU, reset later": ("GRU", "linear_before_reset=1"),
    "RNN": ("RNN", ""),
    "RNN, from the end": ("RNN", "direction='reverse'"),
}


@pytest.fixture(autouse=True)
def compiled(kernels: Path) -> Path:
    """The library, on a processor that it is compiled for."""
    if not has_products(str(kernels)):
        pytest.skip("this processor has neither AVX2 nor AVX-512")
    return kernels


def network(cell: str, size: str) -> onnx.ModelProto:
    """y of x, w, r and b, and their gradients."""
    op_type, attributes = CELLS[cell]
    times, batch, columns, hidden = SIZES[size]
    directions = 2 if "bidirectional" in attributes else 1
    rows = GATES[op_type] * hidden
    attributes = f"hidden_size={hidden}" + (f", {attributes}" if attributes else "")
    outputs = "y, h, c" if op_type == "LSTM" else "y, h"
    text = f"""g (float[{times},{batch},{columns}] x, float[{directions},{rows},{columns}] w,
        float[{directions},{rows},{hidden}] r, float[{directions},{2 * rows}] b)
        => (float[{times},{directions},{batch},{hidden}] y)
        {{ {outputs} = {op_type}<{attributes}>(x, w, r, b) }}"""
    return differentiated(text.replace("'", '"'), ["x", "w", "r", "b"])


def assert_same(plain: onnx.ModelProto, library: Path) -> None:
    """The kernels, of which there is at least one, compute the same."""
    faster = with_kernels(plain)
    assert "Scan" in {node.op_type for node in faster.graph.node if node.domain == DOMAIN}
    # Weights of this size let no difference grow from step to step.
    feeds = {n: (value / 4).astype(value.dtype) for n, value in random_feeds(plain).items()}
    expected = run(plain, feeds)
    for found, right in zip(run(faster, feeds, library), expected, strict=True):
        atol = 1e-6 * max(np.abs(right).max(initial=0), 1)
        np.testing.assert_allclose(found, right, rtol=0, atol=atol)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cell", CELLS)
def test_recurrent_networks_and_their_gradients(cell: str, size: str, compiled: Path) -> None:
    assert_same(network(cell, size), compiled)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_infinite_numbers_reach_the_same_results(value: float, compiled: Path) -> None:
    plain = network("LSTM", "two tasks")
    feeds = {name: array / 4 for name, array in random_feeds(plain).items()}
    feeds["x"][1, 5] = value
    for found, right in zip(
        run(with_kernels(plain), feeds, compiled), run(plain, feeds), strict=True
    ):
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(right))


@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_change_nothing(threads: int, compiled: Path) -> None:
    model = with_kernels(network("LSTM", "large tasks"))
    feeds = random_feeds(model, threads)
    found, right = (run(model, feeds, compiled, n) for n in (threads, 1))
    for a, b in zip(found, right, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in loops are rounded on every processor."""
    monkeypatch.setattr(rounding, "pair_instructions", lambda: PairInstructions.AVX512_BF16)


def in_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.metadata_props.add(key=names.PRODUCTS, value="bf16")
    return model


def precisions(model: onnx.ModelProto) -> list[int]:
    """The precision of each Scan of the library."""
    loops = [n for n in model.graph.node if n.op_type == "Scan" and n.domain == DOMAIN]
    return [attributes_of(node).get("precision", 0) for node in loops]


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cell", CELLS)
def test_rounded_recurrent_networks(cell: str, size: str, compiled: Path) -> None:
    """Results and gradients are within a few roundings to bfloat16 of the largest number."""
    plain = network(cell, size)
    feeds = {n: (value / 4).astype(value.dtype) for n, value in random_feeds(plain).items()}
    exact = run(with_kernels(plain), feeds, compiled)
    faster = with_kernels(in_bfloat16(plain))
    assert set(precisions(faster)) == {1}
    found = run(faster, feeds, compiled)
    for value, right in zip(found, exact, strict=True):
        np.testing.assert_allclose(value, right, rtol=0, atol=2.0**-7 * max(np.abs(right).max(), 1))
    assert any((a != b).any() for a, b in zip(found, exact))


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize(
    ("scope", "precision"), [("layer", 1), ("gradient/layer", 1), ("loss/y", 0), ("optimizer", 0)]
)
def test_factors_in_loops_are_rounded(scope: str, precision: int, compiled: Path) -> None:
    plain = in_bfloat16(loop(BODIES["a product"], scope=scope))
    faster = with_kernels(plain)
    assert precisions(faster) == [precision]
    feeds = random_feeds(plain)
    _, ys = run(faster, feeds, compiled)
    xs, w = (
        feeds[n].astype(ml_dtypes.bfloat16 if precision else np.float32).astype(np.float64)
        for n in ("xs", "w")
    )
    state = feeds["h0"].astype(np.float64)
    for x, y in zip(xs, ys, strict=True):
        expected = x @ w + state
        np.testing.assert_allclose(y, expected, rtol=0, atol=3e-6)
        state = np.tanh(expected)


def loop(body: str, attributes: str = "", scope: str = "optimizer") -> onnx.ModelProto:
    """A Scan of a user, with the state h and the slices x of each step."""
    text = f"""g (float[5,3] h0, float[6,5,4] xs, float[6,5,1] ms, float[4,3] w, float[3] v, float s, float[1,1,3] cube)
        => (float[5,3] last, float[6,5,3] ys) <int64[2] parts = {{3, 4}}> {{
            last, ys = Scan<num_scan_inputs = 2{attributes}, body = steps
                (float[5,3] h, float[5,4] x, float[5,1] m) => (float[5,3] next, float[5,3] y)
                {{ {body} }}>(h0, xs, ms)
        }}"""
    return parsed(text, scope)


BODIES = {
    "a product": "p = MatMul(x, w) y = Add(p, h) next = Tanh(y)",
    "a product and a sum": "p = Gemm(x, w, h) y = Identity(p) next = Sigmoid(p)",
    "two products": "p = MatMul(x, w) q = Gemm(x, w, p) y = Exp(q) next = Add(p, h)",
    "a vector": "p = MatMul(x, w) q = Mul(v, p) y = Div(q, v) next = Add(h, q)",
    "a vector in a product": "p = Gemm(x, w, v) y = Sub(v, p) next = Tanh(p)",
    "a scalar": "p = Mul(h, s) y = Sub(s, p) next = Add(p, p)",
    "the state before": "p = MatMul(x, w) next = Max(p, h) y = Identity(h)",
    "the state after": "p = MatMul(x, w) next = Min(p, h) y = Identity(next)",
    "joined": """c = Concat<axis = 1>(x, h) d, e = Split<axis = 1>(c, parts)
        f = Concat<axis = -1>(d, h) i, j = Split<axis = -1, num_outputs = 2>(f) y = Sub(i, j)
        k = Concat<axis = 1>(e, d) l, m1 = Split<axis = 1>(k, parts) next = Add(l, h)""",
    "joined in a product, a sum and a state": """c = Concat<axis = 1>(h, m) d = Concat<axis = 1>(m, m, m)
        p = MatMul(c, w) q = Gemm(x, w, d) y = Add(p, q) t = Exp(m) next = Concat<axis = 1>(t, t, m)""",
    "joined, multiplied and returned": """y = Concat<axis = 1>(m, m, m) c = Concat<axis = 1>(y, m)
        p = MatMul(c, w) next = Add(p, y)""",
    "part of a product": """c = Concat<axis = 1>(h, x) d, e = Split<axis = 1>(c, parts)
        y = MatMul(e, w) next = Neg(y)""",
}
BACK = ", scan_input_directions = [1, 1], scan_output_directions = [1]"


@pytest.mark.parametrize("attributes", ["", BACK], ids=["forward", "back"])
@pytest.mark.parametrize("name", BODIES)
def test_scans_of_users(name: str, attributes: str, compiled: Path) -> None:
    assert_same(loop(BODIES[name], attributes), compiled)


@pytest.mark.parametrize(
    ("body", "attributes"),
    [
        ("p = MatMul(x, w) y = Relu(p) next = Neg(p)", ""),
        ("p = Gemm<alpha = 2.0>(x, w) y = Neg(p) next = Abs(p)", ""),
        ("p = Mul(h, m) y = Neg(p) next = Abs(p)", ""),
        ("p = Mul(h, s) y = Neg(p) next = Identity(h)", ""),
        ("y = Neg(h) next = Abs(h)", ", scan_input_directions = [1, 0]"),
        ("y = Neg(h) next = Abs(h)", ", scan_output_directions = [1]"),
        ("y = HardSigmoid(h) next = Abs(h)", ""),
        ("y = Add(h, cube) next = Abs(h)", ""),
        ("k = Constant<value = float {2.0}>() y = Mul(h, k) next = Abs(h)", ""),
    ],
    ids=[
        "operator",
        "factor",
        "mask",
        "state",
        "directions",
        "direction",
        "attributes",
        "cube",
        "constant",
    ],
)
def test_other_scans_keep_their_operator(body: str, attributes: str) -> None:
    assert layer_types(loop(body, attributes)) == []


@pytest.mark.parametrize(
    ("sizes", "body"),
    [
        (
            "float[5,3] h, float[4,3] w, float[3] v",
            "p = MatMul(x, w) next = Add(p, h) y = Mul(v, v)",
        ),
        (
            "float[5,3] h, float[4,3] w, float[3] v",
            "p = MatMul(x, w) next = Add(p, h) y = Identity(v)",
        ),
        ("float[5,3] h, float[3,2] w, float[3] v", "next = Neg(h) y = MatMul(v, w)"),
        ("float[1,3] h, float[4,3] w, float[3] v", "next = Neg(h) p = MatMul(x, w) y = Add(p, h)"),
        ("float[5,1] h, float[4,1] w, float[1] v", "next = Neg(h) y = Gemm(x, w, v)"),
    ],
    ids=["vectors alone", "a vector", "a vector as a row", "one row for all", "one column"],
)
def test_results_that_are_no_rows_keep_their_operator(
    sizes: str, body: str, compiled: Path
) -> None:
    state, weights, vector = (text.split() for text in sizes.split(", "))
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({state[0]} h0, float[6,5,4] xs, {" ".join(weights)}, {" ".join(vector)})
        => ({state[0]} last, float[] ys) {{
            last, ys = Scan<num_scan_inputs = 1, body = steps ({state[0]} h, float[5,4] x)
                => ({state[0]} next, float[] y) {{ {body} }}>(h0, xs)
        }}""")
    feeds = random_feeds(model)
    expected = run(model, feeds)
    for found, right in zip(run(with_kernels(model), feeds, compiled), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)


def test_sequences_of_different_lengths(compiled: Path) -> None:
    text = """g (float[4,3,2] x, float[1,8,2] w, float[1,8,2] r) => (float[4,1,3,2] y)
        <float[1,16] b = {0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}, int32[3] lengths = {4, 2, 1}>
        { y, h, c = LSTM<hidden_size = 2>(x, w, r, b, lengths) }"""
    assert_same(differentiated(text, ["x", "w", "r"]), compiled)


def test_few_rows_with_a_large_matrix_keep_their_operator() -> None:
    def model(batch: int) -> onnx.ModelProto:
        return differentiated(
            f"""g (float[2,{batch},3] x, float[1,600,3] w, float[1,600,150] r)
            => (float[2,1,{batch},150] y) {{ y, h, c = LSTM<hidden_size = 150>(x, w, r) }}""",
            ["x", "w", "r"],
        )

    assert layer_types(model(3)) == []
    assert layer_types(model(4)) == ["Scan", "Scan"]


def test_a_result_may_have_no_name(compiled: Path) -> None:
    plain = loop(BODIES["a product"])
    feeds = random_feeds(plain)
    expected = run(plain, feeds)[1]
    del plain.graph.output[0]
    plain.graph.node[0].output[0] = ""
    (found,) = run(with_kernels(plain), feeds, compiled)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_without_instructions_for_products_nothing_changes() -> None:
    model = loop(BODIES["a product"])
    assert with_kernels(model, products=False) is model


# y and last of h (5, 3), x (6, 5, 4), w (4, 3), v (3) and s: buffers 0 to 4. The others are y, and two
# temporaries of 3 and 2 columns.
INPUTS = {"h": (5, 3), "x": (6, 5, 4), "w": (4, 3), "v": (3,), "s": ()}


def scan(program: list[int], **changes: list[int]) -> onnx.ModelProto:
    """The operator itself."""
    attributes = {
        "program": program,
        "columns": [3, 4, 3, 3, 1, 3, 3, 2],
        "counts": [1, 1, 1, 1],
        "next": [5, 0],
    }
    node = helper.make_node("Scan", list(INPUTS), ["last", "y"], domain=DOMAIN, reverse=0)
    for name, numbers in (attributes | changes).items():
        node.attribute.append(
            helper.make_attribute(name, numbers, attr_type=onnx.AttributeProto.INTS)
        )
    values = [helper.make_tensor_value_info(name, 1, None) for name in (*INPUTS, "last", "y")]
    graph = helper.make_graph([node], "g", values[:5], values[5:])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def arrays(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in (INPUTS | shapes).items()}


def test_the_operator_itself(compiled: Path) -> None:
    feeds = arrays()
    last, y = run(scan([PRODUCT, 3, 5, 0, 1, 0, 2, 0, 0, 0]), feeds, compiled)
    sums = feeds["h"] + np.cumsum(feeds["x"] @ feeds["w"], axis=0)
    np.testing.assert_allclose(y, sums, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(last, y[-1])


@pytest.mark.parametrize("shape", [{"x": (0, 5, 4)}, {"x": (6, 0, 4), "h": (0, 3)}])
def test_no_steps_and_no_rows(shape: dict[str, tuple[int, ...]], compiled: Path) -> None:
    feeds = arrays(**shape)
    last, y = run(scan([PRODUCT, 3, 5, 0, 1, 0, 2, 0, 0, 0]), feeds, compiled)
    np.testing.assert_array_equal(last, feeds["h"])
    assert y.size == 0


MUL = CODES["Mul"]
PLAIN = [COPY, 3, 5, 0, 0, 0]  # y = h


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ([99, 3, 5, 0], "out of range"),
        ([-1, 3, 5, 0], "out of range"),
        ([COPY, 3, 5, 0, 0], "out of range"),
        ([COPY, 0, 5, 0, 0, 0], "no columns"),
        ([COPY, 3, 9, 0, 0, 0], "unknown result"),
        ([COPY, 3, 5, 1, 0, 0], "unknown result"),
        ([COPY, 3, 5, -1, 0, 0], "unknown result"),
        ([COPY, 3, 5, 0, 0, 1], "unknown operand"),
        ([COPY, 3, 5, 0, 8, 0], "unknown operand"),
        ([COPY, 3, 5, 0, -1, 0], "unknown operand"),
        ([COPY, 3, 5, 0, 2, 0], "unknown operand"),
        ([COPY, 3, 0, 0, 3, 0], "writes an input"),
        ([COPY, 3, 5, 0, 6, 0], "before it is written"),
        ([COPY, 3, 5, 0, 4, 0], "copies a scalar"),
        ([COPY, 2, 5, 0, 0, 0], "write a state|write an output"),
        ([COPY, 3, 6, 0, 0, 0], "write a state|write an output"),
        ([PRODUCT, 3, 5, 0, 1, 0, 3, 0, NOTHING, 0], "no matrix"),
        ([PRODUCT, 2, 5, 0, 1, 0, 2, 0, NOTHING, 0], "no matrix"),
        ([PRODUCT, 3, 5, 0, 1, 0, 2, 1, NOTHING, 0], "no matrix"),
        ([PRODUCT, 3, 5, 0, 1, 0, 9, 0, NOTHING, 0], "no matrix"),
        ([PRODUCT, 3, 5, 0, 4, 0, 2, 0, NOTHING, 0], "scalar"),
        ([PRODUCT, 3, 5, 0, 6, 0, 2, 0, NOTHING, 0], "before it is written"),
        ([PRODUCT, 3, 5, 0, 1, 0, 2, 0, 7, 0], "unknown operand"),
        ([PRODUCT, 3, 5, 0, 1, 1, 2, 0, NOTHING, 0], "more rows"),
        ([PRODUCT, 3, 5, 0, 0, 0, 2, 0, NOTHING, 0], "more rows"),
        ([CODES["SCALE_ADD"], 3, 5, 0, 0, 0, 0, 0, 0, 0], "in the place of rows"),
    ],
)
def test_a_wrong_program_is_refused(program: list[int], message: str, compiled: Path) -> None:
    with pytest.raises(Exception, match=message):
        run(scan(program), arrays(), compiled)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": [1, 1, 1]}, "out of range"),
        ({"counts": [3, 1, 1, 0]}, "out of range"),
        ({"counts": [1, 0, 1, 1]}, "fewer buffers"),
        ({"counts": [1, 1, 1, 5]}, "fewer buffers"),
        ({"counts": [1, 1, 1, -1]}, "fewer buffers"),
        ({"columns": [3, 4, 3, 3, 1]}, "fewer buffers"),
        ({"columns": [3, 4, 3, 3, 2, 3]}, "several columns"),
        ({"columns": [3, 4, 3, 3, 1, 0]}, "no columns"),
        ({"columns": [3, 4, 3, 3, 1, 1 << 40]}, "no columns"),
        ({"columns": [2, 4, 3, 3, 1, 3]}, "unknown operand"),
        ({"next": []}, "each state"),
        ({"next": [5]}, "out of range"),
        ({"next": [9, 0]}, "write a state"),
        ({"next": [5, 1]}, "write a state"),
        ({"next": [0, 0]}, "no result|not a result"),
    ],
)
def test_wrong_attributes_are_refused(
    changes: dict[str, list[int]], message: str, compiled: Path
) -> None:
    with pytest.raises(Exception, match=message):
        run(scan(PLAIN, **changes), arrays(), compiled)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("x", (5, 4), "three axes"),
        ("x", (6, 4, 4), "do not fit"),
        ("x", (6, 5, 5), "do not fit"),
        ("h", (5, 4), "do not fit"),
        ("h", (4, 3), "do not fit"),
        ("w", (4, 4), "do not fit"),
        ("w", (4, 3, 1), "do not fit"),
        ("v", (4,), "do not fit"),
        ("s", (2,), "do not fit"),
    ],
)
def test_wrong_inputs_are_refused(
    name: str, shape: tuple[int, ...], message: str, compiled: Path
) -> None:
    with pytest.raises(Exception, match=message):
        run(scan(PLAIN), arrays(**{name: shape}), compiled)
