"""Products of matrices with strides, and what surrounds them, by one operator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit.graph import names
from onnxfit.kernels import strided_products
from onnxfit.kernels.library import DOMAIN
from onnxfit.kernels.search import declared_types
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.sessions import (
    differentiated,
    kernel_model,
    kernel_types,
    parsed,
    random_feeds,
    run,
)

Arrays = dict[str, np.ndarray]


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a kernel, although it would not be faster."""
    monkeypatch.setattr(strided_products, "MIN_SIDE", 1)
    monkeypatch.setattr(strided_products, "MIN_PRODUCTS", 1)
    monkeypatch.setattr(strided_products, "MIN_PRODUCTS_ALONE", 1)
    monkeypatch.setattr(strided_products, "MIN_USED", 0)


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for left, right in zip(found, expected, strict=True):
        largest = max(np.abs(right).max(initial=0), 1)
        np.testing.assert_allclose(left, right, rtol=0, atol=2e-6 * largest)


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in with_kernels(model).graph.node]


# Text of a graph with the result y: its inputs, and its nodes. Everything becomes one Product.
SURROUNDED = {
    "matrices": ("float[9,40] a, float[40,33] b", "y = MatMul(a, b)"),
    "batches": ("float[2,3,9,17] a, float[2,3,17,20] b", "y = MatMul(a, b)"),
    "one right factor": ("float[2,3,9,17] a, float[17,20] b", "y = MatMul(a, b)"),
    "one left factor": ("float[9,17] a, float[4,17,20] b", "y = MatMul(a, b)"),
    "repeated batches": ("float[2,1,9,17] a, float[3,17,20] b", "y = MatMul(a, b)"),
    "bias": (
        "float[2,9,17] a, float[17,20] b, float[20] c",
        "p = MatMul(a, b) y = Add(c, p)",
    ),
    "bias and residual": (
        "float[2,9,17] a, float[17,20] b, float[20] c, float[2,9,20] d",
        "p = MatMul(a, b) q = Add(p, c) y = Add(d, q)",
    ),
    "mask": (
        "float[2,3,9,17] a, float[2,3,17,9] b, float[2,1,1,9] c",
        "p = MatMul(a, b) y = Add(p, c)",
    ),
    "Gemm": (
        "float[17,9] a, float[20,17] b, float[9,20] c",
        "y = Gemm<transA=1, transB=1, alpha=-0.5, beta=1.0>(a, b, c)",
    ),
    "bias of Gemm": (
        "float[9,17] a, float[20,17] b, float[20] c",
        "y = Gemm<transB=1>(a, b, c)",
    ),
    "Relu": (
        "float[2,9,17] a, float[17,20] b, float[20] c",
        "p = MatMul(a, b) q = Add(p, c) y = Relu(q)",
    ),
    "transposed Relu": (
        "float[9,17] a, float[17,20] b",
        "p = MatMul(a, b) q = Relu(p) y = Transpose(q)",
    ),
    "scales": (
        "float[9,17] a, float[17,20] b",
        """s = Constant<value_float=0.5>() t = Constant<value_floats=[3.0]>()
        as = Mul(a, s) bs = Mul(s, b) p = MatMul(as, bs) y = Mul(p, t)""",
    ),
    "scores": (
        "float[2,11,60] x",
        """shape = Constant<value_ints=[2,11,3,4,5]>() r = Reshape(x, shape)
        t = Transpose<perm=[2,0,3,1,4]>(r)
        i0 = Constant<value_ints=[0]>() i1 = Constant<value_ints=[1]>()
        i2 = Constant<value_ints=[2]>()
        q1 = Slice(t, i0, i1, i0) k1 = Slice(t, i1, i2, i0)
        q = Squeeze(q1, i0) k = Squeeze(k1, i0) kt = Transpose<perm=[0,1,3,2]>(k)
        y = MatMul(q, kt)""",
    ),
    "heads joined for a transpose": (
        "float[2,11,20] q, float[2,11,20] k",
        """shape = Constant<value_ints=[2,11,4,5]>() flat = Constant<value_ints=[8,11,5]>()
        back = Constant<value_ints=[2,4,5,11]>()
        qr = Reshape(q, shape) kr = Reshape(k, shape)
        qt = Transpose<perm=[0,2,1,3]>(qr) kt = Transpose<perm=[0,2,1,3]>(kr)
        kf = Reshape(kt, flat) kft = Transpose<perm=[0,2,1]>(kf) kh = Reshape(kft, back)
        y = MatMul(qt, kh)""",
    ),
    "joined heads": (
        "float[2,4,11,11] p, float[2,4,11,5] v",
        """shape = Constant<value_ints=[2,11,20]>() o = MatMul(p, v)
        t = Transpose<perm=[0,2,1,3]>(o) y = Reshape(t, shape)""",
    ),
    "parts of a Split": (
        "float[9,40] x",
        """a, b = Split<axis=1, num_outputs=2>(x) t = Transpose(b) y = MatMul(a, t)""",
    ),
    "transposed result": (
        "float[9,40] a, float[40,33] b",
        "p = MatMul(a, b) y = Transpose(p)",
    ),
    "gradient of a weight": (
        "float[2,9,40] a, float[2,9,33] b",
        "f = Flatten<axis=2>(a) g = Flatten<axis=2>(b) y = Gemm<transA=1>(f, g)",
    ),
    "slice from the end": (
        "float[9,40] a, float[50,33] b",
        """start = Constant<value_ints=[-45]>() end = Constant<value_ints=[-5]>()
        axis = Constant<value_ints=[0]>() s = Slice(b, start, end, axis) y = MatMul(a, s)""",
    ),
}


def surrounded(name: str) -> onnx.ModelProto:
    inputs, body = SURROUNDED[name]
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float y) {{ {body} }}'
    )
    for i, node in enumerate(model.graph.node):
        node.name = f"gradient/{i}"
    constants = [node for node in model.graph.node if node.op_type == "Constant"]
    for node in constants:  # as in a step
        value = onnx.helper.get_attribute_value(node.attribute[0])
        array = np.array(value, np.int64 if "int" in node.attribute[0].name else np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, node.output[0]))
        model.graph.node.remove(node)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


@pytest.mark.parametrize("name", SURROUNDED)
def test_a_product_and_what_surrounds_it_are_one_operator(
    name: str, all_sizes: None, kernels: Path
) -> None:
    plain = surrounded(name)
    assert operators(plain) == ["Product"]
    feeds = random_feeds(plain)
    assert_close(run(with_kernels(plain), feeds, kernels), run(plain, feeds))


@pytest.mark.parametrize("form", ["", "transA=1", "transB=1", "transA=1, transB=1"])
@pytest.mark.parametrize("steps", [2, 7, 8, 16, 100, 255, 256, 257, 600])
def test_sizes(form: str, steps: int, all_sizes: None, kernels: Path) -> None:
    for rows, columns in [(2, 2), (5, 31), (8, 32), (50, 49), (393, 17), (100, 300), (7, 66)]:
        left = f"{steps},{rows}" if "transA" in form else f"{rows},{steps}"
        right = f"{columns},{steps}" if "transB" in form else f"{steps},{columns}"
        attributes = f"<{form}>" if form else ""
        plain = parsed(
            f"""g (float[{left}] a, float[{right}] b, float[{columns}] c)
            => (float[{rows},{columns}] y) {{ y = Gemm{attributes}(a, b, c) }}"""
        )
        feeds = random_feeds(plain)
        exact = {name: array.astype(np.float64) for name, array in feeds.items()}
        a = exact["a"].T if "transA" in form else exact["a"]
        b = exact["b"].T if "transB" in form else exact["b"]
        assert operators(plain) == ["Product"]
        assert_close(run(with_kernels(plain), feeds, kernels), [a @ b + exact["c"]])


def attention(causal: bool) -> onnx.ModelProto:
    """Two heads, and the gradients, as a step computes them."""
    mask = "m = Add(s, mask)" if causal else "m = Identity(s)"
    return differentiated(
        f"""g (float[2,9,48] x, float[9,9] mask) => (float[2,9,16] y)
        <int64[4] shape = {{2,9,2,24}}, int64[3] flat = {{2,9,16}}, float scale = {{0.35}}> {{
            r = Reshape(x, shape) t = Transpose<perm=[0,2,1,3]>(r)
            q, k, v = Split<axis=3, num_outputs=3>(t)
            kt = Transpose<perm=[0,1,3,2]>(k) qs = Mul(q, scale)
            s = MatMul(qs, kt) {mask} p = Softmax(m)
            o = MatMul(p, v) ot = Transpose<perm=[0,2,1,3]>(o) y = Reshape(ot, flat) }}""",
        ["x"],
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_attention_and_its_gradient_copy_no_heads(
    causal: bool, threads: int, all_sizes: None, kernels: Path
) -> None:
    plain = attention(causal)
    found = operators(plain)
    assert found.count("Product") == 6
    assert "MatMul" not in found
    assert found.count("Transpose") < [n.op_type for n in plain.graph.node].count("Transpose")
    feeds = random_feeds(plain)
    faster = with_kernels(plain)
    assert_close(run(faster, feeds, kernels, threads), run(plain, feeds, threads=threads))


def test_all_values_have_a_size(all_sizes: None) -> None:
    """onnxruntime plans their memory then; else the peak of a small decoder is a quarter higher."""
    graph = with_kernels(attention(causal=True)).graph
    assert {name for node in graph.node for name in node.output} <= declared_types(graph).keys()


@pytest.mark.parametrize("threads", range(2, 9))
def test_threads_change_nothing(threads: int, kernels: Path) -> None:
    model = with_kernels(
        parsed(
            """g (float[3,100,300] a, float[300,400] b, float[400] c) => (float[3,100,400] y)
            { p = MatMul(a, b) y = Add(p, c) }"""
        )
    )
    feeds = random_feeds(model)
    found, right = (run(model, feeds, kernels, n) for n in (threads, 1))
    np.testing.assert_array_equal(found[0], right[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_infinite_numbers_reach_the_same_results(name: str, value: float, kernels: Path) -> None:
    plain = parsed(
        """g (float[67,70] a, float[70,75] b, float[75] c) => (float[67,75] y)
        { p = MatMul(a, b) q = Add(p, c) y = Relu(q) }"""
    )
    feeds = random_feeds(plain)
    feeds[name][..., 2] = value
    (found,), (right,) = run(with_kernels(plain), feeds, kernels), run(plain, feeds)
    assert operators(plain) == ["Product"]
    if not (name == "c" and value < 0):  # else Relu makes 0 of it
        assert not np.isfinite(right).all()
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(right))


BODIES = {  # not all of it becomes one operator
    "a product is read twice": ("p = MatMul(a, b) y = Add(p, c) z = Neg(p)", ["Product", "Add"]),
    "a product is an output": ("z = MatMul(a, b) y = Add(z, c)", ["Product", "Add"]),
    "a product is added to itself": ("p = MatMul(a, b) y = Add(p, p) z = Neg(a)", ["Product"]),
    "two products are added": (
        "p = MatMul(a, b) q = MatMul(a, b) y = Add(p, q) z = Neg(a)",
        ["Product", "Product"],
    ),
    "a scale of a sum": (
        "p = MatMul(a, b) q = Add(p, c) r = Mul(q, s) y = Identity(r) z = Neg(a)",
        ["Product", "Mul"],
    ),
    "a sum with a Relu": (
        "p = MatMul(a, b) q = Relu(p) y = Add(q, c) z = Neg(a)",
        ["Product", "Add"],
    ),
    "an unknown factor": ("p = MatMul(a, b) y = Mul(p, t) z = Neg(a)", ["Product", "Mul"]),
}


@pytest.mark.parametrize("name", BODIES)
def test_values_that_are_needed_stay(name: str, all_sizes: None, kernels: Path) -> None:
    body, expected = BODIES[name]
    plain = parsed(
        f"""g (float[64,64] a, float[64,64] b, float[64] c, float t)
        => (float[64,64] y, float[64,64] z) <float s = {{2.0}}> {{ {body} }}"""
    )
    found = operators(plain)
    assert [each for each in found if each in {"Product", "Add", "Mul"}][
        : len(expected)
    ] == expected
    feeds = random_feeds(plain)
    assert_close(run(with_kernels(plain), feeds, kernels), run(plain, feeds))


def test_a_factor_that_another_product_writes_in_another_order(
    all_sizes: None, kernels: Path
) -> None:
    """The first product writes its transpose, and the second one reads that."""
    plain = parsed(
        """g (float[9,17] a, float[17,20] b, float[9,12] c) => (float[20,12] y)
        { p = MatMul(a, b) t = Transpose(p) y = MatMul(t, c) }"""
    )
    assert operators(plain) == ["Product", "Product"]
    feeds = random_feeds(plain)
    assert_close(run(with_kernels(plain), feeds, kernels), run(plain, feeds))


UPDATES = {  # by a product, and what is done with w before and after it
    "a sum": ("p = MatMul(x, w) n = Add(w, p)", ["Product", "Add"]),
    "another sum": ("p = MatMul(x, w) n = Add(x, p)", ["Product", "Add"]),
    "a transpose": ("p = MatMul(w, x) n = Transpose(p)", ["Product", "Transpose"]),
    "a transposed sum": (
        "p = MatMul(x, x) q = Add(p, w) n = Transpose(q)",
        ["Product", "Transpose"],
    ),
    "a decayed tensor": ("n = Mul(w, s) y = MatMul(n, x)", ["Mul", "Product"]),
    "a transpose read later": (
        "t = Transpose(w) n = Add(t, x) y = MatMul(t, x)",
        ["Transpose", "Add", "Product"],
    ),
    "a flat transpose read later": (
        "f = Flatten(w) t = Transpose(f) n = Add(t, x) y = MatMul(t, x)",
        ["Flatten", "Transpose", "Add", "Product"],
    ),
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_is_not_written_while_its_tensor_is_read(name: str, all_sizes: None) -> None:
    """The update n may have the memory of w."""
    body, expected = UPDATES[name]
    plain = parsed(
        f"""g (float[64,64] x, float[64,64] w) => (float[64,64] n, float[64,64] y)
        <float s = {{0.9}}> {{ {body} }}"""
    )
    if "y = " not in body:
        del plain.graph.output[1]
    plain.graph.output[0].name = names.updated("w")
    for node in plain.graph.node:
        for values in (node.input, node.output):
            values[:] = [names.updated("w") if value == "n" else value for value in values]
    del plain.graph.value_info[:]
    found = with_kernels(onnx.shape_inference.infer_shapes(plain))
    assert sorted(node.op_type for node in found.graph.node) == sorted(expected)
    readers = [node for node in found.graph.node if "w" in node.input]
    assert len([node for node in plain.graph.node if "w" in node.input]) == len(readers)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("t = Mul(a, s) y = MatMul(t, b)", (1, 64, 64)),
        ("p = MatMul(a, b) y = Mul(p, s)", (1, 64, 64)),
        ("p = MatMul(a, b) q = Mul(p, s) y = Transpose<perm=[1,0,2]>(q)", (64, 1, 64)),
        ("t = Mul(b, s) u = Squeeze(t) y = MatMul(a, u)", (64, 64)),
    ],
)
def test_a_scale_with_more_axes_adds_axes(
    body: str, shape: tuple[int, ...], all_sizes: None, kernels: Path
) -> None:
    """onnxruntime 1.19 itself forgets these axes."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[64,64] a, float[64,64] b) => (float y)
        <float[1,1,1] s = {{2.0}}> {{ {body} }}"""
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for i, node in enumerate(model.graph.node):
        node.name = f"gradient/{i}"
    plain = onnx.shape_inference.infer_shapes(model)
    feeds = random_feeds(plain)
    (found,) = run(with_kernels(plain), feeds, kernels)
    assert found.shape == shape
    assert_close([found.reshape(64, 64)], [2 * feeds["a"] @ feeds["b"]])


def test_graphs_for_inference_keep_their_operators() -> None:
    plain = parsed(
        "g (float[64,64] a, float[64,64] b) => (float[64,64] y) { y = MatMul(a, b) }", scope=""
    )
    assert kernel_types(plain) == []


@pytest.mark.parametrize(
    ("rows", "steps", "columns", "is_used", "is_used_alone"),
    [
        (64, 64, 64, True, False),
        (64, 64, 63, False, False),
        (256, 256, 128, True, True),
        (256, 256, 127, True, False),
        (15, 1024, 1024, False, False),
        (1024, 15, 1024, False, False),
        (1024, 1024, 15, False, False),
        (1024, 1024, 17, False, False),  # most of the second tile is empty
    ],
)
def test_small_products_keep_their_operators(
    rows: int, steps: int, columns: int, is_used: bool, is_used_alone: bool
) -> None:
    for body, expected in (
        ("p = MatMul(a, b) y = Add(p, c)", is_used),
        ("y = MatMul(a, b)", is_used_alone),
    ):
        plain = parsed(
            f"""g (float[{rows},{steps}] a, float[{steps},{columns}] b, float[{columns}] c)
            => (float[{rows},{columns}] y) {{ {body} }}"""
        )
        assert kernel_types(plain) == ["Product"] * expected


def test_unknown_sizes_keep_their_operators() -> None:
    plain = parsed("g (float[N,64] a, float[64,64] b) => (float[N,64] y) { y = MatMul(a, b) }")
    assert kernel_types(plain) == []


def operator(arrays: Mapping[str, np.ndarray], **changed: Any) -> onnx.ModelProto:
    """y (4, 3) = a (4, 5) b (5, 3)."""
    attributes = {
        "sizes": [1, 1, 1, 4, 3, 5],
        "views": [0, 0, 0, 0, 5, 1, 0, 0, 0, 0, 3, 1],
        "strides": [0, 0, 0, 3, 1],
        "shape": [4, 3],
        "alpha": 1.0,
        "has_relu": 0,
        **changed,
    }
    model = kernel_model("Product", arrays, ["y"])
    (node,) = model.graph.node
    node.attribute.extend(onnx.helper.make_attribute(*each) for each in attributes.items())
    return model


def arrays_of(**shapes: tuple[int, ...]) -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_the_operator_computes_a_product(kernels: Path) -> None:
    arrays = arrays_of(a=(4, 5), b=(5, 3))
    (y,) = run(operator(arrays), arrays, kernels)
    np.testing.assert_allclose(y, arrays["a"] @ arrays["b"], rtol=1e-5)


@pytest.mark.parametrize(
    "changed",
    [
        {"sizes": [1, 1, 1, 4, 3]},
        {"sizes": [1, 1, 1, 4, 0, 5]},
        {"sizes": [1, 1, 1, 4, -3, 5]},
        {"sizes": [2**62, 1, 1, 4, 3, 5]},
        {"views": [0, 0, 0, 0, 5, 1]},
        {"views": [-1, 0, 0, 0, 5, 1, 0, 0, 0, 0, 3, 1]},
        {"views": [0, 0, 0, 0, -5, 1, 0, 0, 0, 0, 3, 1]},
        {"views": [0, 0, 0, 0, 2**62, 1, 0, 0, 0, 0, 3, 1]},
        {"strides": [0, 0, 0, 2, 1]},
        {"strides": [0, 0, 0, 3, 2]},
        {"strides": [0, 0, 0, 4, 1]},
        {"strides": [0, 0, 3, 1]},
        {"shape": [4, 4]},
        {"shape": [-4, -3]},
        {"precision": -1},
        {"precision": 3},
    ],
)
def test_attributes_out_of_range_are_refused(changed: dict[str, Any], kernels: Path) -> None:
    arrays = arrays_of(a=(4, 5), b=(5, 3))
    with pytest.raises(Exception, match="Product"):
        run(operator(arrays, **changed), arrays, kernels)


def test_a_second_output_is_refused(kernels: Path) -> None:
    arrays = arrays_of(a=(4, 5), b=(5, 3))
    model = operator(arrays)
    model.graph.node[0].output.append("z")
    with pytest.raises(Exception, match="Product"):
        run(model, arrays, kernels)


@pytest.mark.parametrize("shapes", [{"a": (4, 4), "b": (5, 3)}, {"a": (4, 5), "b": (4, 3)}])
def test_inputs_with_too_few_elements_are_refused(
    shapes: dict[str, tuple[int, ...]], kernels: Path
) -> None:
    arrays = arrays_of(**shapes)
    with pytest.raises(Exception, match="fewer elements"):
        run(operator(arrays), arrays, kernels)


def test_one_input_is_refused(kernels: Path) -> None:
    arrays = arrays_of(a=(4, 5))
    with pytest.raises(Exception, match="Product"):
        run(operator(arrays), arrays, kernels)


def test_a_product_of_each_domain_is_told_apart() -> None:
    plain = surrounded("matrices")
    plain.graph.node[0].domain = "other"
    assert DOMAIN not in {node.domain for node in with_kernels(plain).graph.node}
