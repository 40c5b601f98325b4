"""Lowerings of LSTM and GRU to onnxruntime's training operators, one for each direction."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.onnxruntime.lowerings import NodeToLower, gather_at, lowering, require_size
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.values import GraphBuilder, Value

DEFAULT_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}
GATES = {"LSTM": 4, "GRU": 3}
# whether each direction goes backward in time
DIRECTIONS = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}


@lowering("LSTM", "GRU")
def recurrent(op: GraphBuilder, node: NodeToLower) -> tuple[Value, ...]:
    _check_configuration(node)
    directions = DIRECTIONS[node.text_attribute("direction", "forward")]
    results = [_one_direction(op, node, i, backward) for i, backward in enumerate(directions)]
    if len(results) == 1:
        return results[0]
    sequences, *finals = zip(*results)
    return (op.Concat(*sequences, axis=1), *(op.Concat(*final, axis=0) for final in finals))


def _check_configuration(node: NodeToLower) -> None:
    """Raise NoGradientError for a configuration that the training operators do not support."""
    defaults = DEFAULT_ACTIVATIONS[node.op_type]
    activations = [
        a.decode() if isinstance(a, bytes) else a for a in node.attribute("activations") or ()
    ]
    for i in range(0, len(activations), len(defaults)):
        one_direction = activations[i : i + len(defaults)]
        if [a.lower() for a in one_direction] != [a.lower() for a in defaults]:
            raise NoGradientError(
                f"it has activations {activations}", f"use activations {defaults}"
            )
    for name in ("clip", "input_forget", "layout"):
        if node.attribute(name, 0):
            raise NoGradientError(f"it has {name}={node.attribute(name)}", f"use {name}=0")
    # Without a gradient of W or R, the operator's gradient writes to unallocated memory: the
    # process crashes.
    for index, name in ((1, "W"), (2, "R")):
        if index not in node.path_inputs:
            raise NoGradientError(
                f"its weights {name} are not trained", f"include its {name} in weights="
            )
    for index, name in ((4, "sequence_lens"), (7, "peephole weights P")):
        if node.optional_input(index) is not None:
            raise NoGradientError(f"it has {name}", f"use {node.op_type} without {name}")


def _one_direction(
    op: GraphBuilder, node: NodeToLower, direction: int, backward: bool
) -> tuple[Value, ...]:
    """Return all hidden states `(time, 1, batch, hidden)`, the last one, and the last cell state.

    GRU has no cell state.

    A backward direction reads the sequence reversed, and its hidden states are reversed again.
    """
    x = node.input(0)
    hidden = node.attribute("hidden_size")
    directions = require_size(node.input(1), 0)
    inputs = []
    for index in (1, 2, 3, 5, 6):
        value = node.optional_input(index)
        if value is not None and directions > 1:
            value = op.Slice(value, [direction], [direction + 1], [0])
        inputs.append(value)
    w, r, bias, h0, c0 = inputs
    reversed_time = np.arange(require_size(x, 0))[::-1] if backward else None
    if reversed_time is not None:
        x = gather_at(op, x, reversed_time, 0)
    if bias is None:
        bias = op.constant(np.zeros((1, 2 * GATES[node.op_type] * hidden)), x.dtype)
    zero = _zero_state(op, x, hidden)
    states = [zero if h0 is None else h0]
    if node.op_type == "LSTM":
        states.append(zero if c0 is None else c0)
    y, *finals = _training_operator(op, node, x, [w, r, bias, None, *states])
    if reversed_time is not None:
        y = gather_at(op, y, reversed_time, 0)
    return y, *finals


def _zero_state(op: GraphBuilder, x: Value, hidden: int) -> Value:
    """Return zeros of shape `(1, batch, hidden)`."""
    batch = op.Slice(op.Shape(x), [1], [2])
    shape = op.Concat([1], batch, [hidden], axis=0)
    return op.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, x.dtype)))


def _training_operator(
    op: GraphBuilder, node: NodeToLower, x: Value, inputs: list[Value | None]
) -> tuple[Value, ...]:
    """Add LSTMTraining or GRUTraining; return the outputs that they share with LSTM and GRU.

    The further outputs are for the builder's gradient. ONNX does not infer their shapes.
    """
    hidden = node.attribute("hidden_size")
    attributes: dict[str, Any] = {"hidden_size": hidden}
    assert x.shape is not None
    time, batch = x.shape[:2]
    if node.op_type == "GRU":
        attributes["linear_before_reset"] = node.attribute("linear_before_reset", 0)
        intermediate = [[time, 1, batch, 3 * hidden]]
    else:
        intermediate = [[time, 1, batch, hidden], [time, 1, batch, 4 * hidden]]
    finals = [[1, batch, hidden]] * (len(inputs) - 4)
    shapes = [[time, 1, batch, hidden], *finals, *intermediate]
    call = getattr(op, f"{node.op_type}Training")
    outputs: tuple[Value, ...] = call(
        x, *inputs, _outputs=len(shapes), _domain="com.microsoft", **attributes
    )
    for value, shape in zip(outputs, shapes):
        value.ir.shape = ir.Shape(shape)
        value.ir.type = x.ir.type
    return outputs[: 1 + len(finals)]
