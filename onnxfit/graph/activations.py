"""Find the activation that computes a value, also where several operators spell it.

Exporters without an operator for the activation write its formula: a softmax is ReduceMax, Sub,
Exp, ReduceSum and Div, with Reshape and Expand between them where the framework broadcasts by
itself. `SIGMOIDS` and the functions below it list the formulas. A formula is accepted only if its
shapes prove that each element is divided by the sum of its own row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Union

import onnx_ir as ir

from onnxfit.graph.index import constant_of
from onnxfit.graph.match import Match, Matcher, Pattern

SIGMOID, SOFTMAX, LOG_SOFTMAX = "Sigmoid", "Softmax", "LogSoftmax"
EXPONENTIAL = ("Add", "1", ("Exp", "u"))
_HALF_TANHS: list[Pattern] = [("Tanh", ("Mul", "0.5", "z")), ("Tanh", ("Div", "z", "2"))]
# Formulas of the sigmoid of z, and of -u
SIGMOIDS: list[Pattern] = [
    ("Div", ("Exp", "z"), ("Add", "1", ("Exp", "z"))),
    ("Mul", ("Exp", "z"), ("Reciprocal", ("Add", "1", ("Exp", "z")))),
    ("Div", "1", EXPONENTIAL),
    ("Reciprocal", EXPONENTIAL),
    ("Pow", EXPONENTIAL, "-1"),
    ("Exp", ("Neg", ("Softplus", "u"))),
    *(
        formula
        for tanh in _HALF_TANHS
        for formula in (
            ("Mul", "0.5", ("Add", "1", tanh)),
            ("Div", ("Add", "1", tanh), "2"),
            ("Add", "0.5", ("Mul", "0.5", tanh)),
            ("Add", "0.5", ("Div", tanh, "2")),
        )
    ),
]
# Formulas of -u
NEGATIVES: list[Pattern] = [("Neg", "z"), ("Mul", "-1", "z"), ("Sub", "0", "z"), ("Div", "z", "-1")]
COPIES = {"Cast", "Identity"}
# Operators that give the elements another shape in the same order
RESHAPING = {"Flatten", "Reshape", "Squeeze", "Unsqueeze"}
# Operators that only move or repeat the numbers of their first input
ONLY_MOVING = {
    "DepthToSpace",
    "Expand",
    "Flatten",
    "Gather",
    "GatherElements",
    "GatherND",
    "Identity",
    "Reshape",
    "Slice",
    "SpaceToDepth",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
}
SUMS = {"ReduceSum", "ReduceL1"}  # alike for exponentials, which are positive
REDUCTIONS = {*SUMS, "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"}
FUNCTIONS = {"Log", "Max", "Reciprocal"}  # of single elements, between a reduction and its use
MAX_COMPARED = 2**20  # elements of a constant that may all be one number


@dataclass(frozen=True)
class FoundActivation:
    """An activation function, and where it begins and ends in the graph.

    - `operator`: "Sigmoid", "Softmax" or "LogSoftmax"; or the operator that bounds a value, such as
      "HardSigmoid".
    - `scores`: its input, which may have another float type than its result.
    - `nodes`: the nodes that compute it, in their order.
    - `axes`: of a Softmax or LogSoftmax.
    - `negated`: whether it is the activation of -`scores`.
    """

    operator: str
    scores: ir.Value
    nodes: tuple[ir.Node, ...]
    axes: tuple[int, ...] = ()
    negated: bool = False


def activation_of(value: ir.Value | None) -> FoundActivation | None:
    """Return the Sigmoid, Softmax or LogSoftmax that computes a value, in any spelling.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3] x) => (float[N, 3] y)'
    >>> text += " <int64[1] a = {-1}> { e = Exp(x) s = ReduceSum(e, a) y = Div(e, s) }"
    >>> found = activation_of(ir.from_onnx_text(text).graph.outputs[0])
    >>> found.operator, found.scores.name, found.axes, [node.op_type for node in found.nodes]
    ('Softmax', 'x', (-1,), ['Exp', 'ReduceSum', 'Div'])
    """
    node = node_of(value)
    if node is None or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type == SIGMOID:
        return FoundActivation(SIGMOID, node.inputs[0], (node,))
    if node.op_type in (SOFTMAX, LOG_SOFTMAX):
        axis = node.attributes.get_int("axis", -1)
        return FoundActivation(node.op_type, node.inputs[0], (node,), (axis,))
    if node.op_type in ("Exp", "Log"):
        before, result = (LOG_SOFTMAX, SOFTMAX) if node.op_type == "Exp" else (SOFTMAX, LOG_SOFTMAX)
        exponent = original(node.inputs[0])
        source = node_of(exponent)
        # A chain of Exp and Log may be of any length, and is no activation.
        is_chain = source is not None and source.op_type in ("Exp", "Log")
        inner = None if is_chain else activation_of(exponent)
        if inner is not None and inner.operator == before:
            return FoundActivation(result, inner.scores, (*inner.nodes, node), inner.axes)
    found = _find_sigmoid(node) or _softmax(node) or _find_log_softmax(node)
    is_broadcast = found is not None and _differ(found.scores, node.outputs[0])
    return None if is_broadcast else found


def node_of(value: ir.Value | None) -> ir.Node | None:
    """Return the operator of ONNX that computes a value; None for another, or a constant."""
    node = None if value is None else value.producer()
    return node if node is not None and not node.domain and node.op_type != "Constant" else None


def original(value: ir.Value | None) -> ir.Value | None:
    """Return the value of which Identity and casts between float types made a value."""
    node = node_of(value)
    while node is not None and node.op_type in COPIES and _is_copy(node):
        value = node.inputs[0]
        node = node_of(value)
    return value


def number_of(value: ir.Value | None) -> float | None:
    """Return the number that all elements of a constant are, also after an Expand; else None."""
    node = node_of(value)
    while node is not None and node.op_type in {*COPIES, *RESHAPING, "Expand", "Tile"}:
        value = node.inputs[0]
        node = node_of(value)
    if node is not None and node.op_type == "ConstantOfShape":
        fill = node.attributes.get("value")
        return 0.0 if fill is None else float(fill.as_tensor().numpy().item())
    array = constant_of(value, MAX_COMPARED)
    if array is None or not array.size or array.dtype.kind not in "iuf":
        return None
    first = array.flat[0]
    return float(first) if first == array.flat[-1] and (array == first).all() else None


def _is_copy(node: ir.Node) -> bool:
    """Return whether a node copies numbers, perhaps in another float type."""
    if node.op_type == "Identity":
        return True
    types = [value.dtype for value in (*node.inputs, *node.outputs) if value is not None]
    return all(dtype is None or dtype.is_floating_point() for dtype in types)


# ---------------------------------------------------------------------- the sigmoid


def _find_sigmoid(node: ir.Node) -> FoundActivation | None:
    """Return the sigmoid that ends in a node, spelled in one of `SIGMOIDS`."""
    for pattern in SIGMOIDS:
        match = _matched(pattern, node)
        if match is None:
            continue
        nodes = [v.producer() for v in match.contained]
        inside = (*(n for n in nodes if n is not None), node)
        if "z" in match.values:
            return FoundActivation(SIGMOID, match.values["z"], inside)
        scores, negative = match.values["u"], node_of(match.values["u"])
        for formula in NEGATIVES if negative is not None else ():
            assert negative is not None
            inner = _matched(formula, negative)
            if inner is not None:
                return FoundActivation(SIGMOID, inner.values["z"], (negative, *inside))
        return FoundActivation(SIGMOID, scores, inside, negated=True)
    return None


def _matched(pattern: Pattern, node: ir.Node) -> Match[ir.Value] | None:
    """Return the match of a pattern whose root is a node."""
    if pattern[0] != node.op_type:
        return None
    return next(
        Matcher(_seen_through, _matches_number).node(pattern, node.op_type, _operands(node)), None
    )


def _seen_through(value: ir.Value) -> tuple[str, Sequence[ir.Value]] | None:
    node = node_of(value)
    return None if node is None else (node.op_type, _operands(node))


def _operands(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node before copies of them."""
    values = [original(value) for value in node.inputs]
    return [value for value in values if value is not None]


def _matches_number(text: str, value: ir.Value) -> bool:
    return text.isalpha() or number_of(value) == float(text)


# ---------------------------------------------------------------------- the softmax


def _softmax(node: ir.Node) -> FoundActivation | None:
    """Return the softmax that ends in a quotient: the exponentials by their sum."""
    if node.op_type not in ("Div", "Mul") or len(node.inputs) != 2:
        return None
    after = ("Reciprocal",) if node.op_type == "Mul" else ()
    orders = (node.inputs, node.inputs[::-1]) if after else (node.inputs,)
    for numerator, divisor in orders:
        exponential, total = _computed_by("Exp", numerator), _reduction(divisor)
        if exponential is None or total is None or exponential.inputs[0] is None:
            continue
        # A framework may compute the exponentials twice.
        x, summed = original(exponential.inputs[0]), _computed_by("Exp", total.source)
        if total.operator not in SUMS or total.after != after or not total.is_aligned:
            continue
        if x is not None and summed is not None and original(summed.inputs[0]) is x:
            scores, before = _unshifted(x, total.axes)
            nodes = (*before, exponential, *total.nodes, node)
            return FoundActivation(SOFTMAX, scores, nodes, total.axes)
    return None


def _find_log_softmax(node: ir.Node) -> FoundActivation | None:
    """Return the log-softmax that ends in a difference: x minus log sum e^x."""
    if node.op_type != "Sub" or len(node.inputs) != 2:
        return None
    x, subtracted = (original(value) for value in node.inputs)
    if x is None:
        return None
    found = _log_of_sum(subtracted, x) or _shifted_log_of_sum(subtracted, x)
    if found is None:
        return None
    axes, inside = found
    scores, before = _unshifted(x, axes)
    return FoundActivation(LOG_SOFTMAX, scores, (*before, *inside, node), axes)


_LogOfSum = Union[tuple[tuple[int, ...], tuple[ir.Node, ...]], None]


def _log_of_sum(value: ir.Value | None, x: ir.Value) -> _LogOfSum:
    """Return the axes of the sum, and the nodes, if a value is log sum e^x."""
    found = _reduction(value)
    if found is None or not found.is_aligned:
        return None
    if found.operator == "ReduceLogSumExp" and not found.after:
        return (found.axes, found.nodes) if original(found.source) is x else None
    is_log = found.operator in SUMS and found.after == ("Log",)
    if not is_log and (found.operator != "ReduceLogSum" or found.after):
        return None
    exponential = _computed_by("Exp", found.source)
    if exponential is None or original(exponential.inputs[0]) is not x:
        return None
    return found.axes, (exponential, *found.nodes)


def _shifted_log_of_sum(value: ir.Value | None, x: ir.Value) -> _LogOfSum:
    """Return the same if a value is m + log sum e^(x - m), where m is one number for each sum."""
    add = _computed_by("Add", value)
    for shift, total in () if add is None else (add.inputs, add.inputs[::-1]):
        log = _reduction(total)
        exponential = None if log is None else _computed_by("Exp", log.source)
        difference = None if exponential is None else _computed_by("Sub", exponential.inputs[0])
        if difference is None or original(difference.inputs[0]) is not x:
            continue
        found = _log_of_sum(total, difference.outputs[0])
        if found is None or _unspread(shift) is not _unspread(difference.inputs[1]):
            continue
        axes, nodes = found
        if all(_is_constant_along(v, x, axes) for v in (shift, difference.inputs[1])):
            assert add is not None
            return axes, (difference, *nodes, add)
    return None


def _unshifted(value: ir.Value, axes: Sequence[int]) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Return x if a value is x - m, where m has one number for each softmax; and the nodes of m.

    The softmax of x is the same. Usually m is the maximum of x. Otherwise, return `value`.
    """
    node = _computed_by("Sub", value)
    x = None if node is None else original(node.inputs[0])
    if node is None or x is None or not _same_sizes(x, value):
        return value, ()
    if not _is_constant_along(node.inputs[1], x, axes):
        return value, ()
    maximum = _reduction(node.inputs[1])
    of_maximum = () if maximum is None or original(maximum.source) is not x else maximum.nodes
    return x, (*of_maximum, node)


def _computed_by(op_type: str, value: ir.Value | None) -> ir.Node | None:
    """Return the node of this type that computes a value, before copies of it."""
    node = node_of(original(value))
    return node if node is not None and node.op_type == op_type else None


# ---------------------------------------------------------------------- reductions


@dataclass(frozen=True)
class _Reduction:
    """A value that is a reduction, perhaps broadcast, reshaped, and with functions applied.

    - `operator`, `axes`: of the reduction.
    - `source`: the value that is reduced.
    - `nodes`: the reduction and the nodes after it.
    - `after`: the functions of single elements after it.
    - `is_aligned`: whether an element meets its own reduction in an operator that broadcasts
      `source` and the value.
    """

    operator: str
    source: ir.Value
    axes: tuple[int, ...]
    nodes: tuple[ir.Node, ...]
    after: tuple[str, ...]
    is_aligned: bool


def _reduction(value: ir.Value | None) -> _Reduction | None:
    """Return the reduction that computes a value, before operators that keep its elements."""
    end, node = value, node_of(value)
    nodes: list[ir.Node] = []
    after: list[str] = []
    is_reshaped = False
    while node is not None and node.op_type not in REDUCTIONS:
        if node.op_type in FUNCTIONS:
            after.append(node.op_type)
        elif node.op_type == "Expand" and is_reshaped:
            return None  # a Reshape of repeated elements
        elif node.op_type in RESHAPING:
            is_reshaped = True
        elif node.op_type != "Expand" and not (node.op_type in COPIES and _is_copy(node)):
            return None
        nodes.append(node)
        node = node_of(_data(node))
    source = None if node is None else node.inputs[0]
    axes = None if node is None else _axes(node)
    if node is None or source is None or axes is None:
        return None
    if is_reshaped or not node.attributes.get_int("keepdims", 1):
        is_aligned = _is_constant_along(end, source, axes)
    else:
        is_aligned = True
    order = (node, *nodes[::-1])
    return _Reduction(node.op_type, source, axes, order, tuple(after[::-1]), is_aligned)


def _axes(node: ir.Node) -> tuple[int, ...] | None:
    """Return the axes that a node reduces; None if they are unknown."""
    if "axes" in node.attributes:
        return tuple(node.attributes["axes"].as_ints())
    value = node.inputs[1] if len(node.inputs) > 1 else None
    if value is not None:
        array = constant_of(value)
        return None if array is None else tuple(int(axis) for axis in array.flat)
    source = node.inputs[0]
    if node.attributes.get_int("noop_with_empty_axes", 0) or source is None or source.shape is None:
        return None
    return tuple(range(len(source.shape)))


def _is_constant_along(value: ir.Value | None, like: ir.Value, axes: Sequence[int]) -> bool:
    """Return whether a value, broadcast to the shape of `like`, has equal elements along axes.

    Its other sizes are those of `like`. Operators that only reshape keep the order of elements, so
    a reduction with these sizes belongs to the elements that it reduces.
    """
    value = _unspread(value, FUNCTIONS)
    if value is None or value.shape is None or like.shape is None:
        return False
    rank = len(like.shape)
    sizes = [1] * (rank - len(value.shape)) + list(value.shape)
    reduced = {axis % rank for axis in axes}
    for axis, (size, other) in enumerate(zip(sizes, like.shape)):
        if axis in reduced:
            if size != 1:
                return False
        elif isinstance(size, int) and isinstance(other, int) and size != other:
            return False
    return len(sizes) == rank


def _same_sizes(x: ir.Value, y: ir.Value) -> bool:
    """Return whether two values that broadcast have the same shape, as far as names tell."""
    if x.shape is None or y.shape is None or len(x.shape) != len(y.shape):
        return False
    return all(
        a == b or not (isinstance(a, int) or isinstance(b, int)) for a, b in zip(x.shape, y.shape)
    )


def _differ(x: ir.Value, y: ir.Value) -> bool:
    """Return whether two values have different shapes, as far as these are known."""
    if x.shape is None or y.shape is None:
        return False
    pairs = zip(x.shape, y.shape)
    return len(x.shape) != len(y.shape) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs
    )


def _unspread(value: ir.Value | None, others: Collection[str] = RESHAPING) -> ir.Value | None:
    """Return the value before Expand, copies and `others`."""
    node = node_of(value)
    while node is not None and node.op_type in {*COPIES, *others, "Expand"} and _data(node):
        value = _data(node)
        node = node_of(value)
    return value


def _data(node: ir.Node) -> ir.Value | None:
    """Return the input whose elements a node changes; None if there are several.

    JAX bounds a maximum by a number from below, with a Max.
    """
    if node.op_type != "Max":
        return node.inputs[0]
    data = [value for value in node.inputs if number_of(value) is None]
    return data[0] if len(data) == 1 else None
