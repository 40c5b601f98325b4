r"""Let the ranges of activations follow the batches, as running statistics do.

The integers of a grid represent the range from $s\,(q_{\min} - z)$ to $s\,(q_{\max} - z)$. Scale
and zero point are therefore the only state of a range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxfit.errors import ModelError, SettingError
from onnxfit.graph import scopes
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.trainable.quantized.grids import Grid, rounded_values, shared_zero_points

# the share of a batch in the next range, as in torch.ao's MovingAverageMinMaxObserver
AVERAGING_CONSTANT = 0.01


def observed_grids(found: Sequence[Grid]) -> list[Grid]:
    """Return the grids of the activations, whose ranges can follow the batches.

    SettingError: the file has no integer activations. ModelError: an activation has several scales,
    two ranges have one zero point, or two zero points have one scale.
    """
    activations = [grid for grid in found if not grid.weight]
    if not activations:
        raise SettingError(
            "observe= needs a file with integer activations, but this one has only integer"
            " weights. Remove observe=, or quantize the activations as well."
        )
    for grid in activations:
        shapes = {grid.scales.shape}
        if grid.zero_point:
            shapes.add(grid.zeros.shape)
        if shapes not in ({()}, {(1,)}):
            raise ModelError(
                f"The activations of scale {grid.scale!r} have scales or zero points of shape"
                f" {max(shapes)}, but observe= supports one scale and one zero point per"
                " activation. Remove observe=."
            )
    for zero_point, scales in shared_zero_points(activations).items():
        raise ModelError(
            f"The zero point {zero_point!r} belongs to the scales {scales[0]!r} and {scales[1]!r},"
            " but observe= would change their ranges separately. Give each scale its own zero"
            " point, or remove observe=."
        )
    scales = [grid.scale for grid in activations]
    weights = {grid.scale for grid in found if grid.weight}
    for name in scales:
        if scales.count(name) > 1 or name in weights:
            raise ModelError(
                f"The scale {name!r} belongs to several zero points, or to a weight and an"
                " activation, but observe= would change them separately. Give each its own scale,"
                " or remove observe=."
            )
    return activations


def observed_names(found: Sequence[Grid]) -> list[str]:
    """Return the scales and zero points that follow the batches."""
    zero_points = [grid.zero_point for grid in found if grid.moves_zero_point]
    return [*(grid.scale for grid in found), *zero_points]


def next_ranges(
    op: GraphBuilder, found: Sequence[Grid], step: Value, batches: int
) -> dict[str, Value]:
    """Return a mapping from scale or zero point to its next value, in the training graph of `op`.

    - `found`: the grids whose ranges follow the batches.
    - `step`: the number of batches so far.
    - `batches`: the number of batches that they follow.
    """
    inputs = {v.name or "": op.wrap(v) for v in op.graph.inputs}
    observing = step < batches
    updated: dict[str, Value] = {}
    for grid in found:
        with op.scope(scopes.range_of(grid.scale)):
            scale = inputs[grid.scale]
            values = [op.wrap(v) for v in rounded_values(op.graph, grid.scale)]
            least = op.Min(0.0, *[op.ReduceMin(value, keepdims=0) for value in values])
            greatest = op.Max(0.0, *[op.ReduceMax(value, keepdims=0) for value in values])
            shape = op.constant(grid.scales.shape, np.int64)
            bottom, top = (op.Reshape(op.cast(v, scale.dtype), shape) for v in (least, greatest))
            new = _averaged(op, grid, scale, inputs.get(grid.zero_point), bottom, top)
        for name, value in new.items():
            updated[name] = op.Where(observing, value, inputs[name])
    return updated


def _averaged(
    op: GraphBuilder,
    grid: Grid,
    scale: Value,
    zero_point: Value | None,
    bottom: Value,
    top: Value,
) -> dict[str, Value]:
    """Return the next scale and zero point, from the range of a batch, which includes 0."""
    least_scale = float(np.finfo(scale.dtype).tiny)
    if not grid.moves_zero_point:
        if grid.is_symmetric:  # signed integers go down to the negative of the greatest one
            lowest = -grid.highest if grid.middle == 0 else grid.lowest
            wanted = op.Max(-bottom, top) * (2 / (grid.highest - lowest))
        else:  # a QuantizeLinear without zero point, of numbers from 0 on
            wanted = top / grid.highest
        new = scale + AVERAGING_CONSTANT * (wanted - scale)
        return {grid.scale: op.Max(new, least_scale)}
    assert zero_point is not None
    low, high = scale * (grid.lowest - zero_point), scale * (grid.highest - zero_point)
    low = low + AVERAGING_CONSTANT * (bottom - low)
    high = high + AVERAGING_CONSTANT * (top - high)
    new = op.Max((high - low) / (grid.highest - grid.lowest), least_scale)
    return {grid.scale: new, grid.zero_point: grid.lowest - low / new}
