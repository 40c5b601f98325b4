"""Replace nodes by ONNX's definitions of their operators in other operators.

`onnx.inliner` does this for a whole model, but without the operators' default attributes and
without types. Its result may therefore be wrong (MeanVarianceNormalization loses its axes) or
missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.graph.fold import computed_values
from onnxfit.graph.inference import schema_of
from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.graph.values import GraphBuilder, Value

Body = Callable[[GraphBuilder], tuple[Union[Value, None], ...]]


def function_body(node: ir.Node, graph: ir.Graph) -> Body | None:
    """Return a function that adds a node's definition to a graph and returns its outputs.

    None if ONNX has no definition in the opset of `graph`.
    """
    schema = schema_of(node, graph)
    if schema is None:
        return None
    function = _definition(schema, node, graph.opset_imports.get("", 1))
    if function is None:
        return None
    defaults = {
        name: attribute.default_value
        for name, attribute in schema.attributes.items()
        if attribute.default_value.type != onnx.AttributeProto.UNDEFINED
    }
    own = {name: ir.serde.serialize_attribute(a) for name, a in node.attributes.items()}

    def body(op: GraphBuilder) -> tuple[Value | None, ...]:
        values: dict[str, Value | None] = {"": None}
        # Definitions that contain the subgraphs of a node also read what these capture.
        values.update((v.name or "", op.wrap(v)) for v in _captured_values(node))
        for i, name in enumerate(function.input):
            value = node.inputs[i] if i < len(node.inputs) else None
            values[name] = None if value is None else op.wrap(value)
        for inner in function.node:
            outputs = _add_node(op, inner, values, {**defaults, **own})
            values.update(zip(inner.output, outputs))
        return tuple(values.get(name) for name in function.output)

    return body


def _add_node(
    op: GraphBuilder,
    node: onnx.NodeProto,
    values: dict[str, Value | None],
    operator_attributes: dict[str, onnx.AttributeProto],
) -> tuple[Value, ...]:
    """Add a node of a definition; return its outputs.

    `values` are the values of the definition by name. `operator_attributes` are the attributes of
    the defined operator, to which attributes of the node may refer.
    """
    attributes: dict[str, object] = {}
    for attribute in node.attribute:
        if attribute.HasField("g"):
            attributes[attribute.name] = _body(op, node, attribute.g, values, operator_attributes)
            continue
        proto = attribute
        if attribute.ref_attr_name:
            proto = operator_attributes.get(attribute.ref_attr_name)
        if proto is not None:
            attributes[attribute.name] = ir.serde.deserialize_attribute(proto).value
    if node.op_type == "Constant":
        return (_constant_of_node(op, attributes),)
    outputs: tuple[Value, ...] = getattr(op, node.op_type)(
        *(values[name] for name in node.input),
        _outputs=len(node.output),
        _domain=node.domain,
        **attributes,
    )
    return _folded(op, outputs)


def _folded(op: GraphBuilder, outputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return constants instead of the outputs of a node that can be computed now.

    Definitions contain arithmetic of shapes. Without it, rules know the sizes of values.
    """
    node = outputs[0].ir.producer()
    arrays = computed_values(node, op.graph) if node is not None else None
    if node is None or arrays is None:
        return outputs
    op.graph.remove(node, safe=True)
    return tuple(op.constant(array) for array in arrays)


def _body(
    op: GraphBuilder,
    node: onnx.NodeProto,
    graph: onnx.GraphProto,
    values: dict[str, Value | None],
    operator_attributes: dict[str, onnx.AttributeProto],
) -> ir.Graph:
    """Return the body of a Loop, a Scan or an If in a definition, which may read its `values`."""
    inner = op.subgraph(graph.name or node.op_type)
    inner_values = dict(values)
    for declared, (dtype, shape) in zip(graph.input, _types_of_inputs(node, values)):
        value = ir.val(inner.unique_name(declared.name), ir.DataType.from_numpy(dtype), shape)
        inner.graph.inputs.append(value)
        inner_values[declared.name] = inner.wrap(value)
    for inner_node in graph.node:
        outputs = _add_node(inner, inner_node, inner_values, operator_attributes)
        inner_values.update(zip(inner_node.output, outputs))
    for declared in graph.output:
        result = inner.Identity(inner_values[declared.name])
        inner.graph.outputs.append(result.ir)
    return inner.graph


def _types_of_inputs(
    node: onnx.NodeProto, values: dict[str, Value | None]
) -> Iterator[tuple[np.dtype[Any], Sequence[int | str | None]]]:
    """Yield the element type and shape of each input of the body of a node."""
    given = [values[name] for name in node.input]
    if node.op_type == "Loop":
        yield np.dtype(np.int64), ()
        yield np.dtype(np.bool_), ()
        given = given[2:]
    scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
    for i, value in enumerate(given if node.op_type in ("Loop", "Scan") else ()):
        assert value is not None
        assert value.shape is not None
        yield value.dtype, value.shape[1:] if i >= len(given) - scanned else value.shape


def _captured_values(node: ir.Node) -> set[ir.Value]:
    """Return the values outside a node that its subgraphs read."""
    bodies = subgraphs_of(node)
    nodes = [inner for body in bodies for inner in ir.traversal.RecursiveGraphIterator(body)]
    read = {v for inner in nodes for v in inner.inputs if v is not None}
    read.update(v for body in bodies for v in body.outputs)
    made = {v for inner in nodes for v in inner.outputs}
    for inner in bodies:
        made.update(inner.inputs, inner.initializers.values())
    return {v for v in read if v not in made and v.name}


def _definition(
    schema: Any,  # the stubs of onnx lack half of a schema
    node: ir.Node,
    opset: int,
) -> onnx.FunctionProto | None:
    """Return the newest definition whose operators exist in `opset`."""
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
    if versions:
        types = [
            ir.serde.serialize_value(v).type.SerializeToString()
            if v is not None and v.name
            else b""
            for v in node.inputs
        ]
        proto = ir.serde.serialize_node(node).SerializeToString()
        data = schema.get_context_dependent_function_with_opset_version(max(versions), proto, types)
        if data:
            return _parse(data)
    versions = [v for v in schema.function_opset_versions if v <= opset]
    return _parse(schema.get_function_with_opset_version(max(versions))) if versions else None


def _parse(data: bytes) -> onnx.FunctionProto:
    function = onnx.FunctionProto()
    function.ParseFromString(data)
    return function


def _constant_of_node(op: GraphBuilder, attributes: dict[str, object]) -> Value:
    (value,) = attributes.values()
    if isinstance(value, ir.TensorProtocol):
        return op.constant(value.numpy())
    # a Constant of a definition has a number, a list of numbers or a tensor
    return op.constant(value)  # type: ignore[arg-type]
