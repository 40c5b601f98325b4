"""Attention as onnxruntime fuses it, written out (Vaswani et al. 2017): softmax(scale q k^T +
masks) v, head by head.

The definitions are those of onnxruntime's documentation (docs/ContribOperators.md); tests compare
each with onnxruntime's own kernel. What decoding needs, a cache of past keys and values, is
refused: training sees whole sequences. Where the kernels of its versions differ, this is what the
later ones compute.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

from onnxfit.gradients.building import INT64_MAX, MICROSOFT, arange, axis_size, int_vector
from onnxfit.gradients.table import NoGradientError, decompose
from onnxfit.graph.values import GraphBuilder, Value

CACHE = "it has a cache of past keys and values"
NO_CACHE = "export the model without a cache"
# the score onnxruntime's CPU kernels give a token that must not be seen
FORBIDDEN = float(np.finfo(np.float32).min)


@decompose("RotaryEmbedding", MICROSOFT)
def rotary_embedding(
    op: GraphBuilder, x: Value, position_ids: Value, cos: Value, sin: Value, *,
    interleaved: int = 0, num_heads: int = 0, rotary_embedding_dim: int = 0, scale: float = 1.0, is_packed_batching: int = 0,
) -> Value:  # fmt: skip
    """Pairs of numbers turned by an angle that grows with the position (Su et al. 2021).

    x is (batch, length, hidden) or (batch, heads, length, size); `scale` has no effect in
    onnxruntime either, and how much of a head turns is as wide as the tables.
    """
    if is_packed_batching:
        raise NoGradientError("its batch is packed", "is_packed_batching=0")
    if x.rank == 4:
        return rotated(
            op, x, *_rows(op, position_ids, cos, sin, axis_size(op, x, 2)), bool(interleaved)
        )
    if rotary_embedding_dim and num_heads:
        by_head = op.Reshape(x, [0, 0, num_heads, -1])
    else:  # a head is what turns
        by_head = op.Reshape(x, op.Concat([0, 0, -1], _width(op, cos), axis=0))
    h = op.Transpose(by_head, perm=[0, 2, 1, 3])
    turned = rotated(
        op, h, *_rows(op, position_ids, cos, sin, axis_size(op, x, 1)), bool(interleaved)
    )
    return op.Reshape(op.Transpose(turned, perm=[0, 2, 1, 3]), op.shape(x))


def _rows(
    op: GraphBuilder, position_ids: Value, cos: Value, sin: Value, length: Value
) -> tuple[Value, Value]:
    """The rows of the tables for every token; a single position is where the sequence begins."""
    if position_ids.rank < 2:
        position_ids = op.Reshape(position_ids, [1, 1]) + arange(op, length)
    return op.Unsqueeze(op.Gather(cos, position_ids), [1]), op.Unsqueeze(
        op.Gather(sin, position_ids), [1]
    )


def rotated(op: GraphBuilder, h: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """As many numbers of every vector as the tables have columns for, turned; the rest as they are."""
    width, size = _width(op, cos), h.shape[-1] if h.shape is not None else None
    whole = isinstance(size, int) and cos.shape is not None and cos.shape[-1] == size // 2
    front = h if whole else op.Slice(h, [0], width, [-1])
    if interleaved:
        a, b = (
            op.Squeeze(part, [-1])
            for part in op.Split(
                op.Reshape(front, [0, 0, 0, -1, 2]), _outputs=2, axis=-1, num_outputs=2
            )
        )
        pairs = op.Concat(
            op.Unsqueeze(a * cos - b * sin, [-1]), op.Unsqueeze(b * cos + a * sin, [-1]), axis=-1
        )
        turned = op.Reshape(pairs, op.shape(front))
    else:
        a, b = op.Split(front, _outputs=2, axis=-1, num_outputs=2)
        turned = op.Concat(a * cos - b * sin, b * cos + a * sin, axis=-1)
    return turned if whole else op.Concat(turned, op.Slice(h, width, [INT64_MAX], [-1]), axis=-1)


def _width(op: GraphBuilder, table: Value) -> Value:
    """How many numbers of a vector a table of cosines turns, as a vector of one."""
    columns = table.shape[-1] if table.shape is not None else None
    return (
        int_vector(op, 2 * columns)
        if isinstance(columns, int)
        else 2 * op.shape(table, table.rank - 1)
    )


@decompose("Attention", MICROSOFT)
def attention(
    op: GraphBuilder, x: Value, weights: Value, bias: Value | None, mask: Value | None, past: Value | None, attention_bias: Value | None,
    past_length: Value | None, *, num_heads: int, unidirectional: int = 0, scale: float | None = None, qkv_hidden_sizes: Any = None,
    mask_filter_value: float = -10000.0, do_rotary: int = 0, past_present_share_buffer: int = 0, rotary_embedding_dim: int = 0,
) -> Value:  # fmt: skip
    """Queries, keys and values by one product, then attention."""
    if past is not None or past_length is not None or past_present_share_buffer:
        raise NoGradientError(CACHE, NO_CACHE)
    if do_rotary:
        raise NoGradientError("it rotates its queries and keys", "a RotaryEmbedding before it")
    qkv = x @ weights
    if bias is not None:
        qkv = qkv + bias
    if qkv_hidden_sizes:
        q, k, v = op.Split(
            qkv, op.constant(np.array(qkv_hidden_sizes, np.int64)), _outputs=3, axis=-1
        )
    else:
        q, k, v = op.Split(qkv, _outputs=3, axis=-1, num_outputs=3)
    q, k, v = (heads(op, part, num_heads) for part in (q, k, v))
    added = [] if attention_bias is None else [attention_bias]
    if mask is not None:
        added.append(_mask(op, mask, q, k, mask_filter_value))
    return merged(
        op, attend(op, q, k, v, scale, added, _later(op, q, k) if unidirectional else None)
    )


@decompose("MultiHeadAttention", MICROSOFT)
def multi_head_attention(
    op: GraphBuilder, query: Value, key: Value | None, value: Value | None, bias: Value | None, key_padding_mask: Value | None,
    attention_bias: Value | None, past_key: Value | None, past_value: Value | None, past_length: Value | None, indirection: Value | None, *,
    num_heads: int, mask_filter_value: float = -10000.0, scale: float | None = None, unidirectional: int = 0,
) -> tuple[Value, ...]:  # fmt: skip
    """Attention of queries, keys and values that are there; packed ones are (batch, length, heads,
    3, size) and (batch, length, heads, 2, size).
    """
    if (
        past_key is not None
        or past_value is not None
        or past_length is not None
        or indirection is not None
    ):
        raise NoGradientError(CACHE, NO_CACHE)
    if key is None:
        parts = [
            op.Transpose(op.Squeeze(p, [3]), perm=[0, 2, 1, 3])
            for p in op.Split(query, _outputs=3, axis=3, num_outputs=3)
        ]
    elif value is None:
        packed = [
            op.Transpose(op.Squeeze(p, [3]), perm=[0, 2, 1, 3])
            for p in op.Split(key, _outputs=2, axis=3, num_outputs=2)
        ]
        parts = [heads(op, query, num_heads), *packed]
    else:
        parts = [
            heads(op, query, num_heads),
            *(p if p.rank == 4 else heads(op, p, num_heads) for p in (key, value)),
        ]
    if bias is not None:
        parts = _biased(op, parts, bias, num_heads, key is not None and key.rank == 4)
    q, k, v = parts
    added = [] if attention_bias is None else [attention_bias]
    if key_padding_mask is not None:
        added.append(_mask(op, key_padding_mask, q, k, mask_filter_value))
    return (
        merged(op, attend(op, q, k, v, scale, added, _later(op, q, k) if unidirectional else None)),
        k,
        v,
    )


def _biased(
    op: GraphBuilder, parts: list[Value], bias: Value, num_heads: int, only_query: bool
) -> list[Value]:
    """Queries, keys and values plus their part of the bias each; keys and values that came with
    their heads apart have it already.
    """
    widths = [int_vector(op, num_heads) * axis_size(op, p, 3) for p in parts]
    biases = op.Split(bias, op.Concat(*widths, axis=0), _outputs=3)
    spread = [op.Reshape(b, [1, num_heads, 1, -1]) for b in biases]
    return [p if only_query and i else p + b for i, (p, b) in enumerate(zip(parts, spread))]


@decompose("GroupQueryAttention", MICROSOFT)
def group_query_attention(
    op: GraphBuilder, query: Value, key: Value | None, value: Value | None, past_key: Value | None, past_value: Value | None, seqlens_k: Value,
    total_length: Value, cos: Value | None, sin: Value | None, position_ids: Value | None, attention_bias: Value | None,
    head_sink: Value | None, *, num_heads: int, kv_num_heads: int, scale: float | None = None, softcap: float = 0.0,
    local_window_size: int = -1, do_rotary: int = 0, rotary_interleaved: int = 0, smooth_softmax: int = 0, causal: int = 1,
) -> tuple[Value, ...]:  # fmt: skip
    """Several queries to a key and value (Ainslie et al. 2023), each seeing the tokens up to its
    own.

    `seqlens_k` tells where the last true token of each row stands; padded ones after it see no more
    than that one does.
    """
    if any(p is not None and (p.shape is None or 0 not in p.shape) for p in (past_key, past_value)):
        raise NoGradientError(CACHE, NO_CACHE)
    if not causal:
        raise NoGradientError(
            "it lets queries see later tokens, which no released kernel for the CPU does",
            "a MultiHeadAttention",
        )
    if local_window_size == 0:
        raise NoGradientError("its window shows nothing", "local_window_size=-1")
    if do_rotary and position_ids is not None:
        raise NoGradientError(
            "it is told its positions, of which onnxruntime uses the first alone",
            "a RotaryEmbedding before it",
        )
    if key is None or value is None:
        together = op.Reshape(query, [0, 0, num_heads + 2 * kv_num_heads, -1])
        parts = op.Split(
            together,
            op.constant(np.array([num_heads, kv_num_heads, kv_num_heads])),
            _outputs=3,
            axis=2,
        )
        q, k, v = (op.Transpose(p, perm=[0, 2, 1, 3]) for p in parts)
    else:
        q, k, v = (
            heads(op, query, num_heads),
            heads(op, key, kv_num_heads),
            heads(op, value, kv_num_heads),
        )
    if do_rotary:
        assert cos is not None
        assert sin is not None
        rows = [op.Slice(table, [0], axis_size(op, q, 2), [0]) for table in (cos, sin)]
        q, k = (rotated(op, part, rows[0], rows[1], bool(rotary_interleaved)) for part in (q, k))
    present = k, v
    if num_heads != kv_num_heads:
        repeated = [1, 1, num_heads // kv_num_heads, 1, 1]
        k, v = (
            op.Reshape(
                op.Tile(op.Unsqueeze(p, [2]), repeated),
                op.Concat([0, num_heads], op.shape(p, 2), axis=0),
            )
            for p in (k, v)
        )
    row, column = _places(op, q, k)
    last = op.Reshape(op.cast(seqlens_k, np.int64), [-1, 1, 1, 1])
    hidden = column > op.Min(row, last)
    if local_window_size > 0:
        hidden = hidden | (column <= row - local_window_size)
    added = [] if attention_bias is None else [attention_bias]
    sink = op.constant(np.zeros((1, 1, 1, 1), q.dtype)) if smooth_softmax else None
    if head_sink is not None:
        sink = op.Reshape(head_sink, [1, -1, 1, 1])
    y = attend(op, q, k, v, scale, added, hidden, softcap, sink)
    if local_window_size > 0:  # a padded token that sees none of the true ones
        y = y * op.cast(row - local_window_size < last, y.dtype)
    return merged(op, y), *present


def attend(
    op: GraphBuilder, q: Value, k: Value, v: Value, scale: float | None, added: list[Value], hidden: Value | None = None, softcap: float = 0.0,
    sink: Value | None = None,
) -> Value:  # fmt: skip
    """(batch, heads, length, size), each.

    `added` goes to the scores, `hidden` tells which are none, `sink` is the score of seeing
    nothing.
    """
    if not scale:
        size = q.shape[-1] if q.shape is not None else None
        factor: Any = (
            1 / math.sqrt(size)
            if isinstance(size, int)
            else 1 / op.Sqrt(op.cast(op.Squeeze(axis_size(op, q, 3)), q.dtype))
        )
    else:
        factor = scale
    scores = (q @ op.Transpose(k, perm=[0, 1, 3, 2])) * factor
    if softcap:
        scores = softcap * op.Tanh(scores * (1 / softcap))
    scores = reduce(lambda total, mask: total + op.cast(mask, q.dtype), added, scores)
    if hidden is not None:
        scores = op.Where(hidden, op.constant(FORBIDDEN, q.dtype), scores)
    if sink is None:
        return op.Softmax(scores) @ v
    column = op.Expand(op.cast(sink, q.dtype), op.Concat(op.shape(q, 0, 3), [1], axis=0))
    return op.Slice(op.Softmax(op.Concat(column, scores, axis=-1)), [1], [INT64_MAX], [-1]) @ v


def heads(op: GraphBuilder, x: Value, count: int) -> Value:
    """(batch, length, heads size) as (batch, heads, length, size)"""
    size = x.shape[-1] if x.shape is not None else None
    last = size // count if isinstance(size, int) else -1
    return op.Transpose(op.Reshape(x, [0, 0, count, last]), perm=[0, 2, 1, 3])


def merged(op: GraphBuilder, x: Value) -> Value:
    """(batch, heads, length, size) as (batch, length, heads size)"""
    size = (
        None
        if x.shape is None or not isinstance(x.shape[1], int) or not isinstance(x.shape[3], int)
        else x.shape[1] * x.shape[3]
    )
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, -1 if size is None else size])


def _places(op: GraphBuilder, q: Value, k: Value) -> tuple[Value, Value]:
    """The place of each query, as rows, and of each key, as columns."""
    row, column = (arange(op, axis_size(op, x, 2)) for x in (q, k))
    return op.Unsqueeze(row, [1]), op.Unsqueeze(column, [0])


def _later(op: GraphBuilder, q: Value, k: Value) -> Value:
    """Which keys come after a query.

    Where there are more keys than queries, onnxruntime lets the last query see them all.
    """
    row, column = _places(op, q, k)
    later = column > row
    if q.shape is not None and k.shape is not None and q.shape[2] == k.shape[2] is not None:
        return later
    return later & (row < op.Squeeze(axis_size(op, q, 2)) - 1)


def _mask(op: GraphBuilder, mask: Value, q: Value, k: Value, filter_value: float) -> Value:
    """What masks add to the scores: nothing where they are positive, `filter_value` elsewhere.

    A vector tells the lengths, or ends and starts.
    """
    if mask.rank == 1:
        _, column = _places(op, q, k)
        ends = op.cast(mask, np.int64)
        count, batch = (
            mask.shape[0] if mask.shape is not None else None,
            (q.shape[0] if q.shape is not None else None),
        )
        if isinstance(count, int) and isinstance(batch, int) and count == 2 * batch:
            ends, starts = op.Split(ends, _outputs=2, num_outputs=2)
            shown = (column < op.Unsqueeze(ends, [1])) & (column >= op.Unsqueeze(starts, [1]))
        elif isinstance(count, int) and isinstance(batch, int) and count != batch:
            raise NoGradientError(
                f"its mask has {count} entries for {batch} sequences", "a mask of (batch, length)"
            )
        else:
            shown = column < op.Reshape(ends, op.Concat(axis_size(op, q, 0), [1], axis=0))
    elif mask.rank in (2, 3):
        shown = mask > 0
    else:
        raise NoGradientError(f"its mask has {mask.rank} axes", "a mask of (batch, length)")
    return op.Unsqueeze(
        (1 - op.cast(shown, q.dtype)) * filter_value, [1] if mask.rank == 3 else [1, 2]
    )
