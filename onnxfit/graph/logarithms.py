"""Compute losses of probabilities without the probabilities.

`logits_of` and `log_probabilities_of` find the input of the Sigmoid or Softmax at the end of a
graph, in each spelling that `activations.py` knows. The logarithm computed from it is exact where
the probability is rounded to 0 or 1. A Clip of probabilities stays: the logarithm gets its bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Union

import numpy as np
import onnx_ir as ir

from onnxfit.graph.activations import (
    LOG_SOFTMAX,
    ONLY_MOVING,
    SIGMOID,
    SOFTMAX,
    FoundActivation,
    activation_of,
    node_of,
    number_of,
)
from onnxfit.graph.probabilities import bounds_of
from onnxfit.graph.values import GraphBuilder, Value

MAX_DEPTH = 12  # operators between an activation and the output
Source = Callable[[GraphBuilder, Union[ir.Value, None]], Union[Value, None]]


def logits_of(op: GraphBuilder, value: ir.Value | None, depth: int = MAX_DEPTH) -> Value | None:
    """Return z if `value` is the sigmoid of z, else None.

    Operators that only move, join or bound numbers, or change their float type, may follow the
    Sigmoid: z has been through the same operators. The first of two classes is 1 minus a Sigmoid,
    and each of two classes of a Softmax is the sigmoid of their difference.

    - `op`: builder of the graph of `value`.
    - `depth`: the number of operators that may follow.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y)'
    >>> model = ir.from_onnx_text(text + " { s = Sigmoid(x) y = Identity(s) }")
    >>> logits_of(GraphBuilder(model.graph), model.graph.outputs[0]).ir.producer().inputs[0].name
    'x'
    """
    node = _own_node(op, value)
    if node is None or value is None:
        return None
    activation = activation_of(value)
    if activation is not None and activation.operator == SIGMOID:
        scores = op.cast(op.wrap(activation.scores), _dtype(value))
        return -scores if activation.negated else scores
    if activation is not None and activation.operator == SOFTMAX:
        return _difference_of_two(op, value, activation)
    if node.op_type == "Sub" and number_of(node.inputs[0]) == 1:
        positive = logits_of(op, node.inputs[1], depth - 1) if depth else None
        return None if positive is None else -positive
    return _followed(op, node, value, logits_of, _logit, depth)


def log_probabilities_of(
    op: GraphBuilder, value: ir.Value | None, depth: int = MAX_DEPTH
) -> Value | None:
    """Return the logarithm of probabilities, computed without them; None if the graph shows none.

    The arguments are those of `logits_of`. `value` may come from a Softmax or a Sigmoid, or be the
    exponential of any value.
    """
    activation = activation_of(value)
    if value is not None and activation is not None and activation.operator == SOFTMAX:
        scores = _own_scores(op, value, activation)
        return None if scores is None else log_softmax(op, scores, *activation.axes)
    logits = logits_of(op, value, depth)
    if logits is not None:
        return -softplus(op, -logits)
    node = _own_node(op, value)
    if node is None or value is None:
        return None
    if node.op_type == "Exp" and node.inputs[0] is not None:
        return op.wrap(node.inputs[0])
    return _followed(op, node, value, log_probabilities_of, _log, depth)


def log_softmax_of(
    op: GraphBuilder, value: ir.Value | None, depth: int = MAX_DEPTH
) -> Value | None:
    """Return a value that is a log-softmax, computed from its scores; None for any other value.

    The arguments are those of `logits_of`. A LogSoftmax node is such a computation already, so that
    the result is None, too. The logarithm of a Softmax is infinite where the Softmax is rounded to
    0, and the result is not.
    """
    node, activation = _own_node(op, value), activation_of(value)
    if node is None or value is None:
        return None
    if activation is not None and activation.operator == LOG_SOFTMAX and len(activation.nodes) > 1:
        scores = _own_scores(op, value, activation)
        return None if scores is None else log_softmax(op, scores, *activation.axes)
    return _followed(op, node, value, log_softmax_of, None, depth)


def _followed(
    op: GraphBuilder,
    node: ir.Node,
    value: ir.Value,
    find: Callable[[GraphBuilder, Union[ir.Value, None], int], Union[Value, None]],
    function: Callable[[float], float] | None,
    depth: int,
) -> Value | None:
    """Return what `find` gives for the inputs of a node that moves, joins or bounds numbers.

    - `node`: the node that computes `value`.
    - `function`: the rising function that `find` applies, for bounds; None to refuse bounds.
    - `depth`: the number of operators that may still be followed.
    """
    if not depth:
        return None

    def source(op: GraphBuilder, part: ir.Value | None) -> Value | None:
        return find(op, part, depth - 1)

    if node.op_type in ("Concat", "Where"):
        skipped = int(node.op_type == "Where")  # the condition
        parts = node.inputs[skipped:]
        sources = {part: source(op, part) for part in dict.fromkeys(parts)}
        known = [found for part in parts if (found := sources[part]) is not None]
        if len(known) < len(parts):
            return None
        if skipped:
            same = known[0].ir is known[1].ir
            condition = node.inputs[0]
            return known[0] if same or condition is None else op.Where(op.wrap(condition), *known)
        return op.Concat(*known, axis=node.attributes.get_int("axis"))
    if node.op_type in ("Clip", "Max", "Min"):
        return None if function is None else _bounded_source(op, node, source, function)
    return _moved(op, node, value, source)


def _bounded_source(
    op: GraphBuilder, node: ir.Node, source: Source, function: Callable[[float], float]
) -> Value | None:
    """Return what `source` gives for a node that bounds its input, with the function of the bounds.

    A rising function of Clip(p, low, high) is Clip(f(p), f(low), f(high)).
    """
    first, low, high = bounds_of(node)
    if first is None or not (low < 1 and high > 0):
        return None
    before = source(op, first)
    if before is None:
        return None
    result = before
    if low > 0:
        result = op.Max(result, function(low))
    return op.Min(result, function(high)) if high < 1 else result


def _moved(op: GraphBuilder, node: ir.Node, value: ir.Value, source: Source) -> Value | None:
    """Return what `source` gives for the input of a node that moves numbers, moved as well."""
    if node.op_type == "Cast":
        types = [v.dtype for v in (node.inputs[0], value) if v is not None]
        if not all(dtype is not None and dtype.is_floating_point() for dtype in types):
            return None
    elif node.op_type not in ONLY_MOVING:
        return None
    before = source(op, node.inputs[0])
    if before is None:
        return None
    others = [None if value is None else op.wrap(value) for value in node.inputs[1:]]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    call = getattr(op, node.op_type)
    results: tuple[Value, ...] = call(before, *others, _outputs=len(node.outputs), **attributes)
    for moved, old in zip(results, node.outputs):
        moved.ir.shape = old.shape  # inference may not know the sizes of a Reshape
    return results[node.outputs.index(value)]


def _difference_of_two(op: GraphBuilder, value: ir.Value, softmax: FoundActivation) -> Value | None:
    """Return the scores of two classes minus those of the other; None for more classes."""
    scores = _own_scores(op, value, softmax)
    if scores is None or scores.shape is None or len(softmax.axes) != 1:
        return None
    (axis,) = softmax.axes
    if scores.shape[axis] != 2:
        return None
    return scores - op.Gather(scores, [1, 0], axis=axis)


def _own_scores(op: GraphBuilder, value: ir.Value, activation: FoundActivation) -> Value | None:
    """Return the scores of an activation in the graph of `op`, in the type of its result."""
    if _own_node(op, value) is None:
        return None
    return op.cast(op.wrap(activation.scores), _dtype(value))


def _dtype(value: ir.Value) -> np.dtype[Any]:
    return np.dtype(np.float32) if value.dtype is None else value.dtype.numpy()


def _own_node(op: GraphBuilder, value: ir.Value | None) -> ir.Node | None:
    """Return the operator of ONNX that computes a value in the graph of `op`; None for another."""
    node = node_of(value)
    return node if node is not None and node.graph is op.graph else None


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def _log(p: float) -> float:
    return math.log(p)


def softplus(op: GraphBuilder, x: Value) -> Value:
    """Return log(1 + e^x), with the exact gradient 1/2 at 0, for any gradient of |x| there."""
    size = abs(x)
    return 0.5 * (x + size) + op.Log(1 + op.Exp(-size))


def log_softmax(op: GraphBuilder, x: Value, *axes: int) -> Value:
    """Return the logarithm of the softmax of `x` along axes."""
    if x.dtype == np.float32 and len(axes) == 1:
        return op.LogSoftmax(x, axis=axes[0])
    # onnxruntime's gradient of LogSoftmax is float32 only.
    return x - op.ReduceLogSumExp(x, [*axes], keepdims=1)
