"""Lists of nodes of which some were replaced: their order, and those that are still needed."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import onnx

from onnxfit.graph.subgraphs import read_by


def sort_nodes(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes in their order, except that each comes after those that it reads."""
    producers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    readers: list[list[int]] = [[] for _ in nodes]
    missing = [0] * len(nodes)
    for i, node in enumerate(nodes):
        before = {producers[name] for name in read_by(node) if name in producers}
        missing[i] = len(before)
        for j in before:
            readers[j].append(i)
    ready = [i for i, count in enumerate(missing) if not count]
    ordered = []
    while ready:
        i = heapq.heappop(ready)
        ordered.append(nodes[i])
        for j in readers[i]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(ready, j)
    return ordered


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
