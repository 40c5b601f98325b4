"""Random numbers as a pure function of (seed, step, stream), in plain ONNX operators.

onnxruntime's random operators keep a hidden state per session: a resumed run would draw other
numbers than the uninterrupted one. Here element i of stream s draws hash(seed, step, s, i), so that
a step can be repeated bit for bit, on any runtime.

There are two hashes. The CPU draws by shifts and exclusive ors of 32 bits. onnxruntime has no CUDA
kernel for these, so that every Dropout would be computed on the CPU. CUDA draws by products and
sums of 64 bits, which take two to three times as long on the CPU, where onnxruntime 1.19 does not
even have them. So a training on CUDA draws other numbers than the same training on the CPU.
"""

from __future__ import annotations

import numpy as np

from onnxfit.graph import scopes
from onnxfit.graph.values import GraphBuilder, Value

GOLDEN = np.uint32(0x9E3779B9).astype(np.int32)  # 2^32 divided by the golden ratio

# Odd factors without a pattern in their digits, by which seed, step, ... and the key differ in all
# of their bits. The first is 2^64 divided by the golden ratio.
SEED_FACTOR = np.uint64(0x9E3779B97F4A7C15)
STEP_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
STREAM_FACTOR = 0x94D049BB133111EB
ITERATION_FACTOR = np.uint64(0xD6E8FEB86659FD93)
FIRST_KEY = 0xC8E4FD154CE32F6D
FIRST_POSITION = np.uint64(0xD1B54A32D192ED03)


def uniform(
    op: GraphBuilder,
    shape: Value,
    seed: Value,
    step: Value,
    stream: int,
    iteration: Value | None = None,
) -> Value:
    """Return float32 numbers in [0, 1).

    - `op`: the builder of the graph. Its device decides between `_by_shifts` and `_by_products`.
    - `shape`: the sizes of the result, an int64 vector.
    - `seed`: an int64 scalar.
    - `step`: the number of updates so far, an int64 scalar.
    - `stream`: a number that tells apart the nodes that draw.
    - `iteration`: inside a Loop, the number of the iteration, an int64 scalar.
    """
    draw = _by_products if op.device == "cuda" else _by_shifts
    with op.scope(scopes.random_stream(stream)):
        high = draw(op, op.ReduceProd(shape, keepdims=0), seed, step, stream, iteration)
        # 24 bits: every result is exact in float32 and below 1
        return op.Reshape(op.cast(high, np.float32) * np.float32(2**-24), shape)


def normal(
    op: GraphBuilder,
    shape: Value,
    seed: Value,
    step: Value,
    stream: int,
    iteration: Value | None = None,
) -> Value:
    """Return float32 numbers of the standard normal distribution; arguments as in `uniform`.

    Each is computed from two uniform numbers by the method of Box and Muller (1958).
    """
    doubled = op.Concat(op.constant(np.array([2], np.int64)), shape, axis=0)
    u, angle = op.Split(
        uniform(op, doubled, seed, step, stream, iteration), _outputs=2, num_outputs=2
    )
    radius = op.Sqrt(-2 * op.Log(1 - u))  # 1 - u is never 0
    return op.Reshape(radius * op.Cos(np.float32(2 * np.pi) * angle), shape)


def _by_shifts(
    op: GraphBuilder, count: Value, seed: Value, step: Value, stream: int, iteration: Value | None
) -> Value:
    """Return `count` numbers of 24 random bits; the other arguments are those of `uniform`.

    The hash is the 32-bit finaliser "lowbias32" of C. Wellons (hash-prospector, 2018), applied to
    the key and then to the position.
    """
    key = _mix(op, op.cast(seed, np.int32) + GOLDEN)  # an offset, since 0 mixes to 0
    key = _mix(op, op.cast(step, np.int32) + _mix(op, key + np.int32(stream)))
    if iteration is not None:
        key = _mix(op, key + op.cast(iteration, np.int32))
    position = op.Range(np.int32(0), op.cast(count, np.int32), np.int32(1))
    bits = _mix(op, _mix(op, position) + key)
    return op.BitShift(op.cast(bits, np.uint32), op.constant(np.uint32(8)), direction="RIGHT")


def _by_products(
    op: GraphBuilder, count: Value, seed: Value, step: Value, stream: int, iteration: Value | None
) -> Value:
    """Return `count` numbers of 24 random bits; the other arguments are those of `uniform`.

    The hash is "squares" of B. Widynski (arXiv:2004.06278, 2020): four rounds, each a square and a
    sum of 64 bits, whose halves then change places. Its key differs with seed, step and stream.
    """
    first = np.uint64((FIRST_KEY + stream * STREAM_FACTOR) % 2**64)
    key = op.cast(seed, np.uint64) * SEED_FACTOR + first
    key = key + op.cast(step, np.uint64) * STEP_FACTOR
    if iteration is not None:
        key = key + op.cast(iteration, np.uint64) * ITERATION_FACTOR
    key = key * np.uint64(2) + np.uint64(1)
    position = op.cast(op.Range(np.int64(0), count, np.int64(1)), np.uint64)
    y = (position + FIRST_POSITION) * key
    z = y + key
    x = _swap_halves(op, y * y + y)
    x = _swap_halves(op, x * x + z)
    x = _swap_halves(op, x * x + y)
    return (x * x + z) / np.uint64(2**40)


def _swap_halves(op: GraphBuilder, x: Value) -> Value:
    """Return uint64 values with the upper 32 bits exchanged for the lower ones."""
    half = np.uint64(2**32)
    return x / half + x * half


def _mix(op: GraphBuilder, x: Value) -> Value:
    """Return lowbias32 of int32 values, whose products wrap."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        bits = op.cast(x, np.uint32)
        x = op.cast(
            op.BitwiseXor(
                bits, op.BitShift(bits, op.constant(np.uint32(shift)), direction="RIGHT")
            ),
            np.int32,
        )
        if factor is not None:
            x = x * np.uint32(factor).astype(np.int32)
    return x
