r"""Let the ranges of activations follow the batches, as running statistics do.

The integers of a quantizer represent the range from $s\,(q_{\min} - z)$ to
$s\,(q_{\max} - z)$. Scale and zero point are therefore the only state of a range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxfit.errors import ModelError, SettingError
from onnxfit.graph import scopes
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.trainable.quantized.quantizers import Quantizer, rounded_values, shared_zero_points

# the share of a batch in the next range, as in torch.ao's MovingAverageMinMaxObserver
AVERAGING_CONSTANT = 0.01


def observed_quantizers(quantizers: Sequence[Quantizer]) -> list[Quantizer]:
    """Return the quantizers of the activations, whose ranges can follow the batches.

    SettingError: the file has no integer activations. ModelError: an activation has several scales,
    two ranges have one zero point, or two zero points have one scale.
    """
    activations = [quantizer for quantizer in quantizers if not quantizer.weight]
    if not activations:
        raise SettingError(
            "observe= needs a file with integer activations, but this one has only integer"
            " weights. Remove observe=, or quantize the activations as well."
        )
    for quantizer in activations:
        shapes = {quantizer.scales.shape}
        if quantizer.zero_point:
            shapes.add(quantizer.zeros.shape)
        if shapes not in ({()}, {(1,)}):
            raise ModelError(
                f"The activations of scale {quantizer.scale!r} have scales or zero points of shape"
                f" {max(shapes)}, but observe= supports one scale and one zero point per"
                " activation. Remove observe=."
            )
    for zero_point, scales in shared_zero_points(activations).items():
        raise ModelError(
            f"The zero point {zero_point!r} belongs to the scales {scales[0]!r} and {scales[1]!r},"
            " but observe= would change their ranges separately. Give each scale its own zero"
            " point, or remove observe=."
        )
    scales = [quantizer.scale for quantizer in activations]
    weights = {quantizer.scale for quantizer in quantizers if quantizer.weight}
    for name in scales:
        if scales.count(name) > 1 or name in weights:
            raise ModelError(
                f"The scale {name!r} belongs to several zero points, or to a weight and an"
                " activation, but observe= would change them separately. Give each its own scale,"
                " or remove observe=."
            )
    return activations


def observed_names(quantizers: Sequence[Quantizer]) -> list[str]:
    """Return the scales and zero points that follow the batches."""
    zero_points = [
        quantizer.zero_point for quantizer in quantizers if quantizer.observes_zero_point
    ]
    return [*(quantizer.scale for quantizer in quantizers), *zero_points]


def next_ranges(
    op: GraphBuilder, quantizers: Sequence[Quantizer], step: Value, batches: int
) -> dict[str, Value]:
    """Return a mapping from scale or zero point to its next value, in the training graph of `op`.

    - `quantizers`: the quantizers whose ranges follow the batches.
    - `step`: the number of batches so far.
    - `batches`: the number of batches that they follow.
    """
    inputs = {v.name or "": op.wrap(v) for v in op.graph.inputs}
    observing = step < batches
    updated: dict[str, Value] = {}
    for quantizer in quantizers:
        with op.scope(scopes.range_of(quantizer.scale)):
            scale = inputs[quantizer.scale]
            values = [op.wrap(v) for v in rounded_values(op.graph, quantizer.scale)]
            minimum = op.Min(0.0, *[op.ReduceMin(value, keepdims=0) for value in values])
            maximum = op.Max(0.0, *[op.ReduceMax(value, keepdims=0) for value in values])
            shape = op.constant(quantizer.scales.shape, np.int64)
            bottom, top = (op.Reshape(op.cast(v, scale.dtype), shape) for v in (minimum, maximum))
            new = _averaged(op, quantizer, scale, inputs.get(quantizer.zero_point), bottom, top)
        for name, value in new.items():
            updated[name] = op.Where(observing, value, inputs[name])
    return updated


def _averaged(
    op: GraphBuilder,
    quantizer: Quantizer,
    scale: Value,
    zero_point: Value | None,
    bottom: Value,
    top: Value,
) -> dict[str, Value]:
    """Return the next scale and zero point, from the range of a batch, which includes 0."""
    least_scale = float(np.finfo(scale.dtype).tiny)
    if not quantizer.observes_zero_point:
        if quantizer.is_symmetric:  # signed integers go down to the negative of the greatest one
            lowest = -quantizer.highest if quantizer.middle == 0 else quantizer.lowest
            wanted = op.Max(-bottom, top) * (2 / (quantizer.highest - lowest))
        else:  # a QuantizeLinear without zero point, of numbers from 0 on
            wanted = top / quantizer.highest
        new = scale + AVERAGING_CONSTANT * (wanted - scale)
        return {quantizer.scale: op.Max(new, least_scale)}
    assert zero_point is not None
    low, high = scale * (quantizer.lowest - zero_point), scale * (quantizer.highest - zero_point)
    low = low + AVERAGING_CONSTANT * (bottom - low)
    high = high + AVERAGING_CONSTANT * (top - high)
    new = op.Max((high - low) / (quantizer.highest - quantizer.lowest), least_scale)
    return {quantizer.scale: new, quantizer.zero_point: quantizer.lowest - low / new}
