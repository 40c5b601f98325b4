"""The units of a weight: the parts that compute one output of a layer each."""

from __future__ import annotations

import onnx_ir as ir

# Operators whose output is the same weight, perhaps rounded.
SAME = frozenset({"Cast", "DequantizeLinear", "Identity", "QuantizeLinear"})


def unit_axes(weight: ir.Value) -> tuple[int, ...]:
    """Return the axes of a weight over which the elements of one unit extend.

    A unit is a column of the matrix (inputs, outputs) of MatMul or Gemm, a row of a transposed
    one, a filter, a row of an embedding table, or a row of a recurrent layer's matrix. The first
    layer that reads the weight counts. A weight that no such layer reads, such as a bias or the
    scale of a norm, is one unit if at most one of its sizes is above 1; otherwise its first axis
    counts the units.
    """
    sizes = list(weight.shape or ())
    axes = tuple(range(len(sizes)))
    if len(sizes) < 2:
        return axes
    found = _read_by_layer(weight, axes)
    if found is not None:
        return found
    return axes if sum(size != 1 for size in sizes) <= 1 else axes[1:]


def _read_by_layer(value: ir.Value, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the axes of the weight over which a unit extends; None if no layer reads it.

    - `axes`: for each axis of `value`, the axis of the weight that it is.
    """
    for node, index in value.uses():
        found = None
        if node.op_type == "Transpose":
            attribute = node.attributes.get("perm")
            order = range(len(axes))[::-1] if attribute is None else attribute.as_ints()
            found = _read_by_layer(node.outputs[0], tuple(axes[i] for i in order))
        elif node.op_type in SAME and index == 0:
            found = _read_by_layer(node.outputs[0], axes)
        else:
            summed = _summed(node, index, len(axes))
            found = None if summed is None else tuple(sorted(axes[i] for i in summed))
        if found is not None:
            return found
    return None


def _summed(node: ir.Node, index: int, rank: int) -> tuple[int, ...] | None:
    """Return the axes of input number `index` over which a layer sums for one output."""
    kind = node.op_type, index
    if kind == ("MatMul", 1):
        return (rank - 2,)
    if kind == ("MatMul", 0):
        return (rank - 1,)
    if node.op_type == "Gemm" and index < 2:
        attribute = node.attributes.get("transB" if index else "transA")
        is_transposed = attribute is not None and bool(attribute.as_int())
        return (int(is_transposed == bool(index)),)
    if kind in (("Conv", 1), ("Gather", 0)):
        return tuple(range(1, rank))
    if kind == ("ConvTranspose", 1):
        return (0, *range(2, rank))
    if node.op_type in ("GRU", "LSTM", "RNN") and index in (1, 2, 3):
        return (rank - 1,)
    return None
