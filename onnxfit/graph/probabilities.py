"""Tell whether a value is a probability, by the operators that compute it."""

from __future__ import annotations

import onnx_ir as ir

# operators whose results are probabilities if their first input is
_PASS_THROUGH = {
    "Identity",
    "Cast",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Gather",
    "Slice",
    "LpNormalization",
    "Div",
}


def source_of_probabilities(value: ir.Value | None) -> str | None:
    """Return the operator, "Sigmoid" or "Softmax", that makes `value` probabilities, else None.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 1] x) => (float[N, 2] y) {'
    >>> model = ir.from_onnx_text(text + '''one = Constant<value_float=1.0>() p = Sigmoid(x)
    ...     q = Sub(one, p) y = Concat<axis=1>(q, p) }''')
    >>> source_of_probabilities(model.graph.outputs[0])
    'Sigmoid'
    """
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return None
    first = node.inputs[0] if node.inputs else None
    if node.op_type in ("Sigmoid", "Softmax"):
        return node.op_type
    if node.op_type == "Reciprocal" and any(_is_output_of(v, "Exp") for v in _summands(first)):
        return "Sigmoid"  # 1 / (1 + e^(-x))
    # p / (p + ε): the ε keeps the sum that is divided by from 0
    if node.op_type == "Div" and _is_output_of(first, "Add"):
        return source_of_probabilities(_summands(first)[0])
    if node.op_type in _PASS_THROUGH:
        return source_of_probabilities(first)
    is_constant = first is not None and ir.convenience.get_const_tensor(first) is not None
    if node.op_type == "Sub" and is_constant:
        return source_of_probabilities(node.inputs[1])  # 1 - p, the first of two classes
    if node.op_type == "Concat":
        sources = [source_of_probabilities(v) for v in dict.fromkeys(node.inputs)]
        return sources[0] if all(sources) else None
    return None


def _is_output_of(value: ir.Value | None, op_type: str) -> bool:
    node = None if value is None else value.producer()
    return node is not None and (node.op_type, node.domain) == (op_type, "")


def _summands(value: ir.Value | None) -> tuple[ir.Value | None, ...]:
    """Return the inputs of the Add that computes a value, () if no Add does."""
    node = None if value is None else value.producer()
    is_add = node is not None and (node.op_type, node.domain) == ("Add", "")
    return tuple(node.inputs) if node is not None and is_add else ()
