"""Random numbers as a pure function of (seed, step, stream), in plain ONNX operators.

onnxruntime's random operators keep a hidden state per session: a resumed run would draw other
numbers than the uninterrupted one. Here element i of stream s draws hash(seed, step, s, i), so that
a step can be repeated bit for bit, on any runtime.
"""

from __future__ import annotations

import numpy as np

from onnxfit.graph import scopes
from onnxfit.graph.values import GraphBuilder, Value

GOLDEN = np.uint32(0x9E3779B9).astype(np.int32)  # 2^32 divided by the golden ratio


def uniform(
    op: GraphBuilder,
    shape: Value,
    seed: Value,
    step: Value,
    stream: int,
    iteration: Value | None = None,
) -> Value:
    """Return float32 numbers in [0, 1).

    The hash is the 32-bit finaliser "lowbias32" of C. Wellons (hash-prospector, 2018), applied to
    the key and then to the position.

    - `op`: the builder of the graph.
    - `shape`: the sizes of the result, an int64 vector.
    - `seed`: an int64 scalar.
    - `step`: the number of updates so far, an int64 scalar.
    - `stream`: a number that tells apart the nodes that draw.
    - `iteration`: inside a Loop, the number of the iteration, an int64 scalar.
    """
    with op.scope(scopes.random_stream(stream)):
        key = _mix(op, op.cast(seed, np.int32) + GOLDEN)  # an offset, since 0 mixes to 0
        key = _mix(op, op.cast(step, np.int32) + _mix(op, key + np.int32(stream)))
        if iteration is not None:
            key = _mix(op, key + op.cast(iteration, np.int32))
        position = op.Range(
            np.int32(0), op.cast(op.ReduceProd(shape, keepdims=0), np.int32), np.int32(1)
        )
        bits = _mix(op, _mix(op, position) + key)
        # 24 bits: every result is exact in float32 and below 1
        high = op.BitShift(op.cast(bits, np.uint32), op.constant(np.uint32(8)), direction="RIGHT")
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
