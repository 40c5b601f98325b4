"""Undamaged models: small networks that between them use what ONNX models are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx.parser
from onnx.numpy_helper import from_array

from onnxfit.losses import CrossEntropy
from tests.models import convolutional, mlp, two_outputs


def _parse(text: str, opset: int = 17, functions_text: str = "") -> onnx.ModelProto:
    head = (
        f'<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.ml": 3, "com.microsoft": 1,'
        ' "local": 1]>'
    )
    return onnx.parser.parse_model(f"{head} seed {text}{functions_text}")


def _random_weights(model: onnx.ModelProto, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    model.graph.initializer.extend(
        from_array(rng.normal(size=shape).astype(np.float32) / 4, name)
        for name, shape in shapes.items()
    )
    return model


def lstm() -> onnx.ModelProto:
    text = """(float[2, 3, 3] x) => (float[2, 2] y)
        { t = Transpose<perm = [1, 0, 2]>(x)
          s = LSTM<hidden_size = 4>(t, w, r, b)  e = ReduceMean<axes = [0, 1], keepdims = 0>(s)  f = Flatten(e)  y = MatMul(f, v) }"""
    return _random_weights(_parse(text), w=(1, 16, 3), r=(1, 16, 4), b=(1, 32), v=(4, 2))


def attention() -> onnx.ModelProto:
    text = """(float[N, 4, 6] x) => (float[N, 4, 6] y) <float scale = {0.4}, int64[4] heads = {0, 0, 2, 3}, int64[3] joined = {0, 0, 6}>
        { q = MatMul(x, wq)  k = MatMul(x, wk)  v = MatMul(x, wv)  q4 = Reshape(q, heads)  k4 = Reshape(k, heads)  v4 = Reshape(v, heads)
          qt = Transpose<perm = [0, 2, 1, 3]>(q4)  kt = Transpose<perm = [0, 2, 3, 1]>(k4)  vt = Transpose<perm = [0, 2, 1, 3]>(v4)
          s = MatMul(qt, kt)  t = Mul(s, scale)  p = Softmax<axis = -1>(t)  o = MatMul(p, vt)  ot = Transpose<perm = [0, 2, 1, 3]>(o)
          j = Reshape(ot, joined)  r = Add(j, x)  n = LayerNormalization<axis = -1>(r, g, h)  y = Gelu(n) }"""
    return _random_weights(_parse(text, opset=20), wq=(6, 6), wk=(6, 6), wv=(6, 6), g=(6,), h=(6,))


def control_flow() -> onnx.ModelProto:
    text = """(float[N, 2] x) => (float[N, 2] y) <int64 three = {3}, bool yes = {1}, float[2] start = {0, 0}, float zero = {0}>
        { m = MatMul(x, w)  total = ReduceSum<keepdims = 0>(m)  positive = Greater(total, zero)
          c = If (positive) <then_branch = t () => (float[N, 2] a) { a = Tanh(m) }, else_branch = e () => (float[N, 2] n) { n = Mul(m, b) }>
          l, seen = Loop (three, yes, c) <body = pass (int64 i, bool go, float[N, 2] h) => (bool on, float[N, 2] k, float[N, 2] z)
            { on = Identity(go)  k = Mul(h, b)  z = Identity(k) }>
          last, steps = Scan<num_scan_inputs = 1, body = step (float[2] carry, float[2] row) => (float[2] next, float[2] kept)
            { next = Add(carry, row)  kept = Identity(next) }>(start, l)
          y = Add(l, steps) }"""
    return _random_weights(_parse(text), w=(2, 2), b=(2,))


def functions() -> onnx.ModelProto:
    functions_text = """
        <domain: "local", opset_import: ["": 17, "local": 1]> dense <slope: float = 0.1> (u, v, w) => (o)
        { m = MatMul(u, v)  s = Add(m, w)  o = local.leaky<slope: float = @slope>(s) }
        <domain: "local", opset_import: ["": 17]> leaky <slope: float = 0.1> (u) => (o) { o = LeakyRelu<alpha: float = @slope>(u) }"""
    text = (
        "(float[N, 3] x) => (float[N, 2] y) { h = local.dense<slope = 0.2>(x, w, b)  y ="
        " local.dense(h, v, c) }"
    )
    return _random_weights(
        _parse(text, functions_text=functions_text), w=(3, 4), b=(4,), v=(4, 2), c=(2,)
    )


def classical() -> onnx.ModelProto:
    rows = [oh.make_tensor_value_info("X", onnx.TensorProto.FLOAT, ["N", 3])]
    outputs = [oh.make_tensor_value_info("label", onnx.TensorProto.INT64, ["N"])]
    outputs.append(oh.make_tensor_value_info("probabilities", onnx.TensorProto.FLOAT, ["N", 3]))
    ml = {"domain": "ai.onnx.ml"}
    nodes = [
        oh.make_node("Scaler", ["X"], ["scaled"], offset=[0.1, 0.2, 0.3], scale=[1.0, 2.0, 3.0], **ml),
        oh.make_node(
            "LinearClassifier", ["scaled"], ["label", "scores"], coefficients=[0.1 * i for i in range(9)], intercepts=[0.0, 0.1, 0.2],
            classlabels_ints=[0, 1, 2], multi_class=1, post_transform="SOFTMAX", **ml,
        ),
        oh.make_node("Normalizer", ["scores"], ["probabilities"], norm="L1", **ml),
    ]  # fmt: skip
    graph = oh.make_graph(nodes, "g", rows, outputs)
    return oh.make_model(
        graph,
        opset_imports=[oh.make_opsetid("", 17), oh.make_opsetid("ai.onnx.ml", 1)],
        ir_version=8,
    )


def trees() -> onnx.ModelProto:
    """A linear regression, with a tree and a SVM on the side."""
    ml = {"domain": "ai.onnx.ml"}
    nodes = [
        oh.make_node("MatMul", ["X", "w"], ["h"]),
        oh.make_node(
            "TreeEnsembleRegressor", ["X"], ["t"], n_targets=1, nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], nodes_featureids=[0, 0, 0],
            nodes_values=[0.5, 0.0, 0.0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
            target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0], target_weights=[1.0, -1.0], **ml,
        ),
        oh.make_node(
            "SVMRegressor", ["X"], ["s"], kernel_type="RBF", kernel_params=[0.5, 0.0, 3.0], n_supports=2, coefficients=[1.0, -1.0],
            support_vectors=[0.0, 1.0, 1.0, 0.0, 0.5, 2.0], rho=[0.1], **ml,
        ),
        oh.make_node("LinearRegressor", ["h"], ["l"], coefficients=[1.0, 2.0], intercepts=[0.5], **ml),
        oh.make_node("Sum", ["t", "s", "l"], ["y"]),
    ]  # fmt: skip
    values = [
        oh.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["N", k])
        for n, k in (("X", 3), ("y", 1))
    ]
    graph = oh.make_graph(
        nodes, "g", values[:1], values[1:], [from_array(np.eye(3, 2, dtype=np.float32), "w")]
    )
    return oh.make_model(
        graph,
        opset_imports=[oh.make_opsetid("", 17), oh.make_opsetid("ai.onnx.ml", 3)],
        ir_version=8,
    )


def sequences() -> onnx.ModelProto:
    text = """(float[N, 4] x) => (float[N, 2] y, string[2] same, seq(float[N, 2]) both)
        <int64[2] sizes = {2, 2}, int64 one = {1}>
        { h = MatMul(x, w)  parts = SplitToSequence<axis = 1>(h, sizes)  part = SequenceAt(parts, one)  same = Identity(word)
          y = MatMul(part, v)  both = SequenceConstruct(y, part) }"""
    model = _random_weights(_parse(text), w=(4, 4), v=(2, 2))
    model.graph.initializer.append(
        oh.make_tensor("word", onnx.TensorProto.STRING, [2], [b"one", b"two"])
    )
    return model


def shaped() -> onnx.ModelProto:
    """Sizes computed inside, an embedding, half precision, a convolution that is transposed,
    resizing.
    """
    text = """(int64[N, 4] ids, float[N, 1, 4, 4] image) => (float[N, 3] y)
        <int64 zero = {0}, int64[1] minus = {-1}, int64[1] first = {0}, float[4] scales = {1, 1, 2, 2}>
        { e = Gather(table, ids)  sizes = Shape(e)  n = Gather(sizes, zero)  n1 = Unsqueeze(n, first)  to = Concat<axis = 0>(n1, minus)
          flat = Reshape(e, to)  half = Cast<to = 10>(flat)  full = Cast<to = 1>(half)  a = MatMul(full, w)
          c = ConvTranspose<strides = [2, 2]>(image, kernel)  u = Resize<mode = "linear">(c, , scales)  p = GlobalAveragePool(u)
          f = Flatten(p)  i = InstanceNormalization(u, s, s)  top, where = TopK<axis = -1>(i, one)  m = ReduceMean(top, axes)
          g = Add(a, f)  k = Einsum<equation = "ij,ij->ij">(g, g)  y = Add(k, m) }"""
    model = _random_weights(
        _parse(text, opset=18), table=(5, 2), w=(8, 3), kernel=(1, 3, 2, 2), s=(3,)
    )
    model.graph.initializer.append(from_array(np.array([1], np.int64), "one"))
    model.graph.initializer.append(from_array(np.array([2, 3], np.int64), "axes"))
    for node in model.graph.node:
        if node.op_type == "ReduceMean":
            node.attribute.append(oh.make_attribute("keepdims", 0))
    return model


def quantized() -> onnx.ModelProto:
    text = """(float[N, 3] x) => (float[N, 2] y) <float scale = {0.05}, uint8 zero = {128}>
        { q = QuantizeLinear(x, scale, zero)  d = DequantizeLinear(q, scale, zero)  h = MatMul(d, w)  r = Relu(h)
          q2, s2, z2 = DynamicQuantizeLinear(r)  d2 = DequantizeLinear(q2, s2, z2)  y = Add(d2, r) }"""
    return _random_weights(_parse(text, opset=19), w=(3, 2))


def newer() -> onnx.ModelProto:
    text = (
        "(float[N, 4] x) => (float[N, 2] y) { n = RMSNormalization<axis = -1>(x, s)  h = MatMul(n,"
        " w)  z = Swish(h)  y = Identity(z) }"
    )
    return _random_weights(_parse(text, opset=24), s=(4,), w=(4, 2))


def older() -> onnx.ModelProto:
    """Opset 7, when sizes were attributes, and a Dropout, a GRU and an Upsample as they were."""
    text = """(float[2, 5, 3] x) => (float[2, 4] y)
        { t = Transpose<perm = [1, 0, 2]>(x)  h, last = GRU<hidden_size = 4>(t, w, r, b)  d = Dropout<ratio = 0.3>(last)
        c = Clip<min = -1.0, max = 1.0>(d)  s = Slice<axes = [2], starts = [0], ends = [4]>(c)
          q = Squeeze<axes = [0]>(s)  y = Softmax<axis = 1>(q) }"""
    return _random_weights(_parse(text, opset=7), w=(1, 12, 3), r=(1, 12, 4), b=(1, 24))


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], Any]] = {
    "mlp": (mlp, "cross_entropy"),
    "convolutional": (lambda: convolutional(dropout=0.25), "cross_entropy"),
    "two_outputs": (two_outputs, {"a": "mse", "b": "mae"}),
    "lstm": (lstm, "mse"),
    "attention": (attention, "huber"),
    "control_flow": (control_flow, "mse"),
    "functions": (functions, "mse"),
    "classical": (classical, {"probabilities": CrossEntropy(from_logits=False)}),
    "trees": (trees, "mse"),
    "sequences": (sequences, {"y": "mse"}),
    "shaped": (shaped, "mse"),
    "quantized": (quantized, "mse"),
    "newer": (newer, "mse"),
    "older": (older, "mse"),
}


@functools.cache
def model_bytes(name: str) -> bytes:
    return MODELS[name][0]().SerializeToString()
