"""Dense convolutions and their gradients as one operator each: every filter reads all channels.

onnxruntime computes a convolution as a product of matrices, for which it copies each pixel once for
every tap that reads it, and so do the gradients in operators of ONNX. The kernels copy each pixel
once for a task, to put zeros around the images.

The constants below exclude sizes for which a kernel is slower.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import onnx

from onnxfit.kernels import depthwise
from onnxfit.kernels.convolutions import (
    AnyConvolution,
    Convolution,
    ImageGradient,
    Shape,
    Sizes,
    WeightGradient,
    convolutions,
)
from onnxfit.kernels.rounding import PRECISIONS, is_of_model, rounds_convolutions
from onnxfit.kernels.search import make_node

MAX_AXES = 2
MAX_NUMBER = 2**15 - 1  # of kernels, strides, dilations and pads
# The smallest number of products whose sum is an element of the result.
MIN_PRODUCTS = 40
# The same for the gradient of images with strides: each remainder of a pixel's position, divided by
# the stride, has its own taps. The first number is for results with at least
# MIN_IMAGES_WITH_STRIDES images and MIN_CHANNELS_WITH_STRIDES channels: onnxruntime computes one
# image after the other, and starts its threads for each. Measured from this size on, the kernel
# takes 0.38 to 1.0 of the time on two threads, 0.35 on cores without a common cache, and 0.27 to
# 1.14 on one thread.
MIN_PRODUCTS_WITH_STRIDES = 64, 256
MIN_IMAGES_WITH_STRIDES = 4
MIN_CHANNELS_WITH_STRIDES = 16
MIN_CHANNELS = 8  # of the result; with fewer, most lanes of a vector are not used
MIN_ELEMENTS = 192  # of a channel of the result in all images; they share the packed weights

# Winograd's algorithm computes tiles of two elements along each axis by fewer products, of sums: 16
# instead of 36 for 3x3 taps, 4 instead of 6 for 3, 6 instead of 10 for 5. Measured on the same
# sizes, it takes 0.5 to 1.3 of the time of all products. The rounding errors are about as large,
# except for the gradient of 5 taps, where they exceed 1e-6 of the largest number.
WINOGRAD_KERNELS = {(3, 3), (3,), (5,), (1, 3), (1, 5)}
WINOGRAD_KERNELS_OF_WEIGHTS = WINOGRAD_KERNELS - {(5,), (1, 5)}
MIN_WINOGRAD_TILES = 32  # in all images
MAX_WINOGRAD_ROW = 2**17  # tiles of a row, times channels: a task transforms whole rows
MIN_WINOGRAD_CHANNELS = 20, 48  # along two axes, and along one
MIN_WINOGRAD_CHANNELS_OF_WEIGHTS = 8, 16
MIN_WINOGRAD_PIXELS = 7  # along each axis; in smaller images tiles at the border are half empty
MIN_WINOGRAD_CHANNELS_OF_SMALL_IMAGES = 64

# In bfloat16, products take about half as long, but factors are rounded first. Where each number of
# the source is a factor of fewer products, float32 is as fast.
MIN_PRODUCTS_OF_ROUNDED = 128
MIN_CHANNELS_OF_ROUNDED_POINTWISE = 128  # with one tap, onnxruntime's product is fast
# The sums of Winograd's algorithm take as long as in float32. So it is used from larger filters on:
# channels of the source times channels of the result, along two axes, and along one. With 5 taps,
# its errors are twice those of all products in bfloat16; with 3x3, 1.7 times.
WINOGRAD_KERNELS_OF_ROUNDED = {(3, 3), (3,), (1, 3)}
MIN_WINOGRAD_FILTERS_OF_ROUNDED = 2**11, 2**14
MIN_WINOGRAD_FILTERS_OF_ROUNDED_WEIGHTS = 2**12, math.inf


def replace_convolutions(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], *, with_dense: bool
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with a kernel in the place of each convolution that has one.

    The nodes that are not needed any more are still there. The nodes are returned themselves if
    there is no kernel to use. `with_dense`: whether the kernels for dense convolutions can be used.
    """
    kernels = {}
    rounds = with_dense and rounds_convolutions(graph)
    for output, convolution in convolutions(graph).items():
        kernel = depthwise.kernel_for(convolution)
        if kernel is None and with_dense:
            kernel = kernel_for(convolution, rounds and is_of_model(convolution.node))
        if kernel is not None and _has_numbers_in_range(kernel):
            kernels[output] = kernel
    return [kernels.get(node.output[0], node) for node in nodes] if kernels else nodes


def _has_numbers_in_range(kernel: onnx.NodeProto) -> bool:
    """Return whether the operator takes its attributes: negative pads, for example, it refuses."""
    return all(
        (0 if attribute.name == "pads" else 1) <= number <= MAX_NUMBER
        for attribute in kernel.attribute
        for number in attribute.ints
        if attribute.name != "sizes"
    )


def kernel_for(convolution: AnyConvolution, may_round: bool = False) -> onnx.NodeProto | None:
    """Return a kernel for a dense convolution; None if there is none, or it is slower.

    - `may_round`: whether factors may be rounded to bfloat16. They are where that is faster.
    """
    rounds = may_round and _is_faster_in_bfloat16(convolution)
    return _dense_kernel(convolution, rounds) if rounds or _is_faster(convolution) else None


class _Images(NamedTuple):
    """The images that a convolution reads, and those that it computes."""

    source: Shape
    result: Shape
    strides: Sizes
    is_transposed: bool

    @classmethod
    def of(cls, convolution: Convolution | ImageGradient) -> _Images:
        if isinstance(convolution, ImageGradient):
            return cls(convolution.positions, convolution.pixels, convolution.strides, True)
        is_transposed = convolution.node.op_type == "ConvTranspose"
        return cls(convolution.x, convolution.y, convolution.strides, is_transposed)


def _is_faster(convolution: AnyConvolution) -> bool:
    """Return whether the kernel is faster than what would compute the convolution otherwise."""
    if isinstance(convolution, WeightGradient):
        return True
    source, result, strides, is_transposed = _Images.of(convolution)
    remainders = math.prod(strides) if is_transposed else 1
    taps = math.prod(convolution.kernel)
    # With one tap for each element, it is a product of matrices already.
    has_taps = any(map(operator.gt, convolution.kernel, strides)) if is_transposed else taps > 1
    minimum = MIN_PRODUCTS
    if remainders > 1:
        has_several = (
            result[0] >= MIN_IMAGES_WITH_STRIDES and result[1] >= MIN_CHANNELS_WITH_STRIDES
        )
        minimum = MIN_PRODUCTS_WITH_STRIDES[0 if has_several else 1]
    return (
        has_taps
        and source[1] * taps >= minimum * remainders
        and result[1] >= MIN_CHANNELS
        and result[0] * math.prod(result[2:]) >= MIN_ELEMENTS
    )


def _is_faster_in_bfloat16(convolution: AnyConvolution) -> bool:
    """Return whether the kernel is faster if it rounds its factors."""
    taps = math.prod(convolution.kernel)
    if isinstance(convolution, WeightGradient):
        return convolution.channels * taps >= MIN_PRODUCTS
    source, result, strides, is_transposed = _Images.of(convolution)
    steps = math.prod(strides)
    if taps == 1:
        return (
            steps == 1
            and not is_transposed
            and source[1] >= MIN_CHANNELS_OF_ROUNDED_POINTWISE
            and result[1] >= MIN_CHANNELS
            and result[0] * math.prod(result[2:]) >= MIN_ELEMENTS
        )
    return _is_faster(convolution) and result[1] * taps >= MIN_PRODUCTS_OF_ROUNDED * steps


def _is_faster_by_winograd(convolution: AnyConvolution, rounds: bool) -> bool:
    """Return whether fewer products, of sums, are faster than all products."""
    kernel = convolution.kernel
    is_of_weights = isinstance(convolution, WeightGradient)
    if isinstance(convolution, WeightGradient):
        source, images = convolution.pixels, convolution.positions
    else:
        source, images, _, _ = _Images.of(convolution)
    tiles = [-(-size // min(taps, 2)) for size, taps in zip(images[2:], kernel)]
    sizes = [size for size, taps in zip(images[2:], kernel) if taps > 1]
    minima = (
        MIN_WINOGRAD_FILTERS_OF_ROUNDED_WEIGHTS
        if is_of_weights
        else MIN_WINOGRAD_FILTERS_OF_ROUNDED
    )
    if rounds and source[1] * images[1] < minima[len(sizes) == 1]:
        return False
    # The sums cost as much for a channel of the source as for one of the result.
    return (
        min(source[1], images[1]) >= _min_winograd_channels(sizes, is_of_weights)
        and images[0] * math.prod(tiles) >= MIN_WINOGRAD_TILES
        and tiles[-1] * max(source[1], images[1]) <= MAX_WINOGRAD_ROW
    )


def _min_winograd_channels(sizes: Sequence[int], is_of_weights: bool) -> int:
    """Return the least number of channels; `sizes`: of the result, along axes with several taps."""
    has_one_axis = len(sizes) == 1
    if is_of_weights:
        return MIN_WINOGRAD_CHANNELS_OF_WEIGHTS[has_one_axis]
    if min(sizes) < MIN_WINOGRAD_PIXELS:
        return MIN_WINOGRAD_CHANNELS_OF_SMALL_IMAGES
    return MIN_WINOGRAD_CHANNELS[has_one_axis]


def _dense_kernel(convolution: AnyConvolution, rounds: bool) -> onnx.NodeProto | None:
    """Return the node of a kernel, None if there is no kernel for the attributes."""
    if len(convolution.kernel) > MAX_AXES:
        return None
    if isinstance(convolution, Convolution):
        return _kernel_of_operator(convolution, rounds)
    if isinstance(convolution, WeightGradient):
        if convolution.group > 1:
            return None
        op_type, sizes = "ConvWeights", convolution.kernel
        inputs = [convolution.large, convolution.small]
    else:
        op_type, sizes = "ConvTranspose", convolution.pixels[2:]
        inputs = [convolution.dy, convolution.filters]
    return _dense_node(
        op_type,
        convolution,
        rounds,
        inputs,
        strides=convolution.strides,
        dilations=convolution.dilations,
        pads=convolution.pads_before,
        sizes=sizes,
    )


def _kernel_of_operator(convolution: Convolution, rounds: bool) -> onnx.NodeProto | None:
    attributes = convolution.attributes
    if attributes.get("group", 1) > 1:
        return None
    if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return None
    if attributes.get("output_shape"):  # which changes the pads
        return None
    if min(attributes.get("pads", (0,))) < 0:
        return None
    return _dense_node(
        convolution.node.op_type,
        convolution,
        rounds,
        convolution.inputs,
        strides=convolution.strides,
        dilations=convolution.dilations,
        pads=convolution.pads_before,
        sizes=convolution.y[2:],
    )


def _dense_node(
    op_type: str,
    convolution: AnyConvolution,
    rounds: bool,
    inputs: Sequence[str],
    **attributes: Any,
) -> onnx.NodeProto:
    replaced = convolution.node
    has_winograd = _has_winograd(convolution, rounds, **attributes)
    optional: dict[str, Any] = {"precision": PRECISIONS["bf16"]} if rounds else {}
    return make_node(
        op_type,
        inputs,
        replaced.output[:1],
        replaced.name,
        kernel_shape=convolution.kernel,
        winograd=int(has_winograd and _is_faster_by_winograd(convolution, rounds)),
        **attributes,
        **optional,
    )


def _has_winograd(
    convolution: AnyConvolution,
    rounds: bool,
    *,
    strides: Sizes,
    dilations: Sizes,
    pads: Sizes,
    sizes: Sizes,
) -> bool:
    is_of_weights = isinstance(convolution, WeightGradient)
    kernels = WINOGRAD_KERNELS_OF_WEIGHTS if is_of_weights else WINOGRAD_KERNELS
    if rounds:
        kernels = WINOGRAD_KERNELS_OF_ROUNDED
    return (
        tuple(convolution.kernel) in kernels
        and {*strides, *dilations} == {1}
        and all(pad < taps for pad, taps in zip(pads, convolution.kernel))
    )
