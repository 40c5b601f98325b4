"""LSTM and GRU in the form that onnxruntime's builder differentiates correctly: its training
operators, forward in time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.onnxruntime.forms import attribute, form, given, needed, size, text
from onnxfit.gradients.onnxruntime.movement import taken
from onnxfit.gradients.paths import PathNode
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.values import GraphBuilder, Value

DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}
GATES = {"LSTM": 4, "GRU": 3}


@form("LSTM", "GRU")
def recurrent(op: GraphBuilder, path_node: PathNode) -> tuple[Value, ...]:
    x = needed(op, path_node)
    _check(path_node)
    direction = text(path_node, "direction", "forward")
    reversed_ = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    runs = [_run(op, path_node, x, d, backwards) for d, backwards in enumerate(reversed_)]
    if len(runs) == 1:
        return runs[0]
    return tuple(
        op.Concat(*outputs, axis=1 if i == 0 else 0) for i, outputs in enumerate(zip(*runs))
    )


def _check(path_node: PathNode) -> None:
    kind = path_node.node.op_type
    activations = [
        a.decode() if isinstance(a, bytes) else a for a in attribute(path_node, "activations") or ()
    ]
    for i in range(0, len(activations), len(DEFAULTS[kind])):
        if [a.lower() for a in activations[i : i + len(DEFAULTS[kind])]] != [
            a.lower() for a in DEFAULTS[kind]
        ]:
            raise NoGradientError(f"activations {activations}", f"activations {DEFAULTS[kind]}")
    for name in ("clip", "input_forget", "layout"):
        if attribute(path_node, name, 0):
            raise NoGradientError(f"{name}={attribute(path_node, name)}", f"{name}=0, or no {name}")
    for index, what in ((4, "sequence_lens"), (7, "peephole weights P")):
        if index < len(path_node.node.inputs) and path_node.node.inputs[index] is not None:
            raise NoGradientError(what, f"{kind} without {what}")


def _run(
    op: GraphBuilder, path_node: PathNode, x: Value, d: int, backwards: bool
) -> tuple[Value, ...]:
    """One direction: all hidden states `(time, 1, batch, hidden)`, the last one, and for LSTM the
    last cell state.
    """
    kind, hidden = path_node.node.op_type, attribute(path_node, "hidden_size")
    directions = size(needed(op, path_node, 1), 0)

    def own(index: int) -> Value | None:
        value = given(op, path_node, index)
        return value if value is None or directions == 1 else op.Slice(value, [d], [d + 1], [0])

    if backwards:
        x = taken(op, x, np.arange(size(x, 0))[::-1], 0)
    bias = own(3)
    if bias is None:
        bias = op.constant(np.zeros((1, 2 * GATES[kind] * hidden)), x.dtype)
    batch = op.Slice(op.Shape(x), [1], [2])
    zero = op.ConstantOfShape(
        op.Concat([1], batch, [hidden], axis=0), value=ir.tensor(np.zeros(1, x.dtype))
    )
    states = [
        zero if given is None else given
        for given in ([own(5), own(6)] if kind == "LSTM" else [own(5)])
    ]
    extra: dict[str, Any] = (
        {"linear_before_reset": attribute(path_node, "linear_before_reset", 0)}
        if kind == "GRU"
        else {}
    )
    outputs = getattr(op, f"{kind}Training")(
        x,
        own(1),
        own(2),
        bias,
        None,
        *states,
        _outputs=5 if kind == "LSTM" else 3,
        hidden_size=hidden,
        _domain="com.microsoft",
        **extra,
    )
    assert x.shape is not None
    time, n = x.shape[0], x.shape[1]
    shapes = [
        [time, 1, n, hidden],
        [1, n, hidden],
        [1, n, hidden],
        [time, 1, n, hidden],
        [time, 1, n, 4 * hidden],
    ]
    if kind == "GRU":
        shapes[2:] = [[time, 1, n, 3 * hidden]]
    for value, shape in zip(outputs, shapes):
        value.ir.shape, value.ir.type = ir.Shape(shape), x.ir.type
    y, *last = outputs[: 3 if kind == "LSTM" else 2]
    return (taken(op, y, np.arange(size(x, 0))[::-1], 0) if backwards else y, *last)
