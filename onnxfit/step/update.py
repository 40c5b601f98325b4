"""The end of a training step: clip the gradients, and compute the next value of every weight and
slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.errors import SettingError
from onnxfit.gradients import functions
from onnxfit.graph import names, scopes
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.optimizers import EMA_SLOT, Optimizer, initial_slots
from onnxfit.step.recipe import Recipe

Array = npt.NDArray[Any]
FusedWeights = Mapping[str, Sequence[str]]  # name -> small weights that are updated as one tensor

NO_FUSED_WEIGHTS: FusedWeights = MappingProxyType({})

# Copying a weight of up to so many elements into a fused tensor takes less time than the dozen
# operators of an update of its own.
MAX_ELEMENTS_TO_FUSE = 2**17
# A fused tensor has at most so many elements: the operators of a larger one leave the cache.
MAX_FUSED_ELEMENTS = 2**19


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

    - `gradients`: weight -> its gradient, for all weights of the recipe.
    - `fused`: name of a fused tensor -> the weights in it. The first weight stands for all of
      them, as they share their settings.
    - `scaled`: the gradients are already multiplied by the learning rate.
    """
    inputs = {v.name: v for v in op.graph.inputs}
    learning_rate = learning_rate_input(op, recipe)
    if names.STEP in inputs:
        done = op.wrap(inputs[names.STEP])
    else:
        done = op.input(names.STEP, np.int64, ())
    weights = {name: op.wrap(inputs[name]) for name in recipe.weights}
    gradients = dict(gradients)
    targets = _fuse(op, weights, gradients, fused)
    slots = {
        weight: _slot_inputs(op, recipe.slots[weight], weight, target, weights[weight])
        for weight, target in targets.items()
    }
    with op.scope(scopes.OPTIMIZER):
        step = op.cast(done, np.float64) + 1
        clipped = clip_gradients(op, gradients, recipe.clip_norm, recipe.clip_value)
    next_weights, next_slots = apply_update(
        op, recipe.optimizer, weights, clipped, slots, learning_rate, step, scaled=scaled
    )
    for weight, target in targets.items():
        op.output(names.updated(target), next_weights[weight])
        for slot, value in next_slots[weight].items():
            op.output(names.updated(names.slot(target, slot)), value)


def _fuse(
    op: GraphBuilder,
    weights: dict[str, Value],
    gradients: dict[str, Value],
    fused: FusedWeights,
) -> dict[str, str]:
    """Replace fused weights and their gradients, in place, by one tensor under the first weight's
    name.

    Return weight -> the tensor that is updated for it: the weight itself, or the fused tensor.
    """
    targets = {name: name for name in weights}
    for fused_name, members in fused.items():
        with op.scope(scopes.OPTIMIZER):
            flat = op.Concat(*(_flat(op, gradients[name]) for name in members), axis=0)
        assert flat.shape is not None  # weights have known sizes
        for name in members:
            del weights[name], gradients[name], targets[name]
        first = members[0]
        targets[first] = fused_name
        gradients[first] = flat
        weights[first] = op.input(fused_name, flat.dtype, flat.shape)
    return targets


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


# ---------------------------------------------------------------------- clipping


def clip_gradients(
    op: GraphBuilder,
    gradients: Mapping[str, Value],
    clip_norm: float | None,
    clip_value: float | None,
) -> dict[str, Value]:
    """Clip every element to ±`clip_value`, then scale all gradients so that their common L2 norm
    is at most `clip_norm`.

    None leaves out either. NaN stays NaN, and with `clip_norm` spreads to all gradients.
    """
    clipped = dict(gradients)
    if clip_value is not None:
        clipped = {name: op.Clip(g, -clip_value, clip_value) for name, g in clipped.items()}
    if clip_norm is None or not clipped:
        return clipped
    # The squares of a float16 overflow beyond 256.
    wide = np.float64 if any(g.dtype == np.float64 for g in clipped.values()) else np.float32
    squares = [op.ReduceSumSquare(op.cast(g, wide), keepdims=0) for g in clipped.values()]
    factor = clip_norm / op.Max(op.Sqrt(op.Sum(*squares)), clip_norm)
    factors = {dtype: op.cast(factor, dtype) for dtype in {g.dtype: None for g in clipped.values()}}
    return {name: g * factors[g.dtype] for name, g in clipped.items()}


# ---------------------------------------------------------------------- weights and slots


def apply_update(
    op: GraphBuilder,
    optimizer: Optimizer,
    weights: Mapping[str, Value],
    gradients: Mapping[str, Value],
    slots: Mapping[str, Mapping[str, Value]],
    lr: Value,
    step: Value,
    *,
    scaled: bool = False,
) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """Return the next value of every weight and of every slot.

    - `slots`: weight -> slot -> value, in the order of `initial_slots(optimizer, name, w)`.
    - `lr`: a scalar, the learning rate before the optimizer's multipliers.
    - `step`: a float64 scalar, 1 for the first update.
    - `scaled`: the gradients are already multiplied by the learning rate; the optimizer is
      `is_plain_sgd`.

    Raise SettingError where the optimizer's `update` returns another number of values, or a value
    of another type or shape, than it was given.
    """
    # Weights of one element type, learning rate and weight decay share these scalars.
    shared: dict[Any, tuple[Value | None, tuple[Value, ...]]] = {}
    next_weights: dict[str, Value] = {}
    next_slots: dict[str, dict[str, Value]] = {}
    for name, w in weights.items():
        rule, factor = _optimizer_for(optimizer, name)
        group = (w.dtype, factor, rule.weight_decay)
        if group not in shared:
            shared[group] = _shared_scalars(op, rule, factor, lr, step, w)
        undecayed, coefficients = shared[group]
        own = dict(slots[name])
        average = own.pop(EMA_SLOT, None) if rule.ema_momentum is not None else None
        with op.scope(scopes.update_of(name)):
            decayed = w if undecayed is None else undecayed * w
            g = gradients[name]
            if scaled:
                result: Any = decayed - (g if factor == 1 else g * factor)
            else:
                result = rule.update(op, decayed, g, *coefficients, *own.values())
            new, *rest = result if isinstance(result, tuple) else (result,)
            _check_returned(rule, name, {name: w, **own}, [new, *rest])
            next_slots[name] = dict(zip(own, rest))
            if average is not None and rule.ema_momentum is not None:
                momentum = rule.ema_momentum
                next_slots[name][EMA_SLOT] = momentum * average + (1 - momentum) * new
        next_weights[name] = new
    return next_weights, next_slots


def _shared_scalars(
    op: GraphBuilder, rule: Optimizer, factor: float, lr: Value, step: Value, w: Value
) -> tuple[Value | None, tuple[Value, ...]]:
    """The factor that decays a weight, None without weight decay, and the rule's coefficients."""
    with op.scope(scopes.OPTIMIZER):
        rate = op.cast(lr if factor == 1 else lr * factor, w.dtype)
        undecayed = None
        if rule.weight_decay and not rule.applies_weight_decay:
            undecayed = 1 - rate * rule.weight_decay
        return undecayed, rule.coefficients(op, rate, step)


def _optimizer_for(optimizer: Optimizer, name: str) -> tuple[Optimizer, float]:
    """The optimizer with its settings for the weight `name`, and the multiplier of the weight's
    learning rate.
    """
    factor = 1.0
    for pattern, multiplier in optimizer.learning_rate_multipliers.items():
        if fnmatchcase(name, pattern):
            factor = float(multiplier)
            break
    excluded = any(fnmatchcase(name, pattern) for pattern in optimizer.exclude_from_weight_decay)
    if optimizer.weight_decay and excluded:
        optimizer = replace(optimizer, weight_decay=0.0)
    return optimizer, factor


def _check_returned(
    optimizer: Optimizer, name: str, before: Mapping[str, Value], after: Sequence[Value]
) -> None:
    method = f"{type(optimizer).__name__}.update for {name!r}"
    if len(after) != len(before):
        slots = ", ".join(list(before)[1:]) or "no slots"
        raise SettingError(
            f"{method} returned {len(after)} values, expected {len(before)}: the weight and"
            f" {slots}."
        )
    for key, old, new in zip(before, before.values(), after):
        other_shape = None not in (old.shape, new.shape) and old.shape != new.shape
        if old.dtype != new.dtype or other_shape:
            was, became = (f"{v.dtype}{list(v.shape or ())}" for v in (old, new))
            raise SettingError(
                f"{method} made {key!r} {became}; it was {was}. Keep shapes, and cast numbers made"
                " of `step` to w.dtype."
            )


# ---------------------------------------------------------------------- fused weights


def fused_weights(
    optimizer: Optimizer, weights: Mapping[str, Array], slots: Mapping[str, Mapping[str, Array]]
) -> list[list[str]]:
    """Group small weights whose update can run on one concatenated tensor, because the operators
    of an update cost more than their elements.

    Skip weights without slots; their update is only one or two operators.
    """
    alike: dict[Any, list[str]] = {}
    for name, w in weights.items():
        if _can_be_fused(optimizer, w, slots[name]):
            rule, factor = _optimizer_for(optimizer, name)
            alike.setdefault((w.dtype, factor, rule.weight_decay), []).append(name)
    groups = [group for members in alike.values() for group in _bounded_groups(members, weights)]
    return [group for group in groups if len(group) > 1]


def _can_be_fused(optimizer: Optimizer, w: Array, slots: Mapping[str, Array]) -> bool:
    small = 0 < w.size <= MAX_ELEMENTS_TO_FUSE and w.dtype in (np.float32, np.float64)
    return (
        optimizer.elementwise
        and small
        and bool(slots)
        and all(array.shape == w.shape for array in slots.values())
    )


def _bounded_groups(members: Sequence[str], weights: Mapping[str, Array]) -> list[list[str]]:
    """Cut a list of weights, in its order, into groups of at most MAX_FUSED_ELEMENTS elements."""
    groups: list[list[str]] = []
    room = 0
    for name in members:
        size = weights[name].size
        if size > room:
            groups.append([])
            room = MAX_FUSED_ELEMENTS
        groups[-1].append(name)
        room -= size
    return groups


# ---------------------------------------------------------------------- an update on its own


def update_function(
    optimizer: Optimizer, shape: Sequence[Dim], dtype: npt.DTypeLike, name: str
) -> onnx.ModelProto:
    """Build the update of one weight as a model; `Optimizer.build_onnx_function` describes it."""
    op = functions.new_function(optimizer)
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    w = op.input("weight", dtype, shape)
    g = op.input("gradient", dtype, shape)
    lr = op.input("learning_rate", wide, ())
    done = op.input("step", np.int64, ())
    slots = {
        spec.name: op.input(names.slot("weight", spec.name), spec.dtype, spec.shape or ())
        for spec in _slot_specs(optimizer, name, shape, w.dtype)
    }
    with op.scope(scopes.OPTIMIZER):
        step = op.cast(done, np.float64) + 1
    weights, next_slots = apply_update(op, optimizer, {name: w}, {name: g}, {name: slots}, lr, step)
    op.output(names.updated("weight"), weights[name])
    for slot, value in next_slots[name].items():
        op.output(names.updated(names.slot("weight", slot)), value)
    return functions.finished(op)


def _slot_specs(
    optimizer: Optimizer, name: str, shape: Sequence[Dim], dtype: np.dtype[Any]
) -> list[TensorSpec]:
    """The slots of a weight whose sizes may be names.

    A slot's size that changes with the weight's sizes is the size of the weight's axis.
    """
    small, large = (
        initial_slots(
            optimizer, name, np.zeros([d if isinstance(d, int) else size for d in shape], dtype)
        )
        for size in (2, 3)
    )
    specs = []
    for slot, array in small.items():
        sizes: list[Dim] = []
        for axis, (size, other) in enumerate(zip(array.shape, large[slot].shape)):
            if size == other:
                sizes.append(size)
            else:
                sizes.append(shape[axis] if array.ndim == len(shape) else None)
        specs.append(TensorSpec(slot, array.dtype, tuple(sizes)))
    return specs
