"""Operators of com.microsoft, which exporters and onnxruntime's optimizer emit, in ONNX's own.

The definitions are those of onnxruntime's documentation (docs/ContribOperators.md); tests compare
each with onnxruntime's own kernel.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.building import MICROSOFT, arange, transpose_matrices
from onnxfit.gradients.table import Gradients, decompose, rule
from onnxfit.graph.inference import same_type_and_rank, same_type_and_shape
from onnxfit.graph.values import GraphBuilder, Value


@decompose("Gelu", MICROSOFT, infer=same_type_and_shape)
def gelu(op: GraphBuilder, x: Value) -> Value:
    return op.Gelu(x)


@decompose("FastGelu", MICROSOFT, infer=same_type_and_shape)
def fast_gelu(op: GraphBuilder, x: Value, bias: Value | None) -> Value:
    return op.Gelu(x if bias is None else x + bias, approximate="tanh")


@decompose("QuickGelu", MICROSOFT, infer=same_type_and_shape)
def quick_gelu(op: GraphBuilder, x: Value, *, alpha: float = 1.702) -> Value:
    return x * op.Sigmoid(alpha * x)


@decompose("BiasGelu", MICROSOFT, infer=same_type_and_shape)
def bias_gelu(op: GraphBuilder, x: Value, bias: Value) -> Value:
    return op.Gelu(x + bias)


@decompose("BiasSplitGelu", MICROSOFT, infer=same_type_and_rank)
def bias_split_gelu(op: GraphBuilder, x: Value, bias: Value) -> Value:
    left, right = op.Split(x + bias, _outputs=2, axis=-1, num_outputs=2)
    return left * op.Gelu(right)


@decompose("BiasAdd", MICROSOFT, infer=same_type_and_shape)
def bias_add(op: GraphBuilder, x: Value, bias: Value, skip: Value) -> Value:
    return x + bias + skip


@decompose("BiasSoftmax", MICROSOFT, infer=same_type_and_shape)
def bias_softmax(op: GraphBuilder, x: Value, bias: Value, *, axis: int = 1) -> Value:
    """Softmax over all axes from `axis` on, together.

    The attribute `is_inner_broadcast` only tells the kernel along which axes the bias is broadcast;
    Add finds them by itself.
    """
    total = x + bias
    axis %= total.rank
    if axis == total.rank - 1:
        return op.Softmax(total)
    flat = op.Reshape(total, op.Concat(op.shape(total, 0, axis), [-1], axis=0))
    return op.Reshape(op.Softmax(flat), op.shape(total))


@decompose("Trilu", MICROSOFT, infer=same_type_and_shape)
def trilu(op: GraphBuilder, x: Value, k: Value | None, *, upper: int = 1) -> Value:
    return op.Trilu(x, k, upper=upper)


@rule("Inverse", MICROSOFT, infer=same_type_and_shape)
def inverse(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Gradients:
    """-y^T dy y^T"""
    transposed = transpose_matrices(op, y)
    return -(transposed @ dy @ transposed)


def _embedded_type_and_shape(node: ir.Node) -> None:
    """Set the outputs: embeddings (batch, length, hidden), lengths (batch,), embeddings again."""
    ids = node.inputs[0] if node.inputs else None
    embedding = node.inputs[2] if len(node.inputs) > 2 else None
    if ids is None or embedding is None:
        return
    for i, out in enumerate(node.outputs):
        out.type = out.type or (ir.TensorType(ir.DataType.INT32) if i == 1 else embedding.type)
        if out.shape is None and ids.shape is not None and embedding.shape is not None:
            out.shape = ir.Shape(ids.shape[:1] if i == 1 else [*ids.shape, embedding.shape[-1]])


@decompose("EmbedLayerNormalization", MICROSOFT, infer=_embedded_type_and_shape)
def embed_layer_normalization(
    op: GraphBuilder,
    ids: Value,
    segments: Value | None,
    words: Value,
    positions: Value,
    segment_table: Value | None,
    gamma: Value,
    beta: Value,
    mask: Value | None,
    position_ids: Value | None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Value, ...]:
    """The sum of the embeddings of words, positions and segments, normalized.

    The other outputs are the number of unmasked tokens of each row, and the sum.
    """
    if position_ids is None:
        position_ids = arange(op, op.shape(ids, 1, 2))
    total = op.Gather(words, ids) + op.Gather(positions, position_ids)
    if segments is not None and segment_table is not None:
        total = total + op.Gather(segment_table, segments)
    if mask is None:
        unmasked = op.Expand(op.constant(np.int32(0)), op.shape(ids, 0, 1))
    else:
        unmasked = op.ReduceSum(op.cast(mask == 1, np.int32), [1], keepdims=0)
    return op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon), unmasked, total
