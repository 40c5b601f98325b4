"""The end of a training step: clip the gradients, and give each weight and slot its next value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from onnxfit.graph import names, scopes
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.optimizers import apply_update, clip_gradients
from onnxfit.step.recipe import Recipe

FusedWeights = Mapping[str, Sequence[str]]  # name -> small weights that are updated as one


NO_FUSED_WEIGHTS: FusedWeights = MappingProxyType({})


def learning_rate_input(op: GraphBuilder, recipe: Recipe) -> Value:
    """The input of that name, in the widest type of a weight."""
    for value in op.graph.inputs:
        if value.name == names.LEARNING_RATE:
            return op.wrap(value)
    wide = any(
        recipe.model.graph.initializers[name].dtype == ir.DataType.DOUBLE for name in recipe.weights
    )
    return op.input(names.LEARNING_RATE, np.float64 if wide else np.float32, ())


def add_update(
    op: GraphBuilder,
    recipe: Recipe,
    gradients: Mapping[str, Value],
    fused: FusedWeights = NO_FUSED_WEIGHTS,
    *,
    scaled: bool = False,
) -> None:
    """Clip the gradients, and give every weight and slot its next value;

    `scaled` gradients are times the learning rate.
    """
    inputs = {v.name: v for v in op.graph.inputs}
    weights = {name: op.wrap(inputs[name]) for name in recipe.weights}
    learning_rate = learning_rate_input(op, recipe)
    done = (
        op.wrap(inputs[names.STEP]) if names.STEP in inputs else op.input(names.STEP, np.int64, ())
    )
    # what is updated for a weight: itself, or for the first of a pack, whose settings all of it
    # share, the pack
    updated = {name: name for name in recipe.weights}
    gradients = dict(gradients)
    for fused_name, members in fused.items():
        with op.scope(scopes.OPTIMIZER):
            flat = op.Concat(
                *(
                    g if g.rank == 1 else op.Reshape(g, [-1])
                    for g in map(gradients.__getitem__, members)
                ),
                axis=0,
            )
        first = members[0]
        for name in members:
            del weights[name], gradients[name], updated[name]
        assert flat.shape is not None  # weights have known sizes
        updated[first], gradients[first], weights[first] = (
            fused_name,
            flat,
            op.input(fused_name, flat.dtype, flat.shape),
        )
    slots = {
        weight: {
            slot: op.input(
                names.slot(target, slot),
                array.dtype,
                array.shape if target == weight else weights[weight].shape or (),
            )
            for slot, array in recipe.slots[weight].items()
        }
        for weight, target in updated.items()
    }
    with op.scope(scopes.OPTIMIZER):
        step = op.cast(done, np.float64) + 1
        clipped = clip_gradients(op, gradients, recipe.clip_norm, recipe.clip_value)
    next_weights, next_slots = apply_update(
        op, recipe.optimizer, weights, clipped, slots, learning_rate, step, scaled=scaled
    )
    for weight, target in updated.items():
        op.output(names.updated(target), next_weights[weight])
        for slot, value in next_slots[weight].items():
            op.output(names.updated(names.slot(target, slot)), value)
