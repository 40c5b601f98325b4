"""Several elementwise operators as one, which goes through the memory once.

Each operator of ONNX reads its inputs from memory and writes its result there: the update of Adam
has twelve, Gelu and its gradient have ten. The operator Elementwise in C++ runs a small
program on one block of elements after the other, which stays in the cache in between.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import helper

from onnxfit.graph import scopes
from onnxfit.graph.subgraphs import read_by
from onnxfit.kernels.program import OPERATORS, compile_program
from onnxfit.kernels.search import ResultType, make_node, needed_nodes, sort_nodes, trains
from onnxfit.kernels.spread import Spread, SpreadSearch

KERNELS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "Elementwise",
    onnx.TensorProto.DOUBLE: "Elementwise64",
}
OF_ROWS = "ElementwiseOfRows"
# No update has this many operators. A longer chain becomes several programs.
MAX_OPERATORS = 64
MAX_TEMPORARIES = 16  # of a program, as in kernels/src/elementwise.h
MAX_SPREAD = 8  # inputs of a program that are repeated, as there
# Of a table whose gradient is read row by row: smaller ones stay in the cache.
MIN_ELEMENTS = 1 << 20
MIN_COLUMNS = 64
# These take longer to compute than to write and read. They are computed once.
SLOW = {"Erf", "Exp", "Tanh", "Sigmoid"}


@dataclass
class Group:
    """Nodes of one result type that become one node. Groups with higher numbers run earlier.

    All are of one stage of the step: operators of the forward pass do not wait for the backward
    pass, during which their inputs would have to stay in memory. But a group of the update may have
    the last operators of a gradient that nothing else reads, in place of their result.
    """

    number: int
    stage: str
    type: ResultType
    nodes: list[int] = field(default_factory=list)  # positions in the graph, the last one first
    recomputed: list[int] = field(default_factory=list)  # nodes of other groups that run here, too

    def takes(self, stage: str, result: ResultType, only_here: bool) -> bool:
        """Return whether one more node may join; `only_here`: the group alone reads its result."""
        ends = only_here and (stage, self.stage) == (scopes.GRADIENT, scopes.OPTIMIZER)
        fits = self.type == result and (self.stage == stage or ends)
        return fits and len(self.nodes) < MAX_OPERATORS

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
    original = nodes
    nodes, types = _with_additions(nodes, types)
    search = SpreadSearch(graph, nodes, types)
    groups = _groups(search)
    groups = [group for group in groups if _is_small(group.in_order(nodes), search)]
    _recompute(groups, search)
    groups = [group for group in groups if len(group.positions) > 1]
    if not groups:
        return original
    while True:  # without a group, another one may have more outputs
        outputs_of = _outputs(groups, nodes, search.outputs)
        fitting = [
            group
            for group in groups
            if _is_small(group.in_order(nodes), search, outputs_of[group.number])
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
        replaced[group.nodes[0]] = _fused(group.in_order(nodes), outputs, search, pieces)
    return sort_nodes([new for i, node in enumerate(nodes) for new in replaced.get(i, [node])])


def _with_additions(
    nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> tuple[Sequence[onnx.NodeProto], Mapping[str, ResultType]]:
    """Return the nodes with Adds in place of each Sum of several values of one type, and all types.

    onnxruntime adds the values one after the other, and goes through the memory for each. As one
    program, they are read once.
    """
    added: list[onnx.NodeProto] = []
    partial: dict[str, ResultType] = {}
    for node in nodes:
        result = types.get(node.output[0])
        is_sum = node.op_type == "Sum" and not node.domain and len(node.input) > 2
        if not is_sum or result is None or any(types.get(n) != result for n in node.input):
            added.append(node)
            continue
        total, *others = node.input
        for i, other in enumerate(others, 1):
            is_last = i == len(others)
            name = node.output[0] if is_last else f"{node.output[0]}/partial_{i}"
            partial[name] = result
            title = node.name if is_last else f"{node.name}/partial_{i}"
            added.append(make_node("Add", [total, other], [name], title, domain=""))
            total = name
    return (added, {**types, **partial}) if partial else (nodes, types)


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
    search: SpreadSearch,
) -> dict[str, list[str]]:
    """Return {tensor: the values that a kernel reads in its place} for an input that only this
    group reads; else {}.

    The update of several weights reads the vector of their gradients. The kernel reads them where
    they are, and takes the shape of its results from another tensor. In the same way, the update of
    a large embedding table reads the indices and the rows that GatherGradient would add up.

    - `needed`: the nodes of the group that its kernel computes.
    """
    inputs = {n for node in needed for n in node.input} - {node.output[0] for node in needed}
    tensors = sorted(name for name in inputs if search.types[name].shape == group.type.shape)
    for name in tensors:
        parts = _concatenated_values(name, search)
        only_here = {*group.positions}.issuperset(search.reading[name])
        if parts and only_here and len(tensors) > 1 and name not in search.outputs:
            return {name: parts}
    return {}


def _concatenated_values(name: str, search: SpreadSearch) -> list[str]:
    """Return the values that a Concat joins to a vector, or those of the gradient of a large table;
    else [].
    """
    producer = search.producers.get(name)
    shape = search.shape(name)
    if producer is None:
        return []
    if producer.op_type == "Concat" and not producer.domain and len(producer.input) > 1:
        is_vector = len(search.types[name].shape) == 1
        if not is_vector or any(map(search.is_state, producer.input)):
            return []
        return [search.operands(n, "Reshape")[0] or n for n in producer.input]
    if producer.op_type == "GatherGradient" and len(producer.input) == 2:
        rows = math.prod(search.shape(producer.input[1])) // math.prod(shape[1:])
        is_large = math.prod(shape) >= MIN_ELEMENTS and math.prod(shape[1:]) >= MIN_COLUMNS
        if is_large and 2 * rows <= shape[0]:
            return list(producer.input)
    return []


def _groups(search: SpreadSearch) -> list[Group]:
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
        result = _result_type(node, search)
        if result is None:
            depths[i] = deepest | 1 if deepest else 0
            continue
        stage = scopes.stage_of(node.name)
        group = groups[deepest // 2 - 1] if deepest and deepest % 2 == 0 else None
        only_here = search.outputs.isdisjoint(node.output) and all(
            depths[j] == deepest for j in search.followers[i]
        )
        if group is None or not group.takes(stage, result, only_here):
            group = Group(len(groups) + 1, stage, result)
            groups.append(group)
        group.nodes.append(i)
        depths[i] = 2 * group.number
    return groups


def _recompute(groups: Sequence[Group], search: SpreadSearch) -> None:
    """Let a group compute results of other groups again where it then reads no more than before.

    The gradient of Gelu(x) reads a multiple of x. With x in its place, it takes no longer, and the
    forward pass need not write the multiple.
    """
    nodes, types = search.nodes, search.types
    owners = {i: group for group in groups for i in group.nodes}
    producers = {name: i for i in owners for name in nodes[i].output}
    for group in groups:
        shape = group.type.shape
        tensors = {name for name in group.reads(nodes) if types[name].shape == shape}
        for name in sorted(tensors & producers.keys(), key=producers.__getitem__, reverse=True):
            tensors.remove(name)
            last = producers[name]
            again, needed = _inputs_within(owners[last], last, nodes, producers, tensors)
            # An update may overwrite a tensor of the state after its last reader.
            is_state = any(map(search.is_state, needed))
            needed = {each for each in needed if types[each].shape == shape} - tensors
            only_here = {*group.nodes, *owners[last].nodes}.issuperset(search.reading[name])
            more = sorted({*group.recomputed, *again})
            program = [nodes[i] for i in sorted({*group.nodes, *more})]
            is_slow = any(nodes[i].op_type in SLOW for i in again)
            allowed = not (is_slow or is_state) and len(needed) <= only_here
            if allowed and _is_small(program, search):
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
    nodes: Sequence[onnx.NodeProto], search: SpreadSearch, outputs: Sequence[str] = ()
) -> bool:
    """Return whether a program of these nodes has room for its temporaries and spread inputs."""
    # Each node has one result, and at most one input that is spread.
    if len(nodes) <= min(MAX_TEMPORARIES, MAX_SPREAD):
        return True
    program = _program(nodes, outputs or [nodes[-1].output[0]], search)
    return program.temporaries <= MAX_TEMPORARIES and len(program.spread) <= MAX_SPREAD


def _result_type(node: onnx.NodeProto, search: SpreadSearch) -> ResultType | None:
    """Return the type of the result of a node that may be in a group, else None."""
    if node.domain or OPERATORS.get(node.op_type) != len(node.input):
        return None
    result = search.types.get(node.output[0])
    if result is None or result.element not in KERNELS or result.is_scalar:
        return None
    operands = [search.types.get(name) for name in node.input]
    if not any(v is not None and v.shape == result.shape for v in operands):
        return None
    fits = all(
        v is not None
        and v.element == result.element
        and (v.shape == result.shape or v.is_scalar or search.spread(name, result))
        for name, v in zip(node.input, operands)
    )
    has_bounds = node.op_type != "Clip" or all(v and v.is_scalar for v in operands[1:])
    return result if fits and has_bounds else None


def _fused(
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[str],
    search: SpreadSearch,
    pieces: Mapping[str, Sequence[str]],
) -> list[onnx.NodeProto]:
    """Return the node that computes these outputs of the nodes, after its constants.

    - `pieces`: an input -> the values that are read in its place; {} for none.
    """
    program = _program(nodes, outputs, search, pieces)
    of_rows = any(search.types[name].shape[1:] for name in pieces)  # others are vectors
    fused = make_node(
        OF_ROWS if of_rows else KERNELS[search.types[outputs[0]].element],
        [piece for name in program.inputs for piece in pieces.get(name, [name])],
        outputs,
        nodes[-1].name,
        program=program.numbers,
        temporaries=program.temporaries,
        tensors=program.tensors,
        pieces=max([1, *map(len, pieces.values())]),
    )
    spread = [number for each in program.spread for number in each[1:]]
    ints = onnx.AttributeProto.INTS
    fused.attribute.append(helper.make_attribute("spread", spread, attr_type=ints))
    return [*program.constants.values(), fused]


@dataclass(frozen=True)
class GroupProgram:
    """The program of a group.

    - `inputs`: tensors, then spread values, then scalars.
    - `tensors`: the number of tensors, the last of which may be in pieces.
    - `constants`: the nodes of constants that only the program reads, by name.
    """

    inputs: Sequence[str]
    tensors: int
    spread: Sequence[Spread]
    constants: Mapping[str, onnx.NodeProto]
    numbers: Sequence[int]
    temporaries: int


def _program(
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[str],
    search: SpreadSearch,
    pieces: Collection[str] = (),
) -> GroupProgram:
    """Return the program that computes these outputs of the nodes."""
    constants: dict[str, onnx.NodeProto] = {}
    # Another group may compute the same again, with constants of its own.
    prefix = nodes[-1].output[0]
    result = search.types[prefix]
    # A node may be here only for a group that computes its result again.
    nodes = needed_nodes(nodes, outputs)
    nodes = [_with_attributes_as_inputs(n, prefix, result.element, constants) for n in nodes]

    def is_scalar(name: str) -> bool:
        return name in constants or search.types[name].is_scalar

    results = {node.output[0] for node in nodes}
    inputs = list(dict.fromkeys(n for node in nodes for n in node.input if n not in results))
    spread = _spread_inputs(inputs, result, search, constants)
    nodes = [_with_inputs(node, {n: str(each) for n, each in spread.items()}) for node in nodes]
    tensors = [n for n in inputs if n not in spread and not is_scalar(n)]
    tensors.sort(key=lambda name: name in pieces)
    scalars = [n for n in inputs if n not in spread and is_scalar(n)]
    repeated = list(dict.fromkeys(spread.values()))
    operands = [*tensors, *map(str, repeated), *scalars]
    scalar = {*scalars}
    program = compile_program(nodes, operands, outputs, scalar.__contains__)
    return GroupProgram(
        inputs=[*tensors, *(each.source for each in repeated), *scalars],
        tensors=len(tensors),
        spread=repeated,
        constants=constants,
        numbers=program.numbers,
        temporaries=program.temporaries,
    )


def _spread_inputs(
    inputs: Sequence[str], result: ResultType, search: SpreadSearch, constants: Collection[str]
) -> dict[str, Spread]:
    """Return the inputs of a program that are spread. At least one has the shape of its results."""
    found = {}
    for name in inputs:
        by = None if name in constants else search.spread(name, result)
        if by is not None:
            found[name] = by
    whole = [n for n in inputs if n not in constants and search.types[n].shape == result.shape]
    if found.keys() >= {*whole}:
        found = {name: by for name, by in found.items() if name not in whole}
    return found


def _with_inputs(node: onnx.NodeProto, renamed: Mapping[str, str]) -> onnx.NodeProto:
    """Return a node that reads other values in the place of some; itself if it reads none."""
    if renamed.keys().isdisjoint(node.input):
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [renamed.get(name, name) for name in node.input]
    return copy


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
