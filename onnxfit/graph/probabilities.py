"""Decide whether a model's output is probabilities or logits, as far as the graph tells."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

# Operators whose result is probabilities if their first input is.
PRESERVING = {
    "Cast",
    "Div",
    "Flatten",
    "Gather",
    "Identity",
    "LpNormalization",
    "Reshape",
    "Slice",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}
# Operators whose result may be any number.
ANY_NUMBER = {"Add", "Conv", "ConvTranspose", "Gemm", "LogSoftmax", "MatMul"}
ARITHMETIC = {"Add", "Div", "Mul", "Sub"}


@dataclass(frozen=True)
class LogitsDecision:
    """Decision whether an output is logits (else probabilities), and the reason."""

    logits: bool
    reason: str


def decide_logits(setting: bool | None, value: ir.Value, default: bool) -> LogitsDecision:
    """Decide whether `value` is taken as logits.

    `setting` wins unless it is None. Otherwise a Softmax or Sigmoid that computes `value` means
    probabilities, an operator that gives any number means logits, and where the graph does not
    tell, `default` holds.

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
    return LogitsDecision(default, "the default of the loss, as the graph does not tell")


def probability_operator(value: ir.Value | None) -> str | None:
    """Return the operator, Sigmoid or Softmax, that makes a value probabilities, or None.

    The operator may be hidden as converters of classical models hide it.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 1] x) => (float[N, 2] y) {'
    >>> text += "one = Constant<value_float=1.0>() p = Sigmoid(x) q = Sub(one, p)"
    >>> model = ir.from_onnx_text(text + " y = Concat<axis=1>(q, p) }")
    >>> probability_operator(model.graph.outputs[0])
    'Sigmoid'
    """
    operator = _probabilities(value)
    return None if operator is None else operator[0]


def without_mask(value: ir.Value) -> ir.Value:
    """Return the value that a Where chooses from, if a Where computes `value`."""
    node = value.producer()
    if node is None or (node.op_type, node.domain) != ("Where", ""):
        return value
    return node.inputs[1] or value


def _probabilities(value: ir.Value | None) -> tuple[str, ir.Node] | None:
    """Return the operator that makes a value probabilities, and its node."""
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return None
    first = node.inputs[0] if node.inputs else None
    if node.op_type in ("Sigmoid", "Softmax"):
        return node.op_type, node
    if node.op_type == "Reciprocal" and any(_computes(v, "Exp") for v in _summands(first)):
        return "Sigmoid", node  # 1 / (1 + e^(-x))
    if node.op_type == "Div" and _computes(first, "Add"):
        # Converters add a small number to the divisor, so that it is never 0.
        return _probabilities(_summands(first)[0])
    if node.op_type in PRESERVING:
        return _probabilities(first)
    if node.op_type == "Sub" and _is_constant(first):
        return _probabilities(node.inputs[1])  # 1 - p, the first of two classes
    if node.op_type == "Concat":
        operators = [_probabilities(v) for v in dict.fromkeys(node.inputs)]
        return operators[0] if all(operators) else None
    return None


def _any_number(value: ir.Value | None) -> ir.Node | None:
    """Return the node whose result may be any number, if only changes of shape follow it."""
    node = None if value is None else value.producer()
    while node is not None and node.domain == "" and node.op_type in PRESERVING - {"Div"}:
        first = node.inputs[0] if node.inputs else None
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


def _computes(value: ir.Value | None, op_type: str) -> bool:
    """Return whether an operator of this type computes a value."""
    node = None if value is None else value.producer()
    return node is not None and (node.op_type, node.domain) == (op_type, "")


def _summands(value: ir.Value | None) -> tuple[ir.Value | None, ...]:
    """Return the inputs of the Add that computes a value; () if no Add does."""
    node = None if value is None else value.producer()
    if node is None or (node.op_type, node.domain) != ("Add", ""):
        return ()
    return tuple(node.inputs)


def _computed_by(op_type: str, node: ir.Node) -> str:
    name = f"{op_type} node {node.name!r}" if node.name else f"a {op_type} node"
    return f"{name} computes the output"
