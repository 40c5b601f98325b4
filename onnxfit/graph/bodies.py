"""Operators that ONNX itself defines by others: the nodes of the definition in place of the node.

`onnx.inliner` does this for a whole model, but without the operators' default attributes and
without types, so that a body may come out wrong (MeanVarianceNormalization loses its axes) or not
at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir

from onnxfit.graph.inference import schema_of
from onnxfit.graph.values import GraphBuilder, Value


def function_body(
    node: ir.Node, graph: ir.Graph
) -> Callable[[GraphBuilder], tuple[Value | None, ...]] | None:
    """What adds the definition of a node to a graph and gives its outputs;

    None where ONNX has none, or one with loops.
    """
    schema = schema_of(node, graph)
    function = None if schema is None else _definition(schema, node, graph.opset_imports.get("", 1))
    if (
        schema is None
        or function is None
        or any(a.HasField("g") for inner in function.node for a in inner.attribute)
    ):
        return None
    chosen = function

    def body(op: GraphBuilder) -> tuple[Value | None, ...]:
        defaults = {
            n: a.default_value
            for n, a in schema.attributes.items()
            if a.default_value.type != onnx.AttributeProto.UNDEFINED
        }
        given = {
            **defaults,
            **{n: ir.serde.serialize_attribute(a) for n, a in node.attributes.items()},
        }
        values: dict[str, Value | None] = {"": None}
        for i, name in enumerate(chosen.input):
            value = node.inputs[i] if i < len(node.inputs) else None
            values[name] = None if value is None else op.wrap(value)
        for inner in chosen.node:
            attributes = {}
            for a in inner.attribute:
                source = given.get(a.ref_attr_name) if a.ref_attr_name else a
                if source is not None:
                    attributes[a.name] = ir.serde.deserialize_attribute(source).value
            if inner.op_type == "Constant":
                made: tuple[Value, ...] = (_constant(op, attributes),)
            else:
                made = getattr(op, inner.op_type)(
                    *(values[n] for n in inner.input),
                    _outputs=len(inner.output),
                    _domain=inner.domain,
                    **attributes,
                )
            values.update(zip(inner.output, made))
        return tuple(values.get(name) for name in chosen.output)

    return body


def _definition(
    schema: Any, node: ir.Node, opset: int
) -> onnx.FunctionProto | None:  # Any: the stubs of onnx lack half of a schema
    """The definition in the operators of this opset: of several, the newest that is not newer."""
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
    if versions:
        types = [
            (
                ir.serde.serialize_value(v).type.SerializeToString()
                if v is not None and v.name
                else b""
            )
            for v in node.inputs
        ]
        proto = ir.serde.serialize_node(node).SerializeToString()
        data = schema.get_context_dependent_function_with_opset_version(max(versions), proto, types)
        if data:
            return _parsed(data)
    versions = [v for v in schema.function_opset_versions if v <= opset]
    return _parsed(schema.get_function_with_opset_version(max(versions))) if versions else None


def _parsed(data: bytes) -> onnx.FunctionProto:
    function = onnx.FunctionProto()
    function.ParseFromString(data)
    return function


def _constant(op: GraphBuilder, attributes: dict[str, object]) -> Value:
    (value,) = attributes.values()
    if isinstance(value, ir.TensorProtocol):
        return op.constant(value.numpy())
    return op.constant(value)  # type: ignore[arg-type]
