"""Convolutions: one sum over three tensors, so that each gradient is that sum for another tensor.

A window of weights `w` slides over the `large` tensor; at every position it yields one element of
the `small` tensor. The sum over image n, filter m, channel c, position o and tap k of

    large[n, c, stride o + dilation k - pad]  w[m, c, k]  small[n, m, o]

is linear in each of the three. Its derivative by `small` is Conv, by `large` ConvTranspose. With
both, the gradients are (Dumoulin and Visin 2016, "A guide to convolution arithmetic for deep
learning", chapter 4)

    Conv:           dx = ConvTranspose(dy, w)    dw = weight_gradient(x, dy)    db = sum of dy
    ConvTranspose:  dx = Conv(dy, w)             dw = weight_gradient(dy, x)    db = sum of dy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from onnxfit.gradients.building import MICROSOFT, Ints, spatial_shape
from onnxfit.gradients.rules.convolution.spec import (
    ConvSpec,
    apply_conv,
    crop,
    crop_like,
    padding,
    with_rank,
)
from onnxfit.gradients.rules.convolution.transposed import transposed_conv
from onnxfit.gradients.rules.convolution.weights import weight_gradient
from onnxfit.gradients.table import Gradients, NoGradientError, decompose, rule
from onnxfit.graph.inference import like
from onnxfit.graph.values import GraphBuilder, Value

__all__ = ["ConvSpec", "conv", "crop", "padding", "transposed_conv"]


@rule("Conv")
def conv(
    op: GraphBuilder, x: Value, w: Value, b: Value | None, y: Value, dy: Value, *,
    auto_pad: str, dilations: Ints | None, group: int, pads: Ints | None, strides: Ints | None,
) -> Gradients:  # fmt: skip
    spec = ConvSpec.of(w.rank - 2, strides, dilations, group)
    kernel = spatial_shape(w) or op.shape(w, 2)

    def first_element(numbers: Value, axis: int) -> Value:
        one = op.constant(np.ones(1, np.float32))
        others = op.Slice(op.shape(w, 2), [axis], [axis + 1]) - 1
        first_tap = op.Reshape(op.Pad(one, op.Concat([0], others, axis=0)), [1, 1, -1])
        read = op.Conv(numbers, first_tap, auto_pad=auto_pad, strides=[spec.strides[axis]])
        return op.Slice(read, [0], [1], [2])

    part = crop(op, spec, auto_pad, x, y, kernel, first_element)
    if part is not None:
        of_x, *others = _conv_gradients(op, part.part(), w, y, dy, spec, auto_pad, pads, kernel)
        return (lambda: part.gradient(of_x()), *others)
    return _conv_gradients(op, x, w, y, dy, spec, auto_pad, pads, kernel)


def _conv_gradients(
    op: GraphBuilder, x: Value, w: Value, y: Value, dy: Value, spec: ConvSpec, auto_pad: str,
    pads: Ints | None, kernel: Ints | Value,
) -> tuple[Callable[[], Value], ...]:  # fmt: skip
    all_pads = padding(op, spec, auto_pad, pads, x, y, kernel)
    if isinstance(all_pads, Value):
        computed = all_pads
        return (
            lambda: transposed_conv(op, dy, w, spec, x, op.Slice(computed, [0], [len(spec.axes)])),
            lambda: weight_gradient(op, op.Pad(x, computed, None, spec.axes), dy, spec, w),
            lambda: _bias_gradient(op, dy, spec),
        )
    padded = replace(spec, pads=all_pads)
    return (
        lambda: transposed_conv(op, dy, w, padded, x),
        lambda: weight_gradient(op, x, dy, padded, w),
        lambda: _bias_gradient(op, dy, padded),
    )


@rule("ConvTranspose")
def conv_transpose(
    op: GraphBuilder, x: Value, w: Value, b: Value | None, y: Value, dy: Value, *,
    auto_pad: str, dilations: Ints | None, group: int, output_padding: Ints | None,
    output_shape: Ints | None, pads: Ints | None, strides: Ints | None,
) -> Gradients:  # fmt: skip
    spec = ConvSpec.of(w.rank - 2, strides, dilations, group)
    if output_shape and auto_pad != "SAME_UPPER":
        # `output_shape` overrides the pads: the sizes decide the total, and onnxruntime removes
        # the larger half before.
        auto_pad = "SAME_LOWER"
    kernel = spatial_shape(w) or op.shape(w, 2)
    all_pads = padding(op, spec, auto_pad, pads, y, x, kernel, output_padding)
    if isinstance(all_pads, Value):
        dy = op.Pad(dy, all_pads, None, spec.axes)
    else:
        spec = replace(spec, pads=all_pads)
    # An `output_padding` of a stride or more, or an `output_shape`, may add windows.
    padding_sizes = zip(output_padding or (), spec.strides)
    may_have_more = bool(output_shape) or any(size >= stride for size, stride in padding_sizes)

    def dx() -> Value:
        positions = apply_conv(op.Conv, dy, w, spec)
        return crop_like(op, positions, x, spec) if may_have_more else positions

    return (
        dx,
        lambda: weight_gradient(op, dy, x, spec, w),
        lambda: _bias_gradient(op, dy, spec),
    )


def _bias_gradient(op: GraphBuilder, dy: Value, spec: ConvSpec) -> Value:
    return op.ReduceSum(dy, [0, *spec.axes], keepdims=0)


@decompose("FusedConv", MICROSOFT, infer=like("Conv"))
def fused_conv(
    op: GraphBuilder, x: Value, w: Value, b: Value | None, z: Value | None, *,
    activation: str | None, activation_params: Sequence[float] | None, auto_pad: str | None,
    dilations: Ints | None, group: int | None, kernel_shape: Ints | None, pads: Ints | None,
    strides: Ints | None,
) -> Value:  # fmt: skip
    """activation(Conv(x, w, b) + z)"""
    y = op.Conv(
        x,
        w,
        b,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    y = with_rank(y, w.rank)
    if z is not None:
        y = y + z
    return _activated(op, y, activation, list(activation_params or ()))


def _activated(
    op: GraphBuilder, y: Value, activation: str | None, parameters: list[float]
) -> Value:
    """Apply an activation of onnxruntime's fused operators."""
    if not activation:
        return y
    if activation == "Relu":
        return op.Relu(y)
    if activation == "Tanh":
        return op.Tanh(y)
    if activation == "Sigmoid":
        return op.Sigmoid(y)
    if activation == "LeakyRelu":
        return op.LeakyRelu(y, alpha=parameters[0] if parameters else None)
    if activation == "HardSigmoid":
        alpha, beta = (*parameters, None, None)[:2]
        return op.HardSigmoid(y, alpha=alpha, beta=beta)
    if activation == "Clip":
        return op.Clip(y, *parameters)
    raise NoGradientError(
        f"its activation is {activation!r}",
        "use Relu, Tanh, Sigmoid, LeakyRelu, Clip or HardSigmoid",
    )
