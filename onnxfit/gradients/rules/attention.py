"""Attention as onnxruntime fuses it, decomposed: softmax(scale q k^T + masks) v for each head.

The formula is that of Vaswani et al. 2017, the definitions are those of onnxruntime's documentation
(docs/ContribOperators.md); tests compare each with onnxruntime's own kernel. Caches of past keys
and values, for decoding, are not supported: training sees whole sequences. If kernels differ
between versions of onnxruntime, the results are those of the later version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from onnxfit.gradients.building import (
    INT64_MAX,
    MICROSOFT,
    arange,
    axis_size,
    int_vector,
    require_ints,
)
from onnxfit.gradients.table import NoGradientError, decompose
from onnxfit.graph.inference import same_type_and_rank, same_type_and_shape
from onnxfit.graph.values import GraphBuilder, Value

CACHED = "it has a cache of past keys and values"
WITHOUT_CACHE = "export the model without a cache"
# the score of a hidden token in onnxruntime's CPU kernels
HIDDEN_SCORE = float(np.finfo(np.float32).min)

# Rotary embedding
# ------------------------------------------------------------------------------------------------


@decompose("RotaryEmbedding", MICROSOFT, infer=same_type_and_shape)
def rotary_embedding(
    op: GraphBuilder, x: Value, position_ids: Value, cos: Value, sin: Value, *,
    interleaved: int = 0, num_heads: int = 0, rotary_embedding_dim: int = 0, scale: float = 1.0,
    is_packed_batching: int = 0,
) -> Value:  # fmt: skip
    """Rotate pairs of numbers by an angle that grows with the position (Su et al. 2021).

    x is (batch, length, hidden) or (batch, heads, length, size). `scale` has no effect in
    onnxruntime either. The width of the tables determines how many numbers of a head are rotated.
    """
    if is_packed_batching:
        raise NoGradientError(
            "it packs several sequences into each row (is_packed_batching=1)",
            "use is_packed_batching=0",
        )
    if x.rank == 4:
        rows = _table_rows(op, position_ids, cos, sin, axis_size(op, x, 2))
        return rotate(op, x, *rows, bool(interleaved))
    if rotary_embedding_dim and num_heads:
        by_head = op.Reshape(x, [0, 0, num_heads, -1])
    else:  # all numbers of a head are rotated
        by_head = op.Reshape(x, op.Concat([0, 0, -1], _rotated_width(op, cos), axis=0))
    h = op.Transpose(by_head, perm=[0, 2, 1, 3])
    rows = _table_rows(op, position_ids, cos, sin, axis_size(op, x, 1))
    rotated = rotate(op, h, *rows, bool(interleaved))
    return op.Reshape(op.Transpose(rotated, perm=[0, 2, 1, 3]), op.shape(x))


def _table_rows(
    op: GraphBuilder, position_ids: Value, cos: Value, sin: Value, length: Value
) -> tuple[Value, Value]:
    """Return the rows of both tables for every token.

    A single position is that of the first token.
    """
    if position_ids.rank < 2:
        position_ids = op.Reshape(position_ids, [1, 1]) + arange(op, length)
    cos_rows = op.Unsqueeze(op.Gather(cos, position_ids), [1])
    return cos_rows, op.Unsqueeze(op.Gather(sin, position_ids), [1])


def rotate(op: GraphBuilder, h: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """Rotate as many numbers of every vector as the tables have; keep the others."""
    width = _rotated_width(op, cos)
    size = h.shape[-1] if h.shape is not None else None
    is_whole = isinstance(size, int) and cos.shape is not None and cos.shape[-1] == size // 2
    front = h if is_whole else op.Slice(h, [0], width, [-1])
    if interleaved:
        pairs = op.Reshape(front, [0, 0, 0, -1, 2])
        columns = op.Split(pairs, _outputs=2, axis=-1, num_outputs=2)
        a, b = (op.Squeeze(column, [-1]) for column in columns)
        rotated_a = op.Unsqueeze(a * cos - b * sin, [-1])
        rotated_b = op.Unsqueeze(b * cos + a * sin, [-1])
        rotated = op.Reshape(op.Concat(rotated_a, rotated_b, axis=-1), op.shape(front))
    else:
        a, b = op.Split(front, _outputs=2, axis=-1, num_outputs=2)
        rotated = op.Concat(a * cos - b * sin, b * cos + a * sin, axis=-1)
    if is_whole:
        return rotated
    return op.Concat(rotated, op.Slice(h, width, [INT64_MAX], [-1]), axis=-1)


def _rotated_width(op: GraphBuilder, table: Value) -> Value:
    """Return how many numbers of a vector a table rotates, as a vector of one element."""
    columns = table.shape[-1] if table.shape is not None else None
    if isinstance(columns, int):
        return int_vector(op, 2 * columns)
    return 2 * op.shape(table, table.rank - 1)


# Attention operators
# ------------------------------------------------------------------------------------------------


@decompose("Attention", MICROSOFT, infer=same_type_and_rank)
def attention(
    op: GraphBuilder, x: Value, weights: Value, bias: Value | None, mask: Value | None,
    past: Value | None, attention_bias: Value | None, past_length: Value | None, *,
    num_heads: int, unidirectional: int = 0, scale: float | None = None,
    qkv_hidden_sizes: Any = None, mask_filter_value: float = -10000.0, do_rotary: int = 0,
    past_present_share_buffer: int = 0, rotary_embedding_dim: int = 0,
) -> Value:  # fmt: skip
    """Compute queries, keys and values by one product, then attention."""
    require_ints(1, num_heads=num_heads)
    if past is not None or past_length is not None or past_present_share_buffer:
        raise NoGradientError(CACHED, WITHOUT_CACHE)
    if do_rotary:
        raise NoGradientError(
            "it rotates its queries and keys (do_rotary)", "use a RotaryEmbedding before it"
        )
    qkv = x @ weights
    if bias is not None:
        qkv = qkv + bias
    if qkv_hidden_sizes:
        sizes = op.constant(np.array(qkv_hidden_sizes, np.int64))
        split = op.Split(qkv, sizes, _outputs=3, axis=-1)
    else:
        split = op.Split(qkv, _outputs=3, axis=-1, num_outputs=3)
    q, k, v = (split_heads(op, x, num_heads) for x in split)
    added = [] if attention_bias is None else [attention_bias]
    if mask is not None:
        added.append(_mask_scores(op, mask, q, k, mask_filter_value))
    hidden = _later_keys(op, q, k) if unidirectional else None
    return merge_heads(op, attend(op, q, k, v, scale, added, hidden))


@decompose("MultiHeadAttention", MICROSOFT, infer=same_type_and_rank)
def multi_head_attention(
    op: GraphBuilder, query: Value, key: Value | None, value: Value | None, bias: Value | None,
    key_padding_mask: Value | None, attention_bias: Value | None, past_key: Value | None,
    past_value: Value | None, past_length: Value | None, indirection: Value | None, *,
    num_heads: int, mask_filter_value: float = -10000.0, scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[Value, ...]:  # fmt: skip
    """Attention of computed queries, keys and values."""
    require_ints(1, num_heads=num_heads)
    if any(v is not None for v in (past_key, past_value, past_length, indirection)):
        raise NoGradientError(CACHED, WITHOUT_CACHE)
    qkv = _heads_of_inputs(op, query, key, value, num_heads)
    if bias is not None:
        qkv = _add_biases(op, qkv, bias, num_heads, key is not None and key.rank == 4)
    q, k, v = qkv
    added = [] if attention_bias is None else [attention_bias]
    if key_padding_mask is not None:
        added.append(_mask_scores(op, key_padding_mask, q, k, mask_filter_value))
    hidden = _later_keys(op, q, k) if unidirectional else None
    return merge_heads(op, attend(op, q, k, v, scale, added, hidden)), k, v


def _heads_of_inputs(
    op: GraphBuilder, query: Value, key: Value | None, value: Value | None, num_heads: int
) -> list[Value]:
    """Return queries, keys and values as (batch, heads, length, size).

    Packed inputs are (batch, length, heads, 3, size), or (batch, length, heads, 2, size) for keys
    and values.
    """
    if key is None:
        return _unpacked_heads(op, query, 3)
    if value is None:
        packed = _unpacked_heads(op, key, 2)
        return [split_heads(op, query, num_heads), *packed]
    q = split_heads(op, query, num_heads)
    return [q, *(x if x.rank == 4 else split_heads(op, x, num_heads) for x in (key, value))]


def _unpacked_heads(op: GraphBuilder, packed: Value, count: int) -> list[Value]:
    columns = op.Split(packed, _outputs=count, axis=3, num_outputs=count)
    return [op.Transpose(op.Squeeze(x, [3]), perm=[0, 2, 1, 3]) for x in columns]


def _add_biases(
    op: GraphBuilder, qkv: list[Value], bias: Value, num_heads: int, only_query: bool
) -> list[Value]:
    """Add to queries, keys and values their share of the bias.

    Keys and values of shape (batch, heads, length, size) already include it.
    """
    widths = [int_vector(op, num_heads) * axis_size(op, x, 3) for x in qkv]
    split = op.Split(bias, op.Concat(*widths, axis=0), _outputs=3)
    biases = [op.Reshape(b, [1, num_heads, 1, -1]) for b in split]
    if only_query:
        return [qkv[0] + biases[0], *qkv[1:]]
    return [x + b for x, b in zip(qkv, biases)]


@decompose("GroupQueryAttention", MICROSOFT, infer=same_type_and_rank)
def group_query_attention(
    op: GraphBuilder, query: Value, key: Value | None, value: Value | None,
    past_key: Value | None, past_value: Value | None, seqlens_k: Value, total_length: Value,
    cos: Value | None, sin: Value | None, position_ids: Value | None,
    attention_bias: Value | None, head_sink: Value | None, *,
    num_heads: int, kv_num_heads: int, scale: float | None = None, softcap: float = 0.0,
    local_window_size: int = -1, do_rotary: int = 0, rotary_interleaved: int = 0,
    smooth_softmax: int = 0, causal: int = 1,
) -> tuple[Value, ...]:  # fmt: skip
    """Several queries share a key and value (Ainslie et al. 2023). A query sees no later tokens.

    `seqlens_k` is the position of the last real token of each row; padded tokens after it see the
    same tokens as that token.
    """
    if any(p is not None and (p.shape is None or 0 not in p.shape) for p in (past_key, past_value)):
        raise NoGradientError(CACHED, WITHOUT_CACHE)
    require_ints(1, num_heads=num_heads, kv_num_heads=kv_num_heads)
    _refuse_unsupported(causal, local_window_size, do_rotary, position_ids)
    q, k, v = _grouped_heads(op, query, key, value, num_heads, kv_num_heads)
    if do_rotary:
        assert cos is not None
        assert sin is not None
        rows = [op.Slice(table, [0], axis_size(op, q, 2), [0]) for table in (cos, sin)]
        q, k = (rotate(op, x, rows[0], rows[1], bool(rotary_interleaved)) for x in (q, k))
    present = k, v
    if num_heads != kv_num_heads:
        k, v = (_repeat_heads(op, x, num_heads, num_heads // kv_num_heads) for x in (k, v))
    row, column = _positions(op, q, k)
    last = op.Reshape(op.cast(seqlens_k, np.int64), [-1, 1, 1, 1])
    hidden = column > op.Min(row, last)
    if local_window_size > 0:
        hidden = hidden | (column <= row - local_window_size)
    added = [] if attention_bias is None else [attention_bias]
    sink = op.constant(np.zeros((1, 1, 1, 1), q.dtype)) if smooth_softmax else None
    if head_sink is not None:
        sink = op.Reshape(head_sink, [1, -1, 1, 1])
    y = attend(op, q, k, v, scale, added, hidden, softcap, sink)
    if local_window_size > 0:
        # A padded token whose window contains no real token gets zeros.
        y = y * op.cast(row - local_window_size < last, y.dtype)
    return merge_heads(op, y), *present


def _refuse_unsupported(
    causal: int, local_window_size: int, do_rotary: int, position_ids: Value | None
) -> None:
    """Raise NoGradientError for settings of GroupQueryAttention without a decomposition."""
    if not causal:
        raise NoGradientError(
            "its queries attend to later tokens, which no released CPU kernel supports",
            "use a MultiHeadAttention",
        )
    if local_window_size == 0:
        raise NoGradientError("its window contains no token", "use local_window_size=-1")
    if do_rotary and position_ids is not None:
        raise NoGradientError(
            "it has position_ids, of which onnxruntime uses only the first",
            "use a RotaryEmbedding before it",
        )


def _grouped_heads(
    op: GraphBuilder,
    query: Value,
    key: Value | None,
    value: Value | None,
    num_heads: int,
    kv_num_heads: int,
) -> tuple[Value, Value, Value]:
    """Return queries, keys and values by head; `query` packs all of them if there is no key."""
    if key is not None and value is not None:
        q = split_heads(op, query, num_heads)
        k = split_heads(op, key, kv_num_heads)
        return q, k, split_heads(op, value, kv_num_heads)
    packed = op.Reshape(query, [0, 0, num_heads + 2 * kv_num_heads, -1])
    counts = int_vector(op, num_heads, kv_num_heads, kv_num_heads)
    split = op.Split(packed, counts, _outputs=3, axis=2)
    q, k, v = (op.Transpose(x, perm=[0, 2, 1, 3]) for x in split)
    return q, k, v


def _repeat_heads(op: GraphBuilder, x: Value, num_heads: int, times: int) -> Value:
    """Repeat each head of keys or values for the queries that share it."""
    repeated = op.Tile(op.Unsqueeze(x, [2]), [1, 1, times, 1, 1])
    return op.Reshape(repeated, op.Concat([0, num_heads], op.shape(x, 2), axis=0))


# The formula
# ------------------------------------------------------------------------------------------------


def attend(
    op: GraphBuilder,
    q: Value,
    k: Value,
    v: Value,
    scale: float | None,
    added: Sequence[Value],
    hidden: Value | None = None,
    softcap: float = 0.0,
    sink: Value | None = None,
) -> Value:
    """Return softmax(scale q k^T + added) v; all tensors are (batch, heads, length, size).

    `scale` is 1 / sqrt(size) by default. `hidden` marks pairs of query and key that are masked.
    `softcap` bounds scores by softcap tanh(score / softcap). `sink` is the score of attending to no
    key.
    """
    factor: Any = scale
    if not scale:
        size = q.shape[-1] if q.shape is not None else None
        if isinstance(size, int):
            factor = 1 / math.sqrt(size)
        else:
            factor = 1 / op.Sqrt(op.cast(op.Squeeze(axis_size(op, q, 3)), q.dtype))
    scores = (q @ op.Transpose(k, perm=[0, 1, 3, 2])) * factor
    if softcap:
        scores = softcap * op.Tanh(scores * (1 / softcap))
    scores = reduce(lambda total, mask: total + op.cast(mask, q.dtype), added, scores)
    if hidden is not None:
        scores = op.Where(hidden, op.constant(HIDDEN_SCORE, q.dtype), scores)
    if sink is None:
        return op.Softmax(scores) @ v
    column = op.Expand(op.cast(sink, q.dtype), op.Concat(op.shape(q, 0, 3), [1], axis=0))
    weights = op.Softmax(op.Concat(column, scores, axis=-1))
    return op.Slice(weights, [1], [INT64_MAX], [-1]) @ v


def split_heads(op: GraphBuilder, x: Value, count: int) -> Value:
    """Return (batch, length, heads * size) as (batch, heads, length, size)."""
    size = x.shape[-1] if x.shape is not None else None
    last = size // count if isinstance(size, int) else -1
    return op.Transpose(op.Reshape(x, [0, 0, count, last]), perm=[0, 2, 1, 3])


def merge_heads(op: GraphBuilder, x: Value) -> Value:
    """Return (batch, heads, length, size) as (batch, length, heads * size)."""
    hidden = -1
    if x.shape is not None:
        _, heads, _, size = x.shape
        if isinstance(heads, int) and isinstance(size, int):
            hidden = heads * size
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, hidden])


# Masks
# ------------------------------------------------------------------------------------------------


def _positions(op: GraphBuilder, q: Value, k: Value) -> tuple[Value, Value]:
    """Return the position of each query as a column, and of each key as a row."""
    queries, keys = (arange(op, axis_size(op, x, 2)) for x in (q, k))
    return op.Unsqueeze(queries, [1]), op.Unsqueeze(keys, [0])


def _later_keys(op: GraphBuilder, q: Value, k: Value) -> Value:
    """Return a mask of the keys that come after a query.

    With more keys than queries, onnxruntime lets the last query see all keys.
    """
    row, column = _positions(op, q, k)
    later = column > row
    if q.shape is not None and k.shape is not None and q.shape[2] == k.shape[2] is not None:
        return later
    return later & (row < op.Squeeze(axis_size(op, q, 2)) - 1)


def _mask_scores(op: GraphBuilder, mask: Value, q: Value, k: Value, filter_value: float) -> Value:
    """Return the scores that a mask adds: 0 where a key is visible, `filter_value` elsewhere.

    A mask of one axis holds lengths, or ends and then starts; others are positive where a key is
    visible.
    """
    if mask.rank == 1:
        visible = _visible_by_length(op, mask, q, k)
    elif mask.rank in (2, 3):
        visible = mask > 0
    else:
        raise NoGradientError(f"its mask has {mask.rank} axes", "use a mask of (batch, length)")
    axes = [1] if mask.rank == 3 else [1, 2]
    return op.Unsqueeze((1 - op.cast(visible, q.dtype)) * filter_value, axes)


def _visible_by_length(op: GraphBuilder, mask: Value, q: Value, k: Value) -> Value:
    """Return (batch, keys): the keys before the lengths, or between the starts and ends."""
    _, column = _positions(op, q, k)
    ends = op.cast(mask, np.int64)
    count = mask.shape[0] if mask.shape is not None else None
    batch = q.shape[0] if q.shape is not None else None
    if isinstance(count, int) and isinstance(batch, int):
        if count == 2 * batch:
            ends, starts = op.Split(ends, _outputs=2, num_outputs=2)
            before_end = column < op.Unsqueeze(ends, [1])
            return before_end & (column >= op.Unsqueeze(starts, [1]))
        if count != batch:
            raise NoGradientError(
                f"its mask has {count} entries for {batch} sequences",
                "use a mask of (batch, length)",
            )
    return column < op.Reshape(ends, op.Concat(axis_size(op, q, 0), [1], axis=0))
