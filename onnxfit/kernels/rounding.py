"""The precision of products on the CPU: in bf16, their factors are rounded to bfloat16.

In bf16x3, each factor is the sum of two numbers of bfloat16: the factor rounded, and what rounding
takes off it, rounded. The product adds three of the four products of these numbers (Henry, Tang and
Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations", 2019).

A graph names the precision in its metadata. The precision is that of the products in the model and
in its gradient; losses and optimizers compute in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import onnx

from onnxfit.errors import warn_user
from onnxfit.graph import names, scopes
from onnxfit.kernels.convolutions import depthwise_gradient_nodes
from onnxfit.kernels.library import PairInstructions, pair_instructions
from onnxfit.kernels.search import make_node

PRODUCTS = {"MatMul", "Gemm", "Einsum"}
# By the name in the metadata: the number of product::Precision in kernels/src/product.h.
PRECISIONS = {"bf16": 1, "bf16x3": 2}


def precision_of(graph: onnx.GraphProto) -> int:
    """Return the precision of a graph's products, a value of PRECISIONS; 0 for float32.

    Products in bf16x3 are float32 without instructions for bfloat16: this is faster and more exact.
    """
    named = _name_of(graph)
    if named == "bf16x3" and not pair_instructions():
        return 0
    return PRECISIONS[named] if named else 0


def _name_of(graph: onnx.GraphProto) -> str | None:
    return next((e.value for e in graph.metadata_props if e.key == names.PRODUCTS), None)


def rounded_products(graph: onnx.GraphProto) -> set[str]:
    """Return the results of the products of the model and of the model's gradient.

    Products in the gradients of depthwise convolutions are not among them: fewer and faster
    operators replace them, in float32.
    """
    products = (n for n in graph.node if n.op_type in PRODUCTS and not n.domain and is_of_model(n))
    return {node.output[0] for node in products} - depthwise_gradient_nodes(graph)


def is_of_model(node: onnx.NodeProto) -> bool:
    """Return whether a node computes the model or the model's gradient."""
    return scopes.stage_of(scopes.original_of(node.name)) == scopes.MODEL


def rounds_loops(graph: onnx.GraphProto) -> bool:
    """Return whether products in loops of the model have factors of bfloat16.

    They are float32 without instructions for bfloat16.
    """
    return _name_of(graph) == "bf16" and pair_instructions() != PairInstructions.NONE


def rounds_convolutions(graph: onnx.GraphProto) -> bool:
    """Return whether convolutions of the model have factors of bfloat16.

    They are float32 without AVX512-BF16. They are float32 with AMX, too, since their kernels have
    no loops for it.
    """
    return _name_of(graph) == "bf16" and pair_instructions() == PairInstructions.AVX512_BF16


def with_rounded_factors(model: onnx.ModelProto, device: str) -> onnx.ModelProto:
    """Return the model with Casts before the products that no operator in C++ computes.

    In bf16x3, these products stay float32.
    """
    precision = _name_of(model.graph)
    if precision is not None:
        _warn_of_speed(precision)
    if precision != "bf16":
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(_nodes_with_casts(model.graph))
    return result


def _nodes_with_casts(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph; each factor is rounded once, before its first product."""
    others = _other_types(graph)
    products = rounded_products(graph)
    rounded: set[str] = set()
    for node in graph.node:
        if node.output[0] not in products:
            yield node
            continue
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        factors = len(node.input) if node.op_type == "Einsum" else 2
        for i, name in enumerate(node.input[:factors]):
            if name in others:
                continue
            narrow, wide = f"{name}/bfloat16", f"{name}/rounded"
            if name not in rounded:
                rounded.add(name)
                yield _cast(name, narrow, onnx.TensorProto.BFLOAT16)
                yield _cast(narrow, wide, onnx.TensorProto.FLOAT)
            changed.input[i] = wide
        yield changed


def _cast(x: str, y: str, element: int) -> onnx.NodeProto:
    return make_node("Cast", [x], [y], y, domain="", to=element)


def _other_types(graph: onnx.GraphProto) -> set[str]:
    """Return the values that are declared with another type than float32."""
    values = (*graph.input, *graph.value_info, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name for name, element in types.items() if element != onnx.TensorProto.FLOAT}


@cache
def _warn_of_speed(precision: str) -> None:
    """Warn once if a precision saves no time on this processor."""
    found = pair_instructions()
    if not found:
        happens = {
            "bf16": "Factors of products are rounded to bfloat16 and multiplied in float32.",
            "bf16x3": "Products are computed in float32, which is more exact.",
        }
        warn_user(
            f"precision={precision!r} is not faster than 'float32' here: this processor has no"
            " AVX512-BF16 or AMX, or onnxfit's operators in C++ are not used."
            f" {happens[precision]} Use precision='float32' for training."
        )
    elif precision == "bf16x3" and found < PairInstructions.AMX:
        warn_user(
            "precision='bf16x3' is slower than 'float32' here: three products with AVX512-BF16 take"
            " longer than one in float32. Use it on processors with AMX, and precision='float32'"
            " or 'bf16' on this one."
        )
