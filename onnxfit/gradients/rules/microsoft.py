"""Operators of com.microsoft that exporters and onnxruntime's optimizer emit, written out.

Their definitions are those of onnxruntime's documentation (docs/ContribOperators.md); tests compare
each with onnxruntime's own kernel.
"""

from __future__ import annotations

import numpy as np

from onnxfit.gradients.building import MICROSOFT, arange, transpose_matrices
from onnxfit.gradients.table import Gradients, decompose, gradient
from onnxfit.graph.values import GraphBuilder, Value


@decompose("Gelu", MICROSOFT)
def gelu(op: GraphBuilder, x: Value) -> Value:
    return op.Gelu(x)


@decompose("FastGelu", MICROSOFT)
def fast_gelu(op: GraphBuilder, x: Value, bias: Value | None) -> Value:
    return op.Gelu(x if bias is None else x + bias, approximate="tanh")


@decompose("QuickGelu", MICROSOFT)
def quick_gelu(op: GraphBuilder, x: Value, *, alpha: float = 1.702) -> Value:
    return x * op.Sigmoid(alpha * x)


@decompose("BiasGelu", MICROSOFT)
def bias_gelu(op: GraphBuilder, x: Value, bias: Value) -> Value:
    return op.Gelu(x + bias)


@decompose("BiasSplitGelu", MICROSOFT)
def bias_split_gelu(op: GraphBuilder, x: Value, bias: Value) -> Value:
    left, right = op.Split(x + bias, _outputs=2, axis=-1, num_outputs=2)
    return left * op.Gelu(right)


@decompose("BiasAdd", MICROSOFT)
def bias_add(op: GraphBuilder, x: Value, bias: Value, skip: Value) -> Value:
    return x + bias + skip


@decompose("BiasSoftmax", MICROSOFT)
def bias_softmax(op: GraphBuilder, x: Value, bias: Value, *, axis: int = 1) -> Value:
    """Over all axes from `axis` on.

    `is_inner_broadcast` only tells the kernel along which axes the bias is broadcast, as in Add.
    """
    total = x + bias
    axis %= total.rank
    if axis == total.rank - 1:
        return op.Softmax(total)
    flat = op.Reshape(total, op.Concat(op.shape(total, 0, axis), [-1], axis=0))
    return op.Reshape(op.Softmax(flat), op.shape(total))


@decompose("Trilu", MICROSOFT)
def trilu(op: GraphBuilder, x: Value, k: Value | None, *, upper: int = 1) -> Value:
    return op.Trilu(x, k, upper=upper)


@gradient("Inverse", MICROSOFT)
def inverse(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    """-y^T dy y^T"""
    turned = transpose_matrices(op, y)
    return -(turned @ dy @ turned)


@decompose("EmbedLayerNormalization", MICROSOFT)
def embed_layer_normalization(
    op: GraphBuilder, ids: Value, segments: Value | None, words: Value, positions: Value, segment_table: Value | None, gamma: Value, beta: Value,
    mask: Value | None, position_ids: Value | None, *, epsilon: float = 1e-12,
) -> tuple[Value, ...]:  # fmt: skip
    """The further outputs are how many tokens of each row the mask shows, and the sum that is
    normalised.
    """
    if position_ids is None:
        length = op.shape(ids, 1, 2)
        position_ids = arange(op, length)
    total = op.Gather(words, ids) + op.Gather(positions, position_ids)
    if segments is not None and segment_table is not None:
        total = total + op.Gather(segment_table, segments)
    if mask is None:
        shown = op.Expand(op.constant(np.int32(0)), op.shape(ids, 0, 1))
    else:
        shown = op.ReduceSum(op.cast(mask == 1, np.int32), [1], keepdims=0)
    return op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon), shown, total
