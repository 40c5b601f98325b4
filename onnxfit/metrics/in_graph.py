"""Labels and outputs as values of a graph, for metrics that the graph of a step adds up."""

from __future__ import annotations

import math

import numpy as np

from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.metrics.alignment import class_axes

MIN_BLOCKS = 8  # of classes, of which the one with the highest score is found first


def sum_of(op: GraphBuilder, values: Value) -> Value:
    return op.ReduceSum(values, keepdims=0)


def same_sizes(a: Value, b: Value, axes: int) -> bool:
    """Whether two values surely have the same sizes on their first axes."""
    if a.shape is None or b.shape is None or None in a.shape[:axes]:
        return False
    return a.shape[:axes] == b.shape[:axes]


def difference(op: GraphBuilder, y_true: Value, y_pred: Value) -> Value | None:
    """Labels minus outputs in float64; None where their shapes may differ."""
    if y_pred.shape is None or not same_sizes(y_true, y_pred, len(y_pred.shape)):
        return None
    return op.cast(y_true, np.float64) - op.cast(y_pred, np.float64)


def class_axis_in_graph(y_true: Value, y_pred: Value) -> int | None:
    """The axis of the outputs that integer labels lack; None where the graph does not tell."""
    true, pred = y_true.shape, y_pred.shape
    if y_true.dtype.kind not in "iu" or true is None or pred is None or len(true) != len(pred) - 1:
        return None
    if None in true or None in pred:
        return None
    for axis in class_axes(len(pred)):
        others = pred[:axis] + pred[axis + 1 :]
        if others == true:
            classes = pred[axis]
            return axis if isinstance(classes, int) and classes > 1 else None
        pairs = zip(others, true)
        if not any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
            return None  # the sizes of a batch may turn out to be the same
    return None


def known_classes(op: GraphBuilder, y_true: Value, y_pred: Value, axis: int) -> Value:
    """Whether each label is a class of the outputs."""
    assert y_pred.shape is not None
    classes = y_pred.shape[axis]
    assert isinstance(classes, int)
    return op.And(y_true >= 0, y_true < classes)


def right_class_in_graph(
    op: GraphBuilder, y_true: Value, y_pred: Value
) -> tuple[Value, Value] | None:
    axis = class_axis_in_graph(y_true, y_pred)
    if axis is None:
        return None
    right = op.Equal(highest_in_graph(op, y_pred, axis), op.cast(y_true, np.int64))
    defined = ~op.IsNaN(op.ReduceSum(y_pred, [axis], keepdims=0))
    return op.And(right, defined), known_classes(op, y_true, y_pred, axis)


def highest_in_graph(op: GraphBuilder, scores: Value, axis: int) -> Value:
    """The class of the highest score, the first of several.

    Of many classes on the last axis, first the block with the highest score is found: onnxruntime's
    ReduceMax is six times as fast as its ArgMax (32,000 classes, one thread).
    """
    assert scores.shape is not None
    classes = scores.shape[axis]
    assert isinstance(classes, int)
    block = next(size for size in range(math.isqrt(classes), classes + 1) if not classes % size)
    if axis != scores.rank - 1 or block * MIN_BLOCKS > classes:
        return op.ArgMax(scores, axis=axis, keepdims=0)
    blocks = op.Reshape(scores, [0] * axis + [classes // block, block])
    first = op.ArgMax(op.ReduceMax(blocks, [axis + 1], keepdims=0), axis=axis, keepdims=1)
    inside = op.ArgMax(op.GatherND(blocks, first, batch_dims=axis), axis=axis, keepdims=0)
    return op.Squeeze(first, [axis]) * block + inside
