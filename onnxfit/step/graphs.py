"""The graphs of training, evaluation and prediction.

Pure functions from a `Recipe` and the specs of a batch to an `onnx.ModelProto`. Names from
`graph.names` describe the inputs and outputs of a graph: an input may be a name of the training
state, and an output `<state>/next` is its value after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from onnxfit.errors import SettingError
from onnxfit.graph import names, scopes
from onnxfit.graph.model import (
    OnnxModel,
    model_errors,
    spec_of,
    tensor_outputs,
    to_ir,
    with_references,
)
from onnxfit.graph.shared_tensors import include_shared, to_proto
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.graph.weights import select_weights
from onnxfit.load.normalize import normalize
from onnxfit.load.opset import empty_graph
from onnxfit.load.reading import ModelSource, read_model
from onnxfit.load.training_form import to_evaluation_form, to_inference_form
from onnxfit.penalties import PenaltyLike, penalties_for
from onnxfit.step.differentiation import differentiate, is_scaled
from onnxfit.step.finish import finish
from onnxfit.step.forward import (
    add_loss_outputs,
    add_metric_sums,
    forward,
    keep_outputs,
    weight_input,
    with_loss,
)
from onnxfit.step.limits import check_fits
from onnxfit.step.objectives import Losses, LossWeights, get_objectives, get_targets
from onnxfit.step.recipe import Batch, Recipe
from onnxfit.step.update import NO_FUSED_WEIGHTS, FusedWeights, add_update


@model_errors()
def train_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """Return forward pass, loss, penalty, gradient, clipping and update as one graph."""
    op, gradients = differentiate(recipe, batch)
    add_update(op, recipe, gradients)
    return finish(op)


@model_errors()
def compact_train_graph(recipe: Recipe, batch: Batch, fused: FusedWeights) -> onnx.ModelProto:
    """Return the same step in fewer operators, for running rather than reading.

    `fused` are weights that are updated together: the graph reads each of them separately, but
    returns them, and each of their slots, as one tensor. See `is_scaled` for the loss.
    """
    scaled = is_scaled(recipe)
    op, gradients = differentiate(recipe, batch, scaled=scaled)
    add_update(op, recipe, gradients, fused, scaled=scaled)
    return finish(op)


@model_errors()
def gradient_graph(recipe: Recipe, batch: Batch, *, shared: bool) -> onnx.ModelProto:
    """Return forward pass, loss, penalty and the gradient of each weight.

    The gradients are multiplied by the learning rate if `is_scaled` is true. `shared` is as for
    `differentiate`.
    """
    op, gradients = differentiate(recipe, batch, scaled=is_scaled(recipe), shared=shared)
    for weight, g in gradients.items():
        value = g.ir
        if value.producer() is None or value.is_graph_output():
            value = op.Identity(g).ir
        # Use the value itself, because `op.output` would copy it.
        value.name = names.gradient(weight)
        op.graph.outputs.append(value)
    return finish(op)


def counted_outputs(recipe: Recipe, batch: Batch) -> list[str]:
    """Return the outputs whose loss is not divided by its number of entries.

    The loss of such an output has element weights, or `reduction="weighted_mean"`. A loss that the
    model computes itself has no such output.
    """
    if not recipe.objectives:
        return []
    op = _graph_of_outputs(recipe, "loss")
    add_loss_outputs(op, recipe.objectives, {}, batch)
    added = {v.name for v in op.graph.outputs}
    return [name for name in recipe.objectives if names.count(name) in added]


def _graph_of_outputs(recipe: Recipe, name: str) -> GraphBuilder:
    """Return an empty graph whose inputs and outputs are the outputs that the loss reads."""
    op = empty_graph(name, recipe.device)
    own = {names.read(weight): weight for weight in recipe.loss_weights}
    for output in recipe.loss_outputs:
        y = recipe.all_outputs[output]
        assert y.shape is not None  # a loss needs its rank
        if output not in own:
            op.graph.outputs.append(op.input(output, y.dtype, y.shape).ir)
        elif own[output] in recipe.state:
            op.output(output, weight_input(op, recipe, own[output]))
        else:
            op.output(output, op.constant(recipe.array(own[output])))
    return op


@model_errors()
def counts_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """Return the divisor of each loss that is not divided by its number of entries."""
    model = with_loss(recipe, batch)
    counts = {names.count(output) for output in recipe.objectives}
    model.graph.outputs[:] = [v for v in model.graph.outputs if v.name in counts]
    return finish(GraphBuilder(model.graph, device=recipe.device))


@model_errors()
def accumulate_graph(
    recipe: Recipe, batch: Batch, *, shared: bool = False, whole: bool = True
) -> onnx.ModelProto:
    """Return the gradients of a batch, added to those of its window.

    A window is the batches whose gradients are averaged, as `Trainer(accumulate=)` says.

    - `whole`: whether the graph also has forward pass, loss and penalty, from which it computes the
      gradients; `shared` is then as for `differentiate`. Otherwise it reads the gradients.
    """
    gradients: Mapping[str, Value] = {}
    if whole:
        op, gradients = differentiate(recipe, batch, shared=shared)
    else:
        op = empty_graph("accumulate", recipe.device)
    first = op.input(names.FIRST, np.bool_, ())
    for weight in gradients or recipe.weights:
        g = gradients[weight] if whole else weight_input(op, recipe, weight, names.gradient)
        assert g.shape is not None  # the shape of its weight
        so_far = op.input(names.gradient_sum(weight), g.dtype, g.shape)
        # Where, not a product: a NaN must not survive its window
        with op.scope(scopes.ACCUMULATION):
            total = op.Where(first, g, so_far + g)
        op.output(names.updated(names.gradient_sum(weight)), total)
    return finish(op)


@model_errors()
def update_graph(
    recipe: Recipe,
    fused: FusedWeights = NO_FUSED_WEIGHTS,
    *,
    scaled: bool = False,
    averages: bool = False,
) -> onnx.ModelProto:
    """Return the update alone, from the gradients of a batch.

    - `fused`, `scaled`: as for `add_update`.
    - `averages`: whether the graph reads the sums of a window's gradients, and updates by their
      mean.
    """
    op = empty_graph("update", recipe.device)
    gradients = {}
    window: Value | None = None
    for weight in recipe.weights:
        weight_input(op, recipe, weight)
        if averages and window is None:
            window = op.input(names.WINDOW, np.float32, ())
        name_of = names.gradient if window is None else names.gradient_sum
        g = weight_input(op, recipe, weight, name_of)
        if window is not None:
            with op.scope(scopes.ACCUMULATION):
                g = g / op.cast(window, g.dtype)
        gradients[weight] = g
    add_update(op, recipe, gradients, fused, scaled=scaled)
    return finish(op)


@model_errors()
def evaluate_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """Return forward pass, loss and penalty as in inference: no dropout, running statistics."""
    op = forward(recipe, batch)
    to_evaluation_form(op)
    add_loss_outputs(op, recipe.objectives, recipe.penalties, batch)
    keep_outputs(op, [*add_metric_sums(op, recipe), *recipe.state_outputs])
    return finish(op)


@model_errors()
def evaluate_outputs_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """Return loss and penalty of the model's outputs, which are inputs like the weights."""
    op = _graph_of_outputs(recipe, "evaluate")
    inputs = {value.name for value in op.graph.inputs}
    for name in recipe.penalties:
        if name not in inputs:  # else a loss has this tensor
            weight_input(op, recipe, name)
    add_loss_outputs(op, recipe.objectives, recipe.penalties, batch)
    add_metric_sums(op, recipe)
    keep_outputs(op, ())
    return finish(op)


@model_errors()
def predict_graph(recipe: Recipe, batch: Batch) -> onnx.ModelProto:
    """Return the model itself, with its trained weights as inputs."""
    op = forward(recipe, batch)
    keep_outputs(op, list(recipe.outputs))
    to_evaluation_form(op)
    return finish(op)


@model_errors()
def deployed_graph(recipe: Recipe, arrays: Mapping[str, np.ndarray[Any, Any]]) -> OnnxModel:
    """Return the model with its trained weights as constants.

    onnxruntime optimizes it like the exported file.
    """
    if recipe.trainable is not None:
        model = recipe.trainable.inference_model(arrays)
        _only_tensors(model.proto, recipe)
        return model
    model = with_references(to_proto(recipe.model), arrays, compiled=True)
    op = GraphBuilder(to_ir(model.proto).graph, device=recipe.device)
    keep_outputs(op, list(recipe.outputs))
    to_evaluation_form(op)
    return OnnxModel(finish(op, exact=True), model.arrays)


def _only_tensors(model: onnx.ModelProto, recipe: Recipe) -> None:
    """Drop inputs that are initializers and outputs that are not tensors, in place.

    Nodes and opset stay, so onnxruntime chooses the same kernels.
    """
    to_inference_form(model, recipe.batch_norm)
    graph = model.graph
    inputs = {spec.name for spec in recipe.inputs}
    for value in [v for v in graph.input if v.name not in inputs]:
        graph.input.remove(value)
    for value in [v for v in graph.output if v.name not in recipe.outputs]:
        graph.output.remove(value)


def add_loss(
    model_onnx: ModelSource,
    loss: Losses,
    penalty: PenaltyLike = None,
    *,
    weights: Sequence[str] | str | None = None,
    loss_weights: LossWeights = None,
    sample_weight: bool = False,
) -> onnx.ModelProto:
    """Return the model with its loss as one more output, for any onnxruntime.

    The output is called `train/loss`; the labels are inputs `y_true/<output>`, and
    `y_true/<output>/<label>` for a loss that declares several arrays of labels.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which stays unchanged.
    - `loss`, `loss_weights`: as for `Trainer`: a loss, or a dict output name -> loss, and the
      factor of each in the sum.
    - `penalty`: as for `Trainer`; it counts the weights that `weights` selects.
    - `weights`: names and patterns, as for `Trainer`.
    - `sample_weight`: whether the model gets an input of that name and of shape `(batch,)`, the
      factor of each row's loss.

    ModelError, SettingError or UnknownNameError: the model or an argument is not valid.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] slope = {2}>
    ...     { y = MatMul(x, slope) }''')
    >>> graph = add_loss(model, "mean_squared_error", penalty=0.1).graph
    >>> [i.name for i in graph.input], [o.name for o in graph.output]
    (['x', 'y_true/y'], ['y', 'train/loss'])
    """
    work = normalize(read_model(model_onnx))
    outputs = tensor_outputs(work)
    penalties = {} if penalty is None else penalties_for(penalty, select_weights(work, weights))
    for name, one in penalties.items():
        check_fits(one, spec_of(work.graph.initializers[name]).dtype, f"weight {name!r}")
    objectives = get_objectives(loss, loss_weights, work)
    if not objectives and names.LOSS not in outputs:
        raise SettingError(
            "loss={} contains no output. Pass a loss for at least one output to add_loss."
        )
    op = GraphBuilder(work.graph)
    targets = get_targets(objectives, outputs).values()
    batch = {target.input: target.spec for target in targets}
    if sample_weight:
        batch[names.SAMPLE_WEIGHT] = TensorSpec(
            names.SAMPLE_WEIGHT, np.dtype(np.float32), ("batch",)
        )
    add_loss_outputs(op, objectives, penalties, batch)
    keep_outputs(op, list(outputs))
    return include_shared(finish(op))
