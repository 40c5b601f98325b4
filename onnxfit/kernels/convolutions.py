"""Convolutions and their gradients as one operator each."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from onnxfit.kernels import dense, depthwise
from onnxfit.kernels.convolution_search import convolutions

MAX_NUMBER = 2**15 - 1  # of kernels, strides, dilations and pads


def replace_convolutions(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], *, with_dense: bool
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with a kernel in the place of each convolution that has one.

    The nodes that are not needed any more are still there. The nodes are returned themselves if
    there is no kernel to use. `with_dense`: whether the kernels for dense convolutions can be used.
    """
    kernels = {}
    for output, convolution in convolutions(graph).items():
        kernel = depthwise.kernel_for(convolution)
        if kernel is None and with_dense:
            kernel = dense.kernel_for(convolution)
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
