"""Products with packed weights (MatMulNBits) as one operator, and the gradients of their inputs.

In operators of ONNX, the gradient converts all weights of a layer to floats in each step. The
kernel of onnxruntime for the product packs the weights anew, in a copy for each session. The
kernels here read the weights where they are, and convert a few of them at a time.

The kernel of the product is mostly slower than onnxruntime's, so only large models use it, to save
memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
from onnx import TensorProto

from onnxfit.gradients.notes import PACKED_DX, PACKED_DY
from onnxfit.graph import names
from onnxfit.graph.index import attributes_of
from onnxfit.graph.tensors import MAX_PACKED_BYTES
from onnxfit.kernels.library import has_products, library_path
from onnxfit.kernels.search import ResultType, declared_types, make_node, paired_notes

MIN_INPUTS = 3  # the floats, the integers and their scales
MIN_BLOCK = 16
SIZES = ("K", "N", "block_size")
BITS = (2, 4, 8)
# Of accuracy_level, which is the least accuracy that a product must have. For higher levels, such
# as 4, the kernel of onnxruntime rounds the activations.
FLOAT_LEVELS = (0, 1)


def replace_packed_products(
    nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType], *, keep_rounding: bool
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with kernels for products with packed weights.

    The nodes that are not needed any more are still there. The nodes are returned themselves if
    there is no such product. `keep_rounding`: as for `with_kernels`.
    """
    kernels = {kernel.output[0]: kernel for kernel in _noted_gradients(nodes, types)}
    products = product_kernels(nodes, types, keep_rounding=keep_rounding)
    kernels |= {kernel.output[0]: kernel for _, kernel in products}
    return [kernels.get(node.output[0], node) for node in nodes] if kernels else nodes


def products_with_kernels(
    graph: onnx.GraphProto, device: str, *, keep_rounding: bool
) -> list[onnx.NodeProto]:
    """Return the products of a graph that `use_kernels` would replace."""
    if not any(node.op_type == "MatMulNBits" for node in graph.node):
        return []  # before the types of a large graph are collected
    library = library_path() if device == "cpu" else None
    if library is None or not has_products(library):
        return []
    pairs = product_kernels(graph.node, declared_types(graph), keep_rounding=keep_rounding)
    return [node for node, _ in pairs]


def product_kernels(
    nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType], *, keep_rounding: bool
) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto]]:
    """Yield each product y = a W^T + bias that a kernel computes, and the kernel.

    `keep_rounding`: as for `with_kernels`.
    """
    products = [n for n in nodes if n.op_type == "MatMulNBits" and len(n.input) >= MIN_INPUTS]
    if sum(_bytes(types.get(node.input[1])) for node in products) <= MAX_PACKED_BYTES:
        return
    for node in products:
        attributes = attributes_of(node)
        a, b, scales, zeros, g_idx, bias = (*node.input, "", "", "")[:6]
        rounds = attributes.pop("accuracy_level", 0) not in FLOAT_LEVELS
        if g_idx or (rounds and keep_rounding):
            continue
        kernel = _packed_kernel(
            "PackedProduct", node, [a, b, scales, zeros], bias, attributes, types
        )
        if kernel is not None:
            yield node, kernel


def _noted_gradients(
    nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Iterator[onnx.NodeProto]:
    """Yield the kernel of each noted gradient da = dy W; see `gradients.notes.PACKED_DX`."""
    for reader, producer in paired_notes(nodes, PACKED_DY, PACKED_DX):
        b, scales, zeros, attributes = producer.content
        (position,) = reader.content
        shared = names.packed(b)
        integers = shared if shared in types else b
        inputs = [reader.node.input[position], integers, scales, zeros]
        kernel = _packed_kernel(
            "PackedProductGradient", producer.node, inputs, "", attributes, types
        )
        if kernel is not None:
            yield kernel


def _packed_kernel(
    op_type: str,
    replaced: onnx.NodeProto,
    inputs: Sequence[str],
    bias: str,
    attributes: Mapping[str, Any],
    types: Mapping[str, ResultType],
) -> onnx.NodeProto | None:
    """Return the node of a kernel; None if there is none for these types and sizes.

    - `inputs`: the floats, the integers, their scales and zero points; "" for no zero points.
    """
    integers, scales, zeros = (types.get(name) for name in inputs[1:])
    if not all(isinstance(attributes.get(name), int) for name in SIZES):
        return None  # onnxruntime says what is missing
    block, bits = attributes["block_size"], attributes.get("bits", 4)
    if bits not in BITS or block < MIN_BLOCK or block % MIN_BLOCK:
        return None
    if integers is None or integers.element != TensorProto.UINT8:
        return None
    # The floats have the type of the scales.
    if scales is None or scales.element != TensorProto.FLOAT:
        return None
    if inputs[3] and (zeros is None or zeros.element not in (TensorProto.UINT8, TensorProto.FLOAT)):
        return None
    return make_node(
        op_type,
        [name for name in (*inputs, bias) if name],
        replaced.output[:1],
        replaced.name,
        has_bias=int(bool(bias)),
        K=attributes["K"],
        N=attributes["N"],
        bits=bits,
        block_size=block,
    )


def _bytes(packed: ResultType | None) -> int:
    sizes = () if packed is None else packed.shape
    return math.prod(size for size in sizes if isinstance(size, int)) if sizes else 0
