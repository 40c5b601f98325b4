"""Check that packed weights have as many numbers as their operators read.

The kernels of MatMulNBits and MatMulBnb4 read as many bytes as the attributes of a node say.
onnxruntime compares them with the sizes of the inputs only in later versions. 1.20 and older
versions read beyond the end of a smaller tensor: they crash, or return what is in the memory there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.load.completion import MICROSOFT

BITS_OF_BYTE = 8
DEFAULT_BITS = 4
# Positions of inputs. An index of groups (g_idx) names the block of each row of a weight.
ACTIVATIONS, WEIGHT, SCALES, ZERO_POINTS, GROUPS = range(5)
# operator -> the whole numbers among its attributes that must be at least 1
ATTRIBUTES = {
    "MatMulNBits": ("K", "N", "block_size", "bits"),
    "MatMulBnb4": ("K", "N", "block_size"),
}
INPUTS = {
    "MatMulNBits": ("activations", "packed weights", "scales", "zero points", "index of groups"),
    "MatMulBnb4": ("activations", "packed weights", "scales"),
}


@dataclass(frozen=True)
class PackedInput:
    """An input of an operator with packed weights.

    - `name`: the name of the value.
    - `bits`: the bits of an integer of its element type; 0 for floats.
    - `count`: the number of its elements; None if it is unknown.
    - `array`: the numbers of a constant of whole numbers; None for any other value.
    """

    name: str
    bits: int
    count: int | None
    array: npt.NDArray[np.int64] | None = None


def has_packed_weights(model: onnx.ModelProto) -> bool:
    """Return whether a kernel of the model, or of its functions, reads packed weights."""
    graphs: list[Any] = [model.graph, *model.functions]
    nodes = (node for graph in graphs for node in nodes_of(graph))
    return any(node.domain == MICROSOFT and node.op_type in ATTRIBUTES for node in nodes)


def require_packed_sizes(graph: ir.Graph) -> None:
    """Raise ModelError for packed weights, scales or zero points of the wrong size.

    - `graph`: a graph with inferred shapes; the graphs inside its nodes are checked, too. An input
      of the graph may have an unknown size, because the caller passes it.
    """
    passed = {value for value in graph.inputs if _static_elements(value) is None}
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if node.domain == MICROSOFT and node.op_type in ATTRIBUTES:
            kind = ir.AttributeType.INT
            attributes = {n: a.as_int() for n, a in node.attributes.items() if a.type == kind}
            inputs = [
                None if value is None or value in passed else _packed_input(value)
                for value in node.inputs
            ]
            require_sizes(node.op_type, node.name or "", attributes, inputs)


def require_sizes(
    operator: str,
    name: str,
    attributes: Mapping[str, int],
    inputs: Sequence[PackedInput | None],
) -> None:
    """Raise ModelError for a node whose inputs do not have the sizes that its attributes require.

    - `operator`, `name`: the type and the name of the node.
    - `attributes`: its whole numbers.
    - `inputs`: its inputs; None for one that is absent or not checked.
    """
    node = f"{operator} {name!r}"
    settings = {name: attributes.get(name, 0) for name in ATTRIBUTES[operator]}
    if "bits" in settings:
        settings["bits"] = attributes.get("bits", DEFAULT_BITS)
    listed = ", ".join(f"{name}={value}" for name, value in settings.items())
    if min(settings.values()) < 1:
        raise ModelError(f"{node} has {listed}. Expected whole numbers of at least 1.")
    for position, (kind, packed) in enumerate(zip(INPUTS[operator], inputs)):
        if position == ACTIVATIONS or packed is None:
            continue
        if position == GROUPS:
            _require_groups(node, packed, settings)
            continue
        count = _required_count(operator, position, packed, settings)
        if packed.count != count:
            found = "an unknown number of" if packed.count is None else packed.count
            raise ModelError(
                f"The {kind} {packed.name!r} of {node} have {found} elements, but its attributes"
                f" {listed} require {count}. Quantize or export the model again."
            )


def _required_count(
    operator: str, position: int, packed: PackedInput, settings: Mapping[str, int]
) -> int:
    """Return the number of elements that the kernel reads of an input."""
    rows, columns, block_size = (settings[name] for name in ("N", "K", "block_size"))
    if operator == "MatMulBnb4":
        numbers = rows * columns
        return -(-numbers // 2) if position == WEIGHT else -(-numbers // block_size)
    bits = settings["bits"]
    blocks = -(-columns // block_size)
    bytes_of_row = -(-blocks * bits // BITS_OF_BYTE)
    if position == WEIGHT:
        bytes_of_row = blocks * (block_size * bits // BITS_OF_BYTE)
    elif position == SCALES or not packed.bits:
        return rows * blocks
    return rows * bytes_of_row * BITS_OF_BYTE // (packed.bits or BITS_OF_BYTE)


def _require_groups(node: str, packed: PackedInput, settings: Mapping[str, int]) -> None:
    """Check the numbers of an index of groups, which the kernel uses as positions of scales."""
    columns, block_size = settings["K"], settings["block_size"]
    blocks = -(-columns // block_size)
    array = packed.array
    has_size = array is not None and array.size in (columns, blocks * block_size)
    if has_size and array is not None and array.min() >= 0 and array.max() < blocks:
        return
    raise ModelError(
        f"The index of groups {packed.name!r} of {node} must be a constant with {columns} whole"
        f" numbers from 0 to {blocks - 1}. Quantize or export the model again."
    )


def _packed_input(value: ir.Value) -> PackedInput:
    bits = value.dtype.bitwidth if value.dtype is not None and value.dtype.is_integer() else 0
    array = None
    if value.dtype in (ir.DataType.INT32, ir.DataType.INT64):
        tensor = ir.convenience.get_const_tensor(value)
        array = None if tensor is None else tensor.numpy().astype(np.int64)
    return PackedInput(value.name or "", bits, _static_elements(value), array)


def _static_elements(value: ir.Value) -> int | None:
    """Return the number of elements of a value; None if a size is unknown."""
    sizes = [] if value.shape is None else [size for size in value.shape if isinstance(size, int)]
    is_known = value.shape is not None and len(sizes) == value.shape.rank()
    return math.prod(sizes) if is_known else None
