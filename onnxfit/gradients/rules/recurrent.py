"""RNN, GRU and LSTM: backpropagation through time (Werbos 1990) with nothing in the loop but the
recurrence.

Y holds the hidden states of all steps, so the gates of all steps are computed again at once, by
matrix products over time and batch; of an LSTM, the cell states follow from them by an elementwise
Scan, and the usual one is run in a Scan altogether. Another Scan goes back through time: the
coefficients of its linear recurrence are known by then, so a step is a few elementwise operators
and one product with R. The gradients of X, W, R, B and P are again products and sums over all steps
at once.

The operators' equations, and their names (W, R, Wb, Rb, P; gates iofc, zrh), are those of ONNX's
definition; in comments, L is the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Union

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.broadcasting import sum_of_rows, zeros_like
from onnxfit.gradients.building import INT64_MAX, arange, axis_size, concat_sizes
from onnxfit.gradients.table import InputGradient, NoGradientError, gradient
from onnxfit.graph.values import GraphBuilder, Value

Maybe = Union[Value, None]
Step = Callable[
    [GraphBuilder, Sequence[Value], Sequence[Value]], tuple[Sequence[Value], Sequence[Value]]
]


DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}

# Activations
# ----------------------------------------------------------------------------------------------------------------

Formula = Callable[[GraphBuilder, Value, float, float], Value]
Slope = Callable[[GraphBuilder, Value, Value, float, float], Value]


def _if(op: GraphBuilder, condition: Value, like: Value) -> Value:
    return op.cast(condition, like.dtype)


# name: what alpha (and beta) are where they are not given, None if that is not agreed upon; a =
# f(z); f'(z) in terms of z and a
ACTIVATIONS: dict[str, tuple[tuple[float | None, ...], Formula, Slope]] = {
    "relu": ((), lambda op, z, *_: op.Relu(z), lambda op, z, a, *_: _if(op, a > 0, z)),
    "tanh": ((), lambda op, z, *_: op.Tanh(z), lambda op, z, a, *_: 1 - a * a),
    "sigmoid": ((), lambda op, z, *_: op.Sigmoid(z), lambda op, z, a, *_: a * (1 - a)),
    "affine": ((None, None), lambda op, z, s, t: s * z + t, lambda op, z, a, s, t: op.Expand(op.constant(s, z.dtype), op.shape(z))),
    "leakyrelu": ((0.01,), lambda op, z, s, _: op.Where(z >= 0, z, s * z), lambda op, z, a, s, _: s + (1 - s) * _if(op, z > 0, z)),
    "thresholdedrelu": ((None,), lambda op, z, s, _: op.Where(z >= s, z, 0), lambda op, z, a, s, _: _if(op, z > s, z)),
    "scaledtanh": ((None, None), lambda op, z, s, t: s * op.Tanh(t * z), lambda op, z, a, s, t: s * t * (1 - op.Tanh(t * z) ** 2)),
    "hardsigmoid": ((0.2, 0.5), lambda op, z, s, t: op.Clip(s * z + t, 0, 1), lambda op, z, a, s, t: s * _if(op, (a > 0) & (a < 1), z)),
    "elu": ((1.0,), lambda op, z, s, _: op.Where(z >= 0, z, s * (op.Exp(op.Min(z, 0)) - 1)), lambda op, z, a, s, _: op.Where(z > 0, 1, a + s)),
    "softsign": ((), lambda op, z, *_: z / (1 + op.Abs(z)), lambda op, z, a, *_: (1 - op.Abs(a)) ** 2),
    "softplus": ((), lambda op, z, *_: op.Max(z, 0) + op.Log(1 + op.Exp(-op.Abs(z))), lambda op, z, a, *_: op.Sigmoid(z)),
}  # fmt: skip


@dataclass(frozen=True)
class Activation:
    """One of a node's activations, with the clipping before it."""

    name: str
    alpha: float
    beta: float
    clip: float | None

    def __call__(self, z: Value) -> Value:
        op = z.op
        return ACTIVATIONS[self.name][1](op, self._clipped(z), self.alpha, self.beta)

    def slope(self, z: Value, a: Value) -> Value:
        op = z.op
        slope = ACTIVATIONS[self.name][2](op, self._clipped(z), a, self.alpha, self.beta)
        return slope if self.clip is None else slope * _if(op, op.Abs(z) <= self.clip, z)

    def _clipped(self, z: Value) -> Value:
        return z if self.clip is None else z.op.Clip(z, -self.clip, self.clip)


def _activations(
    op_type: str, names: Sequence[str] | None, alphas: Sequence[float] | None, betas: Sequence[float] | None, clip: float | None, directions: int
) -> list[list[Activation]]:  # fmt: skip
    """The activations of each direction.

    Those that have an alpha (a beta) take the next from the list, or the default when it is used
    up.

    Refused where onnxruntime has another default; for an RNN, versions of it also differ in which
    number is whose.
    """
    each = DEFAULTS[op_type]
    given = {"alpha": list(alphas or ()), "beta": list(betas or ())}
    left = {what: list(numbers) for what, numbers in given.items()}
    found = []
    for k, name in enumerate(names or each * directions):
        if name.lower() not in ACTIVATIONS:
            raise NoGradientError(
                f"its activation {name!r} is not one of ONNX's", f"one of {', '.join(ACTIVATIONS)}"
            )
        parameters = {"alpha": 0.0, "beta": 0.0}
        for what, default in zip(parameters, ACTIVATIONS[name.lower()][0]):
            number = left[what].pop(0) if left[what] else default
            if number is None or (op_type == "RNN" and given[what][k : k + 1] != [number]):
                raise NoGradientError(
                    f"versions of onnxruntime take different numbers for the {what} of its"
                    f" activation {name!r}",
                    f"activation_{what} with a number for every activation",
                )
            parameters[what] = number
        found.append(Activation(name.lower(), **parameters, clip=clip or None))
    if op_type == "LSTM":  # onnxruntime does not clip what goes into h
        found = [replace(one, clip=None) if k % 3 == 2 else one for k, one in enumerate(found)]
    return [found[k * len(each) : (k + 1) * len(each)] for k in range(directions)]


# One direction
# ----------------------------------------------------------------------------------------------------------------


@dataclass
class Direction:
    """One direction of a node, time first: x `(time, batch, input)`, y and dy `(time, batch,
    hidden)`, states `(batch, hidden)`.

    States that are not given (c0 and dc wherever there is no cell) are zero.
    """

    op: GraphBuilder
    backwards: bool
    x: Value
    w: Value
    r: Value
    b: Maybe
    p: Maybe
    h0: Value
    c0: Value
    y: Value
    dy: Maybe
    dh: Value
    dc: Value
    lengths: Maybe  # (batch, 1), int64
    # h and c after the last step, where these steps are to be run in the place of the node
    last: tuple[Value, Value] | None = None

    @cached_property
    def valid(self) -> Maybe:
        """Which steps are no padding: `(time, batch, 1)`."""
        return None if self.lengths is None else self._time() < self.lengths

    def _time(self) -> Value:
        op, x = self.op, self.x
        if x.shape is not None and isinstance(x.shape[0], int):
            return op.constant(np.arange(x.shape[0], dtype=np.int64)[:, None, None])
        steps = arange(op, axis_size(op, x, 0))
        return op.Unsqueeze(steps, [1, 2])

    def in_steps(self, value: Value, other: float = 0) -> Value:
        """The value where a step is valid, a number in the padding."""
        return value if self.valid is None else self.op.Where(self.valid, value, other)

    def before(self, states: Value, first: Value) -> Value:
        """The state each step began with, from the states after each step."""
        op = self.op
        first = op.Unsqueeze(first, [0])
        if not self.backwards:
            return op.Concat(first, op.Slice(states, [0], [-1], [0]), axis=0)
        later = op.Concat(op.Slice(states, [1], [INT64_MAX], [0]), first, axis=0)
        return (
            later
            if self.lengths is None
            else op.Where(self._time() + 1 < self.lengths, later, first)
        )

    def by_step(self, flat: Value) -> Value:
        """`(time * batch, n)` as `(time, batch, n)`."""
        return self.op.Reshape(flat, concat_sizes(self.op, self.op.shape(self.x, 0, 2), -1))

    @cached_property
    def inputs(self) -> Value:
        return flat(self.in_steps(self.x))

    @cached_property
    def previous(self) -> Value:
        return self.before(self.y, self.h0)

    @cached_property
    def biases(self) -> tuple[Maybe, Maybe]:
        """Wb and Rb."""
        if self.b is None:
            return None, None
        wb, rb = self.op.Split(self.b, _outputs=2, num_outputs=2)
        return wb, rb

    def onward(
        self, step: Step, states: Sequence[Value], slices: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Through the steps as the node goes."""
        return through(self.op, step, states, slices, self.backwards)

    def back(
        self, step: Step, states: Sequence[Value], slices: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Through the steps from the last to the first.

        `step` is about one that is no padding, and its first state is dL/dh, the step's own part
        included; padding hands that on unchanged.
        """
        extra = [] if self.dy is None else [self.in_steps(self.dy)]
        if self.valid is not None:
            extra.append(self.op.cast(~self.valid, self.x.dtype))

        def whole(
            op: GraphBuilder, states: Sequence[Value], slices: Sequence[Value]
        ) -> tuple[Sequence[Value], Sequence[Value]]:
            dh, *others = states
            own, slices = list(slices[: len(extra)]), slices[len(extra) :]
            if self.dy is not None:
                dh = dh + own.pop(0)
            (dh_before, *others), made = step(op, [dh, *others], slices)
            return [dh_before + own[0] * dh if own else dh_before, *others], made

        return through(self.op, whole, states, [*extra, *slices], not self.backwards)


def flat(steps: Value) -> Value:
    """`(time, batch, n)` as `(time * batch, n)`."""
    return steps.op.Flatten(steps, axis=2)


def through(
    op: GraphBuilder, step: Step, states: Sequence[Value], slices: Sequence[Value], backwards: bool
) -> tuple[list[Value], list[Value]]:
    """The last states, and what every step made, stacked:

    `step(op, states, slices) -> states, made`.
    """
    body = op.subgraph("steps")

    def entered(stem: str, like: Value, skip: int) -> Value:
        shape = None if like.ir.shape is None else ir.Shape(list(like.ir.shape)[skip:])
        body.graph.inputs.append(
            ir.Value(name=op.unique_name(stem), type=like.ir.type, shape=shape)
        )
        return body.wrap(body.graph.inputs[-1])

    inside = [entered("state", s, 0) for s in states], [entered("slice", s, 1) for s in slices]
    after, made = step(body, *inside)
    # each an output of its own; one that is an input, untouched, onnxruntime does not fill
    for value in (*after, *made):
        copied = value.ir in body.graph.outputs or value.ir in body.graph.inputs
        body.graph.outputs.append((body.Identity(value) if copied else value).ir)
    way = int(backwards)
    found = op.Scan(*states, *slices, _outputs=len(after) + len(made), body=body.graph, num_scan_inputs=len(slices), scan_input_directions=[way] * len(slices), scan_output_directions=[way] * len(made))  # fmt: skip
    return list(found[: len(after)]), list(found[len(after) :])


# The three operators
# ----------------------------------------------------------------------------------------------------------


@dataclass
class DirectionGradients:
    """Gradients of one direction;

    `gates` are those of the gates' inputs as they reach X, `fed` as they reach R, which a reset
    gate may change.
    """

    run: Direction
    gates: Value
    fed: Value
    dh0: Value
    dc0: Maybe = None
    r: Callable[[], Value] | None = None
    p: Callable[[], Value] | None = None

    def of_x(self) -> Value:
        return self.run.by_step(flat(self.gates) @ self.run.w)

    def of_w(self) -> Value:
        return self.run.op.Gemm(flat(self.gates), self.run.inputs, transA=1)

    def of_r(self) -> Value:
        return (
            self.r()
            if self.r
            else self.run.op.Gemm(flat(self.fed), flat(self.run.previous), transA=1)
        )

    def of_b(self) -> Value:
        op = self.run.op
        wb = sum_of_rows(op, flat(self.gates))
        return op.Concat(
            wb, wb if self.fed is self.gates else sum_of_rows(op, flat(self.fed)), axis=0
        )


def _rnn(run: Direction, f: Activation) -> DirectionGradients:
    """h = f(a), a = x W' + h_ R' + Wb + Rb."""
    op = run.op
    if f.clip is None and f.name in ("tanh", "sigmoid", "relu"):
        slope = f.slope(run.y, run.y)  # of these, in terms of f(a) alone
    else:
        a = run.by_step(
            op.Gemm(
                flat(run.previous),
                run.r,
                op.Gemm(run.inputs, run.w, _sum(*run.biases), transB=1),
                transB=1,
            )
        )
        slope = f.slope(a, f(a))

    def step(
        op: GraphBuilder, states: Sequence[Value], slices: Sequence[Value]
    ) -> tuple[Sequence[Value], Sequence[Value]]:
        (dh,), (slope,) = states, slices
        da = dh * slope
        return [da @ run.r], [da]

    (dh0,), (da,) = run.back(step, [run.dh], [run.in_steps(slope)])
    return DirectionGradients(run, da, da, dh0)


def _gru(run: Direction, f: Activation, g: Activation, reset_after: bool) -> DirectionGradients:
    """h = (1 - z) n + z h_, z and r = f(...); n = g(an), an = x Wh' + r q + Wbh with q = h_ Rh' +
    Rbh, or x Wh' + (r h_) Rh' + Wbh + Rbh.
    """
    op, h_ = run.op, run.previous
    wb, rb = run.biases
    ax = run.by_step(op.Gemm(run.inputs, run.w, wb, transB=1))
    gates_x, an = _apart(ax, (2, 1))
    r_gates, r_n = _apart(run.r, (2, 1), axis=0)
    rb_gates, rb_n = (None, None) if rb is None else _apart(rb, (2, 1), axis=0)
    if reset_after:
        gates_h, q = _apart(run.by_step(op.Gemm(flat(h_), run.r, rb, transB=1)), (2, 1))
    else:
        gates_h = run.by_step(op.Gemm(flat(h_), r_gates, rb_gates, transB=1))
    both = gates_x + gates_h
    gates = f(both)
    z, r = op.Split(gates, _outputs=2, axis=2, num_outputs=2)
    kz, kr = op.Split(f.slope(both, gates), _outputs=2, axis=2, num_outputs=2)
    if reset_after:
        an = an + r * q
    else:
        an = an + run.by_step(op.Gemm(flat(r * h_), r_n, rb_n, transB=1))
    n = g(an)
    kn = run.in_steps((1 - z) * g.slope(an, n))  # dL/dan = kn dL/dh
    kz = run.in_steps((h_ - n) * kz)
    z = run.in_steps(z)
    if reset_after:
        k = op.Concat(kz, kn * q * kr, kn * r, axis=2)

        def after(
            op: GraphBuilder, states: Sequence[Value], slices: Sequence[Value]
        ) -> tuple[Sequence[Value], Sequence[Value]]:
            (dh,), (k, z) = states, slices
            da = op.Concat(dh, dh, dh, axis=1) * k
            return [da @ run.r + dh * z], [da, dh]

        (dh0,), (fed, dh) = run.back(after, [run.dh], [k, z])
        return DirectionGradients(run, op.Concat(_apart(fed, (2, 1))[0], dh * kn, axis=2), fed, dh0)

    def before(
        op: GraphBuilder, states: Sequence[Value], slices: Sequence[Value]
    ) -> tuple[Sequence[Value], Sequence[Value]]:
        (dh,), (kz, kr, kn, z, r) = states, slices
        dan = dh * kn
        drh = dan @ r_n
        dzr = op.Concat(dh * kz, drh * kr, axis=1)
        return [dzr @ r_gates + drh * r + dh * z], [dzr, dan]

    (dh0,), (dzr, dan) = run.back(before, [run.dh], [kz, run.in_steps(h_ * kr), kn, z, r])
    da = op.Concat(dzr, dan, axis=2)

    def of_r() -> Value:
        return op.Concat(
            op.Gemm(flat(dzr), flat(h_), transA=1),
            op.Gemm(flat(dan), flat(r * h_), transA=1),
            axis=0,
        )

    return DirectionGradients(run, da, da, dh0, r=of_r)


def _lstm(
    run: Direction, f: Activation, g: Activation, h: Activation, coupled: bool
) -> DirectionGradients:
    """c = f c_ + i n, h = o h(c); i, f, o = f(ai + Pi c_), f(af + Pf c_), f(ao + Po c), n = g(an);
    f = 1 - i where they are coupled.
    """
    op = run.op
    usual = _activations("LSTM", None, None, None, None, 1)
    if (
        run.lengths is None
        and run.p is None
        and not coupled
        and [[f, g, h]] == usual
        and not op.inside
    ):
        return _usual_lstm(run)
    a = run.by_step(op.Gemm(flat(run.previous), run.r, _from_inputs(run), transB=1))
    ai, ao, af, an = op.Split(a, _outputs=4, axis=2, num_outputs=4)
    pi, po, pf = (
        (None, None, None) if run.p is None else op.Split(run.p, _outputs=3, axis=0, num_outputs=3)
    )
    n = g(an)

    def gates(ai: Value, af: Value) -> tuple[Value, Value]:
        i = f(ai)
        return i, 1 - i if coupled else f(af)

    if pi is None or pf is None:
        i, forget = gates(ai, af)

        def cell(
            op: GraphBuilder, states: Sequence[Value], slices: Sequence[Value]
        ) -> tuple[Sequence[Value], Sequence[Value]]:
            c = states[0] * slices[0] + slices[1]
            return [c], [c]

        _, (c,) = run.onward(cell, [run.c0], [run.in_steps(forget, 1), run.in_steps(i * n)])
        c_ = run.before(c, run.c0)
    else:

        def peeping(
            op: GraphBuilder, states: Sequence[Value], slices: Sequence[Value]
        ) -> tuple[Sequence[Value], Sequence[Value]]:
            c, (ai, af, n, *valid) = states[0], slices
            i, forget = gates(ai + c * pi, af + c * pf)
            new = forget * c + i * n
            new = op.Where(valid[0], new, c) if valid else new
            return [new], [new]

        _, (c,) = run.onward(
            peeping, [run.c0], [ai, af, n, *([] if run.valid is None else [run.valid])]
        )
        c_ = run.before(c, run.c0)
        ai, af, ao = ai + c_ * pi, af + c_ * pf, ao + c * po
        i, forget = gates(ai, af)
    o, hc = f(ao), h(c)

    # dL/dao = ko dL/dh; with dL/dc: dL/dai = ki dL/dc, and so on
    ko, kn = hc * f.slope(ao, o), i * g.slope(an, n)
    ki = f.slope(ai, i) * (n - c_ if coupled else n)
    kf = zeros_like(op, af) if coupled else c_ * f.slope(af, forget)
    to_c, keep = o * h.slope(c, hc), forget
    if po is not None:
        to_c, keep = to_c + ko * po, keep + ki * pi + kf * pf
    found = _lstm_back(run, op.Concat(ki, ko, kf, kn, axis=2), to_c, keep)

    def of_p() -> Value:
        dai, dao, daf, _ = op.Split(found.gates, _outputs=4, axis=2, num_outputs=4)
        return op.Concat(
            *(op.ReduceSum(x, [0, 1], keepdims=0) for x in (dai * c_, dao * c, daf * c_)), axis=0
        )

    return replace(found, p=of_p)


def _usual_lstm(run: Direction) -> DirectionGradients:
    """An LSTM of the usual activations, without peepholes and padding: its steps are run in a Scan
    that hands out gates and states.

    Together with what it makes of the node, whose Y this gives as well, that takes less time than
    the node and all of it again: 0.58 on one thread, 0.7 to 0.8 on two.
    """
    op, r = run.op, run.op.Transpose(run.r, perm=[1, 0])

    def step(
        op: GraphBuilder, states: Sequence[Value], slices: Sequence[Value]
    ) -> tuple[Sequence[Value], Sequence[Value]]:
        (h_, c_), (a,) = states, slices
        sigmoids, an = _apart(op.Gemm(h_, r, a), (3, 1), axis=1)
        gates, n = op.Sigmoid(sigmoids), op.Tanh(an)
        i, o, f = op.Split(gates, _outputs=3, axis=1, num_outputs=3)
        c = f * c_ + i * n
        hc = op.Tanh(c)
        h = o * hc
        return [h, c], [h, h_, c_, gates, i, o, f, n, hc]

    last, made = run.onward(step, [run.h0, run.c0], [run.by_step(_from_inputs(run))])
    run.last = last[0], last[1]
    run.y, run.previous, c_, gates, i, o, f, n, hc = made
    slopes = gates * (1 - gates)  # of i, o and f
    met = op.Concat(n, hc, c_, axis=2)
    return _lstm_back(run, op.Concat(slopes * met, i * (1 - n * n), axis=2), o * (1 - hc * hc), f)


def _from_inputs(run: Direction) -> Value:
    """What X and the biases bring into the gates."""
    return run.op.Gemm(run.inputs, run.w, _sum(*run.biases), transB=1)


def _lstm_back(run: Direction, k: Value, to_c: Value, keep: Value) -> DirectionGradients:
    """The way back.

    `k`: what dL/dc (of i, f and n) and dL/dh (of o) count in the gates; `to_c`: dL/dh in dL/dc;
    `keep`: dL/dc a step before.
    """

    def step(
        op: GraphBuilder, states: Sequence[Value], slices: Sequence[Value]
    ) -> tuple[Sequence[Value], Sequence[Value]]:
        (dh, dc), (k, to_c, keep) = states, slices
        dc = dc + dh * to_c
        da = op.Concat(dc, dh, dc, dc, axis=1) * k
        return [da @ run.r, dc * keep], [da]

    (dh0, dc0), (da,) = run.back(
        step, [run.dh, run.dc], [run.in_steps(k), run.in_steps(to_c), run.in_steps(keep, 1)]
    )
    return DirectionGradients(run, da, da, dh0, dc0)


@gradient("RNN", all_outputs=True)
def rnn(
    op: GraphBuilder, x: Value, w: Value, r: Value, b: Maybe, sequence_lens: Maybe, initial_h: Maybe, y: Value, y_h: Value, dy: Maybe, dy_h: Maybe,
    *, direction: str, activations: Sequence[str] | None, activation_alpha: Sequence[float] | None, activation_beta: Sequence[float] | None,
    clip: float | None, layout: int,
) -> tuple[InputGradient, ...]:  # fmt: skip
    runs = _runs(
        op, direction, layout, x, w, r, b, None, sequence_lens, initial_h, None, y, dy, dy_h, None
    )
    ways = _activations("RNN", activations, activation_alpha, activation_beta, clip, len(runs))
    return _joined(layout, [_rnn(run, f) for run, (f,) in zip(runs, ways)])[:6]


@gradient("GRU", all_outputs=True)
def gru(
    op: GraphBuilder, x: Value, w: Value, r: Value, b: Maybe, sequence_lens: Maybe, initial_h: Maybe, y: Value, y_h: Value, dy: Maybe, dy_h: Maybe,
    *, direction: str, activations: Sequence[str] | None, activation_alpha: Sequence[float] | None, activation_beta: Sequence[float] | None,
    clip: float | None, layout: int, linear_before_reset: int,
) -> tuple[InputGradient, ...]:  # fmt: skip
    runs = _runs(
        op, direction, layout, x, w, r, b, None, sequence_lens, initial_h, None, y, dy, dy_h, None
    )
    ways = _activations("GRU", activations, activation_alpha, activation_beta, clip, len(runs))
    return _joined(
        layout, [_gru(run, f, g, bool(linear_before_reset)) for run, (f, g) in zip(runs, ways)]
    )[:6]


@gradient("LSTM", all_outputs=True)
def lstm(
    op: GraphBuilder, x: Value, w: Value, r: Value, b: Maybe, sequence_lens: Maybe, initial_h: Maybe, initial_c: Maybe, p: Maybe,
    y: Value, y_h: Value, y_c: Value, dy: Maybe, dy_h: Maybe, dy_c: Maybe,
    *, direction: str, activations: Sequence[str] | None, activation_alpha: Sequence[float] | None, activation_beta: Sequence[float] | None,
    clip: float | None, layout: int, input_forget: int,
) -> tuple[InputGradient, ...]:  # fmt: skip
    runs = _runs(
        op, direction, layout, x, w, r, b, p, sequence_lens, initial_h, initial_c, y, dy, dy_h, dy_c
    )
    ways = _activations("LSTM", activations, activation_alpha, activation_beta, clip, len(runs))
    found = [_lstm(run, f, g, h, bool(input_forget)) for run, (f, g, h) in zip(runs, ways)]
    last = [run.last for run in runs if run.last]
    if len(last) == len(runs):
        states = [_stacked([run.y for run in runs], 1), *(_stacked(each) for each in zip(*last))]
        if layout:
            states = [
                op.Transpose(state, perm=perm)
                for state, perm in zip(states, [[2, 0, 1, 3], [1, 0, 2], [1, 0, 2]])
            ]
        for old, new in zip((y, y_h, y_c), states):
            op.move_uses(old, new)
    return _joined(layout, found)


# From a node to its directions and back
# ---------------------------------------------------------------------------------------


def _runs(
    op: GraphBuilder, direction: str, layout: int, x: Value, w: Value, r: Value, b: Maybe, p: Maybe, lengths: Maybe, h0: Maybe, c0: Maybe,
    y: Value, dy: Maybe, dy_h: Maybe, dy_c: Maybe,
) -> list[Direction]:  # fmt: skip
    if layout:  # batch first
        x, y = op.Transpose(x, perm=[1, 0, 2]), op.Transpose(y, perm=[1, 2, 0, 3])
        dy = None if dy is None else op.Transpose(dy, perm=[1, 2, 0, 3])
        h0, c0, dy_h, dy_c = (
            None if v is None else op.Transpose(v, perm=[1, 0, 2]) for v in (h0, c0, dy_h, dy_c)
        )
    ways = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    if lengths is not None:
        lengths = op.Unsqueeze(op.cast(lengths, np.int64), [1])
        # the last state of an empty sequence is not its first, in onnxruntime, but zero
        dy_h, dy_c = (None if v is None else op.Where(lengths > 0, v, 0) for v in (dy_h, dy_c))
    nothing = op.Expand(
        op.constant(0, x.dtype), concat_sizes(op, op.shape(x, 1, 2), op.shape(r, 2))
    )

    def own(value: Value, axis: int = 0) -> list[Value]:
        parts = (
            (value,) if len(ways) == 1 else op.Split(value, _outputs=2, axis=axis, num_outputs=2)
        )
        return [op.Squeeze(part, [axis]) for part in parts]

    def maybe(value: Maybe, axis: int = 0) -> Sequence[Maybe]:
        return [None] * len(ways) if value is None else own(value, axis)

    def state(value: Maybe) -> list[Value]:
        return [nothing] * len(ways) if value is None else own(value)

    each = zip(
        ways,
        own(w),
        own(r),
        maybe(b),
        maybe(p),
        state(h0),
        state(c0),
        own(y, 1),
        maybe(dy, 1),
        state(dy_h),
        state(dy_c),
    )
    return [Direction(op, backwards, x, *parts, lengths) for backwards, *parts in each]  # type: ignore[call-arg]


def _joined(layout: int, found: Sequence[DirectionGradients]) -> tuple[InputGradient, ...]:
    """The entries: x, W, R, B, -, h0, c0, P."""
    op = found[0].run.op

    def total() -> Value:
        dx = found[0].of_x() if len(found) == 1 else found[0].of_x() + found[1].of_x()
        return op.Transpose(dx, perm=[1, 0, 2]) if layout else dx

    return (
        total,
        lambda: _stacked([one.of_w() for one in found]),
        lambda: _stacked([one.of_r() for one in found]),
        lambda: _stacked([one.of_b() for one in found]),
        None,
        lambda: _stacked([one.dh0 for one in found], layout),
        lambda: _stacked([one.dc0 for one in found if one.dc0 is not None], layout),
        lambda: _stacked([one.p() for one in found if one.p is not None]),
    )


def _stacked(parts: Sequence[Value], axis: int = 0) -> Value:
    parts = [part.op.Unsqueeze(part, [axis]) for part in parts]
    return parts[0] if len(parts) == 1 else parts[0].op.Concat(*parts, axis=axis)


def _apart(value: Value, parts: tuple[int, int], axis: int = 2) -> tuple[Value, Value]:
    """A value of the gates one after the other, cut after some of them."""
    size = value.shape[axis] if value.shape is not None else None
    op, gates = value.op, sum(parts)
    if isinstance(size, int):
        first, second = op.Split(value, [size // gates * k for k in parts], _outputs=2, axis=axis)
        return first, second
    each = op.Split(value, _outputs=gates, axis=axis, num_outputs=gates)
    return op.Concat(*each[: parts[0]], axis=axis), each[-1]


def _sum(wb: Maybe, rb: Maybe) -> Maybe:
    return None if wb is None or rb is None else wb + rb
