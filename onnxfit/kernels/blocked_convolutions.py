"""Depthwise convolutions in the layout that onnxruntime's fastest kernels read.

On the CPU, onnxruntime has kernels for convolutions of images whose pixels hold blocks of 8 or 16
channels, the width of a vector register ("NCHWc"; Georganas et al. 2018, "Anatomy of
high-performance deep learning convolutions on SIMD architectures"). onnxruntime itself uses these
kernels only for constant weights, but the weights of a training step change. This module writes the
operators of that layout into a copy of the graph: reorder the pixels and the weights, convolve,
reorder the result. Saved graphs keep plain ONNX operators.

Convolutions whose filters read all channels are left to the operators in C++, which are faster
than this layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxfit.graph.replacement import NodeReplacement, replace_nodes
from onnxfit.graph.subgraphs import remove_unused_nodes
from onnxfit.kernels.convolutions import (
    Convolution,
    ImageGradient,
    WeightGradient,
    convolutions,
)
from onnxfit.kernels.library import run_node

DOMAIN = "com.microsoft.nchwc"
# A ConvTranspose with strides becomes several convolutions whose results are interleaved. That
# takes 0.1 to 1.0 of the time of the operator for results up to this size, and 1.6 to 2.2 above.
MAX_INTERLEAVED_PIXELS = 256


def with_blocked_convolutions(model: onnx.ModelProto, device: str) -> onnx.ModelProto:
    """Return a copy of a model whose depthwise convolutions of images read blocks of channels.

    The model itself is returned if it has no such convolution, or if the device (a kind, such as
    "cpu") or the processor lacks the kernels.
    """
    if device != "cpu":
        return model
    found: dict[str, Convolution | WeightGradient] = {
        output: convolution
        for output, convolution in convolutions(model.graph).items()
        if not isinstance(convolution, ImageGradient)
        and convolution.is_depthwise
        and len(convolution.kernel) == 2
    }
    block = channel_block() if found else 0
    if not block:
        return model
    used = {name for node in model.graph.node for name in (*node.input, *node.output, node.name)}
    shared = _Shared(block, used)
    replaced = {}
    for output, convolution in found.items():
        writer = _Writer(convolution.node, shared)
        if _write(writer, convolution):
            replaced[output] = writer.nodes
    if not replaced:
        return model
    blocked = onnx.ModelProto()
    blocked.CopyFrom(model)
    replace_nodes(
        blocked.graph,
        [new for node in model.graph.node for new in replaced.get(node.output[0], [node])],
    )
    if not all(isinstance(found[output], Convolution) for output in replaced):
        remove_unused_nodes(blocked.graph)
    blocked.graph.initializer.extend(shared.constants.values())
    blocked.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return blocked


# Operators
# ------------------------------------------------------------------------------------------------


@dataclass
class _Shared:
    """Names, constants and values that the nodes of all convolutions share.

    - `names`: the names in the graph.
    - `constants`: initializers by name.
    - `reordered`: value -> the same value with blocks of channels last.
    """

    block: int
    names: set[str]
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    reordered: dict[str, str] = field(default_factory=dict)


class _Writer(NodeReplacement):
    """The nodes that replace a convolution."""

    def __init__(self, node: onnx.NodeProto, shared: _Shared) -> None:
        super().__init__(node, shared.names)
        self.shared = shared

    def integers(self, *numbers: int) -> str:
        """Return the name of a constant vector."""
        name = "blocked/" + ",".join(map(str, numbers))
        constant = numpy_helper.from_array(np.array(numbers, np.int64), name)
        self.shared.constants[name] = constant
        return name

    def reshape(self, value: str, *shape: int) -> str:
        return self("Reshape", value, self.integers(*shape))

    def reorder(self, value: str) -> str:
        """Put blocks of channels last."""
        return self("ReorderInput", value, domain=DOMAIN)

    def reorder_once(self, value: str) -> str:
        """Put blocks of channels last; reuse the result if the same value is reordered again.

        The result stays in memory until its last use. The backward pass reads a gradient twice in a
        row.
        """
        if value not in self.shared.reordered:
            self.shared.reordered[value] = self.reorder(value)
        return self.shared.reordered[value]

    def finish(self, value: str, channels: int) -> None:
        """Write the result of the convolution from its blocks of channels."""
        (output,) = self.node.output[:1]
        self("ReorderOutput", value, output=output, domain=DOMAIN, channels=channels)


def _write(writer: _Writer, convolution: Convolution | WeightGradient) -> bool:
    """Write the nodes that replace a convolution.

    Return False, and write nothing, if its attributes forbid them.
    """
    if convolution.channels % writer.shared.block:
        return False
    if isinstance(convolution, WeightGradient):
        return _weight_gradient(writer, convolution)
    is_conv = convolution.node.op_type == "Conv"
    return (_conv if is_conv else _conv_transpose)(writer, convolution)


def _conv(writer: _Writer, convolution: Convolution) -> bool:
    """Write a Conv."""
    node = convolution.node
    channels = convolution.channels
    kernel = convolution.kernel
    taps = _taps_before_channels(writer, convolution)
    w = writer.reshape(taps, channels, 1, *kernel)
    x = writer.reorder_once(node.input[0])
    attributes = {**convolution.attributes, "kernel_shape": kernel}
    y = writer("Conv", x, w, *node.input[2:], domain=DOMAIN, **attributes)
    writer.finish(y, convolution.channels)
    return True


def _conv_transpose(writer: _Writer, convolution: Convolution) -> bool:
    """Write a ConvTranspose with strides as one Conv for each remainder of a pixel's position.

    Positions with the same remainder modulo the stride are read by the same taps. Their results are
    interleaved.
    """
    node = convolution.node
    images, channels, rows, columns = convolution.y
    strides = convolution.strides
    is_plain = set(convolution.dilations) == {1} and _has_only_pads(convolution)
    is_small = rows * columns <= MAX_INTERLEAVED_PIXELS
    if not is_plain or not is_small or rows % strides[0] or columns % strides[1]:
        return False
    phases = [
        [
            _phase(remainder, stride, pad, taps, before, after // stride)
            for remainder in range(stride)
        ]
        for stride, pad, taps, before, after in zip(
            strides,
            convolution.pads_before,
            convolution.kernel,
            convolution.x[2:],
            convolution.y[2:],
        )
    ]
    if any(phase is None for axis in phases for phase in axis):
        return False
    all_taps = _taps_before_channels(writer, convolution)
    x = writer.reorder_once(node.input[0])
    stripes = []
    for _i, row in enumerate(phases[0]):
        pieces = []
        for _j, column in enumerate(phases[1]):
            assert row is not None  # any() above
            assert column is not None
            read = [a * convolution.kernel[1] + b for a in row.taps for b in column.taps]
            w = writer("Gather", all_taps, writer.integers(*read), axis=1)
            kernel = (len(row.taps), len(column.taps))
            w = writer.reshape(w, channels, 1, *kernel)
            y = writer(
                "Conv", x, w, domain=DOMAIN, group=channels,
                kernel_shape=kernel, pads=[row.before, column.before, row.after, column.after],
            )  # fmt: skip
            pieces.append(writer.reshape(y, -1, 1, writer.shared.block))
        stripe = writer("Concat", *pieces, axis=1)
        width = columns * writer.shared.block
        stripes.append(writer.reshape(stripe, -1, 1, width))
    y = writer("Concat", *stripes, axis=1)
    y = writer.reshape(y, images, channels, rows, columns)
    writer.finish(y, convolution.channels)
    return True


def _weight_gradient(writer: _Writer, gradient: WeightGradient) -> bool:
    """Write a convolution, separate for each image and channel, whose result is the gradient.

    It convolves the pixels of `large` with those of `small` as weights. Its result has a pixel for
    each tap; images are summed.
    """
    images, channels, *pixels = gradient.pixels
    positions = gradient.positions[2:]
    kernel = gradient.kernel
    pads = gradient.pads_before
    axes = zip(pixels, positions, kernel, gradient.strides, gradient.dilations, pads)
    pads_after = [
        (taps - 1) * dilation + (count - 1) * stride + 1 - size - before
        for size, count, taps, stride, dilation, before in axes
    ]
    if min(*pads_after, *pads) < 0:
        return False
    x = writer.reorder(gradient.large)
    x = writer.reshape(x, 1, images * channels, *pixels)
    w = writer.reorder_once(gradient.small)
    w = writer.reshape(w, images * channels, 1, *positions)
    y = writer(
        "Conv", x, w, domain=DOMAIN, group=images * channels,
        kernel_shape=positions, strides=gradient.dilations, dilations=gradient.strides,
        pads=[*pads, *pads_after],
    )  # fmt: skip
    y = writer.reshape(y, images, -1)
    y = writer("ReduceSum", y, writer.integers(0), keepdims=1)
    y = writer.reshape(y, 1, channels, *kernel)
    y = writer("ReorderOutput", y, domain=DOMAIN, channels=channels)
    shape = writer.integers(channels, 1, *kernel)
    writer("Reshape", y, shape, output=gradient.node.output[0])
    return True


@dataclass(frozen=True)
class _Phase:
    """Taps that reach the positions of one remainder along an axis, and the pads of their Conv."""

    taps: Sequence[int]
    before: int
    after: int


def _phase(
    remainder: int, stride: int, pad: int, taps: int, before: int, after: int
) -> _Phase | None:
    """Return the phase of a remainder, from `before` to `after` elements.

    Output o stride + remainder is the sum of w[t] times element o + (remainder + pad - t) / stride.
    None if no tap reaches the positions, or if the pads of a Conv would be negative.
    """
    reaching = [t for t in reversed(range(taps)) if (remainder + pad - t) % stride == 0]
    if not reaching:
        return None
    ahead = -(remainder + pad - reaching[0]) // stride
    behind = after + len(reaching) - 1 - before - ahead
    return None if min(ahead, behind) < 0 else _Phase(reaching, ahead, behind)


def _taps_before_channels(writer: _Writer, convolution: Convolution) -> str:
    """Return the weights as (blocks, taps, channels of a block)."""
    w = convolution.node.input[1]
    w = writer.reshape(w, -1, writer.shared.block, int(np.prod(convolution.kernel)))
    return writer("Transpose", w, perm=[0, 2, 1])


# Helpers
# ------------------------------------------------------------------------------------------------


def _has_only_pads(convolution: Convolution) -> bool:
    """Return whether a ConvTranspose has no bias, and only its pads decide the result's sizes."""
    attributes = convolution.attributes
    return (
        attributes.get("auto_pad", b"NOTSET") == b"NOTSET"
        and not attributes.get("output_shape")
        and len(convolution.inputs) == 2
    )


# Blocks
# ------------------------------------------------------------------------------------------------


@cache
def channel_block() -> int:
    """Return the number of channels in a block; 0 if onnxruntime has no such kernels here.

    onnxruntime does not expose the number, but the order of reordered pixels shows it.
    """
    channels = 64
    node = helper.make_node("ReorderInput", ["x"], ["y"], domain=DOMAIN)
    pixels = np.tile(np.arange(2, dtype=np.float32), channels).reshape(1, channels, 1, 2)
    try:
        reordered = run_node(node, pixels)
    except Exception:  # onnxruntime raises its own classes, all of them plain Exceptions
        return 0
    block = int(np.argmax(reordered.ravel() == 1))  # start of the second pixel
    if block < 4 or channels % block:
        return 0
    expected = np.tile(np.repeat(np.arange(2), block), channels // block)
    return block if np.array_equal(reordered.ravel(), expected) else 0
