"""Operators that move elements, in the form that onnxruntime's builder differentiates correctly."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.gradients.onnxruntime.forms import (
    attribute,
    form,
    given,
    known,
    needed,
    rank,
    size,
    text,
)
from onnxfit.gradients.paths import PathNode
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.values import GraphBuilder, Value


def taken(op: GraphBuilder, x: Value, indices: npt.NDArray[Any], axis: int) -> Value:
    """The elements at constant positions of an axis; one may be taken several times, or none."""
    return op.Gather(x, op.constant(np.asarray(indices, np.int64)), axis=axis)


@form("Split")
def split(op: GraphBuilder, path_node: PathNode) -> tuple[Value, ...] | None:
    """The builder forgets outputs that no gradient comes back from: each becomes a Slice."""
    outputs = path_node.node.outputs
    if len(path_node.outputs) == len(outputs):
        return None
    x = needed(op, path_node)
    axis, sizes = attribute(path_node, "axis", 0) % rank(x), known(op, path_node, 1)
    if sizes is None:
        each = -(-size(x, axis) // len(outputs))
        sizes = np.minimum(each, size(x, axis) - each * np.arange(len(outputs)))
    ends = np.cumsum(sizes)
    return tuple(
        op.Slice(x, [int(end - length)], [int(end)], [axis]) for end, length in zip(ends, sizes)
    )


@form("Slice")
def slice_(op: GraphBuilder, path_node: PathNode) -> Value | None:
    """The builder's rule has no backward steps."""
    steps = known(op, path_node, 4)
    if steps is None or (steps > 0).all():
        return None
    x, starts, ends, axes = (
        needed(op, path_node),
        known(op, path_node, 1),
        known(op, path_node, 2),
        known(op, path_node, 3),
    )
    assert starts is not None
    assert ends is not None
    for start, end, step, axis in zip(
        starts, ends, steps, range(len(starts)) if axes is None else axes
    ):
        length = size(x, int(axis))
        first, last = (int(p) + length if p < 0 else int(p) for p in (start, end))
        # ONNX clamps: forward to 0 … length, backward to -1 … length - 1
        bounds = (0, length) if step > 0 else (-1, length - 1)
        first, last = (min(max(p, low), bounds[1]) for p, low in ((first, 0), (last, bounds[0])))
        x = taken(op, x, np.arange(first, last, int(step)), int(axis))
    return x


@form("Pad")
def pad(op: GraphBuilder, path_node: PathNode) -> Value | None:
    if path_node.inputs != {0}:
        raise NoGradientError("the gradient of the padding value is not known", "freeze the value")
    x, mode, axes = (
        needed(op, path_node),
        text(path_node, "mode", "constant"),
        known(op, path_node, 3),
    )
    if mode == "constant" and axes is None:
        return None
    pads, axes = known(op, path_node, 1), np.arange(rank(x)) if axes is None else axes % rank(x)
    assert pads is not None
    before, after = pads[: len(axes)], pads[len(axes) :]
    if mode == "constant":
        every = np.zeros((2, rank(x)), np.int64)
        every[0, axes], every[1, axes] = before, after
        return op.Pad(x, every.reshape(-1), given(op, path_node, 2))
    if (pads < 0).any():
        raise NoGradientError(f"negative pads in mode {mode!r}", "pads that are not negative")
    for axis, left, right in zip(axes, before, after):
        if left or right:
            # numpy's modes of these names are ONNX's
            positions = np.pad(np.arange(size(x, int(axis))), (int(left), int(right)), mode)  # type: ignore[call-overload]
            x = taken(op, x, positions, int(axis))
    return op.Identity(x)


@form("CenterCropPad")
def center_crop_pad(op: GraphBuilder, path_node: PathNode) -> Value:
    x, target, axes = needed(op, path_node), known(op, path_node, 1), attribute(path_node, "axes")
    assert target is not None
    for axis, wanted in zip(range(rank(x)) if axes is None else axes, target):
        axis, have, want = int(axis) % rank(x), size(x, int(axis)), int(wanted)
        if want < have:
            start = (have - want) // 2
            x = op.Slice(x, [start], [start + want], [axis])
        elif want > have:
            pads = np.zeros((2, rank(x)), np.int64)
            pads[:, axis] = (want - have) // 2, want - have - (want - have) // 2
            x = op.Pad(x, pads.reshape(-1))
    return op.Identity(x)


@form("Compress")
def compress(op: GraphBuilder, path_node: PathNode) -> Value:
    x, condition, axis = (
        needed(op, path_node),
        known(op, path_node, 1),
        attribute(path_node, "axis"),
    )
    assert condition is not None
    kept = np.flatnonzero(condition)
    return taken(op, op.Reshape(x, [-1]) if axis is None else x, kept, 0 if axis is None else axis)


@form("DepthToSpace")
def depth_to_space(op: GraphBuilder, path_node: PathNode) -> Value:
    x, b = needed(op, path_node), attribute(path_node, "blocksize")
    c, h, w = size(x, 1) // (b * b), size(x, 2), size(x, 3)
    if text(path_node, "mode", "DCR") == "DCR":
        y = op.Transpose(op.Reshape(x, [0, b, b, c, h, w]), perm=[0, 3, 4, 1, 5, 2])
    else:
        y = op.Transpose(op.Reshape(x, [0, c, b, b, h, w]), perm=[0, 1, 4, 2, 5, 3])
    return op.Reshape(y, [0, c, h * b, w * b])


@form("SpaceToDepth")
def space_to_depth(op: GraphBuilder, path_node: PathNode) -> Value:
    x, b = needed(op, path_node), attribute(path_node, "blocksize")
    c, h, w = size(x, 1), size(x, 2) // b, size(x, 3) // b
    y = op.Transpose(op.Reshape(x, [0, c, h, b, w, b]), perm=[0, 3, 5, 1, 2, 4])
    return op.Reshape(y, [0, c * b * b, h, w])


@form("Dropout")
def dropout(op: GraphBuilder, path_node: PathNode) -> Value:
    """In inference; in training it is random, and the caller turns it into arithmetic."""
    training = known(op, path_node, 2)
    if training is not None and bool(training):
        raise NoGradientError("it draws its mask itself", "Dropout in inference form")
    if len(path_node.node.outputs) > 1 and path_node.node.outputs[1].uses():
        raise NoGradientError("its mask is used", "remove the Dropout")
    return op.Identity(needed(op, path_node))
