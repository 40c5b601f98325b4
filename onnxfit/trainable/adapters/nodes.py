"""Add nodes to the graph of a file, under unique names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from onnxfit.graph import protos
from onnxfit.load.completion import opset_of


class NodeWriter:
    """Collects the nodes of branches, one branch at a time.

    - `scope`: the prefix of their names.
    - `branch`: the nodes since `begin`.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.opset = opset_of(model) or 0
        self.in_use = protos.used_names(model)
        self.branch: list[onnx.NodeProto] = []
        self.scope = ""

    def begin(self, scope: str) -> list[onnx.NodeProto]:
        """Return the list of the next branch's nodes, whose names begin with `scope`."""
        self.scope, self.branch = scope, []
        return self.branch

    def unique(self, name: str) -> str:
        """Return an unused name in the scope."""
        return protos.unique_name(f"{self.scope}/{name}", self.in_use)

    def node(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node, and return the name of its output."""
        name = self.unique(op_type)
        self.branch.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def constant(self, value: npt.NDArray[Any]) -> str:
        """Return the name of a new initializer."""
        name = self.unique("constant")
        self.graph.initializer.append(numpy_helper.from_array(value, name))
        return name
