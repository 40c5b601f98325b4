"""The training view of a model that decodes: the same model with empty caches.

A file for decoding takes the keys and values of earlier tokens as inputs (`past_key_values.0.key`)
and returns them with the keys and values of the new tokens (`present.0.key`). Training sees whole
sequences and needs no cache: an empty cache changes no result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass

import onnx

from onnxfit.graph.subgraphs import read_by
from onnxfit.load.completion import MICROSOFT
from onnxfit.load.concatenated_caches import concatenated_caches, without_concatenated

__all__ = ["Cache", "caches_of", "without_caches"]

# (domain, operator) -> the inputs that are caches, and the outputs that are caches with new tokens
CACHES: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("", "Attention"): ((4, 5), (1, 2)),
    (MICROSOFT, "Attention"): ((4,), (1,)),
    (MICROSOFT, "GroupQueryAttention"): ((3, 4), (1, 2)),
    (MICROSOFT, "MultiHeadAttention"): ((6, 7), (1, 2)),
}
LENGTH_AXIS = -2  # of the cache of an attention operator: (batch, heads, length, size)


@dataclass(frozen=True)
class Cache:
    """A graph input with the keys or values of earlier tokens, and the output that extends it.

    - `past`: the name of the input.
    - `present`: the name of the graph output that also has the new tokens; "" if there is none.
    - `axis`: the axis of the tokens.
    """

    past: str
    present: str
    axis: int


def caches_of(model: onnx.ModelProto) -> list[Cache]:
    """Return the caches of a model, in the order of its inputs.

    A cache is a graph input that only attention operators read, as keys or values of the past. Or a
    Concat appends new keys or values to it, for a graph output that the graph also reads; otherwise
    only its sizes are read.
    """
    graph = model.graph
    outputs = {value.name for value in graph.output}
    names = _attention_caches(graph)
    found: dict[str, Cache] = {}
    for node, inputs, present in _attentions(graph):
        for past, name in zip([node.input[i] for i in inputs], present):
            if past in names:
                found.setdefault(past, Cache(past, name if name in outputs else "", LENGTH_AXIS))
    for one in concatenated_caches(graph):
        found[one.past] = Cache(one.past, one.present, one.axis)
    return [found[value.name] for value in graph.input if value.name in found]


def without_caches(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model for whole sequences, with empty caches.

    The inputs of `caches_of` are removed, and so are the graph outputs that would be the next
    caches. A size that counts past and new tokens, such as that of an attention mask, gets the name
    of the number of new tokens. Initializers keep their names, so weights trained on the view can
    be put back into the file.

    - `model`: the model, which stays unchanged. A model without caches is returned itself.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''
    ...     <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    ...     g (float[N, T, 8] x, float[N, 2, P, 4] past_k, float[N, 2, P, 4] past_v)
    ...     => (float[N, T, 8] y, float[N, 2, S, 4] k, float[N, 2, S, 4] v)
    ...     { y, k, v = com.microsoft.MultiHeadAttention<num_heads = 2, unidirectional = 1>
    ...         (x, x, x, , , , past_k, past_v) }''')
    >>> view = without_caches(model)
    >>> [v.name for v in view.graph.input], [v.name for v in view.graph.output]
    (['x'], ['y'])
    """
    caches = caches_of(model)
    if not caches:
        return model
    view = onnx.ModelProto()
    view.CopyFrom(model)
    graph = view.graph
    pasts = {cache.past for cache in caches}
    presents = {cache.present for cache in caches}
    for node, inputs, names in _attentions(graph):
        if not pasts.isdisjoint(node.input[i] for i in inputs):
            presents.update(names)
            _empty_caches(node, inputs)
    axes = {cache.past: cache.axis for cache in caches}
    axes |= {cache.present: cache.axis for cache in caches}
    values = (*graph.input, *graph.output)
    lengths = {_size(value, axes[value.name]) for value in values if value.name in axes} - {""}
    without_concatenated(view)
    _remove(graph.input, pasts)
    _remove(graph.output, presents)
    _rename_lengths(graph, lengths)
    return view


def _attentions(
    graph: onnx.GraphProto,
) -> Iterator[tuple[onnx.NodeProto, list[int], list[str]]]:
    """Yield the attention nodes that read a cache, and where.

    Each node comes with the positions of caches among its inputs, and the names of the next caches,
    "" for none.
    """
    for node in graph.node:
        positions = CACHES.get((node.domain, node.op_type), ((), ()))
        read = [(i, j) for i, j in zip(*positions) if i < len(node.input) and node.input[i]]
        if read:
            presents = [node.output[j] if j < len(node.output) else "" for _, j in read]
            yield node, [i for i, _ in read], presents


def _attention_caches(graph: onnx.GraphProto) -> set[str]:
    """Return the graph inputs that attention nodes read as caches, and nothing else reads."""
    read_otherwise = {value.name for value in (*graph.initializer, *graph.output)}
    of_nodes = []
    for node in graph.node:
        positions, _ = CACHES.get((node.domain, node.op_type), ((), ()))
        names = {node.input[i] for i in positions if i < len(node.input)} - {""}
        of_nodes.append(names)
        others = {name for i, name in enumerate(node.input) if i not in positions}
        read_otherwise |= others if names else read_by(node)
    caches = {value.name for value in graph.input} - read_otherwise
    # A node keeps all its caches, or none.
    caches &= set().union(*of_nodes)
    while any(names & caches and names - caches for names in of_nodes):
        caches -= set().union(*(names for names in of_nodes if names - caches))
    return caches


def _empty_caches(node: onnx.NodeProto, inputs: list[int]) -> None:
    """Remove these inputs of an attention node, with attributes that depend on them, in place.

    Absent inputs at the end and a `softcap` of 0 are removed as well: they have no effect, and
    older releases of onnxruntime do not support them.
    """
    for i in inputs:
        node.input[i] = ""
    while node.input and not node.input[-1]:
        del node.input[-1]
    for i in reversed(range(len(node.attribute))):
        attribute = node.attribute[i]
        is_off = attribute.name == "softcap" and attribute.f == 0
        if is_off or attribute.name == "sliding_window_cache":
            del node.attribute[i]


def _size(value: onnx.ValueInfoProto, axis: int) -> str:
    """Return the name of a size of a value, "" if it has none."""
    dims = value.type.tensor_type.shape.dim
    return dims[axis].dim_param if -len(dims) <= axis < len(dims) else ""


def _remove(values: MutableSequence[onnx.ValueInfoProto], names: set[str]) -> None:
    """Remove the values of these names, in place."""
    for i in reversed([i for i, value in enumerate(values) if value.name in names]):
        del values[i]


def _rename_lengths(graph: onnx.GraphProto, lengths: set[str]) -> None:
    """Rename sizes of these names to the number of tokens, in place.

    The number of tokens is the second size of the inputs whose sizes have other names. If several
    names qualify, the sizes of inputs and outputs keep their names. Other values lose sizes that
    are computed from the lengths of caches, such as `past + 1`.
    """
    names = [[dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in graph.input]
    tokens = {sizes[1] for sizes in names if len(sizes) > 1 and lengths.isdisjoint(sizes)}
    if len(tokens) == 1 and tokens != {""}:
        for dim in _dims((*graph.input, *graph.output, *graph.value_info)):
            if dim.dim_param in lengths:
                (dim.dim_param,) = tokens
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in sorted(lengths)))
    for dim in _dims(graph.value_info):
        if lengths and pattern.search(dim.dim_param):
            dim.ClearField("dim_param")


def _dims(
    values: Iterable[onnx.ValueInfoProto],
) -> Iterator[onnx.TensorShapeProto.Dimension]:
    for value in values:
        yield from value.type.tensor_type.shape.dim
