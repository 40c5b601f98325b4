"""Caches of keys and values to which a Concat appends the new tokens' keys and values.

PyTorch and optimum export decoders in this form:

    past_key_values.0.key -> Shape -> positions and masks
    past_key_values.0.key, keys -> Concat -> present.0.key -> Transpose -> MatMul -> ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Union

import numpy as np
import onnx

from onnxfit.graph.index import GraphIndex, required_inputs
from onnxfit.graph.replacement import NodeReplacement, replace_nodes
from onnxfit.graph.subgraphs import nodes_of

LEAST_RANK = 3  # of a cache: (batch times heads, length, size), in any order

# A size of an empty cache: a number, or the input and the axis that have the same size
Size = Union[int, "tuple[str, int]"]
COPIES = ("Concat", "Identity")  # operators that return a single input unchanged


@dataclass(frozen=True)
class ConcatenatedCache:
    """A graph input to which new keys or values are added.

    - `past`, `present`, `axis`: as in `caches.Cache`.
    - `copies`: the names of values that are the input itself.
    - `shape`: its sizes if empty; None for a size that no other input has.
    """

    past: str
    present: str
    axis: int
    copies: frozenset[str]
    shape: tuple[Size | None, ...]


def concatenated_caches(graph: onnx.GraphProto) -> list[ConcatenatedCache]:
    """Return the caches that a Concat makes longer, in the order of the inputs.

    `caches_of` says what a cache is.
    """
    index = GraphIndex(graph)
    candidates = required_inputs(graph).values()
    grown = {
        value.name: found
        for value in candidates
        if (found := _extended_cache(index, value)) is not None
    }
    others = [value for value in candidates if value.name not in grown]
    caches = []
    for value in candidates:
        if value.name in grown:
            present, axis, copies = grown[value.name]
            shape = _empty_shape(value, axis, others)
            shapes = [node for node in _nodes_reading(copies, index) if node.op_type == "Shape"]
            if all(None not in shape[_span(node)] for node in shapes):
                caches.append(ConcatenatedCache(value.name, present, axis, copies, shape))
    return caches


def without_concatenated(model: onnx.ModelProto) -> None:
    """Make the caches of `concatenated_caches` empty, in place.

    They remain as unused inputs.
    """
    graph = model.graph
    caches = concatenated_caches(graph)
    if not caches:
        return
    by_copy = {copy: cache for cache in caches for copy in cache.copies}
    names = {name for node in nodes_of(graph) for name in (node.name, *node.input, *node.output)}
    names |= {value.name for value in (*graph.input, *graph.initializer)}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if by_copy.keys().isdisjoint(node.input):
            nodes.append(node)
            continue
        replacement = NodeReplacement(node, names)
        if node.op_type == "Shape":
            cache = by_copy[node.input[0]]
            _write_shape(replacement, cache.shape[_span(node)])
        elif node.output[0] not in by_copy:
            rest = [name for name in node.input if name not in by_copy]
            op_type = node.op_type if len(rest) > 1 else "Identity"
            attributes = replacement.attributes if len(rest) > 1 else {}
            replacement(op_type, *rest, output=node.output[0], **attributes)
        nodes += replacement.nodes
    replace_nodes(graph, nodes)


def _extended_cache(
    index: GraphIndex, value: onnx.ValueInfoProto
) -> tuple[str, int, frozenset[str]] | None:
    """Return the graph output that extends a cache, the axis of tokens and the cache's copies.

    None if the value is not a cache.
    """
    dims = value.type.tensor_type.shape.dim
    copies = _equal_values(value.name, index)
    if len(dims) < LEAST_RANK or not index.outputs.isdisjoint(copies):
        return None
    axes, presents, is_used = set(), [], False
    for node in _nodes_reading(copies, index):
        if node.domain or node.op_type not in (*COPIES, "Shape"):
            return None
        if node.op_type == "Concat" and len(node.input) > 1:
            if node.input[0] not in copies:
                return None
            (axis,) = (a.i for a in node.attribute if a.name == "axis")
            axes.add(axis % len(dims))
            longer = _equal_values(node.output[0], index)
            presents += [name for name in longer if name in index.outputs]
            is_used |= any(reader.op_type not in COPIES for reader in _nodes_reading(longer, index))
    if len(presents) != 1 or len(axes) != 1 or not is_used:
        return None
    (axis,) = axes
    return None if dims[axis].HasField("dim_value") else (presents[0], axis, frozenset(copies))


def _equal_values(name: str, index: GraphIndex) -> list[str]:
    """Return the names of all values equal to the value of this name, itself included."""
    names = [name]
    for one in names:
        names += [
            node.output[0]
            for node in index.readers[one]
            if not node.domain and node.op_type in COPIES and len(node.input) == 1
        ]
    return names


def _nodes_reading(names: Iterable[str], index: GraphIndex) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that read values of these names."""
    for name in names:
        yield from index.readers[name]


def _empty_shape(
    value: onnx.ValueInfoProto, axis: int, others: Sequence[onnx.ValueInfoProto]
) -> tuple[Size | None, ...]:
    """Return the sizes of an empty cache, which other inputs have by the same names."""
    sources = {
        dim.dim_param: (other.name, i)
        for other in reversed(others)
        for i, dim in enumerate(other.type.tensor_type.shape.dim)
        if dim.dim_param
    }
    sizes: list[Size | None] = [
        dim.dim_value if dim.HasField("dim_value") else sources.get(dim.dim_param)
        for dim in value.type.tensor_type.shape.dim
    ]
    sizes[axis] = 0
    return tuple(sizes)


def _span(node: onnx.NodeProto) -> slice:
    """Return the sizes that a Shape returns."""
    bounds = {attribute.name: attribute.i for attribute in node.attribute}
    return slice(bounds.get("start", 0), bounds.get("end"))


def _write_shape(replacement: NodeReplacement, sizes: Sequence[Size | None]) -> None:
    """Add nodes that compute these sizes, instead of a Shape."""
    parts = []
    for size in sizes:
        if isinstance(size, tuple):
            name, axis = size
            place = replacement.constant(np.array([axis]))
            parts.append(replacement("Gather", replacement("Shape", name), place, axis=0))
        else:
            parts.append(replacement.constant(np.array([size])))
    output = replacement.node.output[0]
    if parts:
        replacement("Concat", *parts, output=output, axis=0)
    else:
        empty = onnx.numpy_helper.from_array(np.zeros(0, np.int64), "value")
        replacement("Constant", output=output, value=empty)
