"""The graphs inside a node: the branches of an If, the bodies of a Loop or a Scan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx
import onnx_ir as ir


def subgraphs_of(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs among the attributes of a node."""
    graphs: list[ir.Graph] = []
    # Most nodes have no attributes, and this check takes a tenth of the time of the loop.
    attributes = node.attributes.data
    if not attributes:
        return graphs
    for attribute in attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs.extend(attribute.as_graphs())
    return graphs


def subgraph_protos(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """Return the graphs in an attribute of a node."""
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


def graph_protos(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph, and then the graphs inside its nodes, on all levels."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in subgraph_protos(attribute):
                yield from graph_protos(inner)


def nodes_of(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph or function, each before the nodes inside it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in subgraph_protos(attribute):
                yield from nodes_of(inner)


def detach(node: ir.Node) -> None:
    """Disconnect the inputs of a node and of the nodes in its subgraphs, in place.

    Afterwards, no value counts as used by them.
    """
    for body in subgraphs_of(node):
        body.outputs.clear()
        for inner in body:
            detach(inner)
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)


def read_by(node: onnx.NodeProto) -> set[str]:
    """Return the values that a node and the graphs inside it read."""
    names = set(node.input)
    for attribute in node.attribute:
        for body in subgraph_protos(attribute):
            names.update(*(read_by(inner) for inner in body.node))
            names |= {value.name for value in body.output}
    return names


def remove_unused_nodes(graph: onnx.GraphProto) -> None:
    """Remove the nodes of a sorted graph whose outputs nothing reads, in place.

    The Indices of a MaxPool that nothing reads are removed as well: they take most of its time.
    """
    reads = Counter(name for node in nodes_of(graph) for name in node.input)
    reads.update(output.name for output in graph.output)
    for node in nodes_of(graph):
        for attribute in node.attribute:
            for body in subgraph_protos(attribute):
                reads.update(output.name for output in body.output)
    kept = []
    for node in reversed(graph.node):
        if any(reads[name] for name in node.output):
            kept.append(node)
        else:
            reads.subtract(node.input)
    for node in kept:
        if node.op_type == "MaxPool" and len(node.output) > 1 and not reads[node.output[1]]:
            del node.output[1]
    nodes = kept[::-1]
    del graph.node[:]
    graph.node.extend(nodes)
