"""Find the fixed filters between an input of a network and its first trained layer.

Networks for sound often begin with a transform that is not trained: frames times a window, the
cosines and sines of a Fourier transform, a magnitude, the bands of a mel scale, a logarithm. A file
has their filters as initializers, like weights. A tensor belongs to such a front end by its place
and by its numbers: only filters and functions without weights are between an input and the node
that reads it, a magnitude or a logarithm follows, and the numbers fit a formula of `filter_values`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.graph.activations import ONLY_MOVING
from onnxfit.graph.filter_values import (
    is_band_bank,
    is_low_pass,
    is_monotonic,
    is_uniform_bank,
    is_window,
    is_windowed_bank,
)
from onnxfit.graph.fold import evaluate
from onnxfit.graph.index import constant_of
from onnxfit.graph.subgraphs import subgraphs_of

MAGNITUDES = {"Abs", "Log", "Pow", "ReduceL2", "ReduceLogSum", "ReduceSumSquare", "Sqrt"}
LINEAR = {"Add", "Cast", "Concat", "Div", "Mul", "Neg", "Pad", "ReduceMean", "ReduceSum", "Sub"}
PASSING = ONLY_MOVING | LINEAR | {"Clip", "Max", "Min"}
OTHERS = {"DFT", "Exp", "ReduceMax", "ReduceMin", "STFT", "Where"}
LAYERS = {"Conv", "Gemm", "MatMul"}
FACTORS = {"Div", "Mul"}
MAX_ELEMENTS = 2**24  # of a filter bank
MAX_VALUES = 2**12  # that are searched for a magnitude
MAX_NAME_CHARACTERS = 12  # of a name in a reason
MAX_CHAIN = 16  # nodes that compute a filter bank from initializers

STFT, CQT, DCT = "STFT filter bank", "CQT filter bank", "cosine transform"
MEL, WINDOW, LOW_PASS, SCALE = "mel filter bank", "window", "low-pass filter", "filter bank's scale"

Array = npt.NDArray[np.float64]
Use = tuple[ir.Node, int]


@dataclass(frozen=True)
class _Stage:
    """The place of a value in a front end.

    - `origin`: the name of the graph input that it is computed from.
    - `has_bank`: whether filters of a Fourier transform are before it.
    - `is_magnitude`: whether a magnitude is before it.
    """

    origin: str
    has_bank: bool = False
    is_magnitude: bool = False


def short_name(name: str) -> str:
    """Return a name for a role or a reason, without its beginning if it is long."""
    return name if len(name) <= MAX_NAME_CHARACTERS else f"…{name[1 - MAX_NAME_CHARACTERS :]}"


def front_end_filters(
    model: ir.Model, candidates: Collection[str], known: Container[str] = ()
) -> dict[str, str]:
    """Return initializer -> its role, for the filters of front ends.

    - `model`: a model that `normalize` returned.
    - `candidates`: the initializers that look like weights.
    - `known`: other weights, whose numbers are not read.

    The role names the filters and the input, such as "STFT filter bank at 'audio'".
    """
    walk = _Walk(model.graph, candidates, known)
    if walk.places:
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            walk.visit(node)
            if not walk.is_open:
                break
    return walk.roles()


class _Walk:
    """The walk through the nodes of a graph in their order, from its float inputs.

    - `places`: the values of front ends.
    - `is_open`: whether a node that is not visited yet reads one of them.
    """

    def __init__(self, graph: ir.Graph, candidates: Collection[str], known: Container[str]) -> None:
        tensors = graph.initializers
        self._candidates = {tensors[name]: name for name in candidates}
        self._known = {value for name, value in tensors.items() if name in known}
        self._opset = graph.opset_imports.get("", 1)
        self.places = {
            value: _Stage(value.name or "")
            for value in graph.inputs
            if value.dtype is not None and value.dtype.is_floating_point()
        }
        # values that depend on no input -> the candidates that they depend on
        self._stored: dict[ir.Value, frozenset[str]] = {
            value: frozenset(name for name in (self._candidates.get(value),) if name is not None)
            for value in tensors.values()
            if value not in self._known
        }
        self._accepted: dict[Use, str] = {}
        self._kinds: dict[tuple[object, ...], str | None] = {}  # of filters that several nodes read
        self._unvisited = {node for value in self.places for node in value.consumers()}

    @property
    def is_open(self) -> bool:
        return bool(self._unvisited)

    def roles(self) -> dict[str, str]:
        """Return the candidates all of whose uses are uses of filters, with their roles."""
        found = {}
        for value, name in self._candidates.items():
            uses = [(use.node, use.idx) for use in value.uses()]
            if uses and all(use in self._accepted for use in uses) and not value.is_graph_output():
                found[name] = self._accepted[uses[0]]
        return found

    def visit(self, node: ir.Node) -> None:
        """Note the places of a node's outputs, if it belongs to a front end."""
        self._unvisited.discard(node)
        operands = [value for value in node.inputs if value is not None]
        if node.op_type in ("Shape", "Size"):
            self._stored[node.outputs[0]] = frozenset()
            return
        if all(value in self._stored for value in operands) and not subgraphs_of(node):
            found = frozenset().union(*(self._stored[value] for value in operands))
            self._stored.update(dict.fromkeys(node.outputs, found))
            return
        place = self._place_after(node, operands)
        if place is not None:
            self.places.update(dict.fromkeys(node.outputs, place))
            self._unvisited.update(user for v in node.outputs for user in v.consumers())

    def _place_after(self, node: ir.Node, operands: list[ir.Value]) -> _Stage | None:
        """Return the place of a node's outputs; None if they are outside of a front end."""
        floats = [v for v in operands if v.dtype is None or v.dtype.is_floating_point()]
        data = [self.places[value] for value in floats if value in self.places]
        if node.domain or not data or any(v not in self.places | self._stored for v in floats):
            return None
        place = _Stage(
            data[0].origin,
            any(one.has_bank for one in data),
            any(one.is_magnitude for one in data),
        )
        weights = [i for i, v in enumerate(node.inputs) if v is not None and self._stored.get(v)]
        if weights:
            return self._after_filter(node, weights, place)
        if node.op_type in MAGNITUDES or _is_square(node):
            return _Stage(place.origin, place.has_bank, is_magnitude=True)
        known = node.op_type in PASSING or node.op_type in OTHERS or node.op_type in LAYERS
        return place if known else None

    def _after_filter(self, node: ir.Node, weights: list[int], place: _Stage) -> _Stage | None:
        """Return the place after a node that reads candidates, if they are filters."""
        *others, last = weights
        if others and not (node.op_type in LAYERS and weights == [1, 2]):
            return None
        if others and not self._is_zero(node.inputs[last]):
            return None
        index = weights[0]
        kind = self._kind_of(node, index, place)
        if kind is None or not self._leads_on(node, kind, place):
            return None
        for i in weights:
            self._accept(node, i, f"{kind} at {short_name(place.origin)!r}")
        return _Stage(place.origin, place.has_bank or kind in (STFT, CQT), place.is_magnitude)

    def _kind_of(self, node: ir.Node, index: int, place: _Stage) -> str | None:
        """Return what the numbers are that a node multiplies by, and look at them once."""
        transposed = [node.attributes.get_int(name, 0) for name in ("transA", "transB", "group")]
        key = (node.inputs[index], node.op_type, index, *transposed, place)
        if key not in self._kinds:
            array = self._array(node.inputs[index])
            self._kinds[key] = None if array is None else _kind(node, index, array, place)
        return self._kinds[key]

    def _leads_on(self, node: ir.Node, kind: str, place: _Stage) -> bool:
        """Return whether a magnitude or logarithm is before filters of this kind, or follows."""
        return place.is_magnitude or self._reaches_magnitude(
            node, through_layers=kind in (WINDOW, LOW_PASS)
        )

    def _reaches_magnitude(self, start: ir.Node, *, through_layers: bool = False) -> bool:
        """Return whether a magnitude or logarithm follows a node, before any layer with weights.

        - `through_layers`: whether layers with weights may be between them.
        """
        waiting, seen = [*start.outputs], set(start.outputs)
        while waiting and len(seen) < MAX_VALUES:
            for node in waiting.pop().consumers():
                if node.domain:
                    continue
                if node.op_type in MAGNITUDES or _is_square(node):
                    return True
                is_layer = node.op_type in LAYERS and (through_layers or not self._reads(node))
                if is_layer or node.op_type in PASSING:
                    waiting += [value for value in node.outputs if value not in seen]
                    seen.update(node.outputs)
        return False

    def _reads(self, node: ir.Node) -> bool:
        """Return whether a node reads an initializer that looks like a weight."""
        return any(v in self._candidates or v in self._known for v in node.inputs)

    def _accept(self, node: ir.Node, index: int, role: str) -> None:
        """Note the uses of candidates by an input of a node, and by the nodes that compute it."""
        waiting: list[Use] = [(node, index)]
        while waiting:
            use = waiting.pop()
            self._accepted[use] = role
            value = use[0].inputs[use[1]]
            producer = None if value is None else value.producer()
            if producer is not None and value is not None and len(value.uses()) == 1:
                waiting += [(producer, i) for i in range(len(producer.inputs))]

    def _is_zero(self, value: ir.Value | None) -> bool:
        array = self._array(value)
        return array is not None and not array.any()

    def _array(self, value: ir.Value | None) -> Array | None:
        """Return the numbers of an initializer, or of a value that nodes compute from some."""
        assert value is not None
        nodes: dict[ir.Node, None] = {}
        waiting = [value]
        while waiting and len(nodes) <= MAX_CHAIN:
            node = waiting.pop().producer()
            if node is not None:
                nodes.pop(node, None)  # to the end: it is computed before its readers
                nodes[node] = None
                waiting += [v for v in node.inputs if v is not None]
        if len(nodes) > MAX_CHAIN or not all(_is_small(v) for node in nodes for v in node.outputs):
            return None
        arrays: dict[ir.Value, npt.NDArray[Any]] = {}
        for node in reversed(nodes):
            feeds: dict[str, npt.NDArray[Any]] = {}
            for one in node.inputs:
                known = None if one is None else arrays.get(one, constant_of(one, MAX_ELEMENTS))
                if one is not None and known is None:
                    return None
                if one is not None and known is not None:
                    feeds[one.name or ""] = known
            try:
                found = evaluate(node, feeds, self._opset)
            # The reference may lack an operator, or the node may fail.
            except Exception:
                return None
            arrays.update(zip(node.outputs, found))
        array = arrays.get(value, constant_of(value, MAX_ELEMENTS))
        if array is None or not 0 < array.size <= MAX_ELEMENTS:
            return None
        return np.asarray(array, np.float64)


def _is_small(value: ir.Value) -> bool:
    """Return whether a computed value is known to fit into memory."""
    sizes = [0] if value.shape is None else [n if isinstance(n, int) else 0 for n in value.shape]
    return 0 < math.prod(sizes) <= MAX_ELEMENTS


def _kind(node: ir.Node, index: int, array: Array, place: _Stage) -> str | None:
    """Return what the numbers are that a node multiplies by, by their formula."""
    if node.op_type in FACTORS:
        # After a magnitude, it may be the scale of a normalization.
        if max(array.shape, default=0) != array.size or place.is_magnitude:
            return None
        numbers = array.reshape(-1)
        if node.op_type == "Mul" and is_window(numbers):
            return WINDOW
        return SCALE if place.has_bank and is_monotonic(numbers) else None
    rows = _filters(node, index, array)
    if rows is None:
        return None
    if len(rows) == 1:
        is_first = node.op_type == "Conv" and not place.is_magnitude
        return LOW_PASS if is_first and is_low_pass(rows[0]) else None
    if is_uniform_bank(rows):
        return DCT if place.is_magnitude else STFT
    if not place.is_magnitude and is_windowed_bank(rows):
        return CQT
    return MEL if is_band_bank(rows) else None


def _is_square(node: ir.Node) -> bool:
    return node.op_type == "Mul" and len(set(node.inputs)) == 1


def _filters(node: ir.Node, index: int, array: Array) -> Array | None:
    """Return the filters of a layer, one in each row; None for filters with several axes."""
    if node.op_type == "Conv":
        is_line = index == 1 and node.attributes.get_int("group", 1) == 1
        is_line = is_line and max(array.shape[1:], default=0) == array[0].size
        return array.reshape(len(array), -1) if is_line else None
    if array.ndim != 2:
        return None
    is_right = index == 1
    if node.op_type == "Gemm":
        name = "transB" if is_right else "transA"
        is_transposed = node.attributes.get_int(name, 0) == 1
        return array if is_transposed == is_right else array.T
    return array.T if is_right else array
