"""Treat the tensors of Constant nodes as initializers while a model is in memory.

Some exporters write weights into Constant nodes, for instance Paddle2ONNX. `lift_constants` moves
these tensors to the initializers of the main graph, under the names of the nodes' outputs. Each
node stays at its place, without its tensor and with a reserved output that nothing reads.
`lower_constants` is the inverse: it moves the tensors back into the nodes, whatever their numbers
are by then. A model in between is a valid model that computes the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError, listed_names
from onnxfit.graph import names
from onnxfit.graph.quantized import WEIGHT_INPUTS
from onnxfit.graph.shared_tensors import shared_bytes
from onnxfit.graph.subgraphs import graph_protos, nodes_of, read_by
from onnxfit.graph.tensors import FIELDS_OF_NUMBERS, copy_fields

# The metadata of such a node has the name of its output, if another value has the same name.
OUTPUT = "onnxfit.output"
ATTRIBUTES = ("value", "value_float", "value_floats")
FLOATS = {
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
}
# Operators whose integers, scales and zero points may be trained or converted to floats.
QUANTIZED = (*WEIGHT_INPUTS, "QuantizeLinear", "QLinear")


def lift_constants(model: onnx.ModelProto) -> None:
    """Move the tensors of Constant nodes to the initializers of the main graph, in place.

    These are the floats of the main graph, float arrays of several elements in its subgraphs, and
    the integers that operators of quantized models read. A tensor that is an output of a graph, or
    that no node reads, stays in its node. So do tensors in the bodies of functions.

    A tensor gets the name of the node's output. If another graph of the model has a value of the
    same name, a number is added.

    ModelError: the model reads or returns a value with a reserved name.
    """
    graphs = list(graph_protos(model.graph))
    defined = _defined_names(graphs)
    readers = _readers(model.graph)
    outputs = {value.name for graph in graphs for value in graph.output}
    taken = sorted(name for name in {*readers, *outputs} if name.startswith(names.PLACE))
    if taken:
        raise ModelError(
            f"The model has values called {listed_names(taken)}. Names that begin with"
            f" {names.PLACE!r} are reserved. Rename the values."
        )
    for graph in graphs:
        is_main = graph is graphs[0]
        for node in graph.node:
            if not is_constant(node) or node.output[0].startswith(names.PLACE):
                continue
            name = node.output[0]
            kinds = readers.get(name)
            tensor = _tensor_of(node) if kinds and name not in outputs else None
            if tensor is None or not _is_lifted(tensor, kinds or set(), is_main):
                continue
            unique = name
            if not is_main and defined[name] > 1:
                unique = names.unused(name, defined.__contains__)
                defined[unique] += 1
                _read_instead(graph, name, unique)
                node.metadata_props.add(key=OUTPUT, value=name)
            _empty(node)
            node.output[0] = f"{names.PLACE}{unique}"
            tensor.name = unique
            model.graph.initializer.append(tensor)


def lower_constants(model: onnx.ModelProto, kept: Container[str] = ()) -> onnx.ModelProto:
    """Move the tensors that `lift_constants` moved back into their nodes, in place.

    Return the model. A node whose tensor is no longer an initializer is removed. If a node outside
    of a subgraph now reads a tensor of that subgraph, the tensor stays an initializer.

    - `kept`: initializers that stay initializers. Their nodes are removed.
    """
    tensors = {t.name: t for t in model.graph.initializer if t.name not in kept}
    lowered: set[str] = set()
    for i, graph in enumerate(list(graph_protos(model.graph))):
        places = [node for node in graph.node if place_of(node) is not None]
        if not places:
            continue
        reads = Counter(name for node in nodes_of(graph) for name in node.input)
        everywhere = reads
        if i:
            everywhere = Counter(name for node in nodes_of(model.graph) for name in node.input)
        for node in places:
            name = place_of(node) or ""
            if name not in tensors or name in lowered or everywhere[name] > reads[name]:
                graph.node.remove(node)
                continue
            _fill(node, tensors[name])
            lowered.add(name)
            node.output[0] = name
            for entry in [entry for entry in node.metadata_props if entry.key == OUTPUT]:
                _read_instead(graph, name, entry.value)
                node.output[0] = entry.value
                node.metadata_props.remove(entry)
        _sort_constants(graph)
    for i in reversed(range(len(model.graph.initializer))):
        if model.graph.initializer[i].name in lowered:
            del model.graph.initializer[i]
    return model


def with_constant_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model of `lower_constants` as a copy; the model itself if nothing was lifted."""
    if not any(place_of(node) for node in nodes_of(model.graph)):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return lower_constants(copy)


def place_of(node: onnx.NodeProto) -> str | None:
    """Return the initializer that is the tensor of a node without its own; None for other nodes."""
    if not is_constant(node) or not node.output[0].startswith(names.PLACE):
        return None
    if len(node.attribute) != 1 or node.attribute[0].name not in ATTRIBUTES:
        return None
    output: str = node.output[0]
    return output.removeprefix(names.PLACE)


def spread_names(model: onnx.ModelProto) -> set[str]:
    """Return the lifted tensors that are not one field of bytes of the main graph when lowered.

    These are lists of floats, and tensors of nodes in subgraphs.
    """
    lifted = {name for node in nodes_of(model.graph) if (name := place_of(node)) is not None}
    whole = (node for node in model.graph.node if place_of(node) is not None)
    return lifted - {place_of(node) for node in whole if node.attribute[0].name == "value"}


def remove_places(model: ir.Model) -> None:
    """Remove the nodes without their tensors, in place, and note it in the initializers."""
    initializers = model.graph.initializers
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            name = node.outputs[0].name or "" if node.outputs else ""
            if node.op_type != "Constant" or not name.startswith(names.PLACE):
                continue
            value = initializers.get(name.removeprefix(names.PLACE))
            if value is not None:
                value.metadata_props[names.LIFTED] = "true"
            if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
                graph.remove(node, safe=True)


def is_constant(node: onnx.NodeProto) -> bool:
    """Return whether a node is a Constant of ONNX."""
    return node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.output) == 1


def _is_lifted(tensor: onnx.TensorProto, readers: Container[str], is_main: bool) -> bool:
    """Return whether the tensor of a Constant becomes an initializer.

    - `readers`: the operators that read it; "quantized" stands for those of quantized models.
    - `is_main`: whether the node is in the main graph.
    """
    elements = math.prod(tensor.dims)
    if not elements:
        return False
    if tensor.data_type in FLOATS:
        return is_main or elements > 1
    return is_main and "quantized" in readers and tensor.data_type != onnx.TensorProto.STRING


def _tensor_of(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return a copy of the tensor of a Constant; None for strings, integers and sparse tensors."""
    if len(node.attribute) != 1 or node.attribute[0].ref_attr_name:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value" and attribute.HasField("t"):
        tensor = onnx.TensorProto()
        copy_fields(attribute.t, tensor, {"name", "doc_string", "metadata_props"})
        return tensor
    if attribute.name == "value_float":
        return onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [], [attribute.f])
    if attribute.name == "value_floats":
        floats = list(attribute.floats)
        return onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [len(floats)], floats)
    return None


def _empty(node: onnx.NodeProto) -> None:
    """Remove the numbers of a Constant, in place."""
    attribute = node.attribute[0]
    if attribute.name == "value":
        bare = onnx.TensorProto()
        copy_fields(attribute.t, bare, {*FIELDS_OF_NUMBERS, "dims"})
        bare.dims.append(0)
        attribute.t.CopyFrom(bare)
    attribute.ClearField("f")
    attribute.ClearField("floats")


def _fill(node: onnx.NodeProto, source: onnx.TensorProto) -> None:
    """Write the numbers of an initializer into a Constant that `_empty` changed, in place."""
    tensor = onnx.TensorProto()
    copy_fields(source, tensor, {"name", "doc_string", "metadata_props"})
    data = shared_bytes(source)
    if data is not None:
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = data.tobytes()
    attribute = node.attribute[0]
    rank = {"value_float": 0, "value_floats": 1}.get(attribute.name)
    if rank is None:
        copy_fields(attribute.t, tensor, {*FIELDS_OF_NUMBERS, "dims", "data_type"})
        attribute.t.CopyFrom(tensor)
    elif tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == rank:
        numbers = onnx.numpy_helper.to_array(tensor)
        if rank:
            attribute.floats.extend(numbers.astype(np.float32))
        else:
            attribute.f = float(numbers)
    else:
        attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))


def _sort_constants(graph: onnx.GraphProto) -> None:
    """Move each Constant that a node before it reads to the beginning of a graph, in place."""
    read: set[str] = set()
    late = []
    for node in graph.node:
        if is_constant(node) and node.output[0] in read:
            late.append(node)
        read |= read_by(node)
    for node in late:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        graph.node.remove(node)
        graph.node.insert(0, copy)


def _defined_names(graphs: list[onnx.GraphProto]) -> Counter[str]:
    """Return how many values of the graphs have each name."""
    defined: Counter[str] = Counter()
    for graph in graphs:
        own = {value.name for value in (*graph.input, *graph.initializer)}
        own.update(tensor.values.name for tensor in graph.sparse_initializer)
        defined.update(own)
        defined.update(name for node in graph.node for name in node.output)
    return defined


def _readers(graph: onnx.GraphProto) -> Mapping[str, set[str]]:
    """Return the operators that read each value; "quantized" for those of quantized models."""
    readers: dict[str, set[str]] = {}
    for node in nodes_of(graph):
        kind = "quantized" if node.op_type.startswith(QUANTIZED) else node.op_type
        for name in node.input:
            readers.setdefault(name, set()).add(kind)
    return readers


def _read_instead(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Let the nodes of a graph, and nodes in their bodies, read another value, in place."""
    for node in nodes_of(graph):
        for i, name in enumerate(node.input):
            if name == old:
                node.input[i] = new
