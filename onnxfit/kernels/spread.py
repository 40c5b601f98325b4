"""Parameters that a kernel repeats along the axes of a larger value, such as scales of channels.

They are inputs and constants of the graph. Computed values, such as the sums of a softmax, are left
to the operators that read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxfit.graph.index import attributes_of
from onnxfit.kernels.search import NodeSearch, ResultType, make_node

Shape = Sequence[int | str]
# Operators that give the elements of their first input another shape.
_RESHAPES = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}


class Spread(NamedTuple):
    """A value whose runs of elements are each repeated, and all of them again from the first on.

    For a matrix with 4 columns, scales of its rows have `Spread(scales, 1, 4)`, and scales of its
    columns `Spread(scales, 1, 1)`.
    """

    source: str
    run: int
    repeats: int


def spread_along(shape: Shape, axis: int, block_size: int = 0) -> tuple[int, int] | None:
    """Return the run and the repeats of scales along an axis; None if sizes do not allow them.

    - `shape`: that of the values that are scaled.
    - `block_size`: the number of indices that share a scale; 0 for one scale for each index.
    """
    inner = _product(shape[axis + 1 :])
    if inner is None:
        return None
    if not block_size:
        return 1, inner
    size = shape[axis]
    is_whole = axis == 0 or (isinstance(size, int) and size % block_size == 0)
    return (inner, block_size) if is_whole else None


class SpreadSearch(NodeSearch):
    """A search that finds spread values, each once."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        nodes: Sequence[onnx.NodeProto],
        types: Mapping[str, ResultType],
    ) -> None:
        super().__init__(graph, nodes, types)
        self._spreads: dict[tuple[str, Shape], Spread | None] = {}

    def spread(self, name: str, result: ResultType) -> Spread | None:
        """Return how a value becomes as large as a result; None if it does not, or is as large."""
        key = name, result.shape
        if key not in self._spreads:
            self._spreads[key] = self._find(name, result)
        return self._spreads[key]

    def _find(self, name: str, result: ResultType) -> Spread | None:
        known = self.types.get(name)
        if known is None or known.element != result.element or known.is_scalar:
            return None
        if known.shape == result.shape:
            return self._gathered(name, result.shape)
        axes = _own_axes(known.shape, result.shape)
        if not axes:
            return None
        repeats = _product(result.shape[axes[-1] + 1 :])
        source = self._parameter(name)
        return None if repeats is None or not source else Spread(source, 1, repeats)

    def _gathered(self, name: str, shape: Shape) -> Spread | None:
        """Return the blocks whose scales a Gather repeats for each index of an axis."""
        gather = self.producers.get(name)
        if gather is None or gather.op_type != "Gather" or gather.domain:
            return None
        scales, indices = gather.input
        if scales not in self.types or indices not in self.constants:
            return None
        axis = attributes_of(gather).get("axis", 0) % len(shape)
        found = numpy_helper.to_array(self.constants[indices])
        if found.ndim != 1 or found.size < 2 or found[0] != 0:
            return None
        block_size = int(np.searchsorted(found, 1))
        if not np.array_equal(found, np.arange(found.size) // block_size):
            return None
        by = spread_along(shape, axis, block_size)
        source = self._parameter(scales)
        return None if by is None or not source else Spread(source, *by)

    def _parameter(self, name: str) -> str:
        """Return the input or constant with the elements of a value in their order; "" for none."""
        while name in self.producers and name not in self.constants:
            node = self.producers[name]
            if node.domain or node.op_type not in _RESHAPES:
                return ""
            name = node.input[0]
        return name if name in self.types else ""


def add_spread(
    name: str, scales: str, shape: Shape, axis: int, block_size: int, types: dict[str, ResultType]
) -> list[onnx.NodeProto]:
    """Return the nodes that make scales along an axis broadcast to a shape, as the value `name`.

    `types` gets the types of their results.
    """
    if block_size:
        indices = np.arange(int(shape[axis])) // block_size
        types[name] = ResultType(types[scales].element, tuple(shape))
    else:
        indices = np.arange(1, len(shape) - axis)
        types[name] = ResultType(types[scales].element, (shape[axis], *[1] * indices.size))
    constant = f"{name}/numbers"
    value = helper.make_tensor(constant, onnx.TensorProto.INT64, indices.shape, indices)
    types[constant] = ResultType(onnx.TensorProto.INT64, indices.shape)
    nodes = [make_node("Constant", [], [constant], constant, value=value, domain="")]
    op_type, attributes = ("Gather", {"axis": axis}) if block_size else ("Unsqueeze", {})
    return [*nodes, make_node(op_type, [scales, constant], [name], name, domain="", **attributes)]


def _own_axes(small: Shape, large: Shape) -> list[int]:
    """Return the adjacent axes of a shape along which a smaller one is not repeated, else []."""
    offset = len(large) - len(small)
    if offset < 0:
        return []
    axes = [i + offset for i, size in enumerate(small) if size != 1]
    fits = all(small[i - offset] == large[i] for i in axes)
    return axes if fits and axes == list(range(axes[0], axes[0] + len(axes))) else []


def _product(sizes: Shape) -> int | None:
    numbers = [size for size in sizes if isinstance(size, int)]
    return math.prod(numbers) if len(numbers) == len(sizes) else None
