"""Fourier transforms: DFT and STFT.

They are linear, and the gradient of a linear map is its adjoint. Complex numbers are pairs of
reals. The adjoint of the forward transform of length N is N times the inverse transform; the
adjoint of the inverse transform is the forward transform divided by N. Truncating and zero-padding
are adjoint to each other, and so are taking the real part and adding a zero imaginary part.
(Oppenheim and Schafer, Discrete-Time Signal Processing, ch. 8.)
"""

from __future__ import annotations

import numpy as np

from onnxfit.gradients.blocker import TYPED
from onnxfit.gradients.building import arange, axis_size, int_vector, known_int, require_rank
from onnxfit.gradients.table import Gradients, NoGradientError, decompose, rule
from onnxfit.graph.values import GraphBuilder, Value


@rule("DFT")
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
    """The inverse transform, or the forward one of an inverse.

    The frequencies that onesided=1 omits get zeros, which DFT appends itself.
    """
    if inverse and onesided:
        raise NoGradientError(
            "there is no rule for the real signal of a one-sided spectrum",
            "use the inverse DFT of the whole spectrum",
        )
    rank = require_rank(x)
    signal_axis = -2 if axis is None else known_int(axis)
    if signal_axis is None:
        raise NoGradientError("its axis is not a constant", TYPED)
    signal_axis %= rank
    size = axis_size(op, x, signal_axis)
    components = op.shape(x, rank - 1)  # 1 for a real input, 2 for a complex one
    length = size if dft_length is None else _as_vector(op, dft_length)
    static_length = known_int(length)
    if static_length is None:
        n = op.Squeeze(length, [0])
        count = None
    else:
        n = op.constant(np.int64(static_length))
        count = op.constant(static_length, x.dtype)
    dx = op.DFT(dy, n, op.constant(np.int64(signal_axis)), inverse=1 - inverse)
    dx = _resize(op, dx, length, size, components, [signal_axis, rank - 1])
    if count is None:
        count = op.cast(n, x.dtype)
    return dx / count if inverse else dx * count, None, None


def _resize(
    op: GraphBuilder, dx: Value, length: Value, size: Value, components: Value, axes: list[int]
) -> Value:
    """Truncate or zero-pad `length` elements along the first axis to `size`, and the 2 components
    along the second axis to `components`.
    """
    sizes = [known_int(v) for v in (size, length, components)]
    if None not in sizes:
        new_size, old_size, new_components = (int(v) for v in sizes if v is not None)
        if (new_size, new_components) == (old_size, 2):
            return dx
        if new_size <= old_size:
            return op.Slice(dx, [0, 0], [new_size, new_components], axes)
    # a negative width truncates
    return op.Pad(dx, op.Concat([0, 0], size - length, components - 2, axis=0), None, axes)


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
    """The DFT of windowed frames, which a Gather reads from the signal."""
    if window is not None:
        length = op.shape(window)
    else:
        length = op.shape(signal, 1, 2) if frame_length is None else _as_vector(op, frame_length)
    samples = op.shape(signal, 1, 2)
    step = _as_vector(op, frame_step)
    sizes = [known_int(v) for v in (samples, length, step)]
    if None not in sizes:
        total, width, stride = (int(v) for v in sizes if v is not None)
        starts = np.arange(0, total - width + 1, stride)
        index = op.constant(np.add.outer(starts, np.arange(width)))
    else:
        computed_starts = op.Range(0, op.Squeeze(samples - length, [0]) + 1, op.Squeeze(step, [0]))
        index = op.Unsqueeze(computed_starts, [1]) + arange(op, length)
    frames = op.Gather(signal, index, axis=1)
    if window is not None:
        frames = frames * op.Unsqueeze(window, [1])
    return op.DFT(frames, None, op.constant(np.int64(2)), onesided=onesided)


def _as_vector(op: GraphBuilder, scalar: Value) -> Value:
    """An integer as an int64 vector of one element."""
    number = known_int(scalar)
    if number is not None:
        return int_vector(op, number)
    return op.Reshape(op.cast(scalar, np.int64), [1])
