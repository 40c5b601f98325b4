"""Convolutions in a graph, and their gradients, which may be computed by several nodes each."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union

import onnx

from onnxfit.gradients.notes import (
    CONV_DX,
    CONV_DY,
    CONV_FILTERS,
    CONV_LARGE,
    CONV_SMALL,
    CONV_WEIGHTS,
)
from onnxfit.graph.index import attributes_of

Sizes = tuple[int, ...]  # one for each spatial axis
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
_OPERATORS = {"Conv", "ConvTranspose"}
# The notes of a gradient: the readers of its two operands, and the node whose output it is.
_WEIGHTS = (CONV_LARGE, CONV_SMALL, CONV_WEIGHTS)
_IMAGES = (CONV_DY, CONV_FILTERS, CONV_DX)
_NOTES = {*_WEIGHTS, *_IMAGES}


@dataclass(frozen=True)
class Convolution:
    """A Conv or ConvTranspose."""

    node: onnx.NodeProto
    x: Shape  # shapes: (images, channels, sizes ...)
    w: Shape
    y: Shape
    attributes: Mapping[str, Any]

    @property
    def inputs(self) -> list[str]:
        """The names of the given inputs: a missing bias may be named by an empty string."""
        return [name for name in self.node.input if name]

    @property
    def channels(self) -> int:
        return self.x[1]

    @property
    def kernel(self) -> Sizes:
        return self.w[2:]

    @property
    def strides(self) -> Sizes:
        return self._of_axes("strides", 1)

    @property
    def dilations(self) -> Sizes:
        return self._of_axes("dilations", 1)

    @property
    def pads_before(self) -> Sizes:
        """Zero for each axis unless the node has the attribute `pads`."""
        return self._of_axes("pads", 0)

    def _of_axes(self, name: str, default: int) -> Sizes:
        axes = len(self.kernel)
        return tuple(self.attributes.get(name, [default] * axes)[:axes])

    @property
    def is_depthwise(self) -> bool:
        """Whether each filter reads one channel, and each channel has one filter."""
        return self.attributes.get("group") == self.w[0] == self.x[1] and self.w[1] == 1


@dataclass(frozen=True)
class WeightGradient:
    """The gradient of a convolution's weights."""

    node: onnx.NodeProto  # the last one
    large: str
    small: str
    pixels: Shape  # shapes: (images, channels, sizes ...)
    positions: Shape
    w: Shape
    strides: Sizes
    dilations: Sizes
    pads_before: Sizes
    group: int

    @property
    def channels(self) -> int:
        return self.pixels[1]

    @property
    def kernel(self) -> Sizes:
        return self.w[2:]

    @property
    def is_depthwise(self) -> bool:
        return self.group > 1 and self.group == self.w[0] == self.channels


@dataclass(frozen=True)
class ImageGradient:
    """The gradient of the images of a Conv that is not grouped: a transposed convolution."""

    node: onnx.NodeProto  # the last one
    dy: str
    filters: str
    positions: Shape  # shapes: (images, channels, sizes ...)
    w: Shape
    pixels: Shape
    strides: Sizes
    dilations: Sizes
    pads_before: Sizes
    is_depthwise = False

    @property
    def kernel(self) -> Sizes:
        return self.w[2:]


AnyConvolution = Union[Convolution, WeightGradient, ImageGradient]


def convolutions(graph: onnx.GraphProto) -> dict[str, AnyConvolution]:
    """Return result -> the convolution in float32 that computes it, in the order of nodes.

    Convolutions of unknown sizes, and those that read constants, are left out.
    """
    if not any(node.op_type in _OPERATORS or node.metadata_props for node in graph.node):
        return {}
    shapes = _static_shapes(graph)
    gradients = {gradient.node.output[0]: gradient for gradient in _marked_gradients(graph, shapes)}
    found: dict[str, AnyConvolution] = {}
    for node in graph.node:
        convolution = gradients.get(node.output[0]) or _convolution(node, shapes)
        if convolution is not None:
            found[node.output[0]] = convolution
    return found


def depthwise_gradient_nodes(graph: onnx.GraphProto) -> set[str]:
    """Return the outputs of the nodes that compute gradients of weights of depthwise convolutions.

    These are ONNX operators, among them products, unless one operator replaces them.
    """
    producers = {output: node for node in graph.node for output in node.output}
    found: set[str] = set()
    for gradient in convolutions(graph).values():
        if not isinstance(gradient, WeightGradient) or not gradient.is_depthwise:
            continue
        pending = list(gradient.node.output)
        while pending:
            name = pending.pop()
            if name in found or name in (gradient.large, gradient.small) or name not in producers:
                continue
            found.update(producers[name].output)
            pending += producers[name].input
    return found


def _marked_gradients(
    graph: onnx.GraphProto, shapes: Shapes
) -> Iterator[WeightGradient | ImageGradient]:
    """Find the gradients whose nodes are marked, as `gradients.notes.CONV_LARGE` describes.

    A mark on several nodes, such as copies, is not used.
    """
    notes: dict[str, dict[str, list[tuple[onnx.NodeProto, list[Any]]]]] = defaultdict(dict)
    for node in graph.node:
        for entry in node.metadata_props:
            if entry.key in _NOTES:
                key, *note = json.loads(entry.value)
                notes[key].setdefault(entry.key, []).append((node, note))
    for noted in notes.values():
        for roles in (_WEIGHTS, _IMAGES):
            if [len(noted.get(role, ())) for role in roles] != [1, 1, 1]:
                continue
            ((first, (i,)),), ((second, (j,)),), ((last, attributes),) = (noted[r] for r in roles)
            operands = (first.input[i], second.input[j])
            a, b, result = (shapes.get(name, ()) for name in (*operands, last.output[0]))
            *sizes, group = attributes
            is_of_weights = roles is _WEIGHTS
            large, small, w = (a, b, result) if is_of_weights else (result, a, b)
            if not _fit(large, small, w, group):
                continue
            strides, dilations, pads = map(tuple, sizes)
            if is_of_weights:
                yield WeightGradient(last, *operands, a, b, result, strides, dilations, pads, group)
            else:
                yield ImageGradient(last, *operands, a, b, result, strides, dilations, pads)


def _fit(large: Shape, small: Shape, w: Shape, group: int) -> bool:
    """Return whether three shapes are those of images, of windows, and of weights."""
    return (
        2 < len(large) == len(small) == len(w)
        and large[:2] == (small[0], w[1] * group)
        and small[1] == w[0]
    )


def _convolution(node: onnx.NodeProto, shapes: Shapes) -> Convolution | None:
    """Return the convolution of a node, if its sizes are known."""
    if node.op_type not in _OPERATORS or node.domain:
        return None
    x, w, y = (shapes.get(name, ()) for name in (*node.input[:2], node.output[0]))
    if not 2 < len(x) == len(w) == len(y):
        return None
    attributes = attributes_of(node)
    return Convolution(node, x, w, y, attributes)


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
