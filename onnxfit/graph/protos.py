"""Changes of an `onnx.ModelProto` that leave everything else in it byte-identical."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.graph import names
from onnxfit.graph.records import KIND
from onnxfit.graph.sharing import module_of
from onnxfit.graph.subgraphs import nodes_of, subgraph_protos, subgraphs_of

INITIALIZERS_WITHOUT_INPUTS = 4  # the first IR version whose initializers need not be inputs


@dataclass(frozen=True)
class NodeLocation:
    """A node of a model: the message, the graph that it is in, and its position there."""

    proto: onnx.NodeProto
    graph: onnx.GraphProto
    position: int


def node_locations(model: onnx.ModelProto, work: ir.Model) -> dict[ir.Node, NodeLocation]:
    """Return where the nodes of `work`, which was read from `model`, are in `model`."""
    return dict(_locations(model.graph, work.graph))


def _locations(graph: onnx.GraphProto, work: ir.Graph) -> Iterator[tuple[ir.Node, NodeLocation]]:
    for i, (proto, node) in enumerate(zip(graph.node, work)):
        yield node, NodeLocation(proto, graph, i)
        bodies = [body for attribute in proto.attribute for body in subgraph_protos(attribute)]
        # onnx-ir keeps the order of attributes
        for body, inner in zip(bodies, subgraphs_of(node)):
            yield from _locations(body, inner)


def insert_nodes(insertions: list[tuple[NodeLocation, onnx.NodeProto]]) -> None:
    """Insert nodes, each after the node at a location, which invalidates all locations."""
    for place, node in sorted(insertions, key=lambda pair: -pair[0].position):
        place.graph.node.insert(place.position + 1, node)


def used_names(model: onnx.ModelProto) -> set[str]:
    """Return the names of all values and nodes in a model, its subgraphs included."""
    used = {value.name for value in (*model.graph.input, *model.graph.output)}
    used |= {tensor.name for tensor in model.graph.initializer}
    for node in nodes_of(model.graph):
        used |= {node.name, *node.input, *node.output}
        for attribute in node.attribute:
            for body in subgraph_protos(attribute):
                used |= {value.name for value in (*body.input, *body.output)}
                used |= {tensor.name for tensor in body.initializer}
    return used


def unique_name(name: str, used: set[str]) -> str:
    """Return the name, with a number where it is used, and add it to `used`."""
    unique = names.unused(name, used.__contains__)
    used.add(unique)
    return unique


def layer_name(node: ir.Node) -> str:
    """Return the name of the layer that a node belongs to, with dots, as torch has it.

    It is the module that torch's exporter notes, or the scope in the name of the node, as in
    "/encoder/layer.0/dense/MatMul"; a node without either gives its name or that of its output.
    """
    module = module_of(node)
    if module:
        return module
    path = [part for part in (node.name or "").split("/") if part][:-1]
    scopes: list[str] = []
    for part in path:
        if scopes and part.startswith(f"{scopes[-1]}."):  # "layer1/layer1.0"
            scopes.pop()
        scopes.append(part)
    return ".".join(scopes) or node.name or node.outputs[0].name or node.op_type


def add_initializer(
    model: onnx.ModelProto, name: str, array: npt.NDArray[Any], parameter: bool | None = None
) -> None:
    """Add an initializer; `parameter` is the exporter's note on it, None for no note."""
    tensor = onnx.numpy_helper.from_array(np.asarray(array, order="C"), name)
    _append_tensor(model, tensor)
    if parameter is not None:
        note_kind(model, name, parameter)


def copy_initializer(
    model: onnx.ModelProto, tensor: onnx.TensorProto, name: str, parameter: bool | None
) -> None:
    """Add a copy of an initializer under another name; `parameter` as for `add_initializer`."""
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    _append_tensor(model, copy)
    if parameter is not None:
        note_kind(model, name, parameter)


def _append_tensor(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    model.graph.initializer.append(tensor)
    if model.ir_version < INITIALIZERS_WITHOUT_INPUTS:
        model.graph.input.append(_value_info(tensor))


def _value_info(tensor: onnx.TensorProto) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)


def remove_initializer(model: onnx.ModelProto, name: str) -> None:
    """Remove an initializer and its notes."""
    graph = model.graph
    for entries in (
        graph.initializer,
        graph.input,
        graph.value_info,
        graph.quantization_annotation,
    ):
        for i in reversed(range(len(entries))):
            entry = entries[i]
            if (entry.tensor_name if hasattr(entry, "tensor_name") else entry.name) == name:
                del entries[i]


def note_kind(model: onnx.ModelProto, name: str, parameter: bool) -> None:
    """Note, as torch's exporter does, whether an initializer is a parameter or a buffer."""
    set_note(model, name, KIND, "PARAMETER" if parameter else "BUFFER")


def set_note(model: onnx.ModelProto, name: str, key: str, value: str) -> None:
    """Set an entry in the metadata of an initializer."""
    infos = model.graph.value_info
    info = next((info for info in infos if info.name == name), None)
    if info is None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        infos.append(_value_info(tensor))
        info = infos[-1]
    entry = next((entry for entry in info.metadata_props if entry.key == key), None)
    if entry is None:
        entry = info.metadata_props.add(key=key)
    entry.value = value


def rename_inputs(graph: onnx.GraphProto, renamed: Mapping[str, str]) -> None:
    """Let the nodes of a graph, and nodes in their bodies, read other values, in place."""
    for node in nodes_of(graph):
        for i, name in enumerate(node.input):
            if name in renamed:
                node.input[i] = renamed[name]


def remove_note(model: onnx.ModelProto, name: str, key: str) -> None:
    """Remove an entry from the metadata of an initializer."""
    for info in model.graph.value_info:
        if info.name == name:
            for entry in [entry for entry in info.metadata_props if entry.key == key]:
                info.metadata_props.remove(entry)


def is_read(model: onnx.ModelProto, name: str) -> bool:
    """Return whether a node reads a value, or a graph has it as an output."""
    graphs = [model.graph]
    for node in nodes_of(model.graph):
        if name in node.input:
            return True
        graphs += [body for attribute in node.attribute for body in subgraph_protos(attribute)]
    return any(value.name == name for graph in graphs for value in graph.output)
