"""The gradient of MaxPool as one operator.

The operators of ONNX find the position of each maximum by a MaxPool with Indices or by comparisons,
and put the gradient there by another operator. The kernel looks at each window once.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from onnxfit.graph import names
from onnxfit.runtime.kernels.library import DOMAIN
from onnxfit.runtime.kernels.types import ResultType

KERNELS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "MaxPoolGradient",
    onnx.TensorProto.DOUBLE: "MaxPoolGradient64",
}
MAX_AXES = 3
# From this number of windows per image, the kernel takes 0.14 to 0.8 of the time of the operators.
# For smaller images it takes 1.3 to 2.5, because it has a small cost per image.
MIN_WINDOWS = 49


@dataclass(frozen=True)
class _Note:
    """A note in the metadata of a node."""

    node: onnx.NodeProto
    content: Sequence[Any]


def replace_pool_gradients(
    nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with one node for each noted gradient of a MaxPool.

    See `names.MAX_POOL_DX`. The nodes that are not needed any more are still there. The nodes are
    returned themselves if none is noted.
    """
    readers, producers = _notes(nodes, names.MAX_POOL_DY), _notes(nodes, names.MAX_POOL_DX)
    replaced = {}
    for key, producer in producers.items():
        reader = readers.get(key)
        if reader is None or len(reader) > 1 or len(producer) > 1:  # such as in copies
            continue
        gradient = _gradient(reader[0], producer[0], types)
        if gradient is not None:
            replaced[id(producer[0].node)] = gradient
    return [replaced.get(id(node), node) for node in nodes] if replaced else nodes


def _notes(nodes: Sequence[onnx.NodeProto], role: str) -> dict[str, list[_Note]]:
    """Return the notes of a role, by the gradient that they belong to."""
    notes: dict[str, list[_Note]] = defaultdict(list)
    for node in nodes:
        for entry in node.metadata_props:
            if entry.key == role:
                key, *content = json.loads(entry.value)
                notes[key].append(_Note(node, content))
    return notes


def _gradient(
    reader: _Note, producer: _Note, types: Mapping[str, ResultType]
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
    if len(windows) + 2 != rank or math.prod(windows) < MIN_WINDOWS:
        return None
    name = producer.node.name
    return helper.make_node(
        KERNELS[min(elements)], [x, dy], [dx], name, domain=DOMAIN, **attributes
    )
