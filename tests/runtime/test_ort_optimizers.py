"""Optimizers of onnxruntime are left out only where they would change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnxfit
from onnxfit.runtime import ort_optimizers
from onnxfit.runtime.ort_optimizers import PATTERN_OPERATORS, useless_optimizers
from tests.models import convolutional, mlp

HEADER = '<ir_version: 10, opset_import: ["": 21]> g '
# Each text has a pattern that some optimizers of onnxruntime fuse.
PATTERNS = {
    "gelu by Erf": """(float[2, 8] x) => (float[2, 8] y)
        <float r = {1.41421354}, float one = {1}, float half = {0.5}>
        { d = Div(x, r) e = Erf(d) p = Add(e, one) m = Mul(x, p) y = Mul(m, half) }""",
    "gelu by Tanh": """(float[2, 8] x) => (float[2, 8] y)
        <float c = {0.044715}, float r = {0.7978845834732056}, float one = {1}, float half = {0.5}>
        { q = Mul(x, c) p = Mul(q, x) s = Add(p, one) k = Mul(x, r) u = Mul(s, k) t = Tanh(u)
          a = Add(t, one) h = Mul(x, half) y = Mul(h, a) }""",
    "bias and gelu by Tanh": """(float[2, 8] z) => (float[2, 8] y)
        <float c = {0.044715}, float r = {0.7978845834732056}, float one = {1}, float half = {0.5},
         float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}>
        { x = Add(z, b) q = Mul(x, c) p = Mul(q, x) s = Add(p, one) k = Mul(x, r) u = Mul(s, k)
          t = Tanh(u) a = Add(t, one) h = Mul(x, half) y = Mul(h, a) }""",
    "gelu by Sigmoid": """(float[2, 8] x) => (float[2, 8] y) <float a = {1.702}>
        { s = Mul(x, a) g = Sigmoid(s) y = Mul(x, g) }""",
    "layer normalization": """(float[2, 8] x) => (float[2, 8] y)
        <float two = {2}, float e = {0.00001}, float[8] w = {1, 2, 3, 4, 5, 6, 7, 8},
         float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, int64[1] axis = {-1}>
        { m = ReduceMean(x, axis) c = Sub(x, m) q = Pow(c, two) v = ReduceMean(q, axis)
          s = Add(v, e) r = Sqrt(s) n = Div(c, r) k = Mul(n, w) y = Add(k, b) }""",
    "bias and Softmax": """(float[2, 8] x, float[2, 8] b) => (float[2, 8] y)
        { a = Add(x, b) y = Softmax(a) }""",
    "transposed product": """(float[2, 3, 8] x, float[2, 3, 8] z) => (float[2, 3, 3] y)
        <float k = {0.5}> { t = Transpose<perm = [0, 2, 1]>(z) p = MatMul(x, t) y = Mul(p, k) }""",
    "product, bias and activation": """(float[2, 8] x) => (float[2, 2] y)
        <float[8, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8}, float[2] b = {1, 2}>
        { p = MatMul(x, w) a = Add(p, b) y = Relu(a) }""",
    "gathers of slices": """(float[2, 8] x) => (float[2] y, float[2] z)
        <int64 i = {0}, int64 j = {1}> { y = Gather<axis = 1>(x, i) z = Gather<axis = 1>(x, j) }""",
    "quantized": """(float[2, 8] x) => (float[2, 8] y) <float s = {0.1}, uint8 z = {128}>
        { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) r = Relu(d)
          p = QuantizeLinear(r, s, z) y = DequantizeLinear(p, s, z) }""",
    "convolution and activation": """(float[1, 1, 4, 4] x) => (float[1, 1, 4, 4] y)
        <float[1, 1, 1, 1] w = {2}> { c = Conv(x, w) y = Relu(c) }""",
    "casts": """(float[2, 8] x) => (float[2, 8] y)
        { h = Cast<to = 10>(x) s = Sqrt(h) y = Cast<to = 1>(s) }""",
    "reshapes": """(float[2, 8] x) => (float[4, 4] y) <int64[2] a = {8, 2}, int64[2] b = {4, 4}>
        { r = Reshape(x, a) y = Reshape(r, b) }""",
}


def optimized(model: onnx.ModelProto, disabled: list[str], folder: Path) -> list[tuple]:
    """The nodes that onnxruntime runs."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(
        model.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=disabled,
    )
    nodes = onnx.load(folder / "optimized.onnx").graph.node
    return [(node.op_type, *node.input, *node.output) for node in nodes]


@pytest.mark.parametrize("name", PATTERNS)
def test_fusions_are_those_of_all_optimizers(name: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(HEADER + PATTERNS[name])
    disabled = useless_optimizers(model)
    assert disabled
    assert optimized(model, disabled, tmp_path) == optimized(model, [], tmp_path)


@pytest.mark.parametrize("model", [mlp(), convolutional()], ids=["mlp", "convolutional"])
def test_a_step_is_optimized_as_by_all_optimizers(model: onnx.ModelProto, tmp_path: Path) -> None:
    trainer = onnxfit.Trainer(model, loss="cross_entropy", optimizer="adam")
    graph = onnx.load_from_string(trainer.save_onnx_graph(bytes)["train"])
    disabled = useless_optimizers(graph)
    assert disabled
    assert optimized(graph, disabled, tmp_path) == optimized(graph, [], tmp_path)


MERGED = "CommonSubexpressionElimination"  # onnxruntime's optimizer of equal expressions
# Each text has the operators of a graph, and whether two of them compute the same.
EXPRESSIONS = {
    "equal": ("{ a = Exp(x) b = Exp(x) y = Mul(a, b) }", True),
    "equal after others that are equal": (
        "{ a = Exp(x) b = Exp(x) c = Abs(a) d = Abs(b) y = Mul(c, d) }",
        True,
    ),
    "equal but for a copy": ("{ i = Identity(x) a = Exp(x) b = Exp(i) y = Mul(a, b) }", True),
    "equal constants": ("<float k = {2}, float l = {2}> { a = Mul(x, k) y = Mul(a, l) }", False),
    "of equal constants": (
        "<float k = {2}, float l = {2}> { a = Mul(x, k) b = Mul(x, l) y = Mul(a, b) }",
        True,
    ),
    "of other constants": (
        "<float k = {2}, float l = {3}> { a = Mul(x, k) b = Mul(x, l) y = Mul(a, b) }",
        False,
    ),
    "inputs in another order": ("{ a = Exp(x) b = Sub(a, x) c = Sub(x, a) y = Mul(b, c) }", False),
    "other attributes": (
        "{ a = LeakyRelu<alpha = 0.1>(x) b = LeakyRelu<alpha = 0.2>(x) y = Mul(a, b) }",
        False,
    ),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_equal_expressions_are_merged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, merged = EXPRESSIONS[name]
    model = onnx.parser.parse_model(f"{HEADER} (float[2, 8] x) => (float[2, 8] y) {body}")
    assert MERGED not in useless_optimizers(model)  # a small graph is not searched
    monkeypatch.setattr(ort_optimizers, "MIN_NODES_TO_COMPARE", 1)
    disabled = useless_optimizers(model)
    assert (MERGED not in disabled) == merged
    nodes = optimized(model, disabled, tmp_path)
    assert nodes == optimized(model, [], tmp_path)
    removed = sum(node.op_type != "Identity" for node in model.graph.node) - len(nodes)
    assert bool(removed) == merged


def test_a_layer_normalization_has_both_of_its_operators(tmp_path: Path) -> None:
    text = "(float[2, 8] x) => (float[2, 8] y) { r = Sqrt(x) y = Neg(r) }"
    disabled = useless_optimizers(onnx.parser.parse_model(HEADER + text))
    assert set(ort_optimizers.LAYER_NORM_FUSIONS) <= set(disabled)
    assert "SkipLayerNormFusion" in disabled
    model = onnx.parser.parse_model(HEADER + PATTERNS["layer normalization"])
    assert not {*ort_optimizers.LAYER_NORM_FUSIONS, "SkipLayerNormFusion"} & set(
        useless_optimizers(model)
    )


def test_a_tanh_is_part_of_gelu_by_its_constant() -> None:
    text = "(float[2, 8] x) => (float[2, 8] y) <float c = {2}> { t = Tanh(x) y = Mul(t, c) }"
    gelus = {"FastGeluFusion", "BiasGeluFusion"}
    assert gelus <= set(useless_optimizers(onnx.parser.parse_model(HEADER + text)))
    model = onnx.parser.parse_model(HEADER + PATTERNS["gelu by Tanh"])
    assert not gelus & set(useless_optimizers(model))


def test_operators_of_subgraphs_count() -> None:
    text = """(bool c, float[2] x) => (float[2] y) { y = If(c) <
        then_branch = t () => (float[2] a) { a = Erf(x) },
        else_branch = e () => (float[2] b) { b = Neg(x) }> }"""
    disabled = useless_optimizers(onnx.parser.parse_model(HEADER + text))
    assert "GeluFusionL2" not in disabled
    assert "FastGeluFusion" in disabled


@pytest.mark.parametrize(
    ("nodes", "may_be_constant"),
    [
        ("c = Identity(free)", False),
        ("c = Identity(fixed)", True),
        ("c = Constant<value = bool {1}>()", True),
        ("p = Mul(half, half)  c = Less(p, half)", True),
        ("p = Mul(half, x)  m = ReduceMax<keepdims = 0>(p)  c = Less(m, half)", False),
        ("r = RandomNormal<shape = [1]>()  m = ReduceMax<keepdims = 0>(r)  c = Less(m, half)", False),
        ("s = Shape(x)  n = Size(s)  c = Equal(n, two)", True),
        ("s = Shape(many)  n = Gather(s, first)  c = Equal(n, two)", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_inside", [False, True])
def test_onnxruntime_replaces_no_if_on_a_constant(
    nodes: str, may_be_constant: bool, is_inside: bool
) -> None:
    """It may crash: the Ifs that it would replace are those whose condition is constant."""
    body = f"""{nodes}  y = If(c) <then_branch = t () => (float[2] a) {{ a = Neg(x) }},
        else_branch = e () => (float[2] b) {{ b = Abs(x) }}>"""
    if is_inside:
        inner = body.replace("  y = If", "  z = If")
        body = f"""y = If(free) <then_branch = u () => (float[2] z) {{ {inner} }},
            else_branch = f () => (float[2] d) {{ d = Exp(x) }}>"""
    text = f"""(float[2] x, bool free, float[N] many) => (float[2] y)
        <float half = {{0.5}}, int64 two = {{2}}, int64 first = {{0}}, bool fixed = {{1}}> {{ {body} }}"""
    model = onnx.parser.parse_model(HEADER + text)
    assert (ort_optimizers.REPLACEMENT_OF_IFS in useless_optimizers(model)) == may_be_constant


def test_the_iterations_of_a_loop_differ() -> None:
    text = """(float[2] x, int64 n) => (float[2] y) <bool yes = {1}, int64 two = {2}> { y = Loop(n, yes, x) <
        body = b (int64 i, bool g, float[2] s) => (bool h, float[2] t) { h = Identity(g)  c = Less(i, two)
        t = If(c) <then_branch = u () => (float[2] a) { a = Neg(s) }, else_branch = e () => (float[2] d) { d = Abs(s) }> }> }"""
    model = onnx.parser.parse_model(HEADER + text)
    assert ort_optimizers.REPLACEMENT_OF_IFS not in useless_optimizers(model)


def test_a_pattern_names_operators_that_exist() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    own = {
        "BitmaskDropout", "FastGelu", "FusedConv", "FusedMatMul", "GroupQueryAttention",
        "MatMulIntegerToFloat", "MatMulNBits", "QLinearConv", "QuickGelu",
        "SimplifiedLayerNormalization", "SkipLayerNormalization",
        "SoftmaxCrossEntropyLossInternalGrad", "TransposeMatMul",
    }  # fmt: skip  # of onnxruntime
    for name, operators in PATTERN_OPERATORS.items():
        assert operators <= known | own, name


def test_a_large_graph_trains_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of nodes, and the optimizers, change no number."""
    from onnxfit.runtime import compilation, node_order

    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    y = np.arange(8) % 3

    def weights() -> dict[str, np.ndarray]:
        trainer = onnxfit.Trainer(mlp(), loss="cross_entropy", optimizer="adam")
        for _ in range(3):
            trainer.train_on_batch(x, y)
        return trainer.get_weights()

    as_small = weights()
    monkeypatch.setattr(node_order, "MIN_NODES_TO_SORT", 1)
    monkeypatch.setattr(compilation, "useless_optimizers", lambda model: [])
    for limit in (0, 2**30):
        monkeypatch.setattr(node_order, "MAX_BYTES_IN_MEMORY", limit)
        for name, weight in weights().items():
            np.testing.assert_allclose(weight, as_small[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_products_of_float64_in_batches_are_trained(backend: str) -> None:
    """onnxruntime 1.19 writes a FusedMatMul here, which has no kernel for float64."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> net (double[N, 4, 3] x) => (double[N, 4, 2] y)'
        "{ h = MatMul(x, w0)  t = Tanh(h)  y = MatMul(t, w1) }"
    )
    rng = np.random.default_rng(0)
    arrays = {"w0": rng.standard_normal((3, 5)), "w1": rng.standard_normal((5, 2))}
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    x = rng.standard_normal((6, 4, 3))
    trainer = onnxfit.Trainer(model, loss="mean_squared_error", optimizer=0.1, backend=backend)
    trainer.train_on_batch(x, np.zeros((6, 4, 2)))
    t = np.tanh(x @ arrays["w0"])
    gradient = np.einsum("nij,nik->jk", t, 2 * (t @ arrays["w1"]) / (6 * 4 * 2))
    np.testing.assert_allclose(
        trainer.get_weights()["w1"], arrays["w1"] - 0.1 * gradient, rtol=1e-12
    )
