"""Notes on the nodes of a gradient: what they compute, for processors with one operator for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxfit.graph.values import Value


def noted(
    build: Callable[[], Value], operands: Mapping[str, Value], role: str, content: Sequence[Any]
) -> Value:
    """Return the value that `build` makes of the operands, with notes in the metadata of its nodes.

    `operands` maps a note's name, such as `names.CONV_SMALL`, to an operand: the first new reader
    of the operand gets the note. `role` is the note of the node that computes the value; it has the
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
