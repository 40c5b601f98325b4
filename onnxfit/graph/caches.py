"""The training view of a model that decodes: the same model with empty caches.

A file for decoding takes the keys and values of earlier tokens as inputs (`past_key_values.0.key`)
and returns them with those of the new tokens (`present.0.key`). Training sees whole sequences, and
needs neither: an empty cache changes no result.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence

import onnx

from onnxfit.graph.completion import MICROSOFT
from onnxfit.graph.subgraphs import read_by

__all__ = ["without_caches"]

# (domain, operator) -> the inputs that are caches, and the outputs that are caches with new tokens
CACHES: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("", "Attention"): ((4, 5), (1, 2)),
    (MICROSOFT, "Attention"): ((4,), (1,)),
    (MICROSOFT, "GroupQueryAttention"): ((3, 4), (1, 2)),
    (MICROSOFT, "MultiHeadAttention"): ((6, 7), (1, 2)),
}
LENGTH_AXIS = -2  # of a cache: (batch, heads, length, size)


def without_caches(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model as it is for whole sequences, whose caches are empty.

    A cache is a graph input that attention operators read as keys or values of the past, and
    nothing else reads. These inputs are removed, and so are the graph outputs that would be the
    next caches. A size that counts past and new tokens, such as that of an attention mask, gets the
    name of the number of new tokens. Initializers keep their names, so that weights trained on the
    view can be put back into the file.

    - `model`: the model, which is not changed. It is returned itself if it has no caches.

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
    caches = _cache_inputs(model.graph)
    if not caches:
        return model
    view = onnx.ModelProto()
    view.CopyFrom(model)
    graph = view.graph
    next_caches: set[str] = set()
    for node, inputs, outputs in _attentions(graph):
        if not caches.isdisjoint(node.input[i] for i in inputs):
            _empty_caches(node, inputs)
            next_caches.update(node.output[i] for i in outputs)
    lengths = {
        value.type.tensor_type.shape.dim[LENGTH_AXIS].dim_param
        for value in graph.output
        if value.name in next_caches and _rank(value) >= -LENGTH_AXIS
    }
    _remove(graph.input, caches)
    _remove(graph.output, next_caches)
    _rename_lengths(graph, lengths - {""})
    return view


def _attentions(
    graph: onnx.GraphProto,
) -> Iterator[tuple[onnx.NodeProto, list[int], list[int]]]:
    """Yield the attention nodes that read a cache, with the positions of caches.

    The positions are those among the inputs and among the outputs.
    """
    for node in graph.node:
        inputs, outputs = CACHES.get((node.domain, node.op_type), ((), ()))
        read = [i for i in inputs if i < len(node.input) and node.input[i]]
        if read:
            yield node, read, [i for i in outputs if i < len(node.output) and node.output[i]]


def _cache_inputs(graph: onnx.GraphProto) -> set[str]:
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
    """Remove these inputs of an attention node, in place, and what only matters with them.

    Absent inputs at the end and a `softcap` of 0 are left out, too: they say nothing, and older
    releases of onnxruntime do not know them.
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


def _rank(value: onnx.ValueInfoProto) -> int:
    return len(value.type.tensor_type.shape.dim)


def _remove(values: MutableSequence[onnx.ValueInfoProto], names: set[str]) -> None:
    """Remove the values of these names, in place."""
    for i in reversed([i for i, value in enumerate(values) if value.name in names]):
        del values[i]


def _rename_lengths(graph: onnx.GraphProto, lengths: set[str]) -> None:
    """Give sizes of these names that of the number of tokens, in place.

    That is the second size of the inputs whose sizes have other names. Where there are several such
    names, the sizes keep theirs.
    """
    names = [[dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in graph.input]
    tokens = {sizes[1] for sizes in names if len(sizes) > 1 and lengths.isdisjoint(sizes)}
    if len(tokens) != 1 or tokens == {""}:
        return
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in lengths:
                (dim.dim_param,) = tokens
