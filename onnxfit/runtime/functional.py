"""A model as functions without state.

Each call takes every input, weight and statistic, and returns every result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass

from onnxfit.gradients import gradient_source
from onnxfit.gradients.paths import reachable_values
from onnxfit.graph import names
from onnxfit.graph.garbage import gc_disabled
from onnxfit.graph.model import spec_of, tensor_outputs
from onnxfit.graph.values import GraphBuilder
from onnxfit.graph.weights import all_weights, select_weights
from onnxfit.load.normalize import normalize
from onnxfit.load.training_form import RANDOM, keep_batch_norms, to_evaluation_form
from onnxfit.optimizers import SGD
from onnxfit.runtime.backends.shape_cache import ShapeCache, Specs
from onnxfit.runtime.device import Device
from onnxfit.runtime.session import StatelessSession
from onnxfit.step.derivatives import GradientGraph, derivative_inputs, gradient_graph
from onnxfit.step.recipe import Recipe
from onnxfit.step.split import SplitStep, divide, join_passes

Shapes = tuple[tuple[int, ...], ...]
# Training mode; the weights and inputs whose gradients are computed; the name of the device.
PassesKind = tuple[bool, tuple[str, ...], str]


class Gradient:
    """A gradient as a function without state, which can be differentiated again.

    - `session`: computes the gradient.
    - `output_gradients`: output of the differentiated function -> input for its gradient.
    - `input_gradients`: input of the differentiated function -> output with its gradient.
    - `build`: returns the gradient as a graph to differentiate. It is called when a derivative is
      first asked for.
    - `compile_graph`: returns the session of a derivative's graph.
    """

    def __init__(
        self,
        session: StatelessSession,
        output_gradients: Mapping[str, str],
        input_gradients: Mapping[str, str],
        build: Callable[[], GradientGraph],
        compile_graph: Callable[[onnx.ModelProto], StatelessSession],
    ) -> None:
        self.session = session
        self.output_gradients = output_gradients
        self.input_gradients = input_gradients
        self._build = build
        self._compile_graph = compile_graph
        self._dependent: dict[tuple[str, ...], frozenset[str]] = {}
        self._derivatives: dict[tuple[tuple[str, ...], tuple[str, ...]], Gradient | None] = {}

    @cached_property
    def _graph(self) -> GradientGraph:
        return self._build()

    def depending_on(self, wrt: tuple[str, ...]) -> frozenset[str]:
        """Return the outputs that depend on inputs in a differentiable way."""
        if wrt not in self._dependent:
            self._dependent[wrt] = self._graph.depending_on(wrt)
        return self._dependent[wrt]

    def derivative(self, outputs: tuple[str, ...], wrt: tuple[str, ...]) -> Gradient | None:
        """Return the gradient of outputs with respect to inputs, compiled if necessary.

        None if the outputs do not depend on the inputs. GradientError: it cannot be computed.
        """
        kind = outputs, wrt
        if kind not in self._derivatives:
            with gc_disabled():
                self._derivatives[kind] = self._compile(outputs, wrt)
        return self._derivatives[kind]

    def _compile(self, outputs: tuple[str, ...], wrt: tuple[str, ...]) -> Gradient | None:
        derivative = self._graph.derivative(outputs, wrt)
        if derivative is None:
            return None
        graph = derivative.graph
        session = self._compile_graph(graph.compilable())
        return Gradient(
            session,
            derivative.output_gradients,
            derivative.input_gradients,
            lambda: graph,
            self._compile_graph,
        )


@dataclass(frozen=True, eq=False)
class FunctionalPasses:
    """The forward and the backward pass of a model as functions without state.

    `gradient` is the backward pass; None if no output depends on a value to differentiate with
    respect to. `statistics` are the running statistics that the forward pass updates. `saved` are
    the values that the backward pass and its derivatives read.
    """

    graphs: SplitStep
    forward: StatelessSession
    gradient: Gradient | None
    statistics: tuple[str, ...]
    saved: tuple[str, ...]

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the values that a forward pass returns: outputs and updated statistics."""
        return (*self.graphs.outputs, *map(names.updated, self.statistics))


class FunctionalModel:
    """A model whose forward and backward passes are compiled on demand.

    - `model`: the model, which stays unchanged.
    - `weights`: names and patterns as for `onnxfit.Trainer`; None for all weights.
    - `gradient`, `batch_norm`, `threads`: as for `onnxfit.Trainer`.

    `inputs` are the specs of the inputs, `outputs` the names of the outputs. `recipe` is the model
    in training mode, with its `weights` and `statistics`. `state` maps their names to their specs.
    `caches` maps each kind of passes to those compiled for it.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        weights: Sequence[str] | str | None,
        *,
        gradient: str,
        batch_norm: str,
        threads: int | None,
    ) -> None:
        work = normalize(model)
        tensors = tensor_outputs(work)
        work.graph.outputs[:] = [v for v in work.graph.outputs if v.name in tensors]
        if weights is None:
            selected = all_weights(work)  # a layer without weights is fine, unlike in a Trainer
        else:
            selected = select_weights(work, weights) if len(weights) else []
        keep_batch_norms(work, batch_norm)
        self.inputs = [spec_of(v) for v in work.graph.inputs]
        self.outputs = tuple(v.name or "" for v in work.graph.outputs)
        self.recipe = Recipe(
            model=work,
            weights=tuple(selected),
            objectives={},
            penalties={},
            optimizer=SGD(),  # not used: the caller updates the weights
            optimizers={},
            gradient=gradient_source(gradient),
            slots={},
            batch_norm=batch_norm,
        )
        self._evaluation = _evaluation_recipe(self.recipe)
        self.state = {name: spec_of(work.graph.initializers[name]) for name in self.recipe.state}
        self._threads = threads
        self.caches: dict[PassesKind, ShapeCache[FunctionalPasses]] = {}

    @property
    def is_random(self) -> bool:
        """Whether the model has operators that draw random numbers in training mode."""
        nodes = ir.traversal.RecursiveGraphIterator(self.recipe.model.graph)
        return any(
            node.domain == "" and (node.op_type == "Dropout" or node.op_type in RANDOM)
            for node in nodes
        )

    def passes(
        self, training: bool, wrt: tuple[str, ...], device: str, shapes: Shapes
    ) -> FunctionalPasses:
        """Return the passes for inputs of these shapes, compiled if necessary.

        - `training`: Dropout drops, and BatchNormalization uses the batch.
        - `wrt`: the weights and inputs whose gradients are computed.
        - `device`: the name of the device.
        - `shapes`: the shapes of the inputs, in the model's order.
        """
        kind = training, wrt, device
        cache = self.caches.get(kind)
        if cache is None:
            # Inference gains little from known sizes, unlike a gradient.
            cache = self.caches.setdefault(kind, ShapeCache(only_any_size=not wrt))
        passes = cache.get(shapes)
        if passes is None:
            passes = cache.compile(
                shapes,
                {spec.name: replace(spec, shape=s) for spec, s in zip(self.inputs, shapes)},
                lambda: {spec.name: spec for spec in self.inputs},
                lambda specs: self._compile(kind, specs),
            )
        return passes

    def _compile(self, kind: PassesKind, specs: Specs) -> FunctionalPasses:
        training, wrt, device_name = kind
        recipe = self.recipe if training else self._evaluation
        device = Device.parse(device_name)
        leaves = reachable_values(recipe.model, self.outputs, wrt)
        # Without a gradient, onnxruntime's builder is not needed.
        source = gradient_source(recipe.gradient.name if leaves else "onnx", device.forms)
        recipe = replace(recipe, gradient=source, device=device.forms)
        outputs = tuple(dict.fromkeys(self.outputs))
        joined = join_passes(recipe, specs, outputs, leaves)
        graphs = divide(joined)
        forward = StatelessSession(graphs.forward, device, self._threads, "forward")
        if not leaves:
            return FunctionalPasses(graphs, forward, None, recipe.statistics, ())
        gradient = Gradient(
            StatelessSession(graphs.backward, device, self._threads, "backward"),
            graphs.output_gradients,
            graphs.input_gradients,
            lambda: gradient_graph(join_passes(recipe, specs, outputs, leaves), source),
            lambda model: StatelessSession(model, device, self._threads, "derivative"),
        )
        saved = (*graphs.kept, *derivative_inputs(joined))
        return FunctionalPasses(graphs, forward, gradient, recipe.statistics, saved)


def _evaluation_recipe(training: Recipe) -> Recipe:
    """Return the recipe of the model in evaluation mode.

    The running statistics are inputs like the weights, and BatchNormalization uses them unchanged.
    """
    model = ir.from_proto(ir.to_proto(training.model))
    to_evaluation_form(GraphBuilder(model.graph))
    TopologicalSortPass()(model)
    return replace(training, model=model, weights=training.state, batch_norm="frozen")
