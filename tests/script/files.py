"""Files as strangers export them, by the kind of their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
from onnx.numpy_helper import from_array

from tests.models import mlp


def parsed(body: str, weights: dict[str, tuple[int, ...]] | None = None) -> onnx.ModelProto:
    """A model in ONNX's text form, with random weights of these shapes."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {body}')
    rng = np.random.default_rng(0)
    for name, shape in (weights or {}).items():
        array = (rng.standard_normal(shape) / 4).astype(np.float32)
        model.graph.initializer.append(from_array(array, name))
    return model


def image_classifier() -> onnx.ModelProto:
    return parsed(
        """g (float[batch, 3, height, width] image) => (float[batch, 5] y)
        { a = Conv<pads = [1, 1, 1, 1]>(image, kernel, bias) b = Relu(a) c = GlobalAveragePool(b)
          d = Flatten(c) e = Gemm(d, head, offset) y = Softmax(e) }""",
        {"kernel": (4, 3, 3, 3), "bias": (4,), "head": (4, 5), "offset": (5,)},
    )


def transformer() -> onnx.ModelProto:
    """One head of attention over token ids, under a mask; scores of the next token."""
    return parsed(
        """g (int64[batch, tokens] input_ids, int64[batch, tokens] attention_mask)
        => (float[batch, tokens, 11] scores)
        <int64[1] one = {1}, float big = {-10000}, float unit = {1}>
        { x = Gather(table, input_ids) q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
          kt = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, kt)
          m = Cast<to = 1>(attention_mask) hidden = Sub(unit, m) shift = Mul(hidden, big)
          wide = Unsqueeze(shift, one) masked = Add(s, wide) p = Softmax(masked) h = MatMul(p, v)
          scores = MatMul(h, out) }""",
        {"table": (11, 8), "wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "out": (8, 11)},
    )


def recurrent() -> onnx.ModelProto:
    """An LSTM over chunks of a sound, whose states go on in the next chunk."""
    return parsed(
        """g (float[batch, samples] audio, float[1, batch, 4] h0, float[1, batch, 4] c0, int64 sr)
        => (float[batch, 1] speech, float[1, batch, 4] hn, float[1, batch, 4] cn)
        <int64[1] zero = {0}, int64[1] last = {2}, int64 rate = {16000}>
        { t = Unsqueeze(audio, last) steps = Transpose<perm = [1, 0, 2]>(t)
          all, hn, cn = LSTM<hidden_size = 4>(steps, W, R, , , h0, c0)
          is_known = Equal(sr, rate) factor = Cast<to = 1>(is_known)
          h = Squeeze(hn, zero) z = MatMul(h, head) scaled = Mul(z, factor)
          speech = Sigmoid(scaled) }""",
        {"W": (1, 16, 1), "R": (1, 16, 4), "head": (4, 1)},
    )


def several_outputs() -> onnx.ModelProto:
    """Classes, a number, and the class of integers, which can have no loss."""
    return parsed(
        """g (float[N, 4] x) => (float[N, 3] kind, float[N, 1] size, int64[N, 1] best)
        { h = MatMul(x, w) a = Tanh(h) s = MatMul(a, u) kind = LogSoftmax(s)
          size = MatMul(a, v) best = ArgMax<axis = 1>(s) }""",
        {"w": (4, 8), "u": (8, 3), "v": (8, 1)},
    )


def fixed_batch() -> onnx.ModelProto:
    return parsed(
        """g (float[2, 4] x) => (float[2, 3] y) <int64[2] s = {2, 8}>
        { h = MatMul(x, w) r = Reshape(h, s) y = MatMul(r, v) }""",
        {"w": (4, 8), "v": (8, 3)},
    )


def line_reader() -> onnx.ModelProto:
    """Classes for each column of an image, over time, as models that read texts have them."""
    return parsed(
        """g (float[batch, 1, 8, width] line) => (float[width, batch, 6] logits)
        <int64[1] two = {2}>
        { c = Conv<pads = [0, 1, 0, 1]>(line, kernel) d = Squeeze(c, two)
          e = Transpose<perm = [2, 0, 1]>(d) s = MatMul(e, head) logits = LogSoftmax(s) }""",
        {"kernel": (4, 1, 8, 3), "head": (4, 6)},
    )


def integers() -> onnx.ModelProto:
    """Weights of 8 bits behind DequantizeLinear; one is read as integers, too."""
    model = parsed(
        """g (int64[batch, tokens] ids) => (float[batch, tokens, 3] logits)
        <float scale = {0.02}, int8 zero = {0}>
        { whole = DequantizeLinear(table, scale, zero) x = Gather(whole, ids)
          numbers = Cast<to = 1>(table) norm = ReduceMean<keepdims = 0>(numbers)
          w = DequantizeLinear(weight, scale, zero) h = MatMul(x, w) a = Add(h, norm)
          logits = MatMul(a, head) }""",
        {"head": (4, 3)},
    )
    rng = np.random.default_rng(1)
    for name, shape in {"table": (9, 4), "weight": (4, 4)}.items():
        model.graph.initializer.append(from_array(rng.integers(-99, 99, shape, np.int8), name))
    return model


def half_precision() -> onnx.ModelProto:
    return parsed(
        "g (float16[N, 2] x) => (float16[N, 1] y) <float16[2, 1] w = {1, 2}> { y = MatMul(x, w) }"
    )


def graph_network() -> onnx.ModelProto:
    """Edges between nodes: two sizes that the data may choose, so that no axis counts rows."""
    return parsed(
        """g (float[nodes, 3] features, int64[edges] source) => (float[edges, 1] y)
        { h = MatMul(features, w) e = Gather(h, source) y = MatMul(e, v) }""",
        {"w": (3, 4), "v": (4, 1)},
    )


# Name -> the file, and the losses of its script
FILES: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, str]]] = {
    "mlp": (mlp, {"y": "mean_squared_error"}),
    "image_classifier": (image_classifier, {"y": "cross_entropy"}),
    "transformer": (transformer, {"scores": "causal_lm"}),
    "recurrent": (recurrent, {"speech": "binary_cross_entropy"}),
    "several_outputs": (
        several_outputs,
        {"kind": "cross_entropy", "size": "mean_squared_error"},
    ),
    "fixed_batch": (fixed_batch, {"y": "mean_squared_error"}),
    "line_reader": (line_reader, {"logits": "cross_entropy"}),
    "integers": (integers, {"logits": "cross_entropy"}),
    "half_precision": (half_precision, {"y": "mean_squared_error"}),
    "graph_network": (graph_network, {"y": "mean_squared_error"}),
}
