"""Decide from the graph whether a model's output is probabilities or logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

# Operators that move, copy, round or average numbers: their result is probabilities if their first
# input is, and any number if that is.
MOVING = ONLY_MOVING | {
    "AveragePool",
    "Cast",
    "CastLike",
    "DequantizeLinear",
    "Dropout",
    "GlobalAveragePool",
    "LpNormalization",
    "QuantizeLinear",
    "ReduceMean",
    "Resize",
    "Upsample",
}
# Operators whose result may be any number
ANY_NUMBER = {"Add", "Conv", "ConvTranspose", "Gemm", "LogSoftmax", "MatMul"}
ARITHMETIC = {"Add", "Div", "Mul", "Sub"}
# Operators that bound a value by numbers. An output between 0 and 1 is a probability.
BOUNDING = {"Clip", "HardSigmoid", "Max", "Min", "Relu"}
MAX_SHOWN = 2  # nodes that a reason lists
MAX_DEPTH = 8  # sums and products between an output and the operators that bound it
ROUNDING = 1e-6


@dataclass(frozen=True)
class LogitsDecision:
    """Decision whether an output is logits (else probabilities), and the reason.

    `is_shown` tells whether the graph shows it, rather than a default or a setting.
    """

    logits: bool
    reason: str
    is_shown: bool = False


def decide_logits(setting: bool | None, value: ir.Value, default: bool) -> LogitsDecision:
    """Decide whether `value` is taken as logits.

    `setting` wins unless it is None. Otherwise a Softmax or Sigmoid that computes `value` means
    probabilities, an operator whose result may be any number means logits, and `default` holds for
    any other graph.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y)'
    >>> model = ir.from_onnx_text(text + " { s = Softmax(x) y = Identity(s) }")
    >>> decide_logits(None, model.graph.outputs[0], True).reason
    'a Softmax node computes the output through an Identity node'
    """
    if setting is not None:
        return LogitsDecision(bool(setting), f"from_logits={setting} was given")
    bounded = _probabilities(value)
    if bounded is not None and bounded.activation is not None:
        return LogitsDecision(False, _description(bounded.activation, bounded.path), True)
    found = _any_number(value)
    if found is not None:
        return LogitsDecision(True, _description(*found), True)
    return LogitsDecision(
        default, "the default of the loss, because the graph does not show what the output is"
    )


def probability_operator(value: ir.Value | None) -> str | None:
    """Return the operator that makes a value probabilities, such as "Softmax", or None.

    The name is the same if other operators spell the activation. Another operator that bounds the
    value, such as HardSigmoid or Clip, has its own name.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 1] x) => (float[N, 2] y) {'
    >>> text += "one = Constant<value_float=1.0>() p = Sigmoid(x) q = Sub(one, p)"
    >>> model = ir.from_onnx_text(text + " y = Concat<axis=1>(q, p) }")
    >>> probability_operator(model.graph.outputs[0])
    'Sigmoid'
    """
    bounded = _probabilities(value)
    return None if bounded is None or bounded.activation is None else bounded.activation.operator


def without_mask(value: ir.Value) -> ir.Value:
    """Return the value that a Where selects from, if a Where computes `value`."""
    node = value.producer()
    if node is None or (node.op_type, node.domain) != ("Where", ""):
        return value
    return node.inputs[1] or value


def any_number_operator(value: ir.Value | None) -> str | None:
    """Return the operator after which a value may be any number; None if unknown."""
    found = _any_number(value)
    return None if found is None else found[0].operator


@dataclass(frozen=True)
class _Bounded:
    """A bound of a value without negative elements.

    - `largest`: a bound of the elements.
    - `activation`: what makes the elements probabilities, or at least bounds them; None for a
      constant.
    - `path`: the nodes between the activation and the value.
    """

    largest: float
    activation: FoundActivation | None = None
    path: tuple[ir.Node, ...] = ()

    def through(self, node: ir.Node, largest: float | None = None) -> _Bounded:
        """Return the bound of the result of a node."""
        return replace(
            self,
            largest=self.largest if largest is None else largest,
            path=(*self.path, node),
        )


def _probabilities(value: ir.Value | None, depth: int = MAX_DEPTH) -> _Bounded | None:
    """Return the bound of a value that is probabilities, else None.

    - `depth`: the number of sums and products to look through.
    """
    bounded = _bounded(value, depth)
    if bounded is None or bounded.activation is None or bounded.largest > 1 + ROUNDING:
        return None
    return bounded


def _bounded(value: ir.Value | None, depth: int) -> _Bounded | None:
    """Return a bound of a value that is computed from probabilities, or is a constant."""
    moving: list[ir.Node] = []
    node = node_of(value)
    while node is not None and node.op_type in MOVING:
        moving.insert(0, node)
        value = node.inputs[0] if node.inputs else None
        node = node_of(value)
    bounded = _bounded_where_computed(value, depth)
    if bounded is None:
        return None
    for node in moving:
        bounded = bounded.through(node)
    return bounded


def _bounded_where_computed(value: ir.Value | None, depth: int) -> _Bounded | None:
    """Return the bound of a value that no node moves."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is not None:
        number = float(tensor.numpy().reshape(-1)[0]) if tensor.size == 1 else -1.0
        return _Bounded(number) if number >= 0 else None
    node = node_of(value)
    if value is None or node is None or not depth:
        return None
    activation = activation_of(value)
    if activation is not None and activation.operator in (SIGMOID, SOFTMAX):
        return _Bounded(1.0, activation)
    if node.op_type == "Div":
        return _quotient(node, depth - 1)
    if node.op_type == "Sub" and _has_constant(node.inputs[0]):
        other = _probabilities(node.inputs[1], depth - 1)  # 1 - p, the first of two classes
        return None if other is None else other.through(node, 1.0)
    if node.op_type in BOUNDING:
        return _between_bounds(node, depth - 1)
    if node.op_type == "If":
        return _of_branches(node, node.outputs.index(value), depth - 1)
    return _combined(node, depth - 1)


def _of_branches(node: ir.Node, index: int, depth: int) -> _Bounded | None:
    """Return the bound of an output of an If, if each branch has one."""
    branches = [each.as_graph() for each in node.attributes.values()]
    bounds = [_bounded(branch.outputs[index], depth) for branch in branches]
    known = [each for each in bounds if each is not None and each.activation is not None]
    if not known or len(known) < len(bounds):
        return None
    return known[0].through(node, max(each.largest for each in known))


def _between_bounds(node: ir.Node, depth: int) -> _Bounded | None:
    """Return the bound of a node that bounds a value by numbers from below and from above."""
    first, low, high = bounds_of(node)
    if first is None:  # the bounds are unknown
        inner = _bounded(node.inputs[0], depth) if node.op_type == "Clip" else None
        return None if inner is None else inner.through(node)
    inner = _bounded(first, depth)
    if inner is not None and inner.activation is not None and high > 0:
        return inner.through(node, min(inner.largest, high))
    if low < 0 or math.isinf(high):
        return None
    return _Bounded(high, FoundActivation(node.op_type, first, (node,)))


def bounds_of(node: ir.Node) -> tuple[ir.Value | None, float, float]:
    """Return the value that a node bounds, and the least and the greatest number of the result.

    The value is None if the numbers are unknown. Of nested bounds, it is the innermost value.

    - `node`: a node of a type in `BOUNDING`.
    """
    low, high = -math.inf, math.inf
    inputs = list(node.inputs)
    first = inputs[0]
    if node.op_type == "HardSigmoid":
        return first, 0.0, 1.0
    if node.op_type == "Relu":
        low = 0.0
    elif node.op_type == "Clip":
        limits = [number_of(v) if v is not None else default for v, default in _limits(inputs)]
        if None in limits:
            return None, low, high
        low, high = (limit for limit in limits if limit is not None)
    elif node.op_type in ("Max", "Min"):
        numbers = [number_of(v) for v in inputs]
        data = [v for v, number in zip(inputs, numbers) if number is None]
        if len(inputs) != 2 or len(data) != 1:
            return None, low, high
        first = data[0]
        (number,) = (number for number in numbers if number is not None)
        low, high = (number, high) if node.op_type == "Max" else (low, number)
    inner = node_of(first)
    if inner is not None and inner.op_type in BOUNDING - {"HardSigmoid"}:
        innermost, lowest, highest = bounds_of(inner)
        if innermost is not None:
            return innermost, min(max(lowest, low), high), min(max(highest, low), high)
    return first, low, high


def _limits(inputs: Sequence[ir.Value | None]) -> list[tuple[ir.Value | None, float]]:
    """Return the inputs of a Clip that are its bounds, each with the bound of an absent input."""
    low, high = (*inputs[1:], None, None)[:2]
    return [(low, -math.inf), (high, math.inf)]


def _quotient(node: ir.Node, depth: int) -> _Bounded | None:
    """Return the bound of a Div, assumed to normalize unless it divides by a constant."""
    first, second = node.inputs
    add = node_of(first)
    if add is not None and add.op_type == "Add":
        # Converters add a small number to the divisor, so that it is never 0.
        summand = _probabilities(add.inputs[0])
        if summand is not None:
            return summand.through(node, 1.0)
    bounded = _bounded(first, depth)
    if bounded is None or bounded.activation is None:
        return None
    divisor = _bounded(second, depth)
    if bounded.largest > 1 and divisor is not None and divisor.activation is None:
        return bounded.through(node, bounded.largest / max(divisor.largest, ROUNDING))
    if bounded.activation.operator in BOUNDING and divisor is None:
        return None  # a quotient of any two numbers
    return bounded.through(node, min(bounded.largest, 1.0))


def _combined(node: ir.Node, depth: int) -> _Bounded | None:
    """Return the bound of a mean, a sum, a product or a choice of bounded values."""
    inputs = node.inputs[1:] if node.op_type == "Where" else node.inputs
    if node.op_type not in ("Add", "Concat", "MatMul", "Mean", "Mul", "Sum", "Where"):
        return None
    bounds = []
    for value in inputs:
        bounded = _bounded(value, depth)
        if bounded is None or (node.op_type == "Concat" and bounded.activation is None):
            return None
        bounds.append(bounded)
    source = next((one for one in bounds if one.activation is not None), None)
    if source is None:
        return None
    numbers = [one.largest for one in bounds]
    if node.op_type == "MatMul":
        # The rows of a Softmax sum up to 1, so the product is a weighted mean.
        mixture = activation_of(node.inputs[0])
        if mixture is None or mixture.operator != SOFTMAX:
            return None
        return source.through(node, numbers[1])
    largest = {
        "Mul": math.prod(numbers),
        "Mean": sum(numbers) / len(numbers),
        "Concat": max(numbers),
        "Where": max(numbers),
    }.get(node.op_type, sum(numbers))
    return source.through(node, largest)


def _any_number(value: ir.Value | None) -> tuple[FoundActivation, tuple[ir.Node, ...]] | None:
    """Return what computes a value that may be any number, and the nodes after it.

    Only changes of shape may follow.
    """
    path: list[ir.Node] = []
    node = node_of(value)
    while node is not None and node.op_type in {*MOVING, "Where"}:
        value = node.inputs[node.op_type == "Where"] if node.inputs else None
        path.insert(0, node)
        node = node_of(value)
    activation = activation_of(value)
    if activation is not None and activation.operator == LOG_SOFTMAX:
        return activation, tuple(path)
    if node is None or node.op_type not in ANY_NUMBER or node.inputs[0] is None:
        return None
    # Sums and averages of probabilities, such as a mixture, may be probabilities themselves.
    if node.op_type == "Add" and _adds_probabilities(node):
        return None
    if node.op_type in ("Gemm", "MatMul") and all(_probabilities(v) for v in node.inputs[:2]):
        return None
    return FoundActivation(node.op_type, node.inputs[0], (node,)), tuple(path)


def _adds_probabilities(node: ir.Node) -> bool:
    """Return whether a node computes its output from probabilities by arithmetic alone."""
    seen: set[ir.Node] = set()
    pending: list[ir.Node | None] = [node]
    while pending:
        current = pending.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        for value in current.inputs:
            if _probabilities(value, depth=2):  # this walk follows arithmetic itself
                return True
            if value is not None and _is_arithmetic(value.producer()):
                pending.append(value.producer())
    return False


def _is_arithmetic(node: ir.Node | None) -> bool:
    return node is not None and node.domain == "" and node.op_type in ARITHMETIC


def _has_constant(value: ir.Value | None) -> bool:
    return value is not None and ir.convenience.get_const_tensor(value) is not None


def _description(activation: FoundActivation, path: Sequence[ir.Node]) -> str:
    """Return which nodes compute the output, and which only pass it on."""
    first, last = activation.nodes[0], activation.nodes[-1]
    if first is last:
        text = f"{_node_in_words(last)} computes the output"
    else:
        text = (
            f"{len(activation.nodes)} nodes from {_node_in_words(first)} to {_node_in_words(last)}"
            f" compute the output as a {activation.operator}"
        )
    if not path:
        return text
    shown = [*map(_node_in_words, path[:MAX_SHOWN])]
    if len(path) > MAX_SHOWN:
        shown[-1:] = [f"{len(path) - MAX_SHOWN + 1} more nodes"]
    return f"{text} through {' and '.join(shown)}"


def _node_in_words(node: ir.Node) -> str:
    article = "an" if node.op_type[0] in "AEIOU" else "a"
    return f"{node.op_type} node {node.name!r}" if node.name else f"{article} {node.op_type} node"
