"""Look up the nodes and tensors of a graph in a file by the names of values.

onnx-ir keeps the producer and the uses of each value itself. Protobuf messages hold names alone.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.graph.subgraphs import read_by

Array = npt.NDArray[Any]


def tensors_of(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the initializers of a graph by name."""
    return {tensor.name: tensor for tensor in graph.initializer}


def required_inputs(graph: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the inputs of a graph that have no default value, by name."""
    defaults = {tensor.name for tensor in graph.initializer}
    return {value.name: value for value in graph.input if value.name not in defaults}


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the values of the attributes that a node has."""
    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}


def constant_of(value: ir.Value | None, max_elements: float = math.inf) -> Array | None:
    """Return the array of an initializer or a Constant; None for any other value.

    - `max_elements`: larger arrays are None, too.
    """
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None or tensor.size > max_elements else tensor.numpy()


def elements_of(value: ir.Value | None) -> float:
    """Return the number of elements of a value, infinity if it is not known."""
    if value is None or value.shape is None or not value.shape.is_static():
        return math.inf
    return math.prod(value.shape.numpy())


class NodeIndex:
    """The nodes of a graph by the values that they compute and read.

    A node also reads what the graphs inside it read. The empty name of an absent input or output
    belongs to no node. Each mapping is made on first use, and does not follow later changes of the
    nodes.

    >>> graph = onnx.parser.parse_graph("g (float x) => (float y) { s = Abs(x) y = Mul(s, x) }")
    >>> index = NodeIndex(graph.node)
    >>> index.producers["y"].op_type, [node.op_type for node in index.readers["x"]]
    ('Mul', ['Abs', 'Mul'])
    >>> index.positions, index.followers
    ({'s': 0, 'y': 1}, [[1], []])
    """

    def __init__(self, nodes: Sequence[onnx.NodeProto]) -> None:
        self.nodes = nodes

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Mapping from each computed value to the position of its node."""
        return {name: i for i, node in enumerate(self.nodes) for name in node.output if name}

    @cached_property
    def producers(self) -> Mapping[str, onnx.NodeProto]:
        """Mapping from each computed value to its node."""
        return {name: node for node in self.nodes for name in node.output if name}

    @cached_property
    def reading(self) -> Mapping[str, list[int]]:
        """Mapping from each value to the positions of the nodes that read it, each once.

        It is empty for a value that no node reads.
        """
        reading: dict[str, list[int]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            for name in read_by(node):
                reading[name].append(i)
        reading.pop("", None)
        return reading

    @cached_property
    def readers(self) -> Mapping[str, list[onnx.NodeProto]]:
        """Mapping from each value to the nodes that read it; see `reading`."""
        readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for name, positions in self.reading.items():
            readers[name] = [self.nodes[i] for i in positions]
        return readers

    @cached_property
    def followers(self) -> list[list[int]]:
        """The positions of the nodes that read the results of each node, sorted."""
        reading = self.reading
        return [
            sorted({i for name in node.output if name in reading for i in reading[name]})
            for node in self.nodes
        ]

    def order(self, priorities: Sequence[int] | None = None) -> list[int]:
        """Return the positions of the nodes in an order in which each comes before its followers.

        - `priorities`: of the nodes that may come next, the first is the one of least priority, or
          the one listed first among equals. None: their own order.
        """
        missing = [0] * len(self.nodes)  # nodes before each that are not yet in order
        for followers in self.followers:
            for i in followers:
                missing[i] += 1
        ranks = range(len(missing)) if priorities is None else priorities
        ready = [(ranks[i], i) for i, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, i = heapq.heappop(ready)
            order.append(i)
            for j in self.followers[i]:
                missing[j] -= 1
                if not missing[j]:
                    heapq.heappush(ready, (ranks[j], j))
        return order


class GraphIndex(NodeIndex):
    """The nodes, the constants and the ends of a graph by name.

    - `nodes`: the nodes, if they are not those of the graph.
    """

    def __init__(
        self, graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto] | None = None
    ) -> None:
        super().__init__(list(graph.node) if nodes is None else nodes)
        self.graph = graph

    @cached_property
    def tensors(self) -> Mapping[str, onnx.TensorProto]:
        """The initializers by name."""
        return tensors_of(self.graph)

    @cached_property
    def constants(self) -> Mapping[str, onnx.TensorProto]:
        """The initializers and the tensors of Constant nodes by name."""
        computed = {
            name: attribute.t
            for node in self.nodes
            if node.op_type == "Constant"
            for name, attribute in zip(filter(None, node.output), node.attribute)
            if attribute.name == "value"
        }
        return {**self.tensors, **computed}

    @cached_property
    def inputs(self) -> set[str]:
        """The inputs that have no default value."""
        return {*required_inputs(self.graph)}

    @cached_property
    def outputs(self) -> set[str]:
        """The outputs of the graph."""
        return {value.name for value in self.graph.output}

    def only_reader(self, name: str) -> onnx.NodeProto | None:
        """Return the node that alone reads a value, at one of its inputs; else None.

        None for an output of the graph.
        """
        readers = self.readers[name]
        is_alone = len(readers) == 1 and name not in self.outputs
        return readers[0] if is_alone and [*readers[0].input].count(name) == 1 else None
