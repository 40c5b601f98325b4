"""Stop gradients at values of a model, where the network detached them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxfit.checks import matching_names, name_list
from onnxfit.errors import SettingError
from onnxfit.graph import scopes
from onnxfit.graph.values import GraphBuilder
from onnxfit.graph.weights import FLOATS


def stop_gradients(model: ir.Model, patterns: Sequence[str] | str) -> None:
    """Let the nodes that read some values get them without a gradient, in place.

    An output of the model keeps its gradient, for its own loss.

    - `model`: a normalized model.
    - `patterns`: names or fnmatch patterns of values, one or several; "!pattern" excludes.

    Raises UnknownNameError if a pattern matches no float value, and SettingError if a pattern is
    the name of an initializer.
    """
    graph = model.graph
    computed = [value for node in graph for value in node.outputs]
    values = {v.name: v for v in (*graph.inputs, *computed) if v.name and v.dtype in FLOATS}
    selected = _selected(graph, name_list("stop_gradients", patterns), list(values))
    bodies = list(graph.subgraphs())
    op = GraphBuilder(graph)
    for name in selected:
        value = values[name]
        uses = tuple(value.uses())
        with op.scope(scopes.STOP_GRADIENT):
            stopped = op.stop_gradient(op.wrap(value)).ir
        for node, i in uses:
            node.replace_input_with(i, stopped)
        for body in bodies:  # a branch may return a captured value unchanged
            body.outputs[:] = [stopped if v is value else v for v in body.outputs]
    if selected:
        graph.sort()


def _selected(graph: ir.Graph, patterns: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names that patterns select, in the order of the graph."""
    excluding = [p for p in patterns if p.startswith("!") and p not in known]
    including = [p for p in patterns if p not in excluding]
    selected = set(known) if excluding and not including else set()
    for pattern in including:
        if pattern in graph.initializers:
            raise SettingError(
                f"stop_gradients has {pattern!r}, which is an initializer. Freeze it with"
                f" weights=['!{pattern}']."
            )
        selected |= matching_names(pattern, known, "float value of the model")
    for pattern in excluding:
        selected -= matching_names(pattern[1:], known, "float value of the model")
    return [name for name in known if name in selected]
