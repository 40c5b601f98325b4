"""The layers of a graph, counted from its outputs."""

from __future__ import annotations

import onnx_ir as ir

from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.graph.weights import FLOATS

# Operators that combine data with a matrix, filters or an embedding table.
MATRIX_LAYERS = frozenset(
    {"Conv", "ConvTranspose", "Einsum", "GRU", "Gather", "Gemm", "LSTM", "MatMul", "RNN"}
)


def layers_after(graph: ir.Graph) -> dict[str, int]:
    """Return the number of layers after the layer of each float initializer.

    A layer is a node that combines data with a stored matrix, filters or an embedding table, and
    the depth of a value is the largest number of layers on a path to it. A bias or the scale of a
    norm belongs to the layer before it. Initializers that no node reads have no entry.

    - `graph`: a graph that `normalize` returned; its nodes are sorted.
    """
    depth: dict[ir.Value, int] = {}
    # values that depend on no input -> the names of the float initializers in them
    stored: dict[ir.Value, set[str]]
    stored = {v: {n} if v.dtype in FLOATS else set() for n, v in graph.initializers.items()}
    depth_of_weight: dict[str, int] = {}
    for node in graph:
        read = _values_read(node)
        names: set[str] = set().union(*(stored.get(value, ()) for value in read))
        if all(value in stored for value in read):
            stored.update(dict.fromkeys(node.outputs, names))
            continue
        is_layer = any(
            one.op_type in MATRIX_LAYERS
            and any(v is not None and stored.get(v) and _is_matrix(v) for v in one.inputs)
            for one in _with_bodies(node)
        )
        reached = max((depth.get(value, 0) for value in read), default=0) + is_layer
        depth.update(dict.fromkeys(node.outputs, reached))
        for name in names:
            depth_of_weight[name] = max(depth_of_weight.get(name, 1), reached)
    deepest = max(depth_of_weight.values(), default=0)
    return {name: deepest - reached for name, reached in depth_of_weight.items()}


def _with_bodies(node: ir.Node) -> list[ir.Node]:
    """Return a node and the nodes of its bodies."""
    nodes = [node]
    for body in subgraphs_of(node):
        nodes += ir.traversal.RecursiveGraphIterator(body)
    return nodes


def _values_read(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node and its bodies read."""
    return [value for one in _with_bodies(node) for value in one.inputs if value is not None]


def _is_matrix(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) > 1
