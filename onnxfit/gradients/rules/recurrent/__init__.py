"""RNN, GRU and LSTM: backpropagation through time (Werbos 1990), with little work in its loops.

Y holds the hidden states of all steps, so the gates of all steps are computed again at once, by
matrix products over time and batch. The cell states of an LSTM follow from the gates by an
elementwise Scan; an LSTM with default activations is run in a Scan altogether. Another Scan goes
back through time. The coefficients of its linear recurrence are known by then, so a step is a few
elementwise operators and one product with R. The gradients of X, W, R, B and P are again products
and sums over all steps at once.

The equations of the operators, and the names in them (W, R, Wb, Rb, P; gates iofc, zrh), are those
of ONNX's definition; L is the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxfit.gradients.building import concat_sizes, zeros
from onnxfit.gradients.rules.recurrent.activations import activations_of
from onnxfit.gradients.rules.recurrent.cells import gru_gradients, rnn_gradients
from onnxfit.gradients.rules.recurrent.direction import Direction, DirectionGradients
from onnxfit.gradients.rules.recurrent.lstm import LstmCell, lstm_gradients
from onnxfit.gradients.table import InputGradient, rule
from onnxfit.graph.values import GraphBuilder, Value

Floats = Sequence[float]

# for each direction, whether it goes through time from the last step to the first
REVERSE = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}


@rule("RNN", all_outputs=True)
def rnn(
    op: GraphBuilder, x: Value, w: Value, r: Value, b: Value | None,
    sequence_lens: Value | None, initial_h: Value | None,
    y: Value, y_h: Value, dy: Value | None, dy_h: Value | None,
    *, direction: str, activations: Sequence[str] | None, activation_alpha: Floats | None,
    activation_beta: Floats | None, clip: float | None, layout: int,
) -> tuple[InputGradient, ...]:  # fmt: skip
    tensors = NodeTensors(x, w, r, b, None, sequence_lens, initial_h, None, y, dy, dy_h, None)
    directions = _directions(op, direction, layout, tensors)
    functions = activations_of(
        "RNN", activations, activation_alpha, activation_beta, clip, len(directions)
    )
    gradients = [rnn_gradients(one, f) for one, (f,) in zip(directions, functions)]
    return _entries(layout, gradients)[:6]


@rule("GRU", all_outputs=True)
def gru(
    op: GraphBuilder, x: Value, w: Value, r: Value, b: Value | None,
    sequence_lens: Value | None, initial_h: Value | None,
    y: Value, y_h: Value, dy: Value | None, dy_h: Value | None,
    *, direction: str, activations: Sequence[str] | None, activation_alpha: Floats | None,
    activation_beta: Floats | None, clip: float | None, layout: int, linear_before_reset: int,
) -> tuple[InputGradient, ...]:  # fmt: skip
    tensors = NodeTensors(x, w, r, b, None, sequence_lens, initial_h, None, y, dy, dy_h, None)
    directions = _directions(op, direction, layout, tensors)
    functions = activations_of(
        "GRU", activations, activation_alpha, activation_beta, clip, len(directions)
    )
    gradients = [
        gru_gradients(one, f, g, bool(linear_before_reset))
        for one, (f, g) in zip(directions, functions)
    ]
    return _entries(layout, gradients)[:6]


@rule("LSTM", all_outputs=True)
def lstm(
    op: GraphBuilder, x: Value, w: Value, r: Value, b: Value | None,
    sequence_lens: Value | None, initial_h: Value | None, initial_c: Value | None, p: Value | None,
    y: Value, y_h: Value, y_c: Value, dy: Value | None, dy_h: Value | None, dy_c: Value | None,
    *, direction: str, activations: Sequence[str] | None, activation_alpha: Floats | None,
    activation_beta: Floats | None, clip: float | None, layout: int, input_forget: int,
) -> tuple[InputGradient, ...]:  # fmt: skip
    tensors = NodeTensors(x, w, r, b, p, sequence_lens, initial_h, initial_c, y, dy, dy_h, dy_c)
    directions = _directions(op, direction, layout, tensors)
    functions = activations_of(
        "LSTM", activations, activation_alpha, activation_beta, clip, len(directions)
    )
    gradients = [
        lstm_gradients(one, LstmCell(f, g, h, bool(input_forget)))
        for one, (f, g, h) in zip(directions, functions)
    ]
    _replace_outputs(op, layout, directions, (y, y_h, y_c))
    return _entries(layout, gradients)


def _replace_outputs(
    op: GraphBuilder, layout: int, directions: Sequence[Direction], outputs: Sequence[Value]
) -> None:
    """Replace the node's outputs by those of the gradient's own loop, if it has one."""
    final_states = [one.final_states for one in directions if one.final_states is not None]
    if len(final_states) < len(directions):
        return
    y = _stack([one.y for one in directions], 1)
    replacements = [y, *(_stack(states) for states in zip(*final_states))]
    if layout:
        perms = [[2, 0, 1, 3], [1, 0, 2], [1, 0, 2]]
        replacements = [op.Transpose(v, perm=perm) for v, perm in zip(replacements, perms)]
    for old, new in zip(outputs, replacements):
        op.move_uses(old, new)


# From a node to its directions and back
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeTensors:
    """Inputs and outputs of a node, and the gradients that arrive at its outputs."""

    x: Value
    w: Value
    r: Value
    b: Value | None
    p: Value | None
    lengths: Value | None
    h0: Value | None
    c0: Value | None
    y: Value
    dy: Value | None
    dy_h: Value | None
    dy_c: Value | None

    def with_time_first(self, op: GraphBuilder) -> NodeTensors:
        """Return the tensors of a node that has `layout=1` as those of one that has `layout=0`."""

        def turned(value: Value | None, perm: Sequence[int]) -> Value | None:
            return None if value is None else op.Transpose(value, perm=perm)

        return replace(
            self,
            x=op.Transpose(self.x, perm=[1, 0, 2]),
            y=op.Transpose(self.y, perm=[1, 2, 0, 3]),
            dy=turned(self.dy, [1, 2, 0, 3]),
            h0=turned(self.h0, [1, 0, 2]),
            c0=turned(self.c0, [1, 0, 2]),
            dy_h=turned(self.dy_h, [1, 0, 2]),
            dy_c=turned(self.dy_c, [1, 0, 2]),
        )

    def with_lengths(self, op: GraphBuilder, sequence_lens: Value) -> NodeTensors:
        """Return the tensors with lengths as a column, and no gradient for empty sequences.

        The last state of an empty sequence is zero in onnxruntime, not its first state.
        """
        lengths = op.Unsqueeze(op.cast(sequence_lens, np.int64), [1])
        dy_h = None if self.dy_h is None else op.Where(lengths > 0, self.dy_h, 0)
        dy_c = None if self.dy_c is None else op.Where(lengths > 0, self.dy_c, 0)
        return replace(self, lengths=lengths, dy_h=dy_h, dy_c=dy_c)


def _directions(
    op: GraphBuilder, direction: str, layout: int, node: NodeTensors
) -> list[Direction]:
    """Split the tensors of a node into those of its directions."""
    if layout:
        node = node.with_time_first(op)
    if node.lengths is not None:
        node = node.with_lengths(op, node.lengths)
    reverse = REVERSE[direction]
    count = len(reverse)
    state_shape = concat_sizes(op, op.shape(node.x, 1, 2), op.shape(node.r, 2))
    zero_state = zeros(op, node.x, state_shape)

    def each(value: Value, axis: int = 0) -> list[Value]:
        values: Sequence[Value] = (value,)
        if count > 1:
            values = op.Split(value, _outputs=count, axis=axis, num_outputs=count)
        return [op.Squeeze(v, [axis]) for v in values]

    def optional(value: Value | None, axis: int = 0) -> Sequence[Value | None]:
        return [None] * count if value is None else each(value, axis)

    def state(value: Value | None) -> list[Value]:
        return [zero_state] * count if value is None else each(value)

    w = each(node.w)
    r = each(node.r)
    b = optional(node.b)
    p = optional(node.p)
    h0 = state(node.h0)
    c0 = state(node.c0)
    y = each(node.y, 1)
    dy = optional(node.dy, 1)
    dh = state(node.dy_h)
    dc = state(node.dy_c)
    return [
        Direction(
            op, reverse[k], node.x, w[k], r[k], b[k], p[k], h0[k], c0[k], y[k], dy[k], dh[k], dc[k],
            node.lengths,
        )
        for k in range(count)
    ]  # fmt: skip


def _entries(layout: int, gradients: Sequence[DirectionGradients]) -> tuple[InputGradient, ...]:
    """Return the rule's entries for X, W, R, B, sequence_lens, initial_h, initial_c and P."""

    def dx() -> Value:
        total = gradients[0].dx()
        for other in gradients[1:]:
            total = total + other.dx()
        return total.op.Transpose(total, perm=[1, 0, 2]) if layout else total

    return (
        dx,
        lambda: _stack([one.dw() for one in gradients]),
        lambda: _stack([one.dr() for one in gradients]),
        lambda: _stack([one.db() for one in gradients]),
        None,
        lambda: _stack([one.dh0 for one in gradients], layout),
        lambda: _stack([one.dc0 for one in gradients if one.dc0 is not None], layout),
        lambda: _stack([one.dp() for one in gradients if one.dp is not None]),
    )


def _stack(values: Sequence[Value], axis: int = 0) -> Value:
    """Join values along a new axis."""
    rows = [v.op.Unsqueeze(v, [axis]) for v in values]
    return rows[0] if len(rows) == 1 else rows[0].op.Concat(*rows, axis=axis)
