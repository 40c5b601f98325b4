"""Convert an ONNX model to the GraphDef of TensorBoard's graph tab.

Imported when the TensorBoard callback is first used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import onnx
import onnx.inliner
from onnx import AttributeProto, TensorProto

from onnxfit.callbacks.tensorboard.scopes import name_of_weight, reads, scopes_of_nodes
from onnxfit.environment import uninstalled

with uninstalled("torch"):
    from tensorboardX.proto.attr_value_pb2 import AttrValue
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.graph_pb2 import GraphDef
    from tensorboardX.proto.node_def_pb2 import NodeDef
    from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboardX.proto.versions_pb2 import VersionDef

__all__ = ["graph_def", "graph_event"]

# TensorFlow's numbers of the element types. It has none for float8 and int4: they are 0, "invalid".
ELEMENT_TYPES: dict[int, int] = {
    TensorProto.FLOAT: 1,
    TensorProto.DOUBLE: 2,
    TensorProto.INT32: 3,
    TensorProto.UINT8: 4,
    TensorProto.INT16: 5,
    TensorProto.INT8: 6,
    TensorProto.STRING: 7,
    TensorProto.COMPLEX64: 8,
    TensorProto.INT64: 9,
    TensorProto.BOOL: 10,
    TensorProto.BFLOAT16: 14,
    TensorProto.UINT16: 17,
    TensorProto.COMPLEX128: 18,
    TensorProto.FLOAT16: 19,
    TensorProto.UINT32: 22,
    TensorProto.UINT64: 23,
}
# A constant with at most this many elements is written out as text.
MAX_ELEMENTS_AS_TEXT = 8
# Shape inference reads only small tensors, so larger tensors need not be copied.
MAX_ELEMENTS_FOR_INFERENCE = 1024

# ONNX element type (0: unknown) and sizes (-1: unknown size; None: unknown rank).
Type = tuple[int, "list[int] | None"]
UNKNOWN: Type = (0, None)


def graph_event(model: onnx.ModelProto) -> Event:
    """Return the event that shows a `model` in the graph tab."""
    return Event(graph_def=graph_def(model).SerializeToString())


def graph_def(model: onnx.ModelProto) -> GraphDef:
    """Return the GraphDef of a model.

    - `model`: the ONNX model.

    It shows inputs (`Placeholder`), initializers (`Const`), outputs (`Output`) and every node,
    including nodes in the bodies of control flow. The parts of a name between `/` are the scopes
    that the tab folds. A node without scopes in its name gets the scopes of `scopes_of_nodes`, and
    its attribute `name` is then its name in the model. Initializers are drawn next to their
    readers, and a `Constant` as `Const`. `dtype` or `T` is the element type of a node's first
    output; `output_types`, `_output_shapes` and `outputs` are the types, shapes and names of all
    its outputs. A Cast to the type that its input has is left out: Keras's exports have one around
    each operator.
    """
    model = _with_shapes(model)
    drawing = _Drawing()
    drawing.add(model.graph, "", {}, {})
    return GraphDef(node=drawing.nodes, versions=VersionDef(producer=22))


class _Drawing:
    """The nodes drawn so far, and their names."""

    def __init__(self) -> None:
        self.nodes: list[NodeDef] = []
        self._names: set[str] = set()

    def add(
        self,
        graph: onnx.GraphProto,
        scope: str,
        sources: Mapping[str, str],
        types: Mapping[str, Type],
    ) -> list[str]:
        """Draw a graph under a scope and return the sources of its outputs.

        - `sources`: tensor -> its node in the drawing, for the graphs around this one.
        - `types`: tensor -> its type, for the graphs around this one.
        """
        sources = dict(sources)
        types = dict(types)
        for value in (*graph.input, *graph.value_info, *graph.output):
            types[value.name] = _type(value)
        initializers = [tensor.name for tensor in graph.initializer]
        for tensor in graph.initializer:
            types[tensor.name] = (tensor.data_type, list(tensor.dims))
        for sparse in graph.sparse_initializer:
            initializers.append(sparse.values.name)
            types[sparse.values.name] = (sparse.values.data_type, list(sparse.dims))
        inputs = [value.name for value in graph.input if value.name not in initializers]
        # The names in a body are already in the scope of its node.
        scopes = [()] * len(graph.node) if scope else scopes_of_nodes(graph)
        readers: dict[str, list[tuple[str, ...]]] = {}
        for node, steps in zip(graph.node, scopes):
            for name in reads(node):
                readers.setdefault(name, []).append(steps)
        for name in initializers:
            sources[name] = self._name(scope + name_of_weight(name, readers.get(name, ())))
        for name in inputs:
            sources[name] = self._name(scope + name)
        for name in inputs:
            self._draw(sources[name], "Placeholder", (), [name], types, "dtype")
        for name in initializers:
            self._draw(sources[name], "Const", (), [name], types, "dtype")
        outputs = [] if scope else [(value.name, self._name(value.name)) for value in graph.output]
        for node, steps in zip(graph.node, scopes):
            self._add_node(node, scope, steps, sources, types)
        for name, drawn in outputs:
            self._draw(drawn, "Output", [sources.get(name, name)], [name], types, "T")
        return [sources.get(value.name, value.name) for value in graph.output]

    def _add_node(
        self,
        node: onnx.NodeProto,
        scope: str,
        steps: tuple[str, ...],
        sources: dict[str, str],
        types: Mapping[str, Type],
    ) -> None:
        if _changes_nothing(node, types):
            sources[node.output[0]] = sources.get(node.input[0], node.input[0])
            return
        # The tab shows only a few letters, and torch's prefix would use them up.
        leaf = node.name.split("/")[-1].removeprefix("node_") or node.op_type
        name = self._name(scope + "/".join([*steps, leaf]))
        inputs = [sources.get(tensor, tensor) for tensor in node.input if tensor]
        for attribute in node.attribute:
            is_graph = attribute.type == AttributeProto.GRAPH
            for i, body in enumerate([attribute.g] if is_graph else attribute.graphs):
                inputs += self.add(body, f"{name}/{attribute.name}{i or ''}/", sources, types)
        attributes = {
            attribute.name: value
            for attribute in node.attribute
            if (value := _shown_attribute(attribute)) is not None
        }
        if node.name != name:
            attributes["name"] = AttrValue(s=node.name.encode())
        if node.domain:
            attributes["domain"] = AttrValue(s=node.domain.encode())
        # The tab draws a Const small, next to its reader.
        op = "Const" if node.op_type == "Constant" else node.op_type
        self._draw(name, op, inputs, node.output, types, "T", attributes)
        for index, tensor in enumerate(node.output):
            sources[tensor] = f"{name}:{index}" if index else name

    def _draw(
        self,
        name: str,
        op: str,
        inputs: Iterable[str],
        outputs: Iterable[str],
        types: Mapping[str, Type],
        type_key: str,
        attributes: Mapping[str, AttrValue] | None = None,
    ) -> None:
        outputs = list(outputs)
        output_types = [types.get(output, UNKNOWN) for output in outputs]
        elements = [ELEMENT_TYPES.get(element, 0) for element, _ in output_types]
        attr = dict(attributes or {})
        attr["_output_shapes"] = AttrValue(
            list=AttrValue.ListValue(shape=[_shape_proto(sizes) for _, sizes in output_types])
        )
        attr["output_types"] = AttrValue(list=AttrValue.ListValue(type=elements))
        attr["outputs"] = AttrValue(s=", ".join(outputs).encode())
        if elements:
            attr[type_key] = AttrValue(type=elements[0])
        self.nodes.append(NodeDef(name=name, op=op, input=inputs, attr=attr))

    def _name(self, wanted: str) -> str:
        """Return a unique name that TensorBoard can read.

        Other characters are replaced, because `:` and `^` are special in references to a name.
        """
        steps = [re.sub(r"[^\w.\-]", "_", step) for step in wanted.split("/") if step]
        base = "/".join(steps) or "_"
        name = base
        number = 0
        while name in self._names:
            number += 1
            name = f"{base}_{number}"
        self._names.add(name)
        return name


def _with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with functions inlined, shapes inferred and large tensors' data removed."""
    light = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions
    )
    graph = model.graph
    light.graph.CopyFrom(
        onnx.GraphProto(
            name=graph.name,
            node=graph.node,
            input=graph.input,
            output=graph.output,
            value_info=graph.value_info,
            sparse_initializer=graph.sparse_initializer,
        )
    )
    for tensor in graph.initializer:
        large = (
            math.prod(tensor.dims) > MAX_ELEMENTS_FOR_INFERENCE
            or tensor.data_location == TensorProto.EXTERNAL
        )
        bare = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
        light.graph.initializer.append(bare if large else tensor)
    if light.functions:
        light = onnx.inliner.inline_local_functions(light)
    try:
        return onnx.shape_inference.infer_shapes(light)
    except Exception:
        # A drawing without shapes is better than a training that fails because of a drawing.
        return light


def _changes_nothing(node: onnx.NodeProto, types: Mapping[str, Type]) -> bool:
    """Return whether a node is a Cast to the type that its input has."""
    if node.op_type != "Cast" or node.domain:
        return False
    before, _ = types.get(node.input[0], UNKNOWN)
    return before != 0 and any(a.name == "to" and a.i == before for a in node.attribute)


def _type(value: onnx.ValueInfoProto) -> Type:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, [
        dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim
    ]


def _shape_proto(sizes: list[int] | None) -> TensorShapeProto:
    if sizes is None:
        return TensorShapeProto(unknown_rank=True)
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in sizes])


def _shown_attribute(attribute: AttributeProto) -> AttrValue | None:
    """Return an attribute as TensorBoard shows it; None for a body, which is drawn instead."""
    value: Any = onnx.helper.get_attribute_value(attribute)
    kind = attribute.type
    if kind in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return None
    if kind == AttributeProto.INT:
        if attribute.name in ("to", "dtype"):
            return AttrValue(type=ELEMENT_TYPES.get(value, 0))
        return AttrValue(i=value)
    if kind == AttributeProto.FLOAT:
        return AttrValue(f=value)
    if kind == AttributeProto.STRING:
        return AttrValue(s=value)
    if kind == AttributeProto.INTS:
        return AttrValue(list=AttrValue.ListValue(i=value))
    if kind == AttributeProto.FLOATS:
        return AttrValue(list=AttrValue.ListValue(f=value))
    if kind == AttributeProto.STRINGS:
        return AttrValue(list=AttrValue.ListValue(s=value))
    if kind == AttributeProto.TENSOR:
        text = f"{TensorProto.DataType.Name(value.data_type).lower()}{list(value.dims)}"
        is_external = value.data_location == TensorProto.EXTERNAL
        if math.prod(value.dims) <= MAX_ELEMENTS_AS_TEXT and not is_external:
            text += f" {onnx.numpy_helper.to_array(value).tolist()}"
        return AttrValue(s=text.encode())
    return AttrValue(s=AttributeProto.AttributeType.Name(kind).lower().encode())
