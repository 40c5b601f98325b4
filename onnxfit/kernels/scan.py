"""Loops over time as one operator each: the Scans of LSTM, GRU and RNN, and of their gradients.

onnxruntime runs each node of a Scan's body anew in every step, for some microseconds each. The
kernel goes through all steps with a few rows of the batch, which stay in the cache. No row reads
another one, so threads do not wait for each other between steps.

The body may have products with a matrix from outside, elementwise operators, Split and Concat.

The constants below exclude sizes for which the kernel is slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import onnx
from onnx import helper, numpy_helper

from onnxfit.graph.index import attributes_of, tensors_of
from onnxfit.kernels.library import DOMAIN
from onnxfit.kernels.program import CODES
from onnxfit.kernels.rounding import PRECISIONS, is_of_model, rounds_loops
from onnxfit.kernels.scan_bodies import (
    LoopSearch,
    is_along_columns,
    is_elementwise,
    is_plain_product,
    with_splits_outside,
)
from onnxfit.kernels.search import ResultType, declared_types, make_node, needed_nodes, sort_nodes

# Codes of kernels/src/scan.h.
COPY = len(CODES)
PRODUCT = COPY + 1
NOTHING = -1  # the buffer of the summand in a product that has none

# The kernel computes several rows at once, even if the batch has fewer. For fewer rows, a product
# with a larger matrix is slower than in onnxruntime.
MIN_ROWS = 4
MAX_ELEMENTS_OF_FEW_ROWS = 1 << 16


def replace_scans(
    graph: onnx.GraphProto,
    nodes: Sequence[onnx.NodeProto],
    types: MutableMapping[str, ResultType],
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with a kernel for each Scan that has one.

    The nodes are returned themselves if no Scan has one. The types of new values are added to
    `types`.
    """
    if not any(node.op_type == "Scan" for node in nodes):
        return nodes
    constants = tensors_of(graph)
    prepared: list[onnx.NodeProto] = []
    for node in nodes:
        prepared += _with_splits_outside(node, types, constants)
    search = LoopSearch(graph, prepared, types)
    rounds = rounds_loops(graph)
    replaced: list[onnx.NodeProto] = []
    for node in prepared:
        found = _replaced(node, search, types, constants) or [node]
        if rounds and found != [node] and is_of_model(node):
            # The first of the nodes is the kernel.
            found[0].attribute.append(helper.make_attribute("precision", PRECISIONS["bf16"]))
        replaced += found
    if not any(node.op_type == "Scan" and node.domain == DOMAIN for node in replaced):
        return nodes
    return needed_nodes(sort_nodes(replaced), search.outputs)


def _replaced(
    node: onnx.NodeProto,
    search: LoopSearch,
    types: MutableMapping[str, ResultType],
    constants: Mapping[str, onnx.TensorProto],
) -> list[onnx.NodeProto]:
    """Return the kernel for a Scan and what surrounds it, and nodes for its inputs; [] if there is
    none.

    The types of new values are added to `types`.
    """
    kernel = _scan_kernel(node, types, constants)
    if kernel is None:
        return []
    larger = search.with_inputs_inside(node) or node
    largest, transposes, new_types = search.with_products_inside(larger)
    found = _scan_kernel(largest, {**types, **new_types}, constants)
    if found is not None:
        types.update(new_types)
        return [found, *transposes]
    return [_scan_kernel(larger, types, constants) or kernel]


def _with_splits_outside(
    node: onnx.NodeProto, types: Mapping[str, ResultType], constants: Mapping[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    """Return a Scan that has a kernel without parts of its results, and nodes for these parts.

    Any other node is returned itself.
    """
    if not _is_scan(node):
        return [node]
    changed, splits = with_splits_outside(node)
    return [changed, *splits] if _scan_kernel(changed, types, constants) else [node]


def _is_scan(node: onnx.NodeProto) -> bool:
    return node.op_type == "Scan" and not node.domain


def _scan_kernel(
    node: onnx.NodeProto, types: Mapping[str, ResultType], constants: Mapping[str, onnx.TensorProto]
) -> onnx.NodeProto | None:
    """Return the kernel for a Scan; None if there is none, or the node is no Scan."""
    if not _is_scan(node):
        return None
    try:
        return _Loop(node, types, constants).kernel()
    except _UnsupportedError:
        return None


class _UnsupportedError(Exception):
    """There is no kernel for a Scan."""


class _Place(NamedTuple):
    """Columns of a buffer, from one on."""

    buffer: str
    column: int
    columns: int

    def part(self, begin: int, columns: int) -> _Place:
        return _Place(self.buffer, self.column + begin, columns)


# The places of the columns of a value. It has several after a Concat, which copies nothing.
_Value = tuple[_Place, ...]


class _Instruction(NamedTuple):
    code: int
    result: _Place
    operands: Sequence[_Place | None]


class _Loop:
    """A Scan as a program, which kernels/src/scan.h describes."""

    def __init__(
        self,
        scan: onnx.NodeProto,
        types: Mapping[str, ResultType],
        constants: Mapping[str, onnx.TensorProto],
    ) -> None:
        attributes = attributes_of(scan)
        body: onnx.GraphProto = attributes.pop("body")
        states = len(scan.input) - attributes.pop("num_scan_inputs")
        if len(scan.input) != len(body.input) or not states:
            raise _UnsupportedError
        self._scan = scan
        self._types = {**types, **declared_types(body)}
        self._constants = {**constants, **tensors_of(body)}
        self._inner = {tensor.name for tensor in body.initializer}
        self._is_reverse = _direction(attributes)
        self._columns: dict[str, int] = {}  # of each buffer
        self._values: dict[str, _Value] = {}
        self._copies: dict[_Value, _Place] = {}
        self._rows = self._shape(body.input[0].name, 2)[0]
        self._states = [value.name for value in body.input[:states]]
        self._slices = [value.name for value in body.input[states:]]
        self._outside: dict[str, list[str]] = {"matrix": [], "vector": [], "scalar": []}
        self._program: list[_Instruction] = []
        for name in (*self._states, *self._slices):
            rows, columns = self._shape(name, 2)
            if rows != self._rows:
                raise _UnsupportedError
            self._values[name] = (self._add_buffer(name, columns),)
        for inner in body.node:
            self._run(inner)
        results = [self._operand(value.name) for value in body.output]
        if any(map(self._is_outside, results)):
            raise _UnsupportedError
        self._next_states = [self._in_one_place(value) for value in results[:states]]
        if any(place.buffer in self._inputs() for place in self._next_states):
            raise _UnsupportedError
        columns_after = [place.columns for place in self._next_states]
        if columns_after != [self._columns[name] for name in self._states]:
            raise _UnsupportedError
        self._outputs: list[str] = []  # buffers
        for value in results[states:]:
            self._outputs.append(self._output_buffer(value))

    def kernel(self) -> onnx.NodeProto:
        """Return the node."""
        known = [*self._inputs(), *self._outputs]
        temporaries = [name for name in self._columns if name not in {*known}]
        numbers = {name: i for i, name in enumerate((*known, *temporaries))}
        program: list[int] = []
        for code, result, operands in self._program:
            program += [code, result.columns, numbers[result.buffer], result.column]
            for place in operands:
                program += [numbers[place.buffer], place.column] if place else [NOTHING, 0]
        scan = self._scan
        return make_node(
            "Scan",
            [*scan.input, *self._inputs()[len(scan.input) :]],
            # a result that nothing reads may have no name
            [name or f"{scan.name}:{i}" for i, name in enumerate(scan.output)],
            scan.name,
            reverse=self._is_reverse,
            counts=[
                len(self._states),
                len(self._slices),
                len(self._outside["matrix"]),
                len(self._outside["vector"]),
            ],
            columns=[self._columns[name] for name in numbers],
            program=program,
            next=[n for place in self._next_states for n in (numbers[place.buffer], place.column)],
        )

    def _output_buffer(self, value: _Value) -> str:
        """Return the buffer of a result, or of a copy."""
        place = self._in_one_place(value)
        is_whole = place.columns == self._columns[place.buffer]
        if is_whole and place.buffer not in (*self._inputs(), *self._outputs):
            return place.buffer
        return self._copy((place,)).buffer

    def _in_one_place(self, value: _Value) -> _Place:
        """Return the place of a value, or of its only copy."""
        if len(value) == 1:
            return value[0]
        if value not in self._copies:
            self._copies[value] = self._copy(value)
        return self._copies[value]

    def _copy(self, value: _Value) -> _Place:
        """Copy the columns of a value into a buffer of their own."""
        copy = self._add_buffer(f"{value[0].buffer}/{len(self._columns)}", _columns(value))
        column = 0
        for place in value:
            part = copy.part(column, place.columns)
            self._program.append(_Instruction(COPY, part, [place]))
            column += place.columns
        return copy

    def _inputs(self) -> list[str]:
        """Return the buffers of all inputs of the kernel."""
        return [
            *self._states,
            *self._slices,
            *(n for names in self._outside.values() for n in names),
        ]

    def _shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the shape of a float32 value of this rank."""
        known = self._types.get(name)
        if known is None or known.element != onnx.TensorProto.FLOAT or len(known.shape) != rank:
            raise _UnsupportedError
        sizes = tuple(size for size in known.shape if isinstance(size, int))
        if len(sizes) < rank:
            raise _UnsupportedError
        return sizes

    def _add_buffer(self, name: str, columns: int) -> _Place:
        if name in self._columns:
            raise _UnsupportedError
        self._columns[name] = columns
        return _Place(name, 0, columns)

    def _operand(self, name: str) -> _Value:
        """Return the places of rows in the body, or of a vector or scalar from outside."""
        if name not in self._values:
            known = self._types.get(name)
            if name in self._inner or known is None or len(known.shape) > 2:
                raise _UnsupportedError
            if any(size != 1 for size in known.shape[:-1]):
                raise _UnsupportedError
            columns = math.prod(self._shape(name, len(known.shape)))
            self._add_outside(name, "vector" if columns > 1 else "scalar", columns)
        if name in self._outside["matrix"]:
            raise _UnsupportedError
        return self._values[name]

    def _matrix(self, name: str) -> _Place:
        """Return the place of a matrix from outside."""
        if name not in self._values:
            self._add_outside(name, "matrix", self._shape(name, 2)[1])
        if name not in self._outside["matrix"]:
            raise _UnsupportedError
        return self._values[name][0]

    def _add_outside(self, name: str, kind: str, columns: int) -> None:
        self._values[name] = (self._add_buffer(name, columns),)
        self._outside[kind].append(name)

    def _is_outside(self, value: _Value) -> bool:
        outside = {name for names in self._outside.values() for name in names}
        return all(place.buffer in outside for place in value)

    def _is_scalar(self, value: _Value) -> bool:
        return value[0].buffer in self._outside["scalar"]

    def _run(self, node: onnx.NodeProto) -> None:
        """Add the instructions of a node of the body."""
        if node.domain:
            raise _UnsupportedError
        attributes = attributes_of(node)
        if node.op_type == "Split":
            self._values.update(self._split(node))
        elif node.op_type in ("MatMul", "Gemm"):
            self._values[node.output[0]] = self._multiply(node, attributes)
        elif node.op_type == "Identity":
            self._values[node.output[0]] = self._operand(node.input[0])
        elif node.op_type == "Concat" and is_along_columns(node, 1):
            self._values[node.output[0]] = self._concatenate(node)
        elif is_elementwise(node):
            self._values[node.output[0]] = self._compute(node)
        else:
            raise _UnsupportedError

    def _compute(self, node: onnx.NodeProto) -> _Value:
        """Add an instruction for each range of columns in which no operand changes its place."""
        values = [self._operand(name) for name in node.input]
        rows = [value for value in values if not self._is_scalar(value)]
        columns = {_columns(value) for value in rows}
        if len(columns) != 1 or all(map(self._is_outside, values)):
            raise _UnsupportedError
        result = self._add_buffer(node.output[0], columns.pop())
        begin = 0
        for end in sorted({end for value in rows for end in _ends(value)}):
            places = [
                value[0] if self._is_scalar(value) else _part(value, begin, end - begin)[0]
                for value in values
            ]
            part = result.part(begin, end - begin)
            self._program.append(_Instruction(CODES[node.op_type], part, places))
            begin = end
        return (result,)

    def _concatenate(self, node: onnx.NodeProto) -> _Value:
        values = [self._operand(name) for name in node.input]
        if any(map(self._is_scalar, values)) or all(map(self._is_outside, values)):
            raise _UnsupportedError
        return tuple(place for value in values for place in value)

    def _split(self, node: onnx.NodeProto) -> dict[str, _Value]:
        value = self._operand(node.input[0])
        columns = _columns(value)
        sizes = [columns // len(node.output)] * len(node.output)
        if len(node.input) > 1 and node.input[1]:
            if node.input[1] not in self._constants:
                raise _UnsupportedError
            sizes = numpy_helper.to_array(self._constants[node.input[1]]).tolist()
        if not is_along_columns(node, 1) or sum(sizes) != columns or min(sizes) < 1:
            raise _UnsupportedError
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return {
            name: _part(value, start, size)
            for name, start, size in zip(node.output, starts, sizes, strict=True)
        }

    def _multiply(self, node: onnx.NodeProto, attributes: Mapping[str, float]) -> _Value:
        if not is_plain_product(attributes):
            raise _UnsupportedError
        left, right, *more = node.input
        value, matrix = self._operand(left), self._matrix(right)
        added = self._operand(more[0]) if more and more[0] else None
        if self._rows < MIN_ROWS and math.prod(self._shape(right, 2)) > MAX_ELEMENTS_OF_FEW_ROWS:
            raise _UnsupportedError
        if self._is_outside(value) or _columns(value) != self._shape(right, 2)[0]:
            raise _UnsupportedError
        if added is not None and (_columns(added) != matrix.columns or self._is_scalar(added)):
            raise _UnsupportedError
        place = self._in_one_place(value)
        summand = None if added is None else self._in_one_place(added)
        result = self._add_buffer(node.output[0], matrix.columns)
        self._program.append(_Instruction(PRODUCT, result, [place, matrix, summand]))
        return (result,)


def _columns(value: _Value) -> int:
    return sum(place.columns for place in value)


def _ends(value: _Value) -> Iterator[int]:
    """Yield the column behind each place of a value."""
    return accumulate(place.columns for place in value)


def _part(value: _Value, begin: int, columns: int) -> _Value:
    """Return the places of some of the columns of a value."""
    parts = []
    for place, end in zip(value, _ends(value), strict=True):
        start = end - place.columns
        first, last = max(begin, start), min(begin + columns, end)
        if first < last:
            parts.append(place.part(first - start, last - first))
    return tuple(parts)


def _direction(attributes: dict[str, Sequence[int]]) -> int:
    """Return 1 if a Scan goes from the last step to the first, else 0.

    All inputs and outputs must go in the same direction, along their first axis.
    """
    directions = {
        direction
        for name in ("scan_input_directions", "scan_output_directions")
        for direction in attributes.pop(name, [0])
    }
    if len(directions) != 1 or any(axis for axes in attributes.values() for axis in axes):
        raise _UnsupportedError
    return directions.pop()
