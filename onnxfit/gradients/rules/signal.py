"""Fourier transforms: DFT and STFT.

They are linear, and the gradient of a linear map is its adjoint. A complex number is a pair of
reals; the adjoint of the forward transform of length N is N times the inverse one, that of the
inverse one the forward one divided by N. Cutting off is the adjoint of zero-padding and the other
way round, taking the real part that of a real input. (Oppenheim and Schafer, Discrete-Time Signal
Processing, ch. 8.)
"""

from __future__ import annotations

import numpy as np

from onnxfit.gradients.blocker import TYPED
from onnxfit.gradients.building import arange, axis_size, int_vector, known_int
from onnxfit.gradients.table import Gradients, NoGradientError, decompose, gradient
from onnxfit.graph.values import GraphBuilder, Value


@gradient("DFT")
def dft(
    op: GraphBuilder,
    x: Value,
    dft_length: Value | None,
    axis: Value | None,
    y: Value,
    dy: Value,
    *,
    inverse: int,
    onesided: int,
) -> Gradients:
    """The frequencies that onesided=1 leaves out have no gradient: zeros, which DFT itself appends."""
    if inverse and onesided:
        raise NoGradientError(
            "there is no rule for the real signal of a one-sided spectrum",
            "the inverse DFT of the whole spectrum",
        )
    where = -2 if axis is None else known_int(axis)
    if x.shape is None or where is None:
        raise NoGradientError(
            (
                f"the rank of {x.name!r} is unknown"
                if x.shape is None
                else "its axis is not a constant"
            ),
            TYPED,
        )
    where %= x.rank
    size, parts = axis_size(op, x, where), op.shape(x, x.rank - 1)
    length = size if dft_length is None else _vector(op, dft_length)
    n = (
        op.constant(np.int64(known))
        if (known := known_int(length)) is not None
        else op.Squeeze(length, [0])
    )
    dx = op.DFT(dy, n, op.constant(np.int64(where)), inverse=1 - inverse)
    dx = _resized(op, dx, length, size, parts, [where, x.rank - 1])
    count = op.cast(n, x.dtype) if known is None else op.constant(known, x.dtype)
    return dx / count if inverse else dx * count, None, None


def _resized(
    op: GraphBuilder, dx: Value, length: Value, size: Value, parts: Value, axes: list[int]
) -> Value:
    """The first `size` of `length` elements along the first axis, zeros where there are no more,
    and `parts` of 2 along the second.
    """
    known = [known_int(v) for v in (size, length, parts)]
    if None not in known:
        wanted, have, pair = (int(v) for v in known if v is not None)
        if wanted <= have:
            return dx if (wanted, pair) == (have, 2) else op.Slice(dx, [0, 0], [wanted, pair], axes)
    # less than nothing is cut off
    return op.Pad(dx, op.Concat([0, 0], size - length, parts - 2, axis=0), None, axes)


@decompose("STFT")
def stft(
    op: GraphBuilder,
    signal: Value,
    frame_step: Value,
    window: Value | None,
    frame_length: Value | None,
    *,
    onesided: int,
) -> Value:
    """The DFT of windowed frames, which a Gather cuts out of the signal."""
    if window is not None:
        length = op.shape(window)
    else:
        length = op.shape(signal, 1, 2) if frame_length is None else _vector(op, frame_length)
    samples, step = op.shape(signal, 1, 2), _vector(op, frame_step)
    known = [known_int(v) for v in (samples, length, step)]
    if None not in known:
        total, width, stride = (int(v) for v in known if v is not None)
        index: Value = op.constant(
            np.add.outer(np.arange(0, total - width + 1, stride), np.arange(width))
        )
    else:
        first = op.Range(0, op.Squeeze(samples - length, [0]) + 1, op.Squeeze(step, [0]))
        index = op.Unsqueeze(first, [1]) + arange(op, length)
    frames = op.Gather(signal, index, axis=1)
    if window is not None:
        frames = frames * op.Unsqueeze(window, [1])
    return op.DFT(frames, None, op.constant(np.int64(2)), onesided=onesided)


def _vector(op: GraphBuilder, scalar: Value) -> Value:
    """A whole number as an int64 vector of one."""
    number = known_int(scalar)
    if number is not None:
        return int_vector(op, number)
    return op.Reshape(op.cast(scalar, np.int64), [1])
