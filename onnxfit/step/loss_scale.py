"""Dynamic loss scaling (Micikevicius et al. 2018), inside the graphs of a step.

The gradients of float16 become 0 below 6e-8. So the loss is multiplied by a scale before they are
computed, and the gradients of the weights, which are float32, are divided by it. Where one of these
is infinite or NaN, the scale was too large: weights and slots keep their values, and the scale is
halved. After 2000 updates in a row it is doubled. Factors and interval are those of PyTorch's
`torch.amp.GradScaler`; the scale is a power of two, so that it changes no digit of a gradient.

The scale and two counters are a part of the training state, beside the slots of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.graph import names, scopes
from onnxfit.graph.values import GraphBuilder, Value

INITIAL_SCALE = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000  # updates in a row after which the scale grows
# Between these, the scale and its inverse are float32 numbers of full precision.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 2.0**126


def initial_state() -> dict[str, npt.NDArray[Any]]:
    """Return the scale and the counters before the first step, by the names of their tensors."""
    return {
        names.LOSS_SCALE: np.array(INITIAL_SCALE, np.float32),
        names.FINITE_STEPS: np.array(0, np.int64),
        names.SKIPPED_STEPS: np.array(0, np.int64),
    }


def scale_input(op: GraphBuilder) -> Value:
    """Return the input with the scale, which is added if the graph lacks it."""
    return _state_input(op, names.LOSS_SCALE)


def unscaled(op: GraphBuilder, gradients: Mapping[str, Value]) -> dict[str, Value]:
    """Return gradients divided by the scale; infinite ones and NaN stay what they are."""
    with op.scope(scopes.LOSS_SCALE):
        inverse = 1 / scale_input(op)
        return {name: g * op.cast(inverse, g.dtype) for name, g in gradients.items()}


def kept_if_not_finite(op: GraphBuilder, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the next values of inputs, by name, with the old number for each infinite or NaN."""
    inputs = {value.name: value for value in op.graph.inputs}
    with op.scope(scopes.LOSS_SCALE):
        return {
            name: op.Where(_is_finite(op, value), value, op.wrap(inputs[name]))
            for name, value in values.items()
        }


def _is_finite(op: GraphBuilder, value: Value) -> Value:
    return op.Equal(value - value, 0)


def _state_input(op: GraphBuilder, name: str) -> Value:
    for value in op.graph.inputs:
        if value.name == name:
            return op.wrap(value)
    initial = initial_state()[name]
    return op.input(name, initial.dtype, ())


class GuardedUpdate:
    """An update that is skipped where a gradient is infinite or NaN.

    - `op`: the builder of the graph. The counters become inputs and outputs of it, as the scale.
    - `gradients`: all gradients of the update, unscaled.
    """

    def __init__(self, op: GraphBuilder, gradients: Mapping[str, Value]) -> None:
        self._op = op
        with op.scope(scopes.LOSS_SCALE):
            # The difference of a number and itself is 0 or NaN, and NaN spreads to the sum.
            sums = [
                op.cast(op.ReduceSum(g - g, keepdims=0), np.float32) for g in gradients.values()
            ]
            self._all_finite = op.Equal(op.Sum(*sums), 0)

    def steps_done(self, done: Value) -> Value:
        """Return the updates that were not skipped, of `done` in all."""
        with self._op.scope(scopes.LOSS_SCALE):
            return done - _state_input(self._op, names.SKIPPED_STEPS)

    def guard(self, new: Value, old: Value) -> Value:
        """Return the next value of a weight or slot: `old` if the update is skipped."""
        with self._op.scope(scopes.LOSS_SCALE):
            return self._op.Where(self._all_finite, new, old)

    def add_outputs(self) -> None:
        """Add the next scale and counters as outputs of the graph."""
        op = self._op
        scale = scale_input(op)
        finite, skipped = (
            _state_input(op, name) for name in (names.FINITE_STEPS, names.SKIPPED_STEPS)
        )
        with op.scope(scopes.LOSS_SCALE):
            one_more = finite + 1
            grows = op.Equal(one_more, GROWTH_INTERVAL)
            after_update = op.Where(grows, scale * GROWTH, scale)
            next_scale = op.Where(self._all_finite, after_update, scale * BACKOFF)
            next_values = {
                names.LOSS_SCALE: op.Clip(next_scale, SMALLEST_SCALE, LARGEST_SCALE),
                names.FINITE_STEPS: op.Where(
                    op.And(self._all_finite, op.Not(grows)), one_more, op.constant(0)
                ),
                names.SKIPPED_STEPS: op.Where(self._all_finite, skipped, skipped + 1),
            }
        for name, value in next_values.items():
            op.output(names.updated(name), value)
