"""The pullback of a model: from gradients of its outputs to gradients of its inputs.

It is a vector-Jacobian product.
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
    """A model with an input for each output's gradient, and an output for each input's gradient.

    `model` is this model. `output_gradients` maps an output to the name of the added input, and
    `input_gradients` an input to the name of the added output. Both names are `<name>_grad`, with a
    number if that is in use.
    """

    model: ir.Model
    output_gradients: dict[str, str]
    input_gradients: dict[str, str]


AddPullback = Callable[[ir.Model, Sequence[str], Sequence[str]], Pullback]


def add_pullback(
    model: ir.Model, outputs: Sequence[str], wrt: Sequence[str], *, device: str = "cpu"
) -> Pullback:
    """Return the pullback by the table of rules.

    `outputs` are float outputs, `wrt` are float inputs, `device` is as for GraphBuilder.
    BlockedError: some nodes cannot be differentiated; the error has all of them.
    """
    work = model.clone()
    op = GraphBuilder(work.graph, device=device)
    output_gradients = _add_seeds(op, outputs)
    inputs = {v.name: v for v in work.graph.inputs}
    by_value, blocking = gradients(op, output_gradients, [inputs[name] for name in wrt])
    refuse(blocking)
    input_gradients = {}
    for name in wrt:
        value = inputs[name]
        input_gradients[name] = (
            by_value[value] if value in by_value else zeros_like(op, op.wrap(value))
        )
    return _add_gradient_outputs(op, output_gradients, input_gradients)


def pullback_from_gradients(add_gradients: AddGradients) -> AddPullback:
    """Return the pullback of a source that differentiates scalars only, such as sum(y * dy)."""

    def add_pullback(model: ir.Model, outputs: Sequence[str], wrt: Sequence[str]) -> Pullback:
        work = model.clone()
        op = GraphBuilder(work.graph)
        output_gradients = _add_seeds(op, outputs)
        terms = [
            op.ReduceSum(op.wrap(work.graph.outputs[i]) * dy, keepdims=0)
            for i, dy in output_gradients.items()
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + op.cast(term, total.dtype)
        op.output(names.TOTAL, total)
        differentiated, gradient_names = add_gradients(infer_shapes(work), names.TOTAL, wrt)
        graph = differentiated.graph
        graph.outputs[:] = [v for v in graph.outputs if v.name != names.TOTAL]
        values = values_of(graph)
        op = GraphBuilder(graph)
        seeds = {i: op.wrap(values[dy.name]) for i, dy in output_gradients.items()}
        input_gradients = {name: op.wrap(values[gradient_names[name]]) for name in wrt}
        return _add_gradient_outputs(op, seeds, input_gradients)

    return add_pullback


def _add_seeds(op: GraphBuilder, outputs: Sequence[str]) -> dict[int, Value]:
    """Add an input for each output's gradient; return the inputs by the output's position."""
    output_gradients: dict[int, Value] = {}
    remaining = set(outputs)
    for i, value in enumerate(list(op.graph.outputs)):
        if value.name in remaining:
            remaining.remove(value.name)  # a model may list an output twice
            y = op.wrap(value)
            if y.shape is None:
                raise GradientError(
                    f"The rank of output {value.name!r} is unknown, so the rank of its gradient is"
                    " unknown as well."
                )
            name = names.unused(names.gradient(value.name), op.has_name)
            output_gradients[i] = op.input(name, y.dtype, y.shape)
    return output_gradients


def _add_gradient_outputs(
    op: GraphBuilder, output_gradients: Mapping[int, Value], input_gradients: Mapping[str, Value]
) -> Pullback:
    """Add an output for each input's gradient."""
    output_names = {op.graph.outputs[i].name or "": dy.name for i, dy in output_gradients.items()}
    input_names = {}
    for name, dx in input_gradients.items():
        output_name = names.unused(names.gradient(name), op.has_name)
        input_names[name] = op.output(output_name, dx).name
    return Pullback(ir.Model(op.graph, ir_version=10), output_names, input_names)
