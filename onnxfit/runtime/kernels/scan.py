"""Loops over time as one operator each: the Scans of LSTM, GRU and RNN, and of their gradients.

onnxruntime runs each node of a Scan's body anew in every step, for some microseconds each. The
kernel goes through all steps with a few rows of the batch, which stay in the cache. No row reads
another one, so threads do not wait for each other between steps.

The body may have products with a matrix from outside, elementwise operators, Split and Concat.

Measured (networks of 8 steps with their gradients, 8 to 1024 hidden units, batches of 1 to 256, one
thread and two): LSTMs take 0.3 to 1.1 of their time without the kernel, GRUs and RNNs, of which
only the gradient is a Scan, 0.6 to 1.1. The constants below exclude sizes for which they took up to
1.7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import onnx
from onnx import helper, numpy_helper

from onnxfit.runtime.kernels.library import DOMAIN
from onnxfit.runtime.kernels.program import CODES, OPERATORS
from onnxfit.runtime.kernels.types import ResultType, declared_types

# Codes of kernels/src/scan.h.
COPY = len(CODES)
PRODUCT = COPY + 1
NOTHING = -1  # the buffer of the summand in a product that has none

# The kernel computes several rows at once, even if the batch has fewer. For fewer rows, a product
# with a larger matrix is slower than in onnxruntime.
MIN_ROWS = 4
MAX_ELEMENTS_OF_FEW_ROWS = 1 << 16


def replace_scans(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with a kernel for each Scan that has one.

    The nodes are returned themselves if no Scan has one.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    kernels = [_kernel_for(node, types, constants) for node in nodes]
    if not any(kernels):
        return nodes
    return [kernel or node for kernel, node in zip(kernels, nodes, strict=True)]


def _kernel_for(
    node: onnx.NodeProto, types: Mapping[str, ResultType], constants: Mapping[str, onnx.TensorProto]
) -> onnx.NodeProto | None:
    """Return the kernel for a Scan; None if there is none, or the node is no Scan."""
    if node.op_type != "Scan" or node.domain:
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
        attributes = {a.name: helper.get_attribute_value(a) for a in scan.attribute}
        body: onnx.GraphProto = attributes.pop("body")
        states = len(scan.input) - attributes.pop("num_scan_inputs")
        if len(scan.input) != len(body.input):
            raise _UnsupportedError
        self._scan = scan
        self._types = {**types, **declared_types(body)}
        self._constants = {**constants, **{tensor.name: tensor for tensor in body.initializer}}
        self._inner = {tensor.name for tensor in body.initializer}
        self._is_reverse = _direction(attributes)
        self._columns: dict[str, int] = {}  # of each buffer
        self._places: dict[str, _Place] = {}  # of each value
        self._rows = self._shape(body.input[0].name, 2)[0]
        self._states = [value.name for value in body.input[:states]]
        self._slices = [value.name for value in body.input[states:]]
        self._outside: dict[str, list[str]] = {"matrix": [], "vector": [], "scalar": []}
        self._program: list[_Instruction] = []
        for name in (*self._states, *self._slices):
            rows, columns = self._shape(name, 2)
            if rows != self._rows:
                raise _UnsupportedError
            self._places[name] = self._add_buffer(name, columns)
        for inner in body.node:
            self._run(inner)
        results = [self._operand(value.name) for value in body.output]
        self._next_states = results[:states]
        if any(place.buffer in self._inputs() for place in self._next_states):
            raise _UnsupportedError
        if any(map(self._is_outside, results)):
            raise _UnsupportedError
        columns_after = [place.columns for place in self._next_states]
        if columns_after != [self._columns[name] for name in self._states]:
            raise _UnsupportedError
        self._outputs: list[str] = []  # buffers
        for place in results[states:]:
            self._outputs.append(self._output_buffer(place))

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
        return helper.make_node(
            "Scan",
            [*scan.input, *self._inputs()[len(scan.input) :]],
            # a result that nothing reads may have no name
            [name or f"{scan.name}:{i}" for i, name in enumerate(scan.output)],
            scan.name,
            domain=DOMAIN,
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

    def _output_buffer(self, place: _Place) -> str:
        """Return the buffer of a result, or of a copy."""
        is_whole = place.columns == self._columns[place.buffer]
        if is_whole and place.buffer not in (*self._inputs(), *self._outputs):
            return place.buffer
        copy = self._add_buffer(f"{place.buffer}/{len(self._columns)}", place.columns)
        self._program.append(_Instruction(COPY, copy, [place]))
        return copy.buffer

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

    def _operand(self, name: str) -> _Place:
        """Return the place of rows in the body, or of a vector or scalar from outside."""
        if name not in self._places:
            known = self._types.get(name)
            if name in self._inner or known is None or any(n != 1 for n in known.shape[:-1]):
                raise _UnsupportedError
            columns = math.prod(self._shape(name, len(known.shape)))
            self._add_outside(name, "vector" if columns > 1 else "scalar", columns)
        if name in self._outside["matrix"]:
            raise _UnsupportedError
        return self._places[name]

    def _matrix(self, name: str) -> _Place:
        """Return the place of a matrix from outside."""
        if name not in self._places:
            self._add_outside(name, "matrix", self._shape(name, 2)[1])
        if name not in self._outside["matrix"]:
            raise _UnsupportedError
        return self._places[name]

    def _add_outside(self, name: str, kind: str, columns: int) -> None:
        self._places[name] = self._add_buffer(name, columns)
        self._outside[kind].append(name)

    def _is_outside(self, place: _Place) -> bool:
        return any(place.buffer in names for names in self._outside.values())

    def _is_scalar(self, place: _Place) -> bool:
        return place.buffer in self._outside["scalar"]

    def _run(self, node: onnx.NodeProto) -> None:
        """Add the instructions of a node of the body."""
        if node.domain:
            raise _UnsupportedError
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Split":
            self._places.update(self._split(node, attributes))
        elif node.op_type in ("MatMul", "Gemm"):
            self._places[node.output[0]] = self._multiply(node, attributes)
        elif node.op_type == "Identity":
            self._places[node.output[0]] = self._operand(node.input[0])
        elif node.op_type == "Concat" and attributes["axis"] in (1, -1):
            self._places[node.output[0]] = self._concatenate(node)
        elif OPERATORS.get(node.op_type) == len(node.input) and not attributes:
            self._places[node.output[0]] = self._compute(node)
        else:
            raise _UnsupportedError

    def _compute(self, node: onnx.NodeProto) -> _Place:
        places = [self._operand(name) for name in node.input]
        columns = {place.columns for place in places if not self._is_scalar(place)}
        if len(columns) != 1 or all(map(self._is_outside, places)):
            raise _UnsupportedError
        result = self._add_buffer(node.output[0], columns.pop())
        self._program.append(_Instruction(CODES[node.op_type], result, places))
        return result

    def _concatenate(self, node: onnx.NodeProto) -> _Place:
        places = [self._operand(name) for name in node.input]
        if any(map(self._is_scalar, places)) or all(map(self._is_outside, places)):
            raise _UnsupportedError
        result = self._add_buffer(node.output[0], sum(place.columns for place in places))
        column = 0
        for place in places:
            part = _Place(result.buffer, column, place.columns)
            self._program.append(_Instruction(COPY, part, [place]))
            column += place.columns
        return result

    def _split(self, node: onnx.NodeProto, attributes: Mapping[str, int]) -> dict[str, _Place]:
        place = self._operand(node.input[0])
        sizes = [place.columns // len(node.output)] * len(node.output)
        if len(node.input) > 1 and node.input[1]:
            if node.input[1] not in self._constants:
                raise _UnsupportedError
            sizes = numpy_helper.to_array(self._constants[node.input[1]]).tolist()
        if attributes.get("axis", 0) not in (1, -1) or sum(sizes) != place.columns:
            raise _UnsupportedError
        starts = [place.column + sum(sizes[:i]) for i in range(len(sizes))]
        return {
            name: _Place(place.buffer, start, size)
            for name, start, size in zip(node.output, starts, sizes, strict=True)
        }

    def _multiply(self, node: onnx.NodeProto, attributes: Mapping[str, float]) -> _Place:
        plain = {"alpha": 1, "beta": 1, "transA": 0, "transB": 0}
        if any(plain[name] != value for name, value in attributes.items()):
            raise _UnsupportedError
        left, right, *more = node.input
        place, matrix = self._operand(left), self._matrix(right)
        added = self._operand(more[0]) if more and more[0] else None
        if self._rows < MIN_ROWS and math.prod(self._shape(right, 2)) > MAX_ELEMENTS_OF_FEW_ROWS:
            raise _UnsupportedError
        if self._is_outside(place) or place.columns != self._shape(right, 2)[0]:
            raise _UnsupportedError
        if added is not None and (added.columns != matrix.columns or self._is_scalar(added)):
            raise _UnsupportedError
        result = self._add_buffer(node.output[0], matrix.columns)
        self._program.append(_Instruction(PRODUCT, result, [place, matrix, added]))
        return result


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
