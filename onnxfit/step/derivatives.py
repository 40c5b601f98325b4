"""Gradients as graphs that can be differentiated again, for second and higher derivatives.

    values kept by the forward pass ──┐
    inputs, weights ──► forward ──► gradients ──► derivative of the gradients
    gradients of the outputs ─────────┘                     ▲
    gradients of the gradients ─────────────────────────────┘

Such a graph computes gradients from the model's inputs on, because a derivative follows every path
from the gradients to the inputs. The values that the forward pass kept are not computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxfit.errors import GradientError
from onnxfit.gradients import BlockedError, GradientSource
from onnxfit.gradients.paths import differentiable_path, leaves_of, outputs_of, reachable_values
from onnxfit.graph.model import complete_shapes, model_errors
from onnxfit.graph.values import GraphBuilder, values_of
from onnxfit.step.finish import prune
from onnxfit.step.split import JoinedPasses, subgraph, values_read


@dataclass(frozen=True, eq=False)
class GradientGraph:
    """A graph that computes gradients, which are its outputs.

    `stored` are the values that the caller has from the forward pass, `source` differentiates.
    `device` is as for GraphBuilder.
    """

    model: ir.Model
    stored: tuple[str, ...]
    source: GradientSource
    device: str

    def depending_on(self, wrt: Iterable[str]) -> frozenset[str]:
        """Return the outputs that depend on inputs in a differentiable way."""
        graph = self.model.graph
        path = differentiable_path(graph, graph.outputs, leaves_of(graph, wrt))
        on_path = {node.outputs[i] for node, _, positions in path for i in positions}
        return frozenset(v.name or "" for v in graph.outputs if v in on_path)

    @model_errors()
    def derivative(self, outputs: Sequence[str], wrt: Sequence[str]) -> Derivative | None:
        """Return the pullback of `outputs` to the inputs `wrt`; None if it is zero.

        GradientError: the source cannot differentiate a node.
        """
        if self.source.name == "onnxruntime":
            raise GradientError(
                "gradient='onnxruntime' has first derivatives only, because onnxruntime's gradient"
                " operators have no gradient. For second derivatives, use gradient='auto'."
            )
        varying = self.depending_on(wrt)
        outputs = [name for name in outputs if name in varying]
        if not outputs:
            return None
        work = self.model.clone()
        work.graph.outputs[:] = outputs_of(work.graph, *outputs)
        work = complete_shapes(prune(GraphBuilder(work.graph)))
        reached = reachable_values(work, outputs, wrt)
        try:
            pullback = self.source.add_pullback(work, outputs, reached)
        except BlockedError as error:
            raise GradientError(f"The gradient has no derivative. {error}") from error
        input_gradients = pullback.input_gradients.values()
        pullback.model.graph.outputs[:] = outputs_of(pullback.model.graph, *input_gradients)
        graph = GradientGraph(pullback.model, self.stored, self.source, self.device)
        return Derivative(graph, pullback.output_gradients, pullback.input_gradients)

    def compilable(self) -> onnx.ModelProto:
        """Return the graph that reads the stored values and the inputs that it needs."""
        graph = self.model.graph
        values = values_of(graph)
        stored = [name for name in self.stored if name in values]
        inputs = [v.name or "" for v in graph.inputs]
        outputs = [v.name or "" for v in graph.outputs]
        return subgraph(
            graph, "derivative", inputs, stored, outputs, device=self.device, only_read=True
        )


@dataclass(frozen=True)
class Derivative:
    """The derivative of gradients.

    `output_gradients` maps an output of the differentiated graph to the input for its gradient, and
    `input_gradients` an input of that graph to the output with its gradient.
    """

    graph: GradientGraph
    output_gradients: dict[str, str]
    input_gradients: dict[str, str]


def gradient_graph(joined: JoinedPasses, source: GradientSource) -> GradientGraph:
    """Return the gradients of a step as a graph, which replaces the outputs of `joined`."""
    graph = joined.graph
    graph.outputs[:] = outputs_of(graph, *joined.pullback.input_gradients.values())
    return GradientGraph(joined.pullback.model, tuple(joined.kept_results), source, joined.device)


def derivative_inputs(joined: JoinedPasses) -> tuple[str, ...]:
    """Return the inputs, apart from the kept values, that a derivative of the gradients reads.

    It reads the inputs and outputs of the nodes between the gradients and what they depend on.
    """
    graph, pullback = joined.graph, joined.pullback
    gradients = outputs_of(graph, *pullback.input_gradients.values())
    leaves = leaves_of(graph, [*pullback.input_gradients, *pullback.output_gradients.values()])
    path = differentiable_path(graph, gradients, leaves)
    pending = [v for node, _, _ in path for v in (*values_read(node), *node.outputs)]
    seen = {*joined.kept, *joined.output_gradients}
    inputs: dict[str, None] = {}
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is not None:
            pending += values_read(node)
        elif value.name and value.name not in graph.initializers:
            inputs[value.name] = None
    return tuple(inputs)
