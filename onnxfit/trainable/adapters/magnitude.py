r"""DoRA: the direction of a weight by an adapter, and its magnitude by a vector.

Liu et al. 2024, arXiv:2402.09353. With $V = W + s A B$ of (inputs, outputs) the layer computes
$y = x V \mathrm{diag}(m / \lVert V \rVert) + b$, where $\lVert V \rVert$ are the L2 norms of the
columns, one for each output. As in section 4.3 of the paper, the norms count as constants in the
gradient.

    g = m / |V|                     x -> MatMul(W) -> Add(s x A B) -> Mul(g) -> Add(b) -> y

The norms need no V: $\lVert v_j \rVert^2 = \lVert w_j \rVert^2 + (2 s A^T w_j + s^2 A^T A b_j)^T
b_j$. The most expensive part, $A^T W$, costs as much as r more rows of the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from onnxfit.trainable.adapters.adapter import Adapter
from onnxfit.trainable.adapters.nodes import NodeWriter

Array = npt.NDArray[Any]

OPTIONAL_BIAS = 11  # the first opset in which the bias of a Gemm is optional
# Multiplied by this power of 2, every norm of at least 2**-60 is a whole number, and no norm below
# 2**40 overflows float32.
WHOLE = 2.0**83
TINY = 1e-30  # under the root: a column of zeros has no direction


def write_scale(op: NodeWriter, adapter: Adapter, weight: Array) -> str:
    """Add the nodes of m / |V|, of shape (outputs,), or (1, outputs, 1, ...) for a Conv.

    - `weight`: the frozen weight as stored.
    """
    dtype, s = adapter.dtype, adapter.settings.scale
    matrix = adapter.weight.as_matrix(weight).astype(np.float64)
    squares = op.constant(np.square(matrix).sum(axis=0).astype(dtype))
    a, b = _matrices(op, adapter)  # (inputs, rank), (rank, outputs)
    a_flipped = op.node("Transpose", [a], perm=[1, 0])
    cross = op.node("Mul", [_projected(op, adapter, a), op.constant(np.array(2 * s, dtype))])
    square = op.node("MatMul", [op.node("MatMul", [a_flipped, a]), b])
    square = op.node("Mul", [square, op.constant(np.array(s * s, dtype))])
    terms = op.node("Mul", [op.node("Add", [cross, square]), b])
    ones = op.constant(np.ones(adapter.settings.rank, dtype))
    change = op.node("MatMul", [ones, terms])
    square = op.node("Abs", [op.node("Add", [squares, change])])  # rounding may make it negative
    norm = op.node("Sqrt", [op.node("Add", [square, op.constant(np.array(TINY, dtype))])])
    scale = op.node("Div", [adapter.magnitude, _without_gradient(op, norm, dtype)])
    if adapter.weight.kind == "conv":
        scale = _as_channels(op, scale, len(adapter.weight.shape))
    return scale


def _matrices(op: NodeWriter, adapter: Adapter) -> tuple[str, str]:
    """Return A of (inputs, rank) and B of (rank, outputs)."""
    if adapter.weight.kind != "conv":
        return adapter.a, adapter.b
    rank = adapter.settings.rank
    flat = [
        op.node("Reshape", [name, op.constant(np.array(shape, np.int64))])
        for name, shape in ((adapter.a, [rank, -1]), (adapter.b, [-1, rank]))
    ]
    a, b = (op.node("Transpose", [name], perm=[1, 0]) for name in flat)
    return a, b


def _projected(op: NodeWriter, adapter: Adapter, a: str) -> str:
    """Return the product of A, transposed, with the weight: (rank, outputs)."""
    weight = adapter.weight
    w = weight.name
    if weight.element_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        w = op.node("Cast", [w], to=TensorProto.FLOAT)
    if weight.kind == "conv":
        w = op.node("Reshape", [w, op.constant(np.array([weight.shape[0], -1], np.int64))])
    if weight.kind == "conv" or weight.is_flipped:
        return op.node("Transpose", [op.node("MatMul", [w, a])], perm=[1, 0])
    return op.node("MatMul", [op.node("Transpose", [a], perm=[1, 0]), w])


def _without_gradient(op: NodeWriter, value: str, dtype: np.dtype[Any]) -> str:
    """Return the same whole numbers without a gradient: Floor has no derivative."""
    whole = op.node("Mul", [value, op.constant(np.array(WHOLE, dtype))])
    floor = op.node("Floor", [whole])
    return op.node("Mul", [floor, op.constant(np.array(1 / WHOLE, dtype))])


def _as_channels(op: NodeWriter, values: str, rank: int) -> str:
    shape = np.array([1, -1, *[1] * (rank - 2)], np.int64)
    return op.node("Reshape", [values, op.constant(shape)])


def take_bias(op: NodeWriter, adapter: Adapter, layer: onnx.NodeProto) -> str:
    """Remove the bias of a layer, in place, and return the value to add to its output, or ""."""
    if layer.op_type not in ("Gemm", "Conv") or len(layer.input) < 3 or not layer.input[2]:
        return ""
    bias: str = layer.input[2]
    if layer.op_type == "Conv":
        del layer.input[2]
        return _as_channels(op, bias, len(adapter.weight.shape))
    if op.opset < OPTIONAL_BIAS:
        zero = op.unique("zero")
        op.graph.initializer.append(
            helper.make_tensor(zero, adapter.weight.element_type, [1], [0.0])
        )
        layer.input[2] = zero
    else:
        del layer.input[2]
    beta = next((item.f for item in layer.attribute if item.name == "beta"), 1.0)
    if beta == 1:
        return bias
    factor = op.unique("beta")
    op.graph.initializer.append(helper.make_tensor(factor, adapter.weight.element_type, [], [beta]))
    return op.node("Mul", [bias, factor])
