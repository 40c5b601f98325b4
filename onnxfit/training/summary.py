"""Text for people: what a trainer trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxfit.graph.model import spec_of
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.weights import all_weights
from onnxfit.step.recipe import Recipe


def summary(recipe: Recipe, inputs: Sequence[TensorSpec]) -> str:
    """Inputs, outputs and losses, then a table of the weights: shape, size, whether trained,
    penalty.
    """
    graph = recipe.model.graph
    trained, running = set(recipe.weights), set(recipe.statistics)
    rows = [("weight", "shape", "size", "trained", "penalty")]
    total = learned = 0
    for name in [
        n for n in graph.initializers if n in {*all_weights(recipe.model), *trained, *running}
    ]:
        # an initializer's sizes are numbers
        shape = tuple(int(d) for d in spec_of(graph.initializers[name]).shape or ())  # type: ignore[arg-type]
        size = int(np.prod(shape))
        total += size
        learned += size if name in trained else 0
        state = "yes" if name in trained else "running statistic" if name in running else "frozen"
        penalty = recipe.penalties.get(name)
        rows.append(
            (
                name,
                "×".join(map(str, shape)) or "scalar",
                f"{size:,}",
                state,
                repr(penalty) if penalty else "",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join(
            cell.rjust(w) if i == 2 else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("─" * w for w in widths))
    heads = [f"input   {spec}" for spec in inputs]
    for value in graph.outputs:
        objective = recipe.objectives.get(value.name or "")
        heads.append(
            f"output  {spec_of(value)}" + (f"   loss {objective.loss!r}" if objective else "")
        )
    return "\n".join(
        [
            *heads,
            f"optimizer  {recipe.optimizer!r}",
            "",
            *lines,
            "",
            f"{learned:,} of {total:,} numbers are trained",
        ]
    )
