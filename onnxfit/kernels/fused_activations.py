"""Compute the activation of a dense layer inside its product, as onnxruntime's optimizer does.

onnxruntime's own fusion searches all nodes for each name that it makes, and then checks and infers
the whole graph again.
"""

from __future__ import annotations

from collections import Counter

import onnx

from onnxfit.graph.subgraphs import read_by
from onnxfit.load.completion import import_domain

# In smaller graphs, onnxruntime's own fusion takes no time to speak of.
MIN_NODES_TO_FUSE = 1000
# Activations without attributes that both operators compute by the same function, to the same bits.
ACTIVATIONS = {"Relu", "Sigmoid", "Tanh"}
MICROSOFT = "com.microsoft"


def with_fused_activations(model: onnx.ModelProto, device: str) -> onnx.ModelProto:
    """Return a copy of a model in which each Gemm computes the activation that alone reads it.

    The model itself is returned if it has no such Gemm, or fewer than `MIN_NODES_TO_FUSE` nodes, or
    if the device is not the CPU.
    """
    graph = model.graph
    if device != "cpu" or len(graph.node) < MIN_NODES_TO_FUSE:
        return model
    positions = _fusible(graph)
    if not positions:
        return model
    fused = onnx.ModelProto()
    fused.CopyFrom(model)
    import_domain(fused)
    nodes = fused.graph.node
    for of_product, of_activation in positions.items():
        product, activation = nodes[of_product], nodes[of_activation]
        product.op_type, product.domain = "FusedGemm", MICROSOFT
        product.attribute.append(onnx.helper.make_attribute("activation", activation.op_type))
        product.output[0] = activation.output[0]
    # Removing single nodes is faster than a list without them, which would copy all others.
    for position in sorted(positions.values(), reverse=True):
        del nodes[position]
    return fused


def _fusible(graph: onnx.GraphProto) -> dict[int, int]:
    """Return the position of each Gemm whose activation can be fused -> that of the activation."""
    products = {
        node.output[0]: i
        for i, node in enumerate(graph.node)
        if node.op_type == "Gemm" and not node.domain
    }
    readers = Counter(name for node in graph.node for name in read_by(node) if name in products)
    readers.update(value.name for value in graph.output)
    # FusedGemm has a kernel for float32 alone.
    floats = {
        value.name
        for value in graph.value_info
        if value.name in products and value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    fusible = {name for name in floats if readers[name] == 1}
    return {
        products[node.input[0]]: i
        for i, node in enumerate(graph.node)
        if node.op_type in ACTIVATIONS and not node.domain and node.input[0] in fusible
    }
