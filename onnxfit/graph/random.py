"""Random numbers as a pure function of (seed, step, stream), in plain ONNX operators.

onnxruntime's random operators keep a hidden state per session, so a resumed run would draw other
numbers than an uninterrupted one. Here element i of stream s is hash(seed, step, s, i): a step can
be repeated bit for bit, on any runtime.

The hash has one form for all devices. Shifts and exclusive ors have no kernel on CUDA or WebGPU,
WebGPU has no integers of 64 bits, and its floats need not be rounded to nearest. So the elements
are a product of matrices of small whole numbers, which is exact. Only the key, eight numbers for
each stream, is computed in 64 bits; it depends on seed and step alone.

Elements come in rows of ROW. Row r has a vector a(r) of RANK random numbers, column j a constant
vector b(j), and element (r, j) is the fractional part of 2^-18 a(r) b(j). Inner products with a
random vector are the classic universal hash (Carter and Wegman 1979): up to RANK elements of a row
are independent in their upper bits. Rows are as independent as a hash of 32 bits makes a(r).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.graph import scopes
from onnxfit.graph.values import GraphBuilder, Value

ROW = 1024  # elements that share a vector a(r)
RANK = 8
BITS = 18  # of a number; with BITS more, 2^20 * RANK would not be exact in float32

# Odd factors without a pattern in their digits. The first is 2^64 divided by the golden ratio.
SEED_FACTOR = 0x9E3779B97F4A7C15
STEP_FACTOR = 0xBF58476D1CE4E5B9
STREAM_FACTOR = 0x94D049BB133111EB
LANE_FACTOR = 0xD6E8FEB86659FD93
FIRST_KEY = 0xC8E4FD154CE32F6D
KEY_FACTORS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
ROW_FACTOR = 0x9E3779B9
ITERATION_FACTOR = 0x85EBCA6B
VECTOR_FACTORS = (0x7FEB352D, 0x846CA68B)


def uniform(
    op: GraphBuilder,
    shape: Value,
    seed: Value,
    step: Value,
    stream: int,
    iteration: Value | None = None,
) -> Value:
    """Return float32 numbers in [0, 1), whole multiples of 2^-18. Every device draws the same ones.

    - `op`: the builder of the graph.
    - `shape`: the sizes of the result, an int64 vector.
    - `seed`: an int64 scalar.
    - `step`: the number of updates so far, an int64 scalar.
    - `stream`: a number that identifies the node that draws.
    - `iteration`: inside a Loop, the number of the iteration, an int64 scalar.
    """
    with op.scope(scopes.random_stream(stream)):
        key = _key_of_stream(op, seed, step, stream)
        if iteration is not None:
            key = key + op.cast(iteration, np.int32) * _int32(ITERATION_FACTOR)
        count, starts = _row_starts(op, shape)
        if op.device == "webgpu":  # which has no kernel for integers of 16 bits
            columns = op.constant(_columns(), np.float32)
        else:  # half the size of a file; a session computes the cast once, when it is created
            columns = op.cast(op.constant(_columns()), np.float32)
        product = op.MatMul(_vectors(op, starts + key), columns)
        if not isinstance(count, int) or count % ROW:
            stop = op.Reshape(op.constant(count) if isinstance(count, int) else count, [1])
            product = op.Slice(op.Reshape(product, [-1]), [0], stop)
        product = op.Reshape(product, shape)
        return product - op.Floor(product)


def normal(
    op: GraphBuilder,
    shape: Value,
    seed: Value,
    step: Value,
    stream: int,
    iteration: Value | None = None,
) -> Value:
    """Return float32 numbers of the standard normal distribution; arguments as in `uniform`.

    Each is computed from three uniform numbers by the method of Box and Muller (1958). Devices
    differ in the last bits of a number, because their logarithms and cosines do.
    """
    tripled = op.Concat(op.constant(np.array([3], np.int64)), shape, axis=0)
    coarse, fine, angle = op.Split(
        uniform(op, tripled, seed, step, stream, iteration), _outputs=3, num_outputs=3
    )
    # With multiples of 2^-18 only, no number would exceed 5 standard deviations; and 0 has no
    # logarithm.
    below_one = coarse + (fine + np.float32(2**-19)) * np.float32(2**-BITS)
    radius = op.Sqrt(-2 * op.Log(below_one))
    return op.Reshape(radius * op.Cos(np.float32(2 * np.pi) * angle), shape)


def _key_of_stream(op: GraphBuilder, seed: Value, step: Value, stream: int) -> Value:
    """Return the key of a stream: RANK int32 numbers, the upper halves of hashes of 64 bits."""
    lanes = [_int64(FIRST_KEY + stream * STREAM_FACTOR + k * LANE_FACTOR) for k in range(RANK)]
    first, second = (_int64(factor) for factor in KEY_FACTORS)
    x = seed * _int64(SEED_FACTOR) + step * _int64(STEP_FACTOR) + op.constant(np.array(lanes))
    x = (x + x / 2**32) * first
    x = (x + x / 2**29) * second
    return op.cast(x / 2**32, np.int32)


def _row_starts(op: GraphBuilder, shape: Value) -> tuple[int | Value, Value]:
    """Return the number of elements, and an int32 column with a number for each row of them."""
    factor = _int32(ROW_FACTOR)
    if shape.ir.const_value is not None:
        count = int(np.prod(shape.ir.const_value.numpy(), dtype=np.int64))
        with np.errstate(over="ignore"):
            return count, op.constant(np.arange(-(-count // ROW), dtype=np.int32)[:, None] * factor)
    elements = op.ReduceProd(shape, keepdims=0)
    rows = op.cast((elements + (ROW - 1)) / ROW, np.int32)
    numbers = op.Range(np.int32(0), rows, np.int32(1))
    return elements, op.Unsqueeze(numbers, [1]) * factor


def _vectors(op: GraphBuilder, x: Value) -> Value:
    """Return the vectors of rows, for int32 numbers: -1024 to 1023, times 2^-BITS.

    The upper bits of a product depend on all lower ones. Divisions bring upper bits down.
    """
    first, second = (_int32(factor) for factor in VECTOR_FACTORS)
    x = (x + x / np.int32(2**16)) * first
    x = (x + x / np.int32(2**15)) * second
    return op.cast(x / np.int32(2**21), np.float32) * np.float32(2.0**-BITS)


@lru_cache(maxsize=1)
def _columns() -> npt.NDArray[np.int16]:
    """Return the constant vectors of columns: whole numbers from -1024 to 1023.

    They are the upper 11 bits of SplitMix64 (Steele, Lea and Flood 2014) from the seed 0; the first
    number of each vector is made odd, so that every bit of an element is random. Factors of 11 bits
    are exact in TF32, to which some GPUs round factors of float32.
    """
    with np.errstate(over="ignore"):
        x = np.arange(1, RANK * ROW + 1, dtype=np.uint64) * np.uint64(SEED_FACTOR)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(STEP_FACTOR)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(STREAM_FACTOR)
        x ^= x >> np.uint64(31)
    numbers = (x >> np.uint64(53)).astype(np.int64).reshape(RANK, ROW) - 1024
    numbers[0] |= 1
    return numbers.astype(np.int16)


def _int32(bits: int) -> Any:
    return np.uint32(bits % 2**32).astype(np.int32)


def _int64(bits: int) -> Any:
    return np.uint64(bits % 2**64).astype(np.int64)
