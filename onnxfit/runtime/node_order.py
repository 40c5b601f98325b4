"""The order of a graph's nodes in which onnxruntime compiles it fastest.

Each optimizer of onnxruntime sorts the graph. Up to 1.31, onnxruntime keeps a list of the nodes
that are ready, into which every new node is inserted by linear search. The time is the number of
nodes times the length of that list. A gradient makes the list long: the derivatives of activations
are ready in the forward pass and are listed after it, and the update of each weight is listed after
the whole backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx

from onnxfit.graph.index import NodeIndex
from onnxfit.kernels.announcements import has_announcements

# In smaller graphs, sorting takes longer than it saves.
MIN_NODES_TO_SORT = 1000
# onnxruntime runs the nodes whose results no other node reads, which are the updates of weights, in
# the reverse of their order, each after its inputs. Updates that are listed as soon as their
# gradient is ready run after the whole backward pass, whose values stay in memory until then. If
# the values of a graph exceed this size in total, the updates keep their places at the end. So do
# announcements, which are listed in the order in which onnxruntime should compute them.
MAX_BYTES_IN_MEMORY = 64 * 2**20


@contextmanager
def compilation_order(model: onnx.ModelProto, bytes_of_values: float) -> Iterator[None]:
    """Put the nodes of the main graph in another order inside the block, without a copy of tensors.

    Of the ready nodes, the one with the shortest path to the end of the graph comes first, so few
    nodes stay ready for long.

    - `bytes_of_values`: the result of the function of that name for this graph.
    """
    nodes = model.graph.node
    if len(nodes) < MIN_NODES_TO_SORT:
        yield
        return
    updates_last = bytes_of_values > MAX_BYTES_IN_MEMORY or has_announcements(model)
    order = _order(list(nodes), updates_last=updates_last)
    ranks = [0] * len(order)
    for rank, position in enumerate(order):
        ranks[position] = rank
    _sort(nodes, ranks)
    try:
        yield
    finally:
        _sort(nodes, order)


def _sort(nodes: Any, ranks: Sequence[int]) -> None:
    """Put the nodes of a graph in the order of their ranks, which are given by position, in place.

    Sorting moves them; `extend` would copy each one.
    """
    rank_of_next = iter(ranks)
    nodes.sort(key=lambda node: next(rank_of_next))


def bytes_of_values(graph: onnx.GraphProto) -> float:
    """Return the size of all values between the inputs and the outputs of a graph.

    It is infinite if a size is unknown.
    """
    of_type: dict[bytes, float] = {}  # most values have one of a few types
    sizes = {}
    for value in graph.value_info:
        key = value.type.SerializeToString()
        if key not in of_type:
            of_type[key] = _bytes(value.type.tensor_type)
        sizes[value.name] = of_type[key]
    sizes.update((value.name, 0) for value in graph.output)
    return sum(sizes.get(name, math.inf) for node in graph.node for name in node.output if name)


def _bytes(tensor: onnx.TypeProto.Tensor) -> float:
    if not tensor.HasField("shape") or not tensor.elem_type:
        return math.inf
    itemsize = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
    sizes = [dim.dim_value if dim.HasField("dim_value") else math.inf for dim in tensor.shape.dim]
    return math.prod(sizes) * itemsize


def _order(nodes: list[onnx.NodeProto], *, updates_last: bool) -> list[int]:
    """Return the positions of the nodes in the new order."""
    index = NodeIndex(nodes)
    distances = [0] * len(nodes)  # to the end of the graph, in nodes
    for i in reversed(range(len(nodes))):
        if index.followers[i]:
            distances[i] = 1 + max(map(distances.__getitem__, index.followers[i]))
    order = index.order(distances)
    if not updates_last:
        return order
    last = [i for i in range(len(nodes)) if not index.followers[i]]
    return [i for i in order if index.followers[i]] + last
