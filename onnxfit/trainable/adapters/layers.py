"""Find the weights of a model that can have adapters of low rank.

They are read by linear layers (MatMul, Gemm, MatMulNBits, MatMulBnb4), by embeddings (Gather,
GatherBlockQuantized) as their table, or by convolutions. Transpose and Identity may lie between the
weight and its readers. An integer weight is read through a DequantizeLinear.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import onnx
from onnx import TensorProto

from onnxfit.graph.index import GraphIndex, attributes_of
from onnxfit.graph.records import NO_PARAMETER, folded_from
from onnxfit.graph.sharing import MODULES
from onnxfit.graph.subgraphs import read_by
from onnxfit.load.completion import MICROSOFT
from onnxfit.trainable.quantized.operators import is_dequantize

Array = npt.NDArray[Any]

FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
PACKED_PRODUCTS = {"MatMulNBits", "MatMulBnb4"}  # of com.microsoft, with several numbers in a byte
PACKED_ROWS = "GatherBlockQuantized"
LINEAR = {"MatMul", "Gemm", *PACKED_PRODUCTS}
EMBEDDING = {"Gather", PACKED_ROWS}
SCALES = 2  # the position of the scales among the inputs of a packed operator
# onnxruntime's quantizers name packed numbers after the float weight, with this suffix. The
# exporter's metadata stays under the name of the float weight.
PACKED_END = re.compile(r"(_Q\d+(G\d+)?|_Bnb4|_quantized)$")
# suffixes of a weight's name after its module's name: torch's, quantizers', and genai's
ENDS = re.compile(
    r"((\.MatMul(NBits)?)?\.(q?weight|qzeros|scales))?(_Q\d+(G\d+)?|_Bnb4|_quant(ized)?)?$"
)
# the names that torch's TorchScript exporter gives to tensors that it computes, such as transposes
NUMBERED = re.compile(r"onnx::\w+")


@dataclass(frozen=True)
class Reader:
    """A node that multiplies by a weight, or takes rows of it.

    - `index`: the position of the node in the graph.
    - `op_type`: its operator.
    - `flipped`: whether it reads the stored weight as (outputs, inputs).
    - `factor`: the factor of the product, `alpha` of a Gemm.
    """

    index: int
    op_type: str
    flipped: bool = False
    factor: float = 1.0


@dataclass(frozen=True)
class AdaptableWeight:
    """A weight that can have adapters.

    - `name`: its initializer; for packed numbers or a DequantizeLinear, the integers' initializer.
    - `module`: the module that it belongs to, by the name before the export.
    - `names`: every name by which a target may select it.
    - `shape`: its stored shape; (inputs, outputs) for MatMulNBits and MatMulBnb4, and the shape of
      the unpacked table for a GatherBlockQuantized.
    - `element_type`: the element type of the layer's input and output, from `onnx.TensorProto`.
    - `readers`: the nodes that read it.
    - `is_packed`: whether it holds integers, to which nothing can be added.
    """

    name: str
    module: str
    names: frozenset[str]
    shape: tuple[int, ...]
    element_type: int
    readers: tuple[Reader, ...]
    is_packed: bool = False

    @property
    def kind(self) -> str:
        """The kind of layer: "linear", "embedding" or "conv".

        A table that is also the weight of a linear layer counts as "linear".
        """
        kinds = {reader.op_type for reader in self.readers}
        if "Conv" in kinds:
            return "conv"
        return "linear" if kinds & LINEAR else "embedding"

    @property
    def is_tied(self) -> bool:
        """Whether it is the table of an embedding and the weight of a linear layer."""
        kinds = {reader.op_type for reader in self.readers}
        return bool(kinds & EMBEDDING) and bool(kinds & LINEAR)

    @property
    def is_unnamed(self) -> bool:
        """Whether the file has only a number for it, so that its module is unknown."""
        return NUMBERED.match(self.module) is not None

    @property
    def is_flipped(self) -> bool:
        """Whether the weight is stored as (outputs, inputs)."""
        linear = [reader.flipped for reader in self.readers if reader.op_type in LINEAR]
        return linear[0] if linear else False

    @property
    def sides(self) -> tuple[int, int]:
        """The numbers of inputs and outputs of a layer; of rows and columns of an embedding."""
        if self.kind == "conv":
            return math.prod(self.shape[1:]), self.shape[0]
        rows, columns = self.shape
        return (columns, rows) if self.is_flipped else (rows, columns)

    def as_matrix(self, stored: Array) -> Array:
        """Return a weight of this shape as a matrix of (inputs, outputs)."""
        if self.kind == "conv":
            return stored.reshape(len(stored), -1).T
        return stored.T if self.is_flipped else stored

    def as_stored(self, matrix: Array) -> Array:
        """Return a matrix of (inputs, outputs) in the shape of the weight."""
        if self.kind == "conv":
            return matrix.T.reshape(self.shape)
        return matrix.T if self.is_flipped else matrix


def adaptable_weights(model: onnx.ModelProto) -> list[AdaptableWeight]:
    """Return the weights that can have adapters, in the model's order.

    A weight that another node reads as well is omitted: the adapter would not change that reader.

    - `model`: a model without functions.
    """
    graph = GraphIndex(model.graph)
    notes = _notes(model.graph)
    found = []
    for name, tensor in graph.tensors.items():
        readers = _readers(graph, name)
        if readers is None:
            continue
        first = model.graph.node[readers[0].index]
        element_type = _element_type(graph, name)
        if _is_packed_operator(first):
            element_type = graph.tensors[first.input[SCALES]].data_type
        nodes = [model.graph.node[reader.index] for reader in readers]
        noted = notes.get(name) or notes.get(PACKED_END.sub("", name), {})
        module = _module(name, noted, nodes)
        names = {name, module, module.rpartition(".")[2], *_origins(noted)}
        names |= {node.name for node in nodes}
        found.append(
            AdaptableWeight(
                name=name,
                module=module,
                names=frozenset(names - {""}),
                shape=_shape(first, tensor),
                element_type=element_type,
                readers=tuple(readers),
                is_packed=tensor.data_type not in FLOATS,
            )
        )
    return _with_unique_modules(found)


def output_layers(model: onnx.ModelProto, weights: list[AdaptableWeight]) -> set[str]:
    """Return the names of the weights whose layers no other linear layer follows."""
    graph = model.graph
    linear = {reader.index for weight in weights for reader in weight.readers}
    linear = {index for index in linear if graph.node[index].op_type in LINEAR}
    leading: set[str] = set()  # the values that a linear layer depends on
    followed = set()
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        leads = not leading.isdisjoint(node.output)
        if leads and index in linear:
            followed.add(index)
        if leads or index in linear:
            leading |= read_by(node)
    return {
        weight.name
        for weight in weights
        if not any(reader.index in followed for reader in weight.readers)
    }


def _readers(graph: GraphIndex, name: str) -> list[Reader] | None:
    """Return the readers of an initializer; None if it cannot have an adapter."""
    tensor = graph.tensors[name]
    is_float = _element_type(graph, name) in FLOATS
    readers = []
    waiting = [(name, False)]
    while waiting:
        value, flipped = waiting.pop()
        uses = list(_uses(graph, value))
        if value in graph.outputs or len({index for index, _ in uses}) < len(graph.reading[value]):
            return None  # it leaves the graph, or a subgraph reads it
        for index, position in uses:
            node = graph.nodes[index]
            if (value, position) == (name, 0) and _dequantizes(graph, node):
                waiting.append((node.output[0], flipped))
                continue
            if is_float and _moves_a_matrix(node, tensor):
                waiting.append((node.output[0], flipped != (node.op_type == "Transpose")))
                continue
            reader = _reader(graph, tensor, index, position, flipped, is_float)
            if reader is None:
                return None
            readers.append(reader)
    readers.sort(key=lambda reader: reader.index)
    return readers or None


def _uses(graph: GraphIndex, name: str) -> Iterator[tuple[int, int]]:
    """Yield the positions of each node that reads a value itself, and of the input."""
    for index in graph.reading[name]:
        for position, read in enumerate(graph.nodes[index].input):
            if read == name:
                yield index, position


def _is_packed_operator(node: onnx.NodeProto) -> bool:
    return node.domain == MICROSOFT and node.op_type in {*PACKED_PRODUCTS, PACKED_ROWS}


def _shape(reader: onnx.NodeProto, tensor: TensorProto) -> tuple[int, ...]:
    """Return the shape of a weight's numbers, by a node that reads it."""
    given = attributes_of(reader)
    if not _is_packed_operator(reader):
        return tuple(tensor.dims)
    if reader.op_type in PACKED_PRODUCTS:
        return given.get("K", 0), given.get("N", 0)
    *rows, columns = tensor.dims
    packed = 8 // given.get("bits", 4) if tensor.data_type == TensorProto.UINT8 else 1
    return *rows, columns * packed


def _element_type(graph: GraphIndex, name: str) -> int:
    """Return the element type of an initializer; its scale's for a DequantizeLinear."""
    stored: int = graph.tensors[name].data_type
    types = {stored}
    for index, position in _uses(graph, name):
        node = graph.nodes[index]
        if position == 0 and _dequantizes(graph, node):
            types.add(graph.tensors[node.input[1]].data_type)
    return next((kind for kind in types if kind in FLOATS), stored)


def _dequantizes(graph: GraphIndex, node: onnx.NodeProto) -> bool:
    """Return whether a node is a DequantizeLinear with a constant scale."""
    return is_dequantize(node) and node.input[1] in graph.tensors


def _moves_a_matrix(node: onnx.NodeProto, tensor: TensorProto) -> bool:
    """Return whether a node returns a matrix unchanged or transposed."""
    if node.domain or len(tensor.dims) != 2:
        return False
    return node.op_type == "Identity" or (
        node.op_type == "Transpose" and list(attributes_of(node).get("perm", [1, 0])) == [1, 0]
    )


def _reader(
    graph: GraphIndex, tensor: TensorProto, index: int, position: int, flipped: bool, is_float: bool
) -> Reader | None:
    """Return how a node reads a weight at an input; None if an adapter cannot follow it there."""
    node = graph.nodes[index]
    if _is_packed_operator(node):
        return _packed_reader(graph, tensor, index, position)
    if node.domain or not is_float or 0 in tensor.dims:
        return None
    given, rank = attributes_of(node), len(tensor.dims)
    if node.op_type == "MatMul" and (position, rank) == (1, 2):
        return Reader(index, node.op_type, flipped)
    if node.op_type == "Gemm" and (position, rank) == (1, 2) and not given.get("transA"):
        flipped = flipped != bool(given.get("transB"))
        return Reader(index, node.op_type, flipped, float(given.get("alpha", 1.0)))
    if node.op_type == "Gather" and (position, rank) == (0, 2) and not given.get("axis"):
        return Reader(index, node.op_type, flipped)
    if node.op_type == "Conv" and position == 1 and rank > 2 and given.get("group", 1) == 1:
        return Reader(index, node.op_type)
    return None


def _packed_reader(
    graph: GraphIndex, tensor: TensorProto, index: int, position: int
) -> Reader | None:
    """Return how a node with packed numbers reads its weight; None if no adapter can follow."""
    node = graph.nodes[index]
    given = attributes_of(node)
    scales = graph.tensors.get(node.input[SCALES])
    if scales is None or scales.data_type not in FLOATS:
        return None
    if node.op_type == PACKED_ROWS:
        is_weight = position == 0 and len(tensor.dims) == 2 and not given.get("gather_axis")
    else:
        is_weight = position == 1 and bool(given.get("transB", 1))  # only MatMulBnb4 has transB
    return Reader(index, node.op_type) if is_weight else None


# Names
# --------------------------------------------------------------------------------------------------


def _notes(graph: onnx.GraphProto) -> dict[str, dict[str, str]]:
    """Return the metadata of initializers, which exporters store with them or in value_info."""
    notes: dict[str, dict[str, str]] = defaultdict(dict)
    for entry in (*graph.value_info, *graph.initializer):
        for prop in entry.metadata_props:
            notes[entry.name][prop.key] = prop.value
    return notes


def _origins(notes: Mapping[str, str]) -> list[str]:
    """Return the parameters from which the exporter computed a tensor."""
    return [name for name in folded_from(notes) if not NO_PARAMETER.fullmatch(name)]


def _module(name: str, notes: Mapping[str, str], nodes: list[onnx.NodeProto]) -> str:
    """Return the module that a weight belongs to: the name before the export, if it is known."""
    origins = _origins(notes)
    if len(origins) == 1:
        return ENDS.sub("", origins[0])
    stem = ENDS.sub("", name)
    if stem != name and not NO_PARAMETER.fullmatch(stem) and not NUMBERED.fullmatch(stem):
        return stem
    for module in _modules_of(nodes[0]):
        return module
    return name


def _modules_of(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the module around a node, as torch's exporters note it."""
    for prop in node.metadata_props:
        if prop.key == MODULES:
            try:
                scopes = ast.literal_eval(prop.value)
                if len(scopes) > 1 and isinstance(scopes[-2], str) and scopes[-2]:
                    yield scopes[-2]
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                pass
    if node.name.startswith("/") and node.name.count("/") > 1:  # "/layers.0/fc1/MatMul"
        scopes = node.name.split("/")[1:-1]
        # A module in a Sequential repeats its name, as in "/net/net.0/MatMul".
        inner = [*scopes[1:], ""]
        yield ".".join(a for a, b in zip(scopes, inner) if not b.startswith(f"{a}."))


def _with_unique_modules(weights: list[AdaptableWeight]) -> list[AdaptableWeight]:
    """Return the weights; those whose module has several are called after their initializers."""
    counts = Counter(weight.module for weight in weights)
    return [
        weight if counts[weight.module] == 1 else replace(weight, module=weight.name)
        for weight in weights
    ]
