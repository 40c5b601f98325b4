"""The scopes that TensorBoard's graph tab folds, for models whose names have none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import onnx

Scope = tuple[str, ...]

# torch's exporter names nodes without scopes, and writes the modules they come from beside them:
# ['', 'layer1', 'layer1.0', 'add_3']
TORCH_SCOPES = "pkg.torch.onnx.name_scopes"


def scopes_of_nodes(graph: onnx.GraphProto) -> list[Scope]:
    """The scope of each node, outermost first.

    It is what the node's name has before its last "/"; else the module that the exporter noted;
    else that of the module whose weight the node reads (`layer1.0.conv1.weight`: layer1, 0); else
    what the scopes of the nodes before and after it have in common. What is not in the name is
    shortened: a step that all nodes share says nothing, and neither does a scope of one kind of
    operator.
    """
    weights = {tensor.name for tensor in graph.initializer}
    named = [_named(node) for node in graph.node]
    known = [
        name if name is not None else _noted(node, weights) for name, node in zip(named, graph.node)
    ]
    found = _filled(graph, known, weights)
    loose = [i for i, name in enumerate(named) if name is None]
    operators = [graph.node[i].op_type for i in loose]
    for i, scope in zip(
        loose, _shortened([found[i] for i in loose], operators, [scope for scope in named if scope])
    ):
        found[i] = scope
    return found


def name_of_weight(name: str, readers: Iterable[Scope]) -> str:
    """Where an initializer is drawn: beside what reads it, without the part of its name that the
    scope repeats.
    """
    scope = _common(readers) or ()
    if "/" in name or not scope:
        return name
    module, parts = ".".join(scope), name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:i])
        if f".{prefix}".endswith(f".{module}") or f".{module}".endswith(f".{prefix}"):
            return "/".join([*scope, ".".join(parts[i:])])
    return "/".join([*scope, name])


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """The tensors a node reads, and those that its bodies may read."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            for inner in body.node:
                yield from reads(inner)


def _named(node: onnx.NodeProto) -> Scope | None:
    """The scope in a node's name, or, if it has none, in that of its first output."""
    name = node.name or next(iter(node.output), "")
    return tuple(filter(None, name.split("/")[:-1])) if "/" in name else None


def _noted(node: onnx.NodeProto, weights: set[str]) -> Scope | None:
    for entry in node.metadata_props:
        if entry.key == TORCH_SCOPES:
            *_, module, _ = ["", "", *re.findall(r"'([^']*)'", entry.value)]
            return tuple(filter(None, module.split(".")))
    return _common(
        tuple(name.split(".")[:-2]) for name in node.input if name in weights and "." in name
    )


def _filled(
    graph: onnx.GraphProto, known: Sequence[Scope | None], weights: set[str]
) -> list[Scope]:
    """Unknown scopes from what is known before and after; the model's inputs and outputs are in
    none.
    """
    before: dict[str, Scope | None] = {
        value.name: () for value in graph.input if value.name not in weights
    }
    after: dict[str, list[Scope | None]] = {value.name: [()] for value in graph.output}
    arriving: list[Scope | None] = []
    for node, scope in zip(graph.node, known):
        arriving.append(
            scope if scope is not None else _common(before.get(name) for name in reads(node))
        )
        before.update(dict.fromkeys(node.output, arriving[-1]))
    leaving: list[Scope | None] = []
    for node, scope in zip(reversed(graph.node), reversed(known)):
        leaving.append(
            scope
            if scope is not None
            else _common(there for name in node.output for there in after.get(name, []))
        )
        for name in reads(node):
            after.setdefault(name, []).append(leaving[-1])
    return [_common(pair) or () for pair in zip(arriving, reversed(leaving))]


def _shortened(
    scopes: Sequence[Scope], operators: Sequence[str], others: Sequence[Scope]
) -> list[Scope]:
    first = {scope[:1] for scope in (*scopes, *others) if scope}
    while len(first) == 1 and not others:
        scopes = [scope[1:] for scope in scopes]
        first = {scope[:1] for scope in scopes if scope}
    kinds: dict[Scope, set[str]] = {}
    for scope, operator in zip(scopes, operators):
        for i in range(len(scope)):
            kinds.setdefault(scope[: i + 1], set()).add(operator)
    several = {scope for scope, found in kinds.items() if len(found - {"Constant"}) > 1}
    return [
        next((scope[:i] for i in range(len(scope), 0, -1) if scope[:i] in several), ())
        for scope in scopes
    ]


def _common(scopes: Iterable[Scope | None]) -> Scope | None:
    """The steps that scopes begin with alike; None where none is known."""
    known = [scope for scope in scopes if scope is not None]
    if not known:
        return None
    shared: list[str] = []
    for steps in zip(*known):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    return tuple(shared)
