"""Several elementwise operators as one, which goes through the memory once.

Each operator of ONNX reads its inputs from memory and writes its result there: the update of Adam
has twelve. The operator Elementwise of onnxfit-kernels runs a small program on one block of
elements after the other, which stays in the cache in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import helper

from onnxfit.graph import scopes
from onnxfit.graph.subgraphs import read_by
from onnxfit.runtime.kernels.library import DOMAIN
from onnxfit.runtime.kernels.order import sort_nodes
from onnxfit.runtime.kernels.program import OPERATORS, compile_program
from onnxfit.runtime.kernels.types import ResultType

KERNELS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "Elementwise",
    onnx.TensorProto.DOUBLE: "Elementwise64",
}
# The stages of a step whose operators are fused.
STAGES = {scopes.OPTIMIZER}
# No update has this many operators. A longer chain becomes several programs.
MAX_OPERATORS = 64


@dataclass
class Group:
    """Nodes of one result type that become one node. Groups with higher numbers run earlier."""

    number: int
    type: ResultType
    nodes: list[int] = field(default_factory=list)  # positions in the graph, the last one first


def fuse_elementwise(
    nodes: Sequence[onnx.NodeProto],
    types: Mapping[str, ResultType],
    graph_outputs: Collection[str],
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with one node instead of each group of elementwise nodes.

    The nodes are returned themselves if there are no groups.
    """
    readers = _readers(nodes)
    groups = [group for group in _groups(nodes, types, readers) if len(group.nodes) > 1]
    if not groups:
        return nodes
    replaced: dict[int, onnx.NodeProto | None] = {}
    for group in groups:
        inside = set(group.nodes)
        outputs = [
            name
            for i in sorted(inside)
            for name in nodes[i].output
            if name in graph_outputs or not inside.issuperset(readers.get(name, ()))
        ]
        if not outputs:  # their results are not used
            continue
        replaced.update(dict.fromkeys(inside))
        replaced[group.nodes[0]] = _fused([nodes[i] for i in sorted(inside)], outputs, types)
    kept = [replaced.get(i, node) for i, node in enumerate(nodes)]
    return sort_nodes([node for node in kept if node is not None])


def _readers(nodes: Sequence[onnx.NodeProto]) -> dict[str, list[int]]:
    """Return value -> the positions of the nodes that read it."""
    readers: dict[str, list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        for name in read_by(node):
            readers[name].append(i)
    return readers


def _groups(
    nodes: Sequence[onnx.NodeProto],
    types: Mapping[str, ResultType],
    readers: Mapping[str, Sequence[int]],
) -> list[Group]:
    """Return groups of nodes, between which values flow from higher to lower numbers alone.

    Nodes are visited from the last to the first. A node joins the group with the highest number
    among those that read it, unless a node outside leads to that group, too. The depth of a node is
    twice the number of its group; outside, it is one more than the depth of the group it leads to.
    """
    groups: list[Group] = []
    depths = [0] * len(nodes)
    for i in reversed(range(len(nodes))):
        node = nodes[i]
        reading = [j for name in node.output for j in readers.get(name, ())]
        deepest = max((depths[j] for j in reading), default=0)
        result = _result_type(node, types)
        if result is None:
            depths[i] = deepest | 1 if deepest else 0
            continue
        group = groups[deepest // 2 - 1] if deepest and deepest % 2 == 0 else None
        if group is None or group.type != result or len(group.nodes) == MAX_OPERATORS:
            group = Group(len(groups) + 1, result)
            groups.append(group)
        group.nodes.append(i)
        depths[i] = 2 * group.number
    return groups


def _result_type(node: onnx.NodeProto, types: Mapping[str, ResultType]) -> ResultType | None:
    """Return the type of the result of a node that may be in a group, else None."""
    if node.domain or OPERATORS.get(node.op_type) != len(node.input):
        return None
    if scopes.stage_of(node.name) not in STAGES:
        return None
    result = types.get(node.output[0])
    if result is None or result.element not in KERNELS or result.is_scalar:
        return None
    operands = [types.get(name) for name in node.input]
    fits = all(
        v is not None and v.element == result.element and (v.shape == result.shape or v.is_scalar)
        for v in operands
    )
    return result if fits else None


def _fused(
    nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], types: Mapping[str, ResultType]
) -> onnx.NodeProto:
    """Return the node that computes these outputs of the nodes."""
    results = {node.output[0] for node in nodes}
    inputs = list(dict.fromkeys(n for node in nodes for n in node.input if n not in results))
    inputs.sort(key=lambda name: types[name].is_scalar)
    program = compile_program(nodes, inputs, outputs, lambda name: types[name].is_scalar)
    return helper.make_node(
        KERNELS[types[outputs[0]].element],
        inputs,
        outputs,
        nodes[-1].name,
        domain=DOMAIN,
        program=program.numbers,
        temporaries=program.temporaries,
        tensors=sum(not types[name].is_scalar for name in inputs),
    )
