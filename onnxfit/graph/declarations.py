"""Compare the declared shapes of a model's outputs with the computed ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import onnx_ir as ir

from onnxfit.errors import ModelError
from onnxfit.graph.inference import infer_outputs


def require_declared_sizes(graph: ir.Graph, declared: Mapping[str, ir.Shape | None]) -> None:
    """Raise ModelError if an output's computed sizes differ from its declared sizes.

    A size named like the first size of an input is the batch; no node may fix it.

    - `graph`: a graph whose shapes have been inferred.
    - `declared`: the declared shapes of its outputs.
    """
    first = [v.shape[0] for v in graph.inputs if v.shape]
    batch = {size.value for size in first if isinstance(size, ir.SymbolicDim)} - {None}
    for value in graph.outputs:
        node = value.producer()
        shape = declared.get(value.name or "")
        computed = None if node is None else _computed_shape(graph, node, value)
        if node is None or shape is None or computed is None:
            continue
        if len(shape) != len(computed):
            raise _contradiction(value, shape, computed, node)
        for old, new in zip(shape, computed):
            fixes = isinstance(old, ir.SymbolicDim) and old.value in batch
            if isinstance(new, int) and (fixes or (isinstance(old, int) and 0 <= old != new)):
                raise _contradiction(value, shape, computed, _first_fixed(node) if fixes else node)


def _computed_shape(graph: ir.Graph, node: ir.Node, value: ir.Value) -> ir.Shape | None:
    """Return the shape that the node alone gives an output; None if unknown."""
    kept = [(v, v.type, v.shape) for v in node.outputs]
    value.shape = None
    with suppress(ValueError):  # reported when the model is used
        infer_outputs(graph, node)
    computed = value.shape
    for output, type_, shape in kept:
        output.type, output.shape = type_, shape
    return computed


def _first_fixed(node: ir.Node) -> ir.Node:
    """Return the first node before `node`, or `node`, whose output has only fixed sizes."""
    while True:
        made = [v for v in node.inputs if v is not None and v.producer() is not None]
        if not made or not all(v.shape is not None and v.shape.is_static() for v in made):
            return node
        if any(v is not None and v.is_graph_input() for v in node.inputs):
            return node
        producer = made[0].producer()
        assert producer is not None
        node = producer


def _contradiction(
    value: ir.Value, shape: ir.Shape, computed: ir.Shape, node: ir.Node
) -> ModelError:
    return ModelError(
        f"Output {value.name!r} is declared with shape {shape}, but {node.op_type} {node.name!r}"
        f" determines shape {computed}. Declare the computed shape. If a constant fixes the batch"
        " size, use onnxfit.dynamic_batch(model)."
    )
