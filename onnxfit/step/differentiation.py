"""The gradient of the loss, for a recipe and the sizes of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxfit.gradients.blocker import Blocker, refuse
from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.inspection import inspect_working
from onnxfit.gradients.paths import reachable_values
from onnxfit.graph import names
from onnxfit.graph.model import model_errors
from onnxfit.graph.values import GraphBuilder, Value, values_of
from onnxfit.step.forward import with_loss
from onnxfit.step.loss_scale import scale_input, unscaled
from onnxfit.step.recipe import Batch, Recipe
from onnxfit.step.update import learning_rate_input


@model_errors()
def check_gradient(recipe: Recipe) -> None:
    """Raise GradientError if nodes block the gradient for every batch size."""
    blockers: Sequence[Blocker]
    if recipe.loss_outputs:
        model = with_loss(recipe, recipe.declared_batch)
        blockers = recipe.gradient.blockers(model, names.TOTAL, recipe.weights)
    else:
        blockers = inspect_working(
            recipe.model, recipe.weights, recipe.float_outputs, recipe.gradient.name
        ).blockers
    refuse([blocker for blocker in blockers if not blocker.needs_sizes])


@model_errors()
def differentiate(
    recipe: Recipe, batch: Batch, *, scaled: bool = False, shared: bool = False
) -> tuple[GraphBuilder, dict[str, Value]]:
    """Return a builder of the graph with its gradients, and the gradient of each weight.

    `scaled=True` multiplies the loss, and so every gradient, by the learning rate. `shared=True`
    differentiates this rank's summand of the loss, as `add_loss_outputs` says.
    """
    scales_loss = recipe.precision.scales_loss
    if scaled or scales_loss:
        loss = names.SCALED
        model = _with_scaled_loss(recipe, batch, shared=shared)
    else:
        loss = names.SHARED if shared else names.TOTAL
        model = with_loss(recipe, batch, shared=shared)
    weights: Sequence[str] = recipe.weights
    if any(node.op_type == "If" for node in recipe.model.graph):
        # The sizes of the batch may have selected a branch without some of the weights.
        weights = reachable_values(model, [loss], weights)
    model, gradients = recipe.gradient.add_gradients(model, loss, weights)
    model.graph.outputs[:] = [v for v in model.graph.outputs if v.name != names.SCALED]
    op = GraphBuilder(model.graph, device=recipe.device)
    values = values_of(model.graph)
    by_weight = {
        weight: op.wrap(values[gradients[weight]])
        if weight in gradients
        else zeros_like(op, op.wrap(values[weight]))
        for weight in recipe.weights
    }
    return op, unscaled(op, by_weight) if scales_loss else by_weight


def _with_scaled_loss(recipe: Recipe, batch: Batch, *, shared: bool) -> ir.Model:
    """Return the model with its loss, and with the loss times a factor as an output.

    The factor is the scale of the loss, where the recipe has one, else the learning rate.
    """
    model = with_loss(recipe, batch, shared=shared)
    op = GraphBuilder(model.graph, device=recipe.device)
    loss = names.SHARED if shared else names.TOTAL
    total = op.wrap(next(v for v in op.graph.outputs if v.name == loss))
    scales_loss = recipe.precision.scales_loss
    factor = scale_input(op) if scales_loss else learning_rate_input(op, recipe)
    op.output(names.SCALED, total * op.cast(factor, total.dtype))
    return model


def is_scaled(recipe: Recipe) -> bool:
    """Whether the loss is multiplied by the learning rate, instead of all gradients.

    An update w - lr g allows this, if nothing else reads the gradient.
    """
    if recipe.norms != "none":
        return False
    own = {id(one): one for one in recipe.optimizers.values()}.values()
    if not all(one.optimizer.is_plain_sgd and one.schedule is None for one in own):
        return False
    if recipe.clip_norm is not None or recipe.clip_adaptive is not None:
        return False
    if recipe.precision.scales_loss:
        return False
    initializers = recipe.model.graph.initializers
    dtypes = {initializers[name].dtype for name in recipe.weights}
    return recipe.clip_value is None and dtypes <= {ir.DataType.FLOAT, ir.DataType.DOUBLE}
