"""Write operators without a rule in ONNX's definitions, before the shapes of a graph are inferred.

`backward.prepare` would do this as well, but after the inference of the whole model, which follows
the arithmetic of shapes in definitions. With unknown sizes, the gradient computes shapes in every
step: a transformer block with one Attention had 309 nodes instead of 165.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxfit.gradients import rules  # noqa: F401  # fills the table
from onnxfit.gradients.table import DECOMPOSITIONS, NOT_DIFFERENTIABLE, RULES, SUBGRAPHS, key_of
from onnxfit.graph.bodies import function_body
from onnxfit.graph.values import GraphBuilder


def write_definitions(op: GraphBuilder, weights: Iterable[str]) -> bool:
    """Replace operators that depend on weights and have no rule by their definitions, in place.

    - `weights`: names of inputs or initializers.

    Return whether an operator was replaced. Its definition may contain others with a definition,
    which are replaced as well.
    """
    graph = op.graph
    names = set(weights)
    reached = {v for v in (*graph.inputs, *graph.initializers.values()) if v.name in names}
    waiting = list(graph)[::-1]
    has_changed = False
    while waiting:
        node = waiting.pop()
        if not any(value in reached for value in node.inputs):
            continue
        body = None if _is_in_table(node) else function_body(node, graph)
        if body is None:
            reached.update(node.outputs)
            continue
        before = set(graph)
        with op.replacing(node) as replace:
            replace(*body(op))
        waiting += [added for added in graph if added not in before][::-1]
        has_changed = True
    return has_changed


def _is_in_table(node: ir.Node) -> bool:
    tables = (RULES, DECOMPOSITIONS, SUBGRAPHS, NOT_DIFFERENTIABLE)
    return any(key_of(node) in table for table in tables)
