"""model + loss + penalty + gradient + optimizer -> the graphs of a training, an evaluation and a
prediction step.

Pure functions from a `Recipe` and the shapes of a batch to an `onnx.ModelProto`. A graph describes
itself by the names of `graph.names`: an input that is part of the training state is read from it,
an output `<state>/next` is its value after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from onnxfit.errors import ModelError, OnnxfitError, SettingError
from onnxfit.gradients.blocker import BlockedError, Blocker, refuse
from onnxfit.gradients.inspection import inspect_working
from onnxfit.graph import names
from onnxfit.graph.model import (
    OPSET,
    ModelSource,
    infer_shapes,
    model_errors,
    normalize,
    read_model,
    spec_of,
    specialize_shapes,
    tensor_outputs,
    with_initializers,
)
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.training_form import to_evaluation_form, to_training_form
from onnxfit.graph.values import GraphBuilder, Value, values_of
from onnxfit.graph.weights import select_weights
from onnxfit.penalties import Penalty, PenaltyLike, penalties_for
from onnxfit.step.objectives import Losses, Objective, get_objectives
from onnxfit.step.recipe import Batch, Recipe
from onnxfit.step.rewrites import REWRITES
from onnxfit.step.update import FusedWeights, add_update, learning_rate_input


def train_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """Forward, loss, penalty, gradient, clipping and update: one graph, run once per batch."""
    op, gradients = gradient(recipe, batch)
    add_update(op, recipe, gradients)
    return finished(op)


def compact_train_graph(recipe: Recipe, batch: Batch, fused: FusedWeights) -> onnx.ModelProto:
    """Return the same in fewer operators, to be run rather than read.

    `fused` are weights that are updated together: the graph reads each of them, but they and their
    slots leave it as one tensor each. See `is_scaled` for the loss.
    """
    scaled = is_scaled(recipe)
    op, gradients = gradient(recipe, batch, scaled=scaled)
    add_update(op, recipe, gradients, fused, scaled=scaled)
    return finished(op)


def accumulate_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """Forward, loss, penalty and gradient, added to the gradients of the window
    (`Trainer(accumulate=)`).
    """
    op, gradients = gradient(recipe, batch)
    first = op.input(names.FIRST, np.bool_, ())
    for weight, g in gradients.items():
        assert g.shape is not None  # it has its weight's
        so_far = op.input(names.gradient_sum(weight), g.dtype, g.shape)
        # Where, not a product: a NaN of the last window must not outlive it
        op.output(names.updated(names.gradient_sum(weight)), op.Where(first, g, so_far + g))
    return finished(op)


def update_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """The update alone, by the mean gradient of a window of batches."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="update")
    op = GraphBuilder(graph)
    gradients = {}
    window: Value | None = None
    for weight in recipe.weights:
        w = spec_of(recipe.model.graph.initializers[weight])
        assert w.shape is not None
        op.input(weight, w.dtype, w.shape)
        if window is None:
            window = op.input(names.WINDOW, np.float32, ())
        gradients[weight] = op.input(names.gradient_sum(weight), w.dtype, w.shape) / op.cast(
            window, w.dtype
        )
    add_update(op, recipe, gradients)
    return finished(op)


@model_errors()
def evaluate_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """Forward, loss and penalty, as in inference: no dropout, running statistics."""
    op = forward(recipe, batch)
    to_evaluation_form(op)
    add_loss_to(op, recipe.objectives, recipe.penalties, batch)
    keep_outputs(op, recipe.metric_outputs)
    return finished(op)


@model_errors()
def predict_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """The model itself, with its trained weights as inputs."""
    op = forward(recipe, batch)
    to_evaluation_form(op)
    return finished(op)


@model_errors()
def deployed_graph(recipe: Recipe, arrays: Mapping[str, np.ndarray[Any, Any]]) -> onnx.ModelProto:
    """The model with its trained weights inside, which onnxruntime optimises as it does the
    exported one.
    """
    op = GraphBuilder(ir.from_proto(with_initializers(ir.to_proto(recipe.model), arrays)).graph)
    to_evaluation_form(op)
    return finished(op)


def forward(recipe: Recipe, batch: Batch) -> GraphBuilder:
    """The model with its training state as inputs, specialised to the shapes of the batch where
    they are numbers.
    """
    model = recipe.model.clone()
    for name in (*recipe.state, *recipe.constants):
        value = model.graph.initializers.pop(name)
        value.const_value = None
        model.graph.inputs.append(value)
    shapes = {}
    for name, spec in batch.items():
        if spec.shape is not None and all(isinstance(d, int) for d in spec.shape):
            shapes[name] = tuple(d for d in spec.shape if isinstance(d, int))
    return GraphBuilder(specialize_shapes(model, shapes).graph)


@model_errors()
def training_forward(recipe: Recipe, batch: Batch) -> tuple[GraphBuilder, dict[str, Value]]:
    """Forward as in training, and the next values of the running statistics."""
    op = forward(recipe, batch)
    seed, step = op.input(names.SEED, np.int64, ()), op.input(names.STEP, np.int64, ())
    return op, to_training_form(op, recipe.weights, recipe.batch_norm, seed, step)


def check_gradient(recipe: Recipe) -> None:
    """Raise GradientError if nodes block the gradient whatever sizes a batch has."""
    if recipe.loss_outputs:
        found = _blockers(recipe)
    else:
        source = recipe.gradient.name
        found = inspect_working(recipe.model, recipe.weights, recipe.float_outputs, source).blockers
    refuse([blocker for blocker in found if not blocker.needs_sizes])


def _blockers(recipe: Recipe) -> Sequence[Blocker]:
    """The nodes that block the gradient for a batch as the model declares it.

    The rules find them while they build the gradient. It is kept for the first batch.
    """
    batch = recipe.declared_batch
    if recipe.gradient.name == "onnxruntime":  # its builder tells them without building
        with model_errors():
            model = with_loss(recipe, batch)
            return recipe.gradient.blockers(model, names.TOTAL, recipe.weights)
    try:
        differentiate(recipe, batch, scaled=is_scaled(recipe))
    except BlockedError as error:
        return error.blockers
    return ()


def with_loss(recipe: Recipe, batch: Batch) -> ir.Model:
    """Forward as in training, loss and penalty: what is differentiated."""
    op, statistics = training_forward(recipe, batch)
    add_loss_to(op, recipe.objectives, recipe.penalties, batch)
    keep_outputs(op, recipe.metric_outputs)
    for name, value in statistics.items():
        op.output(names.updated(name), value)
    return infer_shapes(pruned(op))


def gradient(
    recipe: Recipe, batch: Batch, *, scaled: bool = False
) -> tuple[GraphBuilder, dict[str, Value]]:
    """Return a builder of the graph with its gradients, and the gradient of each weight.

    `scaled=True` multiplies the loss, and so every gradient, by the learning rate.
    """
    model, gradients = differentiate(recipe, batch, scaled=scaled)
    op = GraphBuilder(model.graph)
    values = values_of(model.graph)
    return op, {weight: op.wrap(values[name]) for weight, name in gradients.items()}


@model_errors()
def differentiate(
    recipe: Recipe, batch: Batch, *, scaled: bool = False
) -> tuple[ir.Model, dict[str, str]]:
    """Return the forward pass, the loss and the gradient, and the name of each weight's gradient.

    The gradient for a batch as the model declares it is built once for a recipe, since the
    constructor of a Trainer needs it to find out what blocks it; later calls return copies.
    """
    declared = batch == recipe.declared_batch
    if not declared or scaled not in recipe.differentiated:
        found = _differentiate(recipe, batch, scaled)
        if not declared:
            return found
        recipe.differentiated[scaled] = found
    model, gradients = recipe.differentiated[scaled]
    return model.clone(), gradients


def _differentiate(recipe: Recipe, batch: Batch, scaled: bool) -> tuple[ir.Model, dict[str, str]]:
    model = with_loss(recipe, batch)
    loss = names.TOTAL
    if scaled:
        loss = names.SCALED
        op = GraphBuilder(model.graph)
        total = op.wrap(next(v for v in op.graph.outputs if v.name == names.TOTAL))
        op.output(loss, total * op.cast(learning_rate_input(op, recipe), total.dtype))
    model, gradients = recipe.gradient.add_gradients(model, loss, recipe.weights)
    model.graph.outputs[:] = [v for v in model.graph.outputs if v.name != names.SCALED]
    return model, gradients


def is_scaled(recipe: Recipe) -> bool:
    """Whether the loss is multiplied by the learning rate, in the place of all gradients.

    An update w - lr g allows it, if nothing else looks at the gradient.
    """
    if not recipe.optimizer.is_plain_sgd or recipe.clip_norm is not None:
        return False
    initializers = recipe.model.graph.initializers
    dtypes = {initializers[name].dtype for name in recipe.weights}
    return recipe.clip_value is None and dtypes <= {ir.DataType.FLOAT, ir.DataType.DOUBLE}


def add_loss(
    model_onnx: ModelSource,
    loss: Losses,
    penalty: PenaltyLike = None,
    *,
    weights: Sequence[str] | str | None = None,
    loss_weights: Mapping[str, float] | None = None,
    sample_weight: bool = False,
) -> onnx.ModelProto:
    """The model with its loss as one more output, `train/loss`, and its labels as inputs
    `y_true/<output>`: it runs in any onnxruntime.

    `penalty` counts the weights that `weights` selects; `sample_weight=True` adds an input of that
    name, shape `(batch,)`.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] slope = {2}> { y = MatMul(x, slope) }''')
    >>> graph = add_loss(model, "mean_squared_error", penalty=0.1).graph
    >>> [i.name for i in graph.input], [o.name for o in graph.output]
    (['x', 'y_true/y'], ['y', 'train/loss'])
    """
    work = normalize(read_model(model_onnx))
    outputs = tensor_outputs(work)
    penalties = {} if penalty is None else penalties_for(penalty, select_weights(work, weights))
    objectives = get_objectives(loss, loss_weights, outputs)
    op = GraphBuilder(work.graph)
    batch = {
        names.target(name): objective.loss.target(outputs[name])
        for name, objective in objectives.items()
    }
    if sample_weight:
        batch[names.SAMPLE_WEIGHT] = TensorSpec(
            names.SAMPLE_WEIGHT, np.dtype(np.float32), ("batch",)
        )
    add_loss_to(op, objectives, penalties, batch)
    return finished(op)


def add_loss_to(
    op: GraphBuilder,
    objectives: Mapping[str, Objective],
    penalties: Mapping[str, Penalty],
    batch: Batch,
) -> None:
    """Add labels, the loss of every output, penalties, and their sum as output `names.TOTAL`."""
    outputs = {v.name or "": v for v in op.graph.outputs}
    values = {**op.graph.initializers, **{v.name or "": v for v in op.graph.inputs}}
    sample_weight: Value | None = None
    if names.SAMPLE_WEIGHT in batch:
        spec = batch[names.SAMPLE_WEIGHT]
        assert spec.shape is not None
        sample_weight = op.input(names.SAMPLE_WEIGHT, spec.dtype, spec.shape)
    terms: list[Value] = []
    if not objectives:
        own = op.wrap(outputs[names.LOSS])
        terms.append(
            own if own.shape == () else op.Reshape(own, op.constant(np.zeros(0, np.int64)))
        )
    for output, objective in objectives.items():
        y_pred = op.wrap(outputs[output])
        spec = batch[names.target(output)]
        if y_pred.ir.shape is None or spec.shape is None:
            raise ModelError(
                f"The rank of output {output!r} is unknown, so that no loss can be put on it."
            )
        y_true = op.input(names.target(output), spec.dtype, spec.shape)
        try:
            with op.scope(f"loss/{output}"):
                value, count = objective.loss.reduce(op, y_true, y_pred, sample_weight)
        except OnnxfitError:
            raise
        except ValueError as error:
            raise SettingError(
                f"{type(objective.loss).__name__} cannot meet output {spec_of(y_pred.ir)} with"
                f" labels {spec}: {error}"
            ) from error
        if len(objectives) > 1:
            op.output(names.part(output), value)
        if count is not None:
            op.output(names.count(output), count)
        terms.append(value if objective.weight == 1 else value * objective.weight)
    for weight, penalty in penalties.items():
        with op.scope(f"penalty/{weight}"):
            terms.append(penalty(op, op.wrap(values[weight])))
    with op.scope("loss"):
        total = terms[0]
        for term in terms[1:]:
            total = total + op.cast(term, total.dtype)
    op.output(names.TOTAL, total)


def keep_outputs(op: GraphBuilder, kept: Sequence[str]) -> None:
    """Drop the model's outputs that nobody asked for; those that a step reports stay."""
    op.graph.outputs[:] = [
        v for v in op.graph.outputs if v.name in kept or names.reserved(v.name or "")
    ]


def pruned(op: GraphBuilder) -> ir.Model:
    """The graph without what no output needs, nodes in order."""
    model = ir.Model(op.graph, ir_version=10)
    TopologicalSortPass()(model)
    _remove_unused(model)
    unused = {names.SEED, names.STEP, names.LEARNING_RATE}
    op.graph.inputs[:] = [v for v in op.graph.inputs if v.name not in unused or v.uses()]
    return model


def _remove_unused(model: ir.Model) -> None:
    """onnx-ir takes away a node, but goes on to count what its bodies capture as used: these are
    emptied, and it looks again.
    """
    emptied: list[ir.Graph] | None = None
    while emptied is None or emptied:
        before = list(model.graph)
        RemoveUnusedNodesPass()(model)
        kept = set(model.graph)
        attributes = [a for node in before if node not in kept for a in node.attributes.values()]
        emptied = [a.as_graph() for a in attributes if a.type == ir.AttributeType.GRAPH]
        for body in emptied:
            for node in ir.traversal.RecursiveGraphIterator(body):
                for i in range(len(node.inputs)):
                    node.replace_input_with(i, None)
            body.outputs.clear()


def finished(op: GraphBuilder) -> onnx.ModelProto:
    pruned(op)
    for rewrite in REWRITES:
        rewrite(op.graph)
    model = ir.to_proto(pruned(op))
    model.producer_name = "onnxfit"
    return model
