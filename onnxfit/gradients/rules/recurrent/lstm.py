"""The gradients of one direction of an LSTM.

With previous states h_prev and c_prev, and peepholes Pi, Pf, Po:

    i = f(ai + Pi c_prev)    forget = f(af + Pf c_prev)    n = g(an)
    c = forget c_prev + i n  o = f(ao + Po c)              h = o h(c)

where ai, ao, af and an are the gates' columns of x W' + h_prev R' + Wb + Rb; coupled gates
(`input_forget`) have forget = 1 - i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.rules.recurrent.activations import Activation, activations_of
from onnxfit.gradients.rules.recurrent.direction import (
    Direction,
    DirectionGradients,
    flatten_time,
    split_gates,
)
from onnxfit.graph.steps import Stepped, Tensors
from onnxfit.graph.values import GraphBuilder, Value


@dataclass(frozen=True)
class LstmCell:
    """The activations of an LSTM, and whether its forget gate is 1 - i."""

    f: Activation
    g: Activation
    h: Activation
    coupled: bool

    @property
    def is_standard(self) -> bool:
        defaults = activations_of("LSTM", None, None, None, None, directions=1)
        return not self.coupled and [[self.f, self.g, self.h]] == defaults

    def input_and_forget(self, ai: Value, af: Value) -> tuple[Value, Value]:
        """Return both gates from their arguments."""
        i = self.f(ai)
        return i, 1 - i if self.coupled else self.f(af)


@dataclass(frozen=True)
class LstmSteps:
    """Values of all steps of an LSTM, `(time, batch, hidden)`; a* are arguments of activations."""

    ai: Value
    ao: Value
    af: Value
    an: Value
    i: Value
    forget: Value
    n: Value
    c: Value
    c_prev: Value


def lstm_gradients(direction: Direction, cell: LstmCell) -> DirectionGradients:
    """Return the gradients of a direction, by the cheapest formula that applies to it."""
    op = direction.op
    has_padding = direction.lengths is not None
    if cell.is_standard and direction.p is None and not has_padding and not op.in_body:
        return _standard_lstm(direction)
    h_prev = flatten_time(direction.h_prev)
    a = direction.by_time(op.Gemm(h_prev, direction.r, _from_inputs(direction), transB=1))
    ai, ao, af, an = op.Split(a, _outputs=4, axis=2, num_outputs=4)
    if direction.p is None:
        n = cell.g(an)
        i, forget = cell.input_and_forget(ai, af)
        c = _cell_states(direction, i, forget, n)
        c_prev = direction.previous(c, direction.c0)
        return _gradients_of(direction, cell, LstmSteps(ai, ao, af, an, i, forget, n, c, c_prev))
    pi, po, pf = op.Split(direction.p, _outputs=3, axis=0, num_outputs=3)
    n = cell.g(an)
    c = _peephole_cell_states(direction, cell, (ai, af, n), pi, pf)
    c_prev = direction.previous(c, direction.c0)
    ai = ai + c_prev * pi
    af = af + c_prev * pf
    ao = ao + c * po
    i, forget = cell.input_and_forget(ai, af)
    steps = LstmSteps(ai, ao, af, an, i, forget, n, c, c_prev)
    return _gradients_of(direction, cell, steps, (pi, po, pf))


def _from_inputs(direction: Direction) -> Value:
    """The part of the gates' arguments that does not depend on h: x W' + Wb + Rb."""
    op = direction.op
    return op.Gemm(direction.flat_inputs, direction.w, direction.bias_sum, transB=1)


def _cell_states(direction: Direction, i: Value, forget: Value, n: Value) -> Value:
    """Return the cell state after each step; without peepholes the gates are known beforehand."""

    def step(op: GraphBuilder, states: Tensors, slices: Tensors) -> Stepped:
        c = states[0] * slices[0] + slices[1]
        return [c], [c]

    slices = [direction.masked(forget, 1), direction.masked(i * n)]
    _, (c,) = direction.scan_forward(step, [direction.c0], slices)
    return c


def _peephole_cell_states(
    direction: Direction, cell: LstmCell, slices: tuple[Value, Value, Value], pi: Value, pf: Value
) -> Value:
    """Return the cell state after each step; with peepholes the gates depend on the state before.

    `slices` are ai, af and n.
    """

    def step(op: GraphBuilder, states: Tensors, slices: Tensors) -> Stepped:
        c_prev = states[0]
        ai, af, n, *valid = slices
        i, forget = cell.input_and_forget(ai + c_prev * pi, af + c_prev * pf)
        c = forget * c_prev + i * n
        if valid:
            c = op.Where(valid[0], c, c_prev)
        return [c], [c]

    valid = [] if direction.valid is None else [direction.valid]
    _, (c,) = direction.scan_forward(step, [direction.c0], [*slices, *valid])
    return c


def _gradients_of(
    direction: Direction,
    cell: LstmCell,
    steps: LstmSteps,
    peepholes: tuple[Value, Value, Value] | None = None,
) -> DirectionGradients:
    """Return the gradients for known values of all steps.

    A factor k of a gate is the derivative of its argument: dL/dao = ko dL/dh, and with dL/dc
    dL/dai = ki dL/dc, dL/daf = kf dL/dc, dL/dan = kn dL/dc.
    """
    op = direction.op
    o = cell.f(steps.ao)
    hc = cell.h(steps.c)
    ko = hc * cell.f.slope(steps.ao, o)
    kn = steps.i * cell.g.slope(steps.an, steps.n)
    slope_i = cell.f.slope(steps.ai, steps.i)
    if cell.coupled:
        ki = slope_i * (steps.n - steps.c_prev)
        kf = zeros_like(op, steps.af)
    else:
        ki = slope_i * steps.n
        kf = steps.c_prev * cell.f.slope(steps.af, steps.forget)
    to_c = o * cell.h.slope(steps.c, hc)
    keep = steps.forget
    if peepholes is not None:
        pi, po, pf = peepholes
        to_c = to_c + ko * po
        keep = keep + ki * pi + kf * pf
    gradients = _lstm_back(direction, op.Concat(ki, ko, kf, kn, axis=2), to_c, keep)

    def dp() -> Value:
        dai, dao, daf, _ = op.Split(gradients.da_x, _outputs=4, axis=2, num_outputs=4)
        products = (dai * steps.c_prev, dao * steps.c, daf * steps.c_prev)
        return op.Concat(*(op.ReduceSum(x, [0, 1], keepdims=0) for x in products), axis=0)

    return replace(gradients, dp=dp)


def _standard_lstm(direction: Direction) -> DirectionGradients:
    """Run the steps of an LSTM with default activations in a Scan that returns gates and states.

    The Scan replaces the node, and also returns its Y. This takes 0.58 of the time of running the
    node and recomputing its gates on one thread, 0.7 to 0.8 on two.
    """
    op = direction.op
    r = op.Transpose(direction.r, perm=[1, 0])

    def step(op: GraphBuilder, states: Tensors, slices: Tensors) -> Stepped:
        h_prev, c_prev = states
        (a,) = slices
        a_gates, an = split_gates(op.Gemm(h_prev, r, a), (3, 1), axis=1)
        gates = op.Sigmoid(a_gates)
        n = op.Tanh(an)
        i, o, forget = op.Split(gates, _outputs=3, axis=1, num_outputs=3)
        c = forget * c_prev + i * n
        hc = op.Tanh(c)
        h = o * hc
        return [h, c], [h, h_prev, c_prev, gates, i, o, forget, n, hc]

    from_inputs = direction.by_time(_from_inputs(direction))
    (last_h, last_c), outputs = direction.scan_forward(
        step, [direction.h0, direction.c0], [from_inputs]
    )
    direction.final_states = last_h, last_c
    direction.y, direction.h_prev, c_prev, gates, i, o, forget, n, hc = outputs
    slopes = gates * (1 - gates)  # of i, o and forget
    factors = op.Concat(n, hc, c_prev, axis=2)
    k = op.Concat(slopes * factors, i * (1 - n * n), axis=2)
    return _lstm_back(direction, k, o * (1 - hc * hc), forget)


def _lstm_back(direction: Direction, k: Value, to_c: Value, keep: Value) -> DirectionGradients:
    """Go back through the steps.

    `k` holds the factors of the gates' arguments, by dL/dh for o and by dL/dc for the others;
    `to_c` is the derivative of h by c, and `keep` that of c by c_prev.
    """

    def step(op: GraphBuilder, states: Tensors, slices: Tensors) -> Stepped:
        dh, dc = states
        k, to_c, keep = slices
        dc = dc + dh * to_c
        da = op.Concat(dc, dh, dc, dc, axis=1) * k
        return [da @ direction.r, dc * keep], [da]

    slices = [direction.masked(k), direction.masked(to_c), direction.masked(keep, 1)]
    (dh0, dc0), (da,) = direction.scan_back(step, [direction.dh, direction.dc], slices)
    return DirectionGradients(direction, da, da, dh0, dc0)
