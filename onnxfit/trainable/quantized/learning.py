r"""Learn scales and zero points: LSQ (Esser et al. 2020, arXiv:1902.08153) and LSQ+ (Bhalgat et al.
2020, arXiv:2004.09576).

Their gradients, which the rules of QuantizeLinear and DequantizeLinear sum over all elements, are
multiplied by $g = 1 / \sqrt{N Q}$: relative to its size, a scale then moves as fast as its weights.
With an optimizer such as Adam, which divides by the size of the gradient, g has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxfit.graph import protos
from onnxfit.graph.replacement import replace_nodes
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.trainable.quantized.parameters import Array
from onnxfit.trainable.quantized.quantizers import Quantizer, quantize_nodes, rounded_values

MAX_FACTOR = 128  # the largest ratio between a learned scale and the file's scale
# Every number between these two, multiplied by 2**83, is a float32 of at least 2**23, and so a
# whole number.
MIN_SCALE, MAX_SCALE = 2.0**-60, 2.0**40
# element type -> the power of 2 by which every scale is multiplied to become a whole number
WHOLE = {np.dtype(np.float32): 2.0**83, np.dtype(np.float64): 2.0**112}


def learned_names(quantizers: Sequence[Quantizer]) -> list[str]:
    """Return the scales and zero points that are learned."""
    scales = dict.fromkeys(quantizer.scale for quantizer in quantizers)
    zero_points = dict.fromkeys(
        quantizer.zero_point for quantizer in quantizers if quantizer.learns_zero_point
    )
    return [*scales, *zero_points]


def learned_bounds(quantizers: Sequence[Quantizer]) -> dict[str, tuple[Array, Array]]:
    """Return a mapping from scale or zero point to the bounds that an update keeps it in.

    torch.ao's learnable quantizer also clamps its scale at a small number, and its zero point to
    the integers. Here the bounds of a scale are relative to the file's scale: with a scale near 0,
    a bias would overflow 32 bits.
    """
    bounds = {}
    for quantizer in quantizers:
        size = np.abs(quantizer.scales)
        minimum = np.maximum(size / MAX_FACTOR, MIN_SCALE)
        maximum = np.minimum(size * MAX_FACTOR, MAX_SCALE)
        positive = quantizer.scales > 0  # a scale of a block may be negative
        low, high = np.where(positive, minimum, -maximum), np.where(positive, maximum, -minimum)
        bounds[quantizer.scale] = low, high
        if quantizer.learns_zero_point:
            shape = quantizer.zeros.shape
            bounds[quantizer.zero_point] = (
                np.full(shape, quantizer.lowest),
                np.full(shape, quantizer.highest),
            )
    return bounds


def with_float_zero_points(model: onnx.ModelProto, zero_points: Mapping[str, Quantizer]) -> None:
    """Replace the zero points of a training model by floats, in place.

    A QuantizeLinear with scale 1 rounds them to integers.

    - `zero_points`: a mapping from initializer to its quantizer.
    """
    graph = model.graph
    used = protos.used_names(model)
    domains = {node.input[2]: node.domain for node in quantize_nodes(graph) if len(node.input) > 2}
    integers = {name: protos.unique_name(f"{name}/integers", used) for name in zero_points}
    protos.rename_inputs(graph, integers)
    nodes = []
    for name, quantizer in zero_points.items():
        floats = quantizer.zeros.astype(quantizer.scales.dtype)
        one, zero = (protos.unique_name(f"{name}/{end}", used) for end in ("one", "zero"))
        tensor = next(t for t in graph.initializer if t.name == name)
        graph.initializer.append(helper.make_tensor(zero, tensor.data_type, [], [0]))
        graph.initializer.append(numpy_helper.from_array(np.ones((), floats.dtype), one))
        tensor.CopyFrom(numpy_helper.from_array(floats, name))
        for info in (*graph.input, *graph.value_info):
            if info.name == name:
                info.type.tensor_type.elem_type = tensor.data_type
        inputs, output = [name, one, zero], integers[name]
        nodes.append(
            helper.make_node("QuantizeLinear", inputs, [output], name=output, domain=domains[name])
        )
    replace_nodes(graph, [*nodes, *graph.node])


def note_as_weights(model: onnx.ModelProto, chosen: Collection[str]) -> None:
    """Mark initializers as parameters, as torch's exporter does, in place.

    Unmarked scales count as settings of their operators.
    """
    for name in chosen:
        protos.note_kind(model, name, parameter=True)


def scale_gradients(op: GraphBuilder, quantizers: Sequence[Quantizer]) -> None:
    """Multiply the gradients of scales and zero points by g, in the training graph of `op`.

    A scale or zero point of several quantizers uses the factor of the first one.
    """
    inputs = {v.name or "": v for v in op.graph.inputs}
    first: dict[str, Quantizer] = {}
    for quantizer in quantizers:
        for name in learned_names([quantizer]):
            if name in inputs:  # the others are frozen
                first.setdefault(name, quantizer)
    factors = {name: _factor(op, quantizer) for name, quantizer in first.items()}
    for name, factor in factors.items():
        uses = list(inputs[name].uses())
        with op.scope(name):
            scaled = _with_gradient(op, op.wrap(inputs[name]), factor)
        for node, index in uses:
            node.replace_input_with(index, scaled.ir)
    op.graph.sort()


def _factor(op: GraphBuilder, quantizer: Quantizer) -> Value:
    """Return 1 / sqrt(N Q), in float64.

    N is the number of elements of a weight, or of a row of an activation; Q is the greatest
    integer.
    """
    x = op.wrap(rounded_values(op.graph, quantizer.scale)[0])
    start = 0 if quantizer.weight else 1
    sizes = None if x.shape is None else x.shape[start:]
    if sizes is not None and all(isinstance(size, int) for size in sizes):
        count = math.prod(size for size in sizes if isinstance(size, int))
        return op.constant(1 / math.sqrt(max(count, 1) * quantizer.highest), np.float64)
    product = op.ReduceProd(op.shape(x, start), keepdims=0)
    return 1 / op.Sqrt(op.cast(product, np.float64) * quantizer.highest)


def _with_gradient(op: GraphBuilder, value: Value, factor: Value) -> Value:
    """Return the same number with its gradient multiplied by a factor: c + factor (value - c)."""
    dtype = value.dtype if value.dtype in WHOLE else np.dtype(np.float32)
    wide = op.cast(value, dtype)
    constant = constant_copy(op, wide)
    return op.cast(constant + op.cast(factor, dtype) * (wide - constant), value.dtype)


def constant_copy(op: GraphBuilder, value: Value) -> Value:
    """Return the same numbers without a gradient.

    Round has no gradient, and keeps whole numbers. Multiplied by a large power of 2, which is
    exact, every number from MIN_SCALE to MAX_SCALE becomes a whole number, and so does every zero
    point. A smaller number than MIN_SCALE may become 0.
    """
    whole = WHOLE[value.dtype]
    return op.Round(value * whole) * (1 / whole)
