"""An ONNX model as the GraphDef that TensorBoard's graph tab draws; imported when the TensorBoard
callback is first used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import onnx
import onnx.inliner
from onnx import AttributeProto, TensorProto
from tensorboardX.proto.attr_value_pb2 import AttrValue
from tensorboardX.proto.graph_pb2 import GraphDef
from tensorboardX.proto.node_def_pb2 import NodeDef
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboardX.proto.versions_pb2 import VersionDef

from onnxfit.callbacks.tensorboard_scopes import name_of_weight, reads, scopes_of_nodes

# TensorFlow's numbers of the element types; those it lacks (float8, int4) are 0, "invalid"
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
SHOWN = 8  # elements of a constant that are written out
MAX_INFERRED_ELEMENTS = 1024  # elements; shape inference reads only small tensors

# ONNX element type (0 unknown), sizes (-1 unknown; None: unknown rank)
Type = tuple[int, "list[int] | None"]
UNKNOWN: Type = (0, None)


def graph_def(model: onnx.ModelProto) -> GraphDef:
    """Draw inputs (`Placeholder`), initializers (`Const`), every node, those in control flow's
    bodies too, and outputs (`Output`).

    The parts of a name between `/` are the scopes that the tab folds; a node without them gets
    those of `scopes_of_nodes`, and initializers are beside their readers. `name` is then a node's
    name in the model. A `Constant` is drawn as `Const`. `dtype` or `T` is the element type of a
    node's first output, `output_types` and `_output_shapes` tell all of them, `outputs` their names
    in the model.
    """
    model = _with_shapes(model)
    drawing = _Drawing()
    drawing.add(model.graph, "", {}, {})
    return GraphDef(node=drawing.nodes, versions=VersionDef(producer=22))


class _Drawing:
    """The nodes so far, and the names they have taken."""

    def __init__(self) -> None:
        self.nodes: list[NodeDef] = []
        self._taken: set[str] = set()

    def add(
        self,
        graph: onnx.GraphProto,
        scope: str,
        sources: Mapping[str, str],
        types: Mapping[str, Type],
    ) -> list[str]:
        """Draw a graph under a scope;

        `sources` are the tensors of the graphs around it. Returns the sources of its outputs.
        """
        types = {
            **types,
            **{
                value.name: _type(value)
                for value in (*graph.input, *graph.value_info, *graph.output)
            },
        }
        sources = dict(sources)
        sparse = [(t.values.name, t.values.data_type, t.dims) for t in graph.sparse_initializer]
        initializers = [*((t.name, t.data_type, t.dims) for t in graph.initializer), *sparse]
        for name, data_type, dims in initializers:
            types[name] = (data_type, list(dims))
        constant = {name for name, _, _ in initializers}
        # a body's names are under its node's already
        scopes = [()] * len(graph.node) if scope else scopes_of_nodes(graph)
        readers: dict[str, list[tuple[str, ...]]] = {}
        for node, steps in zip(graph.node, scopes):
            for name in reads(node):
                readers.setdefault(name, []).append(steps)
        for name in constant | {value.name for value in graph.input}:
            sources[name] = self._name(
                scope + (name_of_weight(name, readers.get(name, ())) if name in constant else name)
            )
        for name in [
            *(value.name for value in graph.input if value.name not in constant),
            *(name for name, _, _ in initializers),
        ]:
            self._draw(
                sources[name],
                "Const" if name in constant else "Placeholder",
                (),
                [name],
                types,
                "dtype",
            )
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
        # torch's prefix leaves no room for what follows it
        leaf = node.name.split("/")[-1].removeprefix("node_") or node.op_type
        name = self._name(scope + "/".join([*steps, leaf]))
        inputs = [sources.get(tensor, tensor) for tensor in node.input if tensor]
        for attribute in node.attribute:
            for i, body in enumerate(
                [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs
            ):
                inputs += self.add(body, f"{name}/{attribute.name}{i or ''}/", sources, types)
        attributes = {
            attribute.name: value
            for attribute in node.attribute
            if (value := _attribute(attribute)) is not None
        }
        if node.name != name:
            attributes["name"] = AttrValue(s=node.name.encode())
        if node.domain:
            attributes["domain"] = AttrValue(s=node.domain.encode())
        # which the tab draws small, beside its reader
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
        found = [types.get(output, UNKNOWN) for output in outputs]
        elements = [ELEMENT_TYPES.get(element, 0) for element, _ in found]
        attr = dict(attributes or {})
        attr["_output_shapes"] = AttrValue(
            list=AttrValue.ListValue(shape=[_shape(sizes) for _, sizes in found])
        )
        attr["output_types"] = AttrValue(list=AttrValue.ListValue(type=elements))
        attr["outputs"] = AttrValue(s=", ".join(outputs).encode())
        if elements:
            attr[type_key] = AttrValue(type=elements[0])
        self.nodes.append(NodeDef(name=name, op=op, input=inputs, attr=attr))

    def _name(self, wanted: str) -> str:
        """A name that TensorBoard can read and that no other node has:

        `:` and `^` mean something in references to it.
        """
        wanted = (
            "/".join(re.sub(r"[^\w.\-]", "_", part) for part in wanted.split("/") if part) or "_"
        )
        name, number = wanted, 0
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._taken.add(name)
        return name


def _with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with its functions inlined and shapes inferred where they can be; large initializers
    leave their data behind.
    """
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
            math.prod(tensor.dims) > MAX_INFERRED_ELEMENTS
            or tensor.data_location == TensorProto.EXTERNAL
        )
        bare = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
        light.graph.initializer.append(bare if large else tensor)
    if light.functions:
        light = onnx.inliner.inline_local_functions(light)
    try:
        return onnx.shape_inference.infer_shapes(light)
    except (
        Exception
    ):  # a drawing without shapes is better than none, and than training that fails for it
        return light


def _type(value: onnx.ValueInfoProto) -> Type:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, [
        dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim
    ]


def _shape(sizes: list[int] | None) -> TensorShapeProto:
    if sizes is None:
        return TensorShapeProto(unknown_rank=True)
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in sizes])


def _attribute(attribute: AttributeProto) -> AttrValue | None:
    """A node's attribute as TensorBoard shows it; None for a body, which is drawn."""
    value: Any = onnx.helper.get_attribute_value(attribute)
    kind = attribute.type
    if kind in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return None
    if kind == AttributeProto.INT:
        return (
            AttrValue(type=ELEMENT_TYPES.get(value, 0))
            if attribute.name in ("to", "dtype")
            else AttrValue(i=value)
        )
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
        if math.prod(value.dims) <= SHOWN and value.data_location != TensorProto.EXTERNAL:
            text += f" {onnx.numpy_helper.to_array(value).tolist()}"
        return AttrValue(s=text.encode())
    return AttrValue(s=AttributeProto.AttributeType.Name(kind).lower().encode())
