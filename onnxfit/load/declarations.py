"""Compare the declared shapes of a model's outputs with the computed ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import onnx_ir as ir

from onnxfit.errors import ModelError, warn_user
from onnxfit.graph.inference import infer_outputs

MADE_UP = "unk__"  # ONNX's inference names sizes that it does not know so; equal names mean nothing


@dataclass(frozen=True, eq=False)
class WrongDeclaration:
    """An output whose declared shape contradicts the computed shape.

    `node` determines the computed shape. `fixes_batch` tells whether it fixes the declared batch.
    """

    value: ir.Value
    declared: ir.Shape
    computed: ir.Shape
    node: ir.Node
    fixes_batch: bool

    def __str__(self) -> str:
        return (
            f"Output {self.value.name!r} is declared with shape {self.declared}, but"
            f" {self.node.op_type} {self.node.name!r} determines shape {self.computed}."
        )


def wrong_declarations(
    graph: ir.Graph, declared: Mapping[str, ir.Shape | None]
) -> list[WrongDeclaration]:
    """Return the outputs whose computed sizes differ from their declared sizes.

    A size named like the first size of an input is the batch. No node may fix the batch, and no
    declaration may.

    - `graph`: a graph whose shapes have been inferred.
    - `declared`: the declared shapes of its outputs.
    """
    first = [v.shape[0] for v in graph.inputs if v.shape]
    names = {size.value for size in first if isinstance(size, ir.SymbolicDim)} - {None}
    batch = {name for name in names if name and not name.startswith(MADE_UP)}
    found = []
    for value in graph.outputs:
        node = value.producer()
        shape = declared.get(value.name or "")
        computed = None if node is None else _computed_shape(graph, node, value)
        if node is None or shape is None or computed is None:
            continue
        pairs = list(zip(shape, computed))
        fixed = any(_is_batch(old, batch) and isinstance(new, int) for old, new in pairs)
        differ = any(
            isinstance(old, int)
            and old >= 0
            and (_is_batch(new, batch) if isinstance(new, ir.SymbolicDim) else old != new)
            for old, new in pairs
        )
        if len(shape) != len(computed) or fixed or differ:
            fixed = fixed and len(shape) == len(computed)
            source = _first_fixed(node) if fixed else node
            found.append(WrongDeclaration(value, shape, computed, source, fixed))
    return found


def correct_declarations(found: Sequence[WrongDeclaration]) -> None:
    """Give outputs their computed shapes, in place, with a warning, as onnxruntime does.

    Raises ModelError if a node fixes the batch, because the model cannot run other batches.
    """
    for wrong in found:
        if wrong.fixes_batch:
            raise ModelError(
                f"{wrong} Declare the computed shape. If a constant fixes the batch size, use"
                " onnxfit.dynamic_batch(model)."
            )
    for wrong in found:
        wrong.value.shape = wrong.computed
    if found:
        warn_user(
            f"{' '.join(map(str, found))} The computed shape is used. Correct the declaration in"
            " the file to avoid this warning."
        )


def _is_batch(size: int | ir.SymbolicDim, batch: Collection[str | None]) -> bool:
    return isinstance(size, ir.SymbolicDim) and size.value in batch


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
