"""Search the nodes of a graph by what they compute, and put kernels in their place.

A gradient rule may also note in the metadata of nodes what they compute together; see
`gradients/notes.py`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import onnx
from onnx import helper, numpy_helper

from onnxfit.graph import names, scopes
from onnxfit.graph.index import GraphIndex, NodeIndex
from onnxfit.graph.match import Matcher, MatchRule
from onnxfit.graph.subgraphs import read_by
from onnxfit.kernels.library import DOMAIN

# Operators whose result may share the memory of their first input.
VIEWS = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
# The numbers of inputs of operators that do not have two.
_INPUTS = {
    "Abs": 1,
    "Cast": 1,
    "Flatten": 1,
    "IsNaN": 1,
    "Neg": 1,
    "Relu": 1,
    "Sqrt": 1,
    "Transpose": 1,
    "Where": 3,
}


class ResultType(NamedTuple):
    """The element type and the shape of a value; sizes are numbers, or names."""

    element: int
    shape: tuple[int | str, ...]

    @property
    def is_scalar(self) -> bool:
        return all(size == 1 for size in self.shape)


def declared_types(graph: onnx.GraphProto) -> dict[str, ResultType]:
    """Return the types of the values whose type and shape a graph declares."""
    types = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            sizes = tuple(dim.dim_value or dim.dim_param for dim in tensor.shape.dim)
            if all(sizes):
                types[value.name] = ResultType(tensor.elem_type, sizes)
    for constant in graph.initializer:
        types[constant.name] = ResultType(constant.data_type, tuple(constant.dims))
    return types


def make_node(
    op_type: str,
    inputs: Sequence[str],
    results: Sequence[str],
    name: str = "",
    *,
    domain: str = DOMAIN,
    **attributes: Any,
) -> onnx.NodeProto:
    """Return a node, of an operator of the library unless another `domain` is given."""
    return helper.make_node(op_type, inputs, results, name, domain=domain, **attributes)


def sort_nodes(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes in their order, except that each comes after those that it reads."""
    return [nodes[i] for i in NodeIndex(nodes).order()]


def needed_nodes(
    nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]
) -> Sequence[onnx.NodeProto]:
    """Return those of sorted nodes that the outputs of their graph depend on."""
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed |= read_by(node)
            kept.append(node)
    return kept[::-1]


def trains(nodes: Sequence[onnx.NodeProto]) -> bool:
    """Return whether nodes compute gradients or updates, as graphs for inference do not."""
    return any(scopes.stage_of(n.name) in (scopes.GRADIENT, scopes.OPTIMIZER) for n in nodes)


def with_kernel_nodes(
    nodes: Sequence[onnx.NodeProto], kernels: Sequence[onnx.NodeProto]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes with kernels in the place of those that compute the kernels' results.

    Two kernels may compute the same sum, such as the gradients of two biases that are added. The
    second one then writes it under another name.
    """
    results: set[str] = set()
    for kernel in kernels:
        for i, name in enumerate(kernel.output):
            if name in results:
                kernel.output[i] = f"{kernel.output[0]}/{i}"
            results.add(kernel.output[i])
    return sort_nodes([*kernels, *(node for node in nodes if results.isdisjoint(node.output))])


class NodeSearch(GraphIndex):
    """The nodes of a graph around a value."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        nodes: Sequence[onnx.NodeProto],
        types: Mapping[str, ResultType],
    ) -> None:
        super().__init__(graph, nodes)
        self.types = types
        # An update may have the memory of its tensor, which no node may read any more then.
        self.updates = self.outputs & {names.updated(value.name) for value in graph.input}

    def is_state(self, name: str) -> bool:
        """Return whether a value is a tensor that a graph updates, or may share its memory."""
        while name in self.producers and self.producers[name].op_type in VIEWS:
            name = self.producers[name].input[0]
        return names.updated(name) in self.updates

    def operands(self, result: str, op_type: str) -> tuple[str, ...]:
        """Return the inputs of the node of this type that computes a value."""
        count = _INPUTS.get(op_type, 2)
        node = self.producers.get(result)
        if node is None or node.domain or node.op_type != op_type or len(node.input) != count:
            return ("",) * count
        return tuple(node.input)

    def results(self, operand: str, op_type: str, *others: str) -> list[str]:
        """Return the results of the nodes of this type that read a value, and the others."""
        return [
            node.output[0]
            for node in self.readers[operand]
            if node.op_type == op_type and not node.domain and {*others} <= {*node.input}
        ]

    def found(self, rule: KernelRule, known: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        """Yield the values that a rule finds and accepts, once for each result.

        - `known`: values of some variables. If there are none, each node of the graph may be the
          root.
        """
        variable, pattern = rule.equations[0]
        op_type = pattern[0]
        roots = [n.output[0] for n in self.nodes if n.op_type == op_type and not n.domain]
        done: set[str] = set()
        for start in [known] if known else [{variable: root} for root in roots]:
            for found in self.matcher.solutions(rule.equations, start):
                if found[rule.result] not in done and not rule.check(self, found):
                    done.add(found[rule.result])
                    yield found

    def rewritten(self, rule: KernelRule, known: Mapping[str, str]) -> Iterator[onnx.NodeProto]:
        """Yield the kernels for the values that a rule finds; `known` is as for `found`."""
        for found in self.found(rule, known):
            yield rule.rewrite(self, found)

    @cached_property
    def matcher(self) -> Matcher[str]:
        """A search for operators of ONNX by the names of values."""
        return Matcher(self._look, lambda variable, name: bool(name), self.results)

    def _look(self, name: str) -> tuple[str, Sequence[str]] | None:
        node = self.producers.get(name)
        return None if node is None or node.domain else (node.op_type, node.input)

    def scaled(self, result: str) -> tuple[float, str]:
        """Return the number and the value whose product a value is."""
        left, right = self.operands(result, "Mul")
        for number, operand in ((self.number(left), right), (self.number(right), left)):
            if number is not None:
                return number, operand
        return math.nan, ""

    def number(self, name: str) -> float | None:
        """Return the number in a constant with one element, which may be cast."""
        tensor = self.tensors.get(name) or self.tensors.get(self.operands(name, "CastLike")[0])
        if tensor is None or math.prod(tensor.dims) != 1:
            return None
        return float(numpy_helper.to_array(tensor).item())

    def is_row_of_ones(self, name: str) -> bool:
        """Return whether a value is a constant vector of ones."""
        tensor = self.tensors.get(name)
        if tensor is None or len(tensor.dims) != 1:
            return False
        return bool((numpy_helper.to_array(tensor) == 1).all())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a float32 value; () if a size is unknown."""
        known = self.types.get(name)
        if known is None or known.element != onnx.TensorProto.FLOAT:
            return ()
        sizes = tuple(size for size in known.shape if isinstance(size, int))
        return sizes if len(sizes) == len(known.shape) else ()

    def axes(self, result: str, op_type: str) -> tuple[str, list[int]]:
        """Return the value that a node of this type reduces, and the axes in their order."""
        operand, axes = self.operands(result, op_type)
        rank = len(self.shape(operand))
        if not rank or axes not in self.tensors:
            return "", []
        numbers = numpy_helper.to_array(self.tensors[axes]) % rank
        return operand, sorted(numbers.tolist())

    def row_reduced(self, result: str, op_type: str) -> str:
        """Return the value whose last axis a node of this type reduces to one element."""
        operand, axes = self.axes(result, op_type)
        shape = self.shape(operand)
        keeps_axis = self.shape(result) == (*shape[:-1], 1)
        return operand if keeps_axis and axes == [len(shape) - 1] else ""


class KernelRule(MatchRule[NodeSearch, str, onnx.NodeProto]):
    """Nodes that are found by what they compute, and the kernel that takes their place.

    - `result`: the variable of the value that the kernel computes.
    """

    result: ClassVar[str]


@dataclass(frozen=True)
class Note:
    """A note in the metadata of a node."""

    node: onnx.NodeProto
    content: Sequence[Any]


def paired_notes(
    nodes: Sequence[onnx.NodeProto], reader: str, producer: str
) -> Iterator[tuple[Note, Note]]:
    """Yield the notes of two roles that belong to the same gradient.

    A gradient with several notes of a role, such as one that was copied, is left out.
    """
    readers, producers = _notes(nodes, reader), _notes(nodes, producer)
    for key, found in producers.items():
        if len(found) == len(readers.get(key, ())) == 1:
            yield readers[key][0], found[0]


def _notes(nodes: Sequence[onnx.NodeProto], role: str) -> dict[str, list[Note]]:
    """Return the notes of a role, by the gradient that they belong to."""
    notes: dict[str, list[Note]] = defaultdict(list)
    for node in nodes:
        for entry in node.metadata_props:
            if entry.key == role:
                key, *content = json.loads(entry.value)
                notes[key].append(Note(node, content))
    return notes
