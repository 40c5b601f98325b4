"""A training step in separate graphs, so that a caller can work between them.

    inputs, weights ─► forward ─► outputs ─► loss ─► gradients of the outputs ─► backward
                          │                                                        │  ▲
                          └─────────── values that the backward pass reads ────────┼──┘
                                                                                   ▼
                            next weights ◄─ update ◄─ penalty ◄─ gradients of the weights

The functions here are pure, as in `graphs`. The weights after a step equal those of the full graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass

from onnxfit.gradients import Pullback
from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.paths import is_float, reachable_values
from onnxfit.graph import names, scopes
from onnxfit.graph.inference import infer_outputs
from onnxfit.graph.logarithms import log_probabilities_of, log_softmax_of, logits_of
from onnxfit.graph.model import complete_shapes, model_errors, spec_of
from onnxfit.graph.values import GraphBuilder, Value, values_of
from onnxfit.load.opset import empty_graph
from onnxfit.step.finish import finish, prune
from onnxfit.step.forward import (
    add_loss_outputs,
    add_metric_sums,
    lessons_of,
    training_forward,
    weight_input,
)
from onnxfit.step.loss_scale import scale_input, unscaled
from onnxfit.step.recipe import Batch, Recipe

# What a loss computes with instead of an output: the name of that value, and the function that
# finds it in the graph
EXACT = (
    (names.logits, logits_of),
    (names.log_probabilities, log_probabilities_of),
    (names.log_softmax, log_softmax_of),
)
# these run in the forward pass, so no tensor is kept only for its sizes
SIZE_OPERATORS = {"Shape", "Size"}
FOUR_BITS = {ir.DataType.INT4, ir.DataType.UINT4}


@dataclass(frozen=True)
class SplitStep:
    """The forward and the backward pass of a model.

    `forward` computes the model's `outputs`, the next running statistics, and the values in `kept`.
    Outputs whose logits or logarithms it computes too have no gradient: a loss computes with those,
    as `graph.logarithms` says.
    `backward` reads `kept` and the gradients of the outputs, and computes the other gradients.
    Inputs and weights of the model in `kept` are not outputs of `forward`: its caller has them.
    """

    forward: onnx.ModelProto
    backward: onnx.ModelProto
    outputs: tuple[str, ...]
    logarithms: dict[str, str]  # output -> output of `forward` with its logits or logarithms
    kept: tuple[str, ...]
    output_gradients: dict[str, str]  # output -> input of `backward` for its gradient
    input_gradients: dict[str, str]  # weight or input -> output of `backward` with its gradient


def split_step(
    recipe: Recipe,
    batch: Batch,
    outputs: Sequence[str],
    wrt: Sequence[str],
    scored: Sequence[str] = (),
    states: Collection[str] = (),
) -> SplitStep:
    """Split the step for batches of these shapes into forward and backward pass.

    `outputs` are computed; those that depend on `wrt`, names of weights and inputs, are
    differentiated, apart from `states`. The loss of those in `scored` computes with logits or
    logarithms.
    """
    return divide(join_passes(recipe, batch, outputs, wrt, scored, states))


@dataclass(frozen=True)
class JoinedPasses:
    """The forward and the backward pass of a model as one graph.

    `pullback` has the sorted graph. `outputs` and `statistics` are its outputs that the forward
    pass computes, and `kept` the values that the backward pass reads but does not compute.
    `logarithms` is as in `SplitStep`, and `device` as for GraphBuilder.
    """

    pullback: Pullback
    outputs: tuple[str, ...]
    statistics: tuple[str, ...]
    kept: tuple[ir.Value, ...]
    logarithms: dict[str, str]
    device: str

    @property
    def graph(self) -> ir.Graph:
        """The graph of both passes."""
        return self.pullback.model.graph

    @property
    def output_gradients(self) -> set[ir.Value]:
        """The inputs for the gradients of the outputs."""
        gradients = set(self.pullback.output_gradients.values())
        return {v for v in self.graph.inputs if v.name in gradients}

    @property
    def kept_inputs(self) -> list[str]:
        """The inputs and weights of the model among the kept values."""
        inputs = set(self.graph.inputs)
        return [_name_of(v) for v in self.kept if v in inputs]

    @property
    def kept_results(self) -> list[str]:
        """The kept values that the forward pass computes."""
        inputs = set(self.graph.inputs)
        return [_name_of(v) for v in self.kept if v not in inputs]


def join_passes(
    recipe: Recipe,
    batch: Batch,
    outputs: Sequence[str],
    wrt: Sequence[str],
    scored: Sequence[str] = (),
    states: Collection[str] = (),
) -> JoinedPasses:
    """Return both passes of the step as one graph; the arguments are as for `split_step`."""
    pullback, statistics, logarithms = _pullback(recipe, batch, outputs, wrt, scored, states)
    TopologicalSortPass()(pullback.model)
    graph = pullback.model.graph
    outputs = (*outputs, *logarithms.values())
    results = [v for v in graph.outputs if v.name in (*outputs, *statistics)]
    gradients = [v for v in graph.outputs if v.name in pullback.input_gradients.values()]
    output_gradients = {v for v in graph.inputs if v.name in pullback.output_gradients.values()}
    backward_nodes = _backward_nodes(graph, results, gradients, output_gradients)
    kept = _kept_values(graph, backward_nodes, gradients, output_gradients)
    kept = [_widened(graph, v, backward_nodes) for v in kept]
    return JoinedPasses(
        pullback, tuple(outputs), tuple(statistics), tuple(kept), logarithms, recipe.device
    )


def divide(joined: JoinedPasses) -> SplitStep:
    """Divide the graph of both passes into a graph for each."""
    graph, pullback = joined.graph, joined.pullback
    part = partial(subgraph, graph, device=joined.device)
    output_gradients = joined.output_gradients
    model_inputs = [
        _name_of(v)
        for v in graph.inputs
        if v not in output_gradients and v.name != names.LOSS_SCALE
    ]
    computed = joined.kept_results
    forward_outputs = dict.fromkeys([*joined.outputs, *joined.statistics, *computed])
    backward_inputs = [*joined.kept_inputs, *pullback.output_gradients.values()]
    return SplitStep(
        forward=part("forward", model_inputs, (), forward_outputs),
        backward=part("backward", backward_inputs, computed, pullback.input_gradients.values()),
        outputs=joined.outputs,
        logarithms=joined.logarithms,
        kept=tuple(_name_of(v) for v in joined.kept),
        output_gradients=pullback.output_gradients,
        input_gradients=pullback.input_gradients,
    )


@model_errors()
def _pullback(
    recipe: Recipe,
    batch: Batch,
    outputs: Sequence[str],
    wrt: Sequence[str],
    scored: Sequence[str],
    states: Collection[str],
) -> tuple[Pullback, list[str], dict[str, str]]:
    """Return both passes as one graph, its outputs that are next running statistics, and a mapping
    from outputs in `scored` to the outputs with their logits or logarithms.
    """
    op, statistics = training_forward(recipe, batch)
    by_name = {v.name: v for v in op.graph.outputs}
    op.graph.outputs[:] = [by_name[name] for name in outputs]
    logarithms = {}
    for name in scored:
        for name_of, find in EXACT:
            value = find(op, by_name[name])
            if value is not None:
                logarithms[name] = op.output(name_of(name), value).name
                break
    for name, value in statistics.items():
        op.output(names.updated(name), value)
    model = complete_shapes(prune(op))
    results = {*outputs, *logarithms.values()} - {*logarithms} - {*states}
    floats = [_name_of(v) for v in model.graph.outputs if is_float(v) and v.name in results]
    differentiable = [name for name in floats if reachable_values(model, [name], wrt)]
    pullback = recipe.gradient.add_pullback(model, differentiable, wrt)
    if recipe.precision.scales_loss:
        _scale(pullback)
    return pullback, [names.updated(name) for name in statistics], logarithms


def _scale(pullback: Pullback) -> None:
    """Multiply the gradients that arrive by the scale of the loss, and divide those that leave."""
    graph = pullback.model.graph
    op = GraphBuilder(graph)
    inputs = {v.name: v for v in graph.inputs}
    with op.scope(scopes.LOSS_SCALE):
        scale = scale_input(op)
        for name in pullback.output_gradients.values():
            value = op.wrap(inputs[name])
            uses = list(value.ir.uses())
            scaled = value * op.cast(scale, value.dtype)
            for node, i in uses:
                node.replace_input_with(i, scaled.ir)
    outputs = {_name_of(v): v for v in graph.outputs}
    input_gradients = {name: outputs[name] for name in pullback.input_gradients.values()}
    results = unscaled(op, {name: op.wrap(v) for name, v in input_gradients.items()})
    graph.outputs[:] = [
        results[_name_of(v)].ir if _name_of(v) in results else v for v in graph.outputs
    ]
    for name, gradient in input_gradients.items():
        gradient.name = op.unique_name(f"{name}/scaled")
        results[name].ir.name = name


def _backward_nodes(
    graph: ir.Graph,
    results: Sequence[ir.Value],
    gradients: Sequence[ir.Value],
    output_gradients: set[ir.Value],
) -> list[ir.Node]:
    """Return the nodes of the backward pass, in the order of the sorted graph: nodes that only the
    gradients need, and nodes whose results cannot be stored.
    """
    forward = _needed_by(results)
    backward = _needed_by(gradients)
    late = _depending_on(graph, output_gradients)
    sizes = {
        node
        for node in backward - late
        if node.op_type in SIZE_OPERATORS and _is_computed_by(node.inputs[0], forward)
    }
    # NumPy and onnxruntime cannot exchange arrays of 4 bits, so both passes compute these
    packed = {node for node in backward if any(v.dtype in FOUR_BITS for v in node.outputs)}
    of_backward = backward - forward - sizes | packed
    return [node for node in graph if node in of_backward]


def _kept_values(
    graph: ir.Graph,
    backward_nodes: Sequence[ir.Node],
    gradients: Sequence[ir.Value],
    output_gradients: set[ir.Value],
) -> list[ir.Value]:
    """Return the values that the backward pass reads but does not compute."""
    computed = {v for node in backward_nodes for v in node.outputs}
    read = [v for node in backward_nodes for v in values_read(node)]
    needed = dict.fromkeys(v for v in (*read, *gradients) if v not in computed)
    kept = [v for v in needed if v not in output_gradients and v.name not in graph.initializers]
    for value in kept:
        node = value.producer()
        if value.type is None and node is not None:
            infer_outputs(graph, node)  # onnxruntime's builder omits types
    return kept


def _widened(graph: ir.Graph, value: ir.Value, backward_nodes: Sequence[ir.Node]) -> ir.Value:
    """Return what the forward pass hands over for a value that the backward pass reads.

    onnxruntime's Python has no buffers of bfloat16, so such a value travels as float32.
    """
    node = value.producer()
    if value.dtype != ir.DataType.BFLOAT16 or node is None:
        return value
    op = GraphBuilder(graph)
    wide = op.cast(op.wrap(value), np.float32)
    narrow = op.cast(wide, value.dtype.numpy()).ir
    for reader in backward_nodes:
        for i, read in enumerate(reader.inputs):
            if read is value:
                reader.replace_input_with(i, narrow)
    casts = [wide.ir.producer(), narrow.producer()]
    added = [cast for cast in casts if cast is not None]
    graph.remove(added)
    graph.insert_after(node, added)
    return wide.ir


def loss_graph(
    recipe: Recipe, batch: Batch, outputs: Mapping[str, ir.Value], *, shared: bool = False
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the loss of the model's outputs, and a mapping from its inputs to their gradients.

    `outputs` maps each output to the value that the loss reads: the output itself, or its logits or
    logarithms, from which this graph computes the output. The loss does not include the penalty. A
    teacher runs in this graph, which then also reads the model's inputs. `shared` is as for
    `add_loss_outputs`.
    """
    op = empty_graph("loss", recipe.device)
    for name, value in outputs.items():
        y = spec_of(value)
        assert y.shape is not None
        source = op.input(y.name, y.dtype, y.shape)
        if y.name == name:
            op.graph.outputs.append(source.ir)
        else:
            op.output(name, _restored(op, name, source))
    wrt = [_name_of(v) for v in op.graph.inputs if is_float(v)]
    lessons = lessons_of(op, recipe, batch)
    add_loss_outputs(op, recipe.objectives, {}, batch, lessons, shared=shared)
    add_metric_sums(op, recipe)
    op.graph.outputs[:] = [v for v in op.graph.outputs if names.is_added(_name_of(v))]
    loss = names.SHARED if shared else names.TOTAL
    model = complete_shapes(prune(op))
    # The loss may stop the gradient of an output.
    reached = reachable_values(model, [loss], wrt) or wrt
    model, gradients = recipe.gradient.add_gradients(model, loss, reached)
    op = GraphBuilder(model.graph, device=recipe.device)
    values = values_of(model.graph)
    outputs_of_loss = {
        source: op.output(
            names.gradient(source),
            op.wrap(values[gradients[source]])
            if source in gradients
            else zeros_like(op, op.wrap(values[source])),
        ).name
        for source in wrt
    }
    return finish(op), outputs_of_loss


def _restored(op: GraphBuilder, output: str, source: Value) -> Value:
    """Return the output whose logits or logarithms a value is."""
    if source.name == names.log_softmax(output):
        return op.Identity(source)
    return op.Sigmoid(source) if source.name == names.logits(output) else op.Exp(source)


def penalty_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """Return the penalty, and the gradients of the penalized weights with the penalty's added."""
    op = empty_graph("penalty", recipe.device)
    weights = {name: weight_input(op, recipe, name) for name in recipe.penalties}
    total: Value | None = None
    for name, penalty in recipe.penalties.items():
        with op.scope(scopes.penalty_of(name)):
            term = penalty(op, weights[name])
        total = term if total is None else total + op.cast(term, total.dtype)
    assert total is not None
    op.output(names.PENALTY, total)
    model = complete_shapes(prune(op))
    model, gradients = recipe.gradient.add_gradients(model, names.PENALTY, list(weights))
    op = GraphBuilder(model.graph, device=recipe.device)
    values = values_of(model.graph)
    for name, gradient in gradients.items():
        of_penalty = op.wrap(values[gradient])
        assert of_penalty.shape is not None
        of_loss = op.input(names.gradient(name), of_penalty.dtype, of_penalty.shape)
        op.output(names.penalised(name), of_loss + of_penalty)
    return finish(op)


def _name_of(value: ir.Value) -> str:
    return value.name or ""


def values_read(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node reads, with those that its subgraphs capture."""
    attributes = node.attributes.values()
    subgraphs = [a.as_graph() for a in attributes if a.type == ir.AttributeType.GRAPH]
    inner: list[ir.Value | None] = []
    for subgraph in subgraphs:
        for inner_node in ir.traversal.RecursiveGraphIterator(subgraph):
            inner += inner_node.inputs
        inner.extend(subgraph.outputs)  # onnx-ir's lists do not support `+=`
    captured = [v for v in inner if v is not None and v.graph is node.graph]
    return [v for v in node.inputs if v is not None] + captured


def _needed_by(values: Iterable[ir.Value]) -> set[ir.Node]:
    """Return the nodes that compute these values, directly or not."""
    needed: set[ir.Node] = set()
    waiting = [v.producer() for v in values]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in needed:
            needed.add(node)
            waiting += [v.producer() for v in values_read(node)]
    return needed


def _depending_on(graph: ir.Graph, values: set[ir.Value]) -> set[ir.Node]:
    """Return the nodes of a sorted graph that depend on these values."""
    reached, dependent = set(values), set()
    for node in graph:
        if any(v in reached for v in values_read(node)):
            dependent.add(node)
            reached.update(node.outputs)
    return dependent


def _is_computed_by(value: ir.Value | None, nodes: set[ir.Node]) -> bool:
    """Whether a value is an input of the graph, or an output of one of these nodes."""
    return value is not None and (value.producer() is None or value.producer() in nodes)


def subgraph(
    graph: ir.Graph,
    name: str,
    inputs: Sequence[str],
    replaced: Sequence[str],
    outputs: Iterable[str],
    *,
    device: str,
    only_read: bool = False,
) -> onnx.ModelProto:
    """Return the part of the graph that computes `outputs` from `inputs`.

    The `replaced` values of the graph become inputs as well. `only_read` drops the inputs that this
    part of the graph does not read. `device` is as for GraphBuilder.
    """
    copy = graph.clone()
    copy.name = name
    values = values_of(copy)
    copy.inputs[:] = [values[i] for i in inputs]
    for value in replaced:
        old = values[value]
        new = ir.Value(name=old.name, type=old.type, shape=old.shape)
        values[value] = new
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name = f"{value}/before"
        copy.inputs.append(new)
    copy.outputs[:] = [values[o] for o in outputs]
    op = GraphBuilder(copy, device=device)
    if only_read:
        prune(op)
        copy.inputs[:] = [v for v in copy.inputs if v.uses() or v.is_graph_output()]
    return finish(op)
