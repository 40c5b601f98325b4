"""Weights with several numbers in a byte (MatMulNBits), as integers behind DequantizeLinear.

The weight W of y = a W + bias lies in the file column by column. A column has blocks of numbers
with one scale each: (N, blocks, bytes of a block). `unpack` writes the same real numbers as

    q (integers, (K, N)) -> DequantizeLinear -> MatMul(a, .) -> Add(., bias)

with the scales as (blocks, N). The initializers keep their names, so other modules train q like all
integers. `PackedTensor.with_numbers` brings trained numbers back into the bytes.

DequantizeLinear does not accept float zero points z. The real numbers are then its output without
z, minus the shift, which is s z for each block.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError, listed_names
from onnxfit.graph import protos
from onnxfit.graph.index import tensors_of
from onnxfit.graph.replacement import NodeReplacement, replace_nodes
from onnxfit.graph.shared_tensors import array_of
from onnxfit.graph.subgraphs import read_by
from onnxfit.load.completion import MICROSOFT, opset_of
from onnxfit.load.opset import IR_VERSION, OPSET, convert_opset
from onnxfit.load.packed_sizes import PackedInput, require_sizes
from onnxfit.trainable.quantized.integer_weight import with_integers, with_numbers
from onnxfit.trainable.quantized.learning import MIN_SCALE
from onnxfit.trainable.quantized.parameters import Array

OPERATOR = "MatMulNBits"
ACTIVATIONS, WEIGHT, SCALE, ZERO_POINT, GROUPS, BIAS = range(6)  # the inputs
DEFAULT_BITS = 4
# bits -> the type of integers with zero points, and the type without, whose middle becomes 0
TYPES = {
    4: (onnx.TensorProto.UINT4, onnx.TensorProto.INT4),
    8: (onnx.TensorProto.UINT8, onnx.TensorProto.INT8),
}


# Tensors
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """An initializer of a MatMulNBits. Each row of its numbers fills whole bytes.

    - `tensor`: the initializer of the file.
    - `shape`: (columns, rows), the shape of the numbers. Padding completes the bytes of a row.
    - `bits`: the bits of an integer; 0 for floats.
    - `middle`: the packed integer that represents 0.
    - `instead_of_zero`: the float that replaces 0. onnxruntime's quantizer gives a block of zeros
      the scale 0, which cannot be a divisor.
    """

    tensor: onnx.TensorProto
    shape: tuple[int, int]
    bits: int = 0
    middle: int = 0
    instead_of_zero: float = 0

    @property
    def numbers(self) -> Array:
        """The integers in 64 bits, or the floats, in the shape `shape`."""
        used = self._rows()[:, : self.shape[0]].T
        if self.bits:
            return used.astype(np.int64) - self.middle
        return np.where(used == 0, used.dtype.type(self.instead_of_zero), used)

    def with_numbers(self, numbers: Array) -> onnx.TensorProto:
        """Return the initializer with other numbers. Equal numbers keep their bits."""
        rows = self._rows()
        used = rows[:, : self.shape[0]]
        used[...] = np.where(numbers == self.numbers, used.T, numbers + self.middle).T
        packed = _pack(rows, self.bits) if self.bits else rows
        return with_numbers(self.tensor, packed.reshape(tuple(self.tensor.dims)))

    def unpacked(self, name: str, element_type: int) -> onnx.TensorProto:
        """Return an initializer of the numbers.

        - `element_type`: the type of the integers.
        """
        if not self.bits:
            return onnx.numpy_helper.from_array(np.ascontiguousarray(self.numbers), name)
        empty = onnx.TensorProto(name=name, data_type=element_type, dims=self.shape)
        return with_integers(empty, self.numbers)

    def _rows(self) -> Array:
        """Return the numbers of each row, with its padding."""
        rows = array_of(self.tensor).reshape(self.shape[1], -1)
        return _unpack(rows, self.bits) if self.bits else rows.copy()


def _unpack(packed: Array, bits: int) -> Array:
    """Return the numbers of each byte, lowest bits first."""
    numbers = [packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
    return np.stack(numbers, axis=-1).reshape(len(packed), -1)


def _copy(tensor: onnx.TensorProto) -> onnx.TensorProto:
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    return copy


def _pack(numbers: Array, bits: int) -> Array:
    """Return the bytes of numbers, the inverse of `_unpack`."""
    planes = numbers.reshape(len(numbers), -1, 8 // bits) << np.arange(0, 8, bits, dtype=np.uint8)
    return np.asarray(np.bitwise_or.reduce(planes, axis=-1))


@dataclass(frozen=True, eq=False)
class Shift:
    """The number s z that is added to each weight before rounding.

    - `name`: the value of the unpacked model that has it, of the weight's shape.
    - `zero_points`: z, floats of shape (blocks, N).
    """

    name: str
    zero_points: Array


@dataclass(frozen=True)
class PackedLayout:
    """How the tensors of a MatMulNBits are packed: its attributes.

    - `is_symmetric`: whether the node has no zero points.
    """

    rows: int
    columns: int
    block_size: int
    bits: int
    is_symmetric: bool

    @property
    def blocks(self) -> int:
        """The number of blocks in a row."""
        return -(-self.columns // self.block_size)

    @property
    def element_type(self) -> int:
        """The type of the unpacked integers."""
        return TYPES[self.bits][self.is_symmetric]

    def of(self, position: int, tensor: onnx.TensorProto) -> PackedTensor:
        """Return the numbers of an input of the node."""
        if position == WEIGHT:
            middle = 2 ** (self.bits - 1) if self.is_symmetric else 0
            return PackedTensor(tensor, (self.columns, self.rows), self.bits, middle)
        if position == SCALE:
            return PackedTensor(tensor, (self.blocks, self.rows), instead_of_zero=MIN_SCALE)
        bits = self.bits if tensor.data_type == onnx.TensorProto.UINT8 else 0
        return PackedTensor(tensor, (self.blocks, self.rows), bits)


# Nodes
# --------------------------------------------------------------------------------------------------


def packed_weights(model: onnx.ModelProto) -> list[str]:
    """Return the initializers that are packed weights of a MatMulNBits, in the model's order."""
    read = {node.input[WEIGHT] for node in model.graph.node if _is_product(node)}
    return [tensor.name for tensor in model.graph.initializer if tensor.name in read]


def _is_product(node: onnx.NodeProto) -> bool:
    is_operator = (node.op_type, node.domain) == (OPERATOR, MICROSOFT)
    return is_operator and len(node.input) > SCALE and len(node.output) == 1


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A model with unpacked weights.

    - `model`: the model.
    - `packed`: the tensors that were packed, by their names.
    - `shifts`: a mapping from weight to its shift, for weights with float zero points.
    """

    model: onnx.ModelProto
    packed: Mapping[str, PackedTensor] = field(default_factory=dict)
    shifts: Mapping[str, Shift] = field(default_factory=dict)


def unpack(model: onnx.ModelProto, names: Collection[str]) -> Unpacked:
    """Return a model with unpacked weights.

    - `model`: the model, which stays unchanged.
    - `names`: the packed weights to unpack.

    ModelError: another node also reads a weight, or a weight cannot be unpacked.
    """
    if not any(_is_product(node) and node.input[WEIGHT] in names for node in model.graph.node):
        return Unpacked(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if (opset_of(model) or 0) < OPSET:  # the first opset that dequantizes blocks
        copy = convert_opset(copy)
        copy.ir_version = max(copy.ir_version, IR_VERSION)
    unpacking = _Unpacking(copy, names)
    return Unpacked(copy, unpacking.packed, unpacking.shifts)


class _Unpacking:
    """Replace the nodes that read packed weights, in place; see `Unpacked`."""

    def __init__(self, model: onnx.ModelProto, names: Collection[str]) -> None:
        self.packed: dict[str, PackedTensor] = {}
        self.shifts: dict[str, Shift] = {}
        self._model = model
        self._graph = model.graph
        self._tensors = tensors_of(model.graph)
        self._layouts = {
            node.output[0]: layout_of(node, self._tensors)
            for node in model.graph.node
            if _is_product(node) and node.input[WEIGHT] in names
        }
        self._used = protos.used_names(model)
        self._uses = self._uses_of_tensors()
        self._added: dict[tuple[str, int, PackedLayout], onnx.TensorProto] = {}
        self._weights: dict[tuple[str, ...], str] = {}
        nodes = [new for node in model.graph.node for new in self._replacement(node)]
        replace_nodes(model.graph, nodes)
        self._replace_tensors()

    def _uses_of_tensors(self) -> dict[str, set[tuple[str, int, PackedLayout | None]]]:
        """Return a mapping from initializer to its readers, with their positions and layouts."""
        uses: dict[str, set[tuple[str, int, PackedLayout | None]]] = {}
        for node in self._graph.node:
            layout = self._layout_of(node)
            for name in read_by(node) & self._tensors.keys():
                position = list(node.input).index(name) if layout else -1
                label = OPERATOR if layout else f"{node.op_type} {node.name!r}"
                uses.setdefault(name, set()).add((label, position, layout))
        return uses

    def _layout_of(self, node: onnx.NodeProto) -> PackedLayout | None:
        """Return the layout of a node to replace; None for any other node."""
        return self._layouts.get(next(iter(node.output), ""))

    def _replacement(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes that replace a node; the node itself if it stays."""
        layout = self._layout_of(node)
        if layout is None:
            return [node]
        new = NodeReplacement(node, self._used)
        inputs = [*node.input, "", "", ""]
        names = tuple(inputs[WEIGHT : ZERO_POINT + 1])
        if names not in self._weights:
            self._weights[names] = self._dequantized(new, layout, *names)
        output, bias = node.output[0], inputs[BIAS]
        weight = self._weights[names]
        product = new("MatMul", inputs[ACTIVATIONS], weight, output=None if bias else output)
        if bias:
            new("Add", product, bias, output=output)
        return new.nodes

    def _dequantized(
        self, new: NodeReplacement, layout: PackedLayout, weight: str, scale: str, zero_point: str
    ) -> str:
        """Return the real numbers of a weight."""
        settings: dict[str, Any] = {"axis": 0, "block_size": layout.block_size}
        weight = self._unpacked(weight, WEIGHT, layout)
        scale = self._unpacked(scale, SCALE, layout)
        zeros = self._tensors.get(zero_point)
        if zeros is None or zeros.data_type != onnx.TensorProto.FLOAT:
            zero_point = zero_point and self._unpacked(zero_point, ZERO_POINT, layout)
            return new("DequantizeLinear", weight, scale, zero_point, **settings)
        floats = layout.of(ZERO_POINT, zeros).numbers
        block = new.constant(np.arange(layout.columns) // layout.block_size)
        shift = new("Gather", new("Mul", scale, new.constant(floats)), block, axis=0)
        self.shifts[weight] = Shift(shift, floats)
        return new("Sub", new("DequantizeLinear", weight, scale, **settings), shift)

    def _unpacked(self, name: str, position: int, layout: PackedLayout) -> str:
        """Return the name of an unpacked tensor: its own, unless other nodes also read it."""
        key = name, position, layout
        if key not in self._added:
            packed, unpacked = layout.of(position, _copy(self._tensors[name])), name
            if self._uses[name] == {(OPERATOR, position, layout)}:
                self.packed[name] = packed
            elif position == WEIGHT:
                raise _read_otherwise(name, [label for label, *_ in self._uses[name]])
            else:
                unpacked = protos.unique_name(f"{name}/unpacked", self._used)
            self._added[key] = packed.unpacked(unpacked, layout.element_type)
        return self._added[key].name

    def _replace_tensors(self) -> None:
        """Replace the packed tensors by the unpacked ones."""
        added = {tensor.name: tensor for tensor in self._added.values()}
        for info in [i for i in (*self._graph.input, *self._graph.value_info) if i.name in added]:
            tensor = added[info.name]
            info.CopyFrom(
                onnx.helper.make_tensor_value_info(info.name, tensor.data_type, tensor.dims)
            )
        for tensor in self._graph.initializer:
            if tensor.name in added:
                tensor.CopyFrom(added.pop(tensor.name))
        self._graph.initializer.extend(added.values())
        read = {name for node in self._graph.node for name in read_by(node)}
        for name in {*self._uses} - read:  # float zero points are constants now
            protos.remove_initializer(self._model, name)


# Errors
# --------------------------------------------------------------------------------------------------


def layout_of(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> PackedLayout:
    """Return the layout of a node's tensors. ModelError: the tensors cannot be unpacked."""
    kind = onnx.AttributeProto.INT
    settings = {"bits": DEFAULT_BITS, "N": 0, "K": 0, "block_size": 0}
    settings |= {a.name: a.i if a.type == kind else 0 for a in node.attribute}
    rows, columns, block_size, bits = (settings[n] for n in ("N", "K", "block_size", "bits"))
    inputs = [*node.input, "", "", ""]
    if inputs[GROUPS]:
        raise _not_trained(node, "its numbers are grouped by an index (g_idx)")
    if bits not in TYPES:
        raise _not_trained(node, f"its attribute bits is {bits}, expected 4 or 8")
    if min(rows, columns, block_size) < 1:
        raise _not_trained(node, f"it has N={rows}, K={columns} and block_size={block_size}")
    layout = PackedLayout(rows, columns, block_size, bits, not inputs[ZERO_POINT])
    for position in (WEIGHT, SCALE, ZERO_POINT):
        name = inputs[position]
        if name:
            _check_tensor(node, position, name, tensors)
    read = ["", *inputs[WEIGHT : ZERO_POINT + 1]]  # the sizes of activations are not checked
    packed = [_packed_input(tensors[name]) if name else None for name in read]
    require_sizes(OPERATOR, node.name, settings, packed)
    return layout


def _packed_input(tensor: onnx.TensorProto) -> PackedInput:
    element_type = ir.DataType(tensor.data_type)
    bits = element_type.bitwidth if element_type.is_integer() else 0
    return PackedInput(tensor.name, bits, math.prod(tensor.dims))


def _check_tensor(
    node: onnx.NodeProto,
    position: int,
    name: str,
    tensors: Mapping[str, onnx.TensorProto],
) -> None:
    """Raise ModelError for an input whose type or numbers cannot be trained."""
    if name not in tensors:
        raise _not_trained(node, f"{name!r} is not an initializer")
    tensor = tensors[name]
    types = {
        WEIGHT: (onnx.TensorProto.UINT8,),
        SCALE: (onnx.TensorProto.FLOAT,),
        ZERO_POINT: (onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT),
    }[position]
    if tensor.data_type not in types:
        found, *expected = (ir.DataType(t).name.lower() for t in (tensor.data_type, *types))
        raise _not_trained(node, f"{name!r} is {found}, expected {' or '.join(expected)}")
    if not np.isfinite(array_of(tensor)).all():
        raise _not_trained(node, f"{name!r} contains NaN or infinity")


def _not_trained(node: onnx.NodeProto, reason: str) -> ModelError:
    return ModelError(
        f"The packed weight {node.input[WEIGHT]!r} of {OPERATOR} {node.name!r} cannot be trained"
        f" in floats: {reason}. Exclude it with"
        f" quantization=onnxfit.Quantization(weights={'!' + node.input[WEIGHT]!r})."
    )


def _read_otherwise(name: str, readers: Collection[str]) -> ModelError:
    listed = listed_names(sorted(readers))
    return ModelError(
        f"The packed weight {name!r} is read in several ways, by {listed}, but can be trained for"
        " only one of these ways. Give each node its own copy, or exclude the weight with"
        f" quantization=onnxfit.Quantization(weights={'!' + name!r})."
    )
