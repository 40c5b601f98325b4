"""Weights that onnxruntime stores in a few bits: MatMulNBits, MatMulBnb4 and GatherBlockQuantized.

Several numbers share a byte, and the numbers of a block share a scale. The forward pass keeps
onnxruntime's kernel, which never holds the weights as floats. The backward pass converts the
weights of one layer at a time to floats, W = scale * level. The gradients of y = a W^T are:

    da = dy W      dscale = sum over the block of dW * level      with dW = dy^T a

Packed numbers have no gradient. Scales, float zero points and biases have one. For a kernel that
rounds the activations (`accuracy_level=4`), the gradients ignore that rounding.

The definitions are those of onnxruntime's documentation (docs/ContribOperators.md); tests compare
them with its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.blocker import TYPED
from onnxfit.gradients.building import (
    MICROSOFT,
    axis_size,
    int_vector,
    pad_axis,
    require_ints,
    reshape_like,
)
from onnxfit.gradients.notes import PACKED_DX, PACKED_DY, noted
from onnxfit.gradients.rules.indexing import gather
from onnxfit.gradients.rules.quantization import sum_blocks
from onnxfit.gradients.table import Gradients, NoGradientError, rule
from onnxfit.graph.inference import same_type
from onnxfit.graph.values import GraphBuilder, Value

# The 16 numbers of bitsandbytes' 4-bit floats: sign, two bits of exponent, one of mantissa.
_FP4_MAGNITUDES = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
FP4 = np.concatenate([_FP4_MAGNITUDES, -_FP4_MAGNITUDES])
# Quantiles of a normal distribution, scaled to [-1, 1] (Dettmers et al. 2023, arXiv:2305.14314).
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
     -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
     0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip


def _product_type_and_shape(node: ir.Node) -> None:
    """Give the output of a product the type and sizes of its first input, the last size is N."""
    same_type(node)
    first = node.inputs[0]
    out = node.outputs[0]
    if first is not None and first.shape is not None and out.shape is None:
        out.shape = ir.Shape([*first.shape[:-1], _int_attribute(node, "N", None)])


def _rows_type_and_shape(node: ir.Node) -> None:
    """Give the output of a GatherBlockQuantized the type of the scales, and its sizes."""
    data, indices, scales = (v for v in (*node.inputs, None, None, None)[:3])
    out = node.outputs[0]
    if scales is not None:
        out.type = out.type or scales.type
    if data is None or data.shape is None or indices is None or indices.shape is None:
        return
    sizes: list[int | ir.SymbolicDim | None] = list(data.shape)
    last = sizes[-1]
    if data.dtype == ir.DataType.UINT8 and isinstance(last, int):
        bits = _int_attribute(node, "bits", 4)
        sizes[-1] = last * 8 // bits if bits else None
    axis = _int_attribute(node, "gather_axis", 0)
    if out.shape is None and axis is not None and -len(sizes) <= axis < len(sizes):
        axis %= len(sizes)
        out.shape = ir.Shape([*sizes[:axis], *indices.shape, *sizes[axis + 1 :]])


def _int_attribute(node: ir.Node, name: str, default: int | None) -> int | None:
    """Return an attribute that is an integer; None for one of another type."""
    attribute = node.attributes.get(name)
    if attribute is None:
        return default
    return attribute.value if attribute.type == ir.AttributeType.INT else None


# Blocks
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Blocks:
    """How the numbers of a matrix lie in blocks.

    The matrix is read as `rows` rows of `columns` numbers, and each row is cut into blocks of
    `size` numbers. Numbers are missing at the end of the last block of a row.
    """

    rows: int
    columns: int
    size: int

    @property
    def count(self) -> int:
        """The number of blocks in a row."""
        return -(-self.columns // self.size)

    def split(self, op: GraphBuilder, numbers: Value) -> Value:
        """Return the numbers of a matrix as (rows, count, size), with zeros for missing ones."""
        rows = op.Reshape(numbers, int_vector(op, self.rows, self.columns))
        padded = pad_axis(op, rows, 1, 0, self.count * self.size - self.columns)
        return op.Reshape(padded, int_vector(op, self.rows, self.count, self.size))

    def join(self, op: GraphBuilder, blocks: Value) -> Value:
        """Return blocks as (rows, columns), without the missing numbers."""
        rows = op.Reshape(blocks, int_vector(op, -1, self.count * self.size))
        return pad_axis(op, rows, 1, 0, self.columns - self.count * self.size)


def _weight_gradient(op: GraphBuilder, a: Value, dy: Value, shape: tuple[int, int]) -> Value:
    """Return dW = dy^T a, over all rows of a batch."""
    n, k = shape
    rows_of_dy = op.Reshape(dy, int_vector(op, -1, n))
    return op.Gemm(rows_of_dy, op.Reshape(a, int_vector(op, -1, k)), transA=1)


def _when_it_runs(op: GraphBuilder, packed: Value, dy: Value) -> Value:
    """Return packed weights that onnxruntime does not treat as a constant.

    onnxruntime folds constants when it creates a session, and would store the weights of all layers
    as floats. Measured for six layers of (2048, 2048) and 4 bits: the process takes 286 instead of
    816 MB (onnxruntime 1.19).
    """
    first = op.Slice(op.Reshape(dy, int_vector(op, -1)), [0], [1])
    return op.Where(op.IsNaN(op.ReduceSum(first, keepdims=0)), packed, packed)


# Integers of 2, 4 or 8 bits
# --------------------------------------------------------------------------------------------------


@rule("MatMulNBits", MICROSOFT, infer=_product_type_and_shape)
def matmul_of_bits(
    op: GraphBuilder, a: Value, b: Value, scales: Value, zero_points: Value | None,
    g_idx: Value | None, bias: Value | None, y: Value, dy: Value,
    *, K: int, N: int, block_size: int, bits: int = 4,
) -> Gradients:  # fmt: skip
    """y = a W^T + bias, where the blocks lie along the rows of W, and W = scale (q - zero_point).

    The default zero point is 2^(bits - 1).
    """
    if g_idx is not None or bits not in (2, 4, 8):
        raise NoGradientError(
            f"its weights are packed in {bits} bits{' with g_idx' * (g_idx is not None)}",
            "use 2, 4 or 8 bits without g_idx",
        )
    require_ints(1, K=K, N=N, block_size=block_size, bits=bits)
    blocks = _Blocks(N, K, block_size)
    q = _PackedIntegers(blocks, _when_it_runs(op, b, dy), zero_points, bits)
    scale = op.Reshape(scales, int_vector(op, -1))

    def dw() -> Value:
        return blocks.split(op, _weight_gradient(op, a, dy, (N, K)))

    def of_scales() -> Value:
        ones = op.constant(np.ones(N * blocks.count), scales.dtype)
        return reshape_like(op, op.ReduceSum(dw() * q.in_blocks(op, ones), [2]), scales)

    def of_zero_points() -> Value:
        assert zero_points is not None
        sums = op.Reshape(op.ReduceSum(dw(), [2]), int_vector(op, -1))
        return reshape_like(op, -sums * scale, zero_points)

    def of_bias() -> Value:
        return op.ReduceSum(op.Reshape(dy, int_vector(op, -1, N)), [0], keepdims=0)

    def of_a() -> Value:
        attributes = {"K": K, "N": N, "block_size": block_size, "bits": bits}
        weights = [value.name if value is not None else "" for value in (b, scales, zero_points)]
        dx = noted(
            lambda: q.left_product(op, dy, scale),
            {PACKED_DY: dy},
            PACKED_DX,
            [*weights, attributes],
        )
        return reshape_like(op, dx, a)

    return (
        of_a,
        None,
        of_scales,
        of_zero_points if q.has_float_zero_points else None,
        None,
        of_bias,
    )


@dataclass(frozen=True)
class _PackedIntegers:
    """Integers of `bits` bits, packed into bytes from the lowest bits on, in blocks.

    `zero_points` has one number for each block: packed as the integers are, row by row, or a float,
    or None for 2^(bits - 1).
    """

    blocks: _Blocks
    packed: Value
    zero_points: Value | None
    bits: int

    @property
    def has_float_zero_points(self) -> bool:
        return self.zero_points is not None and self.zero_points.dtype != np.uint8

    def left_product(self, op: GraphBuilder, dy: Value, scale: Value) -> Value:
        """Return dy @ W as (batch, columns).

        W is in planes here, and the product is sorted instead. Measured for W of (2048, 2048) in
        4 bits, one thread: W takes 5 ms, sorted 8 ms, and by a table of all bytes 22 ms
        (onnxruntime 1.19 and 1.32).
        """
        rows = [
            op.Reshape(plane, int_vector(op, self.blocks.rows, -1))
            for plane in self._planes(op, scale)
        ]
        if len(rows) == 1:
            return self.blocks.join(op, dy @ rows[0])
        width = self.blocks.count * self.blocks.size // len(rows)
        product = op.Reshape(dy @ op.Concat(*rows, axis=1), int_vector(op, -1, len(rows), width))
        return self.blocks.join(op, op.Transpose(product, perm=[0, 2, 1]))

    def in_blocks(self, op: GraphBuilder, scale: Value) -> Value:
        """Return W as (rows, blocks, size)."""
        numbers = op.Concat(*(op.Unsqueeze(p, [-1]) for p in self._planes(op, scale)), axis=-1)
        return op.Reshape(
            numbers, int_vector(op, self.blocks.rows, self.blocks.count, self.blocks.size)
        )

    def _planes(self, op: GraphBuilder, scale: Value) -> list[Value]:
        """Return scale (q - zero_point) for the lowest bits of all bytes, the next bits and so on.

        `scale` has one number for each block; a plane is (rows * blocks, bytes of a block).
        """
        sizes = int_vector(op, self.blocks.rows * self.blocks.count, -1)
        planes = _split_bytes(op, op.Reshape(self.packed, sizes), self.bits)
        if self.zero_points is not None and self.has_float_zero_points:
            zeros = op.Unsqueeze(op.Reshape(self.zero_points, int_vector(op, -1)) * scale, [1])
            return [op.DequantizeLinear(plane, scale, axis=0) - zeros for plane in planes]
        zero = self._integer_zero_points(op)
        return [op.DequantizeLinear(plane, scale, zero, axis=0) for plane in planes]

    def _integer_zero_points(self, op: GraphBuilder) -> Value:
        """Return one zero point of uint8 for each block."""
        count = self.blocks.rows * self.blocks.count
        if self.zero_points is None:
            return op.constant(np.full(count, 2 ** (self.bits - 1), np.uint8))
        packed = op.Reshape(self.zero_points, int_vector(op, self.blocks.rows, -1))
        planes = [op.Unsqueeze(p, [-1]) for p in _split_bytes(op, packed, self.bits)]
        numbers = op.Reshape(op.Concat(*planes, axis=-1), int_vector(op, self.blocks.rows, -1))
        # the last byte of a row may hold fewer numbers
        used = op.Slice(numbers, [0], [self.blocks.count], [1])
        return op.Reshape(used, int_vector(op, -1))


def _split_bytes(op: GraphBuilder, packed: Value, bits: int) -> list[Value]:
    """Return the lowest bits of all bytes, the next bits, and so on."""
    if bits == 8:
        return [packed]
    if op.device == "cuda":  # CUDA has no operators for bits
        index = op.cast(packed, np.int32)
        numbers = np.arange(256, dtype=np.uint8)
        tables = [numbers >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
        return [op.Gather(op.constant(table), index) for table in tables]
    planes = []
    for shift in range(0, 8, bits):
        plane = packed
        if shift:
            plane = op.BitShift(plane, op.constant(np.uint8(shift)), direction="RIGHT")
        if shift + bits < 8:
            plane = op.BitwiseAnd(plane, op.constant(np.uint8(2**bits - 1)))
        planes.append(plane)
    return planes


# Floats of 4 bits
# --------------------------------------------------------------------------------------------------


@rule("MatMulBnb4", MICROSOFT, infer=_product_type_and_shape)
def matmul_of_4_bit_floats(
    op: GraphBuilder, a: Value, b: Value, absmax: Value, y: Value, dy: Value,
    *, K: int, N: int, block_size: int, quant_type: int, transB: int = 1,
) -> Gradients:  # fmt: skip
    """y = a W^T, where the blocks of W go on from row to row, and W = absmax * number.

    A byte names two of 16 numbers, the first by its upper four bits. The numbers are FP4 for
    `quant_type=0`, and NF4 for 1.
    """
    if quant_type not in (0, 1) or not transB:
        raise NoGradientError(
            f"it has quant_type={quant_type} and transB={transB}",
            "use quant_type 0 or 1, and transB=1",
        )
    require_ints(1, K=K, N=N, block_size=block_size)
    blocks = _Blocks(1, N * K, block_size)
    table = NF4 if quant_type else FP4
    byte = np.arange(256)
    pairs = op.constant(np.stack([table[byte >> 4], table[byte & 15]], axis=1), a.dtype)
    numbers = op.Gather(pairs, op.cast(_when_it_runs(op, b, dy), np.int32))
    # the last byte may hold one number
    used = op.Slice(op.Reshape(numbers, int_vector(op, -1)), [0], [N * K])
    level = blocks.split(op, used)

    def of_a() -> Value:
        scale = op.Reshape(absmax, int_vector(op, 1, -1, 1))
        w = blocks.join(op, level * scale)
        return dy @ op.Reshape(w, int_vector(op, N, K))

    def of_absmax() -> Value:
        dw = blocks.split(op, _weight_gradient(op, a, dy, (N, K)))
        return reshape_like(op, op.ReduceSum(dw * level, [2]), absmax)

    return of_a, None, of_absmax


# Rows of a table
# --------------------------------------------------------------------------------------------------


@rule("GatherBlockQuantized", MICROSOFT, infer=_rows_type_and_shape)
def gather_of_blocks(
    op: GraphBuilder, data: Value, indices: Value, scales: Value, zero_points: Value | None,
    y: Value, dy: Value,
    *, gather_axis: int = 0, quantize_axis: int = 1, block_size: int = 128, bits: int = 4,
) -> Gradients:  # fmt: skip
    """Rows of a table of W = scale (q - zero_point), whose blocks lie along `quantize_axis`."""
    if scales.shape is None or indices.shape is None:
        raise NoGradientError(f"the rank of {scales.name!r} or of its indices is unknown", TYPED)
    require_ints(1, block_size=block_size, bits=bits)
    require_ints(-scales.rank, gather_axis=gather_axis, quantize_axis=quantize_axis)
    axis, block_axis = gather_axis % scales.rank, quantize_axis % scales.rank

    def of_scales() -> Value:
        ones = op.Expand(op.constant(1, scales.dtype), op.shape(scales))
        level = op.GatherBlockQuantized(
            data, indices, ones, zero_points, _domain=MICROSOFT, gather_axis=gather_axis,
            quantize_axis=quantize_axis, block_size=block_size,
            bits=bits if data.dtype == np.uint8 else None,
        )  # fmt: skip
        product = dy * level
        if axis == block_axis:
            block = op.Div(op.cast(indices, np.int64), op.constant(np.int64(block_size)))
            by_index = gather(op, scales, block, y, product, axis=axis)
        else:
            in_product = block_axis if block_axis < axis else block_axis + indices.rank - 1
            count = axis_size(op, scales, block_axis)
            sums = sum_blocks(op, product, in_product, count, block_size)
            by_index = gather(op, scales, indices, y, sums, axis=axis)
        dscales: Value = by_index[0]
        return dscales

    return None, None, of_scales, None
