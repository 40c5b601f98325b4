"""Notes in the metadata of nodes, by which gradient rules say what the nodes compute together."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx


@dataclass(frozen=True)
class Note:
    """A note in the metadata of a node."""

    node: onnx.NodeProto
    content: Sequence[Any]


def paired_notes(
    nodes: Sequence[onnx.NodeProto], reader: str, producer: str
) -> Iterator[tuple[Note, Note]]:
    """Yield the notes of two roles that belong to the same gradient.

    A gradient with several notes of a role, such as one that was copied, is left out.
    """
    readers, producers = _notes(nodes, reader), _notes(nodes, producer)
    for key, found in producers.items():
        if len(found) == len(readers.get(key, ())) == 1:
            yield readers[key][0], found[0]


def _notes(nodes: Sequence[onnx.NodeProto], role: str) -> dict[str, list[Note]]:
    """Return the notes of a role, by the gradient that they belong to."""
    notes: dict[str, list[Note]] = defaultdict(list)
    for node in nodes:
        for entry in node.metadata_props:
            if entry.key == role:
                key, *content = json.loads(entry.value)
                notes[key].append(Note(node, content))
    return notes
