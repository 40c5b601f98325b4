"""Spellings of activations: how exporters write a Sigmoid, Softmax or LogSoftmax.

Each text computes y from scores z, float[N, 2], with the constants of `CONSTANTS`.
"""

from __future__ import annotations

import numpy as np
import onnx.parser

CONSTANTS = """float one = {1}, float two = {2}, float half = {0.5}, float minus = {-1},
    float zero = {0}, float least = {-1e30}, int64[1] axis = {1}, int64[1] last = {-1},
    int64[1] flat = {-1}, int64[2] column = {-1, 1}, int64[1] first = {0}, int64[1] second = {1},
    int64[1] third = {2}, int64[3] pairs = {-1, 1, 2}, int64[2] rows = {-1, 2},
    int64[1] middle = {2}"""

SIGMOIDS = {
    "Sigmoid": "y = Sigmoid(z)",
    "1 / (1 + exp(-z)) with Div": "n = Neg(z)  e = Exp(n)  d = Add(one, e)  y = Div(one, d)",
    "1 / (1 + exp(-z)) with Reciprocal": "n = Neg(z)  e = Exp(n)  d = Add(e, one)  y = Reciprocal(d)",
    "-z as a product": "n = Mul(z, minus)  e = Exp(n)  d = Add(one, e)  y = Reciprocal(d)",
    "-z as a difference": "n = Sub(zero, z)  e = Exp(n)  d = Add(one, e)  y = Div(one, d)",
    "ones that are broadcast": "s = Shape(z)  o = Expand(one, s)  n = Neg(z)  e = Exp(n)"
    "  d = Add(e, o)  y = Div(o, d)",
    "a power": "n = Neg(z)  e = Exp(n)  d = Add(one, e)  y = Pow(d, minus)",
    "exp(z) / (1 + exp(z))": "e = Exp(z)  d = Add(e, one)  y = Div(e, d)",
    "exp(z) times an inverse": "e = Exp(z)  d = Add(e, one)  r = Reciprocal(d)  y = Mul(r, e)",
    "tanh, added last": "a = Mul(half, z)  t = Tanh(a)  h = Mul(t, half)  y = Add(h, half)",
    "tanh, halved last": "a = Div(z, two)  t = Tanh(a)  d = Add(t, one)  y = Div(d, two)",
    "exp of a softplus": "n = Neg(z)  p = Softplus(n)  m = Neg(p)  y = Exp(m)",
    "copies between": "n = Neg(z)  i = Identity(n)  w = Cast<to = 11>(i)  e = Exp(w)"
    "  f = Cast<to = 1>(e)  d = Add(one, f)  y = Reciprocal(d)",
    "1 minus a sigmoid": "n = Neg(z)  p = Sigmoid(n)  y = Sub(one, p)",
    "two branches": "c = Less(z, zero)  n = Neg(z)  e = Exp(n)  d = Add(one, e)  p = Div(one, d)"
    "  f = Exp(z)  g = Add(one, f)  q = Div(f, g)  y = Where(c, q, p)",
    "moved": "p = Sigmoid(z)  t = Transpose<perm = [1, 0]>(p)  u = Unsqueeze(t, last)"
    "  s = Squeeze(u, last)  y = Transpose<perm = [1, 0]>(s)",
    "reshaped": "s = Shape(z)  p = Sigmoid(z)  r = Reshape(p, flat)  y = Reshape(r, s)",
    "split and joined": "p = Sigmoid(z)  l, r = Split<axis = 1>(p)  y = Concat<axis = 1>(l, r)",
    "cast": "w = Cast<to = 11>(z)  p = Sigmoid(w)  y = Cast<to = 1>(p)",
    "two classes of a softmax": "p = Reshape(z, pairs)  n = Neg(p)  zeros = Sub(p, p)"
    "  u = Unsqueeze(p, last)  v = Unsqueeze(zeros, last)  c = Concat<axis = -1>(v, u)"
    "  q = Softmax(c)  g = Gather<axis = 3>(q, second)  h = Squeeze(g, last)"
    "  y = Reshape(h, rows)",
}
MAXIMUM = "m = ReduceMax<axes = [1]>(z)  c = Sub(z, m)  e = Exp(c)"
JAX_MAXIMUM = (
    "m = ReduceMax<axes = [1], keepdims = 0>(z)  n = Max(least, m)  r = Reshape(n, column)"
    "  sh = Shape(z)  f = Expand(r, sh)  i = Identity(f)  c = Sub(z, i)"
)
SOFTMAXES = {
    "Softmax": "y = Softmax(z)",
    "first axis": "t = Transpose<perm = [1, 0]>(z)  p = Softmax<axis = 0>(t)"
    "  y = Transpose<perm = [1, 0]>(p)",
    "image": "u = Unsqueeze(z, middle)  v = Unsqueeze(u, last)  p = Softmax<axis = 1>(v)"
    "  y = Flatten(p)",
    "exp of a LogSoftmax": "l = LogSoftmax(z)  y = Exp(l)",
    "without a maximum": "e = Exp(z)  s = ReduceSum(e, axis)  y = Div(e, s)",
    "with a maximum": f"{MAXIMUM}  s = ReduceSum(e, axis)  y = Div(e, s)",
    "an axis from the end": f"{MAXIMUM}  s = ReduceSum(e, last)  y = Div(e, s)",
    "times an inverse": f"{MAXIMUM}  s = ReduceSum(e, axis)  r = Reciprocal(s)  y = Mul(e, r)",
    "ReduceL1": f"{MAXIMUM}  s = ReduceL1<axes = [1]>(e)  y = Div(e, s)",
    "unsqueezed": f"{MAXIMUM}  s = ReduceSum<keepdims = 0>(e, axis)  u = Unsqueeze(s, axis)"
    "  y = Div(e, u)",
    "reshaped": f"{MAXIMUM}  s = ReduceSum<keepdims = 0>(e, axis)  u = Reshape(s, column)"
    "  y = Div(e, u)",
    "JAX": f"{JAX_MAXIMUM}  e = Exp(c)  s = ReduceSum<keepdims = 0>(e, axis)"
    "  t = Reshape(s, column)  u = Expand(t, sh)  y = Div(e, u)",
    "copies between": f"{MAXIMUM}  w = Cast<to = 11>(e)  s = ReduceSum(w, axis)"
    "  f = Cast<to = 1>(s)  i = Identity(e)  y = Div(i, f)",
    "exponentials twice": f"{MAXIMUM}  g = Exp(c)  s = ReduceSum(g, axis)  y = Div(e, s)",
    "exp of a difference": "s = ReduceLogSumExp<axes = [1]>(z)  l = Sub(z, s)  y = Exp(l)",
    "the first axis of a sum": "t = Transpose<perm = [1, 0]>(z)  e = Exp(t)"
    "  s = ReduceSum<keepdims = 0>(e, first)  p = Div(e, s)  y = Transpose<perm = [1, 0]>(p)",
    "two classes": "f = Slice(z, first, second, axis)  g = Slice(z, second, third, axis)"
    "  h = Sub(g, f)  p = Sigmoid(h)  q = Sub(one, p)  y = Concat<axis = 1>(q, p)",
}
LOG_SOFTMAXES = {
    "LogSoftmax": "y = LogSoftmax(z)",
    "log of a Softmax": "p = Softmax(z)  y = Log(p)",
    "log of a spelled softmax": f"{MAXIMUM}  s = ReduceSum(e, axis)  p = Div(e, s)  y = Log(p)",
    "ReduceLogSumExp": "s = ReduceLogSumExp<axes = [1]>(z)  y = Sub(z, s)",
    "a logarithm": f"{MAXIMUM}  s = ReduceSum(e, axis)  l = Log(s)  y = Sub(c, l)",
    "ReduceLogSum": f"{MAXIMUM}  l = ReduceLogSum<axes = [1]>(e)  y = Sub(c, l)",
    "JAX": f"{JAX_MAXIMUM}  e = Exp(c)  s = ReduceSum<keepdims = 0>(e, axis)  l = Log(s)"
    "  t = Reshape(l, column)  u = Expand(t, sh)  y = Sub(c, u)",
    "a maximum added": f"{MAXIMUM}  s = ReduceSum(e, axis)  l = Log(s)  a = Add(l, m)"
    "  y = Sub(z, a)",
    "moved": "t = Transpose<perm = [1, 0]>(z)  p = Softmax<axis = 0>(t)  l = Log(p)"
    "  y = Transpose<perm = [1, 0]>(l)",
}
# Expressions that resemble an activation, and are none
OTHERS = {
    "2 + exp(-z)": "n = Neg(z)  e = Exp(n)  d = Add(two, e)  y = Reciprocal(d)",
    "1 / (1 + z)": "d = Add(one, z)  y = Div(one, d)",
    "a whole tanh": "t = Tanh(z)  d = Add(t, one)  y = Mul(d, half)",
    "the sum of another value": "e = Exp(z)  n = Neg(z)  f = Exp(n)  s = ReduceSum(f, axis)"
    "  y = Div(e, s)",
    "log of 2 exponentials": "e = Exp(z)  s = ReduceSum(e, axis)  d = Mul(two, s)  l = Log(d)"
    "  y = Sub(z, l)",
}


def network(text: str, bias: tuple[float, float], *, opset: int = 17) -> onnx.ModelProto:
    """A network whose scores z are x plus a trained bias."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[N, 2] x) => (float[N, 2] y) <float[2] b, {CONSTANTS}>
        {{ z = Add(x, b)  {text} }}""")
    tensor = onnx.numpy_helper.from_array(np.array(bias, np.float32), "b")
    model.graph.initializer.append(tensor)
    return model
