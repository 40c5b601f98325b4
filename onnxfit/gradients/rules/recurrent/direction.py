"""One direction of a recurrent node: its values, the loops through its steps, its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onnxfit.gradients.broadcasting import sum_of_rows
from onnxfit.gradients.building import INT64_MAX, arange, axis_size, concat_sizes
from onnxfit.graph.steps import Step, Stepped, Tensors, scan_steps
from onnxfit.graph.values import GraphBuilder, Value


def flatten_time(steps: Value) -> Value:
    """Return `(time, batch, n)` as `(time * batch, n)`."""
    return steps.op.Flatten(steps, axis=2)


def split_gates(value: Value, counts: tuple[int, int], axis: int = 2) -> tuple[Value, Value]:
    """Split an axis of concatenated gates after the first `counts[0]` gates."""
    op = value.op
    gates = sum(counts)
    size = value.shape[axis] if value.shape is not None else None
    if isinstance(size, int):
        sizes = [size // gates * count for count in counts]
        first, second = op.Split(value, sizes, _outputs=2, axis=axis)
        return first, second
    each = op.Split(value, _outputs=gates, axis=axis, num_outputs=gates)
    return op.Concat(*each[: counts[0]], axis=axis), each[-1]


@dataclass
class Direction:
    """One direction of a node, time first.

    x is `(time, batch, input)`; y and dy are `(time, batch, hidden)`; states and their gradients
    are `(batch, hidden)`, zero where the node has none. The names of the weights are ONNX's.
    """

    op: GraphBuilder
    reverse: bool
    x: Value
    w: Value
    r: Value
    b: Value | None
    p: Value | None
    h0: Value
    c0: Value
    y: Value
    dy: Value | None
    dh: Value
    dc: Value
    lengths: Value | None  # (batch, 1), int64
    # The last h and c, if the gradient runs the steps itself and replaces the node.
    final_states: tuple[Value, Value] | None = None

    @cached_property
    def valid(self) -> Value | None:
        """Mask of the steps that are not padding, `(time, batch, 1)`; None if all are valid."""
        return None if self.lengths is None else self._time_indices() < self.lengths

    def _time_indices(self) -> Value:
        x = self.x
        if x.shape is not None and isinstance(x.shape[0], int):
            return self.op.constant(np.arange(x.shape[0], dtype=np.int64)[:, None, None])
        return self.op.Unsqueeze(arange(self.op, axis_size(self.op, x, 0)), [1, 2])

    def masked(self, value: Value, padding: float = 0) -> Value:
        """Return the value at valid steps, and the number `padding` at others."""
        return value if self.valid is None else self.op.Where(self.valid, value, padding)

    def previous(self, states: Value, first: Value) -> Value:
        """Return the state before each step, for the states after each step."""
        op = self.op
        first = op.Unsqueeze(first, [0])
        if not self.reverse:
            return op.Concat(first, op.Slice(states, [0], [-1], [0]), axis=0)
        later = op.Concat(op.Slice(states, [1], [INT64_MAX], [0]), first, axis=0)
        if self.lengths is None:
            return later
        return op.Where(self._time_indices() + 1 < self.lengths, later, first)

    def by_time(self, flat: Value) -> Value:
        """Return `(time * batch, n)` as `(time, batch, n)`."""
        return self.op.Reshape(flat, concat_sizes(self.op, self.op.shape(self.x, 0, 2), -1))

    @cached_property
    def flat_inputs(self) -> Value:
        """x as `(time * batch, input)`, zero in the padding."""
        return flatten_time(self.masked(self.x))

    @cached_property
    def h_prev(self) -> Value:
        """The hidden state before each step."""
        return self.previous(self.y, self.h0)

    @cached_property
    def biases(self) -> tuple[Value | None, Value | None]:
        """Wb and Rb."""
        if self.b is None:
            return None, None
        wb, rb = self.op.Split(self.b, _outputs=2, num_outputs=2)
        return wb, rb

    @property
    def bias_sum(self) -> Value | None:
        """Wb + Rb."""
        wb, rb = self.biases
        return None if wb is None or rb is None else wb + rb

    def scan_forward(
        self, step: Step, states: Tensors, slices: Tensors
    ) -> tuple[list[Value], list[Value]]:
        """Run `step` in the node's order of time."""
        return scan_steps(self.op, step, states, slices, self.reverse)

    def scan_back(
        self, step: Step, states: Tensors, slices: Tensors
    ) -> tuple[list[Value], list[Value]]:
        """Run `step` against the node's order of time.

        `step` describes a valid step. Its first state is dL/dh with the step's own dy added;
        padding passes that state on unchanged.
        """
        extra = [] if self.dy is None else [self.masked(self.dy)]
        if self.valid is not None:
            extra.append(self.op.cast(~self.valid, self.x.dtype))

        def padded_step(op: GraphBuilder, states: Tensors, slices: Tensors) -> Stepped:
            dh, *others = states
            added = list(slices[: len(extra)])
            if self.dy is not None:
                dh = dh + added.pop(0)
            (dh_before, *others), outputs = step(op, [dh, *others], slices[len(extra) :])
            if added:
                dh_before = dh_before + added[0] * dh
            return [dh_before, *others], outputs

        return scan_steps(self.op, padded_step, states, [*extra, *slices], not self.reverse)


@dataclass
class DirectionGradients:
    """Gradients of one direction.

    `da_x` is the gradient of the gates' arguments as they depend on X, `da_h` as they depend on
    the previous h; a reset gate makes them differ. Both are `(time, batch, gates * hidden)`.
    `custom_dr` replaces the formula of dR.
    """

    direction: Direction
    da_x: Value
    da_h: Value
    dh0: Value
    dc0: Value | None = None
    custom_dr: Callable[[], Value] | None = None
    dp: Callable[[], Value] | None = None

    def dx(self) -> Value:
        return self.direction.by_time(flatten_time(self.da_x) @ self.direction.w)

    def dw(self) -> Value:
        direction = self.direction
        return direction.op.Gemm(flatten_time(self.da_x), direction.flat_inputs, transA=1)

    def dr(self) -> Value:
        if self.custom_dr is not None:
            return self.custom_dr()
        flat_h = flatten_time(self.da_h)
        return self.direction.op.Gemm(flat_h, flatten_time(self.direction.h_prev), transA=1)

    def db(self) -> Value:
        """Return the gradients of Wb and Rb, concatenated."""
        op = self.direction.op
        wb = sum_of_rows(op, flatten_time(self.da_x))
        rb = wb if self.da_h is self.da_x else sum_of_rows(op, flatten_time(self.da_h))
        return op.Concat(wb, rb, axis=0)
