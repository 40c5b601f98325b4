"""Find scopes for TensorBoard's graph tab to fold, for models whose names have no scopes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import onnx

__all__ = ["name_of_weight", "reads", "scopes_of_nodes"]

Scope = tuple[str, ...]

# torch's exporter writes no scopes into node names, but the modules into the metadata:
# ['', 'layer1', 'layer1.0', 'add_3'].
TORCH_SCOPES = "pkg.torch.onnx.name_scopes"


def scopes_of_nodes(graph: onnx.GraphProto) -> list[Scope]:
    """Return the scope of each node, outermost first.

    - `graph`: the graph of a model.

    The scope is the first of these that exists: the part of the node's name before its last "/";
    the module that torch's exporter noted; the module whose weight the node reads
    (`layer1.0.conv1.weight` is in layer1, 0); the common part of the scopes of the nodes before and
    after it. Scopes that are not in the name are shortened: a part that all nodes share carries no
    information, and neither does a scope with one kind of operator.
    """
    weights = {tensor.name for tensor in graph.initializer}
    named = [_scope_in_name(node) for node in graph.node]
    known = [
        scope if scope is not None else _scope_in_metadata(node, weights)
        for scope, node in zip(named, graph.node)
    ]
    scopes = _filled(graph, known, weights)
    unnamed = [i for i, scope in enumerate(named) if scope is None]
    operators = [graph.node[i].op_type for i in unnamed]
    others = [scope for scope in named if scope]
    shortened = _without_shared_parts([scopes[i] for i in unnamed], operators, others)
    for i, scope in zip(unnamed, shortened):
        scopes[i] = scope
    return scopes


def name_of_weight(name: str, readers: Iterable[Scope]) -> str:
    """Return the name under which an initializer is drawn: in the scope of its readers.

    - `name`: the initializer. The beginning of its name that the scope repeats is left out.
    - `readers`: the scopes of the nodes that read it.
    """
    scope = _common(readers) or ()
    if "/" in name or not scope:
        return name
    module = ".".join(scope)
    steps = name.split(".")
    for i in range(len(steps) - 1, 0, -1):
        prefix = ".".join(steps[:i])
        if f".{prefix}".endswith(f".{module}") or f".{module}".endswith(f".{prefix}"):
            return "/".join([*scope, ".".join(steps[i:])])
    return "/".join([*scope, name])


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a `node` reads, and the tensors that its bodies may read."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            for inner in body.node:
                yield from reads(inner)


def _scope_in_name(node: onnx.NodeProto) -> Scope | None:
    """Return the scope in a node's name; for a node without a name, in its first output's name."""
    name = node.name or next(iter(node.output), "")
    return tuple(filter(None, name.split("/")[:-1])) if "/" in name else None


def _scope_in_metadata(node: onnx.NodeProto, weights: set[str]) -> Scope | None:
    """Return the scope that torch's exporter noted, or the scope of the weights the node reads."""
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
    """Return all scopes, with unknown scopes filled in from the nodes before and after.

    The model's inputs and outputs are in no scope.
    """
    before: dict[str, Scope | None] = {
        value.name: () for value in graph.input if value.name not in weights
    }
    after: dict[str, list[Scope | None]] = {value.name: [()] for value in graph.output}
    filled_forward: list[Scope | None] = []
    for node, scope in zip(graph.node, known):
        if scope is None:
            scope = _common(before.get(name) for name in reads(node))
        filled_forward.append(scope)
        before.update(dict.fromkeys(node.output, filled_forward[-1]))
    filled_backward: list[Scope | None] = []
    for node, scope in zip(reversed(graph.node), reversed(known)):
        if scope is None:
            scope = _common(reader for name in node.output for reader in after.get(name, []))
        filled_backward.append(scope)
        for name in reads(node):
            after.setdefault(name, []).append(filled_backward[-1])
    return [_common(pair) or () for pair in zip(filled_forward, reversed(filled_backward))]


def _without_shared_parts(
    scopes: Sequence[Scope], operators: Sequence[str], others: Sequence[Scope]
) -> list[Scope]:
    """Return scopes without the parts that carry no information.

    - `operators`: the operator of each node.
    - `others`: the scopes of all other nodes.
    """
    first = {scope[:1] for scope in (*scopes, *others) if scope}
    while len(first) == 1 and not others:
        scopes = [scope[1:] for scope in scopes]
        first = {scope[:1] for scope in scopes if scope}
    kinds: dict[Scope, set[str]] = {}
    for scope, operator in zip(scopes, operators):
        for i in range(len(scope)):
            kinds.setdefault(scope[: i + 1], set()).add(operator)
    several = {scope for scope, seen in kinds.items() if len(seen - {"Constant"}) > 1}
    return [
        next((scope[:i] for i in range(len(scope), 0, -1) if scope[:i] in several), ())
        for scope in scopes
    ]


def _common(scopes: Iterable[Scope | None]) -> Scope | None:
    """Return the parts with which all known scopes begin; None if no scope is known."""
    known = [scope for scope in scopes if scope is not None]
    if not known:
        return None
    shared: list[str] = []
    for steps in zip(*known):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    return tuple(shared)
