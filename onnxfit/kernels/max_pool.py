"""The gradient of MaxPool as one operator.

The operators of ONNX find the position of each maximum by a MaxPool with Indices or by comparisons,
and put the gradient there by another operator. The kernel looks at each window once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx

from onnxfit.gradients.notes import MAX_POOL_DX, MAX_POOL_DY
from onnxfit.kernels.search import Note, ResultType, make_node, paired_notes

KERNELS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "MaxPoolGradient",
    onnx.TensorProto.DOUBLE: "MaxPoolGradient64",
}
MAX_AXES = 3
# From this number of windows per image, the kernel takes 0.14 to 0.8 of the time of the operators.
# For smaller images it takes 1.3 to 2.5, because it has a small cost per image. Pools that halve
# lines or images of even sizes have no such cost. They take 0.28 to 0.45.
MIN_WINDOWS = 49
HALVING = {"kernel_shape": 2, "strides": 2, "dilations": 1, "pads": 0}


def replace_pool_gradients(
    nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with one node for each noted gradient of a MaxPool.

    The nodes that are not needed any more are still there. The nodes are returned themselves if
    none is noted (`gradients.notes.MAX_POOL_DX`).
    """
    replaced = {}
    for reader, producer in paired_notes(nodes, MAX_POOL_DY, MAX_POOL_DX):
        gradient = _gradient_kernel(reader, producer, types)
        if gradient is not None:
            replaced[id(producer.node)] = gradient
    return [replaced.get(id(node), node) for node in nodes] if replaced else nodes


def _gradient_kernel(
    reader: Note, producer: Note, types: Mapping[str, ResultType]
) -> onnx.NodeProto | None:
    """Return the node of a gradient; None if there is no kernel for it."""
    x, attributes = producer.content
    dy, dx = reader.node.input[reader.content[0]], producer.node.output[0]
    found = [types.get(value) for value in (x, dy, dx)]
    if None in found or found[0] != found[2]:
        return None
    elements = {each.element for each in found if each is not None}
    ranks = {len(each.shape) for each in found if each is not None}
    rank = len(attributes["kernel_shape"]) + 2
    if (
        len(elements) > 1
        or not elements <= KERNELS.keys()
        or ranks != {rank}
        or rank > MAX_AXES + 2
    ):
        return None
    windows = [size for size in types[dy].shape[2:] if isinstance(size, int)]
    is_small = math.prod(windows) < MIN_WINDOWS
    if len(windows) + 2 != rank or (is_small and not _halves(types[x].shape[2:], attributes)):
        return None
    name = producer.node.name
    return make_node(KERNELS[min(elements)], [x, dy], [dx], name, **attributes)


def _halves(sizes: Sequence[int | str], attributes: Mapping[str, Sequence[int]]) -> bool:
    """Return whether a pool halves lines or images of even sizes."""
    is_even = all(isinstance(size, int) and size % 2 == 0 for size in sizes)
    has_numbers = all({*attributes[name]} <= {number} for name, number in HALVING.items())
    return is_even and has_numbers and len(sizes) < MAX_AXES
