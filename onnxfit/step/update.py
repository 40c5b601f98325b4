"""The end of a training step: clip the gradients, and compute the next value of every weight and
slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.gradients.update import NO_BOUNDS, Bounds, apply_update
from onnxfit.graph import names, scopes
from onnxfit.graph.layers import unit_axes
from onnxfit.graph.spec import Dim
from onnxfit.graph.sums import sum_of_squares
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.optimizers.base import WeightOptimizer
from onnxfit.step.frozen_rows import without_frozen_rows
from onnxfit.step.limits import largest, norm_dtype
from onnxfit.step.loss_scale import GuardedUpdate
from onnxfit.step.recipe import Recipe

Array = npt.NDArray[Any]
FusedWeights = Mapping[str, Sequence[str]]  # name -> small weights that are updated as one tensor

NO_FUSED_WEIGHTS: FusedWeights = MappingProxyType({})


@dataclass(frozen=True)
class FusingLimits:
    """Limits of fused weights on a kind of device, in elements.

    - `alignment`: each weight begins at a multiple of it in the fused tensor.
    - `weight`: copying a weight of up to this many elements takes less time than the dozen
      operators of a separate update.
    - `tensor`: a fused tensor of more elements would exceed the cache.
    - `concatenated`: the inputs of a Concat.
    """

    alignment: int
    weight: int
    tensor: int
    concatenated: int


LEAST_NORM = 1e-3  # of a unit's weights in adaptive clipping, so that zeros can train
# Kinds of devices on which small weights are fused.
FUSING = {
    "cpu": FusingLimits(alignment=1, weight=2**17, tensor=2**19, concatenated=2**30),
    # GPU libraries work best with tensors at multiples of 256 bytes. For a Concat of more than 32
    # tensors, onnxruntime copies their addresses to the GPU, which no CUDA graph may contain.
    "cuda": FusingLimits(alignment=64, weight=2**20, tensor=2**21, concatenated=32),
}


def limits_of(device: str) -> FusingLimits:
    """Return the limits for a device, as GraphBuilder names it."""
    return FUSING.get(device, FUSING["cpu"])


# ---------------------------------------------------------------------- the update of a step


def learning_rate_input(op: GraphBuilder, recipe: Recipe) -> Value:
    """The input for the learning rate, in the widest element type of a weight."""
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
    """Clip the gradients, and add the next value of every weight and slot as outputs.

    The norms that the recipe requests are outputs as well.

    - `gradients`: weight -> its gradient, for all weights of the recipe.
    - `fused`: name of a fused tensor -> the weights in it. The first weight represents all of them,
      because they share their settings.
    - `scaled`: the gradients are already multiplied by the learning rate.
    """
    inputs = {v.name: v for v in op.graph.inputs}
    learning_rate = learning_rate_input(op, recipe)
    if names.STEP in inputs:
        done = op.wrap(inputs[names.STEP])
    else:
        done = op.input(names.STEP, np.int64, ())
    weights = {name: op.wrap(inputs[name]) for name in recipe.weights}
    with op.scope(scopes.OPTIMIZER):
        gradients = without_frozen_rows(op, gradients, recipe.frozen_rows)
    norm = _reported_norm(op, recipe, gradients)
    if recipe.clip_adaptive is not None:
        gradients, norm = _adaptively_clipped(op, recipe, weights, gradients), None
    limits = limits_of(recipe.device)
    targets = _fuse(op, weights, gradients, fused, limits)
    slots = {
        weight: _slot_inputs(op, recipe.slots[weight], weight, target, weights[weight])
        for weight, target in targets.items()
    }
    guarded = GuardedUpdate(op, gradients) if recipe.precision.scales_loss else None
    with op.scope(scopes.OPTIMIZER):
        step = op.cast(done if guarded is None else guarded.steps_done(done), np.float64) + 1
        clipped = clip_gradients(op, gradients, recipe.clip_norm, recipe.clip_value, norm)
    next_weights, next_slots = apply_update(
        op,
        recipe.optimizers,
        weights,
        clipped,
        slots,
        learning_rate,
        step,
        scaled=scaled,
        bounds=_fused_bounds(recipe.bounds, fused, limits.alignment),
        frozen_rows=recipe.frozen_rows,
    )
    for weight, target in targets.items():
        pairs = {target: (next_weights[weight], weights[weight])}
        for slot, value in next_slots[weight].items():
            pairs[names.slot(target, slot)] = value, slots[weight][slot]
        for name, (new, old) in pairs.items():
            op.output(names.updated(name), new if guarded is None else guarded.guard(new, old))
    if guarded is not None:
        guarded.add_outputs()


def _fuse(
    op: GraphBuilder,
    weights: dict[str, Value],
    gradients: dict[str, Value],
    fused: FusedWeights,
    limits: FusingLimits,
) -> dict[str, str]:
    """Replace fused weights and their gradients, in place, by one tensor under the first weight's
    name.

    Return weight -> the tensor that is updated for it: the weight itself, or the fused tensor.
    """
    targets = {name: name for name in weights}
    for fused_name, members in fused.items():
        with op.scope(scopes.OPTIMIZER):
            vectors = _aligned_vectors(op, [gradients[name] for name in members], limits.alignment)
            flat = _concat_in_parts(op, vectors, limits.concatenated)
        assert flat.shape is not None  # weights have known sizes
        for name in members:
            del weights[name], gradients[name], targets[name]
        first = members[0]
        targets[first] = fused_name
        gradients[first] = flat
        weights[first] = op.input(fused_name, flat.dtype, flat.shape)
    return targets


def _fused_bounds(bounds: Bounds, fused: FusedWeights, alignment: int) -> Bounds:
    """Return the bounds of all tensors that are updated, under the names of `_fuse`."""
    joined = dict(bounds)
    for first, *others in fused.values():
        if first in bounds:
            minimum, maximum = (
                np.concatenate(
                    [
                        np.pad(array.reshape(-1), (0, -array.size % alignment))
                        for array in (bounds[name][end] for name in (first, *others))
                    ]
                )
                for end in (0, 1)
            )
            joined[first] = minimum, maximum
    return joined


def _aligned_vectors(op: GraphBuilder, values: Sequence[Value], alignment: int) -> list[Value]:
    """Return the values as vectors, with zeros between them up to the next multiple."""
    pieces = []
    for value in values:
        flat = _flat(op, value)
        size = math.prod(d for d in value.shape or () if isinstance(d, int))
        pieces.append(flat)
        if size % alignment:
            pieces.append(op.constant(np.zeros(-size % alignment, flat.dtype)))
    return pieces


def _concat_in_parts(op: GraphBuilder, vectors: Sequence[Value], maximum: int) -> Value:
    """Return vectors as one, by Concats of at most `maximum` inputs each."""
    while len(vectors) > 1:
        parts = [vectors[i : i + maximum] for i in range(0, len(vectors), maximum)]
        vectors = [op.Concat(*part, axis=0) if len(part) > 1 else part[0] for part in parts]
    return vectors[0]


def _flat(op: GraphBuilder, value: Value) -> Value:
    return value if value.rank == 1 else op.Reshape(value, [-1])


def _slot_inputs(
    op: GraphBuilder, slots: Mapping[str, Array], weight: str, target: str, w: Value
) -> dict[str, Value]:
    """The inputs for the slots of a weight; those of a fused tensor have its shape."""
    values = {}
    for slot, array in slots.items():
        shape: Sequence[Dim] = array.shape
        if target != weight:
            shape = w.shape or ()
        values[slot] = op.input(names.slot(target, slot), array.dtype, shape)
    return values


# ---------------------------------------------------------------------- norms and clipping


def _reported_norm(
    op: GraphBuilder, recipe: Recipe, gradients: Mapping[str, Value]
) -> Value | None:
    """Add the norms that the recipe requests as outputs; return the norm of all gradients.

    They are computed in float64, which holds the squares of all float32 numbers.
    """
    if recipe.norms == "none":
        return None
    with op.scope(scopes.OPTIMIZER):
        squares = {
            name: sum_of_squares(op, op.cast(g, np.float64)) for name, g in gradients.items()
        }
        norm = op.output(names.GRADIENT_NORM, op.Sqrt(op.Sum(*squares.values())))
        if recipe.norms == "per_weight":
            for name, square in squares.items():
                op.output(names.gradient_norm(name), op.Sqrt(square))
    return norm


def _adaptively_clipped(
    op: GraphBuilder, recipe: Recipe, weights: Mapping[str, Value], gradients: Mapping[str, Value]
) -> dict[str, Value]:
    """Scale the gradient of each unit so that its norm is at most `clip_adaptive` times the norm
    of its weights.
    """
    assert recipe.clip_adaptive is not None
    wide = norm_dtype([g.dtype for g in gradients.values()])
    clipped = {}
    with op.scope(scopes.OPTIMIZER):
        for name, g in gradients.items():
            axes = unit_axes(recipe.model.graph.initializers[name])
            norms = [_norms(op, op.cast(value, wide), axes) for value in (weights[name], g)]
            maximum = recipe.clip_adaptive * op.Max(norms[0], LEAST_NORM)
            clipped[name] = g * op.cast(maximum / op.Max(norms[1], maximum), g.dtype)
    return clipped


def _norms(op: GraphBuilder, x: Value, axes: tuple[int, ...]) -> Value:
    """Return L2 norms over axes, which stay with size 1."""
    return op.Sqrt(op.ReduceSum(x * x, axes)) if axes else abs(x)


def clip_gradients(
    op: GraphBuilder,
    gradients: Mapping[str, Value],
    clip_norm: float | None,
    clip_value: float | None,
    norm: Value | None = None,
) -> dict[str, Value]:
    """Clip every element to ±`clip_value`, then scale all gradients so that their common L2 norm
    is at most `clip_norm`.

    None skips either one. NaN stays NaN, and with `clip_norm` spreads to all gradients. `norm` is
    the norm before clipping, if it is already computed.
    """
    clipped = dict(gradients)
    if clip_value is not None:
        clipped = {
            # A bound outside the range of a narrower type clips nothing of that type.
            name: op.Clip(g, -clip_value, clip_value) if clip_value <= largest(g.dtype) else g
            for name, g in clipped.items()
        }
    if clip_norm is None or not clipped:
        return clipped
    wide = norm_dtype([g.dtype for g in clipped.values()])
    if norm is None or clip_value is not None:
        squares = [sum_of_squares(op, op.cast(g, wide)) for g in clipped.values()]
        norm = op.Sqrt(op.Sum(*squares))
    factor = clip_norm / op.Max(norm, clip_norm)
    factors = {dtype: op.cast(factor, dtype) for dtype in {g.dtype: None for g in clipped.values()}}
    return {name: g * factors[g.dtype] for name, g in clipped.items()}


# ---------------------------------------------------------------------- fused weights


def fused_weights(
    optimizers: Mapping[str, WeightOptimizer],
    weights: Mapping[str, Array],
    slots: Mapping[str, Mapping[str, Array]],
    bounds: Bounds = NO_BOUNDS,
    device: str = "cpu",
) -> list[list[str]]:
    """Group small weights whose update can run on one concatenated tensor, because the operators
    of an update cost more than their elements.

    Skip weights without slots; their update is only one or two operators. `optimizers` and `bounds`
    are as for `apply_update`, and `device` as for GraphBuilder.
    """
    limits = limits_of(device)
    alike: dict[Any, list[str]] = {}
    for name, w in weights.items():
        if _can_be_fused(optimizers[name], w, slots[name], limits):
            key = w.dtype, id(optimizers[name]), name in bounds
            alike.setdefault(key, []).append(name)
    groups = [g for some in alike.values() for g in _bounded_groups(some, weights, limits.tensor)]
    return [group for group in groups if len(group) > 1]


def _can_be_fused(
    own: WeightOptimizer, w: Array, slots: Mapping[str, Array], limits: FusingLimits
) -> bool:
    small = 0 < w.size <= limits.weight and w.dtype in (np.float32, np.float64)
    return (
        own.optimizer.elementwise
        and not own.optimizer.cautious
        and own.constraint is None
        and small
        and bool(slots)
        and all(array.shape == w.shape for array in slots.values())
    )


def _bounded_groups(
    members: Sequence[str], weights: Mapping[str, Array], maximum: int
) -> list[list[str]]:
    """Cut a list of weights, in its order, into groups of at most `maximum` elements."""
    groups: list[list[str]] = []
    room = 0
    for name in members:
        size = weights[name].size
        if size > room:
            groups.append([])
            room = maximum
        groups[-1].append(name)
        room -= size
    return groups
