"""Depthwise convolutions and their gradients as one operator each.

onnxruntime's own operators for them are slow, or read another layout of the images
(`kernels/blocked_convolutions.py`). The kernels read the images as they are, which is faster if
reordering the images costs much, or if that layout cannot be used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx

from onnxfit.kernels.blocked_convolutions import channel_block
from onnxfit.kernels.convolutions import (
    AnyConvolution,
    Convolution,
    ImageGradient,
    WeightGradient,
)
from onnxfit.kernels.search import make_node

MAX_TAPS = 49
# A Conv or the gradient of weights takes 0.75 to 0.95 of the time of its form in blocks of channels
# for images of so many pixels, and 1.2 to 3.4 of it for smaller ones.
MIN_PIXELS = 32 * 32


def kernel_for(convolution: AnyConvolution) -> onnx.NodeProto | None:
    """Return a kernel for a depthwise convolution; None if there is none, or it is slower."""
    if isinstance(convolution, ImageGradient) or not convolution.is_depthwise:
        return None
    if len(convolution.kernel) != 2:
        return None
    return _depthwise_kernel(convolution) if _beats_onnxruntime(convolution) else None


def _beats_onnxruntime(convolution: Convolution | WeightGradient) -> bool:
    """Return whether the kernel is faster than what would compute the convolution otherwise."""
    block = channel_block()
    if not block or convolution.channels % block:
        return True  # than the operators of ONNX
    if isinstance(convolution, WeightGradient):
        return math.prod(convolution.pixels[2:]) >= MIN_PIXELS
    if convolution.node.op_type == "ConvTranspose":
        return True  # 0.5 to 0.85 of the time: its form in blocks has a convolution for each phase
    return math.prod(convolution.x[2:]) >= MIN_PIXELS


def _depthwise_kernel(convolution: Convolution | WeightGradient) -> onnx.NodeProto | None:
    """Return the node of a kernel, None if there is no kernel for the attributes."""
    if math.prod(convolution.kernel) > MAX_TAPS:
        return None
    if isinstance(convolution, WeightGradient):
        return _depthwise_node(
            "DepthwiseConvWeights",
            convolution.node,
            [convolution.large, convolution.small],
            kernel_shape=convolution.kernel,
            strides=convolution.strides,
            dilations=convolution.dilations,
            pads=convolution.pads_before,
            sizes=convolution.kernel,
        )
    attributes = convolution.attributes
    if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return None
    if attributes.get("output_shape"):  # which changes the pads
        return None
    return _depthwise_node(
        "DepthwiseConv" if convolution.node.op_type == "Conv" else "DepthwiseConvTranspose",
        convolution.node,
        convolution.inputs,
        kernel_shape=convolution.kernel,
        strides=convolution.strides,
        dilations=convolution.dilations,
        pads=convolution.pads_before,
        sizes=convolution.y[2:],
    )


def _depthwise_node(
    op_type: str, replaced: onnx.NodeProto, inputs: Sequence[str], **attributes: Any
) -> onnx.NodeProto:
    return make_node(op_type, inputs, replaced.output[:1], replaced.name, **attributes)
