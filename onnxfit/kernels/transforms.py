"""The changes of a graph that is compiled, and the one that puts operators in C++ into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import onnx
from onnx import helper

from onnxfit.graph.subgraphs import remove_unused_nodes
from onnxfit.kernels.batch_norm import replace_batch_norms
from onnxfit.kernels.blocked_convolutions import with_blocked_convolutions
from onnxfit.kernels.column_sums import replace_column_sums
from onnxfit.kernels.dense import replace_convolutions
from onnxfit.kernels.elementwise import fuse_elementwise
from onnxfit.kernels.fake_quantize import replace_roundings
from onnxfit.kernels.fused_activations import with_fused_activations
from onnxfit.kernels.gather import replace_gather_gradients
from onnxfit.kernels.layer_norm import replace_layer_norms
from onnxfit.kernels.library import DOMAIN, has_products, library_path
from onnxfit.kernels.low_rank import replace_low_rank_gradients
from onnxfit.kernels.max_pool import replace_pool_gradients
from onnxfit.kernels.packed import replace_packed_products
from onnxfit.kernels.products import replace_products
from onnxfit.kernels.rounding import with_rounded_factors
from onnxfit.kernels.scan import replace_scans
from onnxfit.kernels.search import declared_types
from onnxfit.kernels.softmax import replace_softmaxes

# A change of a graph for a device of this kind. It returns a changed copy, or the model itself.
GraphTransform = Callable[[onnx.ModelProto, str], onnx.ModelProto]


def use_kernels(
    model: onnx.ModelProto, device: str, *, keep_rounding: bool = False
) -> onnx.ModelProto:
    """Return the model with the operators in C++, if the library and the device have them."""
    library = library_path() if device == "cpu" else None
    if library is None:
        return model
    return with_kernels(model, has_products(library), keep_rounding=keep_rounding)


# In their order. Graphs that compute with integers are those of inference: onnxruntime may have
# integer kernels for their layers, so their activations are not fused here.
TRANSFORMS: Sequence[GraphTransform] = (
    use_kernels,
    with_rounded_factors,
    with_blocked_convolutions,
    with_fused_activations,
)
INTEGER_TRANSFORMS: Sequence[GraphTransform] = (
    partial(use_kernels, keep_rounding=True),
    with_blocked_convolutions,
)


def with_kernels(
    model: onnx.ModelProto, products: bool = True, *, keep_rounding: bool = True
) -> onnx.ModelProto:
    """Return a copy of a model with operators of the library.

    A model in which no operator can be used is returned itself.

    - `products`: whether the operators that multiply matrices can be used: Product, and those for
      dense convolutions, loops, packed weights and factors of low rank.
    - `keep_rounding`: whether products with packed weights whose `accuracy_level` lets onnxruntime
      round their activations keep doing so, as in the deployed file.
    """
    types = declared_types(model.graph)
    declared = set(types)
    original: Sequence[onnx.NodeProto] = list(model.graph.node)
    nodes = replace_convolutions(model.graph, original, with_dense=products)
    nodes = replace_scans(model.graph, nodes, types) if products else nodes
    if products:
        nodes = replace_packed_products(nodes, types, keep_rounding=keep_rounding)
    nodes = replace_low_rank_gradients(model.graph, nodes, types) if products else nodes
    nodes = replace_pool_gradients(nodes, types)
    nodes = replace_gather_gradients(model.graph, nodes, types)
    nodes = replace_batch_norms(model.graph, nodes, types)
    nodes = replace_layer_norms(model.graph, nodes, types)
    nodes = replace_column_sums(model.graph, nodes, types)
    nodes = replace_softmaxes(model.graph, nodes, types)
    nodes = replace_products(model.graph, nodes, types) if products else nodes
    nodes = replace_roundings(model.graph, nodes, types)
    nodes = fuse_elementwise(model.graph, nodes, types)
    if nodes is original:
        return model
    faster = onnx.ModelProto()
    faster.CopyFrom(model)
    del faster.graph.node[:]
    faster.graph.node.extend(nodes)
    # onnxruntime plans the memory of values of known size.
    faster.graph.value_info.extend(
        helper.make_tensor_value_info(name, *types[name]) for name in types if name not in declared
    )
    remove_unused_nodes(faster.graph)
    if not any(opset.domain == DOMAIN for opset in faster.opset_import):
        faster.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return faster
