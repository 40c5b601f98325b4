"""The weights and constants that a node reads, directly or through nodes that rearrange them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

REARRANGING = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}


@dataclass(frozen=True)
class Matrix:
    """A float initializer, with its shape and element type at the node that reads it.

    `perm` are the axes of the initializer, in the order in which the node reads them.
    """

    initializer: ir.Value
    shape: tuple[int, ...]
    dtype: ir.DataType
    perm: tuple[int, ...]

    def array(self) -> npt.NDArray[Any]:
        """Return the numbers as the node reads them."""
        tensor = self.initializer.const_value
        assert tensor is not None
        return tensor.numpy().transpose(self.perm).astype(self.dtype.numpy())


def matrix_of(value: ir.Value | None) -> Matrix | None:
    """Return the initializer behind a value, through Identity, Transpose and Cast, or None.

    The result is None, too, if the initializer, or the value, is not a float tensor.
    """
    if value is None:
        return None
    if value.is_initializer():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point():
            return None
        shape = tuple(tensor.shape.numpy())
        return Matrix(value, shape, tensor.dtype, tuple(range(len(shape))))
    maker = value.producer()
    if maker is None or maker.op_type not in ("Cast", "Identity", "Transpose"):
        return None
    source = matrix_of(maker.inputs[0])
    if source is None or maker.op_type == "Identity":
        return source
    if maker.op_type == "Cast":
        target = ir.DataType(maker.attributes["to"].as_int())
        return replace(source, dtype=target) if target.is_floating_point() else None
    axes = range(len(source.shape))
    perm = maker.attributes["perm"].as_ints() if "perm" in maker.attributes else axes[::-1]
    return replace(
        source,
        shape=tuple(source.shape[axis] for axis in perm),
        perm=tuple(source.perm[axis] for axis in perm),
    )


def constant_elements(value: ir.Value | None) -> int | None:
    """Return the number of elements of an initializer or a Constant, or None for other values."""
    while value is not None:
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None:
            return tensor.size
        maker = value.producer()
        if maker is None or maker.op_type not in REARRANGING:
            return None
        value = maker.inputs[0]
    return None


def output_channels(node: ir.Node, shape: tuple[int, ...]) -> int | None:
    """Return the number of channels or features that a layer computes.

    - `node`: a Conv, ConvTranspose, Gemm or MatMul.
    - `shape`: the shape of its second input, the weight.

    None if the shape is not that of a weight.
    """
    if node.op_type == "Conv":
        return shape[0] if len(shape) > 2 else None
    if node.op_type == "ConvTranspose":
        return shape[1] * integer(node, "group", 1) if len(shape) > 2 else None
    if len(shape) != 2:
        return None
    return shape[0] if node.op_type == "Gemm" and integer(node, "transB", 0) else shape[1]


def integer(node: ir.Node, name: str, default: int) -> int:
    """Return an integer attribute of a node."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()
