"""Attention as onnxruntime fuses it, written out (Vaswani et al. 2017): softmax(scale q k^T + masks) v, head by head.

The definitions are those of onnxruntime's documentation (docs/ContribOperators.md); tests compare each with onnxruntime's own kernel. What
decoding needs, a cache of past keys and values, is refused: training sees whole sequences.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onnxfit.gradients.table import Refused, rewrite
from onnxfit.graph.values import Op, Value

MS = "com.microsoft"
CACHE = "it has a cache of past keys and values"
NO_CACHE = "export the model without a cache"
FORBIDDEN = float(np.finfo(np.float32).min)  # what onnxruntime's CPU kernels put where a later token would be seen


@rewrite("RotaryEmbedding", MS)
def rotary_embedding(
    op: Op, x: Value, position_ids: Value, cos: Value, sin: Value, *,
    interleaved: int = 0, num_heads: int = 0, rotary_embedding_dim: int = 0, scale: float = 1.0, is_packed_batching: int = 0,
) -> Value:  # fmt: skip
    """Pairs of numbers turned by an angle that grows with the position (Su et al. 2021).

    x is (batch, length, hidden) or (batch, heads, length, size).
    """
    if is_packed_batching:
        raise Refused("its batch is packed", "is_packed_batching=0")
    heads_last = x.rank == 3
    half = cos.shape[-1] if cos.shape is not None else None
    if not isinstance(half, int):
        raise Refused("the size of its cosine table is unknown", "a table of known size")
    h = x
    if heads_last:
        size = _head_size(x, num_heads) if num_heads else 2 * half
        h = op.Transpose(op.Reshape(x, [0, 0, -1, size]), perm=[0, 2, 1, 3])
    if position_ids.rank < 2:  # where the sequence begins
        length = op.Squeeze(op.shape(h, 2, 3))
        position_ids = op.Reshape(position_ids, [1, 1]) + op.Range(op.constant(np.int64(0)), length, op.constant(np.int64(1)))
    cos, sin = (op.Unsqueeze(op.Gather(table, position_ids), [1]) for table in (cos, sin))
    turned = rotated(op, h, cos, sin, half, bool(interleaved))
    if heads_last:
        turned = op.Reshape(op.Transpose(turned, perm=[0, 2, 1, 3]), op.shape(x))
    return turned


def rotated(op: Op, h: Value, cos: Value, sin: Value, half: int, interleaved: bool) -> Value:
    """The first 2 half numbers of every vector, turned; the rest as they are."""
    end = np.iinfo(np.int64).max
    front, rest = op.Slice(h, [0], [2 * half], [-1]), op.Slice(h, [2 * half], [end], [-1])
    if interleaved:
        pairs = op.Reshape(front, op.Concat([0, 0, 0], [half, 2], axis=0))
        a, b = (op.Squeeze(part, [-1]) for part in op.many(2, "Split", pairs, axis=-1, num_outputs=2))
        turned = op.Concat(op.Unsqueeze(a * cos - b * sin, [-1]), op.Unsqueeze(b * cos + a * sin, [-1]), axis=-1)
        front = op.Reshape(turned, op.shape(front))
    else:
        a, b = op.many(2, "Split", front, axis=-1, num_outputs=2)
        front = op.Concat(a * cos - b * sin, b * cos + a * sin, axis=-1)
    whole = h.shape is not None and h.shape[-1] == 2 * half
    return front if whole else op.Concat(front, rest, axis=-1)


@rewrite("Attention", MS)
def attention(
    op: Op, x: Value, weights: Value, bias: Value | None, mask: Value | None, past: Value | None, attention_bias: Value | None,
    past_length: Value | None, *, num_heads: int, unidirectional: int = 0, scale: float | None = None, qkv_hidden_sizes: Any = None,
    mask_filter_value: float = -10000.0, do_rotary: int = 0, past_present_share_buffer: int = 0, rotary_embedding_dim: int = 0,
) -> Value:  # fmt: skip
    """Queries, keys and values by one product, then attention."""
    if past is not None or past_length is not None or past_present_share_buffer:
        raise Refused(CACHE, NO_CACHE)
    if do_rotary:
        raise Refused("it rotates its queries and keys", "a RotaryEmbedding before it")
    qkv = x @ weights
    if bias is not None:
        qkv = qkv + bias
    if qkv_hidden_sizes:
        q, k, v = op.many(3, "Split", qkv, op.constant(np.array(qkv_hidden_sizes, np.int64)), axis=-1)
    else:
        q, k, v = op.many(3, "Split", qkv, axis=-1, num_outputs=3)
    q, k, v = (heads(op, part, num_heads) for part in (q, k, v))
    masks = [] if attention_bias is None else [attention_bias]
    if mask is not None:
        masks.append(_mask(op, mask, q, k, mask_filter_value))
    return merged(op, attend(op, q, k, v, scale, masks, bool(unidirectional)))


@rewrite("MultiHeadAttention", MS)
def multi_head_attention(
    op: Op, query: Value, key: Value | None, value: Value | None, bias: Value | None, key_padding_mask: Value | None,
    attention_bias: Value | None, past_key: Value | None, past_value: Value | None, past_length: Value | None, indirection: Value | None, *,
    num_heads: int, mask_filter_value: float = -10000.0, scale: float | None = None, unidirectional: int = 0,
) -> Value:  # fmt: skip
    """Attention of queries, keys and values that are there; packed ones are (batch, length, heads, 3, size) and (batch, length, heads, 2, size)."""
    if past_key is not None or past_value is not None or past_length is not None or indirection is not None:
        raise Refused(CACHE, NO_CACHE)
    if key is None:
        parts = [op.Transpose(op.Squeeze(p, [3]), perm=[0, 2, 1, 3]) for p in op.many(3, "Split", query, axis=3, num_outputs=3)]
    elif value is None:
        packed = [op.Transpose(op.Squeeze(p, [3]), perm=[0, 2, 1, 3]) for p in op.many(2, "Split", key, axis=3, num_outputs=2)]
        parts = [heads(op, query, num_heads), *packed]
    else:
        parts = [heads(op, query, num_heads), *(p if p.rank == 4 else heads(op, p, num_heads) for p in (key, value))]
    if bias is not None:
        sizes = (
            [op.shape(query, 2, 3), op.shape(query, 2, 3), op.shape(value, 2, 3)] if value is not None and value.rank == 3 else None
        )
        biases = op.many(3, "Split", bias, op.Concat(*sizes, axis=0)) if sizes else op.many(3, "Split", bias, num_outputs=3)
        parts = [p + op.Transpose(op.Reshape(b, [1, 1, num_heads, -1]), perm=[0, 2, 1, 3]) for p, b in zip(parts, biases)]
    q, k, v = parts
    masks = [] if attention_bias is None else [attention_bias]
    if key_padding_mask is not None:
        masks.append(_mask(op, key_padding_mask, q, k, mask_filter_value))
    return merged(op, attend(op, q, k, v, scale, masks, bool(unidirectional)))


@rewrite("GroupQueryAttention", MS)
def group_query_attention(
    op: Op, query: Value, key: Value | None, value: Value | None, past_key: Value | None, past_value: Value | None, seqlens_k: Value,
    total_length: Value, cos: Value | None, sin: Value | None, *, num_heads: int, kv_num_heads: int, scale: float | None = None,
    softcap: float = 0.0, local_window_size: int = -1, do_rotary: int = 0, rotary_interleaved: int = 0, smooth_softmax: int = 0,
) -> tuple[Value | None, ...]:  # fmt: skip
    """Several queries to a key and value (Ainslie et al. 2023), each seeing the tokens up to its own.

    Of the lengths in `seqlens_k` nothing is needed: a padded token is behind all true ones, and what it computes is nobody's.
    """
    if any(p is not None and not _empty(p) for p in (past_key, past_value)):
        raise Refused(CACHE, NO_CACHE)
    if smooth_softmax:
        raise Refused("its softmax is smooth", "smooth_softmax=0")
    if key is None or value is None:
        size = _head_size(query, num_heads + 2 * kv_num_heads)
        widths = op.constant(np.array([num_heads, kv_num_heads, kv_num_heads], np.int64) * size)
        query, key, value = op.many(3, "Split", query, widths, axis=-1)
    q, k, v = heads(op, query, num_heads), heads(op, key, kv_num_heads), heads(op, value, kv_num_heads)
    if do_rotary:
        assert cos is not None
        assert sin is not None
        half = cos.shape[-1] if cos.shape is not None else None
        if not isinstance(half, int):
            raise Refused("the size of its cosine table is unknown", "a table of known size")
        cos, sin = (op.Slice(table, [0], op.shape(q, 2, 3), [0]) for table in (cos, sin))
        q, k = (rotated(op, part, cos, sin, half, bool(rotary_interleaved)) for part in (q, k))
    if num_heads != kv_num_heads:
        repeated = [1, 1, num_heads // kv_num_heads, 1, 1]
        k, v = (
            op.Reshape(op.Tile(op.Unsqueeze(p, [2]), repeated), op.Concat([0, num_heads], op.shape(p, 2), axis=0)) for p in (k, v)
        )
    masks = []
    if local_window_size > 0:
        row, column = _places(op, q, k)
        masks.append(op.Where(column <= row - local_window_size, op.constant(FORBIDDEN, q.dtype), op.constant(0, q.dtype)))
    return merged(op, attend(op, q, k, v, scale, masks, True, softcap)), None, None


def attend(
    op: Op, q: Value, k: Value, v: Value, scale: float | None, masks: list[Value], causal: bool, softcap: float = 0.0
) -> Value:
    """(batch, heads, length, size), each."""
    if not scale:
        size = q.shape[-1] if q.shape is not None else None
        factor: Any = 1 / math.sqrt(size) if isinstance(size, int) else 1 / op.Sqrt(op.cast(op.Squeeze(op.shape(q, 3, 4)), q.dtype))
    else:
        factor = scale
    scores = (q @ op.Transpose(k, perm=[0, 1, 3, 2])) * factor
    if softcap:
        scores = softcap * op.Tanh(scores * (1 / softcap))
    for mask in masks:
        scores = scores + op.cast(mask, q.dtype)
    if causal:
        row, column = _places(op, q, k)
        scores = op.Where(column > row, op.constant(FORBIDDEN, q.dtype), scores)
    return op.Softmax(scores) @ v


def heads(op: Op, x: Value, count: int) -> Value:
    """(batch, length, heads size) as (batch, heads, length, size)"""
    size = x.shape[-1] if x.shape is not None else None
    last = size // count if isinstance(size, int) else -1
    return op.Transpose(op.Reshape(x, [0, 0, count, last]), perm=[0, 2, 1, 3])


def merged(op: Op, x: Value) -> Value:
    """(batch, heads, length, size) as (batch, length, heads size)"""
    size = (
        None if x.shape is None or not isinstance(x.shape[1], int) or not isinstance(x.shape[3], int) else x.shape[1] * x.shape[3]
    )
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, -1 if size is None else size])


def _places(op: Op, q: Value, k: Value) -> tuple[Value, Value]:
    """The place of each query, as rows, and of each key, as columns; the last of both stand side by side."""
    zero, one = op.constant(np.int64(0)), op.constant(np.int64(1))
    rows, columns = (op.Squeeze(op.shape(part, 2, 3)) for part in (q, k))
    row = op.Reshape(op.Range(zero, rows, one) + (columns - rows), [-1, 1])
    return row, op.Reshape(op.Range(zero, columns, one), [1, -1])


def _mask(op: Op, mask: Value, q: Value, k: Value, filter_value: float) -> Value:
    """What masks add to the scores: nothing where they say 1, `filter_value` where 0; lengths count from the left."""
    shown = op.cast(mask, q.dtype)
    if mask.rank == 1:
        _, column = _places(op, q, k)
        shown = op.cast(column < op.cast(op.Reshape(mask, [-1, 1]), np.int64), q.dtype)
    if shown.rank in (2, 3):
        shown = op.Unsqueeze(shown, [1, 2] if shown.rank == 2 else [1])
    return (1 - shown) * filter_value


def _head_size(x: Value, count: int) -> int:
    size = x.shape[-1] if x.shape is not None else None
    if not isinstance(size, int):
        raise Refused("its hidden size is unknown", "an input of known size")
    return size // count


def _empty(past: Value) -> bool:
    return past.shape is not None and 0 in past.shape
