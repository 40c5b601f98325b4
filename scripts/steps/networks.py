"""The networks whose training steps the suite has, written in ONNX's text syntax.

Each is small, so that a step runs within milliseconds, and has sizes that differ from each other, so
that exchanged axes are noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx.parser
from onnx.numpy_helper import from_array

Array = npt.NDArray[Any]
BATCH = 5


@dataclass(frozen=True)
class Network:
    """A model, and what a batch of it looks like.

    - `graph`: the signature and the nodes, in ONNX's text syntax.
    - `weights`: the shape of each trained weight.
    - `constants`: tensors of the model that are not trained.
    - `x`: the shape of each input, or the number of classes of integer inputs.
    - `y`: the shape of the labels for "mse", or the number of classes.
    """

    graph: str
    weights: Mapping[str, Sequence[int]]
    y: tuple[int, ...] | int
    x: tuple[int, ...] = (4,)
    ids: int | None = None
    loss: str = "mse"
    constants: Mapping[str, Array] = field(default_factory=dict)

    def model(self, rng: np.random.Generator) -> onnx.ModelProto:
        """Return the model with random weights: matrices by their fan-in, scales near 1."""
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {self.graph}')
        for name, shape in self.weights.items():
            fan_in = int(np.prod(shape[1:])) if len(shape) > 2 else shape[0]
            values = rng.normal(size=shape) / np.sqrt(fan_in)
            if name.endswith(("scale", "var")):
                values = 1 + 0.1 * np.abs(values)
            model.graph.initializer.append(from_array(values.astype(np.float32), name))
        for name, array in self.constants.items():
            model.graph.initializer.append(from_array(np.asarray(array), name))
        onnx.checker.check_model(model, full_check=True)
        return model

    def batch(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return inputs and labels."""
        x = rng.normal(size=(BATCH, *self.x)).astype(np.float32)
        if self.ids is not None:
            x = rng.integers(0, self.ids, (BATCH, *self.x))
        if self.loss == "causal_lm":
            return x, x
        if isinstance(self.y, int):
            return x, rng.integers(0, self.y, BATCH)
        y = rng.normal(size=(BATCH, *self.y)).astype(np.float32)
        return x, (y > 0).astype(np.float32) if self.loss == "binary_cross_entropy" else y


def int64(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


def dense(activation: str) -> Network:
    return Network(
        f"""dense (float[N, 4] x) => (float[N, 3] y)
        {{ a = Gemm(x, w1, b1)  h = {activation}(a)  y = Gemm(h, w2, b2) }}""",
        {"w1": (4, 6), "b1": (6,), "w2": (6, 3), "b2": (3,)},
        (3,),
    )


def convolution(attributes: str, weight: Sequence[int], x: tuple[int, ...]) -> Network:
    """Convolution, mean over the positions, and a linear layer."""
    dims = ", ".join(map(str, x))
    return Network(
        f"""convolution (float[N, {dims}] x) => (float[N, 3] y)
        {{ c = Conv<{attributes}>(x, w, b)  r = Relu(c)  p = GlobalAveragePool(r)  f = Flatten(p)
           y = Gemm(f, w2, b2) }}""",
        {"w": weight, "b": weight[:1], "w2": (weight[0], 3), "b2": (3,)},
        3,
        x,
        loss="cross_entropy",
    )


def recurrent(kind: str, gates: int, extra: str = "") -> Network:
    """One recurrent layer, whose last hidden state is classified."""
    outputs = "all, last, cell" if kind == "LSTM" else "all, last"
    return Network(
        f"""recurrent (float[N, 6, 3] x) => (float[N, 4] y)
        {{ t = Transpose<perm = [1, 0, 2]>(x)  {outputs} = {kind}<hidden_size = 5{extra}>(t, w, r, b)
           s = Squeeze(last, axes)  y = Gemm(s, w2, b2) }}""",
        {
            "w": (1, gates * 5, 3),
            "r": (1, gates * 5, 5),
            "b": (1, 2 * gates * 5),
            "w2": (5, 4),
            "b2": (4,),
        },
        4,
        (6, 3),
        loss="cross_entropy",
        constants={"axes": int64(0)},
    )


_ATTENTION = """
    q = MatMul(n, wq)  k = MatMul(n, wk)  v = MatMul(n, wv)
    qs = Reshape(q, heads)  ks = Reshape(k, heads)  vs = Reshape(v, heads)
    qh = Transpose<perm = [0, 2, 1, 3]>(qs)  kh = Transpose<perm = [0, 2, 3, 1]>(ks)
    vh = Transpose<perm = [0, 2, 1, 3]>(vs)
    scores = MatMul(qh, kh)  scaled = Mul(scores, scaling){mask}  p = Softmax<axis = -1>({masked})
    o = MatMul(p, vh)  ot = Transpose<perm = [0, 2, 1, 3]>(o)  of = Reshape(ot, joined)
    a = MatMul(of, wo)  r = Add(e, a)
    m = LayerNormalization<axis = -1>(r, m_scale, m_bias)
    f1 = MatMul(m, w1)  f2 = Add(f1, b1)  {activation}  f3 = MatMul(f, w2)
    g = Add(r, f3)"""

_BLOCK = {
    "n_scale": (8,), "n_bias": (8,), "wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "wo": (8, 8),
    "m_scale": (8,), "m_bias": (8,), "w1": (8, 12), "b1": (12,), "w2": (12, 8),
}  # fmt: skip

_SHAPES = {
    "heads": int64(0, 0, 2, 4), "joined": int64(0, 0, 8), "scaling": np.float32(0.5),
    "half": np.float32(0.5), "one": np.float32(1), "root": np.float32(np.sqrt(2)),
}  # fmt: skip
_GELU = "fd = Div(f2, root)  fe = Erf(fd)  fp = Add(fe, one)  fm = Mul(f2, fp)  f = Mul(fm, half)"


def transformer(*, causal: bool) -> Network:
    """One block with two heads: an encoder that classifies, or a decoder of the next token."""
    if causal:
        mask = np.triu(np.full((7, 7), -1e9, np.float32), 1)
        attention = _ATTENTION.format(
            mask="  hidden = Add(scaled, mask)", masked="hidden", activation=_GELU
        )
        return Network(
            f"""decoder (int64[N, 7] ids) => (float[N, 7, 11] logits)
            {{ t = Gather(table, ids)  e = Add(t, positions)
               n = LayerNormalization<axis = -1>(e, n_scale, n_bias) {attention}
               logits = MatMul(g, head) }}""",
            {"table": (11, 8), "positions": (7, 8), **_BLOCK, "head": (8, 11)},
            (7,),
            (7,),
            ids=11,
            loss="causal_lm",
            constants={**_SHAPES, "mask": mask},
        )
    attention = _ATTENTION.format(mask="", masked="scaled", activation="f = Relu(f2)")
    return Network(
        f"""encoder (float[N, 7, 8] e) => (float[N, 3] y)
        {{ n = LayerNormalization<axis = -1>(e, n_scale, n_bias) {attention}
           c = ReduceMean<axes = [1], keepdims = 0>(g)  y = Gemm(c, wy, by) }}""",
        {**_BLOCK, "wy": (8, 3), "by": (3,)},
        3,
        (7, 8),
        loss="cross_entropy",
        constants={k: v for k, v in _SHAPES.items() if k in ("heads", "joined", "scaling")},
    )


NETWORKS: dict[str, Network] = {
    "linear": Network(
        "linear (float[N, 4] x) => (float[N, 3] y) { y = Gemm(x, w, b) }",
        {"w": (4, 3), "b": (3,)},
        (3,),
    ),
    "logistic": Network(
        "logistic (float[N, 4] x) => (float[N, 1] y) { a = MatMul(x, w)  s = Add(a, b)  y = Sigmoid(s) }",
        {"w": (4, 1), "b": (1,)},
        (1,),
        loss="binary_cross_entropy",
    ),
    "dense_tanh": dense("Tanh"),
    "dense_relu": dense("Relu"),
    "dense_elu": dense("Elu"),
    "conv1d": convolution("pads = [1, 1]", (6, 3, 3), (3, 9)),
    "conv2d": convolution("pads = [1, 1, 1, 1], strides = [2, 2]", (6, 2, 3, 3), (2, 8, 9)),
    "conv2d_dilated": convolution("dilations = [2, 2]", (6, 2, 3, 3), (2, 8, 9)),
    "conv3d": convolution("pads = [0, 1, 0, 0, 1, 0]", (4, 2, 2, 3, 2), (2, 4, 5, 6)),
    "conv_depthwise": convolution("group = 4, pads = [1, 1, 1, 1]", (4, 1, 3, 3), (4, 6, 7)),
    "conv_grouped": convolution('group = 2, auto_pad = "SAME_UPPER"', (6, 2, 3, 3), (4, 6, 7)),
    "lenet": Network(
        """lenet (float[N, 1, 8, 10] x) => (float[N, 3] y)
        { c = Conv<pads = [1, 1, 1, 1]>(x, w, b)  r = Relu(c)
          p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)  f = Flatten(p)  y = Gemm(f, w2, b2) }""",
        {"w": (4, 1, 3, 3), "b": (4,), "w2": (80, 3), "b2": (3,)},
        3,
        (1, 8, 10),
        loss="cross_entropy",
    ),
    "average_pool": Network(
        """average (float[N, 2, 8, 6] x) => (float[N, 3] y)
        { c = Conv(x, w)  p = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(c)  f = Flatten(p)
          y = MatMul(f, w2) }""",
        {"w": (3, 2, 3, 3), "w2": (18, 3)},
        (3,),
        (2, 8, 6),
    ),
    "batch_norm": Network(
        """normalized (float[N, 2, 6, 7] x) => (float[N, 3] y)
        { c = Conv<pads = [1, 1, 1, 1]>(x, w)  n = BatchNormalization(c, scale, bias, mean, var)
          r = Relu(n)  p = GlobalAveragePool(r)  f = Flatten(p)  y = Gemm(f, w2, b2) }""",
        {
            "w": (4, 2, 3, 3),
            "scale": (4,),
            "bias": (4,),
            "mean": (4,),
            "var": (4,),
            "w2": (4, 3),
            "b2": (3,),
        },
        3,
        (2, 6, 7),
        loss="cross_entropy",
    ),
    "residual": Network(
        """residual (float[N, 3, 6, 5] x) => (float[N, 4] y)
        { a = Conv<pads = [1, 1, 1, 1]>(x, w1)  n = BatchNormalization(a, scale, bias, mean, var)
          r = Relu(n)  c = Conv<pads = [1, 1, 1, 1]>(r, w2)  s = Conv(x, w3)  t = Add(c, s)
          u = Relu(t)  p = ReduceMean<axes = [2, 3], keepdims = 0>(u)  y = Gemm(p, w4, b4) }""",
        {
            "w1": (4, 3, 3, 3),
            "scale": (4,),
            "bias": (4,),
            "mean": (4,),
            "var": (4,),
            "w2": (6, 4, 3, 3),
            "w3": (6, 3, 1, 1),
            "w4": (6, 4),
            "b4": (4,),
        },
        4,
        (3, 6, 5),
        loss="cross_entropy",
    ),
    "instance_norm": Network(
        """styled (float[N, 2, 6, 7] x) => (float[N, 2, 6, 7] y)
        { c = Conv<pads = [1, 1, 1, 1]>(x, w)  n = InstanceNormalization(c, scale, bias)
          y = LeakyRelu<alpha = 0.1>(n) }""",
        {"w": (2, 2, 3, 3), "scale": (2,), "bias": (2,)},
        (2, 6, 7),
        (2, 6, 7),
    ),
    "autoencoder": Network(
        """autoencoder (float[N, 1, 8, 6] x) => (float[N, 1, 8, 6] y)
        { c = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w, b)  r = Relu(c)
          t = ConvTranspose<strides = [2, 2], pads = [1, 1, 1, 1], output_padding = [1, 1]>(r, w2, b2)
          y = Sigmoid(t) }""",
        {"w": (4, 1, 3, 3), "b": (4,), "w2": (4, 1, 3, 3), "b2": (1,)},
        (1, 8, 6),
        (1, 8, 6),
    ),
    "unet": Network(
        """unet (float[N, 2, 8, 6] x) => (float[N, 1, 8, 6] y)
        { a = Conv<pads = [1, 1, 1, 1]>(x, w1)  r = Relu(a)
          p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)  c = Conv<pads = [1, 1, 1, 1]>(p, w2)
          t = Relu(c)  u = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric",
            nearest_mode = "floor">(t, , scales)
          j = Concat<axis = 1>(r, u)  y = Conv<pads = [1, 1, 1, 1]>(j, w3, b3) }""",
        {"w1": (3, 2, 3, 3), "w2": (4, 3, 3, 3), "w3": (1, 7, 3, 3), "b3": (1,)},
        (1, 8, 6),
        (2, 8, 6),
        constants={"scales": np.array([1, 1, 2, 2], np.float32)},
    ),
    "bilinear": Network(
        """bilinear (float[N, 2, 5, 4] x) => (float[N, 2, 10, 8] y)
        { c = Conv<pads = [1, 1, 1, 1]>(x, w)
          y = Resize<mode = "linear", coordinate_transformation_mode = "half_pixel">(c, , scales) }""",
        {"w": (2, 2, 3, 3)},
        (2, 10, 8),
        (2, 5, 4),
        constants={"scales": np.array([1, 1, 2, 2], np.float32)},
    ),
    "lstm": recurrent("LSTM", 4),
    "gru": recurrent("GRU", 3, ", linear_before_reset = 1"),
    "rnn": recurrent("RNN", 1),
    "embedding": Network(
        """words (int64[N, 6] ids) => (float[N, 3] y)
        { e = Gather(table, ids)  m = ReduceMean<axes = [1], keepdims = 0>(e)  y = Gemm(m, w, b) }""",
        {"table": (9, 4), "w": (4, 3), "b": (3,)},
        3,
        (6,),
        ids=9,
        loss="cross_entropy",
    ),
    "encoder": transformer(causal=False),
    "decoder": transformer(causal=True),
    "mixture": Network(
        """mixture (float[N, 6] x) => (float[N, 2] y)
        { g = MatMul(x, gate)  s = Softmax<axis = 1>(g)  e = Einsum<equation = "bi,kio->bko">(x, experts)
          u = Unsqueeze(s, last)  m = Mul(e, u)  y = ReduceSum<keepdims = 0>(m, middle) }""",
        {"gate": (6, 3), "experts": (3, 6, 2)},
        (2,),
        (6,),
        constants={"last": int64(2), "middle": int64(1)},
    ),
    "siamese": Network(
        """siamese (float[N, 2, 6] x) => (float[N, 1] y)
        { a, b = Split<axis = 1>(x)  p = MatMul(a, w)  q = MatMul(b, w)  d = Sub(p, q)  m = Abs(d)
          f = Flatten(m)  y = MatMul(f, w2) }""",
        {"w": (6, 5), "w2": (5, 1)},
        (1,),
        (2, 6),
    ),
}
