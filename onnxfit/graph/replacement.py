"""Build the nodes and initializers that replace one node of a ModelProto."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.graph.index import attributes_of
from onnxfit.graph.names import unused

Array = npt.NDArray[Any]


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Set the nodes of a graph, in place. Some may already be in the graph."""
    copies = onnx.GraphProto(node=nodes)  # deleting the list destroys the nodes in it
    del graph.node[:]
    graph.node.extend(copies.node)


class NodeReplacement:
    """The nodes and initializers that replace one node. Their names begin with the node's name."""

    def __init__(self, node: onnx.NodeProto, names: set[str]) -> None:
        """`names` are all names of the graph, to which new names are added."""
        self.node = node
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.attributes = attributes_of(node)
        self._prefix = node.name or node.output[0]
        self._names = names

    def __call__(
        self,
        op_type: str,
        *inputs: str,
        output: str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add an operator with one output; return the name of that output."""
        output = output or self.unique_name(f"{self._prefix}/{op_type}:0")
        return self.add(op_type, inputs, [output], domain, **attributes)[0]

    def add(
        self,
        op_type: str,
        inputs: tuple[str, ...],
        outputs: list[str],
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add an operator with outputs of these names; return the names."""
        name = self.unique_name(f"{self._prefix}/{op_type}")
        # onnxruntime 1.19 crashes on some operators whose last input has an empty name
        count = max((i + 1 for i, value in enumerate(inputs) if value), default=0)
        self.nodes.append(
            onnx.helper.make_node(
                op_type, inputs[:count], outputs, name=name, domain=domain, **attributes
            )
        )
        return outputs

    def initializer(self, name: str, values: Array) -> str:
        """Add an initializer, whose name is `name` or begins with it; return its name."""
        name = self.unique_name(name)
        self.initializers.append(onnx.numpy_helper.from_array(np.asarray(values, order="C"), name))
        return name

    def constant(self, values: Array) -> str:
        """Add a Constant: initializers would count as weights."""
        tensor = onnx.numpy_helper.from_array(values, "value")
        return self("Constant", value=tensor)

    def unique_name(self, stem: str) -> str:
        """Reserve and return a name that the graph does not have, `stem` if it is free."""
        name = unused(stem, self._names.__contains__)
        self._names.add(name)
        return name
