"""Lists of nodes of which some were replaced: their order, and those that are still needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from onnxfit.graph.index import NodeIndex
from onnxfit.graph.subgraphs import read_by


def sort_nodes(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes in their order, except that each comes after those that it reads."""
    return [nodes[i] for i in NodeIndex(nodes).order()]


def needed_nodes(
    nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]
) -> Sequence[onnx.NodeProto]:
    """Return those of sorted nodes that the outputs of their graph depend on."""
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed |= read_by(node)
            kept.append(node)
    return kept[::-1]
