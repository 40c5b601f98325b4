"""Decide from the graph whether a model's output is probabilities or logits.

For probabilities, `logits_of` and `log_probabilities_of` find the input of the Sigmoid or Softmax.
The logarithm computed from it is exact where the probability is rounded to 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Union

import numpy as np
import onnx_ir as ir

from onnxfit.graph.values import GraphBuilder, Value

# Operators that move, copy, round or average numbers: their result is probabilities if their first
# input is, and any number if that is.
MOVING = {
    "AveragePool",
    "Cast",
    "CastLike",
    "DepthToSpace",
    "DequantizeLinear",
    "Dropout",
    "Expand",
    "Flatten",
    "Gather",
    "GatherElements",
    "GatherND",
    "GlobalAveragePool",
    "Identity",
    "LpNormalization",
    "QuantizeLinear",
    "ReduceMean",
    "Reshape",
    "Resize",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
    "Upsample",
}
# Operators with one input of data and one output, which only move numbers
ONLY_MOVING = {
    "Flatten",
    "Gather",
    "Identity",
    "Reshape",
    "Slice",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}
# The same, for probabilities only
PRESERVING = {*MOVING, "Clip", "Div"}
# Operators whose result may be any number
ANY_NUMBER = {"Add", "Conv", "ConvTranspose", "Gemm", "LogSoftmax", "MatMul"}
ARITHMETIC = {"Add", "Div", "Mul", "Sub"}
MAX_DEPTH = 8  # sums and products between an output and the operators that bound it
ROUNDING = 1e-6


@dataclass(frozen=True)
class LogitsDecision:
    """Decision whether an output is logits (else probabilities), and the reason."""

    logits: bool
    reason: str


def decide_logits(setting: bool | None, value: ir.Value, default: bool) -> LogitsDecision:
    """Decide whether `value` is taken as logits.

    `setting` wins unless it is None. Otherwise a Softmax or Sigmoid that computes `value` means
    probabilities, an operator whose result may be any number means logits, and `default` holds for
    any other graph.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y)'
    >>> model = ir.from_onnx_text(text + " { s = Softmax(x) y = Identity(s) }")
    >>> decide_logits(None, model.graph.outputs[0], True)
    LogitsDecision(logits=False, reason='a Softmax node computes the output')
    """
    if setting is not None:
        return LogitsDecision(bool(setting), f"from_logits={setting} was given")
    operator = _probabilities(value)
    if operator is not None:
        return LogitsDecision(False, _computed_by(*operator))
    node = _any_number(value)
    if node is not None:
        return LogitsDecision(True, _computed_by(node.op_type, node))
    return LogitsDecision(
        default, "the default of the loss, because the graph does not show what the output is"
    )


def probability_operator(value: ir.Value | None) -> str | None:
    """Return the operator, Sigmoid or Softmax, that makes a value probabilities, or None.

    Converters of classical models write the operator in other operators; it is found there too.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 1] x) => (float[N, 2] y) {'
    >>> text += "one = Constant<value_float=1.0>() p = Sigmoid(x) q = Sub(one, p)"
    >>> model = ir.from_onnx_text(text + " y = Concat<axis=1>(q, p) }")
    >>> probability_operator(model.graph.outputs[0])
    'Sigmoid'
    """
    operator = _probabilities(value)
    return None if operator is None else operator[0]


def without_mask(value: ir.Value) -> ir.Value:
    """Return the value that a Where selects from, if a Where computes `value`."""
    node = value.producer()
    if node is None or (node.op_type, node.domain) != ("Where", ""):
        return value
    return node.inputs[1] or value


def any_number_operator(value: ir.Value | None) -> str | None:
    """Return the operator after which a value may be any number; None if unknown."""
    node = _any_number(value)
    return None if node is None else node.op_type


def logits_of(op: GraphBuilder, value: ir.Value | None) -> Value | None:
    """Return z if `value` is the sigmoid of z, else None.

    Between the Sigmoid and `value`, operators may move numbers or change their float type; z has
    been through the same operators.

    - `op`: builder of the graph of `value`.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y)'
    >>> model = ir.from_onnx_text(text + " { s = Sigmoid(x) y = Identity(s) }")
    >>> logits_of(GraphBuilder(model.graph), model.graph.outputs[0]).ir.producer().inputs[0].name
    'x'
    """
    node = _own_node(op, value)
    if node is None or value is None:
        return None
    first = node.inputs[0] if node.inputs else None
    if node.op_type == "Sigmoid" and first is not None:
        return op.wrap(first)
    if node.op_type == "Reciprocal":  # 1 / (1 + e^u)
        exponent = _exponent_beside_one(first)
        return None if exponent is None else -op.wrap(exponent)
    return _moved(op, node, logits_of)


def log_probabilities_of(op: GraphBuilder, value: ir.Value | None) -> Value | None:
    """Return the logarithm of probabilities, computed without them; None if the graph shows none.

    The arguments are those of `logits_of`. Besides a Softmax or Sigmoid, `value` may be 1 minus a
    Sigmoid, a Concat of probabilities, or a Softmax that is spelled out.
    """
    logits = logits_of(op, value)
    if logits is not None:
        return -softplus(op, -logits)
    node = _own_node(op, value)
    if node is None:
        return None
    first = node.inputs[0] if node.inputs else None
    if node.op_type == "Softmax" and first is not None:
        return log_softmax(op, op.wrap(first), node.attributes.get_int("axis", -1))
    if node.op_type == "Exp" and first is not None:
        return op.wrap(first)
    if node.op_type == "Div" and _computes(first, "Exp") and _sums(node.inputs[1], first):
        assert first is not None
        exponential, total = first.producer(), node.inputs[1]
        assert exponential is not None
        assert exponential.inputs[0] is not None
        assert total is not None
        return op.wrap(exponential.inputs[0]) - op.Log(op.wrap(total))
    if node.op_type == "Sub" and _is_one(first):
        logits = logits_of(op, node.inputs[1])
        return None if logits is None else -softplus(op, logits)
    if node.op_type == "Concat":
        parts = [log_probabilities_of(op, part) for part in node.inputs]
        known = [part for part in parts if part is not None]
        axis = node.attributes.get_int("axis")
        return op.Concat(*known, axis=axis) if len(known) == len(parts) else None
    return _moved(op, node, log_probabilities_of)


Source = Callable[[GraphBuilder, Union[ir.Value, None]], Union[Value, None]]


def _moved(op: GraphBuilder, node: ir.Node, source: Source) -> Value | None:
    """Return what `source` gives for the input of a node that moves numbers, moved as well."""
    result = node.outputs[0]
    if node.op_type == "Cast":
        types = [v.dtype for v in (node.inputs[0], result) if v is not None]
        if not all(dtype is not None and dtype.is_floating_point() for dtype in types):
            return None
    elif node.op_type not in ONLY_MOVING:
        return None
    before = source(op, node.inputs[0])
    if before is None:
        return None
    others = [None if value is None else op.wrap(value) for value in node.inputs[1:]]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    moved: Value = getattr(op, node.op_type)(before, *others, **attributes)
    moved.ir.shape = result.shape  # inference may not know the sizes of a Reshape
    return moved


def _own_node(op: GraphBuilder, value: ir.Value | None) -> ir.Node | None:
    """Return the operator of ONNX that computes a value in the graph of `op`; None for another."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain == "" and node.graph is op.graph else None


def _exponent_beside_one(value: ir.Value | None) -> ir.Value | None:
    """Return u if a value is 1 + e^u, else None."""
    summands = _summands(value)
    for one, other in (summands, summands[::-1]) if len(summands) == 2 else ():
        if _is_one(one) and _computes(other, "Exp"):
            node = None if other is None else other.producer()
            return None if node is None else node.inputs[0]
    return None


@dataclass(frozen=True)
class _Bounded:
    """A bound of a value without negative elements.

    `largest` bounds the elements. `operator` and `node` made them probabilities; both are None for
    a constant.
    """

    largest: float
    operator: str | None = None
    node: ir.Node | None = None


def _probabilities(value: ir.Value | None) -> tuple[str, ir.Node] | None:
    """Return the operator that makes a value probabilities, and its node."""
    bounded = _bounded(value, MAX_DEPTH)
    if bounded is None or bounded.operator is None or bounded.node is None:
        return None
    is_probable = bounded.largest <= 1 + ROUNDING
    return (bounded.operator, bounded.node) if is_probable else None


def _bounded(value: ir.Value | None, depth: int) -> _Bounded | None:
    """Return a bound of a value that is computed from probabilities, or is a constant."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is not None:
        number = float(tensor.numpy().reshape(-1)[0]) if tensor.size == 1 else -1.0
        return _Bounded(number) if number >= 0 else None
    node = None if value is None else value.producer()
    if node is None or node.domain != "" or not depth:
        return None
    operator = _softmax_or_sigmoid(node)
    if operator is not None:
        return _Bounded(1.0, operator, node)
    if node.op_type in PRESERVING:
        return _quotient(node, depth) if node.op_type == "Div" else _bounded(node.inputs[0], depth)
    if node.op_type == "Sub" and _is_constant(node.inputs[0]):
        other = _probabilities(node.inputs[1])
        return _Bounded(1.0, *other) if other else None  # 1 - p, the first of two classes
    return _combined(node, depth - 1)


def _softmax_or_sigmoid(node: ir.Node) -> str | None:
    """Return "Softmax" or "Sigmoid" if a node computes one, perhaps spelled out."""
    first = node.inputs[0] if node.inputs else None
    if node.op_type in ("Sigmoid", "Softmax"):
        return node.op_type
    if node.op_type == "Reciprocal" and any(_computes(v, "Exp") for v in _summands(first)):
        return "Sigmoid"  # 1 / (1 + e^(-x))
    if node.op_type == "Exp" and _computes(first, "LogSoftmax"):
        return "Softmax"
    if node.op_type == "Div" and _computes(first, "Exp") and _sums(node.inputs[1], first):
        return "Softmax"  # e^x / sum e^x
    return None


def _quotient(node: ir.Node, depth: int) -> _Bounded | None:
    """Return the bound of a Div, assumed to normalize unless it divides by a constant."""
    first, second = node.inputs
    if _computes(first, "Add"):
        # Converters add a small number to the divisor, so that it is never 0.
        summand = _probabilities(_summands(first)[0])
        if summand is not None:
            return _Bounded(1.0, *summand)
    bounded = _bounded(first, depth)
    if bounded is None or bounded.operator is None:
        return None
    divisor = _bounded(second, depth)
    if bounded.largest > 1 and divisor is not None and divisor.operator is None:
        return replace(bounded, largest=bounded.largest / max(divisor.largest, ROUNDING))
    return replace(bounded, largest=min(bounded.largest, 1.0))


def _combined(node: ir.Node, depth: int) -> _Bounded | None:
    """Return the bound of a mean, a sum, a product or a choice of bounded values."""
    inputs = node.inputs[1:] if node.op_type == "Where" else node.inputs
    if node.op_type not in ("Add", "Concat", "MatMul", "Mean", "Mul", "Sum", "Where"):
        return None
    bounds = []
    for value in inputs:
        bounded = _bounded(value, depth)
        if bounded is None or (node.op_type == "Concat" and bounded.operator is None):
            return None
        bounds.append(bounded)
    source = next((one for one in bounds if one.operator is not None), None)
    if source is None:
        return None
    numbers = [one.largest for one in bounds]
    if node.op_type == "MatMul":
        # The rows of a Softmax sum up to 1, so the product is a weighted mean.
        if not _computes(node.inputs[0], "Softmax"):
            return None
        return replace(source, largest=numbers[1])
    largest = {
        "Mul": math.prod(numbers),
        "Mean": sum(numbers) / len(numbers),
        "Concat": max(numbers),
        "Where": max(numbers),
    }.get(node.op_type, sum(numbers))
    return replace(source, largest=largest)


def _any_number(value: ir.Value | None) -> ir.Node | None:
    """Return the node whose result may be any number, if only changes of shape follow it."""
    node = None if value is None else value.producer()
    while node is not None and node.domain == "" and node.op_type in {*MOVING, "Where"}:
        first = node.inputs[node.op_type == "Where"] if node.inputs else None
        node = None if first is None else first.producer()
    if node is None or node.domain != "" or node.op_type not in ANY_NUMBER:
        return None
    # Sums and averages of probabilities, such as a mixture, may be probabilities themselves.
    if node.op_type == "Add" and _adds_probabilities(node):
        return None
    if node.op_type in ("Gemm", "MatMul") and all(_probabilities(v) for v in node.inputs[:2]):
        return None
    return node


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
            if _probabilities(value):
                return True
            if value is not None and _is_arithmetic(value.producer()):
                pending.append(value.producer())
    return False


def _is_arithmetic(node: ir.Node | None) -> bool:
    return node is not None and node.domain == "" and node.op_type in ARITHMETIC


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and ir.convenience.get_const_tensor(value) is not None


def _is_one(value: ir.Value | None) -> bool:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return tensor is not None and bool((tensor.numpy() == 1).all())


def _computes(value: ir.Value | None, op_type: str) -> bool:
    """Return whether an operator of this type computes a value."""
    node = None if value is None else value.producer()
    return node is not None and (node.op_type, node.domain) == (op_type, "")


def _sums(value: ir.Value | None, summed: ir.Value | None) -> bool:
    """Return whether a ReduceSum over `summed` computes a value."""
    node = None if value is None else value.producer()
    return node is not None and node.op_type == "ReduceSum" and node.inputs[0] is summed


def _summands(value: ir.Value | None) -> tuple[ir.Value | None, ...]:
    """Return the inputs of the Add that computes a value; () if no Add does."""
    node = None if value is None else value.producer()
    if node is None or (node.op_type, node.domain) != ("Add", ""):
        return ()
    return tuple(node.inputs)


def _computed_by(op_type: str, node: ir.Node) -> str:
    name = f"{op_type} node {node.name!r}" if node.name else f"a {op_type} node"
    return f"{name} computes the output"


def softplus(op: GraphBuilder, x: Value) -> Value:
    """Return log(1 + e^x), with the exact gradient 1/2 at 0, for any gradient of |x| there."""
    size = abs(x)
    return 0.5 * (x + size) + op.Log(1 + op.Exp(-size))


def log_softmax(op: GraphBuilder, x: Value, axis: int) -> Value:
    """Return the logarithm of the softmax of `x` along an axis."""
    if x.dtype == np.float32:
        return op.LogSoftmax(x, axis=axis)
    # onnxruntime's gradient of LogSoftmax is float32 only.
    return x - op.ReduceLogSumExp(x, [axis], keepdims=1)
