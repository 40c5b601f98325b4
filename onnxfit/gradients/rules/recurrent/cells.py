"""The gradients of one direction of an RNN or a GRU."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfit.gradients.rules.recurrent.activations import Activation
from onnxfit.gradients.rules.recurrent.direction import (
    Direction,
    DirectionGradients,
    flatten_time,
    split_gates,
)
from onnxfit.graph.steps import Stepped, Tensors
from onnxfit.graph.values import GraphBuilder, Value


def rnn_gradients(direction: Direction, f: Activation) -> DirectionGradients:
    """h = f(a) with a = x W' + h_prev R' + Wb + Rb."""
    op = direction.op
    if f.clip is None and f.name in ("tanh", "sigmoid", "relu"):
        slope = f.slope(direction.y, direction.y)  # their slopes depend on f(a) alone
    else:
        h_prev = flatten_time(direction.h_prev)
        from_inputs = op.Gemm(direction.flat_inputs, direction.w, direction.bias_sum, transB=1)
        a = direction.by_time(op.Gemm(h_prev, direction.r, from_inputs, transB=1))
        slope = f.slope(a, f(a))

    def step(op: GraphBuilder, states: Tensors, slices: Tensors) -> Stepped:
        (dh,) = states
        (slope,) = slices
        da = dh * slope
        return [da @ direction.r], [da]

    (dh0,), (da,) = direction.scan_back(step, [direction.dh], [direction.masked(slope)])
    return DirectionGradients(direction, da, da, dh0)


@dataclass(frozen=True)
class GruSteps:
    """Values of all steps of a GRU, computed again from X and the hidden states.

    z and r are the gates, q the product of h_prev with Rh (with the reset after it); kz, kr and kn
    are the factors between dL/dh (of r: dL/d(r h_prev) or dL/d(r q)) and the gates' arguments.
    """

    z: Value
    r: Value
    q: Value | None
    kz: Value
    kr: Value
    kn: Value
    r_gates: Value  # the rows of the weights R for z and r
    r_n: Value  # the rows for n


def gru_gradients(
    direction: Direction, f: Activation, g: Activation, reset_after: bool
) -> DirectionGradients:
    """h = (1 - z) n + z h_prev, with gates z and r = f(...) and n = g(an).

    With the reset after the product (`linear_before_reset`), an = x Wh' + r q + Wbh where
    q = h_prev Rh' + Rbh; else an = x Wh' + (r h_prev) Rh' + Wbh + Rbh.
    """
    steps = _gru_steps(direction, f, g, reset_after)
    if steps.q is not None:
        return _gru_reset_after(direction, steps, steps.q)
    return _gru_reset_before(direction, steps)


def _gru_steps(direction: Direction, f: Activation, g: Activation, reset_after: bool) -> GruSteps:
    op = direction.op
    h_prev = direction.h_prev
    wb, rb = direction.biases
    from_inputs = direction.by_time(op.Gemm(direction.flat_inputs, direction.w, wb, transB=1))
    gates_x, an = split_gates(from_inputs, (2, 1))
    r_gates, r_n = split_gates(direction.r, (2, 1), axis=0)
    rb_gates, rb_n = (None, None) if rb is None else split_gates(rb, (2, 1), axis=0)
    q = None
    if reset_after:
        from_state = direction.by_time(op.Gemm(flatten_time(h_prev), direction.r, rb, transB=1))
        gates_h, q = split_gates(from_state, (2, 1))
    else:
        from_state = op.Gemm(flatten_time(h_prev), r_gates, rb_gates, transB=1)
        gates_h = direction.by_time(from_state)
    a_gates = gates_x + gates_h
    gates = f(a_gates)
    z, r = op.Split(gates, _outputs=2, axis=2, num_outputs=2)
    kz, kr = op.Split(f.slope(a_gates, gates), _outputs=2, axis=2, num_outputs=2)
    if q is not None:
        an = an + r * q
    else:
        reset = flatten_time(r * h_prev)
        an = an + direction.by_time(op.Gemm(reset, r_n, rb_n, transB=1))
    n = g(an)
    kn = direction.masked((1 - z) * g.slope(an, n))
    kz = direction.masked((h_prev - n) * kz)
    return GruSteps(direction.masked(z), r, q, kz, kr, kn, r_gates, r_n)


def _gru_reset_after(direction: Direction, steps: GruSteps, q: Value) -> DirectionGradients:
    op = direction.op
    k = op.Concat(steps.kz, steps.kn * q * steps.kr, steps.kn * steps.r, axis=2)

    def step(op: GraphBuilder, states: Tensors, slices: Tensors) -> Stepped:
        (dh,) = states
        k, z = slices
        da = op.Concat(dh, dh, dh, axis=1) * k
        return [da @ direction.r + dh * z], [da, dh]

    (dh0,), (da_h, dh) = direction.scan_back(step, [direction.dh], [k, steps.z])
    da_gates, _ = split_gates(da_h, (2, 1))
    da_x = op.Concat(da_gates, dh * steps.kn, axis=2)
    return DirectionGradients(direction, da_x, da_h, dh0)


def _gru_reset_before(direction: Direction, steps: GruSteps) -> DirectionGradients:
    op = direction.op
    h_prev = direction.h_prev

    def step(op: GraphBuilder, states: Tensors, slices: Tensors) -> Stepped:
        (dh,) = states
        kz, kr, kn, z, r = slices
        dan = dh * kn
        drh = dan @ steps.r_n
        da_gates = op.Concat(dh * kz, drh * kr, axis=1)
        return [da_gates @ steps.r_gates + drh * r + dh * z], [da_gates, dan]

    slices = [steps.kz, direction.masked(h_prev * steps.kr), steps.kn, steps.z, steps.r]
    (dh0,), (da_gates, dan) = direction.scan_back(step, [direction.dh], slices)
    da = op.Concat(da_gates, dan, axis=2)

    def dr() -> Value:
        dr_gates = op.Gemm(flatten_time(da_gates), flatten_time(h_prev), transA=1)
        dr_n = op.Gemm(flatten_time(dan), flatten_time(steps.r * h_prev), transA=1)
        return op.Concat(dr_gates, dr_n, axis=0)

    return DirectionGradients(direction, da, da, dh0, custom_dr=dr)
