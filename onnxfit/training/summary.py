"""The summary of a trainer, as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxfit.graph.model import spec_of
from onnxfit.graph.sharing import reader_counts, used_by
from onnxfit.graph.weights import all_weights
from onnxfit.step.objectives import Objective
from onnxfit.step.recipe import Recipe

HEADER = ("weight", "shape", "size", "trained", "penalty")
SIZE_COLUMN = 2  # aligned to the right


def summary(recipe: Recipe) -> str:
    """Return the inputs, the outputs with their losses and the optimizer, then a table of the
    weights: shape, size, whether trained and whether several nodes read it, penalty.

    An output whose loss has `from_logits` says whether it is taken as logits or probabilities, and
    why.
    """
    graph = recipe.model.graph
    listed = {*all_weights(recipe.model), *recipe.weights, *recipe.statistics}
    sizes = {
        name: _shape(graph.initializers[name]) for name in graph.initializers if name in listed
    }
    total = sum(int(np.prod(shape)) for shape in sizes.values())
    trained = sum(int(np.prod(sizes[name])) for name in recipe.weights)
    lines = [f"input   {spec}" for spec in recipe.inputs]
    for value in graph.outputs:
        lines += _output_lines(value, recipe.objectives.get(value.name or ""))
    lines += [f"optimizer  {recipe.optimizer!r}", ""]
    readers = reader_counts(recipe.model)
    lines += _table([_row(recipe, name, shape, readers[name]) for name, shape in sizes.items()])
    lines += ["", f"{trained:,} of {total:,} numbers are trained"]
    return "\n".join(lines)


def _shape(initializer: ir.Value) -> tuple[int, ...]:
    # An initializer's sizes are numbers.
    return tuple(int(d) for d in spec_of(initializer).shape or ())  # type: ignore[arg-type]


def _output_lines(output: ir.Value, objective: Objective | None) -> list[str]:
    line = f"output  {spec_of(output)}"
    if objective is None:
        return [line]
    lines = [f"{line}   loss {objective.loss!r}"]
    if objective.decision is not None:
        kind = "logits" if objective.decision.logits else "probabilities"
        lines.append(f"        taken as {kind}: {objective.decision.reason}")
    return lines


def _row(recipe: Recipe, name: str, shape: tuple[int, ...], readers: int) -> tuple[str, ...]:
    if name in recipe.weights:
        trained = "yes"
    else:
        trained = "running statistic" if name in recipe.statistics else "frozen"
    if readers > 1:
        trained += f", {used_by(readers)}"
    penalty = recipe.penalties.get(name)
    return (
        name,
        "×".join(map(str, shape)) or "scalar",
        f"{int(np.prod(shape)):,}",
        trained,
        repr(penalty) if penalty else "",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    rows = [HEADER, *rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i == SIZE_COLUMN else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("─" * width for width in widths))
    return lines
