"""Rewrites of a finished step: the same numbers, by other nodes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

import onnxfit
from onnxfit.step import finish
from onnxfit.step.rewrites import REWRITES
from onnxfit.step.rewrites.add_before_product import add_before_product
from onnxfit.step.rewrites.bias_in_product import BiasInProduct, bias_in_product
from onnxfit.step.rewrites.broadcast_late import broadcast_late
from onnxfit.step.rewrites.join_pieces import join_pieces
from onnxfit.step.rewrites.mask_before_unpool import mask_before_unpool
from onnxfit.step.rewrites.multiply_few_columns import multiply_few_columns
from onnxfit.step.rewrites.multiply_once import multiply_once
from onnxfit.step.rewrites.pool_tall_images import pool_tall_images
from onnxfit.step.rewrites.replacement import MATCHER, new_node
from onnxfit.step.rewrites.sum_before_scaling import sum_before_scaling
from onnxfit.step.rewrites.update_in_product import update_in_product

NORMALISED = """<ir_version: 8, opset_import: ["": 17]> normalised (float[batch,3,5,4] x) => (float[batch,3,1,1] y)
    <float[3] s = {1,2,3}, float[3] b = {0,1,0}, float[3] m = {0,0,0}, float[3] v = {1,1,1}, float[3,3,1,1] w = {1,0,2,0,1,0,3,0,1}>
    { c = Conv(x, w) n = BatchNormalization(c, s, b, m, v) r = Relu(n) a = Add(r, c) y = GlobalAveragePool(a) }"""
POOLED = """<ir_version: 8, opset_import: ["": 18]> pooled (float[batch,4,2] x) => (float[batch,2] y) <float[2,2] w = {1,2,3,4}, int64[1] axes = {1}>
    { h = MatMul(x, w) t = Tanh(h) m = ReduceMean<keepdims=0>(t, axes) q = ReduceSumSquare<keepdims=0>(h, axes) y = Add(m, q) }"""
CUT = """<ir_version: 8, opset_import: ["": 17]> cut (float[batch,6] x) => (float[batch,2] y)
    <float[6,6] w = {1,2,3,4,5,6,6,5,4,3,2,1,1,0,1,0,1,0,0,1,0,1,0,1,1,1,2,2,3,3,0,0,1,1,0,0},
     int64[1] zero = {0}, int64[1] two = {2}, int64[1] four = {4}, int64[1] six = {6}, int64[1] axis = {1}>
    { h = MatMul(x, w) q = Slice(h, zero, two, axis) k = Slice(h, two, four, axis) v = Slice(h, four, six, axis) p = Mul(q, k) y = Add(p, v) }"""
DENSE = """<ir_version: 8, opset_import: ["": 17]> dense (float[batch,2] x) => (float[batch,7] y)
    <float[7,2] w = {1,2,3,4,5,6,7,8,9,0,1,2,3,4}, float[7] b = {0,1,2,3,4,5,6}>
    { y = Gemm<alpha=0.5, transB=1>(x, w, b) }"""
MAXIMA = """<ir_version: 8, opset_import: ["": 17]> maxima (float[batch,1,24,SIZE] x) => (float[batch,16,6,6] y)
    <float[16,1,1,1] w = {1,-2,3,-1,2,-3,1,1,1,-2,3,-1,2,-3,1,1}, float[16] b = {1,2,-1,1,0,3,-2,-4,-1,-2,1,-1,2,-3,2,4}>
    { c = Conv(x, w, b) r = Relu(c) m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r) q = Relu(m) y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(q) }"""
LAYERS = """<ir_version: 8, opset_import: ["": 17]> layers (float[batch,2] x) => (float[batch,3] y)
    <float[2,2] w = {1,2,3,4}, float[2] b = {1,-1}, float[2,3] v = {1,0,2,3,1,1}, float[3] c = {0,1,2}>
    { m = MatMul(x, w) a = Add(m, b) t = Tanh(a) n = MatMul(t, v) y = Add(c, n) }"""
NARROW = f"""<ir_version: 8, opset_import: ["": 17]> narrow (float[batch,3000] x) => (float[batch,2] y)
    <int64[2] shape = {{3000,2}}, float[6000] v = {{{",".join(str(i % 7 - 3) for i in range(6000))}}}>
    {{ w = Reshape(v, shape) y = MatMul(x, w) }}"""
LOW_RANK = """<ir_version: 8, opset_import: ["": 17]> low (float[batch,2] x) => (float[batch,2] y)
    <float[2,3] w = {1,2,3,4,5,6}, float[2,1] p = {1,-1}, float[1,3] q = {2,0,1}, float half = {0.5},
     float[2,3] v = {3,1,2,0,1,1}, float[3] b = {1,0,2}, float[1,3] r = {1,2,1}, float[2,1] t = {3,1}>
    { h = MatMul(x, w) l = MatMul(x, p) s = Mul(l, half) m = MatMul(s, q) z = Add(h, m) a = Tanh(z)
      g = Gemm<transB=1>(a, v) rt = Transpose<perm=[1,0]>(r) tt = Transpose<perm=[1,0]>(t)
      k = MatMul(a, rt) n = MatMul(k, tt) y = Add(n, g) }"""
MODELS = {
    "layers": LAYERS,
    "low rank": LOW_RANK,
    "narrow": NARROW,
    "normalised": NORMALISED, "pooled": POOLED, "cut": CUT, "dense": DENSE,
    "even maxima": MAXIMA.replace("SIZE", "24"), "odd maxima": MAXIMA.replace("SIZE", "25"),
}  # fmt: skip
OPTIMIZERS = {"dense": "sgd"}
NEED_SIZES = (add_before_product, multiply_few_columns, multiply_once, update_in_product)
# what each rewrite is for
CASES = [
    (add_before_product, "low rank"),
    (bias_in_product, "layers"),
    (broadcast_late, "normalised"),
    (broadcast_late, "pooled"),
    (join_pieces, "cut"),
    (update_in_product, "dense"),
    (multiply_few_columns, "narrow"),
    (multiply_once, "pooled"),
    (pool_tall_images, "even maxima"),
    (mask_before_unpool, "odd maxima"),
    (sum_before_scaling, "normalised"),
]
# rewrites that must run before a rewrite finds its nodes
EARLIER = {sum_before_scaling: (broadcast_late,)}


def graph_of(name: str, known: bool) -> onnx.ModelProto:
    text = MODELS[name]
    model = onnx.parser.parse_model(text.replace("batch", "6") if known else text)
    trainer = onnxfit.Trainer(model, loss="mse", optimizer=OPTIMIZERS.get(name, "adam"))
    return onnx.ModelProto.FromString(trainer.save_onnx_graph(bytes)["train"])


def results(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value or 6 for d in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feeds[value.name] = np.asarray(np.abs(rng.standard_normal(shape)), dtype)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in model.graph.output]
    return dict(
        zip(names, session.run(names, {i.name: feeds[i.name] for i in session.get_inputs()}))
    )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("rewrite", "model"), CASES)
def test_a_rewrite_changes_no_number(
    rewrite, model: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = EARLIER.get(rewrite, ())
    monkeypatch.setattr(finish, "REWRITES", earlier)
    plain = graph_of(model, known)
    monkeypatch.setattr(finish, "REWRITES", (*earlier, rewrite))
    found = graph_of(model, known)
    onnx.checker.check_model(found, full_check=True)
    if known or rewrite not in NEED_SIZES:
        # else this says nothing
        assert [n.op_type for n in found.graph.node] != [n.op_type for n in plain.graph.node]
    expected = results(plain)
    for name, array in results(found).items():
        np.testing.assert_allclose(array, expected[name], rtol=2e-5, atol=1e-6, err_msg=name)


def test_every_pass_has_a_case() -> None:
    assert {rewrite for rewrite, _ in CASES} == set(REWRITES)


CONSTANTS = (
    "<int64[2] shape = {2,3}, int64[1] zero = {0}, int64[1] one_more = {1}, int64[4] left = {0,0,0,2}, int64[4] right = {0,1,0,0}, int64[4]"
    " middle = {0,1,0,1}, float one = {1}, float two = {2}, float third = {0.333333343}, float huge"
    " = {3e38}>"
)


def rewritten(
    body: str,
    inputs: str = "float[1,3] a, float[2,3] b, float c",
    output: str = "float[2,3] y",
) -> list[str]:
    """The operators of a graph after the passes."""
    text = (
        f'<ir_version: 8, opset_import: ["": 21]> g ({inputs}) => ({output}) {CONSTANTS} {{'
        f" {body} }}"
    )
    model = ir.from_proto(
        onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True)
    )
    for rewrite in REWRITES:
        rewrite(model.graph)
    ir.passes.common.RemoveUnusedNodesPass()(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return [node.op_type for node in model.graph]


def test_what_spreads_by_itself_is_not_expanded() -> None:
    assert rewritten("e = Expand(a, shape) y = Mul(e, b)") == ["Mul"]
    assert rewritten("e = Expand(a, shape) m = Mul(c, e) y = Add(m, b)") == ["Mul", "Add"]
    assert rewritten("e = Expand(a, shape) n = Neg(e) m = Mul(n, n) y = Sub(b, m)") == [
        "Neg",
        "Mul",
        "Sub",
    ]
    assert rewritten("e = Expand(a, shape) s = Sum(b, e, b) y = Neg(s)") == ["Add", "Add", "Neg"]
    assert rewritten("e = Expand(a, shape) s = Sum(b, e, b, b) y = Neg(s)") == ["Sum", "Add", "Neg"]


def test_what_must_be_large_stays_large() -> None:
    assert rewritten("e = Expand(a, shape) y = Identity(e)") == ["Expand", "Identity"]
    assert rewritten("e = Expand(a, shape) m = Mul(c, e) y = Identity(m)") == [
        "Mul",
        "Expand",
        "Identity",
    ]
    # an output keeps its node
    assert rewritten("e = Expand(a, shape) y = Neg(e)") == ["Expand", "Neg"]


def test_two_that_make_each_other_large_need_no_expand() -> None:
    body = "e = Expand(a, shape) f = Expand(d, shape) y = Mul(e, f)"
    assert rewritten(body, "float[1,3] a, float[2,1] d") == ["Mul"]


HALVES = "float[2,1] a, float[2,2] b"


@pytest.mark.parametrize("total", ["y = Add(p, q)", "y = Sum(q, p)"])
def test_pieces_that_fill_the_whole_are_joined(total: str) -> None:
    """Whatever their order."""
    assert rewritten(f"p = Pad(a, left) q = Pad(b, right) {total}", HALVES) == ["Concat"]


@pytest.mark.parametrize(
    "body",
    [
        "p = Pad(a, left) q = Pad(b, right) z = Neg(q) y = Sum(p, q, z)",
        "p = Pad(a, middle) q = Pad(b, right) y = Add(p, q)",
        'p = Pad<mode="edge">(a, left) q = Pad(b, right) y = Add(p, q)',
        "p = Pad(a, left, one) q = Pad(b, right) y = Add(p, q)",
    ],
    ids=["with a third", "overlapping", "of the edge", "of ones"],
)
def test_other_sums_stay(body: str) -> None:
    assert "Concat" not in rewritten(body, HALVES)


GRADIENT = "float[5,2] a, float[5,3] b, float[2,3] w, float c"


def test_a_gradient_that_only_moves_its_weight_is_not_written_down() -> None:
    assert rewritten(
        "g = Gemm<transA=1>(a, b) m = Mul(c, g) y = Sub(w, m)",
        "float[1,2] a, float[1,3] b, float[2,3] w, float c",
    ) == ["Mul", "Gemm"]


@pytest.mark.parametrize(
    "body",
    [
        "g = Gemm<transA=1>(a, b) m = Mul(c, g) y = Sub(w, m)",
        "g = Gemm<transA=1>(a, b) m = Mul(c, g) y = Sub(m, w)",
    ],
    ids=["the factors are larger", "the other way round"],
)
def test_other_differences_stay(body: str) -> None:
    assert rewritten(body, GRADIENT) == ["Gemm", "Mul", "Sub"]


@pytest.mark.parametrize(
    ("product", "sizes", "expected"),
    [
        ("Gemm<transA=1>(a, b)", "1024,16|1024,15", ["Gemm", "Transpose"]),
        ("Gemm<transA=1, alpha=2.0>(a, b)", "1024,16|1024,1", ["Gemm", "Transpose"]),
        ("Gemm<transA=1>(a, b)", "1024,16|1024,16", ["Gemm"]),
        ("Gemm<transA=1>(a, b)", "1024,15|1024,8", ["Gemm"]),
        ("Gemm<transA=1>(a, b)", "1023,16|1023,8", ["Gemm"]),
        ("Gemm<transA=1, transB=1>(a, b)", "1024,16|8,1024", ["Gemm"]),
        ("Gemm(a, b)", "16,1024|1024,8", ["Gemm"]),
        ("Gemm<transA=1>(a, b, c)", "1024,16|1024,8", ["Gemm"]),
    ],
)
def test_few_columns_of_a_large_product_become_rows(
    product: str, sizes: str, expected: list[str]
) -> None:
    left, right = sizes.split("|")
    found = rewritten(
        f"g = {product} y = Relu(g)",
        f"float[{left}] a, float[{right}] b, float c",
        output="float[m,n] y",
    )
    assert found == [*expected, "Relu"]


@pytest.mark.parametrize(
    "body",
    [
        "m = Mul(c, g) s = Sub(w, m) y = Add(s, g)",
        "m = Mul(d, g) y = Sub(w, m)",
        "m = Mul(c, g) y = Sub(d, m)",
    ],
)
def test_what_else_needs_the_gradient_keeps_it(body: str) -> None:
    inputs = "float[1,2] a, float[1,3] b, float[2,3] w, float c, float[1,3] d"
    assert "Sub" in rewritten(f"g = Gemm<transA=1>(a, b) {body}", inputs)


def test_several_numbers_multiply_once() -> None:
    assert rewritten("m = Mul(two, c) n = Mul(third, m) y = Mul(n, b)") == ["Mul", "Mul"]
    assert rewritten("m = Mul(b, two) n = Mul(third, m) y = Neg(n)") == ["Mul", "Neg"]
    assert rewritten("m = Mul(two, b) n = Mul(m, two) o = Mul(two, n) y = Neg(o)") == ["Mul", "Neg"]
    assert rewritten("m = Mul(one, b) y = Neg(m)") == ["Neg"]


@pytest.mark.parametrize(
    "body",
    ["m = Mul(two, b) n = Mul(third, m) y = Add(m, n)", "m = Mul(huge, b) n = Mul(huge, m) y = Neg(n)", "m = Mul(c, b) n = Mul(c, m) y = Neg(n)"],
    ids=["needed by another", "their product is infinite", "no constants"],
)  # fmt: skip
def test_other_multiplications_stay(body: str) -> None:
    assert rewritten(body)[:2] == ["Mul", "Mul"]


@pytest.mark.parametrize(
    ("attributes", "shape", "is_tall"),
    [
        ("kernel_shape=[2,2], strides=[2,2]", (2, 8, 6, 24), True),
        ("kernel_shape=[2,3], strides=[2,1]", (2, 8, 6, 24), True),
        ("kernel_shape=[1,2], strides=[3,2]", ("N", 16, 6, 25), True),
        ("kernel_shape=[1,2]", (2, 8, 5, 24), True),
        ("kernel_shape=[2,2], strides=[2,2]", (2, 8, 7, 24), False),
        ("kernel_shape=[3,2], strides=[2,2]", (2, 8, 6, 24), False),
        ("kernel_shape=[2,2], strides=[2,2], dilations=[2,1]", (2, 8, 6, 24), False),
        ("kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1]", (2, 8, 6, 24), False),
        ('kernel_shape=[2,3], strides=[2,2], auto_pad="SAME_UPPER"', (2, 8, 6, 24), False),
        ("kernel_shape=[2,2], strides=[2,2], ceil_mode=1", (2, 8, 6, 25), False),
        ("kernel_shape=[2,2], strides=[2,2]", (2, 8, 6, 22), False),
        ("kernel_shape=[2,2], strides=[2,2]", (2, 6, 6, 24), False),
        ("kernel_shape=[2,2], strides=[2,2]", ("N", "C", 6, 24), False),
    ],
)
def test_images_are_joined_where_no_window_lies_across_two(
    attributes: str, shape: tuple[object, ...], is_tall: bool
) -> None:
    text = (
        f'<ir_version: 8, opset_import: ["": 21]> g (float[{",".join(map(str, shape))}] x)'
        f" => (float[a,b,c,d] y) {{ h = MaxPool<{attributes}>(x) y = Neg(h) }}"
    )
    plain = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    model = ir.from_proto(plain)
    pool_tall_images(model.graph)
    found = ir.to_proto(model)
    onnx.checker.check_model(found, full_check=True)
    assert ("Reshape" in {node.op_type for node in found.graph.node}) == is_tall
    sizes = [n if isinstance(n, int) else 8 for n in shape]
    x = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    before, after = (
        onnxruntime.InferenceSession(
            proto.SerializeToString(), providers=["CPUExecutionProvider"]
        ).run(None, {"x": x})[0]
        for proto in (plain, found)
    )
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("reader", [None, "spread", "product"])
@pytest.mark.parametrize("scope", ["gradient/pool", "gradient/other"])
def test_a_gradient_is_masked_early_for_the_mask_alone(reader: str | None, scope: str) -> None:
    node = onnx.helper.make_node
    square = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        node("MaxPool", ["x"], ["y", "i"], "pool", **square),
        node("HardSigmoid", ["x"], ["slope"], alpha=1e38, beta=0.0),
        node("MaxUnpool", ["dy", "i"], ["spread"], f"{scope}/MaxUnpool", **square),
        node("Mul", ["spread", "slope"], ["product"]),
        node("Neg", ["product"], ["dx"]),
    ]
    outputs = ["dx"]
    if reader:
        nodes.append(node("Abs", [reader], ["seen"]))
        outputs.append("seen")
    large, small = (
        lambda name: onnx.helper.make_tensor_value_info(name, 1, [1, 1, 4, 4]),
        lambda name: onnx.helper.make_tensor_value_info(name, 1, [1, 1, 2, 2]),
    )
    graph = onnx.helper.make_graph(
        nodes, "g", [large("x"), small("dy")], [large(name) for name in outputs]
    )
    plain = onnx.shape_inference.infer_shapes(
        onnx.helper.make_model(
            graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10
        )
    )
    model = ir.from_proto(plain)
    mask_before_unpool(model.graph)
    ir.passes.common.RemoveUnusedNodesPass()(model)
    found = ir.to_proto(model)
    operators = [n.op_type for n in found.graph.node]
    is_early = operators.index("Mul") < operators.index("MaxUnpool")
    assert is_early == (reader != "spread" and scope == "gradient/pool")
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((1, 1, 4, 4)).astype(np.float32) - 1,
        "dy": rng.standard_normal((1, 1, 2, 2)).astype(np.float32),
    }
    before, after = (
        onnxruntime.InferenceSession(
            proto.SerializeToString(), providers=["CPUExecutionProvider"]
        ).run(outputs, feeds)
        for proto in (plain, found)
    )
    for expected, array in zip(before, after):
        np.testing.assert_array_equal(array, expected)


DENSE_INPUTS = (
    "float[2,3] a, float[3,3] w, float[3] b, float[1] one_bias, float[2,3] row, int8[3,3] q,"
    " float scale"
)


@pytest.mark.parametrize(
    ("body", "operators"),
    [
        ("m = MatMul(a, w) y = Add(m, b)", ["Gemm"]),
        ("m = MatMul(a, w) y = Add(b, m)", ["Gemm"]),
        ("m = MatMul(a, w) y = Add(m, one_bias)", ["MatMul", "Add"]),  # not one entry per column
        ("m = MatMul(a, w) y = Add(m, row)", ["MatMul", "Add"]),
        ("m = MatMul(a, w) n = Add(m, b) y = Mul(n, m)", ["MatMul", "Add", "Mul"]),
        (
            "d = DequantizeLinear(q, scale) m = MatMul(a, d) y = Add(m, b)",
            ["DequantizeLinear", "MatMul", "Add"],
        ),
    ],
)
def test_a_bias_is_added_in_the_product_of_a_dense_layer(body: str, operators: list[str]) -> None:
    assert rewritten(body, DENSE_INPUTS) == operators


def test_onnxruntime_computes_the_same_bits_without_the_rewrite_of_a_bias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = results(graph_of("layers", known=True))
    monkeypatch.setattr(finish, "REWRITES", tuple(r for r in REWRITES if r is not bias_in_product))
    for name, array in results(graph_of("layers", known=True)).items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


CENTRED = (
    "mean = ReduceMean(x, rows) centred = Sub(x, mean) scaled = Mul(dy, f) rest = Mul({k}, {c})"
)
CENTRED_INPUTS = "float[2,3] x, float[2,3] dy, float[1,3] f, float[1,3] k, float[2,3] whole"


def sums(k: str = "k", c: str = "centred", axes: str = "rows") -> list[str]:
    """The inputs of the sums in a gradient of a normalization, after the passes."""
    text = f"""<ir_version: 8, opset_import: ["": 21]> g ({CENTRED_INPUTS})
        => (float[1,3] bias, float[1,3] mean_gradient) <int64[1] rows = {{0}}, int64[1] columns = {{1}}>
        {{ {CENTRED.format(k=k, c=c)} total = Add(scaled, rest)
           bias = ReduceSum(dy, {axes}) mean_gradient = ReduceSum(total, rows) }}"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    sum_before_scaling(model.graph)
    return [node.inputs[0].name for node in model.graph if node.op_type == "ReduceSum"]


def test_a_sum_of_centred_values_is_not_computed() -> None:
    assert sums() == ["dy"]


@pytest.mark.parametrize(
    "other", [{"k": "whole"}, {"c": "x"}, {"axes": "columns"}], ids=["weighted", "x", "axes"]
)
def test_sums_of_other_values_stay(other: dict[str, str]) -> None:
    assert sums(**other) == ["dy", "total"]


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (("float[2, 3] x", "float[3, 4] w", "float[4] b"), ""),
        (("double[2, 3] x", "double[3, 4] w", "double[4] b"), ""),
        (("float16[2, 3] x", "float16[3, 4] w", "float16[4] b"), "element type"),
        (("float[5, 2, 3] x", "float[3, 4] w", "float[4] b"), "not matrices"),
        (("float[2, 3] x", "float[3, 4] w", "float[1] b"), "an entry for each column"),
    ],
)
def test_a_rule_says_why_it_keeps_the_nodes(shapes: tuple[str, ...], reason: str) -> None:
    kind = shapes[0].split("[")[0]
    text = f"g ({', '.join(shapes)}) => ({kind}[A, 4] y) {{ p = MatMul(x, w) y = Add(b, p) }}"
    graph = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> {text}').graph
    rule = BiasInProduct()
    (found,) = MATCHER.solutions(rule.equations, {"sum": graph.outputs[0]})
    assert reason in rule.check(graph, found)
    assert bool(rule.check(graph, found)) == bool(reason)


def test_the_result_of_a_new_node_has_the_name_of_the_node() -> None:
    """A name that onnx-ir chooses, such as val_0, may also be in the graph of the other pass."""
    x = ir.val("x", ir.DataType.FLOAT, [3])
    node = new_node("Relu", [x], "x/relu", x)
    assert (node.name, node.outputs[0].name) == ("x/relu", "x/relu")
