"""Sizes, known integers and batch axes of values, and the error that names a node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.errors import ModelError
from onnxfit.graph.fold import computed_values
from onnxfit.graph.inference import InputsError, describe, infer_outputs
from onnxfit.graph.subgraphs import subgraphs_of

Array = npt.NDArray[Any]

REMEDY = (
    "Export the model with a dynamic batch size (torch.onnx.export(..., dynamic_shapes=...)), or"
    " change this node."
)


@dataclass(frozen=True)
class BatchAxis:
    """The axis of a value that counts the rows of the batch.

    Its size is `outer` times the rows times any number. If other axes were merged into it, `outer`
    is the number of entries before the rows. With `is_new`, the value of the original, which has
    one row, lacks the axis.
    """

    axis: int
    outer: int = 1
    is_new: bool = False


@dataclass
class Choice:
    """A Reshape with several axes that may be the batch.

    - `position`: the number of the node in the graph.
    - `candidates`: how many axes there are; `chosen` is the number of one of them.
    - `changes`, `ends`: how many changes and ends there were before this node.
    """

    position: int
    candidates: int
    changes: int
    ends: int
    chosen: int = 0


class BatchAxisError(ModelError):
    """The node `name` does not allow another batch size."""

    name: str = ""


def hides_batch(node: ir.Node, axes: Mapping[str, BatchAxis | None]) -> BatchAxisError:
    """Return the error for an If, Loop or Scan whose graphs read the batch, with the remedy.

    - `axes`: the batch axis of each input that has one.
    """
    if node.op_type != "If":
        return batch_axis_error(node, "the batch enters its body, which is not changed")
    condition = node.inputs[0]
    sources = sorted(v.name or "" for v in sources_of(condition) if v.is_graph_input())
    name = None if condition is None else condition.name
    reason = f"the batch enters its branches, and its condition {name!r} is unknown"
    if not sources or any(axes.get(source) for source in sources):
        reason += ", because it is computed from inputs with a batch" if sources else ""
        return batch_axis_error(node, reason, "Replace the If by the branch that you use.")
    reason += f", because it depends on {', '.join(map(repr, sources))}"
    values = ", ".join(f"{source!r}: ..." for source in sources)
    return batch_axis_error(
        node,
        reason,
        "Give the input the value that you use, so that one branch remains:"
        f" dynamic_batch(model, fixed_inputs={{{values}}}).",
    )


def sources_of(value: ir.Value | None) -> set[ir.Value]:
    """Return the values without a producer that a value is computed from."""
    waiting, seen = [value], set[ir.Value]()
    found = set()
    while waiting:
        current = waiting.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        producer = current.producer()
        if producer is None:
            found.add(current)
        else:
            waiting += read_by(producer)
    return found


def read_by(node: ir.Node) -> list[ir.Value | None]:
    """Return the values that a node reads, also inside its subgraphs."""
    inner = [v for body in subgraphs_of(node) for n in body for v in read_by(n)]
    outputs = [v for body in subgraphs_of(node) for v in body.outputs]
    return [*node.inputs, *inner, *outputs]


def batch_axis_error(node: ir.Node, reason: str, remedy: str = REMEDY) -> BatchAxisError:
    """Return the error that names a node that prevents another batch size."""
    error = BatchAxisError(
        f"The batch size cannot be changed, because of {node.op_type} {node.name!r}: {reason}."
        f" {remedy}"
    )
    error.name = node.name or ""
    return error


def sizes_of(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the shape of a value, or None if one of its sizes is unknown."""
    if value is None or value.shape is None:
        return None
    sizes = tuple(size for size in value.shape if isinstance(size, int))
    return sizes if len(sizes) == len(value.shape) else None


def constant_of(node: ir.Node, position: int) -> Array | None:
    """Return the integers of an input if they are known, or else None."""
    value = node.inputs[position] if position < len(node.inputs) else None
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or not tensor.dtype.is_integer():
        return None
    return tensor.numpy()


def resolved(target: Array, sizes: Sequence[int], copies: bool) -> list[int] | None:
    """Return the sizes of a Reshape's result, or None if the number of elements does not fit."""
    if copies and any(t == 0 and i >= len(sizes) for i, t in enumerate(target)):
        return None
    result = [sizes[i] if t == 0 and copies else int(t) for i, t in enumerate(target)]
    known = math.prod(size for size in result if size != -1)
    total = math.prod(sizes)
    if -1 in result and known and total % known == 0:
        result[result.index(-1)] = total // known
    return result if math.prod(result) == total and -1 not in result else None


def repeats(tensor: ir.TensorProtocol, axis: int, entries: int) -> bool:
    """Return whether a tensor repeats its first `entries` along an axis."""
    array = tensor.numpy()
    first = array.take(range(entries), axis)
    tiles = [array.shape[axis] // entries if i == axis else 1 for i in range(array.ndim)]
    return bool((array == np.tile(first, tiles)).all())


def infer(graph: ir.Graph, node: ir.Node, *, strict: bool) -> None:
    """Set shapes and known values of a node's outputs."""
    if subgraphs_of(node):
        return  # bodies declare the sizes of the file
    try:
        infer_outputs(graph, node)
    except InputsError as error:
        if strict:
            shapes = ", ".join(describe(value) for value in node.inputs)
            raise batch_axis_error(node, f"it does not accept {shapes}") from error
        return
    except ValueError:
        return
    for value, array in zip(node.outputs, computed_values(node, graph) or ()):
        value.const_value = ir.tensor(array, name=value.name)
