"""The pullback of a model: from the gradients that arrive at its outputs to those of its inputs (a
vector-Jacobian product).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxfit.errors import GradientError
from onnxfit.gradients.backward import gradients
from onnxfit.gradients.blocker import refuse
from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.graph import names
from onnxfit.graph.model import infer_shapes
from onnxfit.graph.values import GraphBuilder, Value, values_of

AddGradients = Callable[[ir.Model, str, Sequence[str]], tuple[ir.Model, dict[str, str]]]


@dataclass(frozen=True)
class Pullback:
    """A model with one more input for each gradient that arrives, and one more output for each that
    leaves.

    `arriving` is output -> name of that input, `leaving` input -> name of that output; both are
    `<name>_grad` where that is free.
    """

    model: ir.Model
    arriving: dict[str, str]
    leaving: dict[str, str]


AddPullback = Callable[[ir.Model, Sequence[str], Sequence[str]], Pullback]


def by_rules(model: ir.Model, outputs: Sequence[str], wrt: Sequence[str]) -> Pullback:
    """By the table of rules.

    `outputs` are float outputs, `wrt` are float inputs. GradientError with all blockers.
    """
    work = model.clone()
    op = GraphBuilder(work.graph)
    arriving = _seeds(op, outputs)
    inputs = {v.name: v for v in work.graph.inputs}
    found, blocking = gradients(op, arriving, [inputs[name] for name in wrt])
    refuse(blocking)
    leaving = {}
    for name in wrt:
        value = inputs[name]
        leaving[name] = found[value] if value in found else zeros_like(op, op.wrap(value))
    return _handed_out(op, arriving, leaving)


def through_a_loss(add_gradients: AddGradients) -> AddPullback:
    """By a source of gradients that only knows scalars: the gradient of sum(y * dy)."""

    def add_pullback(model: ir.Model, outputs: Sequence[str], wrt: Sequence[str]) -> Pullback:
        work = model.clone()
        op = GraphBuilder(work.graph)
        arriving = _seeds(op, outputs)
        terms = [
            op.ReduceSum(op.wrap(work.graph.outputs[i]) * dy, keepdims=0)
            for i, dy in arriving.items()
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + op.cast(term, total.dtype)
        op.output(names.TOTAL, total)
        made, found = add_gradients(infer_shapes(work), names.TOTAL, wrt)
        made.graph.outputs[:] = [v for v in made.graph.outputs if v.name != names.TOTAL]
        values = values_of(made.graph)
        op = GraphBuilder(made.graph)
        seeds = {i: op.wrap(values[dy.name]) for i, dy in arriving.items()}
        return _handed_out(op, seeds, {name: op.wrap(values[found[name]]) for name in wrt})

    return add_pullback


def _seeds(op: GraphBuilder, outputs: Sequence[str]) -> dict[int, Value]:
    """An input for the gradient that arrives at each output, by the output's position."""
    arriving: dict[int, Value] = {}
    wanted = dict.fromkeys(outputs)
    for i, value in enumerate(list(op.graph.outputs)):
        if value.name in wanted:
            del wanted[value.name]  # a model may list an output twice
            y = op.wrap(value)
            if y.shape is None:
                raise GradientError(
                    f"The rank of output {value.name!r} is unknown, so is that of its gradient."
                )
            arriving[i] = op.input(_free(op, names.gradient(value.name)), y.dtype, y.shape)
    return arriving


def _handed_out(
    op: GraphBuilder, arriving: Mapping[int, Value], leaving: Mapping[str, Value]
) -> Pullback:
    ends = {op.graph.outputs[i].name or "": dy.name for i, dy in arriving.items()}
    found = {
        name: op.output(_free(op, names.gradient(name)), dx).name for name, dx in leaving.items()
    }
    return Pullback(ir.Model(op.graph, ir_version=10), ends, found)


def _free(op: GraphBuilder, name: str) -> str:
    """The name, with a number where it is taken."""
    found, count = name, 1
    while op.has_name(found):
        count += 1
        found = f"{name}_{count}"
    return found
