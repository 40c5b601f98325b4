"""Depthwise convolutions in a graph, and the gradients of their weights."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union

import onnx
from onnx import helper

from onnxfit.graph import names

Pair = tuple[int, int]
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
_CONVOLUTIONS = {"Conv", "ConvTranspose"}
_NOTES = {names.DEPTHWISE_LARGE, names.DEPTHWISE_SMALL, names.DEPTHWISE_WEIGHTS}


@dataclass(frozen=True)
class DepthwiseConv:
    """A Conv or ConvTranspose of images whose filters each read one channel."""

    node: onnx.NodeProto
    x: Shape  # shapes: (images, channels, rows, columns)
    y: Shape
    kernel: Pair
    attributes: Mapping[str, Any]

    @property
    def channels(self) -> int:
        return self.x[1]


@dataclass(frozen=True)
class WeightGradient:
    """The gradient of a depthwise convolution's weights, computed by any number of nodes."""

    node: onnx.NodeProto  # the last one
    large: str
    small: str
    pixels: Shape  # shapes: (images, channels, rows, columns)
    positions: Shape
    kernel: Pair
    strides: Pair
    dilations: Pair
    pads_before: Pair

    @property
    def channels(self) -> int:
        return self.pixels[1]


Depthwise = Union[DepthwiseConv, WeightGradient]


def depthwise_convolutions(graph: onnx.GraphProto) -> dict[str, Depthwise]:
    """Return result -> the convolution of float32 images that computes it, in the order of nodes.

    Convolutions of unknown sizes are left out.
    """
    if not any(node.op_type in _CONVOLUTIONS or node.metadata_props for node in graph.node):
        return {}
    shapes = _static_shapes(graph)
    gradients = _weight_gradients(graph, shapes)
    found: dict[str, Depthwise] = {}
    for node in graph.node:
        convolution = _depthwise(node, shapes) or gradients.get(node.output[0])
        if convolution is not None:
            found[node.output[0]] = convolution
    return found


def _weight_gradients(graph: onnx.GraphProto, shapes: Shapes) -> dict[str, WeightGradient]:
    """Return the gradients of depthwise convolutions' weights whose nodes are marked.

    See `names.DEPTHWISE_WEIGHTS`. A mark on several nodes, such as copies, is not used.
    """
    notes: dict[str, dict[str, list[tuple[onnx.NodeProto, list[Any]]]]] = defaultdict(dict)
    for node in graph.node:
        for entry in node.metadata_props:
            if entry.key in _NOTES:
                key, *note = json.loads(entry.value)
                notes[key].setdefault(entry.key, []).append((node, note))
    gradients = {}
    for noted in notes.values():
        if set(noted) != _NOTES or any(len(nodes) > 1 for nodes in noted.values()):
            continue
        ((large, (i,)),) = noted[names.DEPTHWISE_LARGE]
        ((small, (j,)),) = noted[names.DEPTHWISE_SMALL]
        ((last, attributes),) = noted[names.DEPTHWISE_WEIGHTS]
        operands = (large.input[i], small.input[j])
        pixels, positions, w = (shapes.get(v, ()) for v in (*operands, last.output[0]))
        if len(pixels) == len(positions) == len(w) == 4:
            gradients[last.output[0]] = WeightGradient(
                last, *operands, pixels, positions, w[2:], *map(tuple, attributes)
            )
    return gradients


def _depthwise(node: onnx.NodeProto, shapes: Shapes) -> DepthwiseConv | None:
    """Return the depthwise convolution of a node, if its sizes are known."""
    if node.op_type not in _CONVOLUTIONS or node.domain:
        return None
    x, w, y = (shapes.get(name, ()) for name in (*node.input[:2], node.output[0]))
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    is_depthwise = len(x) == len(w) == len(y) == 4 and attributes.get("group") == w[0] == x[1]
    if not is_depthwise or w[1] != 1:
        return None
    return DepthwiseConv(node, x, y, (w[2], w[3]), attributes)


def _static_shapes(graph: onnx.GraphProto) -> Shapes:
    """Return the shapes of the float32 values whose sizes are known, without constants."""
    shapes = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.elem_type == onnx.TensorProto.FLOAT and tensor.HasField("shape"):
            sizes = tuple(dim.dim_value for dim in tensor.shape.dim)
            if all(sizes):
                shapes[value.name] = sizes
    return shapes
