"""Notes on the nodes of a gradient: what they compute, for processors with one operator for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxfit.graph.values import Value

# Notes in the metadata of nodes, with which a compiler finds the gradient of a convolution's
# weights: the two readers of its operands, and the node whose output it is.
CONV_LARGE = "onnxfit.conv_large"
CONV_SMALL = "onnxfit.conv_small"
CONV_WEIGHTS = "onnxfit.conv_weights"
# The same for the gradient of a convolution's images.
CONV_DY = "onnxfit.conv_dy"
CONV_FILTERS = "onnxfit.conv_filters"
CONV_DX = "onnxfit.conv_dx"
# The same for the gradient of a MaxPool: the reader of dy, and the node whose output is dx.
MAX_POOL_DY = "onnxfit.max_pool_dy"
MAX_POOL_DX = "onnxfit.max_pool_dx"
# The same for the gradient of a Gather of rows.
GATHER_DY = "onnxfit.gather_dy"
GATHER_DX = "onnxfit.gather_dx"
# The same for the gradient of the input of a product with packed weights.
PACKED_DY = "onnxfit.packed_dy"
PACKED_DX = "onnxfit.packed_dx"


def noted(
    build: Callable[[], Value], operands: Mapping[str, Value], role: str, content: Sequence[Any]
) -> Value:
    """Return the value that `build` makes of the operands, with notes in the metadata of its nodes.

    `operands` maps a note's name, such as CONV_SMALL, to an operand: the first new reader of the
    operand gets the note. `role` is the note of the node that computes the value; it has the
    name of the value and `content`. If an operand has no new reader, because a node is reused,
    there are no notes.
    """
    read_before = {use for value in operands.values() for use in value.ir.uses()}
    result = build()
    readers = {
        note: [use for use in value.ir.uses() if use not in read_before]
        for note, value in operands.items()
    }
    producer = result.ir.producer()
    if result.name is None or producer is None or not all(readers.values()):
        return result
    for note, uses in readers.items():
        uses[0].node.metadata_props[note] = json.dumps([result.name, uses[0].idx])
    producer.metadata_props[role] = json.dumps([result.name, *content])
    return result
