"""Orders of rows and random numbers of onnxfit 0.1.0 before it had those of today."""

from __future__ import annotations

import numpy as np

from onnxfit.graph.values import GraphBuilder, Value


def permutation(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(rows)


def uniform(
    op: GraphBuilder, shape: Value, seed: Value, step: Value, stream: int, iteration: Value | None
) -> Value:
    assert iteration is None
    key = _mix(op, op.cast(seed, np.int32) + np.uint32(0x9E3779B9).astype(np.int32))
    key = _mix(op, op.cast(step, np.int32) + _mix(op, key + np.int32(stream)))
    count = op.cast(op.ReduceProd(shape, keepdims=0), np.int32)
    bits = op.cast(_mix(op, _mix(op, op.Range(np.int32(0), count, np.int32(1))) + key), np.uint32)
    high = op.BitShift(bits, op.constant(np.uint32(8)), direction="RIGHT")
    return op.Reshape(op.cast(high, np.float32) * np.float32(2**-24), shape)


def _mix(op: GraphBuilder, x: Value) -> Value:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        bits = op.cast(x, np.uint32)
        shifted = op.BitShift(bits, op.constant(np.uint32(shift)), direction="RIGHT")
        x = op.cast(op.BitwiseXor(bits, shifted), np.int32) * np.uint32(factor).astype(np.int32)
    return x
