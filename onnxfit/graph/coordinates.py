"""Find grids of positions, strides and bins between the last trained layer and the outputs.

A detector adds the grid of its cells to what it predicts, and multiplies by the strides; others
predict a distribution over equidistant bins, and compute its mean. A file has these numbers as
initializers. They are recognized by their numbers, arithmetic progressions and powers of two, and
by their place: no weight is between them and an output.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.graph.activations import ONLY_MOVING, SOFTMAX, activation_of, node_of
from onnxfit.graph.subgraphs import subgraphs_of

COMBINING = {"Add", "Div", "Mul", "Sub"}
LAYERS = {"Conv", "Gemm", "MatMul"}
GRID, STRIDES, BINS = "grid of positions", "vector of strides", "grid of a softmax's bins"
MIN_ELEMENTS = 8
MIN_BINS = 4
MAX_ELEMENTS = 2**22
MAX_COORDINATES = 4
MAX_LEVELS = 8  # of a detector, each with a stride
TOLERANCE = 1e-3  # of a step

Array = npt.NDArray[Any]


def coordinates(
    model: ir.Model, candidates: Collection[str], known: Container[str] = ()
) -> dict[str, str]:
    """Return initializer -> its role, for grids, strides and bins.

    - `model`: a model that `normalize` returned.
    - `candidates`: the initializers that look like weights.
    - `known`: other weights, whose numbers are not read.
    """
    tensors = model.graph.initializers
    roles = {name: _role_of_numbers(tensors[name]) for name in candidates}
    found = {tensors[name]: role for name, role in roles.items() if role is not None}
    if not found:
        return {}
    weights = {value for name, value in tensors.items() if name in candidates or name in known}
    weights.difference_update(found)
    before = _values_before(model.graph, weights)
    return {
        value.name or "": role
        for value, role in found.items()
        if not any(output in before for node in value.consumers() for output in node.outputs)
    }


def _values_before(graph: ir.Graph, weights: Collection[ir.Value]) -> set[ir.Value]:
    """Return all values from which the nodes that read weights are computed.

    A node with bodies, and all nodes in them, are taken for one.
    """
    nodes = [*ir.traversal.RecursiveGraphIterator(graph)]
    bodies = {node: [n for body in subgraphs_of(node) for n in body] for node in nodes}
    outer = {inner: node for node, inside in bodies.items() for inner in inside}
    waiting = [node for node in nodes if any(value in weights for value in node.inputs)]
    seen = set(waiting)
    values: set[ir.Value] = set()
    while waiting:
        node = waiting.pop()
        inputs = [value for value in node.inputs if value is not None]
        values.update(inputs)
        before = [value.producer() for value in inputs]
        for one in (*before, *bodies[node], outer.get(node)):
            if one is not None and one not in seen:
                seen.add(one)
                waiting.append(one)
    return values


def _role_of_numbers(value: ir.Value) -> str | None:
    """Return the role of an initializer by its numbers and the nodes that read it."""
    uses = [(use.node, use.idx) for use in value.uses()]
    tensor = value.const_value
    if tensor is None or not uses or value.is_graph_output() or tensor.size > MAX_ELEMENTS:
        return None
    if all(_averages(*use) for use in uses):
        numbers = tensor.numpy().reshape(-1)
        return BINS if len(numbers) >= MIN_BINS and _is_progression(numbers) else None
    if tensor.size < MIN_ELEMENTS:
        return None
    if all(node.op_type == "Gather" and index == 0 for node, index in uses):
        numbers = tensor.numpy()
        is_line = max(numbers.shape) == numbers.size
        return GRID if is_line and _is_progression(numbers.reshape(-1)) else None
    if not all(_combines(*use) for use in uses):
        return None
    numbers = tensor.numpy()
    if _is_mesh(numbers):
        return GRID
    is_factor = all(node.op_type in ("Mul", "Div") for node, _ in uses)
    return STRIDES if is_factor and _is_strides(numbers.reshape(-1)) else None


def _combines(node: ir.Node, index: int) -> bool:
    """Return whether a node adds a tensor to a computed value, or multiplies by it."""
    if node.op_type not in COMBINING or node.domain:
        return False
    other = node.inputs[1 - index]
    return other is not None and ir.convenience.get_const_tensor(other) is None


def _averages(node: ir.Node, index: int) -> bool:
    """Return whether a node multiplies a softmax by a tensor."""
    is_factor = node.op_type == "Mul" or (node.op_type in LAYERS and index == 1)
    if not is_factor or node.domain:
        return False
    data = node.inputs[1 - index] if node.op_type == "Mul" else node.inputs[0]
    source = node_of(data)
    while source is not None and source.op_type in ONLY_MOVING:
        data = source.inputs[0]
        source = node_of(data)
    found = activation_of(data)
    return found is not None and found.operator == SOFTMAX


def _is_progression(numbers: Array) -> bool:
    """Return whether numbers have the same distance, as those of `arange` and `linspace`."""
    steps = np.diff(numbers.astype(np.float64))
    return bool(steps[0] != 0 and (np.abs(steps - steps[0]) <= TOLERANCE * abs(steps[0])).all())


def _is_mesh(numbers: Array) -> bool:
    """Return whether numbers are the coordinates of a grid, or of the grids of several levels."""
    for axis in (None, *(i for i, n in enumerate(numbers.shape) if 1 < n <= MAX_COORDINATES)):
        if all(map(_is_coordinate, _lines(numbers, axis))):
            return True
    return False


def _lines(numbers: Array, axis: int | None) -> Iterator[Array]:
    """Yield the numbers of each coordinate. Without an axis of coordinates, there is one."""
    if axis is None:
        yield numbers.reshape(-1)
    else:
        yield from np.moveaxis(numbers, axis, 0).reshape(numbers.shape[axis], -1)


def _is_coordinate(line: Array) -> bool:
    """Return whether each number is the one before, or a step more, or the first one again."""
    line = line.astype(np.float64)
    steps = np.diff(line)
    rises = steps[steps > 0]
    if not np.isfinite(line).all() or not len(rises):
        return False
    step = float(rises.min())
    again = np.abs(line[1:] - line[0])
    nearest = np.minimum(np.minimum(np.abs(steps), np.abs(steps - step)), again)
    has_three = float(np.ptp(line)) > 1.5 * step
    return has_three and bool((nearest <= TOLERANCE * step).all())


def _is_strides(numbers: Array) -> bool:
    """Return whether numbers are powers of two, each repeated for the cells of a level."""
    found = np.unique(numbers)
    changes = int(np.count_nonzero(np.diff(numbers)))
    if not 1 < len(found) <= changes + 1 <= MAX_LEVELS or found[0] < 2 or len(numbers) < 64:
        return False
    mantissas, _ = np.frexp(found.astype(np.float64))
    return bool((mantissas == 0.5).all())
