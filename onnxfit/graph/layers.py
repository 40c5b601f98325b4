"""The layers of a graph, counted from its outputs, and the units of their weights."""

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
        read = _values_read_by(node)
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


def _values_read_by(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node and its bodies read."""
    return [value for one in _with_bodies(node) for value in one.inputs if value is not None]


def _is_matrix(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) > 1


# Operators whose output is the same weight, perhaps rounded.
SAME = frozenset({"Cast", "DequantizeLinear", "Identity", "QuantizeLinear"})


def unit_axes(weight: ir.Value) -> tuple[int, ...]:
    """Return the axes of a weight over which the elements of one unit extend.

    A unit is a column of the matrix (inputs, outputs) of MatMul or Gemm, a row of a transposed
    one, a filter, a row of an embedding table, or a row of a recurrent layer's matrix. The first
    layer that reads the weight counts. A weight that no such layer reads, such as a bias or the
    scale of a norm, is one unit if at most one of its sizes is above 1; otherwise its first axis
    counts the units.
    """
    sizes = list(weight.shape or ())
    axes = tuple(range(len(sizes)))
    if len(sizes) < 2:
        return axes
    found = _read_by_layer(weight, axes)
    if found is not None:
        return found
    return axes if sum(size != 1 for size in sizes) <= 1 else axes[1:]


def _read_by_layer(value: ir.Value, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the axes of the weight over which a unit extends; None if no layer reads it.

    - `axes`: for each axis of `value`, the axis of the weight that it is.
    """
    for node, index in value.uses():
        found = None
        if node.op_type == "Transpose":
            attribute = node.attributes.get("perm")
            order = range(len(axes))[::-1] if attribute is None else attribute.as_ints()
            found = _read_by_layer(node.outputs[0], tuple(axes[i] for i in order))
        elif node.op_type in SAME and index == 0:
            found = _read_by_layer(node.outputs[0], axes)
        else:
            summed = _summed(node, index, len(axes))
            found = None if summed is None else tuple(sorted(axes[i] for i in summed))
        if found is not None:
            return found
    return None


def _summed(node: ir.Node, index: int, rank: int) -> tuple[int, ...] | None:
    """Return the axes of input number `index` over which a layer sums for one output."""
    kind = node.op_type, index
    if kind == ("MatMul", 1):
        return (rank - 2,)
    if kind == ("MatMul", 0):
        return (rank - 1,)
    if node.op_type == "Gemm" and index < 2:
        attribute = node.attributes.get("transB" if index else "transA")
        is_transposed = attribute is not None and bool(attribute.as_int())
        return (int(is_transposed == bool(index)),)
    if kind in (("Conv", 1), ("Gather", 0)):
        return tuple(range(1, rank))
    if kind == ("ConvTranspose", 1):
        return (0, *range(2, rank))
    if node.op_type in ("GRU", "LSTM", "RNN") and index in (1, 2, 3):
        return (rank - 1,)
    return None
