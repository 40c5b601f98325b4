"""Several elementwise operators as one, which goes through the memory once.

Each operator of ONNX reads its inputs from memory and writes its result there: the update of Adam
has twelve, Gelu and its gradient have ten. The operator Elementwise in C++ runs a small
program on one block of elements after the other, which stays in the cache in between.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import helper

from onnxfit.graph import scopes
from onnxfit.graph.subgraphs import read_by
from onnxfit.kernels.program import OPERATORS, Program, compile_program
from onnxfit.kernels.search import (
    NodeSearch,
    ResultType,
    make_node,
    needed_nodes,
    sort_nodes,
    trains,
)

KERNELS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "Elementwise",
    onnx.TensorProto.DOUBLE: "Elementwise64",
}
# No update has this many operators. A longer chain becomes several programs.
MAX_OPERATORS = 64
MAX_TEMPORARIES = 16  # of a program, as in kernels/src/elementwise.h
# These take longer to compute than to write and read. They are computed once.
SLOW = {"Erf", "Exp", "Tanh", "Sigmoid"}


@dataclass
class Group:
    """Nodes of one result type that become one node. Groups with higher numbers run earlier.

    All are of one stage of the step: operators of the forward pass do not wait for the backward
    pass, during which their inputs would have to stay in memory.
    """

    number: int
    stage: str
    type: ResultType
    nodes: list[int] = field(default_factory=list)  # positions in the graph, the last one first
    recomputed: list[int] = field(default_factory=list)  # nodes of other groups that run here, too

    def takes(self, stage: str, result: ResultType) -> bool:
        """Return whether one more node may join."""
        return (self.stage, self.type) == (stage, result) and len(self.nodes) < MAX_OPERATORS

    @property
    def positions(self) -> list[int]:
        return sorted({*self.nodes, *self.recomputed})

    def in_order(self, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
        return [nodes[i] for i in self.positions]

    def reads(self, nodes: Sequence[onnx.NodeProto]) -> set[str]:
        """Return the values that come from outside."""
        inside = self.in_order(nodes)
        return {n for node in inside for n in node.input} - {node.output[0] for node in inside}


def fuse_elementwise(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with one node instead of each group of elementwise nodes.

    The nodes are returned themselves if there are no groups.
    """
    # Graphs for inference are left to onnxruntime, which fuses more of their operators, such as
    # those of a LayerNormalization or a convolution with its activation.
    if not trains(nodes):
        return nodes
    search = NodeSearch(graph, nodes, types)
    groups = _groups(search)
    groups = [group for group in groups if _is_small(group.in_order(nodes), types)]
    _recompute(groups, search)
    groups = [group for group in groups if len(group.positions) > 1]
    if not groups:
        return nodes
    while True:  # without a group, another one may have more outputs
        outputs_of = _outputs(groups, nodes, search.outputs)
        fitting = [
            group
            for group in groups
            if _is_small(group.in_order(nodes), types, outputs_of[group.number])
        ]
        if len(fitting) == len(groups):
            break
        groups = fitting
    replaced: dict[int, list[onnx.NodeProto]] = {}
    for group in groups:
        outputs = outputs_of[group.number]
        if not outputs:  # their results are not used
            continue
        replaced.update((i, []) for i in group.nodes)
        needed = needed_nodes(group.in_order(nodes), outputs)
        pieces = _pieces(needed, group, search)
        replaced[group.nodes[0]] = _fused(group.in_order(nodes), outputs, types, pieces)
    return sort_nodes([new for i, node in enumerate(nodes) for new in replaced.get(i, [node])])


def _outputs(
    groups: Sequence[Group], nodes: Sequence[onnx.NodeProto], graph_outputs: Collection[str]
) -> dict[int, list[str]]:
    """Return, by the number of each group, its results that are read outside of it."""
    inside = {i for group in groups for i in group.nodes}
    needed = {*graph_outputs}.union(*(group.reads(nodes) for group in groups))
    needed.update(name for i, n in enumerate(nodes) if i not in inside for name in read_by(n))
    return {
        group.number: [n for i in sorted(group.nodes) for n in nodes[i].output if n in needed]
        for group in groups
    }


def _pieces(
    needed: Sequence[onnx.NodeProto],
    group: Group,
    search: NodeSearch,
) -> dict[str, list[str]]:
    """Return {vector: the values that a Concat joins to it} for an input that only this group
    reads; else {}.

    The update of several weights reads the vector of their gradients. The kernel reads them where
    they are, and takes the shape of its results from another tensor.

    - `needed`: the nodes of the group that its kernel computes.
    """
    inputs = {n for node in needed for n in node.input} - {node.output[0] for node in needed}
    tensors = sorted(name for name in inputs if not search.types[name].is_scalar)
    for name in tensors:
        concat = search.producers.get(name)
        if concat is None or concat.op_type != "Concat" or concat.domain:
            continue
        is_vector = len(search.types[name].shape) == 1
        if not is_vector or len(tensors) == 1 or len(concat.input) == 1:
            continue
        only_here = {*group.positions}.issuperset(search.reading[name])
        if only_here and name not in search.outputs and not any(map(search.is_state, concat.input)):
            return {name: [search.operands(n, "Reshape")[0] or n for n in concat.input]}
    return {}


def _groups(search: NodeSearch) -> list[Group]:
    """Return groups of nodes, between which values flow from higher to lower numbers alone.

    Nodes are visited from the last to the first. A node joins the group with the highest number
    among those that read it, unless a node outside leads to that group, too. The depth of a node is
    twice the number of its group; outside, it is one more than the depth of the group it leads to.
    """
    groups: list[Group] = []
    depths = [0] * len(search.nodes)
    for i in reversed(range(len(search.nodes))):
        node = search.nodes[i]
        deepest = max((depths[j] for j in search.followers[i]), default=0)
        result = _result_type(node, search.types)
        if result is None:
            depths[i] = deepest | 1 if deepest else 0
            continue
        stage = scopes.stage_of(node.name)
        group = groups[deepest // 2 - 1] if deepest and deepest % 2 == 0 else None
        if group is None or not group.takes(stage, result):
            group = Group(len(groups) + 1, stage, result)
            groups.append(group)
        group.nodes.append(i)
        depths[i] = 2 * group.number
    return groups


def _recompute(groups: Sequence[Group], search: NodeSearch) -> None:
    """Let a group compute results of other groups again where it then reads no more than before.

    The gradient of Gelu(x) reads a multiple of x. With x in its place, it takes no longer, and the
    forward pass need not write the multiple.
    """
    nodes, types = search.nodes, search.types
    owners = {i: group for group in groups for i in group.nodes}
    producers = {name: i for i in owners for name in nodes[i].output}
    for group in groups:
        tensors = {name for name in group.reads(nodes) if not types[name].is_scalar}
        for name in sorted(tensors & producers.keys(), key=producers.__getitem__, reverse=True):
            tensors.remove(name)
            last = producers[name]
            again, needed = _inputs_within(owners[last], last, nodes, producers, tensors)
            # An update may overwrite a tensor of the state after its last reader.
            is_state = any(map(search.is_state, needed))
            needed = {each for each in needed if not types[each].is_scalar} - tensors
            only_here = {*group.nodes, *owners[last].nodes}.issuperset(search.reading[name])
            more = sorted({*group.recomputed, *again})
            program = [nodes[i] for i in sorted({*group.nodes, *more})]
            is_slow = any(nodes[i].op_type in SLOW for i in again)
            allowed = not (is_slow or is_state) and len(needed) <= only_here
            if allowed and _is_small(program, types):
                group.recomputed = more
                tensors |= needed
            else:
                tensors.add(name)


def _inputs_within(
    group: Group,
    last: int,
    nodes: Sequence[onnx.NodeProto],
    producers: Mapping[str, int],
    known: Collection[str],
) -> tuple[set[int], set[str]]:
    """Return the nodes of a group that the result of one of them needs, and what they read.

    Values that are known need no nodes.
    """
    inside, found, needed, pending = set(group.nodes), {last}, set(), [last]
    while pending:
        for name in nodes[pending.pop()].input:
            maker = producers.get(name, -1)
            if name in known or maker not in inside:
                needed.add(name)
            elif maker not in found:
                found.add(maker)
                pending.append(maker)
    return found, needed


def _is_small(
    nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType], outputs: Sequence[str] = ()
) -> bool:
    """Return whether a program of these nodes has room for its temporaries."""
    if len(nodes) <= MAX_TEMPORARIES:  # each node has one result
        return True
    ends = outputs or [nodes[-1].output[0]]
    return _program(nodes, ends, types)[1].temporaries <= MAX_TEMPORARIES


def _result_type(node: onnx.NodeProto, types: Mapping[str, ResultType]) -> ResultType | None:
    """Return the type of the result of a node that may be in a group, else None."""
    if node.domain or OPERATORS.get(node.op_type) != len(node.input):
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
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[str],
    types: Mapping[str, ResultType],
    pieces: Mapping[str, Sequence[str]],
) -> list[onnx.NodeProto]:
    """Return the node that computes these outputs of the nodes, after its constants.

    - `pieces`: an input -> the values that are read in its place; {} for none.
    """
    inputs, program, constants = _program(nodes, outputs, types, pieces)
    fused = make_node(
        KERNELS[types[outputs[0]].element],
        [piece for name in inputs for piece in pieces.get(name, [name])],
        outputs,
        nodes[-1].name,
        program=program.numbers,
        temporaries=program.temporaries,
        tensors=sum(name not in constants and not types[name].is_scalar for name in inputs),
        pieces=max([1, *map(len, pieces.values())]),
    )
    return [*constants.values(), fused]


def _program(
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[str],
    types: Mapping[str, ResultType],
    pieces: Collection[str] = (),
) -> tuple[list[str], Program, dict[str, onnx.NodeProto]]:
    """Return the inputs of a program, the program, and the constants among its inputs.

    The inputs are tensors, then those in pieces, then scalars.
    """
    constants: dict[str, onnx.NodeProto] = {}
    # Another group may compute the same again, with constants of its own.
    prefix = nodes[-1].output[0]
    element = types[prefix].element
    # A node may be here only for a group that computes its result again.
    nodes = needed_nodes(nodes, outputs)
    nodes = [_with_attributes_as_inputs(node, prefix, element, constants) for node in nodes]

    def is_scalar(name: str) -> bool:
        return name in constants or types[name].is_scalar

    results = {node.output[0] for node in nodes}
    inputs = list(dict.fromkeys(n for node in nodes for n in node.input if n not in results))
    inputs.sort(key=lambda name: (is_scalar(name), name in pieces))
    return inputs, compile_program(nodes, inputs, outputs, is_scalar), constants


def _with_attributes_as_inputs(
    node: onnx.NodeProto, prefix: str, element: int, constants: dict[str, onnx.NodeProto]
) -> onnx.NodeProto:
    """Return a HardSigmoid whose attributes are constants that it reads; other nodes themselves."""
    if node.op_type != "HardSigmoid":
        return node
    given = {attribute.name: attribute.f for attribute in node.attribute}
    explicit = onnx.NodeProto()
    explicit.CopyFrom(node)
    for attribute, default in (("alpha", 0.2), ("beta", 0.5)):
        name = f"{prefix}/{node.output[0]}/{attribute}"
        value = helper.make_tensor(name, element, [], [given.get(attribute, default)])
        constants[name] = make_node("Constant", [], [name], name, value=value, domain="")
        explicit.input.append(name)
    return explicit
