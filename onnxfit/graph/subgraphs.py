"""The graphs inside a node: the branches of an If, the bodies of a Loop or a Scan."""

from __future__ import annotations

import onnx
import onnx_ir as ir


def subgraphs_of(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs among the attributes of a node."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs.extend(attribute.as_graphs())
    return graphs


def subgraph_protos(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """Return the graphs in an attribute of a node."""
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
