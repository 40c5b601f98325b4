"""Lowerings of operators that move elements without changing them."""

from __future__ import annotations

import numpy as np

from onnxfit.gradients.building import pad_axis
from onnxfit.gradients.onnxruntime.lowerings import (
    NodeToLower,
    gather_at,
    lowering,
    require_rank,
    require_size,
)
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.values import GraphBuilder, Value


@lowering("Split")
def split(op: GraphBuilder, node: NodeToLower) -> tuple[Value, ...] | None:
    """Write a Slice for each output, unless all outputs are on the gradient path.

    The builder drops the zero gradients of the other outputs.
    """
    count = len(node.ir.outputs)
    if len(node.path_outputs) == count:
        return None
    x = node.input(0)
    axis = node.attribute("axis", 0) % require_rank(x)
    sizes = node.constant_input(1)
    if sizes is None:
        size = require_size(x, axis)
        full_size = -(-size // count)
        sizes = np.minimum(full_size, size - full_size * np.arange(count))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    return tuple(op.Slice(x, [int(start)], [int(end)], [axis]) for start, end in zip(starts, ends))


@lowering("Slice")
def slice_(op: GraphBuilder, node: NodeToLower) -> Value | None:
    """Write a Gather for each axis if a step is negative: the builder has no rule for this."""
    steps = node.constant_input(4)
    if steps is None or (steps > 0).all():
        return None
    x = node.input(0)
    starts = node.constant_input(1)
    ends = node.constant_input(2)
    axes = node.constant_input(3)
    assert starts is not None
    assert ends is not None
    if axes is None:
        axes = np.arange(len(starts))
    for start, end, step, axis in zip(starts, ends, steps, axes):
        size = require_size(x, int(axis))
        # ONNX clamps: forward to 0 ... size, backward to -1 ... size - 1
        lowest_end = 0 if step > 0 else -1
        highest = size if step > 0 else size - 1
        first = min(max(int(start + size if start < 0 else start), 0), highest)
        last = min(max(int(end + size if end < 0 else end), lowest_end), highest)
        x = gather_at(op, x, np.arange(first, last, int(step)), int(axis))
    return x


@lowering("Pad")
def pad(op: GraphBuilder, node: NodeToLower) -> Value | None:
    """Write a constant padding of all axes, or a Gather for each axis in other modes."""
    if node.path_inputs != {0}:
        raise NoGradientError("the gradient of the padding value is unknown", "freeze the value")
    x = node.input(0)
    mode = node.text_attribute("mode", "constant")
    axes = node.constant_input(3)
    if mode == "constant" and axes is None:
        return None
    rank = require_rank(x)
    axes = np.arange(rank) if axes is None else axes % rank
    widths = node.constant_input(1)
    assert widths is not None
    before = widths[: len(axes)]
    after = widths[len(axes) :]
    if mode == "constant":
        pads = np.zeros((2, rank), np.int64)
        pads[0, axes] = before
        pads[1, axes] = after
        return op.Pad(x, pads.reshape(-1), node.optional_input(2))
    if (widths < 0).any():
        raise NoGradientError(
            f"it has negative pads in mode {mode!r}", "use pads that are not negative"
        )
    for axis, count_before, count_after in zip(axes, before, after):
        if count_before or count_after:
            indices = np.arange(require_size(x, int(axis)))
            # NumPy's modes have ONNX's names, but their type is a Literal.
            counts = (int(count_before), int(count_after))
            indices = np.pad(indices, counts, mode)  # type: ignore[call-overload]
            x = gather_at(op, x, indices, int(axis))
    return op.Identity(x)


@lowering("CenterCropPad")
def center_crop_pad(op: GraphBuilder, node: NodeToLower) -> Value:
    """Write a Slice or a Pad for each axis; the larger half of an odd difference comes last."""
    x = node.input(0)
    target = node.constant_input(1)
    axes = node.attribute("axes")
    assert target is not None
    rank = require_rank(x)
    for axis, target_size in zip(range(rank) if axes is None else axes, target):
        size = require_size(x, int(axis))
        new_size = int(target_size)
        if new_size < size:
            start = (size - new_size) // 2
            x = op.Slice(x, [start], [start + new_size], [int(axis) % rank])
        elif new_size > size:
            count_before = (new_size - size) // 2
            x = pad_axis(op, x, int(axis), count_before, new_size - size - count_before)
    return op.Identity(x)


@lowering("Compress")
def compress(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    condition = node.constant_input(1)
    axis = node.attribute("axis")
    assert condition is not None
    selected = np.flatnonzero(condition)
    if axis is None:
        return gather_at(op, op.Reshape(x, [-1]), selected, 0)
    return gather_at(op, x, selected, axis)


@lowering("DepthToSpace")
def depth_to_space(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    b = node.attribute("blocksize")
    c = require_size(x, 1) // (b * b)
    h = require_size(x, 2)
    w = require_size(x, 3)
    if node.text_attribute("mode", "DCR") == "DCR":
        y = op.Transpose(op.Reshape(x, [0, b, b, c, h, w]), perm=[0, 3, 4, 1, 5, 2])
    else:
        y = op.Transpose(op.Reshape(x, [0, c, b, b, h, w]), perm=[0, 1, 4, 2, 5, 3])
    return op.Reshape(y, [0, c, h * b, w * b])


@lowering("SpaceToDepth")
def space_to_depth(op: GraphBuilder, node: NodeToLower) -> Value:
    x = node.input(0)
    b = node.attribute("blocksize")
    c = require_size(x, 1)
    h = require_size(x, 2) // b
    w = require_size(x, 3) // b
    y = op.Transpose(op.Reshape(x, [0, c, h, b, w, b]), perm=[0, 3, 5, 1, 2, 4])
    return op.Reshape(y, [0, c * b * b, h, w])


@lowering("Dropout")
def dropout(op: GraphBuilder, node: NodeToLower) -> Value:
    """Write an Identity, as in inference. Training steps have written Dropout as arithmetic."""
    training = node.constant_input(2)
    if training is not None and bool(training):
        raise NoGradientError("it draws its own mask", "use Dropout in inference form")
    if len(node.ir.outputs) > 1 and node.ir.outputs[1].uses():
        raise NoGradientError("its mask is used", "remove the Dropout")
    return op.Identity(node.input(0))
