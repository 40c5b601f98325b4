"""A training step in parts: forward, loss, backward, penalty and update are graphs of their own,
and a caller can stand between them.

    inputs, weights ─► forward ─► outputs ─► loss ─► gradients of the outputs ─► backward ─► gradients of the weights ─► penalty ─► update
                          └──────────── what the backward pass needs of the forward pass ──────┘

Pure functions, as in `step`, from which each differs only in where it is cut: the weights after a
step are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass

from onnxfit.gradients import Pullback
from onnxfit.gradients.paths import is_float, reachable_values
from onnxfit.graph import names, scopes
from onnxfit.graph.inference import infer_outputs
from onnxfit.graph.model import infer_shapes, model_errors, spec_of
from onnxfit.graph.opset import OPSET
from onnxfit.graph.values import GraphBuilder, Value, values_of
from onnxfit.step.finish import finish, prune
from onnxfit.step.forward import add_loss_outputs, training_forward
from onnxfit.step.recipe import Batch, Recipe
from onnxfit.step.update import add_update

# computed in the forward pass, so that a tensor is not kept for its sizes alone
SIZES = {"Shape", "Size"}


@dataclass(frozen=True)
class SplitStep:
    """The forward and the backward pass of a model.

    `forward` has the model's `outputs`, then the next running statistics, then what is `kept`;
    `backward` takes that, and gradients of the outputs (`arriving`: output -> input of the graph),
    and gives gradients (`leaving`: weight or input -> output of the graph). Of `kept`, the model's
    own inputs and weights are no outputs of `forward`: whoever runs it has them.
    """

    forward: onnx.ModelProto
    backward: onnx.ModelProto
    outputs: tuple[str, ...]
    kept: tuple[str, ...]
    arriving: dict[str, str]
    leaving: dict[str, str]


def split_step(
    recipe: Recipe, batch: Batch, outputs: Sequence[str], wrt: Sequence[str]
) -> SplitStep:
    """Both passes for a batch of these shapes:

    `outputs` are computed, and those that depend on `wrt` (weights and inputs) differentiated.
    """
    pulled, statistics = pullback(recipe, batch, outputs, wrt)
    TopologicalSortPass()(pulled.model)
    graph = pulled.model.graph
    ahead = _before([v for v in graph.outputs if v.name in (*outputs, *statistics)])
    behind = _before([v for v in graph.outputs if v.name in pulled.leaving.values()])
    seeds = {v for v in graph.inputs if v.name in pulled.arriving.values()}
    late = _after(graph, seeds)
    ahead |= {
        n
        for n in behind
        if n.op_type in SIZES
        and n not in late
        and n.inputs[0] is not None
        and _is_of(n.inputs[0], ahead)
    }
    back = [node for node in graph if node in behind and node not in ahead]
    made = {v for node in back for v in node.outputs}
    read = dict.fromkeys(v for node in back for v in _reads(node) if v not in made)
    read |= dict.fromkeys(
        v for v in graph.outputs if v.name in pulled.leaving.values() and v not in made
    )
    kept = [v for v in read if v not in seeds and v.name not in graph.initializers]
    for value in kept:
        if value.type is None and (maker := value.producer()) is not None:
            infer_outputs(graph, maker)  # onnxruntime's builder does not say
    inputs = set(graph.inputs)
    handed = [v.name or "" for v in kept if v not in inputs]
    own = [v.name or "" for v in graph.inputs if v not in seeds]
    return SplitStep(
        forward=_part(graph, "forward", own, (), dict.fromkeys([*outputs, *statistics, *handed])),
        backward=_part(
            graph,
            "backward",
            [*(v.name or "" for v in kept if v in inputs), *pulled.arriving.values()],
            handed,
            pulled.leaving.values(),
        ),
        outputs=tuple(outputs),
        kept=tuple(v.name or "" for v in kept),
        arriving=pulled.arriving,
        leaving=pulled.leaving,
    )


@model_errors()
def pullback(
    recipe: Recipe, batch: Batch, outputs: Sequence[str], wrt: Sequence[str]
) -> tuple[Pullback, list[str]]:
    """Both passes as one graph; and its outputs that are the next running statistics."""
    op, statistics = training_forward(recipe, batch)
    chosen = {v.name: v for v in op.graph.outputs}
    op.graph.outputs[:] = [chosen[name] for name in outputs]
    for name, value in statistics.items():
        op.output(names.updated(name), value)
    model = infer_shapes(prune(op))
    differentiable = [
        v.name or "" for v in model.graph.outputs if is_float(v) and v.name in outputs
    ]
    differentiable = [name for name in differentiable if reachable_values(model, [name], wrt)]
    return recipe.gradient.add_pullback(model, differentiable, wrt), [
        names.updated(name) for name in statistics
    ]


def loss_graph(
    recipe: Recipe, batch: Batch, outputs: Iterable[ir.Value]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Loss of the model's `outputs` against labels, without penalty; and output -> name of its
    gradient.
    """
    op = _empty("loss")
    for value in outputs:
        y = spec_of(value)
        assert y.shape is not None
        op.graph.outputs.append(op.input(y.name, y.dtype, y.shape).ir)
    wrt = [v.name or "" for v in op.graph.outputs if is_float(v)]
    add_loss_outputs(op, recipe.objectives, {}, batch)
    op.graph.outputs[:] = [v for v in op.graph.outputs if names.reserved(v.name or "")]
    model, found = recipe.gradient.add_gradients(infer_shapes(prune(op)), names.TOTAL, wrt)
    op = GraphBuilder(model.graph)
    values = values_of(model.graph)
    handed = {
        output: op.output(names.gradient(output), op.wrap(values[name])).name
        for output, name in found.items()
    }
    return finish(op), handed


def penalty_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """The penalty, and the gradients of the penalised weights with the penalty's added."""
    op = _empty("penalty")
    weights = {name: _weight(op, recipe, name) for name in recipe.penalties}
    total: Value | None = None
    for name, penalty in recipe.penalties.items():
        with op.scope(scopes.penalty_of(name)):
            term = penalty(op, weights[name])
        total = term if total is None else total + op.cast(term, total.dtype)
    assert total is not None
    op.output(names.PENALTY, total)
    model, found = recipe.gradient.add_gradients(
        infer_shapes(prune(op)), names.PENALTY, list(weights)
    )
    op = GraphBuilder(model.graph)
    values = values_of(model.graph)
    for name, gradient in found.items():
        of_penalty = op.wrap(values[gradient])
        assert of_penalty.shape is not None
        of_loss = op.input(names.gradient(name), of_penalty.dtype, of_penalty.shape)
        op.output(names.penalised(name), of_loss + of_penalty)
    return finish(op)


def accumulate_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """The gradients of a batch, added to those of the window (`Trainer(accumulate=)`)."""
    op = _empty("accumulate")
    first = op.input(names.FIRST, np.bool_, ())
    for name in recipe.weights:
        g = _gradient(op, recipe, name)
        assert g.shape is not None
        so_far = op.input(names.gradient_sum(name), g.dtype, g.shape)
        with op.scope(scopes.ACCUMULATION):
            total = op.Where(first, g, so_far + g)
        op.output(names.updated(names.gradient_sum(name)), total)
    return finish(op)


def update_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """The update alone, by the gradients of a batch."""
    op = _empty("update")
    gradients = {}
    for name in recipe.weights:
        _weight(op, recipe, name)
        gradients[name] = _gradient(op, recipe, name)
    add_update(op, recipe, gradients)
    return finish(op)


def _empty(name: str) -> GraphBuilder:
    return GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name))


def _weight(op: GraphBuilder, recipe: Recipe, name: str) -> Value:
    w = spec_of(recipe.model.graph.initializers[name])
    assert w.shape is not None
    return op.input(name, w.dtype, w.shape)


def _gradient(op: GraphBuilder, recipe: Recipe, name: str) -> Value:
    w = spec_of(recipe.model.graph.initializers[name])
    assert w.shape is not None
    return op.input(names.gradient(name), w.dtype, w.shape)


def _reads(node: ir.Node) -> list[ir.Value]:
    """What a node reads, what its subgraphs capture included."""
    graphs = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
    inner = [
        v for graph in graphs for n in ir.traversal.RecursiveGraphIterator(graph) for v in n.inputs
    ]
    inner += [v for graph in graphs for v in graph.outputs]
    return [
        v
        for v in (*node.inputs, *(v for v in inner if v is None or v.graph is node.graph))
        if v is not None
    ]


def _before(values: Iterable[ir.Value]) -> set[ir.Node]:
    """The nodes that these values need."""
    found: set[ir.Node] = set()
    waiting = [v.producer() for v in values]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [v.producer() for v in _reads(node)]
    return found


def _after(graph: ir.Graph, values: set[ir.Value]) -> set[ir.Node]:
    """The nodes of a sorted graph that depend on these values."""
    reached, found = set(values), set()
    for node in graph:
        if any(v in reached for v in _reads(node)):
            found.add(node)
            reached.update(node.outputs)
    return found


def _is_of(value: ir.Value, nodes: set[ir.Node]) -> bool:
    """Whether a value is there before the backward pass."""
    return value.producer() is None or value.producer() in nodes


def _part(
    graph: ir.Graph, name: str, inputs: Sequence[str], given: Sequence[str], outputs: Iterable[str]
) -> onnx.ModelProto:
    """What computes `outputs` from these `inputs` of the graph, and from `given` values of it,
    which become inputs.
    """
    copy = graph.clone()
    copy.name = name
    values = values_of(copy)
    copy.inputs[:] = [values[i] for i in inputs]
    for value in given:
        old = values[value]
        values[value] = new = ir.Value(name=old.name, type=old.type, shape=old.shape)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name = f"{value}/before"
        copy.inputs.append(new)
    copy.outputs[:] = [values[o] for o in outputs]
    return finish(GraphBuilder(copy))
