"""The nodes between weights and loss as a model for onnxruntime's builder.

The nodes that the builder adds to this model are then appended to the graph.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxfit.errors import GradientError
from onnxfit.gradients.backward import may_be_equal
from onnxfit.gradients.paths import PathNode
from onnxfit.graph import names

# The builder reads axes and shapes, so constants of up to this many elements are initializers of
# its model. Larger constants are inputs.
MAX_CONSTANT_ELEMENTS = 1024

LOSS_IN_FLOAT = "loss_in_float"


class ExtractedModel:
    """The nodes on the gradient path as a model.

    `model` has inner names ("n0", "v0", ...), which cannot collide with names that the builder
    adds. `loss` is the inner name of the loss, in float32.
    """

    def __init__(
        self, graph: ir.Graph, path: Sequence[PathNode], loss: str, weights: Sequence[str]
    ) -> None:
        self.graph = graph
        self.nodes = {f"n{i}": path_node.node for i, path_node in enumerate(path)}
        values = dict.fromkeys(
            value
            for node in self.nodes.values()
            for value in (*node.inputs, *node.outputs)
            if value is not None
        )
        self.values = {f"v{i}": value for i, value in enumerate(values)}
        self._inner_names = {value: name for name, value in self.values.items()}
        self._inner_by_name = {value.name: name for name, value in self.values.items()}
        empty = ir.Graph([], [], nodes=[], opset_imports=graph.opset_imports, name="extracted")
        self.model = ir.to_proto(ir.Model(empty, ir_version=10))
        self._add_values(set(weights))
        self._add_nodes()
        self.loss = self._add_loss(self.inner_name(loss))

    def inner_name(self, name: str) -> str:
        """Return the name in `model` of a value of the graph."""
        return self._inner_by_name[name]

    def with_original_names(self, text: str) -> str:
        """Return a text with inner names replaced by those of the graph."""

        def original(match: re.Match[str]) -> str:
            by_name = self.values if match[0].startswith("v") else self.nodes
            item = by_name.get(match[0])
            return match[0] if item is None else item.name or match[0]

        return re.sub(r"(?<![A-Za-z0-9])[nv]\d+(?![A-Za-z0-9])", original, text)

    def append_to_graph(self, built: onnx.ModelProto, weights: Sequence[str]) -> dict[str, str]:
        """Append the nodes that the builder added to the graph.

        Returns a mapping from weight to the name of its gradient.
        """
        self._check_unchanged(built.graph)
        added = self._added(built.graph)
        gradients = {value.name: value for node in added for value in node.outputs}
        for value in added.inputs:
            value.replace_all_uses_with(self.values[value.name or ""])
        used_names = self._used_names(weights)
        for value in list(added.initializers.values()):
            del added.initializers[value.name or ""]
            value.name = self._unique_name(value.name or "", used_names)
            self.graph.register_initializer(value)
        nodes = list(added)
        added.remove(nodes)
        for node in nodes:
            node.name = self._unique_name(node.name or "", used_names)
            for value in node.outputs:
                if value.name:
                    value.name = self._unique_name(value.name, used_names)
            self.graph.opset_imports.setdefault(node.domain, 1)
        self.graph.extend(nodes)
        by_weight = {weight: gradients[f"{self.inner_name(weight)}_grad"] for weight in weights}
        self._set_types(by_weight)
        return {weight: gradient.name or "" for weight, gradient in by_weight.items()}

    def _used_names(self, weights: Sequence[str]) -> set[str | None]:
        """Return the names of the graph, and the names that callers will give to the gradients."""
        used_names = {v.name for v in (*self.graph.inputs, *self.graph.initializers.values())}
        used_names.update(map(names.gradient, weights))
        for node in self.graph.all_nodes():
            used_names.add(node.name)
            used_names.update(v.name for v in node.outputs)
        return used_names

    def _set_types(self, gradients: dict[str, ir.Value]) -> None:
        """Give each gradient its weight's type and shape, or raise GradientError if they differ."""
        inputs = {v.name: v for v in self.graph.inputs}
        for name, gradient in gradients.items():
            weight = inputs[name]
            if not may_be_equal(gradient.shape, weight.shape):
                raise GradientError(
                    f"onnxruntime's gradient of {name!r} has shape {gradient.shape}, but the weight"
                    f" has shape {weight.shape}. Use gradient='onnx'."
                )
            gradient.shape = weight.shape
            gradient.type = weight.type

    def _add_values(self, weights: set[str]) -> None:
        """Add the values to the model: as small constants, as inputs, or as computed ones."""
        graph = self.model.graph
        computed = {v for node in self.nodes.values() for v in node.outputs}
        for name, value in self.values.items():
            constant = None
            if value not in computed and value.name not in weights:
                constant = ir.convenience.get_const_tensor(value)
            if constant is not None and constant.size <= MAX_CONSTANT_ELEMENTS:
                tensor = ir.serde.serialize_tensor(constant)
                tensor.name = name
                graph.initializer.append(tensor)
                continue
            info = ir.serde.serialize_value(value)
            info.name = name
            (graph.value_info if value in computed else graph.input).append(info)

    def _add_nodes(self) -> None:
        for name, node in self.nodes.items():
            proto = ir.serde.serialize_node(node)
            proto.name = name
            proto.input[:] = ["" if v is None else self._inner_names[v] for v in node.inputs]
            proto.output[:] = [self._inner_names[v] if v.name else "" for v in node.outputs]
            self.model.graph.node.append(proto)

    def _add_loss(self, loss: str) -> str:
        """Add the output that the builder starts from. It can start from float32 only."""
        graph = self.model.graph
        if self.values[loss].dtype != ir.DataType.FLOAT:
            to = onnx.TensorProto.FLOAT
            cast = onnx.helper.make_node("Cast", [loss], [LOSS_IN_FLOAT], LOSS_IN_FLOAT, to=to)
            graph.node.append(cast)
            loss = LOSS_IN_FLOAT
        graph.output.append(onnx.helper.make_tensor_value_info(loss, onnx.TensorProto.FLOAT, []))
        return loss

    def _check_unchanged(self, built: onnx.GraphProto) -> None:
        """Raise GradientError if the builder rewrote a node before it differentiated it."""
        before = {node.name: node for node in self.model.graph.node}
        after = {node.name: node for node in built.node}
        for name, original in self.nodes.items():
            ours = before[name]
            theirs = after.get(name, onnx.NodeProto())
            same = (
                ours.op_type == theirs.op_type
                and ours.input == theirs.input
                and ours.output == theirs.output
            )
            attributes = {a.name: a for a in theirs.attribute}
            if not same or any(attributes.get(a.name) != a for a in ours.attribute):
                raise GradientError(
                    f"onnxruntime's builder changed {original.op_type} {original.name!r}, so its"
                    " gradient may be wrong. Use gradient='onnx'."
                )

    def _added(self, built: onnx.GraphProto) -> ir.Graph:
        """Return the nodes that the builder added, as a graph whose inputs have inner names."""
        ours = {node.name for node in self.model.graph.node}
        nodes = [node for node in built.node if node.name not in ours]
        used = {name for node in nodes for name in node.input}
        added = onnx.GraphProto(name="added", node=nodes)
        added.input.extend(onnx.ValueInfoProto(name=name) for name in self.values if name in used)
        added.initializer.extend(
            t for t in built.initializer if t.name in used and t.name not in self.values
        )
        added.value_info.extend(
            v for v in (*built.value_info, *built.output) if v.name not in self.values
        )
        return ir.serde.deserialize_graph(added)

    def _unique_name(self, name: str, used_names: set[str | None]) -> str:
        """Add the name in terms of original names, with a number if in use; return the result."""
        stem = self.with_original_names(name)
        unique = stem
        count = 0
        while unique in used_names:
            count += 1
            unique = f"{stem}_{count}"
        used_names.add(unique)
        return unique
