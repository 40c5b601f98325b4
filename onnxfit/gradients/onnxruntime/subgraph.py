"""The nodes between weights and loss as a model of their own for onnxruntime's builder, and its
answer put back into the graph.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxfit.errors import GradientError
from onnxfit.gradients.paths import PathNode
from onnxfit.graph import names

MAX_CONSTANT_ELEMENTS = (
    # constants up to this size go to the builder, which reads axes and shapes; larger ones are
    # inputs to it
    1024
)


class Part:
    """`model` holds the nodes under names that meet none of the builder's;

    `target` is the name of its loss.
    """

    def __init__(
        self, graph: ir.Graph, path: Sequence[PathNode], loss: str, weights: Sequence[str]
    ) -> None:
        self.graph = graph
        self.nodes = {f"n{i}": path_node.node for i, path_node in enumerate(path)}
        values = dict.fromkeys(
            v
            for node in self.nodes.values()
            for v in (*node.inputs, *node.outputs)
            if v is not None
        )
        self.values = {f"v{i}": value for i, value in enumerate(values)}
        self._inner = {value: name for name, value in self.values.items()}
        self._inner_of = {value.name: name for name, value in self.values.items()}
        self.model = ir.to_proto(
            ir.Model(
                ir.Graph([], [], nodes=[], opset_imports=graph.opset_imports, name="part"),
                ir_version=10,
            )
        )
        self._fill(self.model.graph, set(weights))
        self.target = self._end(self.model.graph, self.inner(loss))

    def inner(self, name: str) -> str:
        """A value's name in the part."""
        return self._inner_of[name]

    def readable(self, text: str) -> str:
        """A text of the builder's with the graph's own names."""

        def own(match: re.Match[str]) -> str:
            thing = (self.values if match[0][0] == "v" else self.nodes).get(match[0])
            return match[0] if thing is None else thing.name or match[0]

        return re.sub(r"(?<![A-Za-z0-9])[nv]\d+(?![A-Za-z0-9])", own, text)

    def graft(self, built: onnx.ModelProto, weights: Sequence[str]) -> dict[str, str]:
        """Move the nodes that the builder added to the end of the graph; weight -> name of its
        gradient.
        """
        self._check_forward(built.graph)
        added = self._added(built.graph)
        gradients = {value.name: value for node in added for value in node.outputs}
        for value in added.inputs:
            value.replace_all_uses_with(self.values[value.name or ""])
        taken = {v.name for v in (*self.graph.inputs, *self.graph.initializers.values())}
        taken.update(map(names.gradient, weights))  # left to whoever hands the gradients out
        taken.update(
            name
            for node in self.graph.all_nodes()
            for name in (node.name, *(v.name for v in node.outputs))
        )
        found: dict[str, str] = {}
        for value in list(added.initializers.values()):
            del added.initializers[value.name or ""]
            value.name = self._fresh(value.name or "", taken)
            self.graph.register_initializer(value)
        nodes = list(added)
        added.remove(nodes)
        for node in nodes:
            node.name = self._fresh(node.name or "", taken)
            for value in node.outputs:
                value.name = self._fresh(value.name, taken) if value.name else value.name
            self.graph.opset_imports.setdefault(node.domain, 1)
        self.graph.extend(nodes)
        inputs = {v.name: v for v in self.graph.inputs}
        for weight in weights:
            gradient, like = gradients[f"{self.inner(weight)}_grad"], inputs[weight]
            if not _agree(gradient.shape, like.shape):
                raise GradientError(
                    f"The builder's gradient of {weight}{like.shape} has another shape,"
                    f" {gradient.shape}."
                )
            gradient.shape, gradient.type = like.shape, like.type
            found[weight] = gradient.name or ""
        return found

    def _fill(self, part: onnx.GraphProto, weights: set[str]) -> None:
        made = {v for node in self.nodes.values() for v in node.outputs}
        for name, value in self.values.items():
            constant = (
                None
                if value in made or value.name in weights
                else ir.convenience.get_const_tensor(value)
            )
            if constant is not None and constant.size <= MAX_CONSTANT_ELEMENTS:
                tensor = ir.serde.serialize_tensor(constant)
                tensor.name = name
                part.initializer.append(tensor)
            else:
                info = ir.serde.serialize_value(value)
                info.name = name
                (part.value_info if value in made else part.input).append(info)
        for name, node in self.nodes.items():
            proto = ir.serde.serialize_node(node)
            proto.name = name
            proto.input[:] = [self._inner[v] if v is not None else "" for v in node.inputs]
            proto.output[:] = [self._inner[v] if v.name else "" for v in node.outputs]
            part.node.append(proto)

    def _end(self, part: onnx.GraphProto, loss: str) -> str:
        """The name that the builder starts from, in float32: it knows no other start."""
        if self.values[loss].dtype != ir.DataType.FLOAT:
            part.node.append(
                onnx.helper.make_node(
                    "Cast",
                    [loss],
                    ["loss_in_float"],
                    name="loss_in_float",
                    to=onnx.TensorProto.FLOAT,
                )
            )
            loss = "loss_in_float"
        part.output.append(onnx.helper.make_tensor_value_info(loss, onnx.TensorProto.FLOAT, []))
        return loss

    def _check_forward(self, built: onnx.GraphProto) -> None:
        """The builder may rewrite what it differentiates; the gradient of something else is
        refused.
        """
        before, after = (
            {node.name: node for node in graph.node} for graph in (self.model.graph, built)
        )
        for name, mine in self.nodes.items():
            node, other = before[name], after.get(name, onnx.NodeProto())
            written = {a.name: a for a in other.attribute}
            same = (node.op_type, node.input, node.output) == (
                other.op_type,
                other.input,
                other.output,
            )
            if not same or any(written.get(a.name) != a for a in node.attribute):
                raise GradientError(
                    f"onnxruntime's builder changed {mine.op_type} {mine.name!r}, so that its"
                    " gradient cannot be trusted."
                )

    def _added(self, built: onnx.GraphProto) -> ir.Graph:
        ours = {node.name for node in self.model.graph.node}
        nodes = [node for node in built.node if node.name not in ours]
        used = {name for node in nodes for name in node.input}
        part = onnx.GraphProto(name="added", node=nodes)
        part.input.extend(onnx.ValueInfoProto(name=name) for name in self.values if name in used)
        part.initializer.extend(
            t for t in built.initializer if t.name in used and t.name not in self.values
        )
        part.value_info.extend(
            v for v in (*built.value_info, *built.output) if v.name not in self.values
        )
        return ir.serde.deserialize_graph(part)

    def _fresh(self, name: str, taken: set[str | None]) -> str:
        name = stem = self.readable(name)
        count = 0
        while name in taken:
            count += 1
            name = f"{stem}_{count}"
        taken.add(name)
        return name


def _agree(shape: ir.Shape | None, other: ir.Shape | None) -> bool:
    if shape is None or other is None:
        return True
    return len(shape) == len(other) and all(
        a == b or not isinstance(a, int) or not isinstance(b, int) for a, b in zip(shape, other)
    )
